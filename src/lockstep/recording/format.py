"""Recorded inputs as tensors and JSON, and back bitwise. Pure: no file is touched here.

The inputs of a file one after the other, real tokens only:

    token_ids      [tokens] U8, U16 or I32, the narrowest that holds every id of the vocabulary
    loss_mask      [bytes] U8: 8 tokens each, lowest bit first; every input begins a byte
    current        the same
    a float field  [entries] F32; the entry of an input has their number, see Spread

Labels, positions, cu_seqlens and the padded tail are derived, so an input from which they cannot be derived
is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import RecordingError
from lockstep.observe.files import jsonable
from lockstep.recording.entries import BATCH_FLOATS, FLOATS, OUTPUT_FLOATS, InputEntry, Spread
from lockstep.schema.batch import (
    IGNORE_LABEL,
    PackedBatch,
    PolicyBatch,
    PreferenceBatch,
    UnpairedBatch,
    ValueBatch,
)
from lockstep.schema.recording import FORMAT, VERSION, InputMeta, RecordedInput, RecordedOutputs

Array = np.ndarray[Any, Any]

SCORED = "scored"
"""The kind of a reward model's pairs: trained where a document's score is read, which may be its end."""
META_FIELDS = tuple(field.name for field in dataclasses.fields(InputMeta))
MAX_PAD_SLOTS = 2**22
"""Largest padded tail of one input: no byte of the file stands behind it, so it must be bounded."""
MAX_DOCUMENT_SLOTS = 2**20
"""Largest D_cap, for the same reason."""
_FREE_PAD_SLOTS, _PADS_PER_TOKEN = 2**20, 64
_FREE_DOCUMENT_SLOTS, _ENTRIES_PER_SLOT = 2**16, 4
"""Beyond the free ones they grow only with what is stored."""
_MAX_SEQLEN = 2**24
MAX_DOCUMENTS = 50_000
"""Documents of one input: each is described in JSON, of which a reader takes a bounded number of values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """One input, ready to be written."""

    entry: str
    """JSON of an InputEntry."""
    columns: Mapping[str, Array]
    """token_ids, loss_mask, current and the float fields, see the module."""
    others: Mapping[str, Tensor]
    """rng and extras, as they are."""
    nbytes: int
    batch: PackedBatch | None
    """The batch that it encodes, as long as the same batch may come again; see `encode`."""
    spreads: Mapping[str, str]
    """Float field -> Spread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offsets:
    """Offsets of an input's parts in its file."""

    number: int
    """Position in the file."""
    first: Mapping[str, int]
    """Column -> entries before this input's."""


# --- writing ------------------------------------------------------------------------------------------------


def encode(recorded: RecordedInput, *, vocab_size: int, known: Encoded | None = None) -> Encoded:
    """One input as columns and JSON.

    Args:
        known: the earlier encoding of the very same batch object; only its metadata is encoded anew.

    Raises:
        RecordingError: what the reader could not return bitwise, and why.
    """
    batch, where = recorded.batch, f"input {tuple(recorded.meta.key)}"
    layout = _Layout.of(batch, where)
    mask = _vector(batch.loss_mask, torch.bool, "loss_mask", batch.num_slots, where)
    if known is not None and known.batch is batch:
        columns = {name: column for name, column in known.columns.items() if name not in OUTPUT_FLOATS}
        spreads = {name: spread for name, spread in known.spreads.items() if name not in OUTPUT_FLOATS}
    else:
        columns, spreads = _ids_and_mask(batch, layout, mask, vocab_size, where), {}
    for name, values in _float_fields(recorded):
        if name not in spreads:
            array = _vector(values, torch.float32, name, batch.num_slots, where)
            spreads[name], columns[name] = _narrow(array, mask, layout)
    entry, others = _entry(recorded, layout, int(np.count_nonzero(mask)), spreads, where)
    nbytes = sum(c.nbytes for c in columns.values()) + sum(t.nbytes for t in others.values())
    return Encoded(
        entry=_compact(entry), columns=columns, others=others, nbytes=nbytes, batch=batch, spreads=spreads
    )


