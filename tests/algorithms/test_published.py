"""The gradient of every token under every published name, worked by hand from the paper's formula.

One prompt, max_tokens 10, two rollouts: 2 tokens with reward 1, and 8 tokens with reward 0. Off the policy
the importance ratios of their tokens are 1.1, 1 and 0.5, 1.1, 1, 1, 1, 1, 1, 1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from sampled import completion, group, rollout

from lockstep.algorithms.grpo import PolicyAlgorithm
from lockstep.config.algorithm import PUBLISHED, GRPOConfig
from lockstep.packing import pack
from lockstep.schema.batch import policy_samples, rollout_samples

LENGTHS, REWARDS = (2, 8), (1.0, 0.0)
RATIOS = ([1.1, 1.0], [0.5, 1.1] + [1.0] * 6)

A = 0.5 / (math.sqrt(0.5) + 1e-4)
"""GRPO: rewards 1 and 0 have mean 1/2 and standard deviation sqrt(1/2) with n - 1."""
WHITE = math.sqrt((2 * 0.8**2 + 8 * 0.2**2) / 9) + 1e-4
"""REINFORCE++: rewards of the ten tokens have mean 0.2 and squared distances 2 x 0.8^2 + 8 x 0.2^2 = 1.6."""
W1, W2 = 0.8 / WHITE, 0.2 / WHITE


def slope(x: float) -> float:
    """4 s (1 - s) with s = sigmoid(x); 1 at x = 0."""
    return 1.0 / math.cosh(x / 2) ** 2


ON_POLICY: dict[str, tuple[float, float]] = {
    "grpo": (-A / (2 * 2), A / (2 * 8)),  # 1/G sum_i 1/|o_i| sum_t A_i
    "dr_grpo": (-0.5 / (2 * 10), 0.5 / (2 * 10)),  # 1/G sum_i sum_t (r_i - mean), over max_tokens
    "dapo": (-A / 10, A / 10),  # 1/sum|o_i| sum_i sum_t A_i
    "rloo": (-1.0 / 2, 1.0 / 2),  # 1/k sum_i (r_i - mean of the others) sum_t grad log pi
    "reinforce++": (-W1 / 10, W2 / 10),
    "reinforce++-baseline": (-W1 / 10, W2 / 10),  # of one group: the group's mean goes away in whitening
    "gspo": (-A / (2 * 2), A / (2 * 8)),  # 1/G sum_i s_i A_i, grad s_i = s_i / |o_i| per token
    "gspo_token": (-A / (2 * 2), A / (2 * 8)),  # 1/G sum_i 1/|o_i| sum_t s_it A_it, grad s_it = s_i
    "cispo": (-A / 10, A / 10),
    "sapo": (-A / (2 * 2), A / (2 * 8)),  # grpo's: the gate has slope 1 at ratio 1
}
"""d loss / d logprob of each token of the first rollout, and of the second."""

OFF_POLICY: dict[str, tuple[list[float], list[float]]] = {
    # a ratio of 0.5 below 1 - 0.2 with A < 0 is clipped, and has no gradient
    "grpo": ([-1.1 * A / 4, -A / 4], [0.0, 1.1 * A / 16] + [A / 16] * 6),
    "dr_grpo": ([-1.1 / 40, -1 / 40], [0.0, 1.1 / 40] + [1 / 40] * 6),
    "dapo": ([-1.1 * A / 10, -A / 10], [0.0, 1.1 * A / 10] + [A / 10] * 6),
    # ratios of whole rollouts: 1.1, and 0.55, which is clipped
    "rloo": ([-1.1 / 2] * 2, [0.0] * 8),
    "reinforce++": ([-1.1 * W1 / 10, -W1 / 10], [0.0, 1.1 * W2 / 10] + [W2 / 10] * 6),
    "reinforce++-baseline": ([-1.1 * W1 / 10, -W1 / 10], [0.0, 1.1 * W2 / 10] + [W2 / 10] * 6),
    # geometric means sqrt(1.1) = 1.049 and 0.55^(1/8) = 0.928 are far outside of 1 - 3e-4, 1 + 4e-4
    "gspo": ([0.0] * 2, [0.0] * 8),
    "gspo_token": ([0.0] * 2, [0.0] * 8),
    # no token loses its gradient
    "cispo": ([-1.1 * A / 10, -A / 10], [0.5 * A / 10, 1.1 * A / 10] + [A / 10] * 6),
    # ratio times 4 s (1 - s), s = sigmoid(tau (ratio - 1)), tau = 1 where A > 0, else 1.05
    "sapo": (
        [-1.1 * slope(0.1) * A / 4, -A / 4],
        [0.5 * slope(1.05 * -0.5) * A / 16, 1.1 * slope(1.05 * 0.1) * A / 16] + [A / 16] * 6,
    ),
}


def gradients(
    ratios: Any = None, *, token_advantages: Sequence[float] | None = None, **options: Any
) -> list[list[float]]:
    """d loss / d logprob per token of each rollout; token_advantages: of all ten tokens, in their place."""
    algorithm = PolicyAlgorithm(GRPOConfig(**options), max_tokens=10)
    completions = [completion((1, 2), range(3, 3 + length)) for length in LENGTHS]
    sampled = group([rollout(c, r) for c, r in zip(completions, REWARDS, strict=True)])
    rollouts = rollout_samples(each.trajectory for each in sampled.rollouts)
    _, advantages = algorithm.advantages([sampled], rollouts)
    samples = policy_samples(rollouts, advantages)
    batch = pack(samples, algorithm.loss_weights(samples))
    if token_advantages is not None:
        spread = batch.advantages.clone()
        spread[batch.loss_mask] = torch.tensor(token_advantages)
        batch = dataclasses.replace(batch, advantages=spread)
    logprobs = torch.where(batch.loss_mask, -1.0, 0.0)
    if ratios is not None:
        old = logprobs.clone()
        old[batch.loss_mask] -= torch.tensor([w for row in ratios for w in row]).log()
        batch = dataclasses.replace(batch, old_logprobs=old)
    logprobs.requires_grad_()
    algorithm.loss()(logprobs, torch.zeros_like(logprobs), batch, slice(None)).loss.backward()
    return [part.tolist() for part in logprobs.grad[batch.loss_mask].split(LENGTHS)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_gradients_on_the_policy(name: str) -> None:
    first, second = ON_POLICY[name]
    for found, expected in zip(gradients(name=name), ([first] * 2, [second] * 8), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", PUBLISHED)
def test_gradients_off_the_policy(name: str) -> None:
    for found, expected in zip(gradients(RATIOS, name=name), OFF_POLICY[name], strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_gspo_within_its_clip(name: str) -> None:
    """Each token of a rollout has the rollout's geometric mean ratio."""
    first, second = gradients(RATIOS, name=name, clip_low=0.2, clip_high=0.2)
    assert first == pytest.approx([-math.sqrt(1.1) * A / 4] * 2, rel=1e-5)
    assert second == pytest.approx([0.55**0.125 * A / 16] * 8, rel=1e-5)


