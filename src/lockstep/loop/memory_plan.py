"""The memory that a run needs, part by part, before anything is loaded, and the setting that lowers each.

Training's parts are the backend's own (`memory` in its support.toml, or the attribute `memory_parts` of a
class of the user's); sampling's and what a process needs anyway are counted here. It is an estimate: a
process's peak is within a factor of 1.5 (tests/loop/test_memory_plan.py measures it).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from lockstep.config.batch import RewardRoleConfig
from lockstep.config.cluster import remote_name
from lockstep.config.declarations import backends, engines
from lockstep.config.ppo import PPORun, ValueConfig
from lockstep.config.run import GRPORun, OfflineRun, Role, RunConfig, on_ranks
from lockstep.config.support import shards_weights
from lockstep.config.train import TrainConfig, outside_of_runs, token_slots
from lockstep.errors import ConfigError
from lockstep.models.dtypes import resolve_dtype
from lockstep.models.memory import GIB, MemoryPart, ModelShape, Phase, either, phase_totals, planned_shape
from lockstep.models.reward import reward_model_parameters
from lockstep.packing.groups import pack_sizes
from lockstep.protocols import TrainBackend
from lockstep.protocols.train import OffloadableBackend, OffloadPart
from lockstep.registry import load_object
from lockstep.train.memory import Parallelism, StepSize, state_bytes

_RUNTIME = "Python, torch, libraries"
_REF = "reference model"
"""Names of a reference's parts begin with it."""
_OF_ENGINE = (
    f"{_RUNTIME} of the engine",
    "weights of the engine, whole",
    "KV cache",
    "logits of one decoding step",
)
CUDA_RUNTIME = "CUDA context, NCCL, fragmentation"
_RUNTIME_BYTES = {"cpu": int(0.6 * GIB), "cuda": int(2.2 * GIB)}
"""On one H100 a process with nothing allocated takes 0.5 GiB; cuBLAS's workspaces and blocks that the
allocator cannot join come on top."""
_NCCL_BYTES = int(1.2 * GIB)
"""Four H100s: 1.55 GiB beside torch's allocator, context included, and 1.8 GiB of free blocks at a peak."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """The memory that a run needs."""

    shape: ModelShape
    dtype: torch.dtype
    device: torch.device
    parts: tuple[MemoryPart, ...]
    tokens_per_micro_batch: int
    """Token slots of the fullest micro-batch."""
    micro_batches: int
    """In one optimizer step, when every document has its greatest length."""
    documents_per_step: int
    """Per optimizer step."""
    longest_document: int
    """Tokens."""
    ranks: int
    """Ranks in all; the parts are those of one rank."""

    @property
    def by_place(self) -> Mapping[str, tuple[MemoryPart, ...]]:
        """The parts on each GPU: the rank's (""), then those dedicated to remote roles and engines."""
        places = dict.fromkeys(["", *(part.place for part in self.parts)])
        return {place: tuple(part for part in self.parts if part.place == place) for place in places}

    @property
    def fullest(self) -> str:
        """The place with the highest peak."""
        peaks = {place: peak_of(parts)[0] for place, parts in self.by_place.items()}
        return max(peaks, key=lambda place: peaks[place])

    @property
    def peak_bytes(self) -> int:
        """Bytes on the fullest GPU: what is always there plus the largest phase."""
        return peak_of(self.by_place[self.fullest])[0]

    @property
    def allocated_bytes(self) -> int:
        """Bytes at the peak of a rank's own GPU, without what is beside torch's allocator."""
        return max(self.allocated_by_phase.values())

    @property
    def allocated_by_phase(self) -> Mapping[str, int]:
        """Bytes on a rank's own GPU in each phase, without what is beside torch's allocator."""
        totals = phase_totals([part for part in self.by_place[""] if part.name != CUDA_RUNTIME])
        return {phase: totals["always"] + totals[phase] for phase in ("generate", "train", "update")}

    @property
    def peak_phase(self) -> str:
        """generate, train or update: of the fullest GPU."""
        return peak_of(self.by_place[self.fullest])[1]


