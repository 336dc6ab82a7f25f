"""Losses and figures of value models: per token, pure. Values, returns and errors are in units of reward."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lockstep.ops.masks import masked, masked_mean

ValueLossKind = Literal["squared", "huber"]


class TokenValueLoss(NamedTuple):
    """The loss of each token, and where the clipped value decided it."""

    loss: Tensor
    """[R]; its gradient is 0 where the clipped value decides and is at its bound."""
    clipped: Tensor
    """[R] bool."""


def value_loss(
    values: Tensor,
    returns: Tensor,
    old_values: Tensor,
    *,
    clip: float = 0.0,
    kind: ValueLossKind = "squared",
    huber_delta: float = 1.0,
) -> TokenValueLoss:
    """max(l(V - R), l(V_old + clamp(V - V_old, -clip, clip) - R)), elementwise: verl's compute_value_loss and
    OpenRLHF's ValueLoss, which both come with the factor 1/2 that l has here.

    Args:
        values: [R], of the model as it is. returns: [R], the targets. old_values: [R], before the update.
        clip: 0: l(V - R) alone.
        kind: squared: l(e) = e^2 / 2. huber: the same up to |e| = huber_delta, then
            huber_delta (|e| - huber_delta / 2).
    """
    free = _penalty(values - returns, kind=kind, huber_delta=huber_delta)
    if clip == 0.0:
        return TokenValueLoss(free, torch.zeros_like(free, dtype=torch.bool))
    # Not old + clamp(V - old): within the bounds this is exactly V, so rounding does not count as clipped.
    near = torch.clamp(values, old_values - clip, old_values + clip)
    bounded = _penalty(near - returns, kind=kind, huber_delta=huber_delta)
    return TokenValueLoss(torch.maximum(free, bounded), bounded.detach() > free.detach())


def _penalty(error: Tensor, *, kind: ValueLossKind, huber_delta: float) -> Tensor:
    square = 0.5 * error.square()
    if kind == "squared":
        return square
    return torch.where(error.abs() <= huber_delta, square, huber_delta * (error.abs() - 0.5 * huber_delta))


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor | None = None) -> Tensor:
    """Scalar: 1 - Var(R - V) / Var(R) over entries with mask True: 1 for perfect values, 0 for a constant,
    below 0 for worse than that; 0 where all returns are equal."""
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    total, left = _variance(returns, mask), _variance(returns - values, mask)
    return torch.where(total > 0, 1.0 - left / torch.where(total > 0, total, 1.0), 0.0)


def _variance(x: Tensor, mask: Tensor) -> Tensor:
    return masked_mean(masked(x - masked_mean(x, mask), mask).square(), mask)
