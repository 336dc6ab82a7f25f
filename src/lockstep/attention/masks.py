"""Dense masks: the keys that each query may see."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.ops.masks import document_ids


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


class Places(NamedTuple):
    """Where queries or keys are."""

    document: Tensor
    """[n] int64."""
    position: Tensor
    """[n] int64, in the document: the last query of a document is at the position of its last key."""


def aligned_places(
    cu_seqlens: Tensor, cu_keys: Tensor, *, num_slots: int, num_keys: int
) -> tuple[Places, Places]:
    """The places of queries and keys of documents that have more keys than queries."""
    of_query, of_key = document_ids(cu_seqlens, num_slots), document_ids(cu_keys, num_keys)
    ends_q, ends_k = cu_seqlens[1:].long(), cu_keys[1:].long()
    lengths = cu_keys.diff().long()
    query, key = torch.arange(num_slots, device=of_query.device), torch.arange(num_keys, device=of_key.device)
    return (
        Places(of_query, lengths[of_query] + query - ends_q[of_query]),
        Places(of_key, lengths[of_key] + key - ends_k[of_key]),
    )


def aligned_mask(
    cu_seqlens: Tensor, cu_keys: Tensor, *, num_slots: int, num_keys: int, window: int | None
) -> Tensor:
    """[1, 1, T, S] bool, causal: True where a query may see a key. Every query sees the last key that stands
    where it does."""
    queries, keys = aligned_places(cu_seqlens, cu_keys, num_slots=num_slots, num_keys=num_keys)
    distance = queries.position[:, None] - keys.position[None, :]
    visible = (distance >= 0) & (queries.document[:, None] == keys.document[None, :])
    return (visible if window is None else visible & (distance < window))[None, None]
