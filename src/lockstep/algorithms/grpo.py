"""GRPO and its family: every published variant is one setting of the same few options."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep.algorithms import ADVANTAGES
from lockstep.algorithms.policy_loss import PolicyLoss
from lockstep.config.algorithm import PER_STEP, GRPOConfig
from lockstep.errors import ConfigError, TrainError
from lockstep.ops.advantages import batch_mean_std, group_mean, normalize_then_sum, reward_to_go
from lockstep.ops.losses import kl_k1, loss_weights, overlong_penalty
from lockstep.schema.batch import RolloutSample, TrainSample, trajectory_slices
from lockstep.schema.rollout import RolloutGroup


class PolicyAlgorithm:
    """protocols.Algorithm over groups of rollouts.

    Args:
        config: with or without published defaults filled in.
        max_tokens: the sampling limit of a completion, used by overlong and the constant aggregation.

    Raises:
        ConfigError: when the overlong buffer is longer than max_tokens.
    """

    def __init__(self, config: GRPOConfig, *, max_tokens: int) -> None:
        self.config = config.resolved()
        self.max_tokens = max_tokens
        self.needs_ref = self.config.kl.coef > 0
        self._loss = PolicyLoss(self.config)
        self._kl_in_reward = self.needs_ref and self.config.kl.place == "reward"
        self.kl_coef = self.config.kl.coef
        """Current coefficient of a KL term in the reward."""
        assert self.config.advantage is not None
        self._per_group: Callable[[Tensor, Tensor], Tensor] | None = None
        if self.config.advantage not in (*PER_STEP, "gae"):
            self._per_group = ADVANTAGES.load(self.config.advantage)
        self._each_by_itself = self.config.multi_objective_aggregation == "normalize_then_sum"
        self._overlong_penalty = self.config.overlong.penalty or 0.0
        self._buffer_tokens = self.config.overlong.buffer_tokens or max(1, max_tokens // 5)
        if self._overlong_penalty > 0 and self._buffer_tokens > max_tokens:
            raise ConfigError(
                f"out-of-range: algorithm.overlong.buffer_tokens = {self._buffer_tokens} exceeds max_tokens "
                f"= {max_tokens}, so every completion would be penalised; lower it, or leave it out to use "
                "a fifth of max_tokens"
            )

    def keep(self, group: RolloutGroup) -> bool:
        """Return whether to keep the group. Dynamic sampling keeps it only if its unshaped rewards are not
        all equal: the totals, or any single weighted reward if each is normalised by itself."""
        if not self.config.dynamic_sampling:
            return True
        if self._each_by_itself:
            return any(
                len({rollout.rewards.get(name) for rollout in group.rollouts}) > 1
                for name in _reward_weights([group])
            )
        return len({rollout.reward for rollout in group.rollouts}) > 1

    def advantages(
        self,
        groups: Sequence[RolloutGroup],
        samples: Sequence[RolloutSample],
        *,
        ref_logprobs: Sequence[Tensor] | None = None,
    ) -> tuple[list[RolloutGroup], list[Tensor]]:
        """Return the groups with the algorithm's `overlong` and `kl` rewards added, and their advantages. See
        protocols.Algorithm, and lockstep.ops.advantages for the formulas.

        Raises:
            TrainError: the reward has a KL term, and ref_logprobs are missing; or an estimator of the user's
                returned something else than one finite advantage per rollout.
        """
        groups, penalties = self.shaped(groups, samples, ref_logprobs)
        if not samples:
            return groups, []
        rewards, present = _reward_matrix(groups)
        if self._per_group is None:
            if self.config.advantage == "group_mean_batch_std":
                rewards = group_mean(rewards, present)
            per_token = torch.cat(_whitened_returns(rewards[present], penalties))
        else:
            values = self._group_advantages(groups, rewards, present)[present]
            per_token = values.repeat_interleave(torch.tensor([len(penalty) for penalty in penalties]))
        mask = torch.cat([sample.loss_mask for sample in samples])
        advantages = torch.zeros(len(mask))
        advantages[mask] = per_token.float()
        return groups, list(advantages.split([len(sample) for sample in samples]))

    def _group_advantages(self, groups: Sequence[RolloutGroup], rewards: Tensor, present: Tensor) -> Tensor:
        """Return [G, n] advantages of an estimator that compares rewards within a group; arbitrary where
        `present` is False."""
        assert self._per_group is not None
        if not self._each_by_itself:
            return self._estimated(rewards, present)
        weights, each = _reward_weights(groups), []
        for name in weights:
            each.append(self._estimated(*_reward_matrix(groups, name)))
        if not each:
            return torch.zeros_like(rewards)
        factors = torch.tensor(list(weights.values()), dtype=rewards.dtype)
        return normalize_then_sum(torch.stack(each), factors, present)

    def shaped(
        self,
        groups: Sequence[RolloutGroup],
        samples: Sequence[RolloutSample],
        ref_logprobs: Sequence[Tensor] | None,
    ) -> tuple[list[RolloutGroup], list[Tensor]]:
        """Return the groups with the algorithm's own rewards added, and per rollout the KL penalty of each
        policy token, over its parts in order: [n], -coef * KL, or 0 without KL in the reward."""
        penalties = [torch.zeros(sample.num_trained) for sample in samples]
        if self._kl_in_reward:
            penalties = self._kl_penalties(samples, ref_logprobs)
        slices = trajectory_slices(samples)
        if len(slices) < len(samples):
            penalties = [torch.cat(penalties[parts]) for parts in slices]
        if self._kl_in_reward or self._overlong_penalty:
            groups = self._shaped(groups, penalties)
        return list(groups), penalties

    def _shaped(self, groups: Sequence[RolloutGroup], penalties: Sequence[Tensor]) -> list[RolloutGroup]:
        """Return the groups with the algorithm's own rewards added."""
        lengths = torch.tensor([len(penalty) for penalty in penalties])
        limits = {"max_tokens": self.max_tokens, "buffer_tokens": self._buffer_tokens}
        overlong = overlong_penalty(lengths, penalty=self._overlong_penalty, **limits).tolist()
        shaped, index = [], itertools.count()
        for group in groups:
            rollouts = []
            for rollout, i in zip(group.rollouts, index, strict=False):
                extra = {"overlong": overlong[i]} if self._overlong_penalty else {}
                extra |= {"kl": penalties[i].sum().item()} if self._kl_in_reward else {}
                reward, rewards = rollout.reward + sum(extra.values()), {**rollout.rewards, **extra}
                rollouts.append(dataclasses.replace(rollout, reward=reward, rewards=rewards))
            shaped.append(dataclasses.replace(group, rollouts=tuple(rollouts)))
        return shaped

    def _kl_penalties(
        self, samples: Sequence[RolloutSample], ref_logprobs: Sequence[Tensor] | None
    ) -> list[Tensor]:
        """Return -coef * k1 of KL(rollout || ref) per rollout, [n] over the policy's tokens.

        It uses the engine's logprobs, because the tokens were sampled from them."""
        if ref_logprobs is None or len(ref_logprobs) != len(samples):
            raise TrainError(
                f"missing-values: algorithm.kl.place = 'reward' needs ref_logprobs for all {len(samples)} "
                f"rollouts, got {'none' if ref_logprobs is None else len(ref_logprobs)}"
            )
        return [
            -self.kl_coef * kl_k1(sample.rollout_logprobs[sample.loss_mask], ref[sample.loss_mask])
            for sample, ref in zip(samples, ref_logprobs, strict=True)
        ]

    def _estimated(self, rewards: Tensor, mask: Tensor) -> Tensor:
        """Return the advantages of one reward from an estimator, which may be user code."""
        assert self._per_group is not None
        try:
            advantages = self._per_group(rewards, mask)
        except Exception as error:  # the user's function may raise anything
            if ":" not in str(self.config.advantage):
                raise
            raise TrainError(
                f"wrong-result: algorithm.advantage = {self.config.advantage!r} raised "
                f"{type(error).__name__} for rewards of shape {list(rewards.shape)}: {error}; correct the "
                "function"
            ) from error
        self._check_advantages(advantages, mask)
        return advantages

    def _check_advantages(self, advantages: Tensor, mask: Tensor) -> None:
        problem = None
        if not isinstance(advantages, Tensor):
            problem = f"a {type(advantages).__name__} instead of a tensor"
        elif advantages.shape != mask.shape:
            problem = f"advantages of shape {list(advantages.shape)} for rewards of shape {list(mask.shape)}"
        elif not bool(advantages[mask].isfinite().all()):
            group = int((~advantages.isfinite() & mask).any(1).nonzero()[0])
            problem = f"a non-finite advantage for group {group}"
        if problem is not None:
            raise TrainError(
                f"wrong-result: algorithm.advantage = {self.config.advantage!r} returned {problem}; return "
                "one finite advantage per rollout"
            )

    def loss_weights(self, samples: Sequence[TrainSample]) -> list[Tensor]:
        """See lockstep.ops.losses.loss_weights; `samples` are all those of one optimizer step. Under
        mask_truncated, no token of a truncated completion is trained on."""
        assert self.config.aggregation is not None
        masks = [sample.loss_mask for sample in samples]
        if self.config.mask_truncated:
            masks = [
                torch.zeros_like(mask) if isinstance(sample, RolloutSample) and sample.truncated else mask
                for mask, sample in zip(masks, samples, strict=True)
            ]
        return loss_weights(
            masks,
            aggregation=self.config.aggregation,
            max_tokens=self.max_tokens,
            sequences=trajectory_slices(samples),
        )

    def loss(self) -> PolicyLoss:
        """Return the loss. With sequence-level ratios or corrections it is not separable: each call must
        cover whole documents."""
        return self._loss


