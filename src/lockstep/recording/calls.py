"""One forward of a foreign module as documents: which slots of its arguments are which token of what.

Frameworks say where documents are in four ways: an attention mask over rows, position_ids that start again,
cumulative lengths for a varlen kernel, or an id per token. All end in the same thing here: the flat indices
of the real slots in document order, and the documents' lengths.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lockstep.errors import RecordingError
from lockstep.observe.tensor_file import DTYPES
from lockstep.packing import pack
from lockstep.recording.format import MAX_DOCUMENTS
from lockstep.schema.batch import IGNORE_LABEL, PackedBatch, TrainSample

CU_SEQLENS = ("cu_seq_lens_q", "cu_seqlens", "cu_seqlens_q", "cu_seq_lens_k", "cu_seqlens_k")
SEQUENCE_IDS = ("seq_idx", "sequence_ids", "document_ids", "segment_ids")
_POSITIONS = "position_ids"
_MASK = "attention_mask"


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where the documents of a dense or packed call are."""

    slots: Tensor
    """[N] int64, into the flattened [B * L]: every real slot, document by document."""
    lengths: tuple[int, ...]
    """Documents, in order; they sum to N."""
    starts: tuple[tuple[int, int], ...]
    """(row, column) of each document's first slot."""
    layout: Literal["padded", "packed"]
    """packed: some row has several documents."""
    padding: tuple[str, ...]
    """Sides on which some row has pads: of "left", "right"; "inside" when a document has a hole."""
    offset_positions: bool
    """position_ids were given and do not count each document from 0."""


@dataclass(kw_only=True, slots=True)
class ForeignCall:
    """The arguments of one call, on the host."""

    token_ids: Tensor
    """[B, L] int64."""
    layout: Layout
    tensors: dict[str, Tensor]
    """Every other tensor by argument name, also nested ones ("a.b"), as it was."""
    scalars: dict[str, Any]
    """Numbers, strings and flags by argument name."""
    labels: Tensor | None = None
    """[B, L] int64 as given; entry t is the label *of* slot t (unshifted), as transformers has it."""
    extras: dict[str, Tensor] = field(default_factory=dict)
    """Of `tensors`, what the batch does not say."""
    unusable: str | None = None
    """Why no documents could be made of the arguments. Then `token_ids` is a placeholder of one token, and
    the extras hold every argument as it was."""


