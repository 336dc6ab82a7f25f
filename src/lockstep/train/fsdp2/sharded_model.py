"""A causal LM whose Parameters are sharded over ranks: by FSDP2 in rows, and before that over tensor
parallel ranks.

Of a Parameter [n, ...] rank s of S has rows s * ceil(n / S) and on, as torch.chunk cuts them; the last ranks
may have fewer, or none. With tensor parallel it is rows of this rank's part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor, Shard

from lockstep import invariant
from lockstep.config.train import TrainConfig
from lockstep.config.train_rules import ep_does_not_divide
from lockstep.errors import ConfigError
from lockstep.execution.regions import decoder_layers
from lockstep.invariant.experts import Experts
from lockstep.models.architectures import Replicated
from lockstep.models.expert_parallel import apply_expert_parallel
from lockstep.models.load import LoadedModel
from lockstep.models.tensor_parallel import (
    TensorParallel,
    apply_tensor_parallel,
    resolve_tp_plan,
    tensor_parallel_plan,
)
from lockstep.ranks import process_group
from lockstep.ranks.process_group import ensure_process_group, group_timeout
from lockstep.train.loss_module import LossModule

# torch 2.13 has it under a new name and warns of the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ShardedModel:
    """A policy (or a frozen reference), sharded in place, inside of a LossModule that is the FSDP2 root.

    The stored shards are the Parameters outside of forward and backward. Each decoder layer is gathered for
    its own forward and backward; embedding, last norm and head for the whole of a forward and backward. With
    execution "joint" layers are too.

    Args:
        module: the causal LM: `model.module`, or a copy of it; compiled already, where it will be, because
            no graph can hold FSDP2's hooks.
        model: where its weights come from, if it has none, and its compute dtype, in which layers are
            gathered and run.
        config: reshard_after_forward, reduce_gradients, parameter_device, execution, tp_plan and what
            LossModule reads.
        stored: dtype of the shards of what is trained; frozen weights have the compute dtype.
        temperature: of logprobs.

    Raises:
        ConfigError: the heads cannot be split over `mesh.tp` ranks, or not by this plan on this mesh.
    """

    def __init__(
        self,
        module: nn.Module,
        model: LoadedModel,
        *,
        mesh: RankMesh,
        config: TrainConfig,
        stored: torch.dtype,
        temperature: float,
    ) -> None:
        self.module, self.mesh, self.dtype = module, mesh, model.dtype
        self.tp: TensorParallel | None = None
        self.ep: TensorParallel | None = None
        self.tp_plan = resolve_tp_plan(config.tp_plan, tp=mesh.tp, others=mesh.shards)
        if mesh.tp > 1:
            plan = tensor_parallel_plan(module, size=mesh.tp, plan=self.tp_plan)
            self.tp = apply_tensor_parallel(module, group=mesh.tp_group, plan=plan)
            if invariant.is_converted(module):  # whole matrices were tested, not these parts
                invariant.self_test(module, device=device_of(module), dtype=model.dtype, split=True)
        if mesh.experts is not None:
            self.ep = apply_expert_parallel(module, group=mesh.experts.inner_group)
        self.outer = LossModule(
            module,
            config=config,
            temperature=temperature,
            compiled=config.execution != "eager",
            vocab=None if self.tp is None else self.tp.vocab,
        )
        self.device = device_of(self.module)
        self.offloaded = config.parameter_device == "cpu"
        self._reshards = config.reshard_after_forward
        self._reduces_each = config.reduce_gradients == "per_micro_batch"
        meta = next(self.module.parameters()).is_meta
        if meta:
            _retype(self.module, stored, frozen=model.dtype)
        else:
            for parameter in self.module.parameters():  # not Module.to: rotary tables stay float32
                parameter.data = parameter.data.to(stored if parameter.requires_grad else model.dtype)
        self._shard(config, stored)
        if meta:
            self._materialize(model.source)
        # Pads the shards and settles where they are; otherwise the first forward would.
        _state(self.outer)._lazy_init()
        self.parameters = {name: cast(DTensor, p) for name, p in self.module.named_parameters()}
        if config.grad_accum_dtype == "float32":
            self._keep_float32_gradients()

    def _shard(self, config: TrainConfig, stored: torch.dtype) -> None:
        # Gradients that wait for their reduction are added up where they are, whole, in what they are
        # reduced in: FSDP2 casts the first one and adds the others to it.
        summed = torch.float32 if config.grad_accum_dtype == "float32" else self.dtype
        policy: dict[str, Any] = {
            "mesh": self.mesh.shared.mesh,
            "reshard_after_forward": config.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=None if stored == self.dtype else self.dtype,
                reduce_dtype=summed,
                cast_forward_inputs=False,  # rotary tables stay float32
            ),
        }
        if self.offloaded:
            policy["offload_policy"] = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        # What forward uses last backward needs first: the last layer and the root stay gathered between them.
        stays = policy | {"reshard_after_forward": False}
        if config.execution != "joint":  # whose graph takes the weights of all layers at once
            self._shard_experts(policy)
            *layers, last = decoder_layers(self.module)
            for layer in layers:
                fully_shard(layer, **policy)
            fully_shard(last, **stays)
        fully_shard(self.outer, **stays)
        # The root is the first: modules() begins with the module itself.
        self._parts = [part for part in self.outer.modules() if isinstance(part, FSDPModule)]
        for part in self._parts:
            # Sums, not means: loss_weights hold the normaliser of the whole step. The factor alone would
            # make a PREMUL_SUM of it, which gloo does not have.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)

    def _shard_experts(self, policy: dict[str, Any]) -> None:
        """Shard this rank's experts over the ranks that have the same ones; what fully_shard then does to a
        layer leaves them out."""
        if self.mesh.experts is None:
            return
        for part in self.module.modules():
            if isinstance(part, Experts):
                fully_shard(part, **(policy | {"mesh": self.mesh.experts.mesh}))

    def _keep_float32_gradients(self) -> None:
        """Reduced gradients of 16-bit shards (`optimizer_device = "cpu"`) stay float32, in which they are
        added up over micro-batches and calls; FSDP2 would cast each to the dtype of its shard."""
        for part in self._parts:
            for group in _groups(part):
                if group._orig_dtype is not None:  # private, in torch 2.11 to 2.13
                    group._orig_dtype = torch.float32
        for parameter in self.parameters.values():
            if parameter.requires_grad:
                parameter.grad_dtype = torch.float32

    @torch.no_grad()
    def _materialize(self, source: Any) -> None:
        """Replace the shards on the meta device by shards read from `source`."""
        device = torch.device("cpu") if self.offloaded else self.device
        sharded: dict[nn.Parameter, nn.Parameter] = {}
        for name, parameter in self.module.named_parameters():
            old = cast(DTensor, parameter)
            local = torch.empty(old.to_local().shape, dtype=old.dtype, device=device)
            rows, *columns = self._part(name, old.shape)
            if rows.stop > rows.start:
                values = source.read_part(name, dim=0, start=rows.start, stop=rows.stop, device=device)
                local.copy_(values[(slice(None), *columns)])
            # The shape is given because torch takes shards for equally large: it cannot see that the last
            # rank has fewer rows. run_check would add collectives for every Parameter.
            whole = DTensor.from_local(
                local,
                self._place(name).mesh,
                [Shard(0)],
                run_check=False,
                shape=old.shape,
                stride=old.stride(),
            )
            sharded[parameter] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        # FSDP2 takes over Parameters that were replaced after fully_shard when it is first used
        # (reset_sharded_param, in _lazy_init).
        for module in self.module.modules():
            for key, empty in module._parameters.items():
                if empty is not None:
                    module._parameters[key] = sharded[empty]

    # --- shards and wholes ----------------------------------------------------------------------------------

    def part(self, name: str) -> tuple[slice, ...]:
        """The part of the whole Parameter that this rank has: rows, and columns where tensor parallel splits
        them."""
        return self._part(name, self.parameters[name].shape)

    def _part(self, name: str, shape: torch.Size) -> tuple[slice, ...]:
        """Like `part`, within `shape`: what FSDP2 shards, the part of a tensor or expert parallel rank."""
        place, split = self._place(name), self._split(name)
        chunk = -(-shape[0] // place.size)
        start = min(shape[0], chunk * place.rank)
        rows = slice(start, min(shape[0], start + chunk))
        bounds = None if split is None else split.bounds(name)
        if bounds is None:
            return (rows,)
        dim, first, last = bounds
        if dim == 0:
            return (slice(first + rows.start, first + rows.stop),)
        return (rows, *[slice(None)] * (dim - 1), slice(first, last))

    def _split(self, name: str) -> TensorParallel | None:
        """What cut the Parameter before FSDP2 shards it."""
        return self.ep if self.ep is not None and self.ep.bounds(name) is not None else self.tp

    def _place(self, name: str) -> ShardRanks:
        """The ranks that have a shard of the Parameter, or of this rank's part of it."""
        experts = self.mesh.experts
        if experts is not None and self._split(name) is self.ep:
            return experts
        return self.mesh.shared

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole Parameter."""
        split = self._split(name)
        return tuple(self.parameters[name].shape) if split is None else split.whole_shape(name)

    def part_shape(self, name: str) -> tuple[int, ...]:
        """Shape of this tensor parallel rank's part of the Parameter."""
        return tuple(self.parameters[name].shape)

    def local(self, name: str) -> Tensor:
        """This rank's shard: the stored memory itself."""
        # Not to_local(), which is an op of autograd.
        return self.parameters[name]._local_tensor.detach()

    def whole(self, name: str, local: Tensor) -> Tensor:
        """The whole tensor of which every rank has a part like its shard of Parameter `name`; collective.

        Args:
            local: shaped as `self.local(name)`, any dtype.
        """
        rows, split = self.rows(name, local), self._split(name)
        return rows if split is None else split.gather(name, rows)

    def rows(self, name: str, local: Tensor) -> Tensor:
        """Like `whole`, of this tensor parallel rank's part: collective over the shard group alone."""
        place, shape = self._place(name), self.parameters[name].shape
        if place.size == 1:
            return local.to(self.device)
        padded = self._padded(local, shape, place)
        gathered = padded.new_empty((len(padded) * place.size, *shape[1:]))
        _all_gather(gathered, padded, group=place.group)
        return gathered[: shape[0]]

    def whole_on(self, name: str, local: Tensor, *, owner: int) -> Tensor | None:
        """Like `whole`, on rank `owner` of all ranks only, None on the others; collective."""
        place, split, shape = self._place(name), self._split(name), self.parameters[name].shape
        shard_owner, inner_rank = divmod(owner, place.inner)  # tensor and expert parallel are innermost
        rows: Tensor | None = local.to(self.device)
        if place.size > 1:
            padded = self._padded(local, shape, place)
            parts = [torch.empty_like(padded) for _ in range(place.size)]
            mine = parts if place.rank == shard_owner else None
            # dst counts in the whole world, also within a group.
            dist.gather(padded, mine, dst=shard_owner * place.inner + place.inner_rank, group=place.group)
            rows = None if mine is None else torch.cat(mine)[: shape[0]]
        if place.rank != shard_owner:
            return None
        assert rows is not None
        whole = rows if split is None else split.gather(name, rows)
        return whole if place.inner_rank == inner_rank else None

    def _padded(self, local: Tensor, shape: torch.Size, place: ShardRanks) -> Tensor:
        """Pad to as many rows as the first rank has, on the device."""
        chunk = -(-shape[0] // place.size)
        if len(local) == chunk:
            return local.to(self.device).contiguous()
        padded = torch.zeros((chunk, *shape[1:]), dtype=local.dtype, device=self.device)
        padded[: local.shape[0]].copy_(local)
        return padded

    def persistent_buffers(self) -> dict[str, Tensor]:
        """The buffers that belong to a checkpoint; every rank has all of them."""
        persistent = self.module.state_dict().keys()
        return {name: buffer for name, buffer in self.module.named_buffers() if name in persistent}

    # --- gradients ------------------------------------------------------------------------------------------

    def copies(self, name: str) -> int:
        """Number of ranks of a tensor parallel group that have the same shard of this Parameter."""
        replicated = self.tp is None or isinstance(self.tp.plan[name], Replicated)
        return self.mesh.tp if replicated else 1

    def add_up(self, shards: dict[str, Tensor]) -> None:
        """Add up the gradients of which each tensor parallel rank has a share; collective. They are replaced
        in `shards`: what FSDP2 holds stays as it is, so that more may be added to it."""
        if self.tp is None:
            return
        summed = [name for name in shards if self.tp.plan[name] == Replicated(summed=True)]
        shards |= {name: shards[name].clone() for name in summed}
        self.tp.add_up(shards)

    def gradient(self, name: str) -> Tensor | None:
        """This rank's shard of the gradient, added up over the shard group."""
        gradient = self.parameters[name].grad
        # As in `local`: to_local() would be an op of autograd.
        return None if gradient is None else cast(DTensor, gradient)._local_tensor

    def drop_gradients(self) -> None:
        """Forget every gradient, including those of an accumulation that was not reduced."""
        for part in self._parts:
            # No public call forgets a sum that was not reduced: zero_grad sees the sharded Parameters alone.
            for group in _groups(part):
                for parameter in group.fsdp_params:
                    parameter.sharded_param.grad = None
                    parameter.unsharded_accumulated_grad = None
                    if hasattr(parameter, "_unsharded_param"):
                        parameter._unsharded_param.grad = None

    def last_backward(self, last: bool) -> None:
        """Call before each backward of a step. With reduce_gradients "per_step" gradients stay on their rank,
        whole, in float32, until the last one, which adds them up over ranks. With "per_micro_batch" each
        backward does, and FSDP2 adds the float32 shards to those of the backwards before it, in their order.
        Gathered weights stay gathered where forward leaves them so.
        """
        root = self._parts[0]
        root.set_requires_gradient_sync(last or self._reduces_each)
        # The root's weights are needed from the first micro-batch to the last anyway.
        root.set_reshard_after_backward(last, recurse=not self._reshards)

    def reset(self) -> None:
        """Reset FSDP2's hooks after a forward or backward that raised: they expect calls that will not
        come."""
        root = self._parts[0]
        # Once torch 2.13 is the oldest, _reset_iter_state can go.
        if hasattr(root, "reset_iter_state"):
            root.reset_iter_state()
        else:  # torch before 2.13
            _reset_iter_state(self.outer)

    def reshard(self) -> None:
        """Free gathered weights: they are stale after an optimizer step."""
        for part in self._parts:
            part.reshard()

    @contextlib.contextmanager
    def resharded_after(self) -> Iterator[None]:
        """Reshard on exit, also when the body raises."""
        try:
            yield
        finally:
            self.reshard()


def device_of(module: nn.Module) -> torch.device:
    """Device of the module's tensors that are not on the meta device: its buffers, if it has no weights
    yet."""
    tensors = [*module.parameters(), *module.buffers()]
    return next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))


