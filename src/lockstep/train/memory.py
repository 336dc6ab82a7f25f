"""What the memory plans of train backends share.

A backend's `memory_parts(shape, train, step)` returns every part of memory that training holds on one rank;
the file beside the backend names it (`memory` in its support.toml), and `lockstep.loop.memory_plan` adds the
rest of a run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lockstep.config.train import TrainConfig
from lockstep.models.memory import MemoryPart, ModelShape, Phase, forward_sizes, joint_gradients

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
