"""The memory plans of train backends: what they share, and the parts of each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn

from lockstep.config.train import TrainConfig
from lockstep.models.memory import (
    BUCKET_ELEMENTS,
    MemoryPart,
    ModelShape,
    Phase,
    either,
    explain_oom,
    forward_sizes,
    gib,
    joint_gradients,
    module_shape,
)
from lockstep.packing.groups import MAX_BUCKETS

# What the memory plans of train backends share.
#
# A backend's `memory_parts(shape, train, step)` returns every part of memory that training holds on one
# rank; the file beside the backend names it (`memory` in its support.toml), and `lockstep.loop.memory_plan`
# adds the rest of a run.


MORE_RANKS = "more ranks (--ranks)"
Sizes = Iterable[tuple[str, float, Phase, str]]
"""(name, bytes, phase, the setting that makes it smaller)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallelism:
    """The number of ranks along each axis of the mesh."""

    ranks: int
    ring: int = 1
    tp: int = 1

    @property
    def dp(self) -> int:
        """Ranks with micro-batches of their own."""
        return self.ranks // (self.ring * self.tp)

    @property
    def shards(self) -> int:
        """Ranks that shard each Parameter, or each part of one under tensor parallelism."""
        return self.dp * self.ring


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSize:
    """One optimizer step, as far as memory depends on it."""

    tokens: int
    """Token slots of the largest micro-batch."""
    micro_batches: int
    """Over all ranks."""
    device: str
    """"cpu" or "cuda"."""
    parallelism: Parallelism = Parallelism(ranks=1)
    ref: bool = False
    """A frozen reference model is kept."""

    @property
    def turns(self) -> int:
        """Micro-batches of the rank that has most."""
        return math.ceil(self.micro_batches / self.parallelism.dp)


def rank_parts(
    own: Callable[[ModelShape, TrainConfig, StepSize], Sizes],
    shape: ModelShape,
    train: TrainConfig,
    step: StepSize,
) -> list[MemoryPart]:
    """Return every part of memory that training holds on one of several ranks.

    Args:
        own: returns what the backend itself holds, of the rank's share of the model under tensor parallelism.
    """
    local = _part_of(shape, step.parallelism.tp)
    tokens = math.ceil(step.tokens / step.parallelism.ring)
    sizes = [
        *own(local, train, step),
        joint_gradients(local, train),
        *(
            (name, size, "train", setting)
            for name, size, _, setting in forward_sizes(local, train, tokens=tokens, device=step.device)
        ),
    ]
    if step.device == "cpu":  # there is no other place
        sizes = [
            (name, size, "always" if phase == "host" else phase, text) for name, size, phase, text in sizes
        ]
    return as_parts(sizes)


def as_parts(sizes: Sizes) -> list[MemoryPart]:
    """The sizes as records."""
    return [
        MemoryPart(name=name, bytes=int(size), phase=phase, setting=setting)
        for name, size, phase, setting in sizes
    ]


def state_bytes(train: TrainConfig) -> int:
    """Bytes of optimizer states per Parameter."""
    # Two moments, of four bytes or of one.
    return {"adamw": 8, "adamw8bit": 2, "sgd": 0}[train.optimizer]


def _part_of(shape: ModelShape, tp: int) -> ModelShape:
    """One rank's share of a model under tensor parallelism; norms, which are small, are counted as split."""
    if tp == 1:
        return shape
    return dataclasses.replace(
        shape,
        intermediate=math.ceil(shape.intermediate / tp),
        heads=shape.heads // tp,
        kv_heads=shape.kv_heads // tp,
        vocab=math.ceil(shape.vocab / tp),
        parameters=math.ceil(shape.parameters / tp),
        trained=math.ceil(shape.trained / tp),
    )


# How much memory the local backend needs, and what to change when it runs out.


