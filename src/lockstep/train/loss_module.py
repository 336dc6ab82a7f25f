"""Decoder, head and loss as one module: the forward pass of every backend, and which slots of a pack its head
sees.

The head of a policy gives logprobs of the labels. A scalar head (lockstep.models.heads) gives one number per
slot, and it takes the place of the logprob everywhere: in the loss, in `StepStats` and in what `logprobs`
returns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.config.train import TrainConfig
from lockstep.errors import TrainError
from lockstep.models.architectures import causal_lm
from lockstep.models.forward import DecoderInputs, Ring, decoder_inputs, run_decoder
from lockstep.models.heads import SCORE, head_of, head_options, linear_values, scalar_head
from lockstep.ops.logprobs import HeadOptions, VocabShard, linear_logprob_loss, linear_logprobs
from lockstep.protocols.train import StepStats, TokenLoss
from lockstep.schema.batch import IGNORE_LABEL, PackedBatch

Rows = Tensor | slice
"""[R] int64: slots of a pack; or all of them, as a slice."""


def static_head(config: TrainConfig, module: nn.Module) -> bool:
    """Return whether the head sees every slot of a pack, so that no shape of its graph depends on the mask. A
    scalar head is one product outside of every graph: it sees what is asked for."""
    static = config.execution != "eager" if config.static_capacity is None else config.static_capacity
    return static and scalar_head(module) is None


def head_rows(batch: PackedBatch, *, static: bool, device: torch.device) -> tuple[Rows, Tensor]:
    """The slots that the head sees, and their labels [R], both on `device`.

    Args:
        batch: on the host: the index is made where the mask is, so that a GPU is not waited for.
        static: every slot, masked ones labelled -100, so that shapes do not depend on the mask. Otherwise
            only the trained ones. Where documents share rows, the slots that the rows are of: every trained
            slot has a row of its own.
    """
    if static and (shared := batch.shared_rows) is not None:
        slots = shared.slots
        labels = torch.where(batch.loss_mask, batch.labels, IGNORE_LABEL).index_select(0, slots)
        return slots.to(device, non_blocking=True), labels.to(device, non_blocking=True)
    if static:
        labels = torch.where(batch.loss_mask, batch.labels, IGNORE_LABEL)
        return slice(0, batch.num_slots), labels.to(device, non_blocking=True)
    rows = batch.loss_mask.nonzero()[:, 0]
    labels = batch.labels.index_select(0, rows)
    return rows.to(device, non_blocking=True), labels.to(device, non_blocking=True)


def ring_rows(
    batch: PackedBatch, index: Tensor, *, static: bool, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """`head_rows` for one rank of a ring, which has the slots `index` [t] of the pack, on the host.

    Returns:
        rows: [R] int64, the slots of the pack that are this rank's and that the head sees.
        labels: [R] int64.
        local: [R] int64, where they are among the rank's t.
    """
    mask = batch.loss_mask.index_select(0, index)
    local = torch.arange(len(index)) if static else mask.nonzero()[:, 0]
    rows = index.index_select(0, local)
    labels = batch.labels.index_select(0, rows)
    if static:
        labels = torch.where(mask, labels, IGNORE_LABEL)
    moved = [t.to(device, non_blocking=True) for t in (rows, labels, local)]
    return moved[0], moved[1], moved[2]


def scatter(values: Tensor, rows: Rows, num_slots: int) -> Tensor:
    """[..., R] into [..., T], 0 in the other slots."""
    if isinstance(rows, slice):
        return values
    return values.new_zeros(*values.shape[:-1], num_slots).index_copy_(-1, rows, values)


@dataclass(frozen=True, kw_only=True, slots=True)
class RingPart:
    """The part of a pack that one rank of a ring computes."""

    ring: Ring
    local: Tensor
    """[R] int64: which of the rank's own hidden states the head sees."""
    every: Rows
    """The slots of the pack that the head sees on all ranks of the ring together, in pack order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchOutput:
    """The results of one rank for one micro-batch: detached, on its device."""

    loss: Tensor
    """Scalar: this rank's share."""
    tokens: Tensor
    """[2 + K, T] float32: logprobs, entropy, and the K terms of the loss; 0 in slots that are not this
    rank's."""


def token_rows(logprobs: Tensor, entropy: Tensor, terms: Tensor | None) -> Tensor:
    """[2 + K, R], detached, of logprobs [R], entropy [R] and terms [K, R]."""
    both = torch.stack([logprobs.detach(), entropy.detach()])
    return both if terms is None else torch.cat([both, terms])