def _ids_and_mask(
    batch: PackedBatch, layout: _Layout, mask: Array, vocab_size: int, where: str
) -> dict[str, Array]:
    ids = _vector(batch.token_ids, torch.int64, "token_ids", batch.num_slots, where)
    _check_derived(batch, layout, (ids, mask), where)
    real = ids[: layout.used]
    if not 0 <= int(real.min()) <= int(real.max()) < vocab_size:
        raise RecordingError(
            f"outside-vocabulary: {where}: token_ids range from {int(real.min())} to {int(real.max())}, but "
            f"the vocabulary has ids 0 to {vocab_size - 1}; set the header's vocab_size to the model's"
        )
    columns = {
        "token_ids": real.astype(ids_dtype(vocab_size)),
        "loss_mask": np.packbits(mask[: layout.used], bitorder="little"),
    }
    if (current := getattr(batch, "current", None)) is not None:
        bits = _vector(current, torch.bool, "current", batch.num_slots, where)
        if bits[layout.used :].any():
            raise RecordingError(f"wrong-shape: {where}: current must be False in the padded tail")
        columns["current"] = np.packbits(bits[: layout.used], bitorder="little")
    return columns


def _compact(entry: Mapping[str, Any]) -> str:
    try:
        return json.dumps(entry, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError):  # numbers that are not finite, paths, numpy's and torch's scalars
        return json.dumps(jsonable(entry), separators=(",", ":"), allow_nan=False)


