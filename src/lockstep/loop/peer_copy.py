"""Copies of a run's state in this machine's memory, one after each step, which outlive its ranks.

A copy is what a checkpoint of that step holds, written by the same code into a folder in memory
(lockstep.ranks.copy_folder), in a thread, while the next step goes on. Ranks agree on nothing when a copy is
done: each says by a file of its own that its part is complete, and a step counts when all have said so. At
most two are there: the last that counts, and the one that is being written.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import CheckpointError, ConfigError
from lockstep.loop.checkpoint import RUN_STATE, read_run_state, without_nan
from lockstep.observe.files import file_errors
from lockstep.protocols import Saved
from lockstep.protocols.train import FinishSave
from lockstep.ranks.context import RankContext
from lockstep.ranks.copy_folder import committed_steps, complete, step_folder
from lockstep.ranks.environment import COPIES
from lockstep.ranks.recovery import recovery
from lockstep.train.state.index import read_index

_WRITE_SECONDS = 600.0
"""For a copy to be written, where it is waited for."""
_BUSY = "busy"


class PeerCopies:
    """The copies of one run on this machine. Every rank makes the same calls.

    Args:
        folder: the launcher's; all ranks see it.
        say: shows a line for the user.
    """

    def __init__(self, folder: Path, *, ranks: RankContext, say: Callable[[str], None]) -> None:
        self.folder, self._ranks, self._say = folder, ranks, say
        self._thread: threading.Thread | None = None
        self._error: str | None = None
        self.left_out = 0
        """Steps without a copy, because the one before or a checkpoint was still being written, or memory is
        full."""

    @classmethod
    def of_launcher(cls, ranks: RankContext, *, say: Callable[[str], None]) -> PeerCopies | None:
        """The copies for which the launcher of this process has made a folder; None: it has made none."""
        folder = os.environ.get(COPIES)
        return None if folder is None else cls(Path(folder), ranks=ranks, say=say)

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """The last step that all ranks have completed, and its run_state; None: there is none, or it is
        damaged, which is said."""
        steps = self._ranks.gather(
            committed_steps(self.folder, self._ranks.world_size), list[int], what="looking for copies"
        )
        common = set(steps[0]).intersection(*steps)
        if not common:
            return None
        path = step_folder(self.folder, max(common))
        try:
            with self._ranks.together("reading a copy"):
                state = read_run_state(path)
                read_index(path)
        except CheckpointError as error:
            self._say(f"the copy in memory cannot be used: {error}")
            return None
        return path, state

    def begin(self, step: int, backend: Saved, run_state: Mapping[str, Any]) -> None:
        """Make the first copy, before the first step, and check that there is room for another one.

        Raises:
            ConfigError: there is not, or the launcher's folder is on another machine; on every rank.
        """
        there = self.folder.is_dir() or recovery() is not None
        if not all(self._ranks.gather(there, bool, what="looking for the folder of copies")):
            raise ConfigError(
                f"cluster.peer_copy = true: {self.folder}, which the command made for the copies, is not on "
                "the ranks' machine; start the run on the node that it trains on, or set cluster.peer_copy = "
                "false",
                code="no-such-file",
                setting="cluster.peer_copy",
            )
        try:
            self._start(step, backend, run_state)
            with self._ranks.together("the first copy in memory"):
                self.wait()
                if self._error is not None:
                    raise CheckpointError(self._error, code="no-space")
            self._ranks.from_first(lambda: self._check_room(step), what="looking for room for copies")
        except CheckpointError as error:
            raise ConfigError(
                f"cluster.peer_copy = true needs room for two copies of the train state in "
                f"{self.folder.parent}: {error}. Enlarge it (mount -o remount,size=..., a container's "
                "--shm-size), set cluster.copy_dir to a larger tmpfs, or cluster.peer_copy = false",
                code="no-space",
                setting="cluster.peer_copy",
            ) from error

    def save(self, step: int, backend: Saved, run_state: Mapping[str, Any], *, busy: bool) -> None:
        """Begin the copy of the state after `step` steps, unless the one before is still being written on one
        of the ranks, or the loop is `busy` with a checkpoint, which uses the same buffers."""
        mine = _BUSY if busy or self._writing else self._error
        told = self._ranks.gather(mine, str | None, what="beginning a copy in memory")
        if _BUSY in told:
            self.left_out += 1
            return
        for rank, error in enumerate(told):
            if error is not None:
                self._say(f"no copy of the step before in memory: rank {rank}: {error}")
        try:
            self._start(step, backend, run_state)
        except CheckpointError as error:  # of all ranks; the run needs no copy to go on
            self.left_out += 1
            self._say(f"no copy of step {step} in memory: {error}")

    def wait(self) -> None:
        """Wait until this rank's part of the copy is written. Raises CheckpointError if that takes too
        long."""
        if self._thread is None:
            return
        self._thread.join(_WRITE_SECONDS)
        if self._writing:
            raise CheckpointError(
                f"a copy of the state was not written to {self.folder} within {_WRITE_SECONDS:.0f} s; is the "
                "machine out of memory and swapping? Set cluster.peer_copy = false",
                code="deadline",
                setting="cluster.peer_copy",
            )

    def _check_room(self, step: int) -> None:
        files = [file for file in step_folder(self.folder, step).rglob("*") if file.is_file()]
        size = sum(file.stat().st_size for file in files)
        if (free := shutil.disk_usage(self.folder).free) < size:
            raise CheckpointError(
                f"the first one has {size} bytes, and {free} are free for the next", code="no-space"
            )

    @property
    def _writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _start(self, step: int, backend: Saved, run_state: Mapping[str, Any]) -> None:
        self._error = None
        text = json.dumps(without_nan({**run_state, "step": step}))
        path = self._ranks.from_first(lambda: self._make(step, text), Path, what="beginning a copy in memory")
        finish = backend.save(path, background=True, in_memory=True)
        self._thread = threading.Thread(
            target=self._write, args=(path, finish), name=f"copy-{path.name}", daemon=True
        )
        self._thread.start()

    def _make(self, step: int, run_state: str) -> Path:
        """A new folder for a step; those that a restart could not need are removed."""
        path, known = step_folder(self.folder, step), committed_steps(self.folder, self._ranks.world_size)
        with file_errors(path, CheckpointError, "write"):
            kept = step_folder(self.folder, known[-1]) if known else None
            for other in self.folder.glob("step-*"):
                if other != kept or other == path:
                    shutil.rmtree(other)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            path.mkdir()
            (path / RUN_STATE).write_text(run_state)
        return path

    def _write(self, path: Path, finish: FinishSave) -> None:
        """In the thread. What goes wrong is said at the next step."""
        try:
            names = list(finish())
            complete(path, self._ranks.rank, [*names, RUN_STATE] if self._ranks.is_first else names)
        except (CheckpointError, OSError) as error:
            self._error = str(error)
