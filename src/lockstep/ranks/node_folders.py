"""A folder of rank 0's that other nodes may not see: those have folders of their own under the same path.

    folders = NodeFolders(run, ranks=ranks)        # asks who sees rank 0's files
    folders.collect(run / ".saving")               # the other nodes' files, to rank 0's node
    folders.spread(run / "step-000010")            # rank 0's files, to the other nodes

Of the nodes that share a folder, the first rank leads: it makes and removes the files in it for all of them.
Where all ranks see rank 0's folder, nothing is sent.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.observe.files import file_errors
from lockstep.ranks.context import RankContext

_CHUNK = 1 << 26
"""Bytes that are sent at a time. Ranks without a part in it wait for so many only, so that a large checkpoint
does not take longer than their deadline."""
_SEE_SECONDS = 3.0
"""A network file system may show a new file that much later."""


class NodeFolders:
    """Which ranks see the files of rank 0 in a folder. Collective, as all methods.

    Args:
        folder: exists on rank 0's node.

    Raises:
        CheckpointError: a node cannot write there; on every rank.
    """

    def __init__(self, folder: Path, *, ranks: RankContext) -> None:
        self._ranks = ranks
        self.leaders: dict[int, int] = {}
        """Rank -> the leader of its folder, of the ranks that do not see rank 0's."""
        if ranks.control is not None and not ranks.on_one_machine:
            self.leaders = self._look(folder)

    @property
    def leads(self) -> bool:
        """Whether this rank makes and removes the files of its node, which does not see rank 0's."""
        return self.leaders.get(self._ranks.rank) == self._ranks.rank

    def text(self) -> str:
        """What that means for a run, on one line."""
        blind = ", ".join(map(str, self.leaders))
        return (
            f"no common file system: ranks {blind} do not see this folder. Checkpoints are collected here "
            "and sent from here to resume; recordings and logs are collected at the end"
        )

    def _look(self, folder: Path) -> dict[int, int]:
        """Each node's first rank makes a mark; the lowest rank whose mark another one sees leads it."""
        what, marks_one = "looking which nodes share a folder", self._ranks.local_rank == 0
        made = self._ranks.gather_results(
            lambda: _mark(folder) if marks_one else None, Path | None, what=what
        )
        marks = {rank: mark for rank, mark in enumerate(made) if mark is not None}
        until = time.monotonic() + _SEE_SECONDS
        while not marks[0].exists() and time.monotonic() < until:
            time.sleep(0.1)
        leaders = self._ranks.gather(min(r for r, mark in marks.items() if mark.exists()), int, what=what)
        if marks_one:
            marks[self._ranks.rank].unlink(missing_ok=True)
        return {rank: leader for rank, leader in enumerate(leaders) if leader != 0}

    def make(self, folder: Path) -> None:
        """Make a folder that rank 0 has made, also on the nodes that do not see that.

        Raises:
            CheckpointError: a node cannot; on every rank.
        """
        if self.leaders:
            with (
                self._ranks.fail_together("making a folder"),
                file_errors(folder, CheckpointError, "created"),
            ):
                if self.leads:
                    folder.mkdir(parents=True)

    def collect(self, folder: Path) -> None:
        """Copy the files that other nodes have in this folder to rank 0's.

        Raises:
            CheckpointError: a file cannot be read or written; on every rank.
        """
        if not self.leaders:
            return
        what = "collecting the nodes' files"
        sizes = self._ranks.gather_results(
            lambda: _sizes(folder) if self.leads else {}, dict[str, int], what=what
        )
        for sender, files in enumerate(sizes):
            self._copy(folder, files, sender=sender, receivers=[0], what=what)

    def spread(self, folder: Path) -> None:
        """Make this folder on every other node what it is on rank 0's.

        Raises:
            CheckpointError: a file cannot be read or written; on every rank.
        """
        if not self.leaders:
            return
        what = "sending files to the nodes"
        files = self._ranks.on_rank_zero(lambda: _sizes(folder), dict[str, int], what=what)
        with self._ranks.fail_together(what), file_errors(folder, CheckpointError, "write"):
            if self.leads:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
        self._copy(folder, files, sender=0, receivers=sorted(set(self.leaders.values())), what=what)

    def _copy(
        self, folder: Path, files: Mapping[str, int], *, sender: int, receivers: list[int], what: str
    ) -> None:
        """Copy files of known sizes from one rank. An error waits for the end, because the other ranks count
        on this one's part in every transfer."""
        for name in files:  # on every rank alike: none waits for another
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise CheckpointError(
                    f"leads-out-of-folder: rank {sender} sent a file named {name[:200]!r}, which points "
                    f"outside {folder}"
                )
        rank, errors = self._ranks.rank, list[OSError]()
        for name, size in files.items():
            path = folder / name
            if rank in receivers:
                with _noted(errors):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(b"")  # an older one may be longer
            for start in range(0, size, _CHUNK):
                data = torch.zeros(min(_CHUNK, size - start), dtype=torch.uint8)
                if rank == sender:
                    with _noted(errors):
                        _read(path, start, data)
                self._ranks.wait_for(self._transfer(data, sender, receivers), what)
                if rank in receivers:
                    with _noted(errors):
                        _write(path, start, data)
        with self._ranks.fail_together(what), file_errors(folder, CheckpointError, "copied"):
            if errors:
                raise errors[0]

    def _transfer(self, data: Tensor, sender: int, receivers: list[int]) -> Callable[[], None]:
        """The transfer of a piece, for which all ranks wait."""
        control, rank = self._ranks.control, self._ranks.rank

        def transfer() -> None:
            if len(receivers) > 1:
                dist.broadcast(data, group=control, group_src=sender)
            elif rank == sender:
                dist.send(data, group=control, group_dst=receivers[0])
            elif rank == receivers[0]:
                dist.recv(data, group=control, group_src=sender)
            dist.barrier(group=control)

        return transfer


def _mark(folder: Path) -> Path:
    """A new file with a name that nobody has looked for before."""
    mark = folder / f".seen-{secrets.token_hex(8)}"
    with file_errors(mark, CheckpointError, "write"):
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    return mark


def _sizes(folder: Path) -> dict[str, int]:
    with file_errors(folder, CheckpointError, "read"):
        files = [path for path in folder.rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): path.stat().st_size for path in files}


@contextlib.contextmanager
def _noted(errors: list[OSError]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        errors.append(error)


def _read(path: Path, start: int, data: Tensor) -> None:
    with path.open("rb") as file:
        file.seek(start)
        if file.readinto(data.numpy().data) != len(data):
            raise OSError("it has become shorter")


def _write(path: Path, start: int, data: Tensor) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(data.numpy().data)
        file.flush()
        os.fsync(file.fileno())  # a checkpoint of these files counts once its last file is written
