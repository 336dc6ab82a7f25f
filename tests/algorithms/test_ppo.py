"""PPO's rewards, advantages and returns by hand, and its value loss over a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.algorithms.ppo import PPO
from lockstep.algorithms.value_loss import ValueLoss
from lockstep.config.ppo import PPOConfig, ValueConfig
from lockstep.errors import TrainError
from lockstep.ops.losses import loss_weights
from lockstep.packing import pack
from lockstep.protocols.train import Estimates
from lockstep.schema.batch import ValueSample, rollout_samples
from lockstep.schema.rollout import FinishReason, Prompt, Rollout, RolloutGroup, Span, Trajectory


def policy(*ids: int) -> Span:
    return Span(author="policy", token_ids=ids, logprobs=tuple(-0.5 for _ in ids), policy_version=0)


def rollout(reward: float, *spans: Span, finish: FinishReason = "stop") -> Rollout:
    whole = (Span(author="prompt", token_ids=(5, 6)), *spans)
    trajectory = Trajectory(
        spans=whole, finish_reason=finish, stop_reason=None, text=None, seed=0, engine="test"
    )
    return Rollout(trajectory=trajectory, reward=reward, rewards={"test": reward})


def estimates(
    rollouts: list[Rollout], values: list[list[float]], ref: list[list[float]] | None = None, **options: Any
) -> Estimates:
    group = RolloutGroup(prompt=Prompt(index=0, token_ids=(5, 6), text=""), rollouts=tuple(rollouts))
    samples = rollout_samples(each.trajectory for each in rollouts)
    algorithm = PPO(PPOConfig(whiten_advantages=False).model_copy(update=options), max_tokens=8)
    refs = None if ref is None else [torch.tensor(each) for each in ref]
    return algorithm.estimates(
        [group], samples, values=[torch.tensor(each) for each in values], ref_logprobs=refs
    )


def close(found: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(found, torch.tensor(expected))


def test_one_turn_by_hand() -> None:
    """Prompt 5 6, completion 7 8 9; V of the states before them 0.5, 0.25, 1; reward 2, gamma = lam = 1/2.

    delta = 0.125 - 0.5, 0.5 - 0.25, 2 - 1; A = delta + A' / 4."""
    found = estimates([rollout(2.0, policy(7, 8, 9))], [[9.0, 0.5, 0.25, 1.0, 9.0]], gamma=0.5, lam=0.5)
    close(found.advantages[0], [0.0, -0.375 + 0.5 / 4, 0.5, 1.0, 0.0])
    close(found.returns[0], [0.0, 0.25, 0.75, 2.0, 0.0])


def test_tokens_of_others_are_part_of_the_next_state() -> None:
    """Policy, tool, policy: nothing is discounted over the tool's tokens, and they have no advantage."""
    spans = policy(7, 8), Span(author="tool", token_ids=(1, 2, 3)), policy(9)
    values = [0.0, 0.5, 0.25, 7.0, 7.0, 7.0, 1.0, 7.0]
    found = estimates([rollout(2.0, *spans)], [values], gamma=0.5, lam=0.5)
    close(found.advantages[0], [0.0, -0.25, 0.5, 0.0, 0.0, 0.0, 1.0, 0.0])
    close(found.returns[0], [0.0, 0.25, 0.75, 0.0, 0.0, 0.0, 2.0, 0.0])


def test_kl_is_charged_to_each_token() -> None:
    """k1 = rollout - ref = 0.5, -0.25 nats, coefficient 0.1; the reward of 1 comes at the end. gamma = lam =
    1: the return of a token is all that follows."""
    found = estimates(
        [rollout(1.0, policy(7, 8))],
        [[0.0] * 4],
        ref=[[0.0, -1.0, -0.25, 0.0]],
        kl=PPOConfig.model_validate({"kl": {"coef": 0.1}}).kl,
    )
    close(found.returns[0], [0.0, 1.0 - 0.05 + 0.025, 1.0 + 0.025, 0.0])
    changed = found.groups[0].rollouts[0]
    assert changed.rewards["kl"] == pytest.approx(-0.025) and changed.reward == pytest.approx(0.975)


def test_whitened_advantages_leave_returns_alone() -> None:
    rollouts = [rollout(1.0, policy(7, 8)), rollout(-3.0, policy(7))]
    plain = estimates(rollouts, [[0.0, 0.5, 0.25, 0.0], [0.0, 1.0, 0.0]])
    white = estimates(rollouts, [[0.0, 0.5, 0.25, 0.0], [0.0, 1.0, 0.0]], whiten_advantages=True)
    tokens = torch.stack([plain.advantages[0][1], plain.advantages[0][2], plain.advantages[1][1]]).double()
    expected = (tokens - tokens.mean()) / tokens.std()
    found = torch.stack([white.advantages[0][1], white.advantages[0][2], white.advantages[1][1]]).double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for a, b in zip(plain.returns, white.returns, strict=True):
        assert torch.equal(a, b)


def test_estimates_need_values_of_all() -> None:
    with pytest.raises(TrainError, match="values of 0 of 1 rollouts"):
        estimates([rollout(1.0, policy(7))], [])


def value_sample(number: int, returns: list[float], old: list[float]) -> ValueSample:
    length = len(returns) + 2
    mask = torch.zeros(length, dtype=torch.bool)
    mask[1:-1] = True
    padded = [torch.tensor([torch.nan, *each, torch.nan]) for each in (returns, old)]
    return ValueSample(
        token_ids=torch.arange(length),
        loss_mask=mask,
        sample_id=number,
        returns=padded[0],
        old_values=padded[1],
    )


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("token_mean", (0.5 + 2.0 + 0.0) / 3), ("sequence_mean", (1.25 + 0.0) / 2)]
)
def test_value_loss_is_normalised_over_the_whole_step(aggregation: str, expected: float) -> None:
    """Two documents, of two tokens and of one: the same loss in one micro-batch as in two. What is masked may
    be NaN."""
    samples = [value_sample(0, [1.0, 2.0], [0.0, 0.0]), value_sample(1, [0.5], [0.5])]
    weights = loss_weights([sample.loss_mask for sample in samples], aggregation=aggregation)  # type: ignore[arg-type]
    loss = ValueLoss(ValueConfig(clip=0.0))
    together = [pack(samples, weights)]
    apart = [pack([sample], [weight]) for sample, weight in zip(samples, weights, strict=True)]
    for batches in (together, apart):
        total = 0.0
        for batch in batches:
            values = torch.where(batch.loss_mask, batch.old_values, torch.nan)
            total += loss(values, torch.zeros_like(values), batch, slice(None)).loss.item()
        assert total == pytest.approx(expected)
