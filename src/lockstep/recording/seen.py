"""A foreign forward between its arguments and its gradient, and the recorded input that it becomes."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lockstep.recording.calls import (
    ForeignCall,
    canonical_batch,
    labelled,
    next_tokens,
    other_labels,
    output_slots,
    tensors_of,
    unusable_call,
)
from lockstep.recording.files import fingerprint
from lockstep.schema.recording import InputMeta, RecordedInput, RecordedOutputs

_LOGITS = ("logits", "output", "output.0")
_LOGPROBS = ("log_probs", "logprobs", "logps", "action_log_probs")
_OTHERS = ("entropy", "entropies")
"""Per-token outputs beside the logprobs; a loss that uses them is no function of the logprobs alone."""


@dataclass(kw_only=True, slots=True)
class SeenCall:
    """One forward. Nothing here belongs to a graph, and only [R] tensors stay on the device."""

    call: ForeignCall
    update: int
    micro_batch: int
    time: float
    keep: Any = None
    """The argument logits_to_keep."""
    autocast: str | None = None
    graph: bool = True
    """Whether the forward built one."""
    tokens: Tensor | None = None
    """[R] int64, host: which tokens of the documents the outputs below are of."""
    logprobs: Tensor | None = None
    """[R] float32."""
    gradient: Tensor | None = None
    """[R] float32, dL/dlogprob; None: no backward came by."""
    unexplained: Tensor | None = None
    total: Tensor | None = None
    output_gradients: dict[str, Tensor] = field(default_factory=dict)
    fingerprints: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    error: str | None = None

    def relative_residual(self) -> float:
        """|dL/dlogits less what dL/dlogprob gives| / |dL/dlogits|; 0 without a backward."""
        if self.total is None or self.unexplained is None or not float(self.total):
            return 0.0
        return math.sqrt(float(self.unexplained) / float(self.total))

    def give_up(self, error: Exception) -> None:
        """Keep the arguments only."""
        call = self.call
        self.call = unusable_call({"input_ids": call.token_ids, **call.tensors, **call.scalars}, error)
        self.tokens = self.logprobs = self.gradient = None
        self.output_gradients.clear()
        self.remarks.clear()

    def add(self, values: Tensor, unexplained: Tensor, total: Tensor) -> None:
        """Add the part of one backward."""
        self.gradient = values if self.gradient is None else self.gradient + values
        self.unexplained = unexplained if self.unexplained is None else self.unexplained + unexplained
        self.total = total if self.total is None else self.total + total


def watch_output(
    seen: SeenCall,
    output: Any,
    *,
    temperature: float,
    keep_gradient: Callable[[Tensor], Tensor] | None,
) -> None:
    """Logprobs and fingerprints of a forward's output now, dL/dlogprob when its gradient arrives."""
    named = {name: t for name, t in tensors_of(output) if not isinstance(t, DTensor)}
    for name, tensor in named.items():
        seen.fingerprints[name] = fingerprint([(name, tensor.detach())])
    if seen.call.unusable is not None:
        return
    rows, width = seen.call.token_ids.shape
    for name in _LOGITS:
        logits = named.get(name)
        if logits is not None and logits.ndim == 3 and _is_logits(logits, seen):
            _watch_logits(seen, logits, temperature=temperature)
            _keep(seen, name, logits, keep_gradient)
            return
    for name in _LOGPROBS:
        logprobs = named.get(name)
        if logprobs is not None and logprobs.ndim == 2 and logprobs.shape[0] == rows:
            if logprobs.shape[1] > width:
                continue
            _watch_logprobs(seen, logprobs)
            _keep(seen, name, logprobs, keep_gradient)
            for other in _OTHERS:
                _watch_other(seen, named.get(other))
            return
    seen.remarks.append(f"no logits and no logprobs in the output {sorted(named)}")


def _is_logits(logits: Tensor, seen: SeenCall) -> bool:
    rows, width = seen.call.token_ids.shape
    fits = logits.shape[0] == rows and 0 < logits.shape[1] <= width
    return fits and logits.shape[2] > int(seen.call.token_ids.max())