def join(inputs: Sequence[Encoded]) -> tuple[dict[str, Array | Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file with these inputs."""
    tensors: dict[str, Array | Tensor] = {}
    for name in ("token_ids", "loss_mask", "current", *FLOATS):
        parts = [e.columns[name] for e in inputs if name in e.columns]
        if parts:
            tensors[name] = parts[0] if len(parts) == 1 else np.concatenate(parts)
    for number, encoded in enumerate(inputs):
        tensors |= {f"{number}/{name}": tensor for name, tensor in encoded.others.items()}
    entries = f"[{','.join(e.entry for e in inputs)}]"
    return tensors, {"format": FORMAT, "version": str(VERSION), "inputs": entries}


def sealed(
    metadata: Mapping[str, str], tensors: Mapping[str, tuple[str, Sequence[int], str]]
) -> dict[str, str]:
    """The metadata with (dtype, shape, sha256) of every tensor, and the sha256 of all of that."""
    table = {name: [dtype, list(shape), digest] for name, (dtype, shape, digest) in sorted(tensors.items())}
    fields = {**metadata, "tensors": json.dumps(table, separators=(",", ":"))}
    return {**fields, "sha256": metadata_digest(fields)}


def metadata_digest(metadata: Mapping[str, str]) -> str:
    """sha256 of "name\\0value\\0" of every field but sha256 itself, by name, in UTF-8."""
    text = "".join(f"{name}\0{metadata[name]}\0" for name in sorted(metadata) if name != "sha256")
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def ids_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest unsigned or 32-bit integer that holds every id."""
    narrow = np.uint8 if vocab_size <= 2**8 else np.uint16 if vocab_size <= 2**16 else np.int32
    return np.dtype(narrow)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Documents of a batch."""

    lengths: tuple[int, ...]
    """Real documents."""
    tail: tuple[int, ...]
    """Pad documents."""

    @classmethod
    def of(cls, batch: PackedBatch, where: str) -> _Layout:
        documents = len(batch.sample_ids)
        if not 0 < documents <= len(batch.lengths) or min(batch.lengths) < 1:
            raise RecordingError(
                f"empty: {where} needs at least one document, and no empty ones; got {documents} sample_ids "
                f"and lengths {batch.lengths[:20]}"
            )
        return cls(tuple(map(int, batch.lengths[:documents])), tuple(map(int, batch.lengths[documents:])))

    @property
    def used(self) -> int:
        return sum(self.lengths)

    @property
    def slots(self) -> int:
        return self.used + sum(self.tail)

    def positions(self) -> Array:
        """[T] int64."""
        lengths = np.array(self.lengths + self.tail, dtype=np.int64)
        return np.arange(self.slots) - np.repeat(np.cumsum(lengths) - lengths, lengths)

    def cu_seqlens(self, document_slots: int) -> Array:
        """[D_cap + 1] int32."""
        bounds = np.full(document_slots + 1, self.slots, dtype=np.int32)
        ends = [0, *accumulate(self.lengths + self.tail)]
        bounds[: len(ends)] = ends
        return bounds

    def labels(self, ids: Array) -> Array:
        """[T] int64."""
        labels = np.full(self.slots, IGNORE_LABEL, dtype=np.int64)
        labels[: self.used - 1] = ids[1 : self.used]
        labels[self.ends()] = IGNORE_LABEL
        return labels

    def spread(self, values: Array) -> Array:
        """[T] of a value for each real document; 0 in the tail."""
        return np.concatenate([np.repeat(values, self.lengths), np.zeros(sum(self.tail), dtype=values.dtype)])

    def ends(self) -> Array:
        """Slot of each real document's last token."""
        return np.cumsum(self.lengths) - 1

    def trained(self, mask: Array) -> Array:
        """Trained tokens of each real document."""
        starts = np.cumsum(self.lengths) - np.array(self.lengths)
        return np.asarray(np.add.reduceat(mask[: self.used].astype(np.int64), starts))


def _vector(tensor: Tensor, dtype: torch.dtype, name: str, slots: int, where: str) -> Array:
    if tensor.dtype != dtype or tuple(tensor.shape) != (slots,) or tensor.device.type != "cpu":
        raise RecordingError(
            f"wrong-shape: {where}: {name} must be [{slots}] {dtype} on the CPU, got {list(tensor.shape)} "
            f"{tensor.dtype} on {tensor.device}"
        )
    return tensor.detach().contiguous().numpy()


def _check_derived(batch: PackedBatch, layout: _Layout, arrays: tuple[Array, Array], where: str) -> None:
    """arrays: token_ids and loss_mask."""
    ids, mask = arrays
    slots, used = batch.num_slots, layout.used
    capacity = batch.cu_seqlens.shape[0] - 1
    _check_capacity(layout, capacity, batch.max_seqlen, where)
    if layout.slots != slots:
        raise RecordingError(
            f"wrong-shape: {where}: lengths sum to {layout.slots}, but token_ids has {slots} slots"
        )
    if ids[used:].any():
        raise RecordingError(f"wrong-shape: {where}: token_ids must be 0 in the padded tail")
    if mask[used:].any() or (_kind(batch) != SCORED and mask[layout.ends()].any()):
        raise RecordingError(
            f"wrong-shape: {where}: loss_mask must be False in the padded tail, and at every document's "
            "last token where no score is read"
        )
    for name, tensor, derived in (
        ("positions", batch.positions, layout.positions()),
        ("cu_seqlens", batch.cu_seqlens, layout.cu_seqlens(capacity)),
        ("labels", batch.labels, layout.labels(ids)),
    ):
        dtype = torch.int32 if name == "cu_seqlens" else torch.int64
        if not np.array_equal(_vector(tensor, dtype, name, len(derived), where), derived):
            raise RecordingError(
                f"wrong-shape: {where}: {name} do not match token_ids and lengths (see "
                "lockstep.schema.batch); pack the documents with lockstep.packing.pack"
            )


def _check_capacity(layout: _Layout, document_slots: int, max_seqlen: int, where: str) -> None:
    documents = len(layout.lengths) + len(layout.tail)
    pads = min(MAX_PAD_SLOTS, max(_FREE_PAD_SLOTS, _PADS_PER_TOKEN * layout.used))
    entries = min(MAX_DOCUMENT_SLOTS, max(_FREE_DOCUMENT_SLOTS, _ENTRIES_PER_SLOT * layout.slots))
    if sum(layout.tail) > pads or not documents <= document_slots <= entries:
        raise RecordingError(
            f"wrong-shape: {where}: {documents} documents in document_slots = {document_slots} and a tail of "
            f"{sum(layout.tail)} slots; all documents must fit, with at most {entries} document slots and "
            f"{pads} padded slots for {layout.used} real tokens"
        )
    if max_seqlen > _MAX_SEQLEN:
        raise RecordingError(f"out-of-range: {where}: max_seqlen = {max_seqlen}; at most {_MAX_SEQLEN}")
    if max_seqlen < max(layout.lengths + layout.tail):
        raise RecordingError(
            f"out-of-range: {where}: max_seqlen = {max_seqlen}, but a document has "
            f"{max(layout.lengths + layout.tail)} slots"
        )


def _float_fields(recorded: RecordedInput) -> list[tuple[str, Tensor]]:
    named = [(name, getattr(recorded.batch, name, None)) for name in BATCH_FLOATS]
    named += [(name, getattr(recorded.outputs, name, None)) for name in OUTPUT_FLOATS]
    return [(name, values) for name, values in named if values is not None]


def _narrow(values: Array, mask: Array, layout: _Layout) -> tuple[str, Array]:
    """How much of a [T] float32 is kept: the least that restores it bitwise."""
    bits, used = values.view(np.int32), layout.used
    trained = bits[mask]
    if np.count_nonzero(bits) != np.count_nonzero(trained):  # -0.0 counts: its bits are not zero
        return (Spread.SLOT, values) if bits[used:].any() else (Spread.TOKEN, values[:used])
    counts = layout.trained(mask)
    firsts = np.where(counts > 0, np.cumsum(counts) - counts, 0)
    if len(trained) > len(counts):
        constants = np.where(counts > 0, trained[firsts], 0).astype(np.int32)
        if np.array_equal(np.repeat(constants, counts), trained):
            return Spread.DOCUMENT, constants.view(np.float32)
    return Spread.TRAINED, trained.view(np.float32)


def _trajectories(batch: PackedBatch, layout: _Layout, where: str) -> list[int]:
    """Of each document; empty: the batch names none."""
    if (numbers := getattr(batch, "trajectories", None)) is None:
        return []
    values = _vector(numbers, torch.int64, "trajectories", batch.num_slots, where)
    by_document = values[layout.ends()]
    if not np.array_equal(values, layout.spread(by_document)):
        raise RecordingError(
            f"wrong-shape: {where}: trajectories must be one number in all slots of a document, and 0 in the "
            "padded tail"
        )
    return [int(number) for number in by_document]


def _kind(batch: PackedBatch) -> str:
    if isinstance(batch, PolicyBatch):
        return "policy"
    if isinstance(batch, ValueBatch):
        return "value"
    if isinstance(batch, UnpairedBatch):
        return "unpaired"
    if isinstance(batch, PreferenceBatch):
        return "preference" if batch.margins is None else SCORED
    return "packed"


def _entry(
    recorded: RecordedInput, layout: _Layout, trained: int, spreads: Mapping[str, str], where: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    batch, meta, outputs = recorded.batch, recorded.meta, recorded.outputs
    others = {f"extras/{name}": tensor for name, tensor in recorded.extras.items()}
    if recorded.rng is not None:
        others["rng"] = recorded.rng
    entry: dict[str, Any] = {
        "meta": {name: getattr(meta, name) for name in META_FIELDS},
        "kind": _kind(batch),
        "lengths": list(layout.lengths),
        "tail": list(layout.tail),
        "max_seqlen": int(batch.max_seqlen),
        "document_slots": batch.cu_seqlens.shape[0] - 1,
        "sample_ids": [int(i) for i in batch.sample_ids],
        "policy_versions": [int(v) for v in getattr(batch, "policy_versions", ())],
        "trained": trained,
        "floats": dict(spreads),
        "outputs": None,
        "others": list(others),
    }
    if trajectories := _trajectories(batch, layout, where):
        entry["trajectories"] = trajectories
    if getattr(batch, "current", None) is not None:
        entry["current"] = True
    if batch.step_tokens is not None:
        entry["step_tokens"] = int(batch.step_tokens)
    if outputs is not None:
        entry["outputs"] = {
            "loss": outputs.loss,
            "grad_norm": outputs.grad_norm,
            "fingerprints": dict(outputs.fingerprints),
        }
    if meta.documents and len(meta.documents) != len(layout.lengths):
        raise RecordingError(
            f"wrong-shape: {where}: meta.documents has {len(meta.documents)} entries for "
            f"{len(layout.lengths)} documents"
        )
    return entry, others


# --- reading ------------------------------------------------------------------------------------------------


def column_offsets(entries: Sequence[InputEntry]) -> tuple[list[Offsets], dict[str, int]]:
    """Compute where each input's parts begin, and how long each column must be."""
    first: dict[str, int] = {}
    offsets = []
    for number, entry in enumerate(entries):
        sizes = entry.sizes()
        offsets.append(Offsets(number=number, first={name: first.get(name, 0) for name in sizes}))
        for name, size in sizes.items():
            first[name] = first.get(name, 0) + size
    return offsets, first


def decode(
    entry: InputEntry, columns: Mapping[str, bytearray], read_other: Callable[[str], Tensor], *, ids_type: str
) -> RecordedInput:
    """Decode an input, bitwise.

    Args:
        columns: this input's part of each column.
        read_other: the tensor of a name in entry.others.
        ids_type: numpy's name of the type of token_ids.

    Raises:
        RecordingError: the parts contradict each other; names the field.
    """
    layout = _Layout(tuple(entry.lengths), tuple(entry.tail))
    _check_capacity(layout, entry.document_slots, entry.max_seqlen, "lengths")
    used, slots = layout.used, layout.slots
    ids = np.zeros(slots, dtype=np.int64)
    ids[:used] = np.frombuffer(columns["token_ids"], dtype=ids_type)
    mask, clean = _bits(columns["loss_mask"], layout)
    counts = layout.trained(mask)
    wrong_end = entry.kind != SCORED and mask[layout.ends()].any()
    if not clean or wrong_end or int(counts.sum()) != entry.trained:
        raise RecordingError(
            f"wrong-field: loss_mask: {int(counts.sum())} tokens are trained on, but the field trained says "
            f"{entry.trained}; the last token of a document is never trained on, except in inputs of kind "
            f"{SCORED}"
        )
    floats = {
        name: torch.from_numpy(_widen(np.frombuffer(columns[name], dtype="<f4"), spread, mask, counts))
        for name, spread in entry.floats.items()
    }
    fields: dict[str, Any] = {
        "token_ids": torch.from_numpy(ids),
        "positions": torch.from_numpy(layout.positions()),
        "cu_seqlens": torch.from_numpy(layout.cu_seqlens(entry.document_slots)),
        "max_seqlen": entry.max_seqlen,
        "labels": torch.from_numpy(layout.labels(ids)),
        "loss_mask": torch.from_numpy(mask),
        "lengths": layout.lengths + layout.tail,
        "sample_ids": tuple(entry.sample_ids),
        "step_tokens": entry.step_tokens,
        **{name: floats[name] for name in BATCH_FLOATS if name in floats},
    }
    batch: PackedBatch
    if entry.kind == "policy":
        if entry.current:
            current, clean = _bits(columns["current"], layout)
            if not clean:
                raise RecordingError("wrong-field: current: unused bits must be 0")
            fields["current"] = torch.from_numpy(current)
        if entry.trajectories:
            numbers = np.array(entry.trajectories, dtype=np.int64)
            fields["trajectories"] = torch.from_numpy(layout.spread(numbers))
        batch = PolicyBatch(**fields, policy_versions=tuple(entry.policy_versions))
    else:
        plain: dict[str, type[PackedBatch]] = {"preference": PreferenceBatch, "value": ValueBatch}
        plain |= {"unpaired": UnpairedBatch, SCORED: PreferenceBatch}
        batch = plain.get(entry.kind, PackedBatch)(**fields)
    outputs = None
    if entry.outputs is not None:
        outputs = RecordedOutputs(
            loss=entry.outputs.loss,
            grad_norm=entry.outputs.grad_norm,
            fingerprints=entry.outputs.fingerprints,
            logprobs=floats.get("logprobs"),
            entropy=floats.get("entropy"),
        )
    others = {name: read_other(name) for name in entry.others}
    return RecordedInput(
        meta=entry.input_meta(),
        batch=batch,
        outputs=outputs,
        rng=others.pop("rng", None),
        extras={name.removeprefix("extras/"): tensor for name, tensor in others.items()},
    )


def _bits(column: bytearray, layout: _Layout) -> tuple[Array, bool]:
    """A column of bits, a bit for each real token, as [T] bool; and whether its unused bits are 0."""
    bits = np.unpackbits(np.frombuffer(column, dtype=np.uint8), bitorder="little")
    values = np.zeros(layout.slots, dtype=np.bool_)
    values[: layout.used] = bits[: layout.used]
    return values, not bits[layout.used :].any()


def _widen(kept: Array, spread: str, mask: Array, counts: Array) -> Array:
    """The inverse of _narrow; [T] float32."""
    values = np.zeros(len(mask), dtype=np.float32)
    if spread in (Spread.TOKEN, Spread.SLOT):
        values[: len(kept)] = kept
    else:
        values[mask] = np.repeat(kept, counts) if spread == Spread.DOCUMENT else kept
    return values
