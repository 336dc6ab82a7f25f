"""Spare processes that have imported everything a rank needs and replace a rank that dies.

    with WarmSpares(copies) as spares:
        children = spares.promote(environments)   # ranks with a spare: none the first time
        ...                                       # start the other ranks
        spares.refill(spawn, environments)        # once these ranks have made a copy

Importing is the longest part of a restart (18 of 32 s on two H100s), and does not depend on the death. A
spare runs the command line of a rank in the environment of that rank. Before it looks at anything that
differs between restarts, it reads the environment of the restart that it joins from a named pipe. Until then
it has touched no GPU and opened no file of the run.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from lockstep.errors import LockstepError
from lockstep.observe.text import echo
from lockstep.processes.child import Child, describe_status, end
from lockstep.ranks.environment import TURN

Spawn = Callable[[int, Mapping[str, str]], Child]
"""Start a process for a rank with these variables in its environment, besides those of all ranks."""

_LOOK_SECONDS = 0.5
"""How often to look for the first copy of this restart."""


def await_promotion() -> None:
    """In a spare, wait to become a rank and adopt its environment. In other processes, do nothing.

    The wait has no deadline: the supervisor of this process ends it together with its parent.
    """
    path = os.environ.pop(TURN, None)
    if path is None:
        return
    with open(path, encoding="utf-8") as pipe:
        changes: Mapping[str, str | None] = json.loads(pipe.readline())
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


class WarmSpares:
    """The spares of the ranks that this process starts. A context manager.

    Args:
        folder: where the ranks copy their state (lockstep.ranks.in_memory_checkpoint); it also holds the
        pipes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._spares: dict[int, _Spare] = {}
        self._begun: list[_Spare] = []
        """Kept open until each process has opened its pipe: a pipe without readers forgets its content."""
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._fills = 0

    def __enter__(self) -> WarmSpares:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def promote(self, environments: Sequence[Mapping[str, str]]) -> dict[int, Child]:
        """Turn the spares into ranks with these environments; return them by rank. Spares that have died are
        skipped with a message."""
        self._stop_filling()
        taken = {}
        for rank, spare in self._spares.items():
            if (status := spare.child.poll()) is None:
                spare.begin(environments[rank])
                taken[rank] = spare.child
            else:
                how = describe_status(status)
                echo(f"lockstep: the spare of rank {rank} {how}", file=sys.stderr)
        self._begun, self._spares = [*self._spares.values()], {}
        return taken

    def refill(self, spawn: Spawn, environments: Sequence[Mapping[str, str]]) -> None:
        """Start a spare for each rank, in a thread, once the ranks have made a copy. Until then they get all
        cores, and there is nothing to restart from."""
        self._fills += 1
        self._closing.clear()
        self._thread = threading.Thread(
            target=self._fill, args=(spawn, environments, self._copies()), name="warm spares", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the spares. Idempotent."""
        self._stop_filling()
        spares, self._spares = self._spares, {}
        end(each.child for each in spares.values())

    def _copies(self) -> set[Path]:
        return set(self.folder.glob("step-*/complete-*.json"))

    def _fill(self, spawn: Spawn, environments: Sequence[Mapping[str, str]], before: set[Path]) -> None:
        while not self._copies() - before:
            if self._closing.wait(_LOOK_SECONDS):
                return
        for rank, environment in enumerate(environments):
            if self._closing.is_set():
                return
            path = self.folder / f"turn-{self._fills}-{rank}"
            try:
                self._spares[rank] = _Spare(path, environment, functools.partial(spawn, rank))
            except (OSError, LockstepError) as error:  # such as full memory: the ranks run without spares
                why = f"no spare for rank {rank}: {error}"
                echo(f"lockstep: {why}; after a death the rank is started from scratch", file=sys.stderr)

    def _stop_filling(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None


class _Spare:
    """A spare process, and our end of the pipe that it reads."""

    def __init__(
        self, path: Path, environment: Mapping[str, str], spawn: Callable[[Mapping[str, str]], Child]
    ) -> None:
        self._environment = environment
        os.mkfifo(path, mode=0o600)
        # Open for reading as well: opening does not block then, and what is written waits for the spare.
        self._pipe = open(path, "r+b", buffering=0)  # noqa: SIM115
        self.child = spawn({**environment, TURN: str(path)})

    def begin(self, environment: Mapping[str, str]) -> None:
        """Turn the spare into a rank with this environment."""
        old, new = self._environment, environment
        changes = {name: new.get(name) for name in old.keys() | new.keys() if old.get(name) != new.get(name)}
        # A few hundred bytes, and a pipe buffers 64 KiB without a reader.
        self._pipe.write(json.dumps(changes).encode() + b"\n")