def local_parts(shape: ModelShape, train: TrainConfig, step: StepSize) -> list[MemoryPart]:
    """Return every part of memory that training holds; a reference model is free with LoRA."""
    b, trained = shape.dtype_bytes, shape.trained
    summed = b < 4 and train.grad_accum_dtype == "float32" and step.micro_batches > 1
    offloaded = train.optimizer_device == "cpu" and step.device != "cpu"
    place: Phase = "host" if offloaded else "always"
    smaller = either("model.name", "model.num_layers", b == 4 and "model.dtype = 'bfloat16'")
    lora = not shape.lora and "model.lora"
    optimizer = either(
        lora,
        train.optimizer == "adamw" and "train.optimizer = 'adamw8bit'",
        step.device != "cpu" and not offloaded and "train.optimizer_device = 'cpu'",
        "model.name",
    )
    sizes: list[tuple[str, float, Phase, str]] = [
        ("parameters", shape.parameters * b, "always", smaller),
        (
            "reference model",
            shape.parameters * b * (step.ref and not shape.lora),
            "always",
            "algorithm.kl.coef = 0",
        ),
        ("float32 master weights", 4 * trained * (b < 4 or offloaded), place, optimizer),
        ("optimizer states", state_bytes(train) * trained, place, optimizer),
        # On a CPU the float32 sums are kept from step to step.
        (
            "gradients, summed in float32" if summed else "gradients",
            trained * (4 if summed else b),
            "always" if summed and step.device == "cpu" else "train",
            either(lora, summed and "train.grad_accum_dtype = 'model'", "model.name"),
        ),
        (
            "gradients of CUDA graphs, a set for each capacity",
            MAX_BUCKETS * trained * b * train.cuda_graph,
            "always",
            "train.cuda_graph = false",
        ),
        joint_gradients(shape, train),
        *forward_sizes(shape, train, tokens=step.tokens, device=step.device),
        ("optimizer step's buffer", 4 * min(trained, BUCKET_ELEMENTS[step.device]), "update", optimizer),
    ]
    if not (summed and step.device == "cpu"):
        sizes.append(("gradients in the update", sizes[4][1], "update", sizes[4][3]))
    return as_parts(sizes)


def advice(
    module: nn.Module, train: TrainConfig, *, tokens: int, micro_batches: int, ref: bool = False
) -> str:
    """Return a message for training of a loaded model that ran out of memory: what to change, and the
    estimate.

    Args:
        tokens: slots of the micro-batch that did not fit.
    """
    device = "cuda" if next(module.parameters()).device.type == "cuda" else "cpu"
    step = StepSize(tokens=tokens, micro_batches=micro_batches, device=device, ref=ref)
    parts = local_parts(module_shape(module), train, step)
    on_device = [part for part in parts if part.phase in ("always", "train")]
    listed = ", ".join(
        f"{p.name} {gib(p.bytes)}" for p in sorted(on_device, key=lambda p: -p.bytes) if p.bytes
    )
    return f"{explain_oom(on_device)}. Estimated: {listed}"


# How much memory one rank of fsdp2 needs.
#
# Counted as train/fsdp2/backend.py holds things; P is the number of Parameters, W = dp * ring the ranks that
# shard them, t = tp, b the bytes of the compute dtype:
#
#     weights             4 P / (t W), float32: the masters
#     gathered weights    b of embedding, head and two layers (execution joint: of all)
#     optimizer states    8 P / (t W) (AdamW)
#     gradients           4 P / (t W)
#
# With LoRA optimizer states and gradients are of the adapters alone, A of the P, and frozen weights are kept
# in the compute dtype: (4 A + b (P - A)) / (t W). The reference is the base, which is there already.
#
# With train.ep layers are gathered with this rank's experts alone, and whole gradients are of these alone.
# Rows of experts are held twice while they are exchanged, as many as if all experts had equally many.
#
# Between the micro-batches of a step a rank keeps whole gradients in float32, 4 P / t: they are added up
# over the ranks once a step. With reduce_gradients "per_micro_batch" it keeps its shards of them alone, and a
# backward holds the whole gradients of what is being reduced.


def fsdp2_parts(shape: ModelShape, train: TrainConfig, step: StepSize) -> list[MemoryPart]:
    """Return every part of memory that training holds on one rank."""
    return rank_parts(_fsdp2_rank, shape, train, step)


def _fsdp2_rank(shape: ModelShape, train: TrainConfig, step: StepSize) -> Sizes:
    shard, trained = shape.parameters / step.parallelism.shards, shape.trained / step.parallelism.shards
    off = train.optimizer_device == "cpu"
    weights: Phase = "host" if train.parameter_device == "cpu" else "always"
    optimizer: Phase = "host" if off or train.parameter_device == "cpu" else "always"
    stored = shape.dtype_bytes * (shard - trained) + (shape.dtype_bytes if off else 4) * trained
    to_host = either(
        MORE_RANKS,
        weights == "always" and "train.parameter_device = 'cpu'",
        optimizer == "always" and "train.optimizer_device = 'cpu'",
    )
    joint = train.execution == "joint"
    elsewhere = shape.experts * (train.ep - 1) / train.ep  # of one layer
    layer = shape.layer_parameters - elsewhere
    kept = shape.layers * layer if joint or not train.reshard_after_forward else 0
    gathered = shape.dtype_bytes * (shape.outer_parameters + max(kept, 2 * layer))
    whole = shape.trained - (0 if shape.lora else shape.layers * elsewhere)
    adds_whole = step.turns > 1 and train.reduce_gradients != "per_micro_batch"
    return [
        ("parameters, this rank's", stored, weights, to_host),
        ("float32 master weights", 4 * trained * off, optimizer, MORE_RANKS),
        ("optimizer states", state_bytes(train) * trained, optimizer, to_host),
        (
            "reference model, this rank's",
            shape.dtype_bytes * shard * (step.ref and not shape.lora),
            weights,
            "algorithm.kl.coef = 0",
        ),
        (
            "gathered weights",
            gathered,
            "train",
            either(
                "train.tp",
                joint and "train.execution = 'compile'",
                not train.reshard_after_forward and "train.reshard_after_forward = true",
            ),
        ),
        (
            "gradients between micro-batches, whole, in float32",
            4 * whole * adds_whole,
            "train",
            "train.reduce_gradients = 'per_micro_batch', train.token_budget (one micro-batch a rank needs "
            "none), train.tp or more ranks (--ranks)",
        ),
        (
            "gradients that are reduced at once",
            _reduced_at_once(shape, train, step) * (not adds_whole),
            "train",
            "train.tp",
        ),
        (
            "rows of experts that are exchanged",
            2 * shape.dtype_bytes * shape.slots * shape.hidden * step.tokens * (train.ep > 1),
            "train",
            "train.token_budget",
        ),
        # Where whole ones are added up, they are freed as these are made.
        ("gradients", 4 * trained * (not adds_whole), "train", MORE_RANKS),
        ("gradients in the update", 4 * trained, "update", MORE_RANKS),
    ]