def _keep(
    seen: SeenCall, name: str, output: Tensor, keep_gradient: Callable[[Tensor], Tensor] | None
) -> None:
    if keep_gradient is None or not output.requires_grad:
        return

    def kept(gradient: Tensor) -> None:
        copy = keep_gradient(gradient)
        before = seen.output_gradients.get(name)
        seen.output_gradients[name] = copy if before is None else before + copy

    output.register_hook(kept)


def _watch_logits(seen: SeenCall, logits: Tensor, *, temperature: float) -> None:
    keep = seen.keep if isinstance(seen.keep, Tensor) and seen.keep.ndim == 1 else None
    keep = None if keep is None else keep.detach().cpu().long() % seen.call.token_ids.shape[1]
    rows, seen.tokens = output_slots(seen.call, width=logits.shape[1], keep=keep)
    device = logits.device
    rows = rows.to(device, non_blocking=True)
    labels = next_tokens(seen.call, seen.tokens).to(device, non_blocking=True)
    flat = logits.detach().flatten(0, 1)
    seen.logprobs = token_logprobs(flat, rows, labels, temperature=temperature)
    if not logits.requires_grad:
        return
    # The hook lives in the graph, so what it holds is freed with it; the logits are let go at the first
    # backward already, because a program may keep its loss, and with it the graph's nodes, for longer.
    held: list[Tensor] = [flat]
    later, version = weakref.ref(logits), logits._version

    def arrived(gradient: Tensor) -> None:
        alive = later()
        source = held.pop() if held else None if alive is None else alive.detach().flatten(0, 1)
        if source is None:
            seen.remarks.append("a second backward came when the logits were gone: its gradient is missing")
            return
        with torch.no_grad():
            scale = temperature
            # torch's count of changes in place, such as logits.div_(temperature). Private, in torch 2.11 to
            # 2.13.
            if source._version != version:
                scale = _scale_now(seen, source, rows, labels, temperature)
            if not scale:
                seen.remarks.append("the logits were changed in place: dL/dlogprob could not be recovered")
                return
            gradients = token_gradients(gradient.flatten(0, 1), source, rows, labels, temperature=scale)
            # dL/dx is of the logits as they were, whatever they have become
            seen.add(gradients.values * (temperature / scale), gradients.unexplained, gradients.total)

    logits.register_hook(arrived)


def _scale_now(seen: SeenCall, logits: Tensor, rows: Tensor, labels: Tensor, temperature: float) -> float:
    """The divisor with which logits changed in place give the recorded logprobs: 1 after logits.div_(T); 0 if
    there is none."""
    assert seen.logprobs is not None
    for scale in dict.fromkeys((1.0, temperature)):
        now = token_logprobs(logits, rows, labels, temperature=scale)
        # Not 0: a division in place rounds to the logits'
        # dtype once more; a wrong divisor is far beyond this.
        if float((now - seen.logprobs).abs().mean()) <= 0.02:
            return scale
    return 0.0


def _watch_logprobs(seen: SeenCall, logprobs: Tensor) -> None:
    """A module that returns [B, W] logprobs itself: of every slot (W = L), or of the last W tokens."""
    length, width = seen.call.token_ids.shape[1], logprobs.shape[1]
    first = 0 if width == length else length - 1 - width
    rows, tokens = output_slots(seen.call, width=width, keep=torch.arange(first, first + width))
    has_label = labelled(seen.call, tokens)
    rows, seen.tokens = rows[has_label], tokens[has_label]
    rows = rows.to(logprobs.device, non_blocking=True)
    seen.logprobs = logprobs.detach().flatten().index_select(0, rows).float()
    if not logprobs.requires_grad:
        return

    def arrived(gradient: Tensor) -> None:
        with torch.no_grad():
            values = gradient.flatten().index_select(0, rows).float()
            # In float64, as the residual is a small difference of two sums; rounding may leave it below 0.
            total = gradient.float().square().sum(dtype=torch.float64)
            seen.add(values, (total - values.square().sum(dtype=torch.float64)).clamp(min=0), total)

    logprobs.register_hook(arrived)


