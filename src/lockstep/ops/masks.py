"""Masked means, bounds and per-document sums of packed `[T]` tensors. Masked entries may hold anything, also
NaN."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Nats. verl (trainer/ppo/core_algos.py) and OpenRLHF (models/loss.py) keep log ratios within it, too."""


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """Return x where mask (bool, same shape) is True, else 0.

    A per-token input of a loss goes through it *before* any operation: `where` behind a nonlinear one gives
    that operation a gradient of 0 at a masked slot, and 0 times the inf or NaN of its derivative is NaN.
    """
    return torch.where(mask, x, 0.0)


def bounded(log_ratio: Tensor) -> Tensor:
    """Clamp a log ratio to [-20, 20] nats, elementwise, without a gradient beyond: exp overflows float32 at
    88.7, and inf times an advantage of 0 is NaN. NaN stays NaN."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Scalar: the sum of x where mask (bool, same shape) is True."""
    return masked(x, mask).sum()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Scalar: the mean of x where mask (bool, same shape) is True; 0 where nothing is."""
    return masked_sum(x, mask) / mask.sum().clamp(min=1)


def document_ids(cu_seqlens: Tensor, num_slots: int) -> Tensor:
    """[T] int64: the document of every slot.

    Args:
        cu_seqlens: [D + 1], non-decreasing, from 0 to T; empty documents (repeated entries) own no slot.
        num_slots: T.
    """
    slots = torch.arange(num_slots, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), slots, right=True)


def document_sums(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[D]: the sum of x [T] over each document, 0 for an empty one; differentiable, deterministic."""
    return torch.segment_reduce(x, "sum", offsets=cu_seqlens.long(), initial=0)


def document_means(x: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[D]: the mean of x [T] over the slots of each document where mask [T] is True; 0 where none is."""
    sums = document_sums(masked(x, mask), cu_seqlens)
    counts = document_sums(mask.to(x.dtype), cu_seqlens)
    return sums / counts.clamp(min=1)
