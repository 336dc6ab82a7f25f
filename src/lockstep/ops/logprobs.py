"""Logprob and entropy of labels under a linear language-model head, without a float32 `[R, V]`.

With hidden states h, head weight W and bias b, a row's distribution over the vocabulary is softmax(x), where

    z = h W^T + b                              in the dtype of h, as the model itself computes its logits
    x = cap * tanh(s z / cap) / temperature    in float32; without a soft cap x = s z / temperature

and logprob = x[label] - lse, entropy = lse - sum_v p_v x_v, with lse = log sum_v exp(x_v), p = exp(x - lse).
Gradients:

    d logprob / dx_v = [v = label] - p_v           d entropy / dx_v = p_v (lse - entropy - x_v)

Only one chunk of rows has logits at a time. Shapes: R rows, r rows of one chunk, C hidden size, V vocabulary.
A row whose label is negative (IGNORE_LABEL) has logprob 0, entropy 0 and no gradient, whatever its hidden
state holds, NaN included. float64 inputs are computed in float64.

With HeadOptions.vocab, W and b are rows of one rank's part of the vocabulary: V is then that part, logprob
and entropy are of the whole vocabulary and the same on all ranks, and so is the gradient of h, added up over
the ranks at the end. All ranks of the group must make the same calls with the same hidden states and labels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lockstep.errors import TrainError

# Softmax over a vocabulary of which each rank of a group holds a part of the logits.
#
# Every rank makes four figures per row of its own part (`partial_stats`), all ranks gather them (one
# collective of 16 bytes per row and rank) and merge them in rank order, so that all have the same bits. With
# the logits x of rank i, m_i = max x, s_i = sum exp(x - m_i), w_i = sum exp(x - m_i) (x - m_i) and m = max
# m_i:
#
#     s = sum_i s_i exp(m_i - m)        w = sum_i exp(m_i - m) (w_i + (m_i - m) s_i)
#     lse = m + log s                   entropy = log s - w / s


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabShard:
    """The rows of the head's weight on this rank; every rank of the group holds others.

    Raises:
        ValueError: an empty part, or one outside of the vocabulary.
    """

    group: dist.ProcessGroup
    start: int
    stop: int
    """Vocabulary ids start <= id < stop; parts may be unequal, and follow each other in rank order."""
    whole: int
    """V: ids of all ranks together."""

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop <= self.whole:
            raise ValueError(f"{self.start}:{self.stop} is not a range within a vocabulary of {self.whole}")

    @property
    def common_width(self) -> int:
        """The mean number of ids per rank, rounded up; the same on all of them."""
        return -(-self.whole // self.group.size())


def partial_stats(
    x: Tensor, labels: Tensor, *, start: int, row_sums: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """[4, r]: m, s, w and x at the label (-inf where the label is elsewhere) of x [r, part], in x's dtype.

    Overwrites x.

    Args:
        labels: [r] int64, ids of the whole vocabulary.
        start: id of x's first column.
        row_sums: [r, part] -> [r], such as a row-invariant sum; None: torch's.
    """
    sums = row_sums or functools.partial(torch.sum, dim=-1)
    local = labels - start
    here = (local >= 0) & (local < x.shape[1])
    at_label = x.gather(1, local.clamp(0, x.shape[1] - 1)[:, None])[:, 0]
    peak = x.amax(-1, keepdim=True)
    e = x.sub_(peak).exp()
    total = sums(e)
    return torch.stack([peak[:, 0], total, sums(e.mul_(x)), torch.where(here, at_label, -torch.inf)])


def gathered_stats(own: Tensor, labels: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """`merged_stats` of the figures [4, r] of all ranks; collective."""
    parts = own.new_empty(group.size(), *own.shape)
    dist.all_gather(list(parts.unbind()), own.contiguous(), group=group)
    return merged_stats(parts, labels)


def merged_stats(parts: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """logprob, entropy and lse, [r] each, of the figures [N, 4, r] of `partial_stats` of N parts.

    Rows with a negative label have logprob 0 and entropy 0. A label that is in no part has logprob -inf.
    """
    peaks, totals, weighted, at_labels = parts.unbind(1)
    peak = peaks.amax(0)
    # At most 0, so that no exponential overflows.
    shift = peaks - peak
    factor = shift.exp()
    total = _in_order(totals * factor)
    log_total = total.log()
    entropy = log_total - _in_order(factor * (weighted + shift * totals)) / total
    lse = peak + log_total
    valid = labels >= 0
    return torch.where(valid, at_labels.amax(0) - lse, 0.0), torch.where(valid, entropy, 0.0), lse


def _in_order(terms: Tensor) -> Tensor:
    """[N, r] -> [r]: in rank order, which torch's own sum does not promise for every r."""
    return functools.reduce(torch.add, terms.unbind())


