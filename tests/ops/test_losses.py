from __future__ import annotations

import math

import pytest
import torch

from lockstep.ops.losses import (
    cispo,
    geometric_mask,
    importance_log_ratio,
    loss_weights,
    off_policy_mask,
    overlong_penalty,
    ppo_clip,
    rollout_is_weight,
    sapo,
    sequence_log_ratio,
    sequence_sum,
    sequence_token_log_ratio,
)

CU = torch.tensor([0, 3, 5], dtype=torch.int32)
MASK = torch.tensor([True, True, False, True, False])


def test_ppo_clip_by_hand() -> None:
    """Bounds 0.8 and 1.28: only a ratio past the bound that its advantage pushes towards is clipped."""
    ratio = torch.tensor([0.5, 0.5, 1.0, 2.0, 2.0], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 3.0, 1.0, -1.0])
    loss = ppo_clip(ratio, advantages, clip_low=0.2, clip_high=0.28)
    torch.testing.assert_close(loss, torch.tensor([-0.5, 0.8, -3.0, -1.28, 2.0]))
    loss.sum().backward()
    assert ratio.grad.tolist() == [-1.0, 0.0, -3.0, 0.0, 1.0]


def test_dual_clip_by_hand() -> None:
    """c = 3: the loss of a ratio of 5 and an advantage of -2 is 6 and not 10, without a gradient; nothing
    else changes, not even where the advantage is positive."""
    ratio = torch.tensor([5.0, 5.0, 2.0, 0.5], requires_grad=True)
    advantages = torch.tensor([-2.0, 2.0, -2.0, -2.0])
    loss = ppo_clip(ratio, advantages, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    torch.testing.assert_close(loss, torch.tensor([6.0, -2.4, 4.0, 1.6]))
    loss.sum().backward()
    assert ratio.grad.tolist() == [0.0, 0.0, 2.0, 0.0]


def test_cispo_by_hand() -> None:
    """A ratio of 9 counts as 5, and its token keeps its gradient: -5 A."""
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    ratio = torch.tensor([9.0, 0.5], requires_grad=True)
    loss = cispo(logprobs, ratio, torch.tensor([2.0, -1.0]), clip_low=1.0, clip_high=4.0)
    assert loss.tolist() == [10.0, -1.0]
    loss.sum().backward()
    assert logprobs.grad.tolist() == [-10.0, 0.5] and ratio.grad is None


def test_sapo_by_hand() -> None:
    """sigmoid(0) = 1/2 and sigmoid(ln 3) = 3/4: with tau 2 the loss of A = 1 is -1 and -3/2, with tau 1 that
    of A = -1 is 2 and 3; slopes -4 s (1 - s) A are 1 and 3/4 of -A."""
    third = math.log(3.0)
    ratio = torch.tensor([1.0, 1.0 + third / 2, 1.0, 1.0 + third, 5.0], requires_grad=True)
    loss = sapo(ratio, torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0]), tau_pos=2.0, tau_neg=1.0)
    torch.testing.assert_close(loss, torch.tensor([-1.0, -1.5, 2.0, 3.0, 0.0]))
    loss.sum().backward()
    torch.testing.assert_close(ratio.grad, torch.tensor([-1.0, -0.75, 1.0, 0.75, 0.0]))


def test_geometric_mask_by_hand() -> None:
    means = torch.tensor([1.0, 1.99, 2.01, 0.51, 0.49])
    assert geometric_mask(means.log(), low=0.5, high=2.0).tolist() == [1.0, 1.0, 0.0, 1.0, 0.0]


def test_off_policy_mask_by_hand() -> None:
    """Only a negative advantage with a drift above the threshold is dropped; at the threshold it is kept."""
    drift = torch.tensor([0.6, 0.6, 0.6, 0.5, -9.0])
    found = off_policy_mask(drift, torch.tensor([1.0, 0.0, -1.0, -1.0, -1.0]), threshold=0.5)
    assert found.tolist() == [1.0, 1.0, 0.0, 1.0, 1.0]