def _retype(module: nn.Module, dtype: torch.dtype, *, frozen: torch.dtype) -> None:
    """Replace the Parameters by others on the meta device, those without gradients in `frozen`; the old ones
    belong to a WeightSource, which relies on their dtype."""
    retyped: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for key, parameter in part._parameters.items():
            if parameter is None:
                continue
            if parameter not in retyped:
                own = dtype if parameter.requires_grad else frozen
                retyped[parameter] = nn.Parameter(
                    torch.empty_like(parameter, dtype=own), requires_grad=parameter.requires_grad
                )
            part._parameters[key] = retyped[parameter]


def _state(part: FSDPModule | nn.Module) -> Any:
    # Private, in torch 2.11 to 2.13, whose names inside differ: the two functions below even that out.
    return cast(FSDPModule, part)._get_fsdp_state()


def _groups(part: FSDPModule | nn.Module) -> list[Any]:
    """FSDP2's groups of Parameters of one module: torch 2.11 has at most one."""
    state = _state(part)
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def _reset_iter_state(root: nn.Module) -> None:
    """Do what FSDPModule.reset_iter_state of torch 2.13 does, for older versions."""
    state = _state(root)
    if state._device.type == "cuda":
        # Kernels of the failed pass may still use the buffers that are let go below.
        torch.cuda.synchronize(state._device)
    comm = state._comm_ctx
    comm.all_gather_state = None
    if hasattr(comm, "reduce_scatter_states"):
        comm.reduce_scatter_states.clear()
    else:
        comm.reduce_scatter_state = None
    comm.post_forward_order.clear()
    for part in root.modules():
        if not isinstance(part, FSDPModule):
            continue
        _state(part)._training_state = TrainingState.IDLE
        for group in _groups(part):
            group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
            group._reshard_after_forward_event = group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