def test_sequence_sum_is_rloo_on_the_policy_and_clips_tokens_off_it() -> None:
    options = {"name": "rloo", "ratio": "token", "aggregation": "sequence_sum"}
    assert gradients(**options) == [[-0.5] * 2, [0.5] * 8]
    first, second = gradients(RATIOS, **options)
    assert first == pytest.approx([-1.1 / 2, -1 / 2], rel=1e-6)
    assert second == pytest.approx([0.0, 1.1 / 2] + [0.5] * 6, rel=1e-6)


def test_dual_clip_holds_what_moves_against_a_negative_advantage() -> None:
    """Ratios of 4 in both rollouts: with A > 0 it is clipped at 1.2 anyway, with A < 0 only by c = 3."""
    ratios = ([4.0, 1.0], [4.0, 2.0] + [1.0] * 6)
    plain, held = (gradients(ratios, name="dapo", dual_clip=c) for c in (None, 3.0))
    assert plain[0] == held[0] == pytest.approx([0.0, -A / 10], rel=1e-5)
    assert plain[1] == pytest.approx([4 * A / 10, 2 * A / 10] + [A / 10] * 6, rel=1e-5)
    assert held[1] == pytest.approx([0.0, 2 * A / 10] + [A / 10] * 6, rel=1e-5)