ChunkLoss = Callable[[Tensor, Tensor, slice], Tensor]
"""(logprobs [r], entropy [r], rows) -> scalar; `rows` is where the chunk lies in the R rows."""

CHUNK_ELEMENTS = {"compiled": 2**29, "cuda": 2**27, "cpu": 2**26}
"""Logits of one chunk. Compiled code holds them once, in the compute dtype; and large chunks keep the traffic
of the float32 weight gradient, read and written once per chunk, small beside its matrix product."""
_TILE_ELEMENTS = 2**19
"""Eager on CPU: float32 elements worked on at a time, so that ten passes over them stay in a core's cache."""


class HeadKernels(NamedTuple):
    """Other kernels for logits and their figures, such as row-invariant ones. Neither makes gradients."""

    logits: Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]
    """(hidden [r, C], weight [V, C], bias [V] or None, out [r, V]) -> out, filled."""
    stats: Callable[[Tensor, Tensor, float, float | None], tuple[Tensor, Tensor, Tensor]]
    """(logits [r, V], labels [r], scale, cap) -> logprob, entropy, lse, [r] each."""
    partial: Callable[[Tensor, Tensor, float, float | None, int], Tensor]
    """(logits [r, part], labels [r], scale, cap, id of the first column) -> `partial_stats` [4, r]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadOptions:
    """The options that turn logits into logprobs.

    Raises:
        ValueError: for a negative temperature, or a softcap or chunk_rows that is not positive.
    """

    temperature: float = 1.0
    """Logits are divided by it; 0 (greedy) counts as 1."""
    softcap: float | None = None
    """Gemma 2's final_logit_softcapping."""
    logit_scale: float = 1.0
    """Multiplies logits before the soft cap (Cohere's logit_scale; 1 / Granite's logits_scaling)."""
    bias: Tensor | None = None
    """[V]; gets a gradient if it requires one."""
    chunk_rows: int | None = None
    """Rows with logits at a time; None: by memory."""
    compiled: bool = False
    """Elementwise work through torch.compile, one graph per chunk shape: for static numbers of rows."""
    entropy_grad: bool = False
    """Whether the loss of `linear_logprob_loss` has an entropy term; `linear_logprobs` ignores it."""
    vocab: VocabShard | None = None
    """The part of the vocabulary whose rows the weight has; None: all of it."""
    kernels: HeadKernels | None = None
    """None: matrix product and elementwise code of this module."""

    @property
    def scale(self) -> float:
        """s / temperature of the module's docstring."""
        return self.logit_scale / (self.temperature or 1.0)

    @property
    def cap(self) -> float | None:
        """The soft cap after division by the temperature: x = cap tanh(scale z / cap)."""
        return None if self.softcap is None else self.softcap / (self.temperature or 1.0)

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature must be >= 0, got {self.temperature}")
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"softcap must be > 0 or None, got {self.softcap}")
        if self.chunk_rows is not None and self.chunk_rows < 1:
            raise ValueError(f"chunk_rows must be >= 1 or None, got {self.chunk_rows}")


