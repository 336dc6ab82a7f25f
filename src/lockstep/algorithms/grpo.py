"""GRPO and its family: every published variant is one setting of the same few options."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep.algorithms import ADVANTAGES
from lockstep.algorithms.metrics import policy_metrics
from lockstep.algorithms.policy_loss import PolicyLoss
from lockstep.algorithms.samples import rollout_samples
from lockstep.config.algorithm import PER_STEP, GRPOConfig
from lockstep.errors import ConfigError, TrainError
from lockstep.ops.advantages import batch_mean_std, group_mean, reward_to_go
from lockstep.ops.kl import kl_k1
from lockstep.ops.losses import loss_weights, overlong_penalty
from lockstep.protocols.train import StepStats
from lockstep.schema.batch import PackedBatch, PolicySample, TrainSample
from lockstep.schema.rollout import Rollout, RolloutGroup


class PolicyAlgorithm:
    """protocols.Algorithm over groups of rollouts.

    Args:
        config: resolved or not.
        max_tokens: completion tokens that sampling allows; overlong and the constant aggregation refer to it.

    Raises:
        ConfigError: when the overlong buffer is longer than max_tokens.
    """

    def __init__(self, config: GRPOConfig, *, max_tokens: int) -> None:
        self.config = config.resolved()
        self.max_tokens = max_tokens
        self.needs_ref = self.config.kl.coef > 0
        self.ref_in_reward = self.needs_ref and self.config.kl.place == "reward"
        assert self.config.advantage is not None
        self._per_group: Callable[[Tensor, Tensor], Tensor] | None = None
        if self.config.advantage not in PER_STEP:
            self._per_group = ADVANTAGES.load(self.config.advantage)
        self._overlong_penalty = self.config.overlong.penalty or 0.0
        self._buffer_tokens = self.config.overlong.buffer_tokens or max(1, max_tokens // 5)
        if self._overlong_penalty > 0 and self._buffer_tokens > max_tokens:
            raise ConfigError(
                f"algorithm.overlong.buffer_tokens = {self._buffer_tokens} exceeds max_tokens = "
                f"{max_tokens}, so every completion would be punished; lower it, or leave it out for a "
                "fifth of max_tokens"
            )

    def keep(self, group: RolloutGroup) -> bool:
        """Return whether to keep the group: under dynamic sampling only if its rewards, before shaping, are
        not all equal."""
        return not self.config.dynamic_sampling or len({rollout.reward for rollout in group.rollouts}) > 1

    def shape(
        self, groups: Sequence[RolloutGroup], *, ref_logprobs: Sequence[Tensor] | None = None
    ) -> list[RolloutGroup]:
        """Add `overlong` and `kl` to the rewards, where the algorithm has them."""
        penalties = self._kl_penalties(groups, ref_logprobs)
        shaped, start = [], 0
        for group in groups:
            stop = start + len(group.rollouts)
            rollouts = tuple(map(self._shape_one, group.rollouts, penalties[start:stop]))
            shaped.append(dataclasses.replace(group, rollouts=rollouts))
            start = stop
        return shaped

    def _shape_one(self, rollout: Rollout, penalties: Tensor) -> Rollout:
        extra: dict[str, float] = {}
        if self._overlong_penalty > 0:
            length = torch.tensor(len(rollout.completion.token_ids))
            settings = {"max_tokens": self.max_tokens, "buffer_tokens": self._buffer_tokens}
            extra["overlong"] = overlong_penalty(length, penalty=self._overlong_penalty, **settings).item()
        if self.ref_in_reward:
            extra["kl"] = penalties.sum().item()
        return dataclasses.replace(
            rollout, reward=rollout.reward + sum(extra.values()), rewards={**rollout.rewards, **extra}
        )

    def _kl_penalties(
        self, groups: Sequence[RolloutGroup], ref_logprobs: Sequence[Tensor] | None
    ) -> list[Tensor]:
        """Per rollout, [n] of its completion tokens: -coef * k1 of KL(rollout || ref), or zeros.

        The engine's logprobs stand for the policy's, because the tokens were sampled from them."""
        if not self.ref_in_reward:
            return [torch.zeros(len(r.completion.token_ids)) for group in groups for r in group.rollouts]
        samples = rollout_samples(groups)
        if ref_logprobs is None or len(ref_logprobs) != len(samples):
            raise TrainError(
                f"algorithm.kl.place = 'reward' needs ref_logprobs of all {len(samples)} rollouts, got "
                f"{'none' if ref_logprobs is None else len(ref_logprobs)}"
            )
        return [
            -self.config.kl.coef * kl_k1(sample.rollout_logprobs[sample.loss_mask], ref[sample.loss_mask])
            for sample, ref in zip(samples, ref_logprobs, strict=True)
        ]

    def samples(
        self, groups: Sequence[RolloutGroup], *, ref_logprobs: Sequence[Tensor] | None = None
    ) -> list[PolicySample]:
        """Compute the advantages of shaped groups; see lockstep.ops.advantages for their formulas."""
        self._check_shaped(groups)
        rewards, mask = _reward_matrix(groups)
        if self._per_group is not None:
            advantages = self._per_group(rewards, mask)
            self._check_advantages(advantages, mask)
            return rollout_samples(groups, advantages=advantages[mask].tolist())
        if self.config.advantage == "group_mean_batch_std":
            rewards = group_mean(rewards, mask)
        penalties = self._kl_penalties(groups, ref_logprobs)
        per_token = _whitened_returns(rewards[mask], penalties)
        return rollout_samples(groups, advantages=per_token)

    def _check_advantages(self, advantages: Tensor, mask: Tensor) -> None:
        problem = None
        if advantages.shape != mask.shape:
            problem = f"shape {list(advantages.shape)} for rewards of shape {list(mask.shape)}"
        elif not bool(advantages[mask].isfinite().all()):
            group = int((~advantages.isfinite() & mask).any(1).nonzero()[0])
            problem = f"an entry that is not finite for group {group}"
        if problem is not None:
            raise TrainError(
                f"algorithm.advantage = {self.config.advantage!r} returned {problem}; return one finite "
                "advantage per rollout"
            )

    def _check_shaped(self, groups: Sequence[RolloutGroup]) -> None:
        names = {"overlong"} if self._overlong_penalty > 0 else set()
        names |= {"kl"} if self.ref_in_reward else set()
        for group in groups:
            for rollout in group.rollouts:
                if not names <= rollout.rewards.keys():
                    raise TrainError(
                        f"prompt {group.prompt.index}: the rewards {sorted(rollout.rewards)} lack "
                        f"{sorted(names)}; call shape before samples"
                    )

    def loss_weights(self, samples: Sequence[TrainSample]) -> list[Tensor]:
        """See lockstep.ops.losses.loss_weights; `samples` are all of one optimizer step."""
        assert self.config.aggregation is not None
        masks = [sample.loss_mask for sample in samples]
        return loss_weights(masks, aggregation=self.config.aggregation, max_tokens=self.max_tokens)

    def loss(self) -> PolicyLoss:
        """Return the loss. It is not separable with sequence-level ratios or corrections: a call must then
        see whole documents."""
        return PolicyLoss(self.config)

    def metrics(self, batches: Sequence[PackedBatch], stats: StepStats) -> dict[str, float]:
        """See lockstep.algorithms.metrics."""
        return policy_metrics(self.loss(), batches, stats)


def _reward_matrix(groups: Sequence[RolloutGroup]) -> tuple[Tensor, Tensor]:
    """Rewards [G, n] float64, and [G, n] bool, True where there is a rollout: some may be missing."""
    width = max((len(group.rollouts) for group in groups), default=0)
    rewards = torch.zeros(len(groups), width, dtype=torch.float64)
    mask = torch.zeros(len(groups), width, dtype=torch.bool)
    for row, group in enumerate(groups):
        values = [rollout.reward for rollout in group.rollouts]
        rewards[row, : len(values)] = torch.tensor(values, dtype=torch.float64)
        mask[row, : len(values)] = True
    return rewards, mask


def _whitened_returns(rewards: Tensor, penalties: Sequence[Tensor]) -> list[Tensor]:
    """REINFORCE++: reward - coef * (KL of this token and those after it), whitened over the step's tokens.

    Args:
        rewards: [S], shaped: the KL of the whole completion is in them already.
        penalties: [n_i] per sample, -coef * KL of each token.

    Returns:
        [n_i] float64 per sample.
    """
    if not penalties:
        return []
    lengths = [len(penalty) for penalty in penalties]
    flat = torch.cat(list(penalties)).double()
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    totals = torch.stack([penalty.double().sum() for penalty in penalties])
    base = (rewards - totals).repeat_interleave(torch.tensor(lengths))
    whitened = batch_mean_std(base + reward_to_go(flat, cu_seqlens))
    return list(torch.split(whitened, lengths))
