"""Copies of a run's state in host memory, one after each step, which outlive its ranks.

A copy is what a checkpoint of that step holds, written by the same code into a folder in memory
(lockstep.ranks.copy_folder), in a thread, while the next step goes on. Ranks agree on nothing when a copy is
done: each says by a file of its own that its part is complete, and a step counts when all have said so. At
most two are there: the last that counts, and the one that is being written.

On several nodes each has a folder of its own, and a rank's part is complete when it is in its own node's and
in the next one's (lockstep.loop.copy_ring): so a step that counts outlives any one node.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import CheckpointError, ConfigError
from lockstep.loop.checkpoint import RUN_STATE, read_run_state, without_nan
from lockstep.loop.copy_ring import CopyRing, Keeper
from lockstep.observe.files import file_errors
from lockstep.protocols import Saved
from lockstep.protocols.train import FinishSave
from lockstep.ranks.context import RankContext
from lockstep.ranks.copy_folder import (
    CopiedFile,
    complete,
    part_files,
    part_name,
    step_folder,
    whole_parts,
)
from lockstep.ranks.environment import COPIES, COPY_KEEPER
from lockstep.ranks.recovery import Recovery, recovery
from lockstep.train.state.index import read_index

_WRITE_SECONDS = 600.0
"""For a copy to be written, where it is waited for."""
_BUSY = "busy"


class PeerCopies:
    """The copies of one run. Every rank makes the same calls.

    Args:
        folder: all ranks of a node see it.
        say: shows a line for the user.
        ring: several nodes; None: one.
    """

    def __init__(
        self, folder: Path, *, ranks: RankContext, say: Callable[[str], None], ring: CopyRing | None = None
    ) -> None:
        self.folder, self._ranks, self._say, self._ring = folder, ranks, say, ring
        self.on_nodes = ring is not None
        """Whether they outlive the death of rank 0's node, and with it of what it has not yet written to a
        disk."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._begun: int | None = None
        """The step of the last copy that was begun."""
        self._kept: int | None = None
        """The step of the last copy that counts."""
        self.left_out = 0
        """Steps without a copy, because the one before or a checkpoint was still being written, memory is
        full, or a node could not be reached."""

    @classmethod
    def of_launcher(cls, ranks: RankContext, *, say: Callable[[str], None]) -> PeerCopies | None:
        """The copies for which the launcher of this process has made a folder, or the host of its node; None:
        nobody has. Collective."""
        folder, keeper = os.environ.get(COPIES), os.environ.pop(COPY_KEEPER, None)
        if folder is None:
            return None
        ring = None
        if keeper is not None:
            ring = CopyRing.join(Keeper(**json.loads(keeper)), ranks, seconds=_WRITE_SECONDS / 2)
        return cls(Path(folder), ranks=ranks, say=say, ring=ring)

    def summary(
        self, restart: Recovery | None, *, source: str | None, checkpoints_read: int
    ) -> dict[str, Any]:
        """Return the fields of the run's summary. source: what the run went on from."""
        fields: dict[str, Any] = {
            "restarts": 0 if restart is None else restart.number,
            "checkpoints_read": checkpoints_read,
            "copies_left_out": self.left_out,
        }
        if restart is not None:
            fields |= {"restored_from": source, "recovery_seconds": restart.phases}
        return fields

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """The last step of which every rank's part is whole on one of the nodes, fetched to this one, and its
        run_state; None: there is none, or it is damaged, which is said."""
        size = self._ranks.world_size
        whole = {str(step): parts for step, parts in whole_parts(self.folder, size).items()}
        told = self._ranks.gather(whole, dict[str, list[int]], what="looking for copies")
        steps = {step for each in told for step in each}
        common = [
            int(step) for step in steps if len({part for each in told for part in each.get(step, [])}) == size
        ]
        if not common:
            return None
        path = step_folder(self.folder, max(common))
        try:
            if self._ring is not None:
                with self._ranks.together("fetching a copy from other nodes"):
                    if self._ring.is_first_of_node:
                        self._remove_all_but(path)  # there may be no room beside the whole state
                        self._ring.fetch(path, [each.get(str(max(common)), []) for each in told])
            with self._ranks.together("reading a copy"):
                state = read_run_state(path)
                read_index(path)
        except CheckpointError as error:
            self._say(f"the copy in memory cannot be used: {error}")
            return None
        self._kept = max(common)
        return path, state

    def begin(self, step: int, backend: Saved, run_state: Mapping[str, Any]) -> None:
        """Make the first copy, before the first step, and check that there is room for another one.

        Raises:
            ConfigError: there is not, the launcher's folder is on another machine, or a node cannot be
                reached; on every rank.
        """
        there = self.folder.is_dir() or recovery() is not None
        if not all(self._ranks.gather(there, bool, what="looking for the folder of copies")):
            raise ConfigError(
                f"no-such-file: cluster.peer_copy = true: {self.folder}, which the command made for the "
                "copies, is not on the ranks' machine; start the run on the node that it trains on, or set "
                "cluster.peer_copy = false"
            )
        try:
            self._start(step, backend, run_state)
            with self._ranks.together("the first copy in memory"):
                self.wait()
                if self._error is not None:
                    raise self._error
            parts = part_files(step_folder(self.folder, step), self._ranks.rank) or {}
            own = sum(file.bytes for file in parts.values())
            whole = sum(self._ranks.gather(own, int, what="measuring the first copy in memory"))
            with self._ranks.together("looking for room for copies"):
                self._check_room(step, whole)
        except CheckpointError as error:
            if error.code in ("unreachable", "not-authenticated", "bad-reply", "hash-differs"):
                raise error.with_message(
                    f"cluster.peer_copy = true needs connections between the nodes' processes: {error}. Let "
                    "the nodes reach each other, or set cluster.peer_copy = false",
                    kind=ConfigError,
                    setting="cluster.peer_copy",
                ) from error
            raise ConfigError(
                "no-space: cluster.peer_copy = true needs room for two copies of the train state in "
                f"{self.folder.parent}: {error}. Enlarge it (mount -o remount,size=..., a container's "
                "--shm-size), set cluster.copy_dir to a larger tmpfs, or cluster.peer_copy = false"
            ) from error

    def save(self, step: int, backend: Saved, run_state: Mapping[str, Any], *, busy: bool) -> None:
        """Begin the copy of the state after `step` steps, unless the one before is still being written on one
        of the ranks, or the loop is `busy` with a checkpoint, which uses the same buffers."""
        mine = _BUSY if busy or self._writing else None if self._error is None else _said(self._error)
        told = self._ranks.gather(mine, str | None, what="beginning a copy in memory")
        if _BUSY in told:
            self.left_out += 1
            return
        for rank, error in enumerate(told):
            if error is not None:
                self._say(f"no copy of step {self._begun} in memory: rank {rank}: {error}")
        if not any(told):
            self._kept = self._begun if self._begun is not None else self._kept
        else:
            self.left_out += 1
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
                f"deadline: a copy of the state was not written to {self.folder} within "
                f"{_WRITE_SECONDS:.0f} s; is the machine out of memory and swapping? Set "
                "cluster.peer_copy = false",
                setting="cluster.peer_copy",
            )

    def _check_room(self, step: int, whole: int) -> None:
        """whole: bytes of the parts of all ranks, which are fetched to this node when the run heals."""
        files = [file for file in step_folder(self.folder, step).rglob("*") if file.is_file()]
        size = sum(file.stat().st_size for file in files)
        needed = max(size, whole - size)
        if (free := shutil.disk_usage(self.folder).free) < needed:
            raise CheckpointError(
                f"no-space: the first one has {size} bytes, and {free} are free where {needed} are needed "
                "for the next or, after a death, for the parts of all ranks"
            )

    @property
    def _writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _start(self, step: int, backend: Saved, run_state: Mapping[str, Any]) -> None:
        self._error, self._begun = None, None
        text = json.dumps(without_nan({**run_state, "step": step}))
        with self._ranks.together("beginning a copy in memory"):
            if self._ranks.is_first if self._ring is None else self._ring.is_first_of_node:
                self._make(step, text)
        path = step_folder(self.folder, step)
        finish = backend.save(path, background=True, in_memory=True)
        self._begun = step
        self._thread = threading.Thread(
            target=self._write, args=(path, finish), name=f"copy-{path.name}", daemon=True
        )
        self._thread.start()

    def _make(self, step: int, run_state: str) -> None:
        """A new folder for a step; what a restart could not need is removed."""
        path = step_folder(self.folder, step)
        kept = None if self._kept is None else step_folder(self.folder, self._kept)
        with file_errors(path, CheckpointError, "write"):
            self._remove_all_but(kept if kept != path else None)
            if self._ring is None:
                self.folder.mkdir(mode=0o700, exist_ok=True)
            elif kept is not None:
                self._remove_parts(kept, set(range(self._ranks.world_size)) - self._ring.kept)
            path.mkdir()
            if self._ranks.is_first:
                (path / RUN_STATE).write_text(run_state)

    def _remove_all_but(self, kept: Path | None) -> None:
        with file_errors(self.folder, CheckpointError, "remove"):
            for path in self.folder.glob("step-*"):
                if path != kept:
                    shutil.rmtree(path)

    def _remove_parts(self, path: Path, ranks: Iterable[int]) -> None:
        """Those that were fetched from other nodes to be loaded, and are kept there."""
        for rank in ranks:
            for name in part_files(path, rank) or ():
                (path / name).unlink()
            (path / part_name(rank)).unlink(missing_ok=True)

    def _write(self, path: Path, finish: FinishSave) -> None:
        """In the thread. What goes wrong is said at the next step."""
        try:
            names = [*finish(), *([RUN_STATE] if self._ranks.is_first else [])]
            if self._ring is None:
                files = {name: CopiedFile((path / name).stat().st_size) for name in names}
            else:
                files = self._ring.send(path, names)
            complete(path, self._ranks.rank, files)
        except OSError as error:
            self._error = CheckpointError(f"cannot-write: {path} cannot be written: {error}")
        except BaseException as error:  # whatever it is: this rank's part is not whole
            self._error = error


def _said(error: BaseException) -> str:
    """What it says; of one that nobody expects also its type."""
    return str(error) if isinstance(error, CheckpointError) else repr(error)
