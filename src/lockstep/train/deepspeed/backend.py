"""The train backend over DeepSpeed ZeRO 0 to 3, on gloo or nccl; the only file that imports deepspeed."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.config.train import TrainConfig, outside_of_runs
from lockstep.errors import ConfigError, TrainError
from lockstep.execution import CompileWatch, prepare_compiler
from lockstep.execution.regions import decoder_layers
from lockstep.models.architectures import checkpoint_activations
from lockstep.models.export import export_tensors
from lockstep.models.forward import decoder_inputs, head_of
from lockstep.models.heads import scalar_head
from lockstep.models.load import LoadedModel
from lockstep.observe import flight
from lockstep.observe.metrics import Spans
from lockstep.protocols.train import Reference, StepStats, TokenLoss
from lockstep.ranks.process_group import ensure_process_group
from lockstep.schema.batch import IGNORE_LABEL, PackedBatch
from lockstep.schema.weights import WeightUpdate
from lockstep.train import base
from lockstep.train.assignment import (
    assign_batches,
    require_same_batches,
    share_logprobs,
    share_stats,
)
from lockstep.train.base import (
    Backend,
    compile_module,
    compile_options,
)
from lockstep.train.deepspeed.engine import ZeroEngine, ZeroParts, whole_shapes, whole_weights
from lockstep.train.deepspeed.setup import (
    announced_build,
    basic_optimizer,
    ds_config,
    find_ninja,
    refuse_impossible,
)
from lockstep.train.loss_module import (
    LogprobModule,
    LossModule,
    MicroBatchOutput,
    Rows,
    head_rows,
    require_finite,
    scatter,
    step_stats,
    token_rows,
)
from lockstep.train.optimizer import NamedParameter, lr_at, trained_parameters
from lockstep.train.state.files import Layout


class DeepSpeedBackend(Backend):
    """Trains over DeepSpeed ZeRO what LocalBackend trains alone, and computes the same numbers.

    Every rank gets all micro-batches of a step; the backend assigns them to ranks and gathers the results.
    `forward_backward_own` and `logprobs_own` are the same for callers that assign micro-batches themselves.
    Gradients are added up over ranks and micro-batches, as `loss_weights` want it (DeepSpeed would take the
    mean; the loss is multiplied by the number of ranks, which undoes it). One call of `forward_backward` per
    optimizer step. Every method but `steps_done` and the like is collective.

    A loss that is not finite raises TrainError on every rank. Running out of memory does so only where it
    happened: the other ranks may be in a collective, which they leave when that rank's process ends, or at
    the process group's timeout.

    bfloat16: DeepSpeed keeps float32 masters; gradients of several micro-batches are added up in bfloat16.
    What is whole where, and what DeepSpeed does at stage 0: docs/explanation/train-backends.md.

    Args:
        config: the train settings: `zero_stage`, `execution` (eager, compile, joint below stage 3, or
            deepcompile: DeepSpeed's own compiler of the whole module), `optimizer_device`,
            `parameter_device`.
        model: the policy. At stage 3 its Parameters are empty outside the backend's own calls.
        total_steps: optimizer steps of the whole run; 0: no step will follow, and no moments are allocated.
        temperature: logprobs are of logits divided by it; 0 counts as 1.
        ref: keep the policy as it is now as frozen reference: a copy (at stage 3 its weights are split over
            the ranks too), or with LoRA the base weights.
        spans: times "forward" and "backward" of every micro-batch.

    Raises:
        ConfigError: deepspeed is missing, or cannot run this config on this machine; before anything starts.
    """

    shards_weights = False
    reduces_gradients = True
    """False: the backend takes a module that has its weights."""

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
        device = next(model.module.parameters()).device
        super().__init__(config, model=model, total_steps=total_steps, spans=spans, device=device)
        self.deepcompile = config.execution == "deepcompile"
        with_states = total_steps > 0
        refuse_impossible(config, device=self.device, dtype=model.dtype, with_optimizer=with_states)
        ds = _import_deepspeed(self.device)
        ensure_process_group(self.device)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        # Private; dist.group.WORLD is typed as optional, and None where there is no group, which this
        # refuses.
        self._group = dist.distributed_c10d._get_default_group()
        mesh = {"dp": self.world_size, "ring": 1, "tp": 1}
        self._layout = Layout(backend="deepspeed", mesh=mesh, stream=self.rank)
        self.ref = Reference(functools.partial(self._score, "ref")) if ref else None
        reference = self._copied(ref)
        if config.activation_checkpointing:
            checkpoint_activations(self.module)
        named = trained_parameters(self.module)
        build = ZeroBuilder(
            ds=ds, config=config, device=self.device, dtype=model.dtype, temperature=temperature
        )
        self._outer = build.outer(self.module)
        compiled = config.execution in ("compile", "joint")
        self._compile_watch = build.compile(self.module) if compiled else None
        self._zero = build.policy(self._outer, named, with_states=with_states)
        if self.deepcompile:
            # DeepCompile replaces the engine's hooks by nodes of the graph, so it comes after
            # deepspeed.initialize; it takes no other backend than inductor and eager.
            self._zero.engine.compile(backend="inductor")
            self._compile_watch = CompileWatch(max_recompiles=config.max_recompiles)
        self._ref_engine: Any = None
        if reference is not None:
            self._ref, self._ref_engine = build.reference(reference, like=self.module)
        self._gradients_ready = self._trained = False

    # --- forward and backward -------------------------------------------------------------------------------

    def _assigned(self, batches: Sequence[PackedBatch]) -> dict[int, PackedBatch] | None:
        """This rank's micro-batches by index, the same number on every rank; an index beyond the last is an
        empty batch. None: the step has no batches. Raises TrainError on every rank if ranks got different
        ones."""
        require_same_batches(batches, group=self._group, device=self.device)
        if not batches:
            return None
        assigned = assign_batches(batches, part=self.rank, parts=self.world_size)
        return {len(batches) if index is None else index: batch for index, batch in assigned}

    def logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """[T] float32 per batch, nats, no grad, 0 where loss_mask is False; each computed by one rank."""
        return self._score("policy", batches)

    def _score(self, model: Literal["policy", "ref"], batches: Sequence[PackedBatch]) -> list[Tensor]:
        if (assigned := self._assigned(batches)) is None:
            return []
        own = self._score_own(model, list(assigned.values()))
        logprobs = {
            index: values for index, values in zip(assigned, own, strict=True) if index < len(batches)
        }
        return share_logprobs(batches, logprobs, group=self._group, device=self.device)

    def logprobs_own(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Like `logprobs`, for this rank's own batches; at stage 3 every rank must pass the same number."""
        return self._score_own("policy", batches)

    def _score_own(self, model: Literal["policy", "ref"], batches: Sequence[PackedBatch]) -> list[Tensor]:
        results = []
        self._outer.eval()
        with torch.no_grad(), self._as_model(model) as outer, self._counting():
            for index, batch in enumerate(batches):
                with self._memory_errors_explained(index, batch, count=len(batches)):
                    batch = batch.with_rows()
                    rows, labels = head_rows(batch, static=self._static_head, device=self.device)
                    moved = batch.to(self.device)
                    if isinstance(outer, LossModule):
                        logprobs = outer(moved, rows, labels, None)
                    else:
                        logprobs = _take(self._call_compiled(moved)[0], rows)
                    results.append(scatter(logprobs, rows, batch.num_slots))
        self._zero.forget_forward()
        if self._ref_engine is not None:
            self._ref_engine.empty_partition_cache()
        return results

    def forward_backward(self, batches: Sequence[PackedBatch], loss: TokenLoss) -> StepStats:
        """Add the gradients of all micro-batches of one optimizer step, each computed by one rank.

        Raises:
            TrainError: on every rank: a loss is not finite, and the step's gradients were dropped; or the
                gradients of an earlier call are still there. Out of memory: where it happened.
        """
        if (assigned := self._assigned(batches)) is None:
            return StepStats(losses=[], logprobs=[], entropy=[])
        own = self._run(assigned, loss, count=len(batches))
        outputs = {index: output for index, output in own.items() if index < len(batches)}
        group, terms = self._group, len(loss.terms)
        stats = share_stats(batches, outputs, terms=terms, group=group, device=self.device)
        self._check_losses(batches, stats.losses)
        self._trained = self._static_head or any(bool(batch.loss_mask.any()) for batch in batches)
        return stats

    def forward_backward_own(self, batches: Sequence[PackedBatch], loss: TokenLoss) -> StepStats:
        """Like `forward_backward`, for this rank's own micro-batches: every rank must pass the same number of
        them (ZeRO 3 gathers weights in each forward and backward, ZeRO 2 reduces gradients in backward). A
        rank that has nothing passes a batch with no trained token: it takes part, with zero gradients.

        Raises:
            TrainError: like forward_backward; of another rank's loss the text says only that it is not
                finite.
        """
        stats = step_stats(self._run(dict(enumerate(batches)), loss, count=len(batches)).values())
        bad = not all(math.isfinite(value) for value in _values(stats.losses))
        if _any_rank(bad, self.device):
            self._check_losses(batches, stats.losses)
            self._recover()
            raise TrainError(
                f"not-finite: step {self.steps_done}, a loss on another rank is not finite. No weight was "
                "changed"
            )
        return stats

    def _run(
        self, batches: Mapping[int, PackedBatch], loss: TokenLoss, *, count: int
    ) -> dict[int, MicroBatchOutput]:
        """Forward and backward of this rank's micro-batches, by their index among `count`."""
        if self._gradients_ready:
            raise TrainError(
                "wrong-state: DeepSpeed reduces gradients in the last backward of a step, so a second "
                "forward_backward cannot add to them; pass all micro-batches in one call, or call "
                "drop_gradients() in between"
            )
        outputs = {}
        self._outer.train()
        try:
            for position, (index, batch) in enumerate(batches.items()):
                # By hand: packs of one step may be any number, and DeepSpeed's own count of them is fixed by
                # its config.
                self._zero.engine.set_gradient_accumulation_boundary(position == len(batches) - 1)
                number, watched = index if index < count else None, self._counting()
                with self._memory_errors_explained(number, batch, count=count), watched:
                    flight.note_micro_batch(index, batch.lengths)
                    outputs[index] = self._backward(batch, loss)
            self._gradients_ready = self._trained = bool(batches)
            self._zero.after_backward()
        except BaseException:
            self._recover()
            raise
        finally:
            self._outer.eval()
        return outputs

    def _backward(self, batch: PackedBatch, loss: TokenLoss) -> MicroBatchOutput:
        batch = batch.with_rows()
        rows, labels = head_rows(batch, static=self._static_head, device=self.device)
        moved = batch.to(self.device)
        with self.spans("forward"):
            value, tokens = self._forward(moved, rows, labels, loss)
        with self.spans("backward"):
            # DeepSpeed takes the mean over ranks; gradients here are sums.
            self._zero.engine.backward(value * self.world_size)
        return MicroBatchOutput(loss=value.detach(), tokens=scatter(tokens, rows, batch.num_slots))

    def _forward(
        self, batch: PackedBatch, rows: Rows, labels: Tensor, loss: TokenLoss
    ) -> tuple[Tensor, Tensor]:
        """The loss, and [2 + K, R]: logprobs, entropy and the loss's terms."""
        if self.deepcompile:
            logprobs, entropy = (_take(figures, rows) for figures in self._call_compiled(batch))
            entropy = entropy if loss.entropy_grad else entropy.detach()
            output = loss(logprobs, entropy, batch, rows)
            return output.loss, token_rows(logprobs, entropy, output.terms)
        value: Tensor = self._zero.engine(batch, rows, labels, loss)
        outer = self._outer
        assert isinstance(outer, LossModule) and outer.tokens is not None
        return value, outer.tokens

    def _call_compiled(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """logprobs and entropy [T] from the compiled graph. Every slot goes through the head: the number of
        trained ones changes from batch to batch, and would change the graph."""
        inputs = decoder_inputs(
            self.module,
            batch,
            layout=self.config.layout,
            padding_side=self.config.padding_side,
            compiled=True,
        )
        labels = torch.where(batch.loss_mask, batch.labels, IGNORE_LABEL)
        both: tuple[Tensor, Tensor] = self._zero.engine(
            inputs.token_ids, inputs.positions, labels, inputs.cells, **inputs.kwargs
        )
        return both

    def _memory_advice(self, tokens: int, micro_batches: int) -> str:
        return (
            f" at ZeRO {self.config.zero_stage} on {self.world_size} rank(s); set "
            "train.activation_checkpointing = true, lower train.token_budget, set train.optimizer_device = "
            "'cpu', or use more ranks with train.zero_stage = 3 (--zero-stage 3)"
        )

    def _check_losses(self, batches: Sequence[PackedBatch], losses: Sequence[Tensor]) -> None:
        """Check the losses of all ranks; raises TrainError on every rank."""
        try:
            require_finite(losses, batches, step=self.steps_done)
        except TrainError:
            self._recover()
            raise

    # --- gradients ------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        self._zero.recover()
        self._gradients_ready = False

    def drop_gradients(self) -> None:
        """Forget every gradient since the last optimizer step. Not collective."""
        self._zero.drop_gradients()
        self._gradients_ready = False

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of the step, added up over ranks and micro-batches, whole, by Parameter name: float32
        copies on the host, not clipped. Collective; the same on every rank."""
        return self._zero.gradients() if self._gradients_ready else {}

    def live_gradients(self) -> dict[str, Tensor]:
        """`gradients`: what ZeRO holds is in parts."""
        return self.gradients()

    def gradient_norm(self) -> float:
        """Euclidean norm over `gradients()`, from each rank's own share, in float32. Collective. (DeepSpeed's
        get_global_grad_norm is known only after a step, and at stage 0 in float32 never.)"""
        return self._zero.gradient_norm()

    # --- update ---------------------------------------------------------------------------------------------

    def optimizer_step(self) -> dict[str, float]:
        """Clip, step, schedule, zero the gradients. Returns grad_norm (before clipping) and lr.

        Raises:
            ConfigError: the backend was made with total_steps = 0.
            TrainError: there is no gradient, or the norm is not finite, and no weight was changed; or torch
                recompiled more often than train.max_recompiles.
        """
        if self.total_steps == 0:
            raise base.no_optimizer()
        if not (self._gradients_ready and self._trained):
            self.drop_gradients()
            raise base.no_gradients(step=self.steps_done)
        norm = self.gradient_norm()
        if not math.isfinite(norm):
            self.drop_gradients()
            raise base.norm_not_finite(norm, step=self.steps_done)
        lr = lr_at(self.steps_done, config=self.config, total_steps=self.total_steps)
        self._zero.step(lr)
        self._gradients_ready = False
        self._step_is_done()
        return {"grad_norm": norm, "lr": lr}

    # --- weights --------------------------------------------------------------------------------------------

    def weights(self, *, policy_version: int) -> WeightUpdate:
        """The current weights; with LoRA, `tensors` are merged. At stages 0 to 2 the module's Parameters are
        whole and the very ones that it was loaded with. At stage 3 `tensors` is collective and gathers one
        weight at a time (with LoRA all of them)."""
        whole = self.config.zero_stage < 3
        return WeightUpdate(
            policy_version=policy_version,
            tensors=lambda: whole_weights(self._zero, self.module),
            shared_module=self.module if whole else None,
            shapes=None if whole else whole_shapes(self.module),
        )

    @property
    def _amid_step(self) -> bool:
        return self._gradients_ready

    def _loaded(self, parts: ZeroParts) -> None:
        parts.finish_loading()

    def _parts(self) -> ZeroParts:
        kept, adamw = self.total_steps > 0, self.config.optimizer == "adamw"
        return ZeroParts(self._zero, self.module, trained_only=self._lora, with_optimizer=kept, adamw=adamw)

    def export(self, directory: Path) -> None:
        """Write a Hugging Face folder that from_pretrained loads with all keys matched, LoRA merged; rank 0
        writes. Collective. Raises ModelError, on every rank."""
        export_tensors(
            self.module,
            self.weights(policy_version=0).tensors(),
            tokenizer=self.model.tokenizer,
            directory=directory,
            dtype=self.model.dtype,
        )

    def close(self) -> None:
        """Drop gradients and DeepSpeed's hooks; the process group stays."""
        self._gradients_ready = False
        self._zero.close()
        if self._ref_engine is not None:
            self._ref_engine.destroy()


def _values(losses: Sequence[Tensor]) -> list[float]:
    return torch.stack(list(losses)).tolist() if losses else []


def _take(figures: Tensor, rows: Rows) -> Tensor:
    return figures if isinstance(rows, slice) else figures.index_select(0, rows)


def _any_rank(flag: bool, device: torch.device) -> bool:
    total = torch.tensor(float(flag), device=device)
    dist.all_reduce(total, op=dist.ReduceOp.MAX)
    return bool(total > 0)


def _import_deepspeed(device: torch.device) -> Any:
    """The package, with its accelerator set to `device`; on a CPU its collectives are compiled at first use.

    Raises:
        ConfigError: it is missing, has been imported for another accelerator, or cannot be compiled.
    """
    # DeepSpeed chooses its accelerator once per process, and would choose CUDA wherever there is a GPU, also
    # for a model on the CPU.
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    find_ninja()
    try:
        with contextlib.redirect_stdout(sys.stderr):  # its logger keeps the stream that it finds
            import deepspeed
            from deepspeed.accelerator import get_accelerator
    except ImportError as error:
        raise ConfigError(
            "missing-package: DeepSpeed is not installed; `pip install wheel ninja packaging`, then `pip "
            f"install --no-build-isolation deepspeed` ({error})"
        ) from error
    # DeepSpeed's calls of torch.distributed; one line per collective otherwise.
    warnings.filterwarnings(
        "ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning
    )
    name = get_accelerator().device_name()
    if name != device.type:
        raise ConfigError(
            f"wrong-environment: DeepSpeed runs on {name} in this process, but the model is on "
            f"{device.type}; set DS_ACCELERATOR={device.type} in the environment"
        )
    return deepspeed


# The DeepSpeedEngines of train/deepspeed/backend.py: around the policy, and around its frozen copy.


Outer = LossModule | LogprobModule


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroBuilder:
    """Builds the engines; holds what they have in common."""

    ds: Any
    """The deepspeed package."""
    config: TrainConfig
    device: torch.device
    dtype: torch.dtype
    temperature: float

    def outer(self, module: nn.Module) -> Outer:
        """The module that DeepSpeed wraps: decoder, head and loss."""
        if self.config.execution == "deepcompile":
            return LogprobModule(module, temperature=self.temperature)
        compiled = self.config.execution != "eager"
        return LossModule(module, config=self.config, temperature=self.temperature, compiled=compiled)

    def policy(self, outer: Outer, named: Sequence[NamedParameter], *, with_states: bool) -> ZeroEngine:
        """The engine that trains `named`; without states no step can follow."""
        offload = with_states and self.config.optimizer == "adamw" and self.config.optimizer_device == "cpu"
        settings = ds_config(self.config, named, dtype=self.dtype, with_optimizer=with_states)
        with self._starting(offload=offload):
            engine, _, _, _ = self.ds.initialize(
                model=outer,
                optimizer=basic_optimizer(self.ds, self.config, named, with_states=with_states),
                model_parameters=[p.parameter for p in named],
                config=settings,
            )
        self._register_head(outer)
        return ZeroEngine(self.ds, engine, outer=outer, named=named, device=self.device)

    def reference(self, module: nn.Module, *, like: nn.Module) -> tuple[nn.Module, Any]:
        """A frozen module inside of one that computes logprobs, never by DeepCompile; and, at stage 3, the
        engine that splits its weights over the ranks. `like`: the policy."""
        deepcompile = self.config.execution == "deepcompile"
        config = self.config.model_copy(update={"execution": "eager"} if deepcompile else {})
        compiled = config.execution != "eager"
        if compiled:
            self.compile(module, like=like)
        outer = LossModule(module, config=config, temperature=self.temperature, compiled=compiled).eval()
        if self.config.zero_stage < 3:
            return outer, None
        settings = ds_config(self.config, [], dtype=self.dtype, with_optimizer=False)
        with self._starting():
            engine, _, _, _ = self.ds.initialize(model=outer, config=settings)
        self._register_head(outer)
        return outer, engine

    def compile(self, module: nn.Module, *, like: nn.Module | None = None) -> CompileWatch | None:
        """Compile as the config's `compile` or `joint` says. Stage 3 wraps every module's forward in hooks
        that no graph can hold, so there a layer is gathered whole and only what is inside of its forward is
        compiled.
        """
        if self.config.zero_stage < 3:
            return compile_module(module, self.config, like=like)
        prepare_compiler()
        # A leaf is gathered as a whole by its own hooks, so none is left on the modules inside the graph.
        layers, options = decoder_layers(module), compile_options(module)
        self.ds.utils.set_z3_leaf_modules(module, list({type(layer) for layer in layers}))
        for layer in layers:
            # Not layer.compile(): that compiles the call with all hooks around forward, and ZeRO 3 gathers in
            # hooks.
            compiled: Any = torch.compile(layer.forward, fullgraph=True, dynamic=False, options=options)
            layer.forward = compiled
        return CompileWatch(max_recompiles=self.config.max_recompiles)

    @contextlib.contextmanager
    def _starting(self, *, offload: bool = False) -> Iterator[None]:
        """A context for `deepspeed.initialize`: what it prints is not this program's output."""
        if self.device.type == "cuda":
            index = self.device.index
            # deepspeed.initialize asserts that LOCAL_RANK is set, and moves the model to the CUDA device of
            # that number.
            os.environ["LOCAL_RANK"] = str(torch.cuda.current_device() if index is None else index)
        else:
            os.environ.setdefault("LOCAL_RANK", "0")
        # Collectives over shared memory for a CPU: a minute of compiling before the first step, for sums that
        # gloo makes as well. DeepSpeed keeps this table to be edited.
        self.ds.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        with announced_build(("cpu_adam",) if offload else ()), contextlib.redirect_stdout(sys.stderr):
            yield

    def _register_head(self, outer: Outer) -> None:
        """Register the head at stage 3: it is used by the outer module, not by the module that owns it."""
        if self.config.zero_stage == 3 and isinstance(outer, LossModule):
            scores = scalar_head(outer.policy)
            head = head_of(outer.policy) if scores is None else scores
            for tensor in (head.weight, head.bias):
                if tensor is not None:
                    self.ds.zero.register_external_parameter(outer, tensor)
