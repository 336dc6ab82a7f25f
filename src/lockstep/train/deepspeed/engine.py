"""DeepSpeed's internals for train/deepspeed/backend.py: gradients, this rank's parts of masters and moments,
and the recovery from a failed backward. Everything here was read in DeepSpeed 0.19.8."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.errors import CheckpointError
from lockstep.models.lora import base_name, has_lora, is_adapter, merged_state_dict
from lockstep.train.loss_module import LossModule
from lockstep.train.optimizer import NamedParameter
from lockstep.train.state.files import MASTER, MODEL, Reader, TensorMeta, read_flat


@dataclass(frozen=True, slots=True, eq=False)
class Fragment:
    """This rank's part of one Parameter, in the float32 partition that the optimizer updates."""

    start: int
    stop: int
    """Elements of the flattened whole Parameter; start == stop: this rank has none of it."""
    flat: Tensor
    """The partition: the optimizer's parameter, and the key of its state."""
    offset: int
    """The position of element `start` in it."""

    def of(self, partition: Tensor) -> Tensor:
        """The part of `flat`, or of a moment of the same shape: a view, 1-D."""
        return partition.detach().view(-1).narrow(0, self.offset, self.stop - self.start)


class ZeroEngine:
    """A DeepSpeedEngine with one name for what its stages call differently.

    Args:
        ds: the deepspeed package.
        engine: what `deepspeed.initialize` made of `outer`.
        outer: the module around the policy.
        named: the trained Parameters.
        device: of the computation.
    """

    def __init__(
        self,
        ds: Any,
        engine: Any,
        *,
        outer: nn.Module,
        named: Sequence[NamedParameter],
        device: torch.device,
    ) -> None:
        self.ds, self.engine, self.outer = ds, engine, outer
        self.stage: int = engine.zero_optimization_stage()
        self.deepcompile = not isinstance(outer, LossModule)
        self.parameters = {p.name: p.parameter for p in named}
        self.device = device
        self.offloaded = bool(getattr(engine.optimizer, "cpu_offload", False)) or bool(
            getattr(engine.optimizer, "offload_optimizer", False)
        )
        if self.masters_apart and self.stage == 0:
            _undo_first_step(engine.optimizer)
        # DeepSpeed's accessors of gradients read this very dict; DeepCompile puts another one in its place.
        self._shares: dict[int, Any] = (
            engine.optimizer.averaged_gradients if self.stage in (1, 2) and not self.offloaded else {}
        )

    @property
    def masters_apart(self) -> bool:
        """Whether float32 masters exist beside the Parameters: at stage 0 only for bfloat16 with an
        optimizer."""
        return self.stage > 0 or hasattr(self.engine.optimizer, "fp32_groups")

    # --- gradients ------------------------------------------------------------------------------------------

    def after_backward(self) -> None:
        """Call after the last backward of a step."""
        gradients = self.engine.optimizer.averaged_gradients if self.deepcompile else self._shares
        if gradients is not self._shares:
            self._shares.update(gradients)

    def drop_gradients(self) -> None:
        """Forget every gradient since the last optimizer step, and whatever a forward or backward that failed
        left behind. Not collective."""
        engine, optimizer = self.engine, self.engine.optimizer
        # The engine clears .grad of the module's Parameters only; buckets, sums and partitions are the
        # optimizer's.
        engine.zero_grad()
        if self.stage in (1, 2):
            optimizer.zero_grad()
            # DeepSpeed 0.19.8 has no public call for what follows. A backward that failed leaves gradients
            # behind, and the next one would add to them.
            optimizer._release_preflattened_grad_buffers()
            for held in (optimizer.averaged_gradients, optimizer.all_grad_tensors, self._shares):
                # In place: the accessors of gradients hold these very dicts.
                held.update(dict.fromkeys(held))
            for bucket in optimizer.ipg_buckets.values():
                bucket.clear()
            optimizer._release_ipg_buffers()
            # As DeepSpeed initialises it. Above 0 an offloaded gradient is added to what its buffer on the
            # host holds.
            optimizer.micro_step_id = -1
        elif self.stage == 3:
            optimizer.zero_grad()
            optimizer.averaged_gradients = {}
            # An expert that no token was routed to would find its old gradient there.
            optimizer.grad_partitions_flat_buffer.zero_()
        if self.offloaded:
            for flat in self._flats():
                if flat.grad is not None:
                    flat.grad.zero_()
            # The norms that DeepSpeed clips by; a Parameter without a gradient in the next step would keep
            # this step's.
            optimizer.norm_for_param_grads.clear()
            if self.stage < 3:
                optimizer._offload_accumulated_param_ids = set()

    def recover(self) -> None:
        """Recover after a forward or backward that raised: DeepSpeed's hooks expect every module that was
        entered to be left, and every gradient of a backward to arrive."""
        optimizer = self.engine.optimizer
        if self.stage > 0:
            # A backward that failed was never left: the next one would count as nested in it, with hooks of
            # the first still to come.
            state = optimizer._backward_hook_state
            state.backward_active_depth = state.remaining_grad_acc_hooks = 0
            state.reset_for_new_step()
            # DeepSpeed asserts that no gradient is reduced twice in one backward.
            reduced = optimizer.params_already_reduced
            for key in range(len(reduced)) if isinstance(reduced, list) else list(reduced):
                reduced[key] = False
        if self.stage == 3 and not self.deepcompile:
            parameter_offload = self.ds.runtime.zero.parameter_offload
            for bucket in optimizer.ipg_buckets.values():
                # Gradients that waited for their bucket to be full; the next reduction would take them along.
                bucket.clear_params()
            # A list of DeepSpeed's module, shared by all engines of the process: hooks push a module when it
            # is entered and pop it when it is left. A weight that is read outside of its module is registered
            # with the last entry.
            del parameter_offload.FWD_MODULE_STACK[:]
            parameter_offload.FWD_MODULE_STACK.append(self.outer)
            for module in self.outer.modules():
                vars(module).pop("applied_pre_backward_ref_cnt", None)
            offload = optimizer.parameter_offload
            offload.release_backward_leftovers()
            offload.partition_all_parameters()
            # The recorded order of modules, by which weights are fetched ahead, ends where the forward
            # failed.
            offload.get_param_coordinator()._invalidate_trace()
        self.drop_gradients()

    def gradients(self) -> dict[str, Tensor]:
        """Whole gradients, added up over ranks, by Parameter name: float32 copies on the host, not clipped.
        Collective; the same on every rank."""
        full = self.ds.utils.safe_get_full_grad
        gradients = {name: full(parameter) for name, parameter in self.parameters.items()}
        return {
            name: gradient.detach().to("cpu", torch.float32, copy=True)
            for name, gradient in gradients.items()
            if gradient is not None
        }

    def gradient_norm(self) -> float:
        """Euclidean norm over `gradients()`, from each rank's own share, in float32. Collective."""
        if self.stage == 0:
            shares = [p.grad for p in self.parameters.values() if p.grad is not None]
        elif self.offloaded:
            shares = [flat.grad for flat in self._flats() if flat.grad is not None]
        else:
            groups = self.engine.optimizer.averaged_gradients.values()
            shares = [gradient for group in groups for gradient in group or ()]
        squares = [g.detach().float().square().sum().double() for g in shares]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
        total = total.to(self.device)
        if self.stage > 0:
            dist.all_reduce(total)
        return math.sqrt(float(total))

    def _flats(self) -> list[Tensor]:
        """This rank's float32 partitions, at stages 1 to 3."""
        optimizer = self.engine.optimizer
        partitions: list[Tensor] = (
            optimizer.fp32_partitioned_groups_flat
            if self.stage == 3
            else optimizer.single_partition_of_fp32_groups
        )
        return partitions

    def step(self, lr: float) -> None:
        """Clip and update; gradients are dropped."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        if hasattr(self.engine.basic_optimizer, "ds_opt_adam"):
            _forget_powers(self.engine.basic_optimizer)
        self.engine.step()
        self.drop_gradients()

    # --- masters and moments --------------------------------------------------------------------------------

    @property
    def states(self) -> Any:
        """The optimizer's state: partition -> name -> tensor."""
        return self.engine.basic_optimizer.state

    def first_step(self, flat: Tensor) -> Any:
        """The initial optimizer state, before its first update of `flat`."""
        optimizer = self.engine.basic_optimizer
        if not isinstance(optimizer, torch.optim.AdamW):
            return 0  # DeepSpeedCPUAdam's
        fused = any(group.get("fused") for group in optimizer.param_groups)
        return torch.zeros((), dtype=torch.float32, device=flat.device if fused else None)

    def fragments(self) -> Iterator[tuple[str, Fragment]]:
        """This rank's part of every trained Parameter."""
        masters = self._masters_at_0() if self.stage == 0 else {}
        for name, parameter in self.parameters.items():
            if self.stage == 0:
                master = masters.get(id(parameter), parameter)
                yield name, Fragment(0, master.numel(), master, 0)
            elif self.stage == 3:
                yield name, self._fragment_at_3(parameter)
            else:
                yield name, self._fragment_at_1(parameter)

    def _masters_at_0(self) -> dict[int, Tensor]:
        optimizer = self.engine.optimizer
        if not self.masters_apart:
            return {}
        groups = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        return {id(p): m for own, masters in groups for p, m in zip(own, masters, strict=True)}

    def _fragment_at_1(self, parameter: nn.Parameter) -> Fragment:
        # DeepSpeed 0.19.8 notes on a Parameter where it is in the partition; no accessor gives away the place
        # itself.
        mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            # DeepSpeed maps what overlaps with this rank's partition, and nothing else.
            return Fragment(0, 0, self._flats()[0], 0)
        own, there = mapping.lp_fragment_address, mapping.hp_fragment_address
        flat = self._flats()[mapping.param_group_index]
        return Fragment(own.start, own.start + own.numel, flat, there.start)

    def _fragment_at_3(self, parameter: nn.Parameter) -> Fragment:
        optimizer = self.engine.optimizer
        group, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = min(size * dist.get_rank(), parameter.ds_numel)  # type: ignore[attr-defined]
        stop = min(start + size, parameter.ds_numel)  # type: ignore[attr-defined]  # the rest is padding
        return Fragment(start, stop, self._flats()[group], offset)

    def gathered(self, parameters: Sequence[nn.Parameter]) -> Any:
        """A context in which `parameters` are whole; collective at stage 3."""
        return self.ds.zero.GatheredParameters(list(parameters), enabled=self.stage == 3)

    def refresh_persistent(self) -> None:
        """Small Parameters stay whole on every rank at stage 3: gather them again from their parts.
        Collective."""
        if self.stage == 3 and self.engine.optimizer.persistent_parameters:
            small = self.engine.optimizer.persistent_parameters
            small[0].partition(small)
            small[0].all_gather(small)

    def forget_forward(self) -> None:
        """Call after a forward without backward, for which stage 3 had kept the weights."""
        if self.stage == 3 and not self.deepcompile:
            self.engine.empty_partition_cache()

    def close(self) -> None:
        """Drop gradients and DeepSpeed's hooks."""
        self.drop_gradients()
        self.engine.destroy()


