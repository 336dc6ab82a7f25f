"""Dense masks: the keys that each query may see."""

from __future__ import annotations

import torch
from torch import Tensor


def dense_mask(ids: Tensor, *, window: int | None) -> Tensor:
    """[B, 1, S, S] bool from document ids [B, S]: True where the query (third axis) may see the key (last
    axis).

    Every query sees itself, so no row is empty.
    """
    slots = torch.arange(ids.shape[1], device=ids.device)
    return (band(slots, window=window) & (ids[:, :, None] == ids[:, None, :]))[:, None]


def band(slots: Tensor, *, window: int | None) -> Tensor:
    """[S, S] bool: causal, and not further back than the window (which counts the query itself)."""
    distance = slots[:, None] - slots[None, :]
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)
