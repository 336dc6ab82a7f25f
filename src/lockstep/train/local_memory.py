"""How much memory the local backend needs, and what to change when it runs out."""

from __future__ import annotations

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
from lockstep.packing.packs import MAX_BUCKETS
from lockstep.train.memory import StepSize, as_parts, state_bytes


def memory_parts(shape: ModelShape, train: TrainConfig, step: StepSize) -> list[MemoryPart]:
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
    parts = memory_parts(module_shape(module), train, step)
    on_device = [part for part in parts if part.phase in ("always", "train")]
    listed = ", ".join(
        f"{p.name} {gib(p.bytes)}" for p in sorted(on_device, key=lambda p: -p.bytes) if p.bytes
    )
    return f"{explain_oom(on_device)}. Estimated: {listed}"