def peak_of(parts: Sequence[MemoryPart]) -> tuple[int, str]:
    """Bytes of parts on one device, and the phase in which they need so many."""
    totals = phase_totals(parts)
    phase = max(("generate", "train", "update"), key=lambda phase: totals[phase])
    return totals["always"] + totals[phase], phase


def plan_memory(
    run: RunConfig,
    *,
    device: torch.device,
    ranks: int = 1,
    shape: ModelShape | None = None,
    value_shape: ModelShape | None = None,
) -> MemoryPlan:
    """Plan the memory of a run; allocates next to nothing.

    Args:
        run: what is still "auto" in it counts as on a CPU; see `lockstep.loop.resolve`.
        shape, value_shape: of its model, and of PPO's value model; None: found out by building it on the meta
            device.
        ranks: processes that train together.

    Raises:
        ModelError: the model's config is not on this machine (the hub is not asked), or is not supported.
    """
    run = on_ranks(run, ranks)
    run = run.model_copy(update={"train": outside_of_runs(run.train)})
    dtype = resolve_dtype(run.model.dtype, device)
    shape = planned_shape(run.model, dtype=dtype) if shape is None else shape
    documents, longest = run.documents_per_update, run.longest_document
    budget = token_slots(run.train.token_budget)
    per_pack = max(1, budget // longest)
    micro_batches = math.ceil(documents / per_pack)
    tokens = min(budget, min(per_pack, _share(run, documents, ranks=ranks)) * longest)
    if _is_static(run.train):
        whole = run.train.layout == "padded"
        tokens = budget if whole else next(size for size in pack_sizes(budget, longest) if size >= tokens)
    kind = "cuda" if device.type == "cuda" else "cpu"
    parts = [
        _runtime_part(kind, ranks=ranks),
        *_remote_parts(run, kind),
        *_train_parts(shape, run, step=(tokens, micro_batches), device=kind, ranks=ranks),
        *_OF_KIND[run.kind](shape, run, tokens=tokens, device=device, ranks=ranks, value_shape=value_shape),
        _copy_part(shape, run, run.train, size=(kind, ranks)),
    ]
    if kind == "cuda" and run.online:
        parts += _scoring_parts(shape, run, step=(tokens, micro_batches), ranks=ranks)
        parts = _placed(list(offloaded_parts(parts, run)), run)
    return MemoryPlan(
        shape=shape,
        dtype=dtype,
        device=device,
        parts=tuple(part for part in parts if part.bytes),
        tokens_per_micro_batch=tokens,
        micro_batches=micro_batches,
        documents_per_step=documents,
        longest_document=longest,
        ranks=ranks,
    )


def _share(run: RunConfig, documents: int, *, ranks: int) -> int:
    """Return the documents of a micro-batch if every rank has one: they are then of equal size, as there are
    never fewer micro-batches than ranks to compute them."""
    if run.online and cast(GRPORun, run).rollout.max_trajectory_tokens:
        return documents  # a trajectory may become several documents
    unit = 1 if run.online else cast(OfflineRun, run).unit
    dp = Parallelism(ranks=ranks, ring=run.train.ring, tp=run.train.tp).dp
    return unit * math.ceil(documents / unit / max(1, dp))


def _of_documents(shape: ModelShape, run: RunConfig, **size: Any) -> list[MemoryPart]:
    """Return nothing: runs on documents have no other models."""
    return []


def _of_rollouts(
    shape: ModelShape, run: GRPORun, *, device: torch.device, ranks: int, **_: Any
) -> list[MemoryPart]:
    """Return what the engine and reward models need."""
    parts = generate_parts(shape, run, device="cuda" if device.type == "cuda" else "cpu", ranks=ranks)
    return parts if run.reward_model is None else [*parts, *_reward_parts(run.reward_model, device)]


def _of_ppo(
    shape: ModelShape,
    run: PPORun,
    *,
    tokens: int,
    device: torch.device,
    ranks: int,
    value_shape: ModelShape | None,
) -> list[MemoryPart]:
    """Return what the value model needs, too."""
    if value_shape is None:
        config = run.value.model(run.model)
        value_shape = planned_shape(config, dtype=resolve_dtype(config.dtype, device), head="scalar")
    value = _value_parts(value_shape, run, tokens, device=device, ranks=ranks)
    return [*value, *_of_rollouts(shape, run, device=device, ranks=ranks)]


_OF_KIND: Mapping[str, Callable[..., list[MemoryPart]]] = {
    "grpo": _of_rollouts,
    "ppo": _of_ppo,
    "sft": _of_documents,
    "dpo": _of_documents,
    "rm": _of_documents,
}
"""The parts that each kind of run has besides the policy's."""


def _placed(parts: Sequence[MemoryPart], run: RunConfig) -> list[MemoryPart]:
    """Return the parts with their places: remote roles and engines share the GPU of the rank or have their
    own."""
    if run.cluster is None:
        return list(parts)
    layout = run.cluster.layout()
    places: dict[str, str] = {}
    """By role, or by the part's name."""
    if layout.remote_groups:
        for index, group in enumerate(run.remote_groups):
            name = remote_name(index)
            places |= dict.fromkeys([*group, f"{_RUNTIME} of {name}"], name)
    if layout.engine:
        places |= dict.fromkeys(_OF_ENGINE, "engines")

    def place(part: MemoryPart) -> str:
        role = "ref" if part.name.startswith(_REF) else part.role
        return places.get(part.name) or places.get(role, "")

    return [dataclasses.replace(part, place=place(part)) for part in parts]


def _scoring_parts(
    shape: ModelShape, run: RunConfig, *, step: tuple[int, int], ranks: int
) -> list[MemoryPart]:
    """Return the memory in which a reference scores a micro-batch on a GPU where nothing larger is computed.
    It keeps nothing for a backward, so it needs at most what checkpointing keeps.

    Args:
        step: as of `_train_parts`.
    """
    own = run.cluster is not None and run.cluster.dedicated_gpus
    if not own or not any("ref" in group and "value" not in group for group in run.remote_groups):
        return []
    train = run.train.model_copy(update={"activation_checkpointing": True})
    parts = _train_parts(
        shape, run.model_copy(update={"train": train}), step=step, device="cuda", ranks=ranks
    )
    names = ("activations, checkpointed", "logits of one chunk", "gathered weights")
    return [
        dataclasses.replace(part, name=f"{_REF}: {part.name}", role="ref")
        for part in parts
        if part.name in names
    ]


def _runtime_part(kind: str, *, ranks: int) -> MemoryPart:
    """Return the memory of a rank's process besides tensors."""
    name = CUDA_RUNTIME if kind == "cuda" else _RUNTIME
    size = _RUNTIME_BYTES[kind] + _NCCL_BYTES * (kind == "cuda" and ranks > 1)
    return MemoryPart(name=name, bytes=size, phase="always", setting="")


def _remote_parts(run: RunConfig, kind: str) -> list[MemoryPart]:
    """Return the memory of the remote roles' processes besides their models."""
    return [
        MemoryPart(
            name=f"{_RUNTIME} of {remote_name(index)}",
            bytes=_RUNTIME_BYTES[kind],
            phase="always",
            setting="cluster.colocate",
        )
        for index in range(len(run.remote_groups))
    ]


def _train_parts(
    shape: ModelShape, run: RunConfig, *, step: tuple[int, int], device: str, ranks: int
) -> list[MemoryPart]:
    """As the run's backend holds them.

    Args:
        step: token slots of the largest micro-batch, and micro-batches of one optimizer step over all ranks.
    """
    train = run.train
    size = StepSize(
        tokens=step[0],
        micro_batches=step[1],
        device=device,
        parallelism=Parallelism(ranks=ranks, ring=train.ring, tp=train.tp),
        ref=run.has_ref,
    )
    return memory_parts_of(train.backend)(shape, train, size)


def _value_parts(
    shape: ModelShape, run: PPORun, tokens: int, *, device: torch.device, ranks: int
) -> list[MemoryPart]:
    """Return the memory of the value model's backend.

    Args:
        tokens: token slots of the largest micro-batch.
    """
    train = run.value.train(run.train)
    samples = run.rollout.samples // train.minibatches
    size = StepSize(
        tokens=tokens,
        micro_batches=math.ceil(samples / max(1, tokens // run.longest_unit)),
        device="cuda" if device.type == "cuda" else "cpu",
        parallelism=Parallelism(ranks=ranks, ring=train.ring, tp=train.tp),
    )
    parts = memory_parts_of(train.backend)(shape, train, size)
    parts.append(_copy_part(shape, run, train, size=(size.device, ranks)))
    return [
        dataclasses.replace(part, name=VALUE_PREFIX + part.name, role="value", setting=_of_value(part))
        for part in parts
    ]


def _reward_parts(config: RewardRoleConfig, device: torch.device) -> list[MemoryPart]:
    """Weights of the models that score rollouts, whole on every rank; what a batch of theirs needs is less
    than a micro-batch of training."""
    size = resolve_dtype(config.dtype, device).itemsize
    revisions = dict.fromkeys(config.others) | {config.name: config.revision}
    return [
        MemoryPart(
            name="reward models: parameters" if config.others else "reward model: parameters",
            bytes=sum(size * reward_model_parameters(name, of) for name, of in revisions.items()),
            phase="always",
            setting="reward_model.dtype or reward_model.name",
            role="reward_model",
        )
    ]


def _of_value(part: MemoryPart) -> str:
    """The setting of the policy's part, in the table of the value model where that has it."""

    def own(match: re.Match[str]) -> str:
        return f"value.{match[2]}" if match[2] in ValueConfig.model_fields else match[0]

    setting = part.setting.replace("model.num_layers or ", "")
    return re.sub(r"\b(train|model)\.(\w+)", own, setting)


def _copy_part(shape: ModelShape, run: RunConfig, train: TrainConfig, *, size: tuple[str, int]) -> MemoryPart:
    """Return the copy of a model that a background save makes in host memory. (The last
    save is not in the background.)

    Args:
        size: device type, and number of ranks.
    """
    device, ranks = size
    copies = run.checkpoint.background and 0 < run.checkpoint.every < run.steps
    weights = (shape.trained if shape.lora else shape.parameters) * shape.dtype_bytes
    # A float32 Parameter is its own master copy.
    state = shape.trained * (state_bytes(train) + 4 * (shape.dtype_bytes < 4))
    return MemoryPart(
        name="copy for saves in the background",
        bytes=(weights + state) // ranks * copies,
        phase="always" if device == "cpu" else "host",
        setting="checkpoint.background = false",
    )


def memory_parts_of(backend: str) -> Callable[[ModelShape, TrainConfig, StepSize], list[MemoryPart]]:
    """The function that counts what a train backend holds.

    Raises:
        ConfigError: it is a class of the user's that has none.
    """
    what = f"train.backend = {backend!r}"
    found: Callable[[ModelShape, TrainConfig, StepSize], list[MemoryPart]] | None
    if backend in backends():
        found = load_object(backends()[backend].memory, what=what)
    else:
        found = getattr(load_object(backend, what=what), "memory_parts", None)
    if found is None:
        raise ConfigError(
            f"wrong-part: {what} has no attribute memory_parts, which lists what training keeps in memory; "
            "add one (docs/how-to/extend.md)",
            name="memory_parts",
        )
    return found


def generate_parts(shape: ModelShape, run: GRPORun, *, device: str, ranks: int = 1) -> list[MemoryPart]:
    """Return the parts of memory that sampling a rank's share of a rollout batch holds beside the weights."""
    gpus = 0 if run.cluster is None or device == "cpu" else run.cluster.engine_gpus
    served = run.engine.process == "separate" or gpus > 0  # such an engine keeps its weights asleep
    apart = shards_weights(run.train) or served
    # What auto means where the run starts.
    name = run.engine.name if run.engine.name != "auto" else "native" if device == "cuda" else "hf"
    # The ranks of a tensor parallel group share one native engine.
    shared = run.train.tp if name == "native" and not served else 1
    split = run.engine.tp if gpus else shared
    # Whole groups: a prompt's samples are of one engine.
    samples = math.ceil(run.rollout.prompts_per_step * shared / ranks) * run.rollout.group_size
    batch = min(run.engine.max_batch, samples)
    length = run.longest_unit
    kept = samples if run.rollout.max_trajectory_tokens else batch  # of trajectories that wait, too
    keeps = name in engines() and engines()[name].keeps_cache
    sizes = f"data.max_prompt_tokens or {run.rollout.length_setting}"
    return [
        MemoryPart(
            name=f"{_RUNTIME} of the engine",
            bytes=_RUNTIME_BYTES[device] * (gpus > 0),
            phase="always",
            setting="",
        ),
        MemoryPart(
            name="weights of the engine, whole",
            bytes=shape.parameters * shape.dtype_bytes * apart // split,
            phase="generate" if apart and not served and run.engine.offloads else "always",
            setting=either(
                not (served or run.engine.offloads) and "engine.offload = true", "train.tp", "model.name"
            ),
        ),
        MemoryPart(
            name="KV cache",
            bytes=shape.kv_bytes_per_token * (run.engine.kv_cache_limit or kept * length) // split,
            phase="always" if keeps and not run.engine.offloads else "generate",
            setting=either(keeps and "engine.offload = true", f"engine.max_batch, {sizes}"),
        ),
        MemoryPart(
            name="logits of one decoding step",
            # Logits, their scaled copy and the weights of the
            # draw (engine/sampling.py), at most float32 each.
            bytes=3 * 4 * batch * shape.vocab,
            phase="generate",
            setting="engine.max_batch",
        ),
    ]


def _is_static(train: TrainConfig) -> bool:
    return (
        outside_of_runs(train).execution != "eager"
        if train.static_capacity is None
        else train.static_capacity
    )


# Which role's memory is on the device in which part of a step: one table for the run and for its plan.
#
#     policy          optimizer's states    in its update
#     ref             weights               while it scores
#     value           weights               while it scores and is trained
#                     optimizer's states    in its update
#     reward_model    weights               while it scores, beside generation
#
# Roles that are not offloaded hold their memory all the time. Offloaded parts come back for the calls that
# use them: see lockstep.models.offload.


ON_DEVICE: Mapping[tuple[Role, OffloadPart], tuple[Phase, ...]] = {
    ("policy", "states"): ("update",),
    ("ref", "ref"): ("train",),
    ("value", "weights"): ("train", "update"),
    ("value", "states"): ("update",),
    ("reward_model", "weights"): ("generate",),
}
"""Part that can be offloaded -> the phases of the memory plan in which it is on the device."""
VALUE_PREFIX = "value model: "
"""Prefix of the names of the value model's parts in a plan."""
_PARTS: Mapping[str, OffloadPart] = {
    "parameters": "weights",
    "parameters, this rank's": "weights",
    "reward model: parameters": "weights",
    "reward models: parameters": "weights",
    "float32 master weights": "states",
    "optimizer states": "states",
    "reference model": "ref",
    "reference model, this rank's": "ref",
}
"""Names of a memory plan. A part of another name counts as always there."""


def start_offloading(run: GRPORun, *roles: Role, backend: TrainBackend) -> None:
    """Start offloading those of `roles`, all of one backend, that the run's config names. Call it as soon as
    they are built, so that the next role to be loaded can use their memory."""
    parts = [part for role, part in ON_DEVICE if role in roles and role in run.offloaded]
    if parts:
        cast(OffloadableBackend, backend).offload(*parts)


def offloaded_parts(parts: Sequence[MemoryPart], run: RunConfig) -> Iterator[MemoryPart]:
    """Yield the parts of a plan for a GPU: an offloaded part counts in the phases that use it, and in host
    memory."""
    for part in parts:
        kind = _PARTS.get(part.name.removeprefix(VALUE_PREFIX))
        role = cast(Role, "ref" if kind == "ref" else part.role)
        phases = ON_DEVICE.get((role, kind)) if kind is not None and part.phase == "always" else None
        if phases is None:
            yield part
        elif role not in run.offloaded:
            yield dataclasses.replace(part, setting=f"{part.setting} or offload = ['{role}', ...]")
        else:
            for phase in phases:
                yield dataclasses.replace(part, role=role, phase=phase)
            yield dataclasses.replace(part, role=role, phase="host", name=f"{part.name}, offloaded")
