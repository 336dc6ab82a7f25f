"""Which inputs are replayed, and the batch that an input becomes in a cell: as it was recorded, without its
padded tail, or in a static bucket."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from lockstep.errors import ConfigError, RecordingError
from lockstep.models.forward import dense_shape
from lockstep.models.memory import ModelShape, forward_sizes, gib, total_bytes
from lockstep.packing import Bucket, buckets_for, repack, share, share_in_few_shapes
from lockstep.recording.format import MAX_DOCUMENT_SLOTS
from lockstep.recording.reader import recorded_axes
from lockstep.schema.batch import PackedBatch
from lockstep_lab.replay.cell import Cell, train_config

if TYPE_CHECKING:
    from lockstep.recording import Recording
    from lockstep_lab.replay.cell import ReplayOptions


_SLOT_BYTES = 64
"""Ids, positions, labels, masks and floats of one slot of a batch."""
_DOCUMENT_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLimit:
    """The memory that one input may take."""

    bytes: int
    shape: ModelShape
    cell: Cell
    backward: bool

    def check(self, *, slots: int, documents: int) -> None:
        """Refuse a batch that would take more.

        Args:
            slots: rows that every layer computes.
            documents: entries of cu_seqlens.

        Raises:
            RecordingError: names the estimate, the limit and the flag.
        """
        if documents > MAX_DOCUMENT_SLOTS:
            raise RecordingError(
                f"too-large: field 'capacity': the batch would have room for {documents:,} documents; at "
                f"most {MAX_DOCUMENT_SLOTS:,} are allowed"
            )
        need = self.estimate(slots=slots, documents=documents)
        if need > self.bytes:
            raise RecordingError(
                f"out-of-memory: a batch of {slots:,} slots would take about {gib(need)}, more than the "
                f"{gib(self.bytes)} allowed for an input; raise the limit with --max-memory "
                f"{need / 2**30 + 1:.0f}, use fewer layers with --num-layers, or leave the input out with "
                "--inputs"
            )

    def estimate(self, *, slots: int, documents: int = 0) -> int:
        """Estimate bytes: parameters, gradients, what forward and backward keep, and the batch itself."""
        shape, kind = self.shape, torch.device(self.cell.device).type
        weights = shape.parameters * shape.dtype_bytes
        weights += shape.trained * shape.dtype_bytes * self.backward
        if not self.backward:  # nothing is kept from layer to layer
            shape = dataclasses.replace(shape, layers=1)
        train = train_config(self.cell, static_capacity=False)
        activations = sum(size for _, size, _, _ in forward_sizes(shape, train, tokens=slots, device=kind))
        return int(weights + activations + slots * _SLOT_BYTES + documents * _DOCUMENT_BYTES)


def memory_limit(cell: Cell, shape: ModelShape, *, backward: bool, max_bytes: int | None) -> MemoryLimit:
    """The limit set by `--max-memory`.

    Args:
        max_bytes: None: all memory of the device.

    Raises:
        RecordingError: the model alone is larger.
    """
    device = torch.device(cell.device)
    if max_bytes is None:
        max_bytes = (
            torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else total_bytes()
        )
    limit = MemoryLimit(bytes=max_bytes, shape=shape, cell=cell, backward=backward)
    limit.check(slots=1, documents=1)
    return limit


_ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucketing:
    """The shapes that batches are brought to before they run."""

    kind: Literal["recorded", "exact", "static", "dense"]
    """recorded: as they are. exact: without a tail. static: padded to one of `buckets`. dense: rows and
    longest document rounded up to powers of two, for padded batches."""
    static: bool
    """Whether there are few different shapes, so that one graph serves many inputs."""
    buckets: tuple[Bucket, ...] = ()
    """For kind static, smallest first."""
    width: int = 0
    """For kind dense: the longest row."""
    documents: int = 0
    """For kind recorded, if static: entries of cu_seqlens in every batch. Without it, equal token capacities
    would have different shapes."""
    shared: bool = False
    """Whether common prefixes are computed once; kind exact, or static: `buckets` then hold rows."""
    limit: MemoryLimit | None = None
    """Memory that a batch may take; None: nothing is estimated."""

    def fit(self, batch: PackedBatch) -> PackedBatch:
        """Return the batch to run.

        Raises:
            DataError: no bucket holds it.
            RecordingError: it would take more memory than `limit` allows.
        """
        if self.shared:
            return self._with_shared_rows(batch)
        if self.limit is not None:
            slots, documents = self._planned(batch)
            self.limit.check(slots=slots, documents=documents)
        return self._fitted(batch)

    def _with_shared_rows(self, batch: PackedBatch) -> PackedBatch:
        """Only host memory is used before the limit is checked, in proportion to the batch's real tokens."""
        exact = share(repack(batch, None))
        if self.static:
            sizes = [bucket.tokens for bucket in self.buckets]
            (planned,) = share_in_few_shapes([exact], sizes=sizes, longest=self.buckets[0].max_seqlen)
            exact = planned.with_rows()
        if self.limit is not None:
            rows = exact.shared_rows
            assert rows is not None
            self.limit.check(slots=exact.num_rows, documents=rows.cu_rows.shape[0])
        return exact

    def _planned(self, batch: PackedBatch) -> tuple[int, int]:
        """(Rows that every layer will compute, entries of cu_seqlens), before anything is allocated."""
        documents = len(batch.sample_ids)
        if self.kind == "recorded":
            room = max(batch.cu_seqlens.shape[0], self.documents if self.static else 0)
            dense = self.limit is not None and self.limit.cell.layout == "padded"
            rows, width = dense_shape(batch)
            return (rows * width if dense else batch.num_slots), room
        if self.kind == "exact":
            longest = max(batch.lengths[:documents])
            dense = self.limit is not None and self.limit.cell.layout == "padded"
            return (documents * longest if dense else batch.num_tokens), documents
        bucket = self._bucket(batch)
        return bucket.tokens, bucket.documents

    def _bucket(self, batch: PackedBatch) -> Bucket:
        """The bucket of a batch, for kinds dense and static."""
        used, documents = batch.num_tokens, len(batch.sample_ids)
        if self.kind == "dense":
            return _dense_bucket(batch.lengths[:documents], self.width)
        fitting = (b for b in self.buckets if used <= b.tokens and documents <= _rows(b))
        return next(fitting, self.buckets[-1])

    def _fitted(self, batch: PackedBatch) -> PackedBatch:
        if self.kind == "exact":
            return repack(batch, None)
        if self.kind == "recorded":
            if not self.static:
                return batch
            documents = max(self.documents, len(batch.lengths))
            return repack(
                batch, Bucket(tokens=batch.num_slots, documents=documents, max_seqlen=batch.max_seqlen)
            )
        return repack(batch, self._bucket(batch))

    def describe(self) -> str:
        """Describe it in one line, for the log."""
        if self.kind == "exact":
            return "inputs without a padded tail"
        if self.kind == "recorded":
            return "inputs as recorded, padded tail included" if self.static else "inputs as recorded"
        if self.kind == "dense":
            return "rows and row lengths padded to powers of two"
        sizes = ", ".join(str(bucket.tokens) for bucket in self.buckets)
        return f"inputs padded to static capacities of {sizes} slots (no document above " + (
            f"{self.buckets[0].max_seqlen} tokens)"
        )


