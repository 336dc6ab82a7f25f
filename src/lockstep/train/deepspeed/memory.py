"""How much memory one rank of deepspeed needs.

Counted as train/deepspeed/backend.py holds things; P is the number of Parameters, W the ranks, b the bytes of
the compute dtype:

    ZeRO                0        1        2        3
    weights             b P      b P      b P      b P / W
    gathered weights    -        -        -        two layers
    float32 masters     4 P      4 P / W  4 P / W  4 P / W
    optimizer states    8 P      8 P / W  8 P / W  8 P / W (AdamW)
    gradients           b P      b P      4 P / W  4 P / W
"""

from __future__ import annotations

from lockstep.config.train import TrainConfig
from lockstep.models.memory import MemoryPart, ModelShape, Phase, either
from lockstep.train.memory import MORE_RANKS, Sizes, StepSize, rank_parts, state_bytes

_BUCKET = 2**28
"""Elements of reduce_bucket_size, at most (train/deepspeed/setup.py)."""


def memory_parts(shape: ModelShape, train: TrainConfig, step: StepSize) -> list[MemoryPart]:
    """Return every part of memory that training holds on one rank."""
    return rank_parts(_own_parts, shape, train, step)


def _own_parts(shape: ModelShape, train: TrainConfig, step: StepSize) -> Sizes:
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
