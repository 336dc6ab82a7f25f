"""PPO (arXiv 1707.06347): GRPO's policy loss with advantages from a value model."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.algorithms.grpo import PolicyAlgorithm
from lockstep.config.ppo import PPOConfig, ValueConfig
from lockstep.errors import CheckpointError, TrainError
from lockstep.ops.advantages import batch_mean_std, gae, value_loss
from lockstep.ops.masks import masked
from lockstep.protocols.train import Estimates, LossOutput, StepStats
from lockstep.schema.batch import PackedBatch, RolloutSample, ValueBatch, trajectory_slices
from lockstep.schema.rollout import Rollout, RolloutGroup

WHITENING_EPS = 1e-8
"""Added to the standard deviation of the advantages, in units of reward. verl and TRL add theirs under the
root."""


class PPO(PolicyAlgorithm):
    """protocols.ValueAlgorithm.

    Each token of the policy is an action, and its state is everything before it, whoever wrote it. Tokens of
    other authors belong to the next state: gamma and lambda are not applied over them. The reward of a
    rollout goes to its last token, and the KL penalty to each token.

    Rewards are normalised, then bounded, then charged with a missing end, overlong punishment and KL.
    """

    def __init__(self, config: PPOConfig, *, max_tokens: int) -> None:
        super().__init__(config, max_tokens=max_tokens)
        self.options = config.resolved()
        self._seen = RunningMoments()

    def advantages(
        self,
        groups: Sequence[RolloutGroup],
        samples: Sequence[RolloutSample],
        *,
        ref_logprobs: Sequence[Tensor] | None = None,
    ) -> tuple[list[RolloutGroup], list[Tensor]]:
        """Raise TrainError: PPO needs values, see `estimates`."""
        raise TrainError(
            "missing-values: PPO's advantages need values; pass a value model to the loop (parts.value)"
        )

    def estimates(
        self,
        groups: Sequence[RolloutGroup],
        samples: Sequence[RolloutSample],
        *,
        values: Sequence[Tensor],
        ref_logprobs: Sequence[Tensor] | None = None,
    ) -> Estimates:
        """See protocols.ValueAlgorithm. Also updates the reward statistics and the KL coefficient for the
        next rollout batch.

        Raises:
            TrainError: the reward has a KL term, and ref_logprobs are missing; or there are not values of all
                rollouts.
        """
        if len(values) != len(samples):
            raise TrainError(
                f"missing-values: there are {len(values)} values for {len(samples)} rollouts; compute the "
                "values of every rollout"
            )
        shaped, penalties = self.shaped(self._scaled(groups), samples, ref_logprobs)
        metrics = self._adapt_kl(penalties) if self._kl_in_reward else {}
        lengths = [len(penalty) for penalty in penalties]
        scan = _Scan(
            token_rewards=_token_rewards(shaped, penalties),
            values=_flat([value[sample.loss_mask] for value, sample in zip(values, samples, strict=True)]),
            final_values=self._final_values(groups, [values[p.stop - 1] for p in trajectory_slices(samples)]),
            cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
            gamma=self.options.gamma,
        )
        advantages = scan.advantages(self._lambda(lengths))
        lam_value = self.options.lam if self.options.lam_value is None else self.options.lam_value
        returns = scan.advantages(lam_value) + scan.values
        if self.options.whiten_advantages:
            advantages = batch_mean_std(advantages, eps=WHITENING_EPS)
        return Estimates(
            groups=shaped,
            advantages=_by_slot(advantages, samples),
            returns=_by_slot(returns, samples),
            metrics=metrics,
        )

    def state(self) -> dict[str, float]:
        """See protocols.ValueAlgorithm."""
        return {"kl_coef": self.kl_coef, **self._seen.state()}

    def load_state(self, state: Mapping[str, float]) -> None:
        """See protocols.ValueAlgorithm."""
        if state.keys() != self.state().keys():
            raise CheckpointError(
                f"wrong-field: PPO's state has {sorted(self.state())}, but the checkpoint has {sorted(state)}"
            )
        self.kl_coef = state["kl_coef"]
        self._seen = RunningMoments.of(state)

    def _scaled(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Return the groups with rewards normalised, clipped and penalised for a missing end."""
        options = self.options
        if options.normalize_rewards:
            self._seen.add([rollout.reward for group in groups for rollout in group.rollouts])
        return [
            dataclasses.replace(group, rollouts=tuple(self._scaled_one(each) for each in group.rollouts))
            for group in groups
        ]

    def _scaled_one(self, rollout: Rollout) -> Rollout:
        reward, extra, options = rollout.reward, {}, self.options
        if options.normalize_rewards:
            reward = self._seen.normalized(reward)
        if options.reward_clip is not None:
            reward = min(max(reward, options.reward_clip[0]), options.reward_clip[1])
        if options.missing_end_penalty and rollout.trajectory.finish_reason == "length":
            extra = {"missing_end": -options.missing_end_penalty}
            reward -= options.missing_end_penalty
        return dataclasses.replace(rollout, reward=reward, rewards={**rollout.rewards, **extra})

    def _final_values(self, groups: Sequence[RolloutGroup], values: Sequence[Tensor]) -> Tensor | None:
        """Return [S], the value after the last token of each rollout. None: 0 for all. values: of the last
        part of each."""
        if not self.options.bootstrap_truncated:
            return None
        ends = [each.trajectory.finish_reason == "length" for group in groups for each in group.rollouts]
        return torch.tensor(
            [float(value[-1]) if cut else 0.0 for value, cut in zip(values, ends, strict=True)],
            dtype=torch.float64,
        )

    def _lambda(self, lengths: Sequence[int]) -> float | Tensor:
        """Return lambda of the advantages, for all rollouts or as [S]."""
        alpha = self.options.lam_length_alpha
        if alpha is None:
            return self.options.lam
        tokens = torch.tensor(lengths, dtype=torch.float64).clamp(min=1)
        return (1.0 - 1.0 / (alpha * tokens)).clamp(min=0.0)

    def _adapt_kl(self, penalties: Sequence[Tensor]) -> dict[str, float]:
        """Adapt the KL coefficient for the next rollout batch (arXiv 1909.08593, section 2.2), and return the
        metrics of this one."""
        rollout_nats = -float(_flat(penalties).sum()) / self.kl_coef / max(1, len(penalties))
        metrics = {"kl_coef": self.kl_coef, "kl_rollout": rollout_nats}
        target, horizon = self.options.kl.target, self.options.kl.horizon
        if target is not None:
            error = min(max(rollout_nats / target - 1.0, -0.2), 0.2)
            self.kl_coef *= 1.0 + error * len(penalties) / horizon
        return metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scan:
    """The arguments of `gae` except lambda; float64."""

    token_rewards: Tensor
    values: Tensor
    final_values: Tensor | None
    cu_seqlens: Tensor
    gamma: float

    def advantages(self, lam: float | Tensor) -> Tensor:
        return gae(
            self.token_rewards,
            self.values,
            self.cu_seqlens,
            gamma=self.gamma,
            lam=lam,
            final_values=self.final_values,
        )


