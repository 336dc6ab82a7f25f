"""The options of a replay."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.lab.replay.cell import Cell
from lockstep.lab.replay.losses import LossName
from lockstep.lab.replay.outputs import GRADIENT_ENTRIES


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayOptions:
    """The inputs to replay, the cell, and how to replay."""

    cell: Cell
    loss: LossName = "recorded"
    backward: bool = True
    """False: forward only, without gradients."""
    optimizer_step: bool = False
    """An optimizer step after every input: the weights move, so only the first one is comparable."""
    max_inputs: int | None = None
    inputs: tuple[int, ...] | None = None
    """Indices; None: all."""
    steps: tuple[int | None, int | None] | None = None
    """First step, and one past the last; None: open."""
    shuffle: bool = False
    seed: int = 0
    """Seed of the shuffled order."""
    capacity: int | None = None
    """Static capacity of compiled packs, tokens; None: the recorded token budget."""
    warmup: int = 0
    """How many of the first inputs are run once, unmeasured, before the replay."""
    timeout: float | None = None
    """Seconds that one input may take before the process is ended."""
    keep_outputs: bool = False
    gradient_inputs: int = 8
    """With keep_outputs: the number of inputs whose gradients are added up."""
    gradient_entries: int = GRADIENT_ENTRIES
    max_memory: int | None = None
    """Bytes that one input may take, by estimate; None: all memory of the device."""
    trust_remote_code: bool = False
    """Run Python code that comes with a hub model, whatever the recording says."""
    simulate: bool = False
    """Run several ranks in this one process."""
    local_rank: int | None = None
    """The local rank that a launcher set."""
    notes: tuple[str, ...] = ()
    """What each setting was resolved to, and why."""