def _reduced_at_once(shape: ModelShape, train: TrainConfig, step: StepSize) -> float:
    """Bytes beside activations and reduced gradients: a layer's gradients in float32 at the start of a
    backward; or, if that is more, those of embedding and head at its end, when the activations are gone, in
    both dtypes. A joint graph returns all."""
    if train.execution == "joint":
        return 4 * shape.trained
    if shape.lora:  # as good as all of them are in the layers
        return 4 * shape.trained // shape.layers
    tokens = math.ceil(step.tokens / step.parallelism.ring)
    freed = sum(size for _, size, *_ in forward_sizes(shape, train, tokens=tokens, device=step.device))
    layer = shape.layer_parameters - shape.experts * (train.ep - 1) / train.ep
    return max(4 * layer, (4 + shape.dtype_bytes) * shape.outer_parameters - freed)


# How much memory one rank of deepspeed needs.
#
# Counted as train/deepspeed/backend.py holds things; P is the number of Parameters, W the ranks, b the bytes
# of the compute dtype:
#
#     ZeRO                0        1        2        3
#     weights             b P      b P      b P      b P / W
#     gathered weights    -        -        -        two layers
#     float32 masters     4 P      4 P / W  4 P / W  4 P / W
#     optimizer states    8 P      8 P / W  8 P / W  8 P / W (AdamW)
#     gradients           b P      b P      4 P / W  4 P / W


_BUCKET = 2**28
"""Elements of reduce_bucket_size, at most (train/deepspeed/setup.py)."""


def deepspeed_parts(shape: ModelShape, train: TrainConfig, step: StepSize) -> list[MemoryPart]:
    """Return every part of memory that training holds on one rank."""
    return rank_parts(_deepspeed_rank, shape, train, step)


def _deepspeed_rank(shape: ModelShape, train: TrainConfig, step: StepSize) -> Sizes:
    stage, ranks = train.zero_stage, step.parallelism.shards
    b, masters = shape.dtype_bytes, 4 if shape.dtype_bytes < 4 or train.zero_stage > 0 else 0
    split = [stage >= level for level in (1, 2, 3)]
    states_of, gradients_of = (shape.trained / (ranks if yes else 1) for yes in split[:2])
    weights: Phase = "host" if train.parameter_device == "cpu" else "always"
    optimizer: Phase = "host" if train.optimizer_device == "cpu" else "always"
    further = either(
        stage < (2 if train.execution == "joint" else 3) and f"train.zero_stage = {stage + 1}",
        stage > 0 and MORE_RANKS,
        stage > 0 and optimizer == "always" and "train.optimizer_device = 'cpu'",
    )
    whole = shape.parameters / (ranks if split[2] else 1)
    return [
        ("parameters, this rank's" if split[2] else "parameters", b * whole, weights, further),
        ("float32 master weights", masters * states_of, optimizer, further),
        ("optimizer states", state_bytes(train) * states_of, optimizer, further),
        ("reference model", b * whole * step.ref, weights, "algorithm.kl.coef = 0"),
        (
            "gathered weights",
            b * (shape.outer_parameters + 2 * shape.layer_parameters) * split[2],
            "train",
            "model.name",
        ),
        ("gradients", (4 if split[1] else b) * gradients_of, "train", further),
        ("buckets of gradients", 2 * b * min(_BUCKET, shape.trained), "train", "model.name"),
        ("gradients in the update", 4 * states_of, "update", further),
    ]
