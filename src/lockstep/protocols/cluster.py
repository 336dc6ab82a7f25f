"""The protocol of cluster providers: list nodes, start ranks on them, watch and stop the ranks.

Every rank runs the loop (docs/explanation/architecture.md), so a provider does not know about training: it
starts one process per slot with a given command and environment, and reports how each ended.
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
    """CPUs that the provider may use."""
    gpus: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """A place for one rank."""

    rank: int
    node: int
    """Index of the node in the placement, from 0."""
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
    """Whether each rank gets a GPU; otherwise it gets a CPU."""
    per_rank: int = 1
    """GPUs (or CPUs) per rank: its own and those of the processes beside it. Local rank r uses device r of
    the node (lockstep.config.cluster)."""

    @property
    def devices(self) -> int:
        """GPUs (or CPUs) of each node."""
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
    """The end of one rank."""

    rank: int
    status: int
    """Exit status; negative: the number of the signal that ended it."""
    why: str = ""
    """What the provider knows beyond the status, such as a lost node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """A set of ranks that were started together."""

    placement: Placement
    log_dir: Path
    """Folder of rank-N.log and rank-N.err.log, on the driver's machine."""
    members: Sequence[Any]
    """The provider's own handles, by rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers(Generic[T]):
    """The replies of the ranks' nodes to a question."""

    given: Sequence[T]
    """Replies by rank, without the missing ones."""
    missing: Mapping[int, str] = field(default_factory=dict)
    """Rank -> why its node did not reply."""


class Provider(Protocol):
    """Starts ranks on nodes. The calling process, the driver, stays until they end."""

    log_dir: Path
    """Folder for the logs of the next ranks, on the driver's machine."""

    @property
    def address(self) -> str:
        """The address under which the nodes reach the driver, where the ranks' store listens."""
        ...

    def nodes(self) -> list[Node]: ...

    def start(self, placement: Placement, env: Sequence[Mapping[str, str]], argv: Sequence[str]) -> World:
        """Start `argv` once per slot. Earlier ranks have been stopped.

        Args:
            env: variables of each rank, on top of the environment of its node. COPY_PLACE of
                lockstep.ranks.environment asks for a folder of copies on each node that outlives the ranks.

        Raises:
            ConfigError: the placement does not fit, or the nodes have other versions installed.
        """
        ...

    def watch(self, world: World) -> Iterator[RankEnded]:
        """Yield every rank that has ended so far, without waiting. Ranks of earlier calls are yielded again,
        so that a signal in the caller cannot lose one."""
        ...

    def wait(self, world: World, seconds: float) -> None:
        """Return when `watch` may have news, on a signal, or after `seconds`."""
        ...

    def ask(self, world: World, question: Callable[[int], T]) -> Answers[T]:
        """Call a picklable function with each rank number, on that rank's node, even while the rank is
        stopped or hangs."""
        ...

    def stop(self, world: World, number: signal.Signals | None = None) -> None:
        """With a signal, pass it on to every rank. Without one, end all ranks and everything they started,
        and wait until they are gone."""
        ...

    def logs(self, world: World) -> list[Path]:
        """Return the log files, by rank; they are complete up to the last `watch`."""
        ...
