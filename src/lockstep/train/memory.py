"""What to say when a micro-batch does not fit into memory."""

from __future__ import annotations

import torch

from lockstep.config.train import TrainConfig
from lockstep.schema.batch import PackedBatch


def out_of_memory_types() -> tuple[type[Exception], ...]:
    """What torch raises: its own type on a GPU, a plain RuntimeError from the CPU's allocator."""
    return (torch.OutOfMemoryError, RuntimeError)


def out_of_memory_text(
    error: Exception, *, config: TrainConfig, batch: PackedBatch, static: bool
) -> str | None:
    """The micro-batch's size, the settings that decide it, and torch's own words; None: it is another
    error."""
    if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
        return None
    advice = [f"lower train.token_budget = {config.token_budget}"]
    if not config.activation_checkpointing:
        advice.append("set train.activation_checkpointing = true")
    if config.optimizer_device == "model" and batch.token_ids.device.type != "cpu":
        advice.append("set train.optimizer_device = 'cpu'")
    if config.layout == "padded":
        advice.append("set train.layout = 'packed'")
    padding = f", {batch.num_slots - batch.num_tokens} of them padding" if static else ""
    return (
        f"out of memory with {batch.num_slots} token slots{padding}, {len(batch.sample_ids)} documents, the "
        f"longest {batch.max_seqlen} slots; {', or '.join(advice)}. No weight was changed. torch: {error}"
    )
