"""What the train backends of this tree have in common: errors, the frame of a step, saves and loads."""

from __future__ import annotations

import contextlib
import copy
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lockstep.config.train import TrainConfig
from lockstep.errors import TrainError
from lockstep.execution import CompileWatch
from lockstep.models.load import LoadedModel
from lockstep.models.lora import has_lora, without_lora
from lockstep.models.rest import Rests
from lockstep.observe.metrics import Spans, is_out_of_memory
from lockstep.protocols.train import FinishSave, RestPart, StepStats, TokenLoss
from lockstep.schema.batch import PackedBatch
from lockstep.schema.contract import CompileReport
from lockstep.train import step_errors
from lockstep.train.contract import contract_of
from lockstep.train.loss_module import require_finite, static_head
from lockstep.train.optimizer import MasterOptimizer, lr_at
from lockstep.train.state.copies import CopySpace
from lockstep.train.state.parts import Layout, TensorParts, train_progress
from lockstep.train.state.save_load import load_state, save_state


class Backend:
    """Base of all of them. See lockstep.protocols.TrainBackend for what their methods promise."""

    _layout: Layout
    _outer: Any
    """The policy with its loss."""
    _ref: Any = None
    """The reference with its loss; None: there is none, or it is the policy without its adapters."""
    _compile_watch: CompileWatch | None = None

    def __init__(
        self,
        config: TrainConfig,
        *,
        model: LoadedModel,
        total_steps: int,
        spans: Spans | None,
        device: torch.device,
    ) -> None:
        self.config, self.model, self.total_steps = config, model, total_steps
        self.module = model.module.eval()
        self.spans = spans or Spans()
        self.steps_done = 0
        self.device = device
        self.contract = contract_of(config, model, device)
        self._lora = has_lora(self.module)
        self._static_head = static_head(config, self.module)
        self._copies = CopySpace()

    def _copied(self, ref: bool) -> nn.Module | None:
        """A copy of the policy as frozen reference; None: there is none, or it is the policy without its
        adapters. Made before the policy is checkpointed, compiled and sharded: a copy needs no recomputation,
        is compiled by itself, and could not be made any more."""
        return copy.deepcopy(self.module).requires_grad_(False) if ref and not self._lora else None

    @contextlib.contextmanager
    def _as_model(self, model: Literal["policy", "ref"]) -> Iterator[nn.Module]:
        if model == "policy":
            yield self._outer
        elif self._ref is not None:
            yield self._ref
        else:
            with without_lora(self.module):
                yield self._outer

    def _awake(self, *_: RestPart) -> AbstractContextManager[None]:
        """Nothing rests; see Rests."""
        return contextlib.nullcontext()

    def _counting(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._compile_watch is None else self._compile_watch.counting()

    def compile_report(self) -> CompileReport | None:
        """Report what torch.compile did so far on this rank; None in eager mode."""
        return None if self._compile_watch is None else self._compile_watch.report()

    @contextlib.contextmanager
    def _memory_errors_explained(
        self, index: int | None, batch: PackedBatch, *, count: int
    ) -> Iterator[None]:
        """Raises TrainError for memory that ran out; index None: of an empty micro-batch."""
        try:
            yield
        except RuntimeError as error:
            # RuntimeError, because torch's allocator for CPUs raises nothing else: the text tells.
            if not is_out_of_memory(error):
                raise
            what = "an empty micro-batch" if index is None else f"micro-batch {index}"
            raise TrainError(
                f"out-of-memory: step {self.steps_done}, {what} of {count}: out of memory with "
                f"{batch.num_slots} token slots{self._memory_advice(batch.num_slots, count)}. No weight was "
                f"changed. torch says: {error}",
                setting="train.token_budget",
                micro_batch=index,
                tokens=batch.num_slots,
            ) from error

    def _memory_advice(self, tokens: int, micro_batches: int) -> str:
        """What to do about a lack of memory."""
        raise NotImplementedError

    def _step_is_done(self) -> None:
        self.steps_done += 1
        if self._compile_watch is not None:
            self._compile_watch.check()
            # Graphs of the first step are expected: from here on every new one counts as a recompile.
            self._compile_watch.mark_warm()

    def drop_gradients(self) -> None:
        """Forget every gradient since the last optimizer step."""
        raise NotImplementedError

    # --- state ----------------------------------------------------------------------------------------------

    @property
    def _amid_step(self) -> bool:
        """Whether there are gradients that no optimizer step has used."""
        raise NotImplementedError

    def _parts(self) -> TensorParts:
        """The state that a save holds."""
        raise NotImplementedError

    def save(self, directory: Path, *, background: bool = False, in_memory: bool = False) -> FinishSave:
        """Save everything that decides how training goes on into an existing empty directory (see
        train/state/save_load.py); on several ranks every tensor whole, written by one of them. With
        `background` all of it is copied into host memory, by a thread where it is there already (the next
        `optimizer_step` and `load` wait for that), and written by the function that is returned.

        Returns:
            A function that finishes the save and returns the sha256 of each file written, by name.

        Raises:
            CheckpointError: it does not fit on the disk; on every rank.
            OSError: the disk failed in another way.
            TrainError: there are gradients that no optimizer step has used.
        """
        if self._amid_step:
            raise step_errors.save_amid_step()
        with self._awake("weights", "states"):
            finish = save_state(
                directory,
                parts=self._parts(),
                progress=self._progress(),
                layout=self._layout,
                background=background and self._copies,
                in_memory=in_memory,
            )
            self._saved()
        return finish

    def _saved(self) -> None:
        """Called when the copies of a save have been begun."""

    def load(self, directory: Path, *, verified: bool = False) -> None:
        """Load what `save` (bitwise, on the same ranks) or any backend on any number of ranks saved.

        Args:
            verified: the caller has compared the files' hashes already.

        Raises:
            CheckpointError: missing, damaged or of another model or optimizer; nothing was changed. On every
                rank.
        """
        # The copy of an earlier save may still read what is about to be overwritten.
        self._copies.wait()
        with self._awake("weights", "states"):
            parts, progress = self._parts(), self._progress()
            restored = load_state(
                directory, parts=parts, progress=progress, layout=self._layout, verified=verified
            )
            self._loaded(parts)
        self.drop_gradients()
        self.steps_done = restored["step"]

    def _loaded(self, parts: Any) -> None:
        """Called when the parts have the values of a save."""

    def _progress(self) -> dict[str, Any]:
        return train_progress(
            self.config,
            steps_done=self.steps_done,
            total_steps=self.total_steps,
            dtype=self.model.dtype,
            lora=self._lora,
        )


class MasterBackend(Rests, Backend):
    """Base of the backends with optimizers of ours, whose state can rest."""

    _names: list[str]
    """Of the Parameters that are trained, in the optimizer's order."""
    _optimizer: MasterOptimizer | None

    def __init__(self, config: TrainConfig, **parts: Any) -> None:
        super().__init__(config, **parts)
        self._pending: list[tuple[PackedBatch, TokenLoss]] = []
        self._rests = {}

    def forward_backward(self, batches: Sequence[PackedBatch], loss: TokenLoss) -> StepStats:
        """Add the gradients of all micro-batches of one optimizer step.

        Raises:
            TrainError: a loss is not finite, or the ranks were not given the same batches, on every rank; or
                memory ran out, where it did. All gradients of the step are dropped.
        """
        try:
            stats = self._accumulate(batches, loss)
            # Once per step, not per micro-batch: looking at a loss waits for the device.
            require_finite(stats.losses, batches, step=self.steps_done)  # each rank has the losses of all
        except BaseException:  # half a step's gradients must not leak into the next one
            self._recover()
            raise
        # Only when all of them went well: these are what `_blame` runs again.
        self._pending += [(batch, loss) for batch in batches]
        return stats

    @abstractmethod
    def _accumulate(self, batches: Sequence[PackedBatch], loss: TokenLoss) -> StepStats:
        """Forward and backward of this rank's share; returns the results of all ranks."""

    def _recover(self) -> None:
        """Clean up after a forward or backward that raised."""
        self.drop_gradients()

    @property
    def _amid_step(self) -> bool:
        return bool(self._pending)

    def _saved(self) -> None:
        # What rests gives its memory back when the save returns, and the thread would read what is no longer
        # there.
        if self._rests:
            self._copies.wait()

    @abstractmethod
    def _here(self) -> dict[str, Tensor]:
        """The gradients since the last optimizer step, or this rank's shards of them, by Parameter name."""

    @abstractmethod
    def _norm(self, gradients: dict[str, Tensor]) -> float:
        """Their Euclidean norm, of all ranks."""

    @abstractmethod
    def _not_finite(self) -> list[str]:
        """Names of the Parameters whose gradient is not finite, the same on every rank."""

    def gradient_norm(self) -> float:
        """Euclidean norm over all gradients, before clipping; 0 when there are none."""
        return self._norm(self._here())

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
        self._step_is_done()
        return update

    @torch.no_grad()
    def _updated(self) -> dict[str, float]:
        gradients = self._here()
        if not gradients:
            raise step_errors.no_gradients(step=self.steps_done)
        norm = self._norm(gradients)
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
            self._optimizer.step([gradients.get(name) for name in self._names], lr=lr, scale=scale)
        return {"grad_norm": norm, "lr": lr}

    def _blame(self) -> dict[str, Any]:
        """Find the micro-batch whose gradients are not finite: each is run once more, alone, because only
        sums of gradients are kept."""
        pending = list(self._pending)
        self.drop_gradients()
        for index, (batch, loss) in enumerate(pending):
            self._accumulate([batch], loss)
            bad = self._not_finite()
            self.drop_gradients()
            if bad:
                return step_errors.one_to_blame(index, len(pending), batch.sample_ids, bad)
        return step_errors.all_to_blame([batch.sample_ids for batch, _ in pending])

    def close(self) -> None:
        """Drop gradients; the module stays usable, and a process group stays."""
        self.drop_gradients()
