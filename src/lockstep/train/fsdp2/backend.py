"""The train backend over FSDP2: sharded weights, gradients and optimizer states, on gloo or nccl."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.attention import kernel_of
from lockstep.config.train import TrainConfig, outside_of_runs
from lockstep.errors import ConfigError
from lockstep.models.architectures import causal_lm, checkpoint_activations
from lockstep.models.export import export_tensors
from lockstep.models.forward import Ring, check_ring
from lockstep.models.load import LoadedModel
from lockstep.models.lora import (
    adapted_weights,
    base_name,
    is_adapter,
    merged_weight,
    without_lora,
)
from lockstep.observe import flight
from lockstep.observe.metrics import Spans
from lockstep.packing import ring_shard
from lockstep.protocols.train import FinishSave, OffloadPart, Reference, StepStats, TokenLoss
from lockstep.schema.batch import PackedBatch
from lockstep.schema.weights import WeightPart, WeightUpdate
from lockstep.train.assignment import (
    assign_batches,
    require_same_batches,
    share_logprobs,
    share_stats,
)
from lockstep.train.base import (
    MasterBackend,
    compile_module,
    contract_of,
)
from lockstep.train.fsdp2.sharded_model import ShardedModel, device_of, make_mesh
from lockstep.train.loss_module import (
    MicroBatchOutput,
    RingPart,
    Rows,
    head_rows,
    ring_rows,
    scatter,
)
from lockstep.train.optimizer import (
    MasterOptimizer,
    NamedParameter,
    global_norm,
    make_optimizer,
    trained_parameters,
)
from lockstep.train.routing import Routing, step_shares
from lockstep.train.state.files import MASTER, MODEL, Layout, Reader, TensorMeta

_NCCL_ROOM = 2 << 30
"""Bytes of a GPU that NCCL can need for the buffers of a gather."""


class FSDP2Backend(MasterBackend):
    """Trains on several ranks what LocalBackend trains on one, and computes the same numbers.

    Every rank makes the same calls with the same micro-batches; the backend assigns them to ranks. Each rank
    keeps a share of every Parameter in float32, which is its master weight, of its gradient and of its
    optimizer states. Forward and backward gather one decoder layer at a time in the compute dtype, or with
    execution "joint" all of them. Gradients are added up, in float32, over micro-batches on each rank, then
    once per step over ranks.

    All methods but `close` and `drop_gradients` are collective.

    Args:
        config: the train settings; `backend` and `attention` have been applied by the code that loaded the
            model.
        model: the policy, best without weights (`load_model(materialize=False)`): then no rank ever holds
            it whole. Its module is sharded in place.
        total_steps: optimizer steps of the whole run: where the schedule ends. 0: no step will follow, so
            neither master weights nor optimizer states are allocated.
        temperature: logprobs are of logits divided by it; 0 counts as 1.
        ref: keep the policy as it is now as frozen reference: a copy, sharded likewise, in the compute dtype;
            or with LoRA the base weights.
        spans: times "forward" (loss and gradients of the head included) and "backward" of every micro-batch.

    Raises:
        ConfigError: nothing to train, a missing package, sizes that do not divide, or something that this
            backend does not support; on every rank.
    """

    shards_weights = True

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
        _refuse_impossible(config, model)
        device = device_of(model.module)
        super().__init__(config, model=model, total_steps=total_steps, spans=spans, device=device)
        self.temperature = temperature
        if config.ring > 1:
            base = getattr(self.module, causal_lm(self.module).base_model_prefix)
            compiled = config.execution != "eager"
            kernel = kernel_of(base.config._attn_implementation)
            check_ring(kernel, base.config, layout=config.layout, compiled=compiled, device=self.device)
        self.mesh = make_mesh(self.device, ring=config.ring, tp=config.tp, ep=config.ep)
        self._layout = Layout(backend="fsdp2", mesh=self.mesh.sizes, stream=self.mesh.shard_rank)
        frozen = self._copied(ref)
        decay = {p.name: p.decay for p in trained_parameters(self.module)}
        masters_here = total_steps > 0 and config.optimizer_device == "model"
        self._compile_watch = compile_module(self.module, config)
        self._policy = self._sharded(self.module, stored=torch.float32 if masters_here else model.dtype)
        if config.tp > 1:  # the parts of matrices have kernels of their own
            self.contract = contract_of(config, model, self.device)
        self.ref = Reference(self._score_base) if ref else None
        self._frozen: ShardedModel | None = None
        if frozen is not None:
            compile_module(frozen, config, like=self.module)
            self._frozen = self._sharded(frozen, stored=model.dtype)
            self.ref = Reference(functools.partial(self._score, self._frozen))
        self._names = list(decay)
        self._optimizer = self._optimizer_of(decay) if total_steps > 0 else None
        self._has_gradients = False
        self._added_up: dict[str, Tensor] | None = None
        if config.activation_checkpointing:
            checkpoint_activations(self.module)

    # --- construction ---------------------------------------------------------------------------------------

    def _sharded(self, module: nn.Module, *, stored: torch.dtype) -> ShardedModel:
        return ShardedModel(
            module,
            self.model,
            mesh=self.mesh,
            config=self.config,
            stored=stored,
            temperature=self.temperature,
        )

    def _optimizer_of(self, decay: dict[str, bool]) -> MasterOptimizer:
        """The same code as LocalBackend's, over this rank's shards."""
        shards = [
            # Over the shards' own memory, so that an update of these is an update of the policy, without
            # DTensor.
            NamedParameter(name=name, parameter=nn.Parameter(self._policy.local(name), False), decay=decayed)
            for name, decayed in decay.items()
        ]
        return make_optimizer(shards, config=self.config)

    # --- forward and backward -------------------------------------------------------------------------------

    def logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """[T] float32 per batch, nats, no grad, 0 where loss_mask is False. Raises TrainError: out of memory,
        or the ranks were not given the same batches."""
        return self._score(self._policy, batches)

    def _score_base(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        with without_lora(self.module):
            return self._score(self._policy, batches)

    def _score(self, sharded: ShardedModel, batches: Sequence[PackedBatch]) -> list[Tensor]:
        require_same_batches(batches, group=self.mesh.world, device=self.device)
        logprobs_of: dict[int, Tensor] = {}
        used: OffloadPart = "ref" if sharded is self._frozen else "weights"
        with self._on_device(used), torch.no_grad(), sharded.resharded_after(), self._counting():
            for index, batch in self._assigned(batches):
                with self._memory_errors_explained(index, batch, count=len(batches)):
                    flight.note_micro_batch(index, batch.lengths)
                    batch = batch.with_rows()
                    rows, labels, part = self._rows(batch)
                    logprobs = sharded.outer(batch.to(self.device), rows, labels, None, part)
                    if index is not None and self._shares_results:
                        logprobs_of[index] = scatter(logprobs, rows, batch.num_slots)
        return share_logprobs(batches, logprobs_of, group=self.mesh.world, device=self.device)

    def forward_backward(self, batches: Sequence[PackedBatch], loss: TokenLoss) -> StepStats:
        """See MasterBackend."""
        require_same_batches(batches, group=self.mesh.world, device=self.device)
        # More gradients are coming: what was added up over ranks before is stale.
        self._added_up = None
        stats = super().forward_backward(batches, loss)
        # From the whole step's masks, not from .grad: every rank must come to the same answer, since the norm
        # is a collective.
        routing = self._routing()
        everywhere = self._static_head or (routing is not None and routing.has_losses)
        self._has_gradients |= any(everywhere or bool(batch.loss_mask.any()) for batch in batches)
        return stats

    def _accumulate(self, batches: Sequence[PackedBatch], loss: TokenLoss) -> StepStats:
        outputs: dict[int, MicroBatchOutput] = {}
        assigned, shares = self._assigned(batches), step_shares(batches)
        root = self._policy.outer
        root.train()
        try:
            with self._on_device("weights"), self._policy.resharded_after(), self._counting():
                for position, (index, batch) in enumerate(assigned):
                    self._policy.last_backward(position == len(assigned) - 1)
                    with self._memory_errors_explained(index, batch, count=len(batches)):
                        flight.note_micro_batch(index, batch.lengths)
                        share = 0.0 if index is None else shares[index]
                        one = self._backward(batch, loss, share=share)
                    if index is not None and self._shares_results:
                        outputs[index] = one
        finally:
            root.eval()
        group, terms = self.mesh.world, len(loss.terms)
        return share_stats(batches, outputs, terms=terms, group=group, device=self.device)

    @property
    def _shares_results(self) -> bool:
        """Whether this rank shares its results. One rank of each tensor parallel group does, as all of them
        compute the same."""
        return self.mesh.tp_rank == 0

    def _assigned(self, batches: Sequence[PackedBatch]) -> list[tuple[int | None, PackedBatch]]:
        """The micro-batches that this rank runs, with the index into `batches`; None: an empty one, so that
        the rank takes part in the collectives."""
        return assign_batches(batches, part=self.mesh.dp_rank, parts=self.mesh.dp)

    def _rows(self, batch: PackedBatch) -> tuple[Rows, Tensor, RingPart | None]:
        """Return the head's part of a batch on the host: slots of the pack, their labels, and on a ring their
        positions among this rank's rows."""
        if self.mesh.ring == 1:
            rows, labels = head_rows(batch, static=self._static_head, device=self.device)
            return rows, labels, None
        shard = ring_shard(
            batch.lengths,
            rank=self.mesh.ring_rank,
            size=self.mesh.ring,
            num_documents=len(batch.sample_ids),
            gather=self.config.gathers_keys,
        )
        mine, labels, local = ring_rows(batch, shard.index, static=self._static_head, device=self.device)
        every, _ = head_rows(batch, static=self._static_head, device=self.device)
        ring = Ring(shard=shard.to(self.device), group=self.mesh.ring_group)
        return mine, labels, RingPart(ring=ring, local=local, every=every)

    def _backward(self, batch: PackedBatch, loss: TokenLoss, *, share: float) -> MicroBatchOutput:
        """Forward, loss and backward of one micro-batch, or of this rank's part of it; share: see
        `step_shares`."""
        batch = batch.with_rows()
        rows, labels, part = self._rows(batch)
        moved = batch.to(self.device)
        outer = self._policy.outer
        with self.spans("forward"):
            value: Tensor = outer(moved, rows, labels, loss, part, share)
        with self.spans("backward"):
            value.backward()
        assert outer.tokens is not None
        counted = loss.separable or self.mesh.ring_rank == 0  # otherwise it is of the whole pack
        return MicroBatchOutput(
            loss=value.detach() if counted else torch.zeros_like(value),
            tokens=scatter(outer.tokens, rows, batch.num_slots),
        )

    def _forward(self, batch: PackedBatch) -> None:
        rows, labels, part = self._rows(batch)
        with self._policy.resharded_after():
            self._policy.outer(batch, rows, labels, None, part)

    # --- errors ---------------------------------------------------------------------------------------------

    def _memory_advice(self, tokens: int, micro_batches: int) -> str:
        mesh = " x ".join(f"{name} {size}" for name, size in self.mesh.sizes.items())
        joint = self.config.execution == "joint"
        gathered = "train.execution = 'compile'" if joint else "train.reshard_after_forward = true"
        return (
            f" on a mesh of {mesh}; set train.activation_checkpointing = true, lower train.token_budget, set "
            f"{gathered}, train.optimizer_device = 'cpu' or train.parameter_device = 'cpu', or use more ranks"
        )

    def _recover(self) -> None:
        self._policy.reset()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget every gradient since the last optimizer step."""
        self._policy.drop_gradients()
        self._pending, self._has_gradients, self._added_up = [], False, None

    # --- gradients ------------------------------------------------------------------------------------------

    def _here(self) -> dict[str, Tensor]:
        """This rank's shard of each gradient since the last optimizer step, by Parameter name; gradients of
        Parameters that all tensor parallel ranks have are added up over those ranks."""
        if not self._has_gradients:
            return {}
        if self._added_up is None:
            gradients = {name: self._policy.gradient(name) for name in self._names}
            self._added_up = {n: gradient for n, gradient in gradients.items() if gradient is not None}
            self._policy.add_up(self._added_up)
        return self._added_up

    def gradients(self) -> dict[str, Tensor]:
        """Whole, added up over ranks, by Parameter name: float32 copies on the host, not clipped.
        Unused Parameters are left out."""
        return {
            name: self._policy.whole(name, shard).to("cpu", torch.float32, copy=True)
            for name, shard in self._here().items()
        }

    def _norm(self, gradients: dict[str, Tensor]) -> float:
        """Squares of each rank's shards are added up over all ranks, each element once, however many tensor
        parallel ranks have it."""
        # torch.nn.utils.clip_grad_norm_ is no help here: it counts a Parameter once for each tensor parallel
        # rank that has it, and does not mix DTensors with plain tensors (torch 2.13).
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        for copies in (1, self.mesh.tp):
            norm = global_norm([g for n, g in gradients.items() if self._policy.copies(n) == copies])
            # Divided, because the sum over ranks below counts it once for each rank that has it.
            square += norm.to(self.device, torch.float64).square() / copies
            if self.mesh.tp == 1:
                break
        dist.all_reduce(square, group=self.mesh.world)
        return math.sqrt(float(square))

    def _routing(self) -> Routing | None:
        return self._policy.outer.routing

    def _add_up(self, counts: Tensor) -> None:
        dist.all_reduce(counts, group=self.mesh.world)

    def _not_finite(self) -> list[str]:
        """See MasterBackend: not finite on some rank."""
        # By hand, as `_blame` goes around forward_backward: what follows is collective, whatever the mask.
        self._has_gradients = True
        shards = self._here()
        # All ranks must find the same names: each decides by them whether it goes on to the next
        # micro-batch's collectives.
        flags = torch.zeros(len(self._names), device=self.device)
        for index, name in enumerate(self._names):
            if name in shards and not bool(torch.isfinite(shards[name]).all()):
                flags[index] = 1.0
        dist.all_reduce(flags, group=self.mesh.world)
        return [name for name, flag in zip(self._names, flags.tolist(), strict=True) if flag]

    # --- weights --------------------------------------------------------------------------------------------

    def weights(self, *, policy_version: int) -> WeightUpdate:
        """The current weights in the compute dtype, LoRA merged. Its `tensors` are gathered one at a time, by
        all ranks together; each rank gets all of them."""
        part = None
        if self.mesh.tp > 1:
            part = WeightPart(
                group=self.mesh.tp_group,
                plan=self._policy.tp_plan,
                tensors=functools.partial(self._weights, self._policy.rows),
                shapes=self._weight_shapes(self._policy.part_shape),
            )
        return WeightUpdate(
            policy_version=policy_version,
            tensors=self._whole_weights,
            shapes=self._weight_shapes(self._policy.whole_shape),
            part=part,
        )

    def _weight_shapes(self, shape_of: Callable[[str], tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        names = self._weight_names().items()
        shapes = {base_name(name): shape_of(own) for own, aliases in names for name in aliases}
        buffers = {name: tuple(b.shape) for name, b in self._policy.persistent_buffers().items()}
        return shapes | buffers

    def _weight_names(self) -> dict[str, list[str]]:
        """Name of each Parameter that is no adapter -> all its names: a tied one has several."""
        first = {id(p): name for name, p in self._policy.parameters.items()}
        names: dict[str, list[str]] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if not is_adapter(name):
                names.setdefault(first[id(parameter)], []).append(name)
        return names

    def _whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._weights(self._policy.whole)

    def _weights(self, gather: Callable[[str, Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """In the compute dtype, LoRA merged. gather: from the shards of a Parameter, given its name and this
        rank's shard; collective."""
        # No decorator around it, such as no_grad: that would hold a weight while the next is gathered.
        adapted = adapted_weights(self.module)
        for own, names in self._weight_names().items():  # a tied weight is gathered once
            weight = self._gathered(gather, own, adapted.get(own))
            for name in names:
                yield base_name(name), weight
            del weight
        yield from self._policy.persistent_buffers().items()

    @torch.no_grad()
    def _gathered(
        self,
        gather: Callable[[str, Tensor], Tensor],
        name: str,
        adapter: tuple[str, str, float] | None,
    ) -> Tensor:
        """One weight; collective."""

        def of(name: str) -> Tensor:
            # Cast before: less travels, and the bits are those of the cast that every forward makes.
            return gather(name, self._policy.local(name).to(self.model.dtype))

        weight = of(name)
        if adapter is None:
            return weight
        a, b, scaling = adapter
        # Parts fit each other: B A is split as the matrix that it is added to.
        return merged_weight(weight, of(a), of(b), scaling=scaling)

    def save(self, directory: Path, *, background: bool = False) -> FinishSave:
        """See Backend. The first gather's buffers are NCCL's, and torch keeps what it freed."""
        if self.device.type == "cuda" and torch.cuda.mem_get_info(self.device)[0] < _NCCL_ROOM:
            torch.cuda.empty_cache()
        return super().save(directory, background=background)

    def _parts(self) -> ShardedState:
        return ShardedState(self._policy, self._optimizer, trained_only=self._lora)

    def export(self, directory: Path) -> None:
        """Write a Hugging Face folder that from_pretrained loads with all keys matched, LoRA merged; rank 0
        writes as the weights are gathered. Raises ModelError, on every rank."""
        with self._on_device("weights"):
            export_tensors(
                self.module,
                self._whole_weights(),
                tokenizer=self.model.tokenizer,
                directory=directory,
                dtype=self.model.dtype,
            )

    def _tensors_of(self, part: OffloadPart) -> Iterable[Tensor]:
        if part == "states":
            optimizer = self._optimizer
            return [] if optimizer is None else [*optimizer.masters, *optimizer.state().values()]
        sharded = self._policy if part == "weights" else self._frozen
        return [] if sharded is None else [sharded.local(name) for name in sharded.parameters]