def test_sequence_token_log_ratio_has_the_value_of_the_sequence_and_the_gradient_of_the_token() -> None:
    log_ratio = torch.tensor([1.0, 0.5, torch.nan, -1.0, 0.0], requires_grad=True)
    found = sequence_token_log_ratio(log_ratio, MASK, CU)
    assert found.tolist() == [0.75, 0.75, 0.75, -1.0, -1.0]
    found.backward(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert log_ratio.grad.tolist() == [1.0, 2.0, 0.0, 4.0, 0.0]


def test_sequence_log_ratio_by_hand() -> None:
    new = torch.tensor([-1.0, -2.0, float("nan"), -3.0, 0.0])
    old = torch.tensor([-2.0, -2.5, 0.0, -2.0, float("nan")])
    log_ratio = importance_log_ratio(new, old, MASK)
    assert log_ratio.tolist() == [1.0, 0.5, 0.0, -1.0, 0.0]
    assert sequence_log_ratio(log_ratio, MASK, CU).tolist() == [0.75, 0.75, 0.75, -1.0, -1.0]
    assert sequence_sum(log_ratio, MASK, CU).tolist() == [1.5, 1.5, 1.5, -1.0, -1.0]


def test_sequence_loss_finite_differences() -> None:
    old = torch.tensor([-1.0, -2.0, 0.0, -3.0, 0.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, 0.0, -2.0, 0.0], dtype=torch.float64)

    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        log_ratio = importance_log_ratio(logprobs, old, MASK)
        ratio = sequence_log_ratio(log_ratio, MASK, CU).exp()
        return ppo_clip(ratio, advantages, clip_low=0.2, clip_high=0.2).sum()

    logprobs = (old + 0.05).requires_grad_()
    assert torch.autograd.gradcheck(loss, logprobs)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("none", [1.0, 1.0, 1.0, 1.0]),
        ("tis", [0.25, 1.0, 1.5, 2.0]),
        ("mask", [0.25, 1.0, 1.5, 0.0]),
        ("icepop", [0.0, 1.0, 1.5, 0.0]),
    ],
)
def test_rollout_is_weight_by_hand(kind: str, expected: list[float]) -> None:
    log_gap = torch.tensor([0.25, 1.0, 1.5, 4.0]).log().requires_grad_()
    weight = rollout_is_weight(log_gap, kind=kind, low=0.5, high=2.0)
    torch.testing.assert_close(weight, torch.tensor(expected))
    assert not weight.requires_grad
    assert rollout_is_weight(torch.tensor([1e4]), kind=kind, low=0.5, high=2.0).isfinite()


def test_overlong_by_hand() -> None:
    """max_tokens 100, buffer 20: up to 80 nothing, 85 a quarter of the penalty, from 100 on all of it."""
    lengths = torch.tensor([10, 80, 85, 100, 120])
    found = overlong_penalty(lengths, max_tokens=100, buffer_tokens=20, penalty=2.0)
    assert found.tolist() == [0.0, 0.0, -0.5, -2.0, -2.0]
    with pytest.raises(ValueError, match="buffer_tokens = 200 exceeds max_tokens = 100"):
        overlong_penalty(lengths, max_tokens=100, buffer_tokens=200, penalty=1.0)


def test_loss_weights_by_hand() -> None:
    """Documents with 1, 3 and 0 trained tokens."""
    masks = [torch.tensor(m, dtype=torch.bool) for m in ([0, 1, 0], [1, 1, 1, 0], [0, 0])]
    ninth = 1 / 9
    for aggregation, expected in {
        "sequence_mean": [[0, 1 / 3, 0], [ninth, ninth, ninth, 0], [0, 0]],
        "sequence_sum": [[0, 1 / 3, 0], [1 / 3, 1 / 3, 1 / 3, 0], [0, 0]],
        "token_mean": [[0, 0.25, 0], [0.25, 0.25, 0.25, 0], [0, 0]],
        "constant": [[0, 1 / 30, 0], [1 / 30, 1 / 30, 1 / 30, 0], [0, 0]],
    }.items():
        found = loss_weights(masks, aggregation=aggregation, max_tokens=10)
        torch.testing.assert_close(found, [torch.tensor(row, dtype=torch.float32) for row in expected])
    with pytest.raises(ValueError, match="max_tokens"):
        loss_weights(masks, aggregation="constant")