# Ranks as a mesh of data parallel x ring attention x tensor parallel, tensor parallel innermost. Expert
# parallel, without the other two, divides dp: neighbours have different experts and different micro-batches.
#
# 8 ranks at ring = 2, tp = 2:
#
#     rank            0  1  2  3  4  5  6  7
#     dp              0  0  0  0  1  1  1  1      who has which micro-batches
#     ring            0  0  1  1  0  0  1  1      who has which tokens of a micro-batch
#     tp              0  1  0  1  0  1  0  1      who has which part of each matrix
#     shard group     {0, 2, 4, 6} and {1, 3, 5, 7}: dp and ring together, over which FSDP2 shards


@dataclass(frozen=True, kw_only=True)
class ShardRanks:
    """The ranks over which FSDP2 shards a Parameter, or this rank's part of it."""

    mesh: DeviceMesh
    """1-D."""
    group: dist.ProcessGroup
    inner_group: dist.ProcessGroup
    """Neighbours, which have a part each: those of tensor parallel, or of expert parallel."""

    @property
    def size(self) -> int:
        """Ranks that share each part."""
        return self.mesh.size()

    @property
    def rank(self) -> int:
        """Position among them."""
        return self.mesh.get_local_rank()

    @property
    def inner(self) -> int:
        """Parts."""
        return self.inner_group.size()

    @property
    def inner_rank(self) -> int:
        """Which of them this rank has."""
        return dist.get_rank(self.inner_group)


