"""Common prefixes of the documents of a pack, computed once: the rows of layout `shared`.

Two documents share their leading slots as long as the tokens are the same and neither trains on anything. So
the slots of a shared prefix have no label in any document, and every trained slot has a row of its own. Rows
make a tree (documents of a group share their prompt, all of them perhaps a system prompt), found by sorting.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.errors import DataError
from lockstep.ops.masks import cu_seqlens
from lockstep.schema.batch import PackedBatch, PlannedRows, SharedRows, TrainSample

Ids = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCapacity:
    """A static capacity of shared rows: packs of one have equal shapes inside of the layers."""

    rows: int
    """R."""
    keys: int
    """S, the gathered keys; at least `rows` more than what the pack has beyond its rows."""
    segments: int
    """G_cap: of real rows and of padding."""
    longest: int
    """Most rows and most keys of a segment."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of a pack that are computed together; see SharedRows."""

    document: int
    """Among those of the pack."""
    start: int
    """The first of its slots in the document."""
    stop: int
    before: tuple[range, ...]
    """The rows in front of it, from the document's first slot on."""
    rows: range


def share(batch: PackedBatch, capacity: RowCapacity | None = None) -> PackedBatch:
    """Return the batch with `shared`: a pure function of its tokens, lengths and mask.

    Args:
        batch: on any device; its tensors are read on the host.
        capacity: what to pad to; None: exactly the rows that there are.

    Raises:
        DataError: more than the capacity holds.
    """
    return dataclasses.replace(batch, shared=_laid_out(_segments_of(batch), batch, capacity))


def share_later(
    batch: PackedBatch, segments: Sequence[Segment], capacity: RowCapacity | None = None
) -> PackedBatch:
    """Return the batch with PlannedRows. segments: of `Prefixes.segments`."""
    num_rows = count(segments).rows
    planned = PlannedRows(
        make=partial(_laid_out, segments, batch, capacity),
        size=num_rows if capacity is None else capacity.rows,
        num_rows=num_rows,
    )
    return dataclasses.replace(batch, shared=planned)


def _segments_of(batch: PackedBatch) -> list[Segment]:
    documents = [slice(a, b) for a, b in pairwise(_starts(batch))]
    token_ids, mask = batch.token_ids.cpu().numpy(), batch.loss_mask.cpu().numpy()
    found = Prefixes([token_ids[d] for d in documents], [mask[d] for d in documents])
    return found.segments(range(len(documents)))


def _starts(batch: PackedBatch) -> list[int]:
    """The first slot of each document, then the end of the last."""
    return [0, *accumulate(batch.lengths[: len(batch.sample_ids)])]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCounts:
    """Sizes of a pack in layout shared, without padding."""

    rows: int
    keys: int
    segments: int


