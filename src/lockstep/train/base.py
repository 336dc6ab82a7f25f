"""The common part of Lockstep's train backends: errors, the frame of a step, saves and loads."""

from __future__ import annotations

import contextlib
import copy
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from lockstep import invariant
from lockstep.attention import kernel_of
from lockstep.config.rules import refuse
from lockstep.config.train import TrainConfig
from lockstep.errors import ConfigError, ModelError, TrainError
from lockstep.execution import CompileWatch, compile_blocks, install_joint, joint_of
from lockstep.models.architectures import architecture_of, causal_lm, is_moe, text_config
from lockstep.models.forward import kernel_contract
from lockstep.models.load import LoadedModel
from lockstep.models.lora import has_lora, without_lora
from lockstep.models.offload import CopySpace, Offloadable
from lockstep.observe.memory import is_out_of_memory
from lockstep.observe.metrics import Spans
from lockstep.protocols.train import FinishSave, OffloadPart, StepStats, TokenLoss
from lockstep.schema.batch import PackedBatch
from lockstep.schema.contract import CompileReport, KernelContract
from lockstep.train.loss_module import LossModule, require_finite, static_head
from lockstep.train.optimizer import MasterOptimizer, lr_at
from lockstep.train.routing import Routes, Routing
from lockstep.train.state.files import Layout, TensorParts, train_progress
from lockstep.train.state.save_load import load_state, save_state