def _watch_other(seen: SeenCall, output: Tensor | None) -> None:
    if output is None or not output.requires_grad:
        return

    def arrived(gradient: Tensor) -> None:
        with torch.no_grad():
            square = gradient.float().square().sum(dtype=torch.float64)
            seen.unexplained = square if seen.unexplained is None else seen.unexplained + square
            seen.total = square if seen.total is None else seen.total + square

    output.register_hook(arrived)


def recorded_input(
    seen: SeenCall,
    *,
    outcome: Literal["finished", "pending", "failed"],
    num_micro_batches: int,
    rank: tuple[int, int],
    weights: str | None,
    checkpoint: str | None,
) -> RecordedInput:
    """The call as a RecordedInput. `rank` is (rank, world_size)."""
    call, count = seen.call, sum(seen.call.layout.lengths)
    trained = weighted = logprobs = None
    if seen.tokens is not None and seen.logprobs is not None:
        logprobs = torch.zeros(count).index_copy_(0, seen.tokens, seen.logprobs.cpu())
        trained = torch.zeros(count, dtype=torch.bool).index_fill_(0, seen.tokens, True)
    if seen.tokens is not None and seen.gradient is not None:
        # Minus: the surrogate's loss is -sum(weight * logprob), and gets this gradient again in a replay.
        weighted = torch.zeros(count).index_copy_(0, seen.tokens, -seen.gradient.cpu())
        trained = _trained(seen, weighted)
    batch = canonical_batch(call, trained, weighted)
    outputs = None
    if outcome == "finished" or (outcome == "failed" and logprobs is not None):
        if logprobs is not None:
            logprobs = torch.where(batch.loss_mask, logprobs, 0.0)
        outputs = RecordedOutputs(loss=None, logprobs=logprobs, fingerprints=dict(seen.fingerprints))
    extras = dict(call.extras)
    for name, gradient in seen.output_gradients.items():
        extras[f"grad.{name}"] = gradient
    meta = InputMeta(
        step=seen.update,
        update=seen.update,
        micro_batch=seen.micro_batch,
        num_micro_batches=max(num_micro_batches, seen.micro_batch + 1),
        rank=rank[0],
        world_size=rank[1],
        mesh={"dp": rank[0]},
        time=seen.time,
        weights=weights,
        checkpoint=checkpoint,
        outcome=outcome,
        error=_error(seen),
        documents=_documents(seen),
    )
    return RecordedInput(meta=meta, batch=batch, outputs=outputs, extras=extras)


def _trained(seen: SeenCall, weighted: Tensor) -> Tensor:
    """[N] bool: where the labels ask for a token, or where there is a gradient; with neither, all that the
    output was computed for (a forward whose advantages are all 0)."""
    assert seen.tokens is not None
    with_gradient = weighted != 0
    if seen.call.labels is not None:
        has_label = labelled(seen.call, seen.tokens)
        return with_gradient.index_fill_(0, seen.tokens[has_label], True)
    if bool(with_gradient.any()):
        return with_gradient
    return torch.zeros_like(with_gradient).index_fill_(0, seen.tokens, True)


def _error(seen: SeenCall) -> str | None:
    """The program's error, and why only the arguments of the input are kept."""
    unusable = seen.call.unusable
    kept = None if unusable is None else f"kept as it was called with, not as documents: {unusable}"
    return "; ".join(filter(None, (seen.error, kept))) or None


def _documents(seen: SeenCall) -> tuple[dict[str, Any], ...]:
    """Where each document stood; the first one also has what is known of the call."""
    documents: list[dict[str, Any]] = [{"row": r, "column": c} for r, c in seen.call.layout.starts]
    call: dict[str, Any] = {
        "shape": list(seen.call.token_ids.shape),
        "padding": list(seen.call.layout.padding),
        "graph": seen.graph,
    }
    if seen.call.unusable is not None:
        call["unusable"] = seen.call.unusable
    if seen.call.scalars:
        call["arguments"] = dict(seen.call.scalars)
    if seen.autocast is not None:
        call["autocast"] = seen.autocast
    if seen.total is not None:
        call["relative_residual"] = seen.relative_residual()
    if seen.call.layout.offset_positions:
        call["positions"] = "position_ids do not start at 0 in every document; they are among the extras"
    if seen.tokens is not None and (other := other_labels(seen.call, seen.tokens)):
        call["labels"] = f"{other} labels are not the next token of the input"
    if seen.remarks:
        call["remarks"] = list(dict.fromkeys(seen.remarks))
    documents[0]["call"] = call
    return tuple(documents)


