"""The train backend of one process: forward, backward, clip, step, cast, save and load."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lockstep.config.train import TrainConfig, outside_of_runs
from lockstep.errors import ConfigError, TrainError
from lockstep.execution import is_compiled
from lockstep.models.causal_lm import checkpoint_activations
from lockstep.models.export import export_hf
from lockstep.models.load import LoadedModel
from lockstep.models.lora import has_lora, merged_state_dict, without_lora
from lockstep.models.rest import Rests
from lockstep.observe import flight
from lockstep.observe.memory import is_out_of_memory
from lockstep.observe.spans import Spans
from lockstep.protocols.train import FinishSave, Reference, RestPart, StepStats, TokenLoss
from lockstep.schema.batch import PackedBatch
from lockstep.schema.compile_report import CompileReport
from lockstep.schema.weights import WeightUpdate
from lockstep.train import step_errors
from lockstep.train.compiled import compile_module
from lockstep.train.contract import contract_of
from lockstep.train.gradients import GradientStore, global_norm
from lockstep.train.local_memory import advice
from lockstep.train.loss_module import (
    LossModule,
    MicroBatchOutput,
    head_rows,
    require_finite,
    scatter,
    static_head,
    step_stats,
)
from lockstep.train.make_optimizer import make_optimizer
from lockstep.train.optimizer import lr_at, trained_parameters
from lockstep.train.single_samples import merge_samples, single_samples
from lockstep.train.state.copies import CopySpace
from lockstep.train.state.parts import MASTER, MODEL, Layout, LiveTensors, model_tensors, train_progress
from lockstep.train.state.save_load import load_state, save_state

LAYOUT = Layout(backend="local", mesh={})


class LocalBackend(Rests):
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
                f"train.execution = {config.execution!r} is not available with train.backend = 'local'; "
                "set 'eager', 'compile' or 'joint'",
                code="unsupported-combination",
                setting="train.execution",
            )
        self.config, self.model, self.total_steps = config, model, total_steps
        self.module = model.module.eval()
        self.temperature = temperature
        self.spans = spans or Spans()
        self.steps_done = 0
        self.device = next(self.module.parameters()).device
        self.contract = contract_of(config, model, self.device)
        self._lora = has_lora(self.module)
        self._static = (
            config.execution != "eager" if config.static_capacity is None else config.static_capacity
        )
        self._static_head = static_head(config, self.module)
        # Before the policy is checkpointed and compiled: the reference needs no recomputation, and is
        # compiled by itself.
        frozen = copy.deepcopy(self.module).requires_grad_(False) if ref and not self._lora else None
        self.ref = Reference(functools.partial(self._score, "ref")) if ref else None
        named = trained_parameters(self.module)
        self._names = [p.name for p in named]
        self._gradients = GradientStore(
            [p.parameter for p in named], float32=config.grad_accum_dtype == "float32"
        )
        self._optimizer = make_optimizer(named, config=config) if total_steps > 0 else None
        self._pending: list[tuple[PackedBatch, TokenLoss]] = []
        self._copies = CopySpace()
        self._rests = {}
        self._by_sample = config.accumulate == "sample"
        """A forward and backward of its own for every sample."""
        if config.activation_checkpointing:
            checkpoint_activations(self.module)
        watch = self._compile_watch = compile_module(self.module, config)
        self._counting = contextlib.nullcontext if watch is None else watch.counting
        self._outer = self._with_loss(self.module)
        self._ref: LossModule | None = None
        """None: there is no reference, or it is the policy without its adapters."""
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
        used: RestPart = "ref" if model == "ref" and self._ref is not None else "weights"
        with self._awake(used), torch.no_grad(), self._as_model(model) as outer, self._counting():
            for index, batch in enumerate(batches):
                with self._memory_errors_explained(index, batches):
                    flight.note_micro_batch(index, batch.lengths)
                    values = []
                    for part in single_samples(batch, static=self._static) if self._by_sample else [batch]:
                        rows, labels = head_rows(part, static=self._static_head, device=self.device)
                        logprobs = outer(part.to(self.device), rows, labels, None)
                        values.append(scatter(logprobs, rows, part.num_slots))
                    results.append(merge_samples(values, batch) if self._by_sample else values[0])
        return results

    def forward_backward(self, batches: Sequence[PackedBatch], loss: TokenLoss) -> StepStats:
        """Add the gradients of all micro-batches of one optimizer step.

        Raises:
            TrainError: a loss is not finite, or memory ran out; all gradients of the step are dropped.
        """
        # Before the first backward: the gradient hooks must know whether anything will be added to a
        # gradient.
        self._gradients.expect(sum(len(b.sample_ids) if self._by_sample else 1 for b in batches))
        outputs = []
        # Train mode only in here: scoring and the LoRA reference use the same module, and must not drop out.
        self.module.train()
        try:
            with self._awake("weights"), self._counting():
                for index, batch in enumerate(batches):
                    with self._memory_errors_explained(index, batches):
                        flight.note_micro_batch(index, batch.lengths)
                        outputs.append(self._backward(batch, loss))
            stats = step_stats(outputs)
            # Once per step, not per micro-batch: looking at a loss waits for the device.
            require_finite(stats.losses, batches, step=self.steps_done)
        except BaseException:  # half a step's gradients must not leak into the next one
            self.drop_gradients()
            raise
        finally:
            self.module.eval()
        # Only when all of them went well: these are what `_blame` runs again.
        self._pending += [(batch, loss) for batch in batches]
        return stats

    def forward_backward_own(self, batches: Sequence[PackedBatch], loss: TokenLoss) -> StepStats:
        """The same: there is one rank."""
        return self.forward_backward(batches, loss)

    def _backward(self, batch: PackedBatch, loss: TokenLoss) -> MicroBatchOutput:
        """Forward, loss and backward of one micro-batch, at once or sample by sample."""
        if not self._by_sample:
            return self._backward_at_once(batch, loss)
        ones = [self._backward_at_once(one, loss) for one in single_samples(batch, static=self._static)]
        return MicroBatchOutput(
            loss=torch.stack([one.loss for one in ones]).sum(),
            tokens=merge_samples([one.tokens for one in ones], batch),
        )

    def _backward_at_once(self, batch: PackedBatch, loss: TokenLoss) -> MicroBatchOutput:
        rows, labels = head_rows(batch, static=self._static_head, device=self.device)
        moved = batch.to(self.device)
        if labels.numel() == 0:  # nothing to train on, and no graph to go back through
            zeros = torch.zeros(2 + len(loss.terms), batch.num_slots, device=self.device)
            return MicroBatchOutput(loss=zeros.sum(), tokens=zeros)
        with self.spans("forward"):
            value: Tensor = self._outer(moved, rows, labels, loss)
        with self.spans("backward"):
            value.backward()
        tokens = self._outer.tokens
        assert tokens is not None, "a loss was given"
        return MicroBatchOutput(loss=value.detach(), tokens=scatter(tokens, rows, batch.num_slots))

    @contextlib.contextmanager
    def _as_model(self, model: Literal["policy", "ref"]) -> Iterator[LossModule]:
        if model == "policy":
            yield self._outer
        elif self._ref is not None:
            yield self._ref
        else:
            with without_lora(self.module):
                yield self._outer

    # --- errors ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _memory_errors_explained(self, index: int, batches: Sequence[PackedBatch]) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            # RuntimeError above, because torch's allocator for CPUs raises no other; the text tells which it
            # is.
            if not is_out_of_memory(error):
                raise
            tokens, count, ref = batches[index].num_slots, len(batches), self._ref is not None
            what = advice(self.module, self.config, tokens=tokens, micro_batches=count, ref=ref)
            raise TrainError(
                f"step {self.steps_done}, micro-batch {index} of {count}: out of memory with {tokens} token "
                f"slots; {what}. No weight was changed. torch says: {error}",
                code="out-of-memory",
                setting="train.token_budget",
                micro_batch=index,
                tokens=tokens,
            ) from error

    def _blame(self) -> dict[str, Any]:
        """Find the micro-batch whose gradients are not finite by running each once more, alone."""
        pending = list(self._pending)
        self.drop_gradients()
        # Only sums of gradients are kept, so which micro-batch it was can be found by running them again.
        for index, (batch, loss) in enumerate(pending):
            self._gradients.expect(len(batch.sample_ids) if self._by_sample else 1)
            self.module.train()
            self._backward(batch, loss)
            self.module.eval()
            gradients = self._gradients.collect()
            bad = [
                name
                for name, g in zip(self._names, gradients, strict=True)
                if g is not None and not bool(torch.isfinite(g).all())
            ]
            self.drop_gradients()
            if bad:
                return step_errors.one_to_blame(index, len(pending), batch.sample_ids, bad)
        return step_errors.all_to_blame([batch.sample_ids for batch, _ in pending])

    def drop_gradients(self) -> None:
        """Forget every gradient since the last optimizer step."""
        self._gradients.clear()
        self._pending = []

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

    def gradient_norm(self) -> float:
        """Euclidean norm over all of them, before clipping; 0 when there are none."""
        return float(global_norm(list(self.live_gradients().values())))

    # --- update ---------------------------------------------------------------------------------------------

    def optimizer_step(self) -> dict[str, float]:
        """Clip, step, schedule, cast to the compute dtype, zero the gradients. Returns grad_norm (before
        clipping) and lr.

        Raises:
            ConfigError: the backend was made with total_steps = 0.
            TrainError: there is no gradient, or the norm is not finite, and no weight was changed; or torch
                recompiled more often than train.max_recompiles.
        """
        with self._awake("weights"):
            update = self._updated()
        self.drop_gradients()
        self.steps_done += 1
        if self._compile_watch is not None:
            self._compile_watch.check()
            # Graphs of the first step are expected: from here on every new one counts as a recompile.
            self._compile_watch.mark_warm()
        return update

    @torch.no_grad()
    def _updated(self) -> dict[str, float]:
        gradients = self._gradients.collect()
        present = [g for g in gradients if g is not None]
        if not present:
            raise step_errors.no_gradients(step=self.steps_done)
        norm = float(global_norm(present))
        if not math.isfinite(norm):
            # The update runs under no_grad, and finding the culprit takes backward passes.
            with torch.enable_grad():
                blamed = self._blame()
            raise step_errors.norm_not_finite(norm, step=self.steps_done, **blamed)
        if self._optimizer is None:
            raise step_errors.no_optimizer()
        lr = lr_at(self.steps_done, config=self.config, total_steps=self.total_steps)
        # the coefficient of torch.nn.utils.clip_grad_norm_
        scale = min(1.0, self.config.max_grad_norm / (norm + 1e-6))
        # A save in the background may still read the masters and states that are about to change.
        self._copies.wait()
        with self._awake("states"):
            self._optimizer.step(gradients, lr=lr, scale=scale)
        return {"grad_norm": norm, "lr": lr}

    def compile_report(self) -> CompileReport | None:
        """Report what torch.compile did so far; None in eager mode."""
        return None if self._compile_watch is None else self._compile_watch.report()

    # --- weights --------------------------------------------------------------------------------------------

    def weights(self, *, policy_version: int) -> WeightUpdate:
        """The current weights; with LoRA, `tensors` are merged."""
        return WeightUpdate(
            policy_version=policy_version,
            tensors=lambda: iter(merged_state_dict(self.module).items()),
            shared_module=self.module,
        )

    def save(self, directory: Path, *, background: bool = False, in_memory: bool = False) -> FinishSave:
        """Save everything that decides how training goes on into an existing empty directory (see
        train/state/save_load.py). With `background` all of it is copied into host memory, by a thread where
        it is there already (the next `optimizer_step` and `load` wait for that), and written by the function
        that is returned.

        Returns:
            A function that finishes the save and returns the sha256 of each file written, by name.

        Raises:
            CheckpointError: it does not fit on the disk.
            OSError: the disk failed in another way.
            TrainError: there are gradients that no optimizer step has used.
        """
        if self._pending:
            raise step_errors.save_amid_step()
        with self._awake("weights", "states"):
            finish = save_state(
                directory,
                parts=LiveTensors(self._live_state()),
                progress=self._progress(),
                layout=LAYOUT,
                background=background and self._copies,
                in_memory=in_memory,
            )
            # What rests gives its memory back when this context is left, and the thread would read what is no
            # longer there.
            if self._rests:
                self._copies.wait()
        return finish

    def load(self, directory: Path, *, verified: bool = False) -> None:
        """Load, bitwise, what `save` or any other backend saved.

        Args:
            verified: the caller has compared the files' hashes already.

        Raises:
            CheckpointError: missing, damaged or of another model or optimizer; nothing was changed.
        """
        # The copy of an earlier save may still read what is about to be overwritten.
        self._copies.wait()
        with self._awake("weights", "states"):
            parts, progress = LiveTensors(self._live_state()), self._progress()
            restored = load_state(directory, parts=parts, progress=progress, layout=LAYOUT, verified=verified)
        self.drop_gradients()
        self.steps_done = restored["step"]

    def export(self, directory: Path) -> None:
        """Write a Hugging Face folder that from_pretrained loads with all keys matched, LoRA merged. Raises
        ModelError."""
        with self._awake("weights"):
            export_hf(self.module, self.model.tokenizer, directory)

    def close(self) -> None:
        """Drop gradients; the module stays usable."""
        self.drop_gradients()

    def _tensors_of(self, part: RestPart) -> Iterable[Tensor]:
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

    def _progress(self) -> dict[str, Any]:
        return train_progress(
            self.config,
            steps_done=self.steps_done,
            total_steps=self.total_steps,
            dtype=self.model.dtype,
            lora=self._lora,
        )
