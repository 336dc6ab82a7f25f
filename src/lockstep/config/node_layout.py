"""Which device of a node each process of a run computes on.

    2 ranks, 2 worlds with GPUs of their own, 2 GPUs for the engine of each rank:

    gpu 0, 1   ranks 0 and 1
    gpu 2, 3   the second world, beside rank 0 and beside rank 1
    gpu 4, 5   the third world
    gpu 6, 7   the engine of rank 0
    gpu 8, 9   the engine of rank 1

Numbers count what the node's ranks see: entries of CUDA_VISIBLE_DEVICES where that is set, GPUs where it is
not. Ranks come first, so that local rank r has GPU r, and so a process of a world, among those of its world.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLayout:
    """Devices of one node; without GPUs its places on CPUs.

    Example:
        >>> layout = NodeLayout(ranks=2, worlds=2, engine=2)
        >>> layout.total, layout.of_world(1), layout.of_engine(1)
        (10, (4, 5), (8, 9))
    """

    ranks: int
    """On this node."""
    worlds: int = 0
    """Worlds beside the policy's whose processes have devices of their own."""
    engine: int = 0
    """Devices of each rank's engine that nothing else is on."""

    @property
    def per_rank(self) -> int:
        """Devices that there must be for each rank."""
        return 1 + self.worlds + self.engine

    @property
    def total(self) -> int:
        """Devices that there must be on the node."""
        return self.ranks * self.per_rank

    def of_world(self, number: int) -> tuple[int, ...]:
        """The devices of a world, from 0, by local rank; the ranks' where it has none of its own."""
        first = (number + 1) * self.ranks if self.worlds else 0
        return tuple(range(first, first + self.ranks))

    def of_engine(self, local_rank: int) -> tuple[int, ...]:
        """The devices of the engine of one rank; none: it is on the rank's."""
        first = (1 + self.worlds) * self.ranks + local_rank * self.engine
        return tuple(range(first, first + self.engine))

    def sums(self, kind: str) -> str:
        """Say how the total comes about, for messages."""
        others = ((self.worlds, "of each world beside it"), (self.engine, "of its engine"))
        parts = ["1 of its own", *(f"{count} {what}" for count, what in others if count)]
        return f"{self.total} {kind}, {self.per_rank} for each of {self.ranks} ranks ({', '.join(parts)})"