def bound_arguments(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Argument name -> value; positional ones get the names of the signature. None values are left out."""
    named: dict[str, Any] = {}
    if args:
        try:
            names = [
                p.name
                for p in inspect.signature(forward).parameters.values()
                if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
            ]
        except (TypeError, ValueError):
            names = []
        if len(args) == 1 and (not names or names[0] in ("args", "self")):
            names = ["input_ids"]
        for number, value in enumerate(args):
            named[names[number] if number < len(names) else f"arg{number}"] = value
    named.update(kwargs)
    return {name: value for name, value in named.items() if value is not None}


def watched_call(named: Mapping[str, Any]) -> ForeignCall:
    """`foreign_call`; arguments that are no input become an `unusable_call` instead of an error, because the
    program that is watched must get its own error, or none."""
    try:
        return foreign_call(named)
    except _REFUSALS as error:
        return unusable_call(named, error)


_REFUSALS = (RecordingError, RuntimeError, TypeError, ValueError, IndexError, OverflowError)
"""What arguments of a wrong kind raise here; torch's refusals are of the standard types."""


def unusable_call(named: Mapping[str, Any], error: Exception) -> ForeignCall:
    """The arguments as they were, for looking at: no documents, and a batch of one token that stands for
    them."""
    tensors, scalars = _host(named)
    layout = Layout(
        slots=torch.zeros(1, dtype=torch.int64),
        lengths=(1,),
        starts=((0, 0),),
        layout="padded",
        padding=(),
        offset_positions=False,
    )
    return ForeignCall(
        token_ids=torch.zeros(1, 1, dtype=torch.int64),
        layout=layout,
        tensors=tensors,
        scalars=scalars,
        extras=tensors,
        unusable=str(error).removeprefix("record: ")[:_TEXT_CHARACTERS] or type(error).__name__,
    )


def foreign_call(named: Mapping[str, Any]) -> ForeignCall:
    """Copies the arguments to the host and finds the documents.

    Raises:
        RecordingError: there are no input_ids, or masks and lengths that do not fit them.
    """
    ids = named.get("input_ids")
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.ndim not in (1, 2) or not ids.numel():
        what = f"{list(ids.shape)} {ids.dtype}" if isinstance(ids, Tensor) else type(ids).__name__
        raise RecordingError(
            f"wrong-shape: record: the module was called with arguments {sorted(named)[:20]}, and "
            f"'input_ids' is {what}; a recording needs integer token ids of shape [B, L]. Hook the module "
            "that takes them"
        )
    host, scalars = _host({name: value for name, value in named.items() if name != "input_ids"})
    # Copied even from the CPU: the program may reuse its buffers before the recording is written.
    token_ids = ids.detach().to("cpu", torch.int64, copy=True)
    token_ids = token_ids[None] if token_ids.ndim == 1 else token_ids
    layout = find_documents(token_ids, host)
    labels = host.get("labels")
    if labels is not None and labels.shape != token_ids.shape:
        labels = None
    call = ForeignCall(token_ids=token_ids, layout=layout, tensors=host, scalars=scalars, labels=labels)
    call.extras = {name: value for name, value in host.items() if not _derivable(name, value, call)}
    return call


def _host(named: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(Tensors on the host, numbers, flags and text) by argument name, "a.b" of nested ones."""
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    for name, value in named.items():
        _collect(str(name), value, tensors, scalars, depth=0)
    return tensors, scalars


def _collect(
    name: str, value: Any, tensors: dict[str, Tensor], scalars: dict[str, Any], *, depth: int
) -> None:
    if len(tensors) + len(scalars) >= _MOST_ARGUMENTS:
        return
    if len(name) > _NAME_CHARACTERS:
        # Not hash(), which is salted: each process would give the argument another name.
        name = f"{name[: _NAME_CHARACTERS - 9]}~{zlib.crc32(name.encode('utf-8', 'surrogatepass')):08x}"
    if isinstance(value, Tensor):
        if not _storable(value):
            scalars[name] = f"<{type(value).__name__} {list(value.shape)} {value.dtype} {value.layout}>"
        elif value.ndim == 0 and value.device.type == "cpu":
            scalars[name] = _scalar(value.item())
        else:
            tensors[name] = value.detach().to("cpu", copy=True)
    elif isinstance(value, Mapping) and depth < _DEEPEST:
        for key, inner in value.items():
            _collect(f"{name}.{key}", inner, tensors, scalars, depth=depth + 1)
    elif isinstance(value, (list, tuple)) and len(value) <= _MOST_ARGUMENTS and depth < _DEEPEST:
        for number, inner in enumerate(value):
            _collect(f"{name}.{number}", inner, tensors, scalars, depth=depth + 1)
    elif value is not None:
        scalars[name] = _scalar(value)


# A foreign module may be given anything; so much of it is kept.
_MOST_ARGUMENTS = 4096
_DEEPEST = 8
_NAME_CHARACTERS = 150
_TEXT_CHARACTERS = 2000


def _storable(value: Tensor) -> bool:
    """Whether its bits can be copied into a file: strided, of a known dtype, whole, and not on meta."""
    plain = value.layout == torch.strided and not value.is_nested and not isinstance(value, DTensor)
    return plain and value.dtype in DTYPES.values() and not value.is_meta


def _scalar(value: Any) -> Any:
    """A JSON value of bounded size."""
    if isinstance(value, str):
        return value[:_TEXT_CHARACTERS]
    if isinstance(value, (bool, float)) or (isinstance(value, int) and value.bit_length() <= 64):
        return value
    return f"<{type(value).__name__}>"


def _derivable(name: str, value: Tensor, call: ForeignCall) -> bool:
    """Whether the batch and its documents' places already say it."""
    layout = call.layout
    if name == _MASK:
        return value.shape == call.token_ids.shape and "inside" not in layout.padding
    if name == _POSITIONS:
        return value.shape == call.token_ids.shape and not layout.offset_positions
    if name in CU_SEQLENS:
        # over all slots of a masked call they are not the documents' lengths
        fits = value.ndim == 1 and value.numel() > 0 and int(value[-1]) == layout.slots.numel()
        return fits and bool((value.diff() > 0).all())
    return False


def find_documents(token_ids: Tensor, tensors: Mapping[str, Tensor]) -> Layout:
    """The documents of [B, L] token ids, by whatever of mask, positions, lengths or ids `tensors` has.

    Raises:
        RecordingError: cumulative lengths that do not fit, or no real slot at all.
    """
    rows, width = token_ids.shape
    mask = tensors.get(_MASK)
    mask = mask if mask is not None and mask.shape == token_ids.shape else None
    real = torch.ones_like(token_ids, dtype=torch.bool) if mask is None else mask != 0
    flat = real.flatten()
    slots = flat.nonzero()[:, 0]
    if slots.numel() == 0:
        raise RecordingError(f"empty: record: 'attention_mask' {list(token_ids.shape)} has no real tokens")
    row = slots // width
    begins = torch.ones_like(slots, dtype=torch.bool)
    begins[1:] = row[1:] != row[:-1]
    if (bounds := _bounds(tensors, slots.numel(), flat.numel())) is not None:
        # Which document, not where one begins: that slot may be masked.
        places = slots if bounds[-1] == flat.numel() else torch.arange(slots.numel())
        begins[1:] |= torch.searchsorted(bounds, places, right=True).diff() != 0
    for name in SEQUENCE_IDS:
        if (ids := tensors.get(name)) is not None and ids.shape == token_ids.shape:
            begins[1:] |= ids.flatten()[slots].diff() != 0
    if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
        begins[1:] |= mask.flatten()[slots].diff() != 0  # an id per document instead of 1
    positions, offset = tensors.get(_POSITIONS), False
    if positions is not None and positions.ndim <= 2 and positions.shape[-1] == width:
        line = positions.expand(rows, width).flatten()[slots]
        begins[1:] |= line.diff() != 1
        first = begins.nonzero()[:, 0]
        offset = bool((line[first] != 0).any())
    first = begins.nonzero()[:, 0]
    lengths = torch.diff(first, append=torch.tensor([slots.numel()]))
    if lengths.numel() > MAX_DOCUMENTS:
        raise RecordingError(
            f"too-large: record: 'input_ids' {list(token_ids.shape)} contain {lengths.numel():,} documents; "
            f"an input can have at most {MAX_DOCUMENTS:,}"
        )
    starts = tuple((int(s) // width, int(s) % width) for s in slots[first])
    packed = len({r for r, _ in starts}) < len(starts)
    return Layout(
        slots=slots,
        lengths=tuple(lengths.tolist()),
        starts=starts,
        layout="packed" if packed or bounds is not None else "padded",
        padding=_padding(real),
        offset_positions=offset,
    )


def _bounds(tensors: Mapping[str, Tensor], real: int, slots: int) -> Tensor | None:
    """Cumulative lengths, checked: over the real tokens, or over all slots."""
    for name in CU_SEQLENS:
        if (bounds := tensors.get(name)) is None:
            continue
        if (
            bounds.ndim != 1
            or bounds.is_floating_point()
            or bounds.numel() < 2
            or int(bounds[0]) != 0
            or int(bounds[-1]) not in (real, slots)
            or bool((bounds.diff() < 0).any())
        ):
            raise RecordingError(
                f"wrong-shape: record: '{name}' {bounds.flatten()[:8].tolist()} is not a list of cumulative "
                f"lengths of the {real} tokens in {slots} slots"
            )
        return bounds.to(torch.int64)
    return None


def _padding(real: Tensor) -> tuple[str, ...]:
    some = real[real.any(dim=1)]
    # Rows without any token are left out: argmax gives 0 for them, and they would look like a hole.
    width = some.shape[1]
    first = some.int().argmax(dim=1)
    last = width - 1 - some.flip(1).int().argmax(dim=1)
    inside = (last - first + 1) != some.sum(dim=1)
    padded = {"left": first > 0, "right": last < width - 1, "inside": inside}
    return tuple(name for name, where in padded.items() if bool(where.any()))


def output_slots(call: ForeignCall, *, width: int, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Which rows of an output predict a next token.

    Args:
        width: the output's second dimension; fewer than L are the last ones (`logits_to_keep`).
        keep: [width] columns, where the caller chose them.

    Returns:
        rows: [R] int64 into the flattened [B * width] output.
        tokens: [R] int64 into the documents laid end to end: token t, which predicts token t + 1.
    """
    length = call.token_ids.shape[1]
    columns = torch.arange(length - width, length) if keep is None else keep
    position = torch.full((length,), -1, dtype=torch.int64)
    position[columns] = torch.arange(width)
    slots = call.layout.slots
    column = slots % length
    predicts = torch.ones_like(slots, dtype=torch.bool)
    # A document's last token predicts nothing: the slot after it is the next document's first.
    predicts[torch.tensor(call.layout.lengths).cumsum(0) - 1] = False
    predicts[:-1] &= slots.diff() == 1  # the slot before a hole predicts the hole
    tokens = (predicts & (position[column] >= 0)).nonzero()[:, 0]
    rows = slots[tokens] // length * width + position[column[tokens]]
    return rows, tokens


def next_tokens(call: ForeignCall, tokens: Tensor) -> Tensor:
    """[R] int64: the label of each of `tokens`."""
    return call.token_ids.flatten()[call.layout.slots[tokens + 1]]


def canonical_batch(call: ForeignCall, trained: Tensor | None, weights: Tensor | None) -> PackedBatch:
    """The call's documents as a PackedBatch without a tail.

    Args:
        trained: [N] bool, in document order; None: every token that has a next one.
        weights: [N] float32, likewise; None: zeros.
    """
    ids = call.token_ids.flatten()[call.layout.slots]
    samples, pieces, start = [], [], 0
    for number, length in enumerate(call.layout.lengths):
        part = slice(start, start + length)
        mask = torch.ones(length, dtype=torch.bool) if trained is None else trained[part].clone()
        mask[-1] = False
        samples.append(TrainSample(token_ids=ids[part].clone(), loss_mask=mask, sample_id=number))
        pieces.append(torch.zeros(length) if weights is None else weights[part])
        start += length
    return pack(samples, pieces)


def labelled(call: ForeignCall, tokens: Tensor) -> Tensor:
    """[R] bool: whether the call's labels, if it has any, ask for the next token of each of `tokens`."""
    if call.labels is None:
        return torch.ones_like(tokens, dtype=torch.bool)
    return call.labels.flatten()[call.layout.slots[tokens + 1]] != IGNORE_LABEL


def other_labels(call: ForeignCall, tokens: Tensor) -> int:
    """How many labels are neither ignored nor the next token of the input."""
    if call.labels is None:
        return 0
    labels = call.labels.flatten()[call.layout.slots[tokens + 1]]
    return int(((labels != IGNORE_LABEL) & (labels != next_tokens(call, tokens))).sum())


def tensors_of(output: Any) -> Iterator[tuple[str, Tensor]]:
    """The floating-point tensors of a module's output, by name; caches and other objects are passed over."""
    if isinstance(output, Tensor):
        yield "output", output
    elif isinstance(output, Mapping):
        for name, value in output.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                yield str(name), value
    elif isinstance(output, (tuple, list)):
        for number, value in enumerate(output):
            if isinstance(value, Tensor) and value.is_floating_point():
                yield f"output.{number}", value