# Logprobs of next tokens and dL/dlogprob out of logits that someone else's loss was made of.
#
# A loss that depends on the logits x of a row only through logprob(y) = (x / temperature)[y] - logsumexp has
#
#     dL/dx = dL/dlogprob * (onehot(y) - p) / temperature,    p = softmax(x / temperature)
#
# so dL/dlogprob is the least-squares solution of one unknown per row, and what is left over says how far the
# loss is from being such a function.


_CHUNK_ENTRIES = 1 << 24
"""Float32 entries of one working copy: 64 MiB, whatever the number of rows."""


def token_logprobs(logits: Tensor, rows: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """[R] float32, nats: log softmax(logits[rows] / temperature)[labels].

    Args:
        logits: [S, V], any float dtype; no [R, V] copy of it is made.
        rows: [R] int64.
        labels: [R] int64.
    """
    parts = []
    for part in _chunks(rows.shape[0], logits.shape[1]):
        x = _scaled(logits, rows[part], temperature)
        picked = x.gather(1, labels[part, None])[:, 0]
        parts.append(picked - x.logsumexp(dim=1))
    return torch.cat(parts) if parts else logits.new_zeros(0, dtype=torch.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenGradients:
    """dL/dlogprob of next tokens and how well it explains dL/dlogits."""

    values: Tensor
    """[R] float32."""
    unexplained: Tensor
    """Scalar float64: sum of squares of dL/dlogits less what `values` give, rows without a next token too."""
    total: Tensor
    """Scalar float64: sum of squares of dL/dlogits."""


def token_gradients(
    gradient: Tensor, logits: Tensor, rows: Tensor, labels: Tensor, *, temperature: float
) -> TokenGradients:
    """The least-squares dL/dlogprob of `labels` from dL/dlogits; the module has the formula.

    Args:
        gradient: [S, V], dL/dlogits.
        logits: [S, V], what the gradient is of.
        rows, labels: [R] int64, as in `token_logprobs`.
    """
    # float64: the difference of two sums below is of rows that are all 0 in most losses
    total = gradient.new_zeros((), dtype=torch.float64)
    for part in _chunks(gradient.shape[0], gradient.shape[1]):
        total += gradient[part].float().square().sum(dtype=torch.float64)
    inside, left = torch.zeros_like(total), torch.zeros_like(total)
    values = []
    for part in _chunks(rows.shape[0], logits.shape[1]):
        x = gradient.index_select(0, rows[part]).float()
        direction = _direction(logits, rows[part], labels[part], temperature)
        square = direction.square().sum(dim=1)
        # a token of probability 1 has no direction, and its logprob no gradient
        solved = torch.where(square > 0, (x * direction).sum(dim=1) / square, 0.0)
        inside += x.square().sum(dtype=torch.float64)
        left += x.sub_(direction.mul_(solved[:, None])).square_().sum(dtype=torch.float64)
        values.append(solved * temperature)
    gradients = torch.cat(values) if values else gradient.new_zeros(0, dtype=torch.float32)
    return TokenGradients(values=gradients, unexplained=left + (total - inside).clamp(min=0), total=total)


def _direction(logits: Tensor, rows: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """[r, V] float32: onehot - p. 1 - p[y] is the sum of the others, which loses no digits near p[y] = 1."""
    p = torch.softmax(_scaled(logits, rows, temperature), dim=1)
    p.scatter_(1, labels[:, None], 0.0)
    others = p.sum(dim=1, keepdim=True)
    return p.neg_().scatter_(1, labels[:, None], others)


def _scaled(logits: Tensor, rows: Tensor, temperature: float) -> Tensor:
    x = logits.index_select(0, rows).float()
    return x if temperature == 1.0 else x / temperature


def _chunks(rows: int, width: int) -> list[slice]:
    size = max(1, _CHUNK_ENTRIES // max(1, width))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
