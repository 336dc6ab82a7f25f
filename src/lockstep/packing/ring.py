"""The zigzag: which slots of a pack each rank of a ring owns.

A document of L tokens is cut into 2R chunks, as equal as can be, and rank r owns chunks r and 2R - 1 - r.
With R = 2 and L = 8:

    token      0 1 | 2 3 | 4 5 | 6 7
    chunk       0  |  1  |  2  |  3
    rank        0  |  1  |  1  |  0

Causal attention costs a chunk as many key chunks as there are before it, so an early chunk (cheap) and a late
one (dear) together cost the same on every rank. Better, every *step* of the ring does: of a rank s < r all
queries see the early chunk and nothing else, of a rank s > r only the queries of the late chunk see anything,
and they see both. Each is two chunks times one chunk, whoever r and s are.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from lockstep.schema.ring import RingShard, RingStep

_WHOLE_SHARE = 32
_PAD_ROWS = 128  # the rows that a flash kernel computes together: smaller pieces would cost the same


def ring_shard(
    lengths: Sequence[int], *, rank: int, size: int, num_documents: int | None = None
) -> RingShard:
    """The part of rank `rank` of a ring of `size` ranks. Pure host arithmetic, the same on every rank.

    Documents shorter than 2R tokens or than 1/32 of a rank's share of the pack are not worth dividing: each
    stays whole on the rank that has the fewest rows, longest document first, which leaves the ranks' rows at
    most such a document apart.

    Args:
        lengths: of the documents in pack order, pads last (`PackedBatch.lengths`).
        num_documents: how many of them are real (`len(batch.sample_ids)`); None: all. The others are pads,
            which nobody reads: their slots go to where rows are missing, in pieces so small that their
            attention costs next to nothing. What is computed there differs from one process.

    Raises:
        ValueError: an empty document, or no such rank.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not one of a ring of {size}")
    if min(lengths, default=1) < 1:
        raise ValueError(f"document {list(lengths).index(min(lengths))} has {min(lengths)} tokens")
    real = len(lengths) if num_documents is None else num_documents
    divided, whole = _documents(lengths, size=size, real=real)
    chunks = [_chunks(document, size) for document in divided]
    owned = _deal_whole(whole, [sum(len(c[r]) + len(c[-1 - r]) for c in chunks) for r in range(size)])
    local = owned[rank]
    slots = [part for c in chunks for part in (c[rank], c[-1 - rank])] + local
    lengths_here = [len(c[rank]) + len(c[-1 - rank]) for c in chunks] + [len(part) for part in local]
    rows = [sum(len(c[r]) + len(c[-1 - r]) for c in chunks) for r in range(size)]
    return RingShard(
        rank=rank,
        size=size,
        index=_index(slots),
        lengths=tuple(lengths_here),
        sizes=tuple(rows[r] + sum(map(len, owned[r])) for r in range(size)),
        divided=tuple(rows),
        own=_step(lengths_here, lengths_here),
        others=tuple(_other(chunks, rank, (rank - i) % size) for i in range(1, size)) if chunks else (),
    )


def _documents(lengths: Sequence[int], *, size: int, real: int) -> tuple[list[range], list[range]]:
    """Slots of the documents to divide, and of those (and of pieces of pads) that stay whole."""
    starts = [0, *accumulate(lengths)]
    documents = [range(first, last) for first, last in pairwise(starts)]
    if size == 1:
        return [], documents
    least = max(2 * size, -(-starts[real] // (size * _WHOLE_SHARE)))
    divided = [document for document in documents[:real] if len(document) >= least]
    whole = [document for document in documents[:real] if len(document) < least]
    piece = min(_PAD_ROWS, -(-(starts[-1] - starts[real]) // size))
    if piece:
        pads = range(starts[real], starts[-1])
        whole += [pads[first : first + piece] for first in range(0, len(pads), piece)]
    return divided, whole


def _chunks(document: range, size: int) -> list[range]:
    """2R parts; the first len % 2R of them have a token more than the others."""
    base, extra = divmod(len(document), 2 * size)
    ends = [0, *accumulate(base + (chunk < extra) for chunk in range(2 * size))]
    return [document[first:last] for first, last in pairwise(ends)]


def _deal_whole(parts: Sequence[range], rows: Sequence[int]) -> list[list[range]]:
    """Per rank the parts it gets, in pack order: longest first to whoever has the fewest rows."""
    owned: list[list[range]] = [[] for _ in rows]
    loads = [(count, r) for r, count in enumerate(rows)]
    heapq.heapify(loads)
    for part in sorted(parts, key=lambda part: (-len(part), part.start)):
        count, r = loads[0]
        owned[r].append(part)
        heapq.heapreplace(loads, (count + len(part), r))
    return [sorted(mine, key=lambda part: part.start) for mine in owned]


def _other(chunks: Sequence[Sequence[range]], rank: int, source: int) -> RingStep:
    """The divided rows of `rank` against those of `source`: two segments per document, one of which has no
    queries (source before rank: nobody here sees the late chunk) or no keys (source behind rank: the early
    queries see nothing). So both tensors are used as they lie, without a copy of halves."""
    q, k = [], []
    for document in chunks:
        early_q, late_q = len(document[rank]), len(document[-1 - rank])
        early_k, late_k = len(document[source]), len(document[-1 - source])
        if source < rank:
            q += [early_q + late_q, 0]
            k += [early_k, late_k]
        else:
            q += [early_q, late_q]
            k += [0, early_k + late_k]
    return _step(q, k)


def _step(q: Sequence[int], k: Sequence[int]) -> RingStep:
    return RingStep(
        cu_q=_cu_seqlens(q), cu_k=_cu_seqlens(k), max_q=max(q, default=0), max_k=max(k, default=0)
    )


def _cu_seqlens(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def _index(parts: Sequence[range]) -> Tensor:
    if not parts:
        return torch.empty(0, dtype=torch.int64)
    return torch.cat([torch.arange(part.start, part.stop) for part in parts])