def share_in_few_shapes(
    batches: Sequence[PackedBatch],
    *,
    sizes: Sequence[int],
    longest: int,
    whole: Sequence[RowCounts] = (),
    segments: Sequence[Sequence[Segment]] | None = None,
) -> list[PackedBatch]:
    """Return the batches with PlannedRows, padded so that few graphs serve them all: as many rows as one of
    `sizes`, keys a power of two times as many, and segments a power of four.

    Args:
        batches: what `shared` they have is made anew.
        sizes: numbers of rows, rising; the last holds every batch.
        longest: tokens of the longest document that any step may have.
        whole: of the packs of the whole step, if `batches` are a part of it: room for as many segments as
            they have, and no fewer keys for the rows.
        segments: of each batch, as in `share_later`; None: they are found.
    """
    cut = [_segments_of(batch) for batch in batches] if segments is None else segments
    counts = [count(own) for own in cut]
    most = max(pack.segments for pack in (*counts, *whole))
    room = 1 << 2 * ((most - 1).bit_length() + 1 >> 1)
    least = min((_keys_per_row(pack, sizes) for pack in whole), default=1)
    shared = []
    for batch, own, of_batch in zip(batches, cut, counts, strict=True):
        rows = _size(of_batch, sizes)
        keys = rows * max(least, _keys_per_row(of_batch, sizes))
        capacity = RowCapacity(rows=rows, keys=keys, segments=room + -(-keys // longest), longest=longest)
        shared.append(share_later(batch, own, capacity))
    return shared


def _size(count: RowCounts, sizes: Sequence[int]) -> int:
    return next(size for size in sizes if count.rows <= size)


def _keys_per_row(count: RowCounts, sizes: Sequence[int]) -> int:
    """Capacity of keys / capacity of rows: a power of two."""
    rows = _size(count, sizes)
    needed = -(-(rows + count.keys - count.rows) // rows)
    return 1 << (needed - 1).bit_length()


def count(segments: Sequence[Segment]) -> RowCounts:
    """Return the rows, gathered keys and segments of a pack."""
    rows = sum(len(s.rows) for s in segments)
    keys = rows + sum(s.start for s in segments)
    return RowCounts(rows=rows, keys=keys, segments=len(segments))


class Prefixes:
    """The common prefixes of documents' prompts. The prompts are sorted once, so that the rows of any few of
    the documents are counted without their tokens."""

    def __init__(self, token_ids: Sequence[Ids], masks: Sequence[NDArray[np.bool_]]) -> None:
        self.lengths = [len(mask) for mask in masks]
        """Tokens of each document."""
        self.prompts = [prompt_length(mask) for mask in masks]
        """Leading tokens of each that may be shared."""
        self._trained = [bool(mask[mask.argmax()]) for mask in masks]
        order, self._adjacent = _sorted(token_ids, self.prompts)
        self._place = [0] * len(order)
        for place, index in enumerate(order):
            self._place[index] = place

    @classmethod
    def of_samples(cls, samples: Sequence[TrainSample]) -> Prefixes:
        """Return those of samples."""
        return cls([s.token_ids.numpy() for s in samples], [s.loss_mask.numpy() for s in samples])

    def segments(self, documents: Sequence[int]) -> list[Segment]:
        """Return the segments of a pack of these documents, each behind those it needs: a prefix, then what
        follows it."""
        places = sorted((self._place[i], number) for number, i in enumerate(documents))
        adjacent = [min(self._adjacent[a:b]) for (a, _), (b, _) in pairwise(places)]
        order = [number for _, number in places]
        segments: list[Segment] = []
        used = 0
        # Documents order[first:last] share their slots before `depth`, which have the rows `before`.
        todo: list[tuple[int, int, int, tuple[range, ...]]] = [(0, len(order), 0, ())] if order else []
        while todo:
            first, last, depth, before = todo.pop()
            leaf = last - first == 1
            stop = self.lengths[documents[order[first]]] if leaf else min(adjacent[first : last - 1])
            if stop > depth:
                rows = range(used, used + stop - depth)
                used = rows.stop
                segments.append(Segment(order[first], depth, stop, before, rows))
                before = (*before, rows)
            if not leaf:
                cuts = [first, *(i + 1 for i in range(first, last - 1) if adjacent[i] == stop), last]
                todo += [(a, b, stop, before) for a, b in reversed(list(pairwise(cuts)))]
        return segments

    def rows(self, documents: Sequence[int]) -> int:
        """Return how many rows a pack of these documents, by index, has."""
        if len(documents) == 1:
            return self.lengths[documents[0]]
        places = sorted(self._place[i] for i in documents)
        # In sorted order, two have in common what all neighbours between them have.
        shared = sum(min(self._adjacent[a:b]) for a, b in pairwise(places))
        return sum(self.lengths[i] for i in documents) - shared

    def same_prompt(self, one: int, other: int) -> bool:
        """Return whether two documents have one prompt. What a document that trains nothing begins with
        counts as its prompt."""
        a, b = sorted((self._place[one], self._place[other]))
        common, lengths = min(self._adjacent[a:b]), (self.prompts[one], self.prompts[other])
        if common == 0 or common < min(lengths):
            return False
        return all(
            common == length or not self._trained[i] for length, i in zip(lengths, (one, other), strict=True)
        )


def count_rows(samples: Sequence[TrainSample]) -> int:
    """Return how many rows a pack of these samples has."""
    return Prefixes.of_samples(samples).rows(range(len(samples)))


def prompt_length(mask: NDArray[np.bool_]) -> int:
    """Return how many leading tokens of a document may be shared: those before the first trained slot, and
    never all of them, so that every document has a row of its own."""
    first = int(mask.argmax())
    return min(first if mask[first] else len(mask), len(mask) - 1)


def _adjacent(token_ids: Sequence[Ids], lengths: Sequence[int]) -> int:
    """Return how many leading tokens the prompts of two documents have in common."""
    length = min(lengths)
    differ = token_ids[0][:length] != token_ids[1][:length]
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length


def _sorted(token_ids: Sequence[Ids], lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """The documents in the order of their prompts, whose lengths are given, and what each has in common with
    the one behind it."""
    # Of big-endian numbers, the order of the bytes is that of the numbers.
    order = sorted(
        range(len(token_ids)), key=lambda i: (token_ids[i][: lengths[i]].astype(">i8").tobytes(), i)
    )
    return order, [
        _adjacent((token_ids[a], token_ids[b]), (lengths[a], lengths[b])) for a, b in pairwise(order)
    ]


def _laid_out(segments: Sequence[Segment], batch: PackedBatch, capacity: RowCapacity | None) -> SharedRows:
    starts, num_slots = _starts(batch), batch.num_slots
    row_lengths, key_lengths = [len(s.rows) for s in segments], [s.stop for s in segments]
    num_rows = sum(row_lengths)
    if capacity is None:
        capacity = RowCapacity(
            rows=num_rows, keys=sum(key_lengths), segments=len(segments), longest=max(key_lengths)
        )
        max_rows = max(2, *row_lengths)
    else:
        max_rows = max(2, capacity.longest)
    pad_rows, pad_keys = _padding(row_lengths, key_lengths, capacity)
    keys = _numbers([part for s in segments for part in (*s.before, s.rows)])
    row_of_slot = np.full(num_slots, capacity.rows - 1)
    for s, last in zip(segments, accumulate(key_lengths), strict=True):
        first, end = starts[s.document], starts[s.document + 1]
        if first + s.stop == end:  # the document's last segment: its keys are the document's rows
            row_of_slot[first:end] = keys[last - s.stop : last]
    slot_of_row = np.full(capacity.rows, num_slots - 1)
    slots = [range(starts[s.document] + s.start, starts[s.document] + s.stop) for s in segments]
    slot_of_row[:num_rows] = _numbers(slots)
    # Keys of padding have no gradient, so any row may have them; one row with all of them would be added up
    # one key after the other on a GPU.
    row_of_key = np.concatenate([keys, np.arange(capacity.keys - len(keys)) % capacity.rows])
    row_lengths, key_lengths = row_lengths + pad_rows, key_lengths + pad_keys
    counts = np.bincount(row_of_key, minlength=capacity.rows)
    # numpy sorts numbers of 16 bits by their digits, which is several times as fast.
    small = row_of_key.astype(np.uint16) if capacity.rows <= 1 << 16 else row_of_key
    return SharedRows(
        slots=torch.from_numpy(slot_of_row),
        rows=torch.from_numpy(row_of_slot),
        keys=torch.from_numpy(row_of_key),
        order=torch.from_numpy(small.argsort(kind="stable")),
        ends=torch.from_numpy(np.concatenate([[0], counts.cumsum()])),
        cu_rows=cu_seqlens(row_lengths, capacity.segments),
        cu_keys=cu_seqlens(key_lengths, capacity.segments),
        row_lengths=tuple(row_lengths),
        key_lengths=tuple(key_lengths),
        max_rows=max_rows,
        max_keys=capacity.longest,
        num_rows=num_rows,
    )


def _padding(
    row_lengths: Sequence[int], key_lengths: Sequence[int], capacity: RowCapacity
) -> tuple[list[int], list[int]]:
    """Rows and keys of the segments that fill a capacity: no row is without a key, and every key is in a
    segment, because a kernel leaves undefined what no segment covers."""
    rows, keys = capacity.rows - sum(row_lengths), capacity.keys - sum(key_lengths)
    full, rest = divmod(max(keys, 0), capacity.longest)
    pad_keys = [capacity.longest] * full + ([rest] if rest else [])
    if (
        not 0 <= rows <= keys
        or max(key_lengths) > capacity.longest
        or len(row_lengths) + len(pad_keys) > capacity.segments
    ):
        raise DataError(
            f"too-long: {sum(row_lengths)} rows and {sum(key_lengths)} keys in {len(row_lengths)} segments "
            f"of at most {max(key_lengths)} keys exceed {capacity}"
        )
    pad_rows: list[int] = []
    for length in pad_keys:
        pad_rows.append(min(length, rows - sum(pad_rows)))
    return pad_rows, pad_keys


def _numbers(parts: Sequence[range]) -> Ids:
    """The numbers of all parts, one part after the other."""
    lengths = np.array([len(part) for part in parts])
    starts = np.array([part.start for part in parts])
    numbers: Ids = np.arange(lengths.sum()) + np.repeat(starts - (lengths.cumsum() - lengths), lengths)
    return numbers