@dataclass(kw_only=True, slots=True)
class RunningMoments:
    """Running mean and standard deviation (the update of Chan et al., 1979)."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared deviations from the mean."""

    @classmethod
    def of(cls, state: Mapping[str, float]) -> RunningMoments:
        """The inverse of `state`."""
        return cls(count=state["reward_count"], mean=state["reward_mean"], squares=state["reward_squares"])

    def state(self) -> dict[str, float]:
        """Return the numbers, for a checkpoint."""
        return {"reward_count": self.count, "reward_mean": self.mean, "reward_squares": self.squares}

    def add(self, numbers: Sequence[float]) -> None:
        """Add numbers."""
        if not numbers:
            return
        mean = statistics.fmean(numbers)
        total, shift = self.count + len(numbers), mean - self.mean
        self.squares += sum((number - mean) ** 2 for number in numbers)
        self.squares += shift**2 * self.count * len(numbers) / total
        self.mean += shift * len(numbers) / total
        self.count = total

    def normalized(self, number: float) -> float:
        """Return (number - mean) / (deviation + 1e-8), with the population variance."""
        deviation = math.sqrt(self.squares / self.count) if self.count else 0.0
        return (number - self.mean) / (deviation + WHITENING_EPS)


def _token_rewards(groups: Sequence[RolloutGroup], penalties: Sequence[Tensor]) -> Tensor:
    """Return [N] float64 over the tokens of all rollouts: the KL penalty of each token, and the rest of the
    reward at the last token of a rollout."""
    rewards = [penalty.double().clone() for penalty in penalties]
    totals = [rollout.reward for group in groups for rollout in group.rollouts]
    for tokens, total in zip(rewards, totals, strict=True):
        if len(tokens):
            tokens[-1] += total - tokens.sum()
    return _flat(rewards)


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.double() for part in parts]) if parts else torch.zeros(0, dtype=torch.float64)


def _by_slot(flat: Tensor, samples: Sequence[RolloutSample]) -> list[Tensor]:
    """Place [N] values of all trained tokens in [L] float32 per sample, 0 in the other slots."""
    placed, lengths = [], [sample.num_trained for sample in samples]
    for sample, part in zip(samples, flat.split(lengths), strict=True):
        placed.append(torch.zeros(len(sample)))
        placed[-1][sample.loss_mask] = part.float()
    return placed


# The token loss of a value model, and its metrics.


class ValueLoss:
    """A TokenLoss for a model with a scalar head: lockstep.ops.advantages.value_loss times loss_weights.

    Raises:
        TrainError: on a call with another kind of batch.
    """

    separable = True
    entropy_grad = False
    terms: tuple[str, ...] = ("clipped",)

    def __init__(self, config: ValueConfig) -> None:
        self.config = config

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, batch: PackedBatch, rows: Tensor | slice
    ) -> LossOutput:
        """See protocols.TokenLoss; `logprobs` are values."""
        batch, config = ValueBatch.of(batch), self.config
        mask = batch.loss_mask[rows]
        tokens = value_loss(
            masked(logprobs, mask),
            masked(batch.returns[rows], mask),
            masked(batch.old_values[rows], mask),
            clip=config.clip,
            kind=config.loss,
            huber_delta=config.huber_delta,
        )
        weighted = tokens.loss * masked(batch.loss_weights[rows], mask)
        return LossOutput(weighted.sum(), tokens.clipped.to(logprobs.dtype)[None])

    def metrics(self, batches: Sequence[PackedBatch], stats: StepStats) -> dict[str, float]:
        """Return error, the mean of |value - return| before the update, and clip_fraction, a share of tokens;
        empty without trained tokens."""
        masks = [b.loss_mask.to(x.device) for b, x in zip(batches, stats.logprobs, strict=True)]
        errors = torch.cat(
            [
                (values - ValueBatch.of(batch).returns.to(values.device))[mask]
                for values, batch, mask in zip(stats.logprobs, batches, masks, strict=True)
            ]
        )
        if not len(errors):
            return {}
        clipped = torch.cat([x[0, mask] for x, mask in zip(stats.terms, masks, strict=True)])
        error, share = torch.stack([errors.abs().mean(), clipped.mean()]).tolist()
        return {"error": error, "clip_fraction": share}
