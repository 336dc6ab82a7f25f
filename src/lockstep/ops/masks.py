"""Masks of packed `[T]` tensors: masked means and bounds, where documents begin and end, sums over them, and
the keys that each query may see, shared ones among them. Masked entries may hold anything, also NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, TypedDict

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


# --- documents ---


def cu_seqlens(lengths: Sequence[int], segments: int = 0) -> Tensor:
    """[max(segments, len(lengths)) + 1] int32: where each segment begins, and the end of the last one.

    Args:
        lengths: slots of each segment.
        segments: how many there are to be; those behind `lengths` are empty.

    Example:
        >>> cu_seqlens([2, 3], 3).tolist()
        [0, 2, 5, 5]
    """
    ends = [0, *accumulate(lengths)]
    return torch.tensor(ends + [ends[-1]] * (segments + 1 - len(ends)), dtype=torch.int32)


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


# --- dense masks: the keys that each query may see ---


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
    """The places of queries or keys."""

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


# Keys and values that several documents share: gathered per document, their gradients added up.


class SharedKeys(TypedDict):
    """The fields of `SharedRows` that attention needs, as a compiled graph takes them: tensors and ints by
    name."""

    keys: Tensor
    """These three are fields of SharedRows, [S], [S] and [R + 1] int64."""
    order: Tensor
    ends: Tensor
    cu_keys: Tensor
    max_keys: int


@dataclass(frozen=True, slots=True)
class Keys:
    """The places of each document's keys, if they are not its rows."""

    cu_keys: Tensor
    """[D_cap + 1] int32."""
    max_keys: int
    """No document has more."""
    lengths: tuple[int, ...] | None
    """The host's copy of the lengths, as `lengths` is of the queries'."""


def gather(k: Tensor, v: Tensor, shared: SharedKeys) -> tuple[Tensor, Tensor]:
    """k and v [R, K, H] of rows -> [S, K, H]. The gradients of a row that is several documents' key are added
    up in float32, in the order of the documents: the same bits every time."""
    index, order, ends = shared["keys"], shared["order"], shared["ends"]
    return _gathered(k, index, order, ends), _gathered(v, index, order, ends)


@torch.library.custom_op("lockstep::shared_keys", mutates_args=())
def _gathered(x: Tensor, index: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    return x.index_select(0, index)


@_gathered.register_fake
def _(x: Tensor, index: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(index.shape[0], *x.shape[1:])


@torch.library.custom_op("lockstep::shared_key_grads", mutates_args=())
def _added_up(grad: Tensor, index: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    exact = grad.to(torch.float64 if grad.dtype == torch.float64 else torch.float32)
    if grad.device.type == "cpu":  # one key after the other; segment_reduce is ten times slower there
        sums = exact.new_zeros(ends.shape[0] - 1, *grad.shape[1:]).index_add_(0, index, exact)
    else:  # index_add_ on CUDA adds up in any order
        parts = exact.index_select(0, order).flatten(1)
        sums = torch.segment_reduce(parts, "sum", offsets=ends, initial=0).unflatten(1, grad.shape[1:])
    return sums.to(grad.dtype)


@_added_up.register_fake
def _(grad: Tensor, index: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    return grad.new_empty(ends.shape[0] - 1, *grad.shape[1:])


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return _added_up(grad, *ctx.saved_tensors), None, None, None


_gathered.register_autograd(_backward, setup_context=_keep)
