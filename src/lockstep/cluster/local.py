"""The provider of one machine: ranks are children of the driver, as under --ranks N."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import psutil

from lockstep.errors import ConfigError
from lockstep.processes.child import Child, end
from lockstep.protocols.cluster import Answers, Node, Placement, RankEnded, World

T = TypeVar("T")
_GRACE_SECONDS = 8.0
_POLL_SECONDS = 0.05


class LocalProvider:
    """Starts worlds on this machine, with the driver's own environment.

    Args:
        log_dir: the ranks write there.
    """

    address = "127.0.0.1"

    def __init__(self, *, log_dir: Path) -> None:
        self.log_dir = log_dir

    def nodes(self) -> list[Node]:
        """This machine; its GPUs are not counted, as no torch is loaded here."""
        return [Node(name="this machine", address=self.address, cpus=psutil.cpu_count() or 1, gpus=0)]

    def start(self, placement: Placement, env: Sequence[Mapping[str, str]], argv: Sequence[str]) -> World:
        """Start `python ARGV` once per slot."""
        if placement.nodes > 1:
            raise ConfigError(
                f"out-of-range: cluster.nodes = {placement.nodes}, but this is one machine; set it to 1"
            )
        world = World(placement=placement, log_dir=self.log_dir, members=(children := []))
        for own, (out, err) in zip(env, _pairs(self.logs(world)), strict=True):
            with out.open("wb") as stdout, err.open("wb") as stderr:
                command, environment = [sys.executable, "-u", *argv], {**os.environ, **own}
                output = (stdout, stderr)
                children.append(Child(command, output=output, env=environment, grace=_GRACE_SECONDS))
        return world

    def watch(self, world: World) -> Iterator[RankEnded]:
        """Yield every rank that has ended; does not wait."""
        for rank, child in enumerate(world.members):
            if (status := child.poll()) is not None:
                yield RankEnded(rank=rank, status=status)

    def wait(self, world: World, seconds: float) -> None:
        """Wait a moment."""
        time.sleep(min(seconds, _POLL_SECONDS))

    def ask(self, world: World, question: Callable[[int], T]) -> Answers[T]:
        """Ask here."""
        return Answers(given=[question(rank) for rank in range(world.placement.ranks)])

    def stop(self, world: World, number: signal.Signals | None = None) -> None:
        """Pass a signal on, or end all."""
        if number is None:
            end(world.members)
        else:
            for child in world.members:
                child.send_signal(number)

    def logs(self, world: World) -> list[Path]:
        """rank-N.log and rank-N.err.log of every rank."""
        names = [f"rank-{rank}{end}" for rank in range(world.placement.ranks) for end in (".log", ".err.log")]
        return [world.log_dir / name for name in names]


def _pairs(paths: Sequence[Path]) -> Iterator[tuple[Path, Path]]:
    return zip(paths[::2], paths[1::2], strict=True)