def _reward_weights(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Return the non-zero weights of rewards, by name, sorted by name."""
    weights: dict[str, float] = {}
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        for name in rollout.rewards:
            weights.setdefault(name, rollout.weights.get(name, 1.0))
    return {name: weights[name] for name in sorted(weights) if weights[name] != 0.0}


def _reward_matrix(groups: Sequence[RolloutGroup], name: str | None = None) -> tuple[Tensor, Tensor]:
    """Return rewards [G, n] float64 and [G, n] bool, False for missing rollouts.

    Args:
        name: a reward that every rollout has; None: the total.
    """
    width = max((len(group.rollouts) for group in groups), default=0)
    rewards = torch.zeros(len(groups), width, dtype=torch.float64)
    mask = torch.zeros(len(groups), width, dtype=torch.bool)
    for row, group in enumerate(groups):
        values = [r.reward if name is None else r.rewards[name] for r in group.rollouts]
        rewards[row, : len(values)] = torch.tensor(values, dtype=torch.float64)
        mask[row, : len(values)] = True
    return rewards, mask


def _whitened_returns(rewards: Tensor, penalties: Sequence[Tensor]) -> list[Tensor]:
    """REINFORCE++: reward - coef * (KL of this token and those after it), whitened over the step's tokens.

    Args:
        rewards: [S], shaped: they already include the KL of the whole completion.
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
