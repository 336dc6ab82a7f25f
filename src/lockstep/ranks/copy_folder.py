"""The folder in memory to which ranks copy their state after each step, so that it outlives them.

    /dev/shm/lockstep-copies-x1y2z3ab/     the launcher's, mode 0700, removed at the end
      step-000003/                         what a checkpoint of step 3 holds
        complete-0.json, complete-1.json   which files a rank has written, and their sizes; written last

A step counts when all ranks have completed it. The launcher holds a lock on the folder: one that nobody holds
was left by a launcher that was killed, and is removed by the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from lockstep.errors import ConfigError
from lockstep.observe.files import write_atomic

PLACE = Path("/dev/shm")
"""Where memory is a folder, on Linux."""
LEAST_BYTES = 2**24
"""Free at the start, at least; how much is needed is known once the model is loaded."""
_PREFIX = "lockstep-copies-"
_STEP = re.compile(r"step-(\d{6,})")


@contextlib.contextmanager
def copy_folder(place: Path) -> Iterator[Path]:
    """Make a folder for the copies of one run, and remove it at the end.

    Raises:
        ConfigError: `place` is no folder, cannot be written, or is full.
    """
    _check_place(place)
    _remove_leftovers(place)
    folder, handle = _make(place)
    try:
        yield folder
    finally:
        try:
            shutil.rmtree(folder, ignore_errors=True)
        finally:  # Ctrl-C came meanwhile
            shutil.rmtree(folder, ignore_errors=True)
            os.close(handle)


def _check_place(place: Path) -> None:
    advice = "set cluster.copy_dir to a folder on a tmpfs, or cluster.peer_copy = false"
    if not place.is_dir():
        raise ConfigError(
            f"cluster.copy_dir = {str(place)!r} is not a folder; {advice}",
            code="no-such-file",
            setting="cluster.copy_dir",
        )
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(
            f"cluster.copy_dir = {str(place)!r} cannot be written; {advice}",
            code="cannot-write",
            setting="cluster.copy_dir",
        )
    free = shutil.disk_usage(place).free
    if free < LEAST_BYTES:
        raise ConfigError(
            f"cluster.copy_dir = {str(place)!r} has {free} bytes free; cluster.peer_copy needs room for two "
            f"copies of the train state there, at least {LEAST_BYTES} bytes. Free some, enlarge it (mount -o "
            "remount,size=..., a container's --shm-size), name another tmpfs, or set cluster.peer_copy = "
            "false",
            code="no-space",
            setting="cluster.copy_dir",
        )


def _make(place: Path) -> tuple[Path, int]:
    """A new folder, and the descriptor that holds its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
        try:
            handle = os.open(folder, os.O_RDONLY)
            fcntl.flock(handle, fcntl.LOCK_EX)
        except FileNotFoundError:  # another launcher took it for a leftover before it was locked
            continue
        if folder.exists():
            return folder, handle
        os.close(handle)


def _remove_leftovers(place: Path) -> None:
    for folder in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or gone
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            handle = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(handle)


def step_folder(folder: Path, step: int) -> Path:
    """Return where the copy of the state after `step` steps lies."""
    return folder / f"step-{step:06d}"


def complete(path: Path, rank: int, names: Iterable[str]) -> None:
    """Say that a rank has written its files of a step. Raises OSError."""
    sizes = {name: (path / name).stat().st_size for name in names}
    write_atomic(path / _complete(rank), json.dumps(sizes))


def committed_steps(folder: Path, ranks: int) -> list[int]:
    """Return the steps that all ranks have completed and whose files are as they left them, in order."""
    matches = [(path, _STEP.fullmatch(path.name)) for path in folder.glob("step-*")]
    return sorted(int(match[1]) for path, match in matches if match and _is_whole(path, ranks))


def _is_whole(path: Path, ranks: int) -> bool:
    try:
        listed = [json.loads((path / _complete(rank)).read_text()) for rank in range(ranks)]
        return all((path / name).stat().st_size == size for of in listed for name, size in of.items())
    except (OSError, ValueError, AttributeError):
        return False


def _complete(rank: int) -> str:
    return f"complete-{rank}.json"
