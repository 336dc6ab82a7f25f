"""PPO's rewards, advantages and returns by hand, and its value loss over a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from raising import raises
from torch import Tensor

from lockstep.algorithms.ppo import PPO, ValueLoss
from lockstep.config.ppo import PPOConfig, ValueConfig
from lockstep.errors import CheckpointError, TrainError
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


def ppo(**options: Any) -> PPO:
    return PPO(PPOConfig.model_validate({"whiten_advantages": False} | options), max_tokens=8)


def estimates(
    rollouts: list[Rollout],
    values: list[list[float]],
    ref: list[list[float]] | None = None,
    *,
    algorithm: PPO | None = None,
    **options: Any,
) -> Estimates:
    group = RolloutGroup(prompt=Prompt(index=0, token_ids=(5, 6), text=""), rollouts=tuple(rollouts))
    samples = rollout_samples(each.trajectory for each in rollouts)
    algorithm = algorithm or ppo(**options)
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
        kl={"coef": 0.1},
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


def test_a_rollout_that_was_cut_off_is_worth_the_value_of_its_last_state() -> None:
    """V after the last sampled token, 0.5, stands at the document's last entry; gamma = 1/2, lam = 1.

    Cut: delta = 0.125 - 0.5, 1 + 0.25 - 0.25. Ended, with the same value there: 1 - 0.25 at the end."""
    values = [0.0, 0.5, 0.25, 0.5]
    cut = [rollout(1.0, policy(7, 8), finish="length"), rollout(1.0, policy(7, 8))]
    found = estimates(cut, [values, values], gamma=0.5, bootstrap_truncated=True)
    close(found.advantages[0], [0.0, -0.375 + 0.5, 1.0, 0.0])
    close(found.returns[0], [0.0, 0.625, 1.25, 0.0])
    close(found.advantages[1], [0.0, -0.375 + 0.375, 0.75, 0.0])
    off = estimates(cut, [values, values], gamma=0.5)
    close(off.advantages[0], off.advantages[1].tolist())


def test_a_cut_off_second_turn() -> None:
    """The state after the last token is that of the whole document, not that after the tool's."""
    spans = policy(7), Span(author="tool", token_ids=(1, 2)), policy(8)
    found = estimates(
        [rollout(0.0, *spans, finish="length")],
        [[0.0, 0.0, 9.0, 9.0, 0.0, 2.0]],
        gamma=0.5,
        bootstrap_truncated=True,
    )
    close(found.returns[0], [0.0, 0.5, 0.0, 0.0, 1.0, 0.0])


def test_lambda_of_the_returns_is_its_own() -> None:
    """VAPO: returns with lambda 1, advantages with 0: one step ahead."""
    values = [[9.0, 0.5, 0.25, 1.0, 9.0]]
    found = estimates([rollout(2.0, policy(7, 8, 9))], values, lam=0.0, lam_value=1.0)
    close(found.advantages[0], [0.0, -0.25, 0.75, 1.0, 0.0])
    close(found.returns[0], [0.0, 2.0, 2.0, 2.0, 0.0])


def test_lambda_by_length() -> None:
    """alpha = 1/2: 1 - 2 / n is 0 for 1 and 2 tokens, 1/3 for 3 and 1/2 for 4; returns have `lam`."""
    rollouts = [rollout(1.0, policy(*range(7, 7 + n))) for n in (1, 2, 3, 4)]
    values = [[0.5] * (n + 2) for n in (1, 2, 3, 4)]
    found = estimates(rollouts, values, lam_length_alpha=0.5)
    for each, n, lam in zip(found.advantages, (1, 2, 3, 4), (0.0, 0.0, 1 / 3, 0.5), strict=True):
        close(each[1:-1], [0.5 * lam ** (n - 1 - t) for t in range(n)])
    for each in found.returns:
        close(each[1:-1], [1.0] * (len(each) - 2))


def test_a_missing_end_is_charged() -> None:
    rollouts = [rollout(1.0, policy(7), finish="length"), rollout(1.0, policy(7))]
    found = estimates(rollouts, [[0.0] * 3] * 2, missing_end_penalty=0.25)
    assert [float(each[1]) for each in found.returns] == [0.75, 1.0]
    changed, same = found.groups[0].rollouts
    assert changed.reward == 0.75 and changed.rewards == {"test": 1.0, "missing_end": -0.25}
    assert same.reward == 1.0 and same.rewards == {"test": 1.0}


def test_rewards_are_normalised_by_all_so_far_then_bounded() -> None:
    """1 and 3: mean 2, deviation 1. Then 4 and 8: all four have mean 4 and deviation sqrt(26 / 4)."""
    algorithm = ppo(normalize_rewards=True, reward_clip=(-1.0, 1.0))
    assert rewards_after(algorithm, [1.0, 3.0]) == pytest.approx([-1.0, 1.0])
    state = algorithm.state()
    found = rewards_after(algorithm, [4.0, 8.0])
    assert found == pytest.approx([0.0, 1.0]), "4 / sqrt(6.5) is beyond the bound"
    resumed = ppo(normalize_rewards=True, reward_clip=(-9.0, 9.0))
    resumed.load_state(state)
    assert rewards_after(resumed, [4.0, 8.0]) == pytest.approx([0.0, 4.0 / 6.5**0.5])
    with raises(CheckpointError, "wrong-field"):
        resumed.load_state({"kl_coef": 0.0})


def test_the_coefficient_of_kl_follows_its_target() -> None:
    """k1 of the two completions 0.5 - 0.25 and 0.75 nats, their mean 0.5, is twice the target: the error is
    bounded by 0.2, and two rollouts of ten are a fifth of it."""
    algorithm = ppo(kl={"coef": 0.1, "target": 0.25, "horizon": 10})
    rollouts = [rollout(1.0, policy(7, 8)), rollout(1.0, policy(7))]
    refs = [[0.0, -1.0, -0.25, 0.0], [0.0, -1.25, 0.0]]
    zeros = [[0.0] * 4, [0.0] * 3]
    found = estimates(rollouts, zeros, refs, algorithm=algorithm)
    assert found.metrics == pytest.approx({"kl_coef": 0.1, "kl_rollout": 0.5})
    assert algorithm.state()["kl_coef"] == pytest.approx(0.1 * 1.04)
    again = estimates(rollouts, zeros, refs, algorithm=algorithm)
    close(again.returns[1], [0.0, 1.0 - 0.104 * 0.75, 0.0])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"reward_clip": [1.0, 1.0]}, "contradiction: reward_clip"),
        ({"lam": 0.9, "lam_length_alpha": 0.05}, "no-effect: lam"),
        ({"kl": {"target": 6.0}}, "no-effect: kl.target"),
        ({"kl": {"coef": 0.1, "place": "loss", "target": 6.0}}, "no-effect: kl.target"),
        ({"lam_value": 1.1}, "out-of-range: lam_value"),
        ({"missing_end_penalty": -1.0}, "out-of-range: missing_end_penalty"),
    ],
)
def test_options_that_cannot_be_right_are_refused(options: dict[str, Any], text: str) -> None:
    with raises(ValueError, text):
        PPOConfig.model_validate(options)


def rewards_after(algorithm: PPO, rewards: list[float]) -> list[float]:
    """The rewards of one rollout each of these, as the algorithm sees them."""
    rollouts = [rollout(reward, policy(7)) for reward in rewards]
    found = estimates(rollouts, [[0.0] * 3 for _ in rewards], algorithm=algorithm)
    return [each.reward for each in found.groups[0].rollouts]


def test_estimates_need_values_of_all() -> None:
    with raises(TrainError, "missing-values: values", got=0, needed=1):
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