class Backend:
    """Base of all train backends. lockstep.protocols.TrainBackend documents the methods."""

    _layout: Layout
    _outer: Any
    """The policy with its loss."""
    _ref: Any = None
    """The reference with its loss. None if there is no reference, or it is the policy without its
    adapters."""
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
        _check_compiles(model.module, config.execution)
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
        """Return a frozen copy of the policy as reference. None if no reference is needed, or it is the
        policy without its adapters. Call it before activation checkpointing, compilation and sharding are
        applied to the policy: a copy does not need the first, is compiled separately, and cannot be made
        after the third."""
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

    def _on_device(self, *_: OffloadPart) -> AbstractContextManager[None]:
        """Do nothing: this backend cannot be offloaded; see Offloadable."""
        return contextlib.nullcontext()

    def _counting(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._compile_watch is None else self._compile_watch.counting()

    def compile_report(self) -> CompileReport | None:
        """Return what torch.compile has done so far on this rank. None in eager mode."""
        return None if self._compile_watch is None else self._compile_watch.report()

    @contextlib.contextmanager
    def _memory_errors_explained(
        self, index: int | None, batch: PackedBatch, *, count: int
    ) -> Iterator[None]:
        """Raise TrainError if memory runs out in the block; index None: in an empty micro-batch."""
        try:
            yield
        except RuntimeError as error:
            # RuntimeError, because torch's CPU allocator raises nothing more specific: the text tells.
            if not is_out_of_memory(error):
                raise
            what = "an empty micro-batch" if index is None else f"micro-batch {index}"
            raise TrainError(
                f"out-of-memory: step {self.steps_done}, {what} of {count}: out of memory with "
                f"{batch.num_slots} token slots{self._memory_advice(batch.num_slots, count)}. No weight was "
                f"changed. torch says: {error}",
                setting="train.token_budget",
            ) from error

    def _memory_advice(self, tokens: int, micro_batches: int) -> str:
        """Return advice on how to save memory."""
        raise NotImplementedError

    def _step_is_done(self) -> None:
        self.steps_done += 1
        if self._compile_watch is not None:
            self._compile_watch.check()
            # Graphs of the first step are expected: from here on every new one counts as a recompile.
            self._compile_watch.mark_warm()

    def drop_gradients(self) -> None:
        """Drop all gradients since the last optimizer step."""
        raise NotImplementedError

    # --- state ----------------------------------------------------------------------------------------------

    @property
    def _amid_step(self) -> bool:
        """Whether there are gradients that no optimizer step has applied."""
        raise NotImplementedError

    def _parts(self) -> TensorParts:
        """The state that a save holds."""
        raise NotImplementedError

    def save(self, directory: Path, *, background: bool = False) -> FinishSave:
        """Save everything that determines how training continues into an existing empty directory (see
        train/state/save_load.py). With several ranks, each tensor is written whole by one of them. With
        `background` the state is copied to host memory, in a thread if it is there already (the next
        `optimizer_step` and `load` wait for it), and the returned function writes it.

        Returns:
            A function that finishes the save and returns the sha256 of each file written, by name.

        Raises:
            CheckpointError: it does not fit on the disk; on every rank.
            OSError: the disk failed in another way.
            TrainError: there are gradients that no optimizer step has used.
        """
        if self._amid_step:
            raise save_amid_step()
        with self._on_device("weights", "states"):
            finish = save_state(
                directory,
                parts=self._parts(),
                progress=self._progress(),
                layout=self._layout,
                background=background and self._copies,
            )
            self._saved()
        return finish

    def _saved(self) -> None:
        """Hook: the copies of a save have started."""

    def load(self, directory: Path, *, verified: bool = False) -> None:
        """Load what `save` (bitwise, on the same ranks) or any backend on any number of ranks saved.

        Args:
            verified: the caller has already compared the files' hashes.

        Raises:
            CheckpointError: missing, damaged or of another model or optimizer; nothing was changed. On every
                rank.
        """
        # The copy of an earlier save may still read the state that is about to be overwritten.
        self._copies.wait()
        with self._on_device("weights", "states"):
            parts, progress = self._parts(), self._progress()
            restored = load_state(
                directory, parts=parts, progress=progress, layout=self._layout, verified=verified
            )
            self._loaded(parts)
        self.drop_gradients()
        self.steps_done = restored["step"]

    def _loaded(self, parts: Any) -> None:
        """Hook: the parts have been restored from a save."""

    def _progress(self) -> dict[str, Any]:
        return train_progress(
            self.config,
            steps_done=self.steps_done,
            total_steps=self.total_steps,
            dtype=self.model.dtype,
            lora=self._lora,
        )


class MasterBackend(Offloadable, Backend):
    """Base of the backends that use Lockstep's optimizers. Their state can be offloaded to the host."""

    _names: list[str]
    """Names of the trained Parameters, in the optimizer's order."""
    _optimizer: MasterOptimizer | None

    def __init__(self, config: TrainConfig, **parts: Any) -> None:
        super().__init__(config, **parts)
        self._pending: list[tuple[PackedBatch, TokenLoss]] = []
        self._offloaded = {}

    def forward_backward(self, batches: Sequence[PackedBatch], loss: TokenLoss) -> StepStats:
        """Add the gradients of all micro-batches of one optimizer step.

        Raises:
            TrainError: a loss is not finite or the ranks got different batches (on every rank), or memory ran
            out
                (on the rank where it did). All gradients of the step are dropped.
        """
        try:
            stats = self._accumulate(batches, loss)
            # Once per step, not per micro-batch: reading a loss waits for the device.
            require_finite(stats.losses, batches, step=self.steps_done)  # each rank has the losses of all
        except BaseException:  # half a step's gradients must not leak into the next one
            self._recover()
            raise
        # Only when all of them went well: these are what `_blame` runs again.
        self._pending += [(batch, loss) for batch in batches]
        return stats

    @abstractmethod
    def _accumulate(self, batches: Sequence[PackedBatch], loss: TokenLoss) -> StepStats:
        """Run forward and backward of this rank's share; return the results of all ranks."""

    def _recover(self) -> None:
        """Clean up after a forward or backward that raised."""
        self.drop_gradients()

    @property
    def _amid_step(self) -> bool:
        return bool(self._pending)

    def _saved(self) -> None:
        # Offloaded tensors leave the device when the save returns, while the thread may still read them.
        if self._offloaded:
            self._copies.wait()

    @abstractmethod
    def _here(self) -> dict[str, Tensor]:
        """Return the gradients since the last optimizer step, or this rank's shards of them, by Parameter
        name."""

    @abstractmethod
    def _norm(self, gradients: dict[str, Tensor]) -> float:
        """Return the Euclidean norm of the gradients over all ranks."""

    @abstractmethod
    def _not_finite(self) -> list[str]:
        """Return the names of Parameters with non-finite gradients, the same on every rank."""

    def gradient_norm(self) -> float:
        """Return the Euclidean norm over all gradients, before clipping; 0 without gradients."""
        return self._norm(self._here())

    def optimizer_step(self) -> dict[str, float]:
        """Clip, step, advance the schedule, cast to the compute dtype, zero the gradients. Returns grad_norm
        (before clipping) and lr.

        Raises:
            ConfigError: the backend was made with total_steps = 0.
            TrainError: there is no gradient, or the norm is not finite, and no weight was changed; or torch
                recompiled more often than train.max_recompiles.
        """
        with self._on_device("weights"):
            routes = self._first_routes()
            update = self._updated() | self._routing_metrics(routes)
        self.drop_gradients()
        self._step_is_done()
        return update

    def use_rates(
        self,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        max_grad_norm: float,
    ) -> None:
        """Take optimizer steps with these settings of [train] from now on; an infinite max_grad_norm clips
        nothing."""
        rates = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.config = self.config.model_copy(update={**rates, "max_grad_norm": max_grad_norm})
        if self._optimizer is not None:
            self._optimizer.config = self.config

    def _first_routes(self) -> Routes | None:
        """The routes of the step's first micro-batch, where train.route_changes_every asks for it."""
        every, routing = self.config.route_changes_every, self._routing()
        return routing.first if routing and every and self.steps_done % every == 0 else None

    def _routing_metrics(self, before: Routes | None) -> dict[str, float]:
        routing = self._routing()
        if routing is None:
            return {}
        found = routing.metrics(self._add_up)
        if before is not None:
            with torch.no_grad(), self._counting():
                self._forward(before.batch)
            changed = before.changed(routing.latest)
            self._add_up(changed)
            found["experts/routes_changed"] = float(changed[0] / changed[1])
        return found

    @abstractmethod
    def _forward(self, batch: PackedBatch) -> None:
        """Run the policy's forward over a micro-batch of this rank; collective where weights are sharded."""

    def _routing(self) -> Routing | None:
        """The routing of the policy."""
        return cast(LossModule, self._outer).routing

    def _add_up(self, counts: Tensor) -> None:
        """Add counts up over ranks, in place; here there is one."""

    @torch.no_grad()
    def _updated(self) -> dict[str, float]:
        gradients = self._here()
        if not gradients:
            raise no_gradients(step=self.steps_done)
        norm = self._norm(gradients)
        if not math.isfinite(norm):
            # The update runs under no_grad, and finding the culprit takes backward passes.
            with torch.enable_grad():
                blamed = self._blame()
            raise norm_not_finite(norm, step=self.steps_done, **blamed)
        if self._optimizer is None:
            raise no_optimizer()
        lr = lr_at(self.steps_done, config=self.config, total_steps=self.total_steps)
        # the coefficient of torch.nn.utils.clip_grad_norm_
        scale = min(1.0, self.config.max_grad_norm / (norm + 1e-6))
        # A save in the background may still read the masters and states that are about to change.
        self._copies.wait()
        with self._on_device("states"):
            self._optimizer.step([gradients.get(name) for name in self._names], lr=lr, scale=scale)
        return {"grad_norm": norm, "lr": lr}

    def _blame(self) -> dict[str, Any]:
        """Find the micro-batch with non-finite gradients by running each one alone again, because only sums
        of gradients are kept."""
        pending = list(self._pending)
        self.drop_gradients()
        for index, (batch, loss) in enumerate(pending):
            self._accumulate([batch], loss)
            bad = self._not_finite()
            self.drop_gradients()
            if bad:
                return bad_micro_batch(index, len(pending), batch.sample_ids, bad)
        return bad_step([batch.sample_ids for batch, _ in pending])

    def close(self) -> None:
        """Drop gradients. The module and the process group stay usable."""
        self.drop_gradients()


# The kernel contract of a train backend.


def compile_options(module: nn.Module) -> dict[str, Any] | None:
    """Return the options that torch.compile needs for this module. None unless it is batch-invariant. An
    engine that must compute the same bits passes the same options."""
    return invariant.inductor_options() if invariant.is_converted(module) else None


def contract_of(config: TrainConfig, model: LoadedModel, device: torch.device) -> KernelContract | None:
    """Return the kernel contract of a batch-invariant model. None if `config.batch_invariant` is off.

    Raises:
        ConfigError: it is on, but the model's modules were not converted.
    """
    if not config.batch_invariant:
        return None
    module = causal_lm(model.module)
    base = getattr(module, module.base_model_prefix)
    contract = kernel_contract(
        model.module,
        attention=kernel_of(base.config._attn_implementation),
        execution=config.execution,
        dtype=model.dtype,
        device=device,
        tp=config.tp,
    )
    if contract is None:
        raise ConfigError(
            f"not-batch-invariant: train.batch_invariant = true, but {type(module).__name__} was not "
            "converted, or uses an attention kernel other than varlen "
            f"({base.config._attn_implementation!r}), or runs under train.execution = {config.execution!r}; "
            "load it with attention 'varlen' and call lockstep.invariant.convert before creating the backend"
        )
    return contract


# The execution modes `compile` and `joint` of a train backend's modules.


def _check_compiles(module: nn.Module, execution: str) -> None:
    """Refuse to compile what no test covers, of a policy or a value model.

    Raises:
        ModelError: the architecture has no record, or experts under another mode than compile.
    """
    if execution in ("auto", "eager"):
        return
    config = text_config(module)
    if architecture_of(config) is None:
        why, fix = "no record in Lockstep, and such models train eager", "'eager'"
    elif is_moe(config) and execution != "compile":
        why, fix = "experts, which no test covers in this mode", "'compile' or 'eager'"
    else:
        return
    raise ModelError(
        f"unsupported-model: train.execution = {execution!r}: {type(module).__name__} has {why}; set "
        f"train.execution = {fix}"
    )


def compile_module(
    module: nn.Module, config: TrainConfig, *, like: nn.Module | None = None
) -> CompileWatch | None:
    """Compile a causal LM in place as `config.execution` says. Returns None for eager.

    Wrappers that shard weights or accumulate gradients must be applied afterwards, because graphs do not
    contain their hooks. A joint graph has no inner modules whose hooks could run, so they wrap it as a whole.

    Args:
        like: a module of the same architecture that this function has prepared; the two share their joint
            graphs.

    Raises:
        ConfigError: its layers are compiled already, or the mode does not support a setting.
        ModelError: the module has no list of decoder layers.
    """
    if config.execution == "eager":
        return None
    options = compile_options(module)
    if config.execution == "compile":
        return compile_blocks(module, max_recompiles=config.max_recompiles, options=options)
    refuse(config, "train (joint graphs)")
    graphs_of = None if like is None else joint_of(like)
    cuda_graph = config.cuda_graph and like is None
    install_joint(module, options=options, cuda_graph=cuda_graph, graphs_of=graphs_of)
    return CompileWatch(max_recompiles=config.max_recompiles)


# Errors of an optimizer step that cannot be done, worded the same for every backend.


def norm_not_finite(norm: float, *, step: int, reason: str = "", **blamed: Any) -> TrainError:
    """Return the error for a non-finite gradient norm. reason: the micro-batch that caused it, if known.
    blamed: its number and samples."""
    because = f": {reason}" if reason else ""
    return TrainError(
        f"step {step}: the gradient norm is {norm}{because}. No weight was changed. Lower train.lr or set "
        "model.dtype = 'float32'",
        code="not-finite",
        **blamed,
    )


def bad_micro_batch(index: int, count: int, sample_ids: Sequence[int], bad: Sequence[str]) -> dict[str, Any]:
    """Return arguments of `norm_not_finite` for micro-batch `index` of `count`; bad: the affected
    Parameters."""
    samples = list(sample_ids)
    reason = (
        f"micro-batch {index} of {count} has gradients that are not finite in {len(bad)} parameters "
        f"({', '.join(bad[:3])}); its samples are {samples}"
    )
    return {"reason": reason, "micro_batch": index, "samples": samples}


def bad_step(sample_ids: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return arguments of `norm_not_finite` if each micro-batch alone is finite."""
    samples = [list(ids) for ids in sample_ids]
    reason = (
        "each micro-batch alone has finite gradients, but their sum does not; the samples by micro-batch "
        f"are {samples}"
    )
    return {"reason": reason, "samples": samples}


def no_gradients(*, step: int) -> TrainError:
    """Return the error for an optimizer step before any backward, or after one without trained tokens."""
    return TrainError(
        f"no-gradients: step {step}: there are no gradients; call forward_backward with at least one "
        "trained token before optimizer_step"
    )


def no_optimizer() -> ConfigError:
    """Return the error for an optimizer step of a backend that was made without an optimizer."""
    return ConfigError(
        "missing-setting: this backend was created with total_steps = 0 and so has no optimizer; set at "
        "least 1"
    )


def save_amid_step() -> TrainError:
    """Return the error for a save between backward and optimizer step."""
    return TrainError(
        "wrong-state: saving in the middle of an optimizer step would lose its gradients; finish the step "
        "first"
    )