def step_stats(outputs: Iterable[MicroBatchOutput]) -> StepStats:
    """The results of a step's micro-batches, in their order."""
    stats = StepStats(losses=[], logprobs=[], entropy=[])
    for output in outputs:
        stats.losses.append(output.loss)
        stats.logprobs.append(output.tokens[0])
        stats.entropy.append(output.tokens[1])
        stats.terms.append(output.tokens[2:])
    return stats


def require_finite(losses: Sequence[Tensor], batches: Sequence[PackedBatch], *, step: int) -> None:
    """Check the losses of all micro-batches of a step, with one wait for the device.

    Args:
        losses: scalars, one per batch.

    Raises:
        TrainError: names the first micro-batch whose loss is NaN or infinite, and its samples.
    """
    values = torch.stack(list(losses)).tolist() if losses else []
    for index, value in enumerate(values):
        if not math.isfinite(value):
            raise TrainError(
                f"not-finite: step {step}, micro-batch {index} of {len(values)}: the loss is {value}; its "
                f"samples are {list(batches[index].sample_ids)}. No weight was changed. Look at these "
                "samples (advantages, rollout_logprobs, loss_weights), lower train.lr, or set model.dtype = "
                "'float32'"
            )


class LossModule(nn.Module):
    """forward(batch, rows, labels, loss) -> the loss of one micro-batch.

    Args:
        policy: a transformers causal LM, or a model with a scalar head; it is the child `policy`, so a
            parameter is called "policy." + its name.
        config: layout, padding side, execution.
        temperature: logprobs are of logits divided by it.
        compiled: whether the layers are compiled: their inputs must then hold no Python lengths.
        vocab: which part of the vocabulary the policy's head has; None: all of it.
    """

    def __init__(
        self,
        policy: nn.Module,
        *,
        config: TrainConfig,
        temperature: float,
        compiled: bool,
        vocab: VocabShard | None = None,
    ) -> None:
        super().__init__()
        self.policy = policy
        self.config, self.temperature, self.compiled, self.vocab = config, temperature, compiled, vocab
        self._static_head = static_head(config, policy)
        self._has_scalar_head = scalar_head(policy) is not None
        self.tokens: Tensor | None = None
        self._head_parts: tuple[nn.Linear, HeadOptions] | None = None

    def forward(
        self,
        batch: PackedBatch,
        rows: Rows,
        labels: Tensor,
        loss: TokenLoss | None,
        part: RingPart | None = None,
    ) -> Tensor:
        """The loss, a scalar; without `loss` the logprobs [R], or values of a scalar head. `self.tokens`
        keeps the [2 + K, R] of the last loss: logprobs, entropy (0 with a scalar head), terms; detached.

        Args:
            rows: the R slots of the pack that the head sees; on a ring, of this rank's.
            part: on a ring. A separable loss is then of this rank's rows. Any other is of the whole pack,
                the same on every rank of the ring, and its gradients are of this rank's rows.
        """
        inputs = decoder_inputs(
            self.policy,
            batch,
            layout=self.config.layout,
            padding_side=self.config.padding_side,
            compiled=self.compiled,
            ring=None if part is None else part.ring,
        )
        slots: Rows | Literal["rows"] = rows if part is None else part.local
        if "shared" in inputs.kwargs and batch.shared is not None and self._static_head:
            slots = "rows"  # those of `head_rows`, in their order
        hidden = run_decoder(self.policy, inputs, slots)
        if self._has_scalar_head:  # its weight is read anew each time, like the head's Parameters below
            scores = cast(nn.Linear, self.policy.get_submodule(SCORE))
            values = linear_values(hidden, scores.weight, batch.loss_mask[rows])
            if loss is None:
                return values
            return self._loss_of(loss, values, torch.zeros_like(values), batch=batch, rows=rows, part=part)
        weight, head = self._head(entropy_grad=loss is not None and loss.entropy_grad)
        if loss is None:
            return linear_logprobs(hidden, weight, labels, head=head)[0]
        token_loss = loss
        # Chunk by chunk: loss and gradients of a chunk are made while its logits are in cache, and the logits
        # of all rows never exist together.
        if loss.separable:
            # The first entry has the rows of a batch that has none: no chunk is called then.
            terms_of = [hidden.new_empty(len(loss.terms), 0, dtype=torch.float32)]

            def chunk_loss(logprobs: Tensor, entropy: Tensor, chunk: slice) -> Tensor:
                slots = (
                    rows[chunk]
                    if isinstance(rows, Tensor)
                    else slice(rows.start + chunk.start, rows.start + chunk.stop)
                )
                output = token_loss(logprobs, entropy, batch, slots)
                if output.terms is not None:
                    terms_of.append(output.terms)
                return output.loss

            value, logprobs, entropy = linear_logprob_loss(hidden, weight, labels, chunk_loss, head=head)
            self.tokens = token_rows(logprobs, entropy, torch.cat(terms_of, 1) if loss.terms else None)
            return value
        logprobs, entropy = linear_logprobs(hidden, weight, labels, head=head)
        return self._loss_of(loss, logprobs, entropy, batch=batch, rows=rows, part=part)

    def _loss_of(
        self,
        loss: TokenLoss,
        logprobs: Tensor,
        entropy: Tensor,
        *,
        batch: PackedBatch,
        rows: Rows,
        part: RingPart | None,
    ) -> Tensor:
        """The loss of what the head gave for this rank's rows, [R] each: of these alone if it is separable,
        else of the rows of the whole ring."""
        if part is None or loss.separable:
            output = loss(logprobs, entropy, batch, rows)
            self.tokens = token_rows(logprobs, entropy, output.terms)
            return output.loss
        # Such a loss (DPO, a ratio of whole completions) needs every logprob of a document, which are on
        # several ranks.
        whole = [_of_the_ring(values, rows, part, batch.num_slots) for values in (logprobs, entropy)]
        output = loss(whole[0], whole[1], batch, part.every)
        terms = None
        if output.terms is not None:
            slots = scatter(output.terms, part.every, batch.num_slots)
            terms = slots[:, rows] if isinstance(rows, slice) else slots.index_select(1, rows)
        self.tokens = token_rows(logprobs, entropy, terms)
        return output.loss

    def _head(self, *, entropy_grad: bool) -> tuple[Tensor, HeadOptions]:
        """The head's weight and options. Its Parameters are read anew each time, because wrappers that shard
        them replace them around a forward."""
        if self._head_parts is None:
            compiled = self.config.execution != "eager"
            options = head_options(
                self.policy, temperature=self.temperature, compiled=compiled, vocab=self.vocab
            )
            linear = cast(nn.Linear, causal_lm(self.policy).get_output_embeddings())
            self._head_parts = linear, options
        linear, options = self._head_parts
        if options.bias is not linear.bias or options.entropy_grad != entropy_grad:
            options = replace(options, bias=linear.bias, entropy_grad=entropy_grad)
            self._head_parts = linear, options
        return linear.weight, options