@dataclass(frozen=True, kw_only=True)
class RankMesh:
    """This rank's position in the mesh, and its process groups."""

    dp: int
    ring: int
    tp: int
    dp_rank: int
    ring_rank: int
    tp_rank: int
    world: dist.ProcessGroup
    shared: ShardRanks
    """The ranks of this tensor parallel coordinate: position dp_rank * ring + ring_rank."""
    experts: ShardRanks | None
    """Expert parallel: those that have the same experts, and as inner group those that have all of them
    together."""
    ring_group: dist.ProcessGroup
    tp_group: dist.ProcessGroup

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the mesh by axis."""
        return {"dp": self.dp, "ring": self.ring, "tp": self.tp}

    @property
    def shards(self) -> int:
        """Ranks that share each Parameter."""
        return self.dp * self.ring

    @property
    def shard_rank(self) -> int:
        """Position among them."""
        return self.dp_rank * self.ring + self.ring_rank


def mesh_sizes(world_size: int, *, ring: int, tp: int) -> tuple[int, int, int]:
    """(dp, ring, tp).

    Raises:
        ConfigError: ring * tp does not divide the number of ranks.
    """
    if world_size % (ring * tp):
        fits = list(range(ring * tp, 4 * ring * tp + 1, ring * tp))
        raise ConfigError(
            f"not-divisible: {world_size} ranks cannot form a mesh of dp x ring x tp with train.ring = "
            f"{ring} and train.tp = {tp}: {ring} * {tp} = {ring * tp} does not divide {world_size}. Start "
            f"{fits[0]} ranks or a multiple of that ({', '.join(map(str, fits[1:4]))}), or set train.ring "
            f"and train.tp so that their product divides {world_size}"
        )
    return world_size // (ring * tp), ring, tp


def make_mesh(device: torch.device, *, ring: int, tp: int, ep: int = 1) -> RankMesh:
    """The mesh of all ranks; collective.

    Args:
        device: of the model; decides the kind of collectives.

    Raises:
        ConfigError: the sizes do not divide, on every rank.
    """
    ensure_process_group(device)
    world_size = dist.get_world_size()
    sizes = mesh_sizes(world_size, ring=ring, tp=tp)
    if world_size % ep:
        raise ep_does_not_divide(ep, ranks=world_size)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("dp", "ring", "tp"))
    # One axis: fully_shard takes a mesh of two for hybrid sharding, copies along the first and shards along
    # the second. _flatten is private, in torch 2.11 to 2.13.
    shard = mesh["dp", "ring"]._flatten("shard")
    groups = {name: mesh.get_group(name) for name in ("dp", "ring", "tp")} | {"shard": shard.get_group()}
    experts = None
    if ep > 1:
        split = init_device_mesh(device.type, (world_size // ep, ep), mesh_dim_names=("copies", "ep"))
        groups |= {name: split.get_group(name) for name in ("copies", "ep")}
        experts = ShardRanks(mesh=split["copies"], group=groups["copies"], inner_group=groups["ep"])
    for group in groups.values():
        # init_device_mesh takes no timeout; the default group's is what --rank-timeout says.
        dist.distributed_c10d._set_pg_timeout(group_timeout(device), group)
        # Its ranks have met in the store again, where a stranger may have taken a place.
        process_group.prove(group)
    dp_rank, ring_rank, tp_rank = (mesh.get_local_rank(name) for name in ("dp", "ring", "tp"))
    world = dist.group.WORLD
    assert world is not None
    return RankMesh(
        dp=sizes[0],
        ring=sizes[1],
        tp=sizes[2],
        dp_rank=dp_rank,
        ring_rank=ring_rank,
        tp_rank=tp_rank,
        world=world,
        shared=ShardRanks(mesh=shard, group=groups["shard"], inner_group=groups["tp"]),
        experts=experts,
        ring_group=groups["ring"],
        tp_group=groups["tp"],
    )