def _forget_powers(optimizer: Any) -> None:
    """Make DeepSpeedCPUAdam compute the power of beta anew in its next update.

    It multiplies the previous step's power by beta, while a resumed run computes the power: the last bit
    differs. An empty update at a far step forces the next one to compute it."""
    (beta1, beta2), nothing = optimizer.param_groups[0]["betas"], [torch.zeros(1) for _ in range(4)]
    steps = [int(state.get("step", 0)) for state in optimizer.state.values()]
    # Any step that does not follow the last one would do.
    far = max(steps, default=0) + 1000
    optimizer.ds_opt_adam.adam_update(
        optimizer.opt_id,
        far,
        0.0,
        beta1,
        beta2,
        1.0,
        0.0,
        True,
        nothing[0],
        nothing[1],
        nothing[2],
        nothing[3],
    )


def _undo_first_step(optimizer: Any) -> None:
    """Undo the step with zero gradients that FP16_UnfusedOptimizer takes when it is made: it decays the
    masters, and AdamW counts an update, so that its bias corrections are those of the next update (0.74 of
    the first one's size with the usual betas)."""
    optimizer.optimizer.state.clear()
    optimizer.refresh_fp32_params()


# The state of train/deepspeed/backend.py as whole tensors by name, for checkpoints that any backend loads.
#
# DeepSpeed's own accessors (safe_set_full_fp32_param and its like) are not used: at stage 3 they cannot set
# a tensor whose size the number of ranks does not divide, and none of them knows a moment before the first
# step.


