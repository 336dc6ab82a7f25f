"""Processes that have imported what a rank needs, and wait to take the place of one that dies.

    with Reserve(copies) as reserve:
        children = reserve.take(environments)   # of the ranks for which one waits: none the first time
        ...                                     # start the others
        reserve.refill(spawn, environments)     # once these ranks have made a copy

Importing is the longest part of a restart (18 of 32 s on two H100s), and waits for nothing that a death
changes. A process of the reserve is a rank's command line in that rank's environment; before it looks at what
is particular to a generation it reads, from a named pipe, the environment of the one that it joins. It has
touched no GPU and opened no file of the run until then.
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
"""Start a process for a rank with this in its environment, beside what all ranks get."""

_LOOK_SECONDS = 0.5
"""How often the folder of copies is looked at, until this generation has made one."""


def await_turn() -> None:
    """In a process of the reserve: wait to be a rank, and take on its environment. In others: nothing.

    It has no deadline: the supervisor of this process ends it with the one who started it.
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


class Reserve:
    """The waiting processes of the ranks that this process starts. A context manager.

    Args:
        folder: where the ranks copy their state (lockstep.ranks.copy_folder); the pipes are there, too.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._waiting: dict[int, _Waiting] = {}
        self._begun: list[_Waiting] = []
        """A pipe forgets what was written when nobody has it open: we have, until the process has, too."""
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._fills = 0

    def __enter__(self) -> Reserve:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def take(self, environments: Sequence[Mapping[str, str]]) -> dict[int, Child]:
        """Let those that wait be ranks, in these environments; return them by rank. One that has ended
        meanwhile is left out, and that is said."""
        self._stop_filling()
        taken = {}
        for rank, waiting in self._waiting.items():
            if (status := waiting.child.poll()) is None:
                waiting.begin(environments[rank])
                taken[rank] = waiting.child
            else:
                how = describe_status(status)
                echo(f"lockstep: what waited to take the place of rank {rank} {how}", file=sys.stderr)
        self._begun, self._waiting = [*self._waiting.values()], {}
        return taken

    def refill(self, spawn: Spawn, environments: Sequence[Mapping[str, str]]) -> None:
        """Start a process for each rank, in a thread, once the ranks have made a copy: until then all cores
        are theirs, and there is nothing to heal from."""
        self._fills += 1
        self._closing.clear()
        self._thread = threading.Thread(
            target=self._fill, args=(spawn, environments, self._copies()), name="reserve", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End those that wait. Idempotent."""
        self._stop_filling()
        waiting, self._waiting = self._waiting, {}
        end(each.child for each in waiting.values())

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
                self._waiting[rank] = _Waiting(path, environment, functools.partial(spawn, rank))
            except (OSError, LockstepError) as error:  # as when memory is full: the ranks can do without
                why = f"nothing waits to take the place of rank {rank}: {error}"
                echo(f"lockstep: {why}; after a death it is started anew", file=sys.stderr)

    def _stop_filling(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None


class _Waiting:
    """A process that waits, and our end of the pipe that it reads."""

    def __init__(
        self, path: Path, environment: Mapping[str, str], spawn: Callable[[Mapping[str, str]], Child]
    ) -> None:
        self._environment = environment
        os.mkfifo(path, mode=0o600)
        # Open for reading, too: so it opens, and keeps what is written, before the process has come so far.
        self._pipe = open(path, "r+b", buffering=0)  # noqa: SIM115
        self.child = spawn({**environment, TURN: str(path)})

    def begin(self, environment: Mapping[str, str]) -> None:
        """Let it be a rank with this environment."""
        old, new = self._environment, environment
        changes = {name: new.get(name) for name in old.keys() | new.keys() if old.get(name) != new.get(name)}
        # A few hundred bytes, of the 64 KiB that a pipe takes without a reader.
        self._pipe.write(json.dumps(changes).encode() + b"\n")
