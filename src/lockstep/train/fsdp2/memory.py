"""How much memory one rank of fsdp2 needs.

Counted as train/fsdp2/backend.py holds things; P is the number of Parameters, W = dp * ring the ranks that
shard them, t = tp, b the bytes of the compute dtype:

    weights             4 P / (t W), float32: the masters
    gathered weights    b of embedding, head and two layers (execution joint: of all)
    optimizer states    8 P / (t W) (AdamW)
    gradients           4 P / (t W)

With LoRA optimizer states and gradients are of the adapters alone, A of the P, and frozen weights are kept in
the compute dtype: (4 A + b (P - A)) / (t W). The reference is the base, which is there already.

Between the micro-batches of a step a rank keeps whole gradients in float32, 4 P / t: they are added up over
the ranks once a step.
"""

from __future__ import annotations

from lockstep.config.train import TrainConfig
from lockstep.models.memory import MemoryPart, ModelShape, Phase, either
from lockstep.train.memory import MORE_RANKS, Sizes, StepSize, rank_parts, state_bytes


def memory_parts(shape: ModelShape, train: TrainConfig, step: StepSize) -> list[MemoryPart]:
    """Return every part of memory that training holds on one rank."""
    return rank_parts(_own_parts, shape, train, step)


def _own_parts(shape: ModelShape, train: TrainConfig, step: StepSize) -> Sizes:
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
    kept = shape.layers * shape.layer_parameters if joint or not train.reshard_after_forward else 0
    gathered = shape.dtype_bytes * (shape.outer_parameters + max(kept, 2 * shape.layer_parameters))
    reduced = shape.trained if joint else _reduced_at_once(shape)
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
            4 * shape.trained * (step.turns > 1),
            "train",
            "train.token_budget (one micro-batch a rank needs none), train.tp or more ranks (--ranks)",
        ),
        (
            "gradients that are reduced at once",
            4 * reduced * (step.turns == 1),
            "train",
            "train.tp",
        ),
        ("gradients", 4 * trained, "train", MORE_RANKS),
        ("gradients in the update", 4 * trained, "update", MORE_RANKS),
    ]


def _reduced_at_once(shape: ModelShape) -> int:
    """Trained Parameters of a layer and of embedding and head together."""
    if shape.lora:  # as good as all of them are in the layers
        return shape.trained // shape.layers
    return shape.layer_parameters + shape.outer_parameters
