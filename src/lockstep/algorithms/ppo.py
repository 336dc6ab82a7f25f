"""PPO (arXiv 1707.06347): GRPO's policy loss on advantages that a value model makes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.algorithms.grpo import PolicyAlgorithm
from lockstep.config.ppo import PPOConfig
from lockstep.errors import TrainError
from lockstep.ops.advantages import batch_mean_std, gae
from lockstep.protocols.train import Estimates
from lockstep.schema.batch import RolloutSample
from lockstep.schema.rollout import RolloutGroup

WHITENING_EPS = 1e-8
"""Added to the deviation of the advantages, in units of reward; verl's and TRL's, there under the root."""


class PPO(PolicyAlgorithm):
    """protocols.ValueAlgorithm.

    A token that the policy wrote is an action, and the state before it is what was written until then, by
    whomever. Tokens of others are part of the next state: nothing is discounted, and no lambda applied, over
    them. The reward of a rollout is earned by its last token, and KL by each token.
    """

    def __init__(self, config: PPOConfig, *, max_tokens: int) -> None:
        super().__init__(config, max_tokens=max_tokens)
        self.options = config.resolved()

    def advantages(
        self,
        groups: Sequence[RolloutGroup],
        samples: Sequence[RolloutSample],
        *,
        ref_logprobs: Sequence[Tensor] | None = None,
    ) -> tuple[list[RolloutGroup], list[Tensor]]:
        """Raise TrainError: there are none without values."""
        raise TrainError("PPO has no advantages without values; give the loop a value model (parts.value)")

    def estimates(
        self,
        groups: Sequence[RolloutGroup],
        samples: Sequence[RolloutSample],
        *,
        values: Sequence[Tensor],
        ref_logprobs: Sequence[Tensor] | None = None,
    ) -> Estimates:
        """See protocols.ValueAlgorithm.

        Raises:
            TrainError: the reward has a KL term, and ref_logprobs are missing; or there are not values of all
                rollouts.
        """
        if len(values) != len(samples):
            raise TrainError(
                f"there are values of {len(values)} of {len(samples)} rollouts; score all of them"
            )
        shaped, penalties = self.shaped(groups, samples, ref_logprobs)
        lengths = [sample.num_trained for sample in samples]
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
        token_rewards = _token_rewards(shaped, penalties)
        flat = _flat([value[sample.loss_mask] for value, sample in zip(values, samples, strict=True)])
        options = self.options
        advantages = gae(token_rewards, flat, cu_seqlens, gamma=options.gamma, lam=options.lam)
        returns = advantages + flat
        if options.whiten_advantages:
            advantages = batch_mean_std(advantages, eps=WHITENING_EPS)
        return Estimates(
            groups=shaped,
            advantages=_by_slot(advantages, samples, lengths),
            returns=_by_slot(returns, samples, lengths),
        )


def _token_rewards(groups: Sequence[RolloutGroup], penalties: Sequence[Tensor]) -> Tensor:
    """[N] float64 over the tokens of all rollouts: the KL of each, and at the last one of a rollout the rest
    of its reward."""
    rewards = [penalty.double().clone() for penalty in penalties]
    totals = [rollout.reward for group in groups for rollout in group.rollouts]
    for tokens, total in zip(rewards, totals, strict=True):
        if len(tokens):
            tokens[-1] += total - tokens.sum()
    return _flat(rewards)


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.double() for part in parts]) if parts else torch.zeros(0, dtype=torch.float64)


def _by_slot(flat: Tensor, samples: Sequence[RolloutSample], lengths: Sequence[int]) -> list[Tensor]:
    """[N] of all trained tokens -> [L] float32 per sample, 0 in the other slots."""
    placed = []
    for sample, part in zip(samples, flat.split(list(lengths)), strict=True):
        placed.append(torch.zeros(len(sample)))
        placed[-1][sample.loss_mask] = part.float()
    return placed