def _of_the_ring(figures: Tensor, rows: Rows, part: RingPart, num_slots: int) -> Tensor:
    """Values of this rank's rows -> values of all rows of all ranks of the ring, in pack order."""
    whole: Tensor = _RingSum.apply(scatter(figures, rows, num_slots), part.ring.group)  # type: ignore[no-untyped-call]
    return whole if isinstance(part.every, slice) else whole.index_select(0, part.every)


class _RingSum(torch.autograd.Function):
    """Each rank's own slots, 0 elsewhere, into all slots. Every rank computes one and the same loss of them,
    so the gradient of its own slots is already whole: nothing is added up in backward."""

    @staticmethod
    def forward(ctx: Any, figures: Tensor, group: dist.ProcessGroup) -> Tensor:
        # all_reduce writes in place, and the input belongs to the caller's graph.
        whole = figures.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class LogprobModule(nn.Module):
    """forward(inputs, labels) -> logprobs and entropy [T], in plain differentiable ops that a compiler of
    whole graphs can open: tensors in, tensors out, no Python closure.

    The head is inside because such a compiler (DeepCompile) reduces only the gradients that its own graph
    makes. It costs the float32 logits of the whole pack, which LossModule never holds.
    """

    def __init__(self, policy: nn.Module, *, temperature: float) -> None:
        super().__init__()
        self.policy = policy
        head = head_of(policy)
        linear = causal_lm(policy).get_output_embeddings()
        self._linear = next(path for path, module in policy.named_modules() if module is linear)
        options = HeadOptions(temperature=temperature, softcap=head.softcap, logit_scale=head.logit_scale)
        self._scale, self._cap = options.scale, options.cap

    def forward(
        self, token_ids: Tensor, positions: Tensor, labels: Tensor, cells: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Arguments: those of DecoderInputs, and labels [T], negative where nothing is predicted."""
        inputs = DecoderInputs(
            token_ids=token_ids, positions=positions, cells=cells, num_slots=labels.shape[0], kwargs=kwargs
        )
        hidden = run_decoder(self.policy, inputs)
        valid = labels >= 0
        logits = self.policy.get_submodule(self._linear)(hidden).float() * self._scale
        if self._cap is not None:
            logits = self._cap * torch.tanh(logits / self._cap)
        logp = torch.log_softmax(logits, -1)
        logprobs = logp.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        entropy = -(logp.exp() * logp).sum(-1)
        return torch.where(valid, logprobs, 0.0), torch.where(valid, entropy, 0.0)
