"""A recorded input as text for a terminal; nothing in it can move the cursor or hide."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor

from lockstep.observe.text import printable
from lockstep.schema.batch import PolicyBatch
from lockstep.schema.recording import InputMeta, RecordedInput

_IDS_SHOWN = 4096


Decoder = Callable[[Sequence[int]], str]
"""Ids to text, special tokens included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Style:
    """Display options of an input."""

    decoder: Decoder | None = None
    """None: ids only."""
    tokens: bool = False
    """One line per token, with its figures."""
    color: bool = False
    """Trained spans in colour; otherwise between [[ and ]]."""


def show_input(recorded: RecordedInput, style: Style) -> Iterator[str]:
    """Lines: where the input comes from, then its documents."""
    meta, batch, outputs = recorded.meta, recorded.batch, recorded.outputs
    yield describe(meta)
    yield (
        f"{len(batch.sample_ids)} documents, {batch.num_tokens} tokens, {int(batch.loss_mask.sum())} of them "
        f"trained, in {batch.num_slots} slots; longest {max(batch.lengths[: len(batch.sample_ids)])}"
    )
    if outputs is None:
        yield "no outputs"
    else:
        named = {"loss": outputs.loss, "grad norm": outputs.grad_norm}
        yield "outputs: " + ", ".join(f"{k} {v:.6g}" for k, v in named.items() if v is not None)
        yield from (f"fingerprint of {printable(k)}: {printable(v)}" for k, v in outputs.fingerprints.items())
    for name, tensor in recorded.extras.items():
        yield f"extra {printable(name)}: {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    if meta.error is not None:
        yield f"error: {printable(meta.error)}"
    if meta.unusable is not None:
        for name, tensor in recorded.extras.items():
            values = " ".join(map(str, tensor.flatten()[:_IDS_SHOWN].tolist()))
            yield f"{printable(name)}: {values}"
        return
    for number in range(len(batch.sample_ids)):
        yield ""
        yield from _document(recorded, number, style)


def describe(meta: InputMeta) -> str:
    """One line: step, micro-batch, rank, outcome, weights."""
    weights = "weights not fingerprinted" if meta.weights is None else f"weights {printable(meta.weights)}"
    stored = "not stored" if meta.checkpoint is None else f"in {meta.checkpoint}"
    return (
        f"step {meta.step}, update {meta.update}, micro-batch {meta.micro_batch + 1} of "
        f"{meta.num_micro_batches}, "
        f"rank {meta.rank} of {meta.world_size}, {meta.outcome}; {weights}, {stored}"
    )


def _document(recorded: RecordedInput, number: int, style: Style) -> Iterator[str]:
    batch, meta = recorded.batch, recorded.meta
    ids = batch.split(batch.token_ids)[number].tolist()
    mask = batch.split(batch.loss_mask)[number]
    parts = [f"{len(ids)} tokens", f"{int(mask.sum())} trained"]
    if isinstance(batch, PolicyBatch):
        parts.append(f"advantage {_span(batch.split(batch.advantages)[number][mask])}")
        if batch.policy_versions:
            parts.append(f"policy version {batch.policy_versions[number]}")
        if batch.trajectories is not None and (part_of := int(batch.split(batch.trajectories)[number][0])):
            parts.append(f"part of trajectory {part_of - 1}")
    if meta.documents:
        parts += [f"{printable(str(k))} {printable(str(v))}" for k, v in meta.documents[number].items()]
    yield f"document {number} (sample {batch.sample_ids[number]}): {', '.join(parts)}"
    if style.tokens:
        yield from _tokens(recorded, number, style.decoder)
    else:
        yield _text(ids, mask.tolist(), style)


def _span(values: Tensor) -> str:
    if not values.numel():
        return "none"
    low, high = float(values.min()), float(values.max())
    return f"{low:.6g}" if low == high else f"{low:.6g} to {high:.6g}"


def _text(ids: Sequence[int], mask: Sequence[bool], style: Style) -> str:
    """The document's text, the trained tokens marked: those that a True of the mask predicts."""
    trained = [False, *mask[:-1]]
    parts = []
    for is_trained, group in groupby(zip(ids, trained, strict=True), key=lambda pair: pair[1]):
        span = [token for token, _ in group]
        text = _decoded(span, style.decoder)
        if not is_trained:
            parts.append(text)
        else:
            parts.append(f"\x1b[1;32m{text}\x1b[0m" if style.color else f"[[{text}]]")
    return ("" if style.decoder is not None else " ").join(parts)


def _decoded(ids: Sequence[int], decoder: Decoder | None) -> str:
    if decoder is None:
        more = f" ... ({len(ids) - _IDS_SHOWN} more)" if len(ids) > _IDS_SHOWN else ""
        return " ".join(map(str, ids[:_IDS_SHOWN])) + more
    return printable(decoder(ids))


def _tokens(recorded: RecordedInput, number: int, decoder: Decoder | None) -> Iterator[str]:
    """One line per token; figures of a token stand in the slot before it, where it is predicted."""
    batch = recorded.batch
    columns = {
        "logprob": getattr(recorded.outputs, "logprobs", None),
        "rollout": getattr(batch, "rollout_logprobs", None),
        "old": getattr(batch, "old_logprobs", None),
        "ref": getattr(batch, "ref_logprobs", None),
        "advantage": getattr(batch, "advantages", None),
        "weight": batch.loss_weights,
    }
    kept = {
        name: batch.split(values)[number].tolist() for name, values in columns.items() if values is not None
    }
    ids = batch.split(batch.token_ids)[number].tolist()
    mask = batch.split(batch.loss_mask)[number].tolist()
    yield f"{'place':>7} {'id':>8} " + " ".join(f"{name:>12}" for name in kept) + "  text"
    for position, token in enumerate(ids):
        trained = position > 0 and mask[position - 1]
        figures = [f"{values[position - 1]:>12.6g}" if trained else " " * 12 for values in kept.values()]
        text = "" if decoder is None else _decoded([token], decoder)
        yield f"{position:>7} {token:>8} {' '.join(figures)}  {text}".rstrip()