_MOMENTS = ("exp_avg", "exp_avg_sq")
_UPDATES = "updates/"


class ZeroParts:
    """Implements lockstep.train.state.files.TensorParts.

    Args:
        module: the policy.
        trained_only: leave frozen weights and buffers out (LoRA).
        with_optimizer: whether there are masters and moments to keep.
        adamw: the optimizer has moments.
    """

    def __init__(
        self, zero: ZeroEngine, module: nn.Module, *, trained_only: bool, with_optimizer: bool, adamw: bool
    ) -> None:
        self.group: dist.ProcessGroup | None = dist.group.WORLD
        self._zero, self._adamw = zero, adamw and with_optimizer
        self._weights: dict[str, nn.Parameter | Tensor] = {
            name: p for name, p in module.named_parameters() if p.requires_grad or not trained_only
        }
        if not trained_only:
            persistent = module.state_dict().keys()
            self._weights |= {name: b for name, b in module.named_buffers() if name in persistent}
        self._fragments = dict(zero.fragments()) if zero.masters_apart or with_optimizer else {}
        low = (
            [n for n in self._fragments if self._weights[n].dtype != torch.float32] if with_optimizer else []
        )
        self._masters = set(low)
        self._count: int | None = None

    def tensors(self) -> Mapping[str, TensorMeta]:
        """See TensorParts. The counts of updates come first: they are checked before anything is changed."""
        tensors: dict[str, TensorMeta] = {}
        if self._adamw:
            tensors |= {f"{_UPDATES}{name}": TensorMeta((), torch.float32) for name in self._fragments}
        for name, tensor in self._weights.items():
            tensors[f"{MODEL}{name}"] = TensorMeta(_whole_shape(tensor), tensor.dtype)
        kinds = [(MASTER, self._masters)] + [(f"{m}/", self._fragments) for m in _MOMENTS if self._adamw]
        for prefix, names in kinds:
            for name in self._fragments:
                if name in names:
                    shape = _whole_shape(self._weights[name])
                    tensors[f"{prefix}{name}"] = TensorMeta(shape, torch.float32)
        return tensors

    # --- saving ---------------------------------------------------------------------------------------------

    def whole(self, name: str, *, owner: int) -> Tensor | None:
        """See TensorParts."""
        kind, _, path = name.partition("/")
        mine = dist.get_rank() == owner
        if kind == "model":
            return self._whole_weight(self._weights[path], mine=mine)
        fragment = self._fragments[path]
        if kind == "updates":
            return torch.tensor(float(self._steps_of(fragment)))
        partition = fragment.flat if kind == "master" else self._moment(fragment, kind)
        shape = _whole_shape(self._weights[path])
        if self._zero.stage == 0:
            return torch.zeros(shape) if partition is None else partition.detach().view(shape)
        # Exact: integers, of which at most one is not 0 (a float -0 would not survive a sum).
        buffer = torch.zeros(shape, dtype=torch.float32, device=self._zero.device)
        if partition is not None:
            buffer.view(-1)[fragment.start : fragment.stop] = fragment.of(partition)
        dist.reduce(buffer.view(torch.int32), dst=owner)
        return buffer if mine else None

    def _whole_weight(self, weight: nn.Parameter | Tensor, *, mine: bool) -> Tensor | None:
        # ds_tensor is this rank's part of a Parameter that ZeRO 3 keeps empty.
        if self._zero.stage < 3 or not hasattr(weight, "ds_tensor"):
            return weight.detach() if mine else None
        assert isinstance(weight, nn.Parameter)
        with torch.no_grad(), self._zero.gathered([weight]):
            return weight.detach().clone() if mine else None

    def _moment(self, fragment: Fragment, kind: str) -> Tensor | None:
        """The moment of a fragment's partition; None before the first update."""
        moment: Tensor | None = self._zero.states.get(fragment.flat, {}).get(kind)
        return moment

    def _steps_of(self, fragment: Fragment) -> int:
        return int(self._zero.states.get(fragment.flat, {}).get("step", 0))

    # --- loading --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def fill(self, name: str, read: Reader) -> None:
        """See TensorParts.

        Raises:
            CheckpointError: parameters have been updated different numbers of times.
        """
        kind, _, path = name.partition("/")
        if kind == "model":
            self._fill_weight(path, read)
            return
        fragment = self._fragments[path]
        if kind == "updates":
            count = int(read())
            if self._count not in (None, count):
                raise CheckpointError(
                    f"unsupported-combination: {path} was updated {count} times and other parameters "
                    f"{self._count} times, as in a model that did not always use all of its experts; "
                    "DeepSpeed keeps one count for all, so load it with train.backend = 'local' or 'fsdp2'"
                )
            self._count = count
        elif fragment.start < fragment.stop:
            target = fragment.flat if kind == "master" else self._state(fragment.flat)[kind]
            fragment.of(target).copy_(read_flat(read, fragment.start, fragment.stop))

    def _fill_weight(self, path: str, read: Reader) -> None:
        weight = self._weights[path]
        part: Tensor | None = getattr(weight, "ds_tensor", None)
        if part is None:
            weight.detach().copy_(read())
        else:
            size = torch.Size(read.shape).numel()
            start = min(part.numel() * dist.get_rank(), size)
            stop = min(start + part.numel(), size)
            part.detach().view(-1)[: stop - start].copy_(read_flat(read, start, stop))
        fragment = self._fragments.get(path)
        if fragment is None or path in self._masters or fragment.flat is weight:
            return
        if fragment.start < fragment.stop:  # a float32 weight has a master too
            fragment.of(fragment.flat).copy_(read_flat(read, fragment.start, fragment.stop))

    def _state(self, flat: Tensor) -> dict[str, Tensor]:
        """The live moments of a partition; DeepSpeed makes them in the first step."""
        state: dict[str, Tensor] = self._zero.states[flat]
        if "exp_avg" not in state:
            state["step"] = self._zero.first_step(flat)
            state |= {kind: torch.zeros_like(flat, requires_grad=False) for kind in _MOMENTS}
        return state

    def finish_loading(self) -> None:
        """Call after the last `fill`. Collective."""
        if self._adamw:
            for flat in {id(f.flat): f.flat for f in self._fragments.values() if f.stop > f.start}.values():
                state = self._state(flat)
                step, count = state["step"], self._count or 0
                state["step"] = step.fill_(count) if isinstance(step, Tensor) else count
        self._zero.refresh_persistent()


def whole_weights(zero: ZeroEngine, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face name -> whole weight, LoRA merged, tied ones under every name. Collective at stage 3:
    copies on the backend's device, gathered one at a time (with LoRA all of them)."""
    if zero.stage < 3:
        yield from merged_state_dict(module).items()
        return
    if has_lora(module):
        with torch.no_grad(), zero.gathered(list(module.parameters())):
            merged = {name: tensor.clone() for name, tensor in merged_state_dict(module).items()}
        yield from merged.items()
        return
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, tensor in module.state_dict().items():
        if name not in parameters:
            yield name, tensor
            continue
        with torch.no_grad(), zero.gathered([parameters[name]]):
            whole = parameters[name].detach().clone()
        yield name, whole
        del whole  # before the next one is gathered


def whole_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of `whole_weights`, by name, without gathering anything."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    shapes = {base_name(name): _whole_shape(p) for name, p in parameters.items() if not is_adapter(name)}
    buffers = {n: tuple(t.shape) for n, t in module.state_dict().items() if n not in parameters}
    return shapes | buffers


def _whole_shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(getattr(tensor, "ds_shape", tensor.shape))
