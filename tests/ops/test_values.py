"""Value losses by hand and against the peers' formulas, written out again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lockstep.ops.advantages import explained_variance, value_loss


def test_value_loss_by_hand() -> None:
    """Moved by 0.2 within the bound; by 1.0, away from the return; by 1.0 towards it, counted as 0.5; by 1.0
    past it, where the bounded value is nearer and the larger loss counts."""
    old = torch.tensor([0.0, 0.0, 0.0, 0.0])
    returns = torch.tensor([1.0, -1.0, 2.0, 0.5])
    values = torch.tensor([0.2, 1.0, 1.0, 1.0], requires_grad=True)
    found = value_loss(values, returns, old, clip=0.5)
    torch.testing.assert_close(found.loss, torch.tensor([0.32, 2.0, 1.125, 0.125]))
    assert found.clipped.tolist() == [False, False, True, False]
    found.loss.sum().backward()
    assert values.grad is not None
    torch.testing.assert_close(values.grad, torch.tensor([-0.8, 2.0, 0.0, 0.5]))


def test_without_a_bound_it_is_half_the_square_or_hubers() -> None:
    values, returns = torch.tensor([0.0, 0.0, 0.0]), torch.tensor([0.5, -2.0, 3.0])
    assert value_loss(values, returns, values).loss.tolist() == [0.125, 2.0, 4.5]
    huber = value_loss(values, returns, values, kind="huber", huber_delta=2.0)
    assert huber.loss.tolist() == [0.125, 2.0, 4.0]
    theirs = torch.nn.functional.huber_loss(values, returns, reduction="none", delta=2.0)
    torch.testing.assert_close(huber.loss, theirs)


def verl(values: Tensor, returns: Tensor, old: Tensor, clip: float) -> Tensor:
    """verl/trainer/ppo/core_algos.py, compute_value_loss, before the mean."""
    clipped = torch.clamp(values, old - clip, old + clip)
    return 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2)


def openrlhf(values: Tensor, returns: Tensor, old: Tensor, clip: float) -> Tensor:
    """openrlhf/models/loss.py, ValueLoss, before the mean."""
    clipped = old + (values - old).clamp(-clip, clip)
    return 0.5 * torch.max((clipped - returns) ** 2, (values - returns) ** 2)


@pytest.mark.parametrize("theirs", [verl, openrlhf])
def test_value_loss_is_the_peers(theirs: object) -> None:
    generator = torch.Generator().manual_seed(0)
    values, returns, old = torch.randn(3, 200, generator=generator, dtype=torch.float64)
    ours, other = values.clone().requires_grad_(), values.clone().requires_grad_()
    found, expected = value_loss(ours, returns, old, clip=0.5).loss, theirs(other, returns, old, 0.5)  # type: ignore[operator]
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(ours.grad, other.grad)


def test_explained_variance() -> None:
    returns, mask = torch.tensor([1.0, 3.0, 5.0, torch.nan]), torch.tensor([True, True, True, False])
    assert explained_variance(returns, returns, mask).item() == 1.0
    assert explained_variance(torch.full((4,), 7.0), returns, mask).item() == 0.0
    assert explained_variance(-returns, returns, mask).item() == -3.0
    halfway = torch.tensor([2.0, 3.0, 4.0, 0.0])
    assert explained_variance(halfway, returns, mask).item() == pytest.approx(0.75)
    assert explained_variance(halfway, torch.ones(4)).item() == 0.0