def token_logprobs(logits: Tensor, labels: Tensor, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Compute logprob and entropy of labels: the slow reference, with float32 copies of all logits and
    gradients by autograd.

    Args:
        logits: [R, V], any float dtype, before temperature.
        labels: [R] int64; negative: logprob and entropy 0.

    Returns:
        logprobs [R] and entropy [R], nats, float32 (float64 for float64 logits).
    """
    valid = labels >= 0
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).masked_fill(~valid[:, None], 0.0)
    logp = torch.log_softmax(wide / (temperature or 1.0), dim=-1)
    logprobs = logp.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    entropy = -(logp.exp() * logp).sum(-1)
    return torch.where(valid, logprobs, 0.0), torch.where(valid, entropy, 0.0)


def linear_logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, head: HeadOptions
) -> tuple[Tensor, Tensor]:
    """Compute logprob and entropy of `labels`, both differentiable; backward recomputes the logits.

    For losses whose coefficients need every row first, and under `no_grad` for logprobs alone.

    Args:
        hidden: [R, C].
        weight: [V, C], same dtype; no gradient is made for it if it does not require one.
        labels: [R] int64; negative: a row that counts for nothing.
        head: the options that turn logits into logprobs.

    Returns:
        logprobs [R] and entropy [R], nats, float32 (float64 for float64 inputs).
    """
    both: tuple[Tensor, Tensor]
    both = _LinearLogprobs.apply(hidden, weight, head.bias, labels, head)  # type: ignore[no-untyped-call]
    return both


def linear_logprob_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, token_loss: ChunkLoss, *, head: HeadOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a loss of the logprobs with its gradients in forward, so that every logit is computed once.

    Args:
        hidden: [R, C].
        weight: [V, C], same dtype; no gradient is made for it if it does not require one.
        labels: [R] int64; negative: a row that counts for nothing.
        token_loss: called once per chunk, in order, with leaves that require grad (entropy: if
            head.entropy_grad); the loss of a row must not depend on other rows. Gradients that it sends to
            anything else are dropped.
        head: how logits become logprobs.

    Returns:
        loss: scalar, the sum over chunks; its backward returns the gradients, once.
        logprobs [R], entropy [R]: nats, detached, float32 (float64 for float64 inputs).

    Raises:
        TrainError: when token_loss returns something that is not a scalar, and when backward runs twice.
    """
    chunks = _chunks(hidden.shape[0], weight, head)
    grads = _HeadGrads(hidden, weight, head, summed=len(chunks) > 1)
    with torch.no_grad():
        logprobs = hidden.new_empty(labels.shape, dtype=torch.promote_types(hidden.dtype, torch.float32))
        entropy = torch.empty_like(logprobs)
        total = logprobs.new_zeros(())
        for rows, chunk_hidden, logits in _logits_by_chunk(hidden, weight, labels, head, chunks):
            logprobs[rows], entropy[rows], lse = row_stats(logits, labels[rows], head)
            loss, dlogprobs, dentropy = _loss_and_grads(token_loss, logprobs, entropy, rows, head)
            total += loss
            if grads.needed:
                figures = _RowFigures(lse, entropy[rows], dlogprobs, dentropy)
                _row_dlogits_(logits, labels[rows], figures, head)
                grads.add(logits, chunk_hidden, weight, rows)
    if grads.needed:
        inputs = (hidden, weight, head.bias)
        total = _WithGrads.apply(*inputs, total, grads.finish())  # type: ignore[no-untyped-call]
    return total, logprobs, entropy


def _loss_and_grads(
    token_loss: ChunkLoss, logprobs: Tensor, entropy: Tensor, rows: slice, head: HeadOptions
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The loss of a chunk, detached, with its gradients by logprobs [r] and, if asked for, entropy [r]."""
    with torch.enable_grad():
        leaves = [logprobs[rows].detach().requires_grad_(), entropy[rows].detach()]
        if head.entropy_grad:
            leaves[1].requires_grad_()
        loss = token_loss(leaves[0], leaves[1], rows)
        if loss.ndim != 0:
            raise TrainError(
                f"wrong-shape: a token loss must return a scalar, got shape {list(loss.shape)}; sum it"
            )
        # materialize_grads: a chunk in which nothing is trained has zeros, where autograd would give None.
        gradients = torch.autograd.grad(loss, leaves[: 1 + head.entropy_grad], materialize_grads=True)
    return loss.detach(), gradients[0], gradients[1] if head.entropy_grad else None


class _LinearLogprobs(torch.autograd.Function):
    """Keeps [R] figures between forward and backward, never logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, head: HeadOptions
    ) -> tuple[Tensor, Tensor]:
        logprobs = hidden.new_empty(labels.shape, dtype=torch.promote_types(hidden.dtype, torch.float32))
        entropy, lse = torch.empty_like(logprobs), torch.empty_like(logprobs)
        chunks = _chunks(hidden.shape[0], weight, head)
        for rows, _, logits in _logits_by_chunk(hidden, weight, labels, head, chunks):
            logprobs[rows], entropy[rows], lse[rows] = row_stats(logits, labels[rows], head)
        ctx.head = head
        # A loss that does not read the entropy sends None for it, which saves a pass over the logits.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, labels, entropy, lse)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dlogprobs: Tensor | None, dentropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        hidden, weight, labels, entropy, lse = ctx.saved_tensors
        chunks = _chunks(hidden.shape[0], weight, ctx.head)
        grads = _HeadGrads(hidden, weight, ctx.head, summed=len(chunks) > 1, needs=ctx.needs_input_grad[:3])
        figures = _RowFigures(
            lse, entropy, torch.zeros_like(lse) if dlogprobs is None else dlogprobs, dentropy
        )
        for rows, chunk_hidden, logits in _logits_by_chunk(hidden, weight, labels, ctx.head, chunks):
            _row_dlogits_(logits, labels[rows], figures.part(rows), ctx.head)
            grads.add(logits, chunk_hidden, weight, rows)
        return *grads.finish(), None, None


class _WithGrads(torch.autograd.Function):
    """A loss whose gradients are already computed. They are scaled in place, so backward runs once."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        loss: Tensor,
        grads: tuple[Tensor | None, Tensor | None, Tensor | None],
    ) -> Tensor:
        ctx.grads = grads
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        if ctx.grads is None:
            raise TrainError(
                "wrong-state: the gradients of linear_logprob_loss were already returned: call backward "
                "only once"
            )
        hidden, weight, bias = (None if grad is None else grad.mul_(dloss) for grad in ctx.grads)
        ctx.grads = None
        return hidden, weight, bias, None, None


# --- chunks ---


def _chunks(num_rows: int, weight: Tensor, head: HeadOptions) -> list[slice]:
    """Slices over the rows, equally long where they can be: compiled code makes one graph per length."""
    kind = "cpu" if weight.device.type == "cpu" else "compiled" if head.compiled else "cuda"
    # Unequal parts of a vocabulary must give equal chunks: there is a collective in each.
    width = weight.shape[0] if head.vocab is None else head.vocab.common_width
    limit = head.chunk_rows or max(1, CHUNK_ELEMENTS[kind] // width)
    count = max(1, -(-num_rows // limit))
    count = next((n for n in range(count, 2 * count + 1) if num_rows % n == 0), count)
    size = max(1, -(-num_rows // count))
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


def _logits_by_chunk(
    hidden: Tensor, weight: Tensor, labels: Tensor, head: HeadOptions, chunks: list[slice]
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """The rows of each chunk, their hidden states [r, C], zero where the label is ignored (0 * NaN would
    reach the weight's gradient), and their logits [r, V]. All have one buffer, which the next chunk
    overwrites: fresh pages would cost as much as the product."""
    weight = weight.detach()
    buffer = weight.new_empty(max((rows.stop - rows.start for rows in chunks), default=0), weight.shape[0])
    for rows in chunks:
        clean = hidden[rows].masked_fill((labels[rows] < 0)[:, None], 0.0)
        yield rows, clean, head_logits(clean, weight, head, buffer[: clean.shape[0]])


@torch.no_grad()
def head_logits(hidden: Tensor, weight: Tensor, head: HeadOptions, out: Tensor) -> Tensor:
    """Logits of hidden states [r, C] before scale and soft cap, written into `out` [r, V]; no gradient."""
    if head.kernels is not None:
        return head.kernels.logits(hidden, weight, head.bias, out)
    if head.bias is None:
        return torch.mm(hidden, weight.t(), out=out)
    return torch.addmm(head.bias, hidden, weight.t(), out=out)


class _HeadGrads:
    """Gradients of hidden, weight and bias, filled chunk by chunk; None for what needs none.

    Over several chunks the weight's is summed in float32. On CUDA the matrix product adds to the float32 sum;
    the CPU has no product with a wider output, so there each chunk's product is rounded once.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        head: HeadOptions,
        *,
        summed: bool,
        needs: tuple[bool, ...] | None = None,
    ) -> None:
        inputs = (hidden, weight, head.bias)
        if needs is None:
            needs = tuple(torch.is_grad_enabled() and x is not None and x.requires_grad for x in inputs)
        self.needed = any(needs)
        wide = torch.promote_types(weight.dtype, torch.float32)
        self._dtype = weight.dtype
        self._vocab = head.vocab
        self._hidden = torch.empty_like(hidden) if needs[0] else None
        self._weight = torch.zeros_like(weight, dtype=wide if summed else None) if needs[1] else None
        self._bias = weight.new_zeros(weight.shape[0], dtype=wide) if needs[2] else None

    def add(self, dlogits: Tensor, hidden: Tensor, weight: Tensor, rows: slice) -> None:
        """One chunk: dlogits [r, V] in the compute dtype, hidden [r, C] with ignored rows zeroed."""
        if self._hidden is not None:
            torch.mm(dlogits, weight, out=self._hidden[rows])
        if self._weight is not None:
            if self._weight.dtype == dlogits.dtype:
                self._weight.addmm_(dlogits.t(), hidden)
            elif self._weight.is_cuda:
                torch.addmm(self._weight, dlogits.t(), hidden, out_dtype=self._weight.dtype, out=self._weight)
            else:
                self._weight += dlogits.t() @ hidden
        if self._bias is not None:
            self._bias += dlogits.sum(0, dtype=self._bias.dtype)

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients in the dtypes of the inputs."""
        if self._hidden is not None and self._vocab is not None:
            dist.all_reduce(self._hidden, group=self._vocab.group)
        weight = None if self._weight is None else self._weight.to(self._dtype)
        bias = None if self._bias is None else self._bias.to(self._dtype)
        return self._hidden, weight, bias


# --- elementwise work on a chunk of logits ---


class _RowFigures(NamedTuple):
    """The values per row that the gradient of a chunk's logits needs, [r] each."""

    lse: Tensor
    entropy: Tensor
    dlogprobs: Tensor
    dentropy: Tensor | None

    def part(self, rows: slice) -> _RowFigures:
        dentropy = None if self.dentropy is None else self.dentropy[rows]
        return _RowFigures(self.lse[rows], self.entropy[rows], self.dlogprobs[rows], dentropy)


def row_stats(logits: Tensor, labels: Tensor, head: HeadOptions) -> tuple[Tensor, Tensor, Tensor]:
    """logprob, entropy and lse, [r] each, of the labels [r] under logits [r, V]; no gradient."""
    scale, cap = head.scale, head.cap
    if head.vocab is not None:
        return gathered_stats(
            own_stats(logits, labels, head, start=head.vocab.start), labels, head.vocab.group
        )
    if head.kernels is not None:
        return head.kernels.stats(logits, labels, scale, cap)
    if head.compiled:
        stats: tuple[Tensor, Tensor, Tensor] = _compiled(_stats)(logits, labels, scale=scale, cap=cap)
        return stats
    parts = [_stats(logits[t], labels[t], scale=scale, cap=cap) for t in _tiles(logits)]
    logprobs, entropy, lse = (torch.cat(column) for column in zip(*parts, strict=True))
    return logprobs, entropy, lse


def stats_in_parts(
    logits: Tensor, labels: Tensor, head: HeadOptions, bounds: Sequence[tuple[int, int]]
) -> tuple[Tensor, Tensor, Tensor]:
    """`row_stats` of logits [r, V] of the whole vocabulary, with the bits that ranks which share it compute.

    Args:
        bounds: start and stop of each rank's part, in rank order.
    """
    parts = [
        own_stats(logits[:, start:stop].contiguous(), labels, head, start=start) for start, stop in bounds
    ]
    return merged_stats(torch.stack(parts), labels)


def own_stats(logits: Tensor, labels: Tensor, head: HeadOptions, *, start: int) -> Tensor:
    """`partial_stats` [4, r] of logits [r, part], one rank's part of the vocabulary from id `start` on."""
    if head.kernels is not None:
        return head.kernels.partial(logits, labels, head.scale, head.cap, start)
    options: dict[str, Any] = {"scale": head.scale, "cap": head.cap, "start": start}
    if head.compiled:
        own: Tensor = _compiled(_partial)(logits, labels, **options)
        return own
    return torch.cat([_partial(logits[t], labels[t], **options) for t in _tiles(logits)], 1)


def _row_dlogits_(logits: Tensor, labels: Tensor, figures: _RowFigures, head: HeadOptions) -> None:
    """Overwrite logits [r, V] with the gradient of the loss by them."""
    start = 0 if head.vocab is None else head.vocab.start
    options: dict[str, Any] = {"scale": head.scale, "cap": head.cap, "start": start}
    if head.compiled:
        _compiled(_dlogits_)(logits, labels, figures, **options)
        return
    for t in _tiles(logits):
        _dlogits_(logits[t], labels[t], figures.part(t), **options)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """fullgraph: shapes beyond dynamo's recompile limit are an error, not a silent return to eager code."""
    return torch.compile(function, dynamic=False, fullgraph=True)


def _tiles(logits: Tensor) -> list[slice]:
    num_rows, width = logits.shape
    step = max(1, _TILE_ELEMENTS // width) if logits.device.type == "cpu" else max(1, num_rows)
    return [slice(start, start + step) for start in range(0, num_rows, step)]


def _stats(
    logits: Tensor, labels: Tensor, *, scale: float, cap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The forward half: `x.sub_`, `e.mul_` reuse one float32 buffer each; compiled, none of them exists."""
    x = _scaled(logits, scale, cap)
    peak = x.amax(-1, keepdim=True)
    at_label = x.gather(1, labels.clamp(min=0)[:, None])
    # Shifted by the row's maximum, so that exp cannot overflow; the shift comes back in lse.
    e = x.sub_(peak).exp()
    total = e.sum(-1)
    log_total = total.log()
    entropy = log_total - e.mul_(x).sum(-1) / total
    lse = peak[:, 0] + log_total
    valid = labels >= 0
    return torch.where(valid, at_label[:, 0] - lse, 0.0), torch.where(valid, entropy, 0.0), lse


def _partial(logits: Tensor, labels: Tensor, *, scale: float, cap: float | None, start: int) -> Tensor:
    """The forward half of one rank's part of the vocabulary."""
    return partial_stats(_scaled(logits, scale, cap), labels, start=start)


def _dlogits_(
    logits: Tensor, labels: Tensor, figures: _RowFigures, *, scale: float, cap: float | None, start: int
) -> None:
    """The backward half: dx = a [v = label] + p (b (lse - entropy - x) - a), then through `_scaled`."""
    valid = labels >= 0
    a = torch.where(valid, figures.dlogprobs, 0.0)[:, None]
    lse = figures.lse[:, None]
    x = _scaled(logits, scale, cap)
    # 1 - tanh^2, taken from the output: x is cap * tanh(...) already.
    slope = None if cap is None else (x / cap).square_().neg_().add_(1.0)
    if figures.dentropy is None:
        dx = x.sub_(lse).exp_().mul_(-a)
    else:
        b = torch.where(valid, figures.dentropy, 0.0)[:, None]
        p = (x - lse).exp_()
        dx = x.neg_().add_(lse - figures.entropy[:, None]).mul_(b).sub_(a).mul_(p)
    local = labels - start
    here = (local >= 0) & (local < dx.shape[1])
    # Where the label is another rank's, or there is none, 0 is added at an index that exists.
    index, values = local.clamp(0, dx.shape[1] - 1)[:, None], torch.where(here[:, None], a, 0.0)
    if torch.compiler.is_compiling():  # a comparison, which fuses as a scatter cannot
        at_label = torch.arange(dx.shape[1], device=dx.device)[None, :] == index
        dx.copy_(torch.where(at_label, dx + values, dx))
    else:
        dx.scatter_add_(1, index, values)
    if slope is not None:
        dx.mul_(slope)
    logits.copy_(dx.mul_(scale))


def _scaled(logits: Tensor, scale: float, cap: float | None) -> Tensor:
    """x of the module's docstring, in a buffer of its own."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    if cap is not None:
        return x.mul_(scale / cap).tanh_().mul_(cap)
    return x if scale == 1.0 else x.mul_(scale)
