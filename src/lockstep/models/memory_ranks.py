"""How much memory one rank needs when a model is trained by several: fsdp2 and deepspeed.

Counted as train/fsdp2/backend.py and train/deepspeed/backend.py hold things; P is the number of Parameters,
W = dp * ring the ranks that shard them (all ranks under deepspeed), t = tp, b the bytes of the compute dtype:

                          fsdp2                                  deepspeed 0      1        2        3
    weights               4 P / (t W), float32: the masters      b P              b P      b P      b P / W
    gathered weights      b of embedding, head and two layers    -                -        -        two layers
                          (execution joint: of all)
    float32 masters       (they are the weights)                 4 P              4 P / W  4 P / W  4 P / W
    optimizer states      8 P / (t W) (AdamW)                    8 P              8 P / W  8 P / W  8 P / W
    gradients             4 P / (t W)                            b P              b P      4 P / W  4 P / W

Between the micro-batches of a step a rank of fsdp2 keeps whole gradients in float32, 4 P / t: they are added
up over the ranks once a step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass

from lockstep.config.train import TrainConfig
from lockstep.models.memory_shape import MemoryPart, ModelShape, Phase, either, forward_sizes, joint_gradients

_DEEPSPEED_BUCKET = 2**28
"""Elements of reduce_bucket_size, at most (train/deepspeed/setup.py)."""
_MORE_RANKS = "more ranks (--ranks)"


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


def rank_parts(
    shape: ModelShape,
    train: TrainConfig,
    *,
    parallelism: Parallelism,
    step: tuple[int, int],
    device: str,
    ref: bool = False,
) -> list[MemoryPart]:
    """Return every part of memory that training holds on one rank of fsdp2 or deepspeed.

    Args:
        step: token slots of the largest micro-batch, and micro-batches of one optimizer step over all ranks.
        device: "cpu" or "cuda".
        ref: a frozen reference model is kept.
    """
    tokens, micro_batches = step
    local = _part_of(shape, parallelism.tp)
    turns = math.ceil(micro_batches / parallelism.dp)
    parts = _fsdp2_parts if train.backend == "fsdp2" else _deepspeed_parts
    sizes = [
        *parts(local, train, parallelism=parallelism, turns=turns, ref=ref),
        joint_gradients(local, train),
        *(
            (name, size, "train", setting)
            for name, size, _, setting in forward_sizes(
                local, train, tokens=math.ceil(tokens / parallelism.ring), device=device
            )
        ),
    ]
    if device == "cpu":  # there is no other place
        sizes = [
            (name, size, "always" if phase == "host" else phase, text) for name, size, phase, text in sizes
        ]
    return [
        MemoryPart(name=name, bytes=int(size), phase=phase, setting=setting)
        for name, size, phase, setting in sizes
    ]


Sizes = Iterable[tuple[str, float, Phase, str]]


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


def _fsdp2_parts(
    shape: ModelShape, train: TrainConfig, *, parallelism: Parallelism, turns: int, ref: bool
) -> list[tuple[str, float, Phase, str]]:
    shard, trained = shape.parameters / parallelism.shards, shape.trained / parallelism.shards
    off = train.optimizer_device == "cpu"
    weights: Phase = "host" if train.parameter_device == "cpu" else "always"
    optimizer: Phase = "host" if off or train.parameter_device == "cpu" else "always"
    stored = shape.dtype_bytes if off else 4
    to_host = either(
        _MORE_RANKS,
        weights == "always" and "train.parameter_device = 'cpu'",
        optimizer == "always" and "train.optimizer_device = 'cpu'",
    )
    joint = train.execution == "joint"
    kept = shape.layers * shape.layer_parameters if joint or not train.reshard_after_forward else 0
    gathered = shape.dtype_bytes * (shape.outer_parameters + max(kept, 2 * shape.layer_parameters))
    reduced = shape.trained if joint else shape.layer_parameters + shape.outer_parameters
    return [
        ("parameters, this rank's", stored * shard, weights, to_host),
        ("float32 master weights", 4 * trained * off, optimizer, _MORE_RANKS),
        ("optimizer states", _states(train) * trained, optimizer, to_host),
        ("reference model, this rank's", shape.dtype_bytes * shard * ref, weights, "algorithm.kl.coef = 0"),
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
            4 * shape.trained * (turns > 1),
            "train",
            "train.token_budget (one micro-batch a rank needs none), train.tp or more ranks (--ranks)",
        ),
        (
            "gradients that are reduced at once",
            4 * reduced * (turns == 1),
            "train",
            "train.tp",
        ),
        ("gradients", 4 * trained, "train", _MORE_RANKS),
        ("gradients in the update", 4 * trained, "update", _MORE_RANKS),
    ]


def _deepspeed_parts(
    shape: ModelShape, train: TrainConfig, *, parallelism: Parallelism, turns: int, ref: bool
) -> list[tuple[str, float, Phase, str]]:
    stage, ranks = train.zero_stage, parallelism.shards
    b, masters = shape.dtype_bytes, 4 if shape.dtype_bytes < 4 or train.zero_stage > 0 else 0
    split = [stage >= level for level in (1, 2, 3)]
    states_of, gradients_of = (shape.trained / (ranks if yes else 1) for yes in split[:2])
    weights: Phase = "host" if train.parameter_device == "cpu" else "always"
    optimizer: Phase = "host" if train.optimizer_device == "cpu" else "always"
    further = either(
        stage < (2 if train.execution == "joint" else 3) and f"train.zero_stage = {stage + 1}",
        stage > 0 and _MORE_RANKS,
        stage > 0 and optimizer == "always" and "train.optimizer_device = 'cpu'",
    )
    whole = shape.parameters / (ranks if split[2] else 1)
    return [
        ("parameters, this rank's" if split[2] else "parameters", b * whole, weights, further),
        ("float32 master weights", masters * states_of, optimizer, further),
        ("optimizer states", _states(train) * states_of, optimizer, further),
        ("reference model", b * whole * ref, weights, "algorithm.kl.coef = 0"),
        (
            "gathered weights",
            b * (shape.outer_parameters + 2 * shape.layer_parameters) * split[2],
            "train",
            "model.name",
        ),
        ("gradients", (4 if split[1] else b) * gradients_of, "train", further),
        ("buckets of gradients", 2 * b * min(_DEEPSPEED_BUCKET, shape.trained), "train", "model.name"),
        ("gradients in the update", 4 * states_of, "update", further),
    ]


def _states(train: TrainConfig) -> int:
    """Bytes per Parameter."""
    return {"adamw": 8, "adamw8bit": 2, "sgd": 0}[train.optimizer]