TOKEN_MEAN: dict[str, Any] = {"aggregation": "token_mean"}
OTHER_FRAMEWORKS: dict[str, tuple[dict[str, Any], tuple[float, float]]] = {
    # verl's agg_loss over a whole mini-batch, with its default clip_ratio_c = 3
    "verl grpo, token-mean": (TOKEN_MEAN | {"dual_clip": 3.0}, (-A / 10, A / 10)),
    "verl grpo, seq-mean-token-sum": ({"aggregation": "sequence_sum", "dual_clip": 3.0}, (-A / 2, A / 2)),
    "verl grpo, seq-mean-token-mean": ({"aggregation": "sequence_mean"}, (-A / 4, A / 16)),
    "verl grpo without std": (TOKEN_MEAN | {"advantage": "group_mean"}, (-0.5 / 10, 0.5 / 10)),
    "verl rloo, token-mean": (TOKEN_MEAN | {"advantage": "leave_one_out", "dual_clip": 3.0}, (-0.1, 0.1)),
    "verl gspo": ({"ratio": "sequence_token", "aggregation": "sequence_mean"}, (-A / 4, A / 16)),
    "verl cispo": (TOKEN_MEAN | {"objective": "cispo"}, (-A / 10, A / 10)),
    # OpenRLHF's aggregate_loss with the tokens of the whole batch
    "OpenRLHF group_norm": (TOKEN_MEAN, (-A / 10, A / 10)),
    "OpenRLHF dr_grpo": (TOKEN_MEAN | {"advantage": "group_mean"}, (-0.5 / 10, 0.5 / 10)),
    "OpenRLHF rloo": (TOKEN_MEAN | {"advantage": "leave_one_out"}, (-0.1, 0.1)),
    # rewards 1 and 0 of one prompt: the std of the step is the group's
    "TRL scale_rewards batch": (TOKEN_MEAN | {"advantage": "group_mean_step_std"}, (-A / 10, A / 10)),
}


@pytest.mark.parametrize("row", OTHER_FRAMEWORKS)
def test_rows_of_coming_from_by_hand(row: str) -> None:
    options, expected = OTHER_FRAMEWORKS[row]
    for found, value, length in zip(gradients(**options), expected, LENGTHS, strict=True):
        assert found == pytest.approx([value] * length, rel=1e-5)
    if "dual_clip" in options:  # a ratio of 4 with a negative advantage has no gradient, one of 2 has twice
        ratios = ([1.0, 1.0], [4.0, 2.0] + [1.0] * 6)
        clipped = gradients(ratios, **options)[1]
        assert clipped == pytest.approx([0.0, 2 * expected[1]] + [expected[1]] * 6, rel=1e-5)


def gspo_of_verl(ratios: Any, advantages: Sequence[float], *, clip: float) -> list[list[float]]:
    """`compute_policy_loss_gspo` of verl/trainer/ppo/core_algos.py, seq-mean-token-mean."""
    logprobs = [torch.full((length,), -1.0, requires_grad=True) for length in LENGTHS]
    losses = []
    for row, logprob, advantage in zip(
        ratios, logprobs, torch.tensor(advantages).split(LENGTHS), strict=True
    ):
        old = logprob.detach() - torch.tensor(row).log()
        of_sequence = (logprob - old).mean()
        ratio = (logprob - logprob.detach() + of_sequence.detach()).clamp(max=10.0).exp()
        clipped = ratio.clamp(1 - clip, 1 + clip)
        losses.append(torch.maximum(-advantage * ratio, -advantage * clipped).mean())
    torch.stack(losses).mean().backward()
    return [logprob.grad.tolist() for logprob in logprobs if logprob.grad is not None]


def test_gspo_of_verl_is_that_of_tokens() -> None:
    """Advantages that differ within a completion tell the two apart: with the ratio of the sequence every
    token has the gradient of their mean."""
    advantages = [1.0, 0.2, -0.3, -0.5, 0.4, -0.1, 0.7, 0.1, -0.6, 0.3]
    options: dict[str, Any] = {"aggregation": "sequence_mean", "clip_low": 0.2, "clip_high": 0.2}
    verl = gspo_of_verl(RATIOS, advantages, clip=0.2)
    found = gradients(RATIOS, token_advantages=advantages, ratio="sequence_token", **options)
    for ours, theirs in zip(found, verl, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    of_sequence = gradients(RATIOS, token_advantages=advantages, ratio="sequence", **options)
    assert of_sequence[0][0] == of_sequence[0][1] and of_sequence[0] != pytest.approx(verl[0], rel=0.1)
