"""The train backend over DeepSpeed ZeRO 0 to 3, on gloo or nccl; the only file that imports deepspeed."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.config.train import TrainConfig
from lockstep.errors import ConfigError, TrainError
from lockstep.execution import CompileWatch, compile_blocks
from lockstep.execution.regions import decoder_layers
from lockstep.models.causal_lm import causal_lm
from lockstep.models.forward import decoder_inputs, head_of
from lockstep.models.load import LoadedModel
from lockstep.observe.spans import Spans
from lockstep.protocols.train import StepStats, TokenLoss
from lockstep.ranks.process_group import ensure_process_group
from lockstep.schema.batch import IGNORE_LABEL, PackedBatch
from lockstep.schema.weights import WeightUpdate
from lockstep.train.deepspeed_setup import (
    announced_build,
    ds_config,
    find_ninja,
    refuse_impossible,
    torch_optimizer,
)
from lockstep.train.local import _scatter
from lockstep.train.loss_module import LogprobModule, LossModule
from lockstep.train.optimizer import NamedParameter, trained_parameters
from lockstep.train.schedule import lr_at

log = logging.getLogger(__name__)

Rows = Tensor | slice


class DeepSpeedBackend:
    """Trains with DeepSpeed what LocalBackend trains alone, and computes the same numbers.

    Several ranks. Every rank gives `forward_backward` its own micro-batches, and every rank must give the
    same number of them: ZeRO 3 gathers weights in each forward and backward, ZeRO 1 and 2 reduce gradients in
    backward. A rank that has nothing gives a batch with no trained token: it takes part, with zero gradients.
    Gradients are added up over ranks and micro-batches, as `loss_weights` want it (DeepSpeed would take the
    mean; the loss is multiplied by the number of ranks, which undoes it). `forward_backward`,
    `optimizer_step`, `gradients` and, at stage 3, `logprobs` are collective. One call of `forward_backward`
    per optimizer step.

    A loss that is not finite raises TrainError on every rank. Running out of memory does so only where it
    happened: the other ranks wait for a collective until the process group's timeout.

    bfloat16: DeepSpeed keeps float32 masters; gradients of several micro-batches are added up in bfloat16.
    At stage 0 DeepSpeed steps bfloat16 weights with another optimizer than at 1 to 3, so there an optimizer
    is refused.

    Bytes per parameter on each of W ranks (bf16 / fp32), AdamW's moments left out (8 / W; stage 0: 8):

        stage    weights      gradients    float32 masters
        0        2 / 4        2 / 4        none: what fits a large model on one device
        1        2 / 4        2 / 4        4 / W
        2        2 / 4        2/W / 4/W    4 / W
        3        2/W / 4/W    2/W / 4/W    4 / W

    DeepSpeed runs no backward without an optimizer, so masters are there with total_steps = 0 too.

    Args:
        config: the train settings. `execution` may be eager, compile or deepcompile.
        model: the policy. At stage 3 its Parameters are empty outside the backend's own calls.
        total_steps: optimizer steps of the whole run; 0: there will be none, and no moments are made.
        temperature: logprobs are of logits divided by it; 0 counts as 1.
        ref: not available yet.
        zero_stage: 0 to 3.
        deepcompile: DeepSpeed's own compiler of the whole module (CUDA, stages 1 to 3).
        spans: times "forward" and "backward" of every micro-batch.

    Raises:
        ConfigError: deepspeed is missing, or cannot do what is asked on this machine; before anything starts.
    """

    def __init__(  # signature: LocalBackend's and two of DeepSpeed
        self,
        config: TrainConfig,
        *,
        model: LoadedModel,
        total_steps: int,
        temperature: float = 1.0,
        ref: bool = False,
        zero_stage: int = 1,
        deepcompile: bool = False,
        spans: Spans | None = None,
    ) -> None:
        self.config, self.model, self.total_steps = config, model, total_steps
        self.zero_stage, self.spans, self.steps_done = zero_stage, spans, 0
        self.deepcompile = deepcompile or config.execution == "deepcompile"
        self.module = model.module.eval()
        self.device = next(self.module.parameters()).device
        refuse_impossible(
            config,
            zero_stage=zero_stage,
            device=self.device,
            dtype=model.dtype,
            deepcompile=self.deepcompile,
            with_optimizer=total_steps > 0,
        )
        if ref:
            raise ConfigError("the DeepSpeed backend has no reference model yet; use train.backend = 'local'")
        self._deepspeed = _import_deepspeed(self.device)
        ensure_process_group(self.device)
        self.world_size = dist.get_world_size()
        self._static = (
            config.execution != "eager" or self.deepcompile
            if config.static_capacity is None
            else config.static_capacity
        )
        if config.activation_checkpointing:
            # In older transformers it goes by the older name only.
            name = "activation_checkpointing_enable"
            enable = getattr(self.module, name, None) or causal_lm(self.module).gradient_checkpointing_enable
            enable({"use_reentrant": False})
        named = trained_parameters(self.module)
        self._parameters = {p.name: p.parameter for p in named}
        compiled = config.execution == "compile" or self.deepcompile
        self._outer: LossModule | LogprobModule = (
            LogprobModule(self.module, temperature=temperature)
            if self.deepcompile
            else LossModule(self.module, config=config, temperature=temperature, compiled=compiled)
        )
        self._compile_watch = self._compile_layers() if config.execution == "compile" else None
        self._engine = self._initialize(named)
        # DeepSpeed's accessors of gradients read this very dict; DeepCompile puts another one in its place.
        self._shares: dict[int, Any] = (
            self._engine.optimizer.averaged_gradients if zero_stage in (1, 2) else {}
        )
        if self.deepcompile:
            self._engine.compile(backend="inductor")
            self._compile_watch = CompileWatch(max_recompiles=config.max_recompiles)
        self._gradients_ready = False

    # --- construction ---------------------------------------------------------------------------------------

    def _initialize(self, named: Sequence[NamedParameter]) -> Any:
        """The DeepSpeedEngine around the outer module."""
        if self.device.type == "cuda":
            index = self.device.index
            os.environ["LOCAL_RANK"] = str(torch.cuda.current_device() if index is None else index)
        else:
            os.environ.setdefault("LOCAL_RANK", "0")
        # What DeepSpeed prints is not this program's output.
        with announced_build(self.device), contextlib.redirect_stdout(sys.stderr):
            engine, _, _, _ = self._deepspeed.initialize(
                model=self._outer,
                optimizer=torch_optimizer(self.config, named, with_states=self.total_steps > 0),
                model_parameters=[p.parameter for p in named],
                config=ds_config(
                    self.config,
                    named,
                    zero_stage=self.zero_stage,
                    dtype=self.model.dtype,
                    deepcompile=self.deepcompile,
                ),
            )
        if self.zero_stage == 3:
            # The head is used by the outer module, not by the module that owns it.
            for tensor in (head_of(self.module).weight, head_of(self.module).bias):
                if tensor is not None and not self.deepcompile:
                    self._deepspeed.zero.register_external_parameter(self._outer, tensor)
        return engine

    def _compile_layers(self) -> CompileWatch:
        """Stage 3 wraps every module's forward in hooks that no graph can hold, so there a layer is gathered
        whole and only what is inside of its forward is compiled."""
        if self.zero_stage < 3:
            return compile_blocks(self.module, max_recompiles=self.config.max_recompiles)
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        layers = decoder_layers(self.module)
        self._deepspeed.utils.set_z3_leaf_modules(self.module, list({type(layer) for layer in layers}))
        for layer in layers:
            compiled: Any = torch.compile(layer.forward, fullgraph=True, dynamic=False)
            layer.forward = compiled
        return CompileWatch(max_recompiles=self.config.max_recompiles)

    # --- forward and backward -------------------------------------------------------------------------------

    def logprobs(self, batches: Sequence[PackedBatch], *, model: Literal["policy", "ref"]) -> list[Tensor]:
        """[T] float32 per batch, nats, no grad, 0 where loss_mask is False; at stage 3 collective.

        Raises:
            ConfigError: for model "ref".
        """
        if model == "ref":
            raise ConfigError("the DeepSpeed backend has no reference model yet")
        results = []
        self._outer.eval()
        with torch.no_grad():
            for batch in batches:
                rows, labels = self._rows(batch)
                moved = batch.to(self.device)
                if self.deepcompile:
                    logprobs = _take(self._call_compiled(moved)[0], rows)
                else:
                    logprobs = self._engine.module(moved, rows, labels, None)
                results.append(_scatter(logprobs, rows, batch.num_slots))
        if self.zero_stage == 3 and not self.deepcompile:
            self._engine.empty_partition_cache()  # it had kept the weights for a backward that never comes
        return results

    def forward_backward(self, batches: Sequence[PackedBatch], loss: TokenLoss) -> StepStats:
        """Adds the gradients of all micro-batches of this rank, and of all ranks, of one optimizer step.

        Raises:
            TrainError: a loss is not finite on some rank, and the step's gradients were dropped; or the
                gradients of an earlier call are still there.
        """
        if self._gradients_ready:
            raise TrainError(
                "DeepSpeed reduces gradients in the last backward of a step, so a second forward_backward "
                "cannot add to them; give all micro-batches in one call, or call drop_gradients() between"
            )
        stats = StepStats(losses=[], logprobs=[], entropy=[])
        self._outer.train()
        try:
            for index, batch in enumerate(batches):
                self._engine.set_gradient_accumulation_boundary(index == len(batches) - 1)
                with self._memory_errors_explained(index, batches):
                    self._backward(batch, loss, stats)
            self._gradients_ready = bool(batches)
            if self.deepcompile and self._shares is not self._engine.optimizer.averaged_gradients:
                self._shares.update(self._engine.optimizer.averaged_gradients)
            self._check_losses(batches, stats.losses)
        except BaseException:
            self._recover()
            raise
        finally:
            self._outer.eval()
        return stats

    def _backward(self, batch: PackedBatch, loss: TokenLoss, stats: StepStats) -> None:
        rows, labels = self._rows(batch)
        moved = batch.to(self.device)
        with self._timed("forward"):
            value, logprobs, entropy = self._forward(moved, rows, labels, loss)
        with self._timed("backward"):
            self._engine.backward(value * self.world_size)
        stats.losses.append(value.detach())
        stats.logprobs.append(_scatter(logprobs.detach(), rows, batch.num_slots))
        stats.entropy.append(_scatter(entropy.detach(), rows, batch.num_slots))

    def _forward(
        self, batch: PackedBatch, rows: Rows, labels: Tensor, loss: TokenLoss
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.deepcompile:
            logprobs, entropy = (_take(figures, rows) for figures in self._call_compiled(batch))
            entropy = entropy if loss.entropy_grad else entropy.detach()
            return loss(logprobs, entropy, batch, rows), logprobs, entropy
        value: Tensor = self._engine(batch, rows, labels, loss)
        outer = self._outer
        assert isinstance(outer, LossModule) and outer.logprobs is not None and outer.entropy is not None
        return value, outer.logprobs, outer.entropy

    def _call_compiled(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """logprobs and entropy [T] by the compiled graph. Every slot goes through the head: the number of
        trained ones changes from batch to batch, and a graph with it."""
        inputs = decoder_inputs(
            self.module,
            batch,
            layout=self.config.layout,
            padding_side=self.config.padding_side,
            compiled=True,
        )
        labels = torch.where(batch.loss_mask, batch.labels, IGNORE_LABEL)
        both: tuple[Tensor, Tensor] = self._engine(
            inputs.token_ids, inputs.positions, labels, inputs.cells, **inputs.kwargs
        )
        return both

    def _rows(self, batch: PackedBatch) -> tuple[Rows, Tensor]:
        """As LocalBackend._rows."""
        if self._static:
            labels = torch.where(batch.loss_mask, batch.labels, IGNORE_LABEL)
            return slice(0, batch.num_slots), labels.to(self.device, non_blocking=True)
        rows = batch.loss_mask.nonzero()[:, 0]
        labels = batch.labels.index_select(0, rows)
        return rows.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)

    @contextlib.contextmanager
    def _memory_errors_explained(self, index: int, batches: Sequence[PackedBatch]) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
                raise
            raise TrainError(
                f"step {self.steps_done}, micro-batch {index} of {len(batches)}: out of memory with "
                f"{batches[index].num_slots} token slots at ZeRO {self.zero_stage} on {self.world_size} "
                "rank(s); set train.activation_checkpointing = true, lower train.token_budget, or use more "
                f"ranks with --zero-stage 3. No weight was changed. torch says: {error}"
            ) from error

    def _check_losses(self, batches: Sequence[PackedBatch], losses: Sequence[Tensor]) -> None:
        """One wait for the whole step; all ranks learn of one rank's loss."""
        values = torch.stack(list(losses)).tolist() if losses else []
        bad = [index for index, value in enumerate(values) if not math.isfinite(value)]
        if _any_rank(bool(bad), self.device):
            where = (
                f"micro-batch {bad[0]} of {len(values)}: the loss is {values[bad[0]]}; its samples are "
                + str(list(batches[bad[0]].sample_ids))
                if bad
                else "a loss of another rank is not finite"
            )
            raise TrainError(f"step {self.steps_done}, {where}. No weight was changed")

    def _timed(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.spans is None else self.spans(name)

    # --- gradients ------------------------------------------------------------------------------------------

    def drop_gradients(self) -> None:
        """Forget every gradient since the last optimizer step, and whatever a forward or backward that failed
        left behind. Not collective."""
        engine, optimizer = self._engine, self._engine.optimizer
        engine.zero_grad()
        if self.zero_stage in (1, 2):
            optimizer.zero_grad()
            optimizer._release_preflattened_grad_buffers()
            for held in (optimizer.averaged_gradients, optimizer.all_grad_tensors, self._shares):
                held.update(dict.fromkeys(held))
            for bucket in optimizer.ipg_buckets.values():
                bucket.clear()
            optimizer._release_ipg_buffers()
            optimizer.micro_step_id = -1
        elif self.zero_stage == 3:
            optimizer.zero_grad()
            optimizer.averaged_gradients = {}
            # An expert that no token was routed to would find its old gradient there.
            optimizer.grad_partitions_flat_buffer.zero_()
        self._gradients_ready = False

    def _recover(self) -> None:
        """After a forward or backward that raised: DeepSpeed's hooks expect each module that they have seen
        entered to be left, and each gradient of a backward to come."""
        optimizer = self._engine.optimizer
        if self.zero_stage > 0:
            state = optimizer._backward_hook_state
            state.backward_active_depth = state.remaining_grad_acc_hooks = 0
            state.reset_for_new_step()
            reduced = optimizer.params_already_reduced
            for key in range(len(reduced)) if isinstance(reduced, list) else list(reduced):
                reduced[key] = False
        if self.zero_stage == 3 and not self.deepcompile:
            from deepspeed.runtime.zero import parameter_offload

            for bucket in optimizer.ipg_buckets.values():
                bucket.clear_params()
            del parameter_offload.FWD_MODULE_STACK[:]
            parameter_offload.FWD_MODULE_STACK.append(self._outer)
            for module in self._outer.modules():
                vars(module).pop("applied_pre_backward_ref_cnt", None)
            offload = optimizer.parameter_offload
            offload.release_backward_leftovers()
            offload.partition_all_parameters()
            offload.get_param_coordinator()._invalidate_trace()
        self.drop_gradients()

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of the step, added up over ranks and micro-batches, whole, by Parameter name: float32
        copies on the host, neither clipped nor averaged. Collective; the same on every rank."""
        full = self._deepspeed.utils.safe_get_full_grad
        found = {} if not self._gradients_ready else {n: full(p) for n, p in self._parameters.items()}
        return {
            name: gradient.detach().to("cpu", torch.float32, copy=True)
            for name, gradient in found.items()
            if gradient is not None
        }

    def gradient_norm(self) -> float:
        """Euclidean norm over `gradients()`, from each rank's own share, in float32. Collective."""
        if self.zero_stage == 0:
            shares = [p.grad for p in self._parameters.values() if p.grad is not None]
        else:
            groups = self._engine.optimizer.averaged_gradients.values()
            shares = [gradient for group in groups for gradient in group or ()]
        squares = [g.detach().float().square().sum().double() for g in shares]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
        total = total.to(self.device)
        if self.zero_stage > 0:
            dist.all_reduce(total)
        return math.sqrt(float(total))

    # --- update ---------------------------------------------------------------------------------------------

    def optimizer_step(self) -> dict[str, float]:
        """Clip, step, schedule, zero the gradients. Returns grad_norm (before clipping) and lr.

        Raises:
            ConfigError: the backend was made with total_steps = 0.
            TrainError: there is no gradient, or the norm is not finite, and no weight was changed; or torch
                recompiled more often than train.max_recompiles.
        """
        if self.total_steps == 0:
            raise ConfigError(
                "this backend was made with total_steps = 0, which leaves the optimizer out; give at least 1"
            )
        if not self._gradients_ready:
            raise TrainError(f"step {self.steps_done}: there are no gradients; call forward_backward first")
        norm = self.gradient_norm()
        if not math.isfinite(norm):
            self.drop_gradients()
            raise TrainError(
                f"step {self.steps_done}: the gradient norm is {norm}. No weight was changed. Lower train.lr "
                "or set model.dtype = 'float32'"
            )
        lr = lr_at(self.steps_done, config=self.config, total_steps=self.total_steps)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        self._engine.step()
        self.drop_gradients()
        self.steps_done += 1
        if self._compile_watch is not None:
            self._compile_watch.check()
            self._compile_watch.mark_warm()
        return {"grad_norm": norm, "lr": lr}

    # --- not yet --------------------------------------------------------------------------------------------

    def weights(self, *, policy_version: int) -> WeightUpdate:
        """Raises ConfigError: not available yet."""
        self._not_yet("weights")

    def save(self, directory: Path) -> dict[str, str]:
        """Raises ConfigError: not available yet."""
        self._not_yet("save")

    def load(self, directory: Path, *, verified: bool = False) -> None:
        """Raises ConfigError: not available yet."""
        self._not_yet("load")

    def export(self, directory: Path) -> None:
        """Raises ConfigError: not available yet."""
        self._not_yet("export")

    def _not_yet(self, what: str) -> NoReturn:
        raise ConfigError(
            f"the DeepSpeed backend replays; it has no {what!r} yet. Set train.backend = 'local' to train"
        )

    def close(self) -> None:
        """Drop gradients and DeepSpeed's hooks; the process group stays."""
        self.drop_gradients()
        self._engine.destroy()


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
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    find_ninja()
    try:
        with contextlib.redirect_stdout(sys.stderr):  # its logger keeps the stream that it finds
            import deepspeed
            from deepspeed.accelerator import get_accelerator
    except ImportError as error:
        raise ConfigError(
            "DeepSpeed is not installed; `pip install wheel ninja packaging`, then "
            f"`pip install --no-build-isolation deepspeed` ({error})"
        ) from error
    # DeepSpeed's calls of torch.distributed; one line per collective otherwise.
    warnings.filterwarnings(
        "ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning
    )
    name = get_accelerator().device_name()
    if name != device.type:
        raise ConfigError(
            f"DeepSpeed runs on {name} in this process, the model is on {device.type}; set "
            f"DS_ACCELERATOR={device.type} in the environment"
        )
    return deepspeed