def _dense_bucket(lengths: Sequence[int], width: int) -> Bucket:
    """B x L with both powers of two, L at least 64 and at most `width`: inputs have fixed documents, so one
    shape for all would be as wide as the longest and as high as the fullest."""
    longest = min(max(_ALIGNMENT, _power_of_two(max(lengths))), width)
    rows = _power_of_two(len(lengths))
    return Bucket(tokens=rows * longest, documents=2 * rows, max_seqlen=longest)


def _rows(bucket: Bucket) -> int:
    """The most real documents: a bucket also has room for the pad documents that cover its tail."""
    return bucket.documents - -(-bucket.tokens // bucket.max_seqlen)


def shape_of(batch: PackedBatch) -> tuple[int, int, int]:
    """The shape that a graph is compiled for: (slots, entries of cu_seqlens, longest document); with shared
    rows (rows, entries of cu_rows, gathered keys)."""
    if (shared := batch.shared_rows) is not None:
        return batch.num_rows, shared.cu_rows.shape[0], len(shared.keys)
    return batch.num_slots, batch.cu_seqlens.shape[0], batch.max_seqlen


def computed_slots(batch: PackedBatch, cell: Cell) -> int:
    """Rows that every layer computes: T of a pack, R of shared rows, B x L of a padded batch."""
    if cell.layout != "padded":
        return batch.num_rows
    rows, width = dense_shape(batch)
    return rows * width


def plan_buckets(
    recording: Recording, order: Sequence[int], options: ReplayOptions, *, max_positions: int
) -> Bucketing:
    """Choose the shapes under which the selected inputs run in the cell.

    Raises:
        ConfigError: --capacity is below an input's tokens.
    """
    cell, header = options.cell, recording.header
    axes = recorded_axes(header, given=("attention",))
    same = cell.execution == axes["execution"] and cell.layout == axes["layout"]
    lengths = [recording.lengths[index] for index in order]
    totals = [sum(each) for each in lengths]
    longest = max(max(each, default=1) for each in lengths)
    most_documents = max(len(each) for each in lengths)
    recorded = header.capacity.get("token_budget") or 0
    if cell.layout == "shared":
        if not (axes["static_capacity"] if same else cell.execution != "eager"):
            return Bucketing(kind="exact", static=False, shared=True)
        width = header.capacity.get("max_seqlen") if same else None
        return _static_rows(
            totals,
            budget=options.capacity or recorded or _round_up(max(totals), _ALIGNMENT),
            longest=max(longest, width or _round_up(longest, _ALIGNMENT)),
        )
    if same and options.capacity is None:
        width = max(header.capacity.get("max_seqlen") or 1, 1)
        documents = most_documents + -(-max(recorded, *totals, 0) // width)
        return Bucketing(kind="recorded", static=axes["static_capacity"], documents=documents)
    if cell.execution == "eager":
        return Bucketing(kind="exact", static=False)
    width = min(_round_up(longest, _ALIGNMENT), max(longest, max_positions))
    if cell.layout == "padded":
        return Bucketing(kind="dense", static=True, width=width)
    if options.capacity is not None and max(totals) > options.capacity:
        index = order[totals.index(max(totals))]
        raise ConfigError(
            f"out-of-range: --capacity {options.capacity}: input {index} has {max(totals)} tokens; set at "
            f"least --capacity {_round_up(max(totals), _ALIGNMENT)}, or leave that input out with --inputs"
        )
    budget = options.capacity or max(recorded, _round_up(max(totals), _ALIGNMENT))
    width = min(width, budget)
    buckets = buckets_for(token_budget=budget, max_seqlen=width, max_documents=most_documents)
    return Bucketing(kind="static", static=True, buckets=buckets)


def _static_rows(totals: Sequence[int], *, budget: int, longest: int) -> Bucketing:
    """Capacities of rows: those of a run with this budget, and one for the largest input, which may share
    less than the run's packs."""
    buckets = buckets_for(token_budget=max(budget, longest), max_seqlen=longest, max_documents=1)
    most = _round_up(max(totals), _ALIGNMENT)
    if most > buckets[-1].tokens:
        buckets += (Bucket(tokens=most, documents=1, max_seqlen=longest),)
    return Bucketing(kind="static", static=True, shared=True, buckets=buckets)


def select_inputs(recording: Recording, options: ReplayOptions) -> tuple[int, ...]:
    """Indices of the inputs to replay, in order.

    Raises:
        ConfigError: nothing is left, or an index is out of range.
    """
    count = len(recording)
    if count == 0:
        raise ConfigError(f"nothing-to-do: {recording.path} contains no inputs; there is nothing to replay")
    chosen = list(range(count)) if options.inputs is None else list(dict.fromkeys(options.inputs))
    wrong = [index for index in chosen if not 0 <= index < count]
    if wrong:
        raise ConfigError(
            f"out-of-range: --inputs names input {wrong[0]}, but {recording.path} contains {count} (0 to "
            f"{count - 1})"
        )
    if options.steps is not None:
        first, last = options.steps
        steps = sorted({meta.step for meta in recording.metas})
        chosen = [i for i in chosen if _within(recording.metas[i].step, first, last)]
        if not chosen:
            text = f"{'' if first is None else first}:{'' if last is None else last}"
            raise ConfigError(
                f"nothing-left: --steps {text} leaves no input; this recording has steps {steps[0]} to "
                f"{steps[-1]}"
            )
    if options.shuffle:
        random.Random(options.seed).shuffle(chosen)
    return tuple(chosen[: options.max_inputs])


def _within(step: int, first: int | None, last: int | None) -> bool:
    return (first is None or step >= first) and (last is None or step < last)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def bucketing_json(bucketing: Bucketing) -> dict[str, Any]:
    """The bucketing as summary.json has it."""
    buckets = [dataclasses.asdict(bucket) for bucket in bucketing.buckets]
    return {"kind": bucketing.kind, "static": bucketing.static, "buckets": buckets}
