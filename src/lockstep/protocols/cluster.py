"""What a cluster provider must be able to do: say what there is, start ranks there, watch and stop them.

Every rank runs the loop (docs/explanation/architecture.md), so a provider knows nothing of training: it
starts one process per slot with the command and the environment that it is given, and says how each ended.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A machine of the cluster."""

    name: str
    address: str
    cpus: int
    """CPUs that the provider counts for it."""
    gpus: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """A place for one rank."""

    rank: int
    node: int
    """Which of the placement's nodes, from 0."""
    local_rank: int
    """From 0 on each node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Nodes times ranks per node; ranks count through a node before the next one.

    Example:
        >>> [(slot.rank, slot.node, slot.local_rank) for slot in Placement(nodes=2, per_node=2).slots]
        [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
    """

    nodes: int
    per_node: int
    """Ranks on each node."""
    gpus: bool = False
    """Whether each rank has a GPU of its own; otherwise it has a CPU."""
    per_rank: int = 1
    """GPUs, or CPUs, that there are for each rank: its own, and those of what is beside it. Where the node's
    are told apart, local rank r has number r (lockstep.config.cluster)."""

    @property
    def devices(self) -> int:
        """GPUs, or CPUs, of each node."""
        return self.per_node * self.per_rank

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    @property
    def slots(self) -> list[Slot]:
        """By rank."""
        return [
            Slot(rank=rank, node=rank // self.per_node, local_rank=rank % self.per_node)
            for rank in range(self.ranks)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnded:
    """A rank of a world has ended."""

    rank: int
    status: int
    """Exit status; negative: the number of the signal that ended it."""
    why: str = ""
    """What the provider knows beyond the status, such as that the rank's node has gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """Ranks that were started together."""

    placement: Placement
    log_dir: Path
    """On the machine of the driver: rank-N.log and rank-N.err.log."""
    members: Sequence[Any]
    """By rank; the provider's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers(Generic[T]):
    """What the ranks' nodes said to a question."""

    given: Sequence[T]
    """By rank, without those that did not answer."""
    missing: Mapping[int, str] = field(default_factory=dict)
    """Rank -> why its node gave no answer."""


class Provider(Protocol):
    """Starts worlds. The process that calls it, the driver, stays until they end."""

    log_dir: Path
    """On the machine of the driver: where the ranks of the next world write."""

    @property
    def address(self) -> str:
        """The driver's address as the nodes reach it: the ranks' store listens there."""
        ...

    def nodes(self) -> list[Node]: ...

    def start(self, placement: Placement, env: Sequence[Mapping[str, str]], argv: Sequence[str]) -> World:
        """Start `argv` once per slot; the ranks of the world before, if there was one, have been stopped.

        Args:
            env: of each rank, beside what programs need of the environment of its node. COPY_PLACE of
                lockstep.ranks.environment asks for a folder of copies on each node that outlives the ranks.

        Raises:
            ConfigError: there is no such place, or what is installed there differs.
        """
        ...

    def watch(self, world: World) -> Iterator[RankEnded]:
        """Yield every rank that has ended so far; does not wait. Those of earlier calls come again: a signal
        may raise in the caller at any point, and no end is lost."""
        ...

    def wait(self, world: World, seconds: float) -> None:
        """Return as soon as `watch` may have news, after `seconds` at the latest, and for a signal."""
        ...

    def ask(self, world: World, question: Callable[[int], T]) -> Answers[T]:
        """Call a function that can be pickled with the number of each rank, on that rank's node, also while
        the rank is stopped or hangs."""
        ...

    def stop(self, world: World, number: signal.Signals | None = None) -> None:
        """With a signal: pass it on to every rank. Without: end all of them, with what they started, and
        wait for that."""
        ...

    def logs(self, world: World) -> list[Path]:
        """The files that everything the ranks wrote until the last `watch` stands in, rank by rank."""
        ...
