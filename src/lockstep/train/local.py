"""The train backend of one process: forward, backward, clip, step, cast, save and load."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.config.train import TrainConfig, outside_of_runs
from lockstep.errors import ConfigError
from lockstep.execution import is_compiled
from lockstep.models.architectures import checkpoint_activations
from lockstep.models.export import export_hf
from lockstep.models.load import LoadedModel
from lockstep.models.lora import merged_state_dict
from lockstep.observe import flight
from lockstep.observe.metrics import Spans
from lockstep.packing import Bucket, repack
from lockstep.protocols.train import OffloadPart, Reference, StepStats, TokenLoss
from lockstep.ranks.context import RankContext
from lockstep.schema.batch import PackedBatch, PolicyBatch, PreferenceBatch
from lockstep.schema.weights import WeightUpdate
from lockstep.train.base import MasterBackend, compile_module
from lockstep.train.loss_module import (
    LossModule,
    MicroBatchOutput,
    head_rows,
    scatter,
    step_stats,
)
from lockstep.train.memory import advice
from lockstep.train.optimizer import GradientStore, global_norm, make_optimizer, trained_parameters
from lockstep.train.routing import step_shares
from lockstep.train.state.files import MASTER, MODEL, Layout, LiveTensors, model_tensors


class LocalBackend(MasterBackend):
    """Trains the module of a LoadedModel in place; an embedded engine may read the same Parameters.

    The module is in eval mode except inside `forward_backward`.

    Args:
        config: the train settings; `backend` and `attention` have been applied by the code that loaded the
            model.
        model: the policy. Its module is used, not copied.
        total_steps: optimizer steps of the whole run: where the schedule ends. 0: no step will follow, so
            neither master weights nor optimizer states are allocated.
        temperature: logprobs are of logits divided by it; 0 counts as 1.
        ref: keep the policy as it is now as frozen reference: a copy, or with LoRA the base weights.
        spans: times "forward" (loss and gradients of the head included) and "backward" of every micro-batch.

    Raises:
        ConfigError: nothing to train, a missing package, or an execution mode that this backend does not
            have.
    """

    shards_weights = False
    reduces_gradients = False
    _layout = Layout(backend="local", mesh={})

    def __init__(
        self,
        config: TrainConfig,
        *,
        model: LoadedModel,
        total_steps: int,
        temperature: float = 1.0,
        ref: bool = False,
        spans: Spans | None = None,
    ) -> None:
        config = outside_of_runs(config)
        if config.execution not in ("eager", "compile", "joint"):
            raise ConfigError(
                f"unsupported-combination: train.execution = {config.execution!r} is not available with "
                "train.backend = 'local'; set 'eager', 'compile' or 'joint'"
            )
        device = next(model.module.parameters()).device
        super().__init__(config, model=model, total_steps=total_steps, spans=spans, device=device)
        self.temperature = temperature
        self._static = (
            config.execution != "eager" if config.static_capacity is None else config.static_capacity
        )
        frozen = self._copied(ref)
        self.ref = Reference(functools.partial(self._score, "ref")) if ref else None
        named = trained_parameters(self.module)
        self._names = [p.name for p in named]
        self._gradients = GradientStore(
            [p.parameter for p in named], float32=config.grad_accum_dtype == "float32"
        )
        self._optimizer = make_optimizer(named, config=config) if total_steps > 0 else None
        self._by_sample = config.accumulate == "sample"
        """A forward and backward of its own for every sample."""
        if config.activation_checkpointing:
            checkpoint_activations(self.module)
        self._compile_watch = compile_module(self.module, config)
        self._outer = self._with_loss(self.module)
        if frozen is not None:
            compile_module(frozen, config, like=self.module)
            self._ref = self._with_loss(frozen)

    def _with_loss(self, module: nn.Module) -> LossModule:
        return LossModule(
            module, config=self.config, temperature=self.temperature, compiled=is_compiled(module)
        )

    # --- forward and backward -------------------------------------------------------------------------------

    def logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """[T] float32 per batch, nats, no grad, 0 where loss_mask is False. Raises TrainError: out of
        memory."""
        return self._score("policy", batches)

    def logprobs_own(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """The same: there is one rank."""
        return self.logprobs(batches)

    def _score(self, model: Literal["policy", "ref"], batches: Sequence[PackedBatch]) -> list[Tensor]:
        results = []
        used: OffloadPart = "ref" if model == "ref" and self._ref is not None else "weights"
        with self._on_device(used), torch.no_grad(), self._as_model(model) as outer, self._counting():
            for index, batch in enumerate(batches):
                with self._memory_errors_explained(index, batch, count=len(batches)):
                    flight.note_micro_batch(index, batch.lengths)
                    values = []
                    for part in single_samples(batch, static=self._static) if self._by_sample else [batch]:
                        part = part.with_rows()
                        rows, labels = head_rows(part, static=self._static_head, device=self.device)
                        logprobs = outer(part.to(self.device), rows, labels, None)
                        values.append(scatter(logprobs, rows, part.num_slots))
                    results.append(merge_samples(values, batch) if self._by_sample else values[0])
        return results

    def _accumulate(self, batches: Sequence[PackedBatch], loss: TokenLoss) -> StepStats:
        # Before the first backward: the gradient hooks must know whether anything will be added to a
        # gradient.
        self._gradients.expect(sum(len(b.sample_ids) if self._by_sample else 1 for b in batches))
        outputs = []
        # Train mode only in here: scoring and the LoRA reference use the same module, and must not drop out.
        self.module.train()
        try:
            with self._on_device("weights"), self._counting():
                for index, (batch, share) in enumerate(zip(batches, step_shares(batches), strict=True)):
                    with self._memory_errors_explained(index, batch, count=len(batches)):
                        flight.note_micro_batch(index, batch.lengths)
                        outputs.append(self._backward(batch, loss, share=share))
        finally:
            self.module.eval()
        return step_stats(outputs)

    def forward_backward_own(self, batches: Sequence[PackedBatch], loss: TokenLoss) -> StepStats:
        """The same: there is one rank."""
        return self.forward_backward(batches, loss)

    def _backward(self, batch: PackedBatch, loss: TokenLoss, *, share: float) -> MicroBatchOutput:
        """Forward, loss and backward of one micro-batch, at once or sample by sample; share: see
        `step_shares`."""
        if not self._by_sample:
            return self._backward_at_once(batch, loss, share=share)
        whole = not loss.separable
        parts = single_samples(batch, static=self._static, whole=whole)
        each = share / batch.num_tokens
        ones = [self._backward_at_once(one, loss, share=each * one.num_tokens) for one in parts]
        return MicroBatchOutput(
            loss=torch.stack([one.loss for one in ones]).sum(),
            tokens=merge_samples([one.tokens for one in ones], batch, whole=whole),
        )

    def _backward_at_once(self, batch: PackedBatch, loss: TokenLoss, *, share: float) -> MicroBatchOutput:
        batch = batch.with_rows()
        rows, labels = head_rows(batch, static=self._static_head, device=self.device)
        routing = self._routing()
        trains = labels.numel() > 0 or (routing is not None and routing.has_losses)
        if not trains and routing is None:
            zeros = torch.zeros(2 + len(loss.terms), batch.num_slots, device=self.device)
            return MicroBatchOutput(loss=zeros.sum(), tokens=zeros)
        moved = batch.to(self.device)
        # Without a gradient only the routes are counted.
        with self.spans("forward"), torch.set_grad_enabled(trains):
            value: Tensor = self._outer(moved, rows, labels, loss, share=share)
        if trains:
            with self.spans("backward"):
                value.backward()
        tokens = self._outer.tokens
        assert tokens is not None, "a loss was given"
        return MicroBatchOutput(loss=value.detach(), tokens=scatter(tokens, rows, batch.num_slots))

    def _forward(self, batch: PackedBatch) -> None:
        rows, labels = head_rows(batch, static=self._static_head, device=self.device)
        self._outer(batch, rows, labels, None)

    def _memory_advice(self, tokens: int, micro_batches: int) -> str:
        ref = self._ref is not None
        return f"; {advice(self.module, self.config, tokens=tokens, micro_batches=micro_batches, ref=ref)}"

    # --- gradients ------------------------------------------------------------------------------------------

    def drop_gradients(self) -> None:
        """Forget every gradient since the last optimizer step."""
        self._gradients.clear()
        self._pending = []

    @contextlib.contextmanager
    def keeping_gradients(self) -> Iterator[None]:
        """Inside, a forward_backward that fails leaves the gradients of the step as they were before it; a
        copy of them is on the host meanwhile."""
        pending = list(self._pending)
        kept = self._gradients.copies() if pending else None
        try:
            yield
        except BaseException:
            if kept is None:
                self.drop_gradients()
            else:
                self._gradients.restore(kept)
                self._pending = pending
            raise

    def all_reduce_gradients(self, ranks: RankContext) -> None:
        """Replace the gradients since the last optimizer step by their sums over ranks, each of which has a
        backend of its own with the same weights. Collective.

        Raises:
            RankError: another rank is gone, or did not arrive in time.
        """
        own = self._gradients.collect()
        used = ranks.gather([g is not None for g in own], list[bool], what="which gradients there are")
        sums = self._gradients.zeros_for_unused(own, [any(on_ranks) for on_ranks in zip(*used, strict=True)])

        def all_reduce() -> None:
            for gradient in sums:
                if gradient is not None:
                    dist.all_reduce(gradient)

        ranks.wait_for(all_reduce, "the gradients of a step")
        self._gradients.replace(sums)

    def live_gradients(self) -> dict[str, Tensor]:
        """The gradients since the last optimizer step by Parameter name, on their own device, neither clipped
        nor copied. Unused Parameters are left out."""
        pairs = zip(self._names, self._gradients.collect(), strict=True)
        return {name: gradient for name, gradient in pairs if gradient is not None}

    def gradients(self) -> dict[str, Tensor]:
        """`live_gradients` as float32 copies on the host."""
        gradients = self.live_gradients()
        # copy: a float32 gradient on a CPU would be handed out itself, and be cleared by the next step.
        return {name: g.detach().to("cpu", torch.float32, copy=True) for name, g in gradients.items()}

    _here = live_gradients

    def _norm(self, gradients: dict[str, Tensor]) -> float:
        return float(global_norm(list(gradients.values())))

    def _not_finite(self) -> list[str]:
        return [name for name, g in self.live_gradients().items() if not bool(torch.isfinite(g).all())]

    # --- weights --------------------------------------------------------------------------------------------

    def weights(self, *, policy_version: int) -> WeightUpdate:
        """The current weights; with LoRA, `tensors` are merged."""
        return WeightUpdate(
            policy_version=policy_version,
            tensors=lambda: iter(merged_state_dict(self.module).items()),
            shared_module=self.module,
        )

    def _parts(self) -> LiveTensors:
        return LiveTensors(self._live_state())

    def export(self, directory: Path) -> None:
        """Write a Hugging Face folder that from_pretrained loads with all keys matched, LoRA merged. Raises
        ModelError."""
        with self._on_device("weights"):
            export_hf(self.module, self.model.tokenizer, directory)

    def _tensors_of(self, part: OffloadPart) -> Iterable[Tensor]:
        if part == "weights":
            return self.module.parameters()
        if part == "states":
            return self._optimizer_state().values()
        return [] if self._ref is None else self._ref.parameters()

    def _live_state(self) -> dict[str, Tensor]:
        weights = model_tensors(self.module, trained_only=self._lora)
        return {f"{MODEL}{name}": tensor for name, tensor in weights.items()} | self._optimizer_state()

    def _optimizer_state(self) -> dict[str, Tensor]:
        if self._optimizer is None:
            return {}
        masters = self._optimizer.separate_masters()
        return {f"{MASTER}{name}": tensor for name, tensor in masters.items()} | self._optimizer.state()


# Split a micro-batch into one micro-batch per sample: run one at a time, they need the activations of one
# sample.


_STEPS = 4
_ALIGNMENT = 64


def single_samples(batch: PackedBatch, *, static: bool, whole: bool = False) -> list[PackedBatch]:
    """One batch per document, in order; per pair of documents for preference pairs, whose loss is of both.

    Losses and gradients of the parts add up to those of the batch: `loss_weights` hold the normaliser of the
    whole step, and no loss looks beyond a document, a pair or, if it is of `whole` sequences, a trajectory.

    Args:
        batch: on the host.
        static: pad each part to one of at most 4 capacities, quarters of the longest that a part may be
            (`batch.max_seqlen` a document), so that compiled code makes few graphs.
        whole: keep the parts of a trajectory together.
    """
    parts, first, start = [], 0, 0
    for width in _widths(batch, whole=whole):
        documents = slice(first, first + width)
        length = sum(batch.lengths[documents])
        part = _slice(batch, documents, slice(start, start + length))
        parts.append(repack(part, _bucket(length, width, batch.max_seqlen)) if static else part)
        first, start = first + width, start + length
    return parts


def merge_samples(parts: list[Tensor], batch: PackedBatch, *, whole: bool = False) -> Tensor:
    """Merge per-token values [..., t] of the parts, padding included, into [..., T] of the batch; 0 in its
    padding."""
    merged = parts[0].new_zeros(*parts[0].shape[:-1], batch.num_slots)
    first, start = 0, 0
    for width, values in zip(_widths(batch, whole=whole), parts, strict=True):
        length = sum(batch.lengths[first : first + width])
        merged[..., start : start + length] = values[..., :length]
        first, start = first + width, start + length
    return merged


def _widths(batch: PackedBatch, *, whole: bool) -> list[int]:
    """How many documents each part has."""
    count = len(batch.sample_ids)
    if isinstance(batch, PreferenceBatch):
        return [2] * (count // 2)
    numbers = batch.trajectories if isinstance(batch, PolicyBatch) else None
    if not whole or numbers is None:
        return [1] * count
    trajectories = numbers[batch.cu_seqlens[:count].long()].tolist()
    # 0: a document that is no part.
    keys = [number or -index - 1 for index, number in enumerate(trajectories)]
    return [len(list(same)) for _, same in itertools.groupby(keys)]


def _slice(batch: PackedBatch, documents: slice, slots: slice) -> PackedBatch:
    lengths = batch.lengths[documents]
    changes: dict[str, Any] = {
        field.name: value[slots]
        for field in dataclasses.fields(batch)
        if isinstance(value := getattr(batch, field.name), Tensor) and field.name != "cu_seqlens"
    }
    changes["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0).to(batch.cu_seqlens)
    changes |= {"lengths": lengths, "sample_ids": batch.sample_ids[documents], "max_seqlen": max(lengths)}
    changes["shared"] = None  # a sample shares nothing with itself
    if versions := getattr(batch, "policy_versions", ()):
        changes["policy_versions"] = versions[documents]
    return dataclasses.replace(batch, **changes)


def _bucket(length: int, width: int, max_seqlen: int) -> Bucket:
    most = width * max_seqlen
    quarters = [-(-most * step // (_STEPS * _ALIGNMENT)) * _ALIGNMENT for step in range(1, _STEPS + 1)]
    tokens = next(size for size in quarters if size >= length)
    return Bucket(tokens=tokens, documents=width + -(-tokens // max_seqlen), max_seqlen=max_seqlen)