def _refuse_impossible(config: TrainConfig, model: LoadedModel) -> None:
    """Raises ConfigError."""
    if config.execution not in ("eager", "compile", "joint"):
        raise ConfigError(
            f"unsupported-combination: train.execution = {config.execution!r} is not available with "
            "train.backend = 'fsdp2'; set 'eager', 'compile' or 'joint'"
        )
    if config.optimizer == "adamw8bit":
        raise ConfigError(
            "unsupported-combination: train.optimizer = 'adamw8bit' is not available with train.backend = "
            "'fsdp2': its blocks of 8-bit codes would cross the boundaries of the ranks' shards; set "
            "'adamw', and train.optimizer_device = 'cpu' to save memory"
        )


# The state of a ShardedModel and its optimizer as the whole tensors of a checkpoint.


class ShardedState:
    """A TensorParts: each tensor is gathered on the rank that writes it, and filled from slices.

    Where the shards are float32 they are the master weights, and a checkpoint's weights are made of them by
    the cast that every forward makes.

    Args:
        optimizer: None: the backend has none.
        trained_only: leave frozen weights and buffers out (LoRA).
    """

    def __init__(
        self, policy: ShardedModel, optimizer: MasterOptimizer | None, *, trained_only: bool
    ) -> None:
        self._policy = policy
        parameters = policy.parameters.items()
        self._weights = [name for name, p in parameters if p.requires_grad or not trained_only]
        self._buffers = {} if trained_only else policy.persistent_buffers()
        self._masters: dict[str, Tensor] = {}
        self._state: dict[str, Tensor] = {}
        if optimizer is not None:
            named = zip(optimizer.parameters, optimizer.masters, strict=True)
            self._masters = {parameter.name: master for parameter, master in named}
            self._state = optimizer.state()
        self._lists_masters = optimizer is not None and policy.dtype != torch.float32

    @property
    def group(self) -> dist.ProcessGroup:
        """All ranks."""
        return self._policy.mesh.world

    def tensors(self) -> Mapping[str, TensorMeta]:
        """See TensorParts."""
        policy = self._policy
        tensors = {MODEL + name: TensorMeta(policy.whole_shape(name), policy.dtype) for name in self._weights}
        tensors |= {MODEL + n: TensorMeta(tuple(b.shape), b.dtype) for n, b in self._buffers.items()}
        if self._lists_masters:
            tensors |= {
                MASTER + name: TensorMeta(policy.whole_shape(name), torch.float32) for name in self._masters
            }
        for key, tensor in self._state.items():
            shape = () if tensor.ndim == 0 else policy.whole_shape(_parameter_of(key))
            tensors[key] = TensorMeta(shape, tensor.dtype)
        return tensors

    @torch.no_grad()
    def whole(self, name: str, *, owner: int) -> Tensor | None:
        """See TensorParts."""
        parameter = _parameter_of(name)
        if name.startswith(MODEL):
            if parameter in self._buffers:
                return self._buffers[parameter]
            local = self._policy.local(parameter).to(self._policy.dtype)
        else:
            local = self._masters[parameter] if name.startswith(MASTER) else self._state[name]
        return local if local.ndim == 0 else self._policy.whole_on(parameter, local, owner=owner)

    @torch.no_grad()
    def fill(self, name: str, read: Reader) -> None:
        """See TensorParts."""
        parameter = _parameter_of(name)
        if name.startswith(MODEL) and parameter in self._buffers:
            self._buffers[parameter].copy_(read())
            return
        if len(read.shape) == 0:
            self._state[name].copy_(read())
            return
        part = self._policy.part(parameter)
        values = read(*part)
        if not name.startswith((MODEL, MASTER)):
            self._state[name].copy_(values)
        elif name.startswith(MASTER):
            self._masters[parameter].copy_(values)
        else:
            shard, master = self._policy.local(parameter), self._masters.get(parameter)
            if shard.dtype == self._policy.dtype:  # otherwise it is the master
                shard.copy_(values)
            if master is not None and not self._lists_masters:
                master.copy_(values)


def _parameter_of(name: str) -> str:
    return name.partition("/")[2]
