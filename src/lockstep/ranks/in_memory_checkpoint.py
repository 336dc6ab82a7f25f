"""Checkpoints in memory: after each step the ranks copy their state to a folder that outlives them.

    /dev/shm/lockstep-copies-x1y2z3ab/     the launcher's, mode 0700, removed at the end
      step-000003/                         what a checkpoint of step 3 holds
        complete-0.json, complete-1.json   which files a rank has written, their sizes and, on several nodes,
                                           their sha256; written last

A step counts when all ranks have completed it. The launcher holds a lock on the folder: a folder without a
lock was left by a launcher that was killed, and the next launcher removes it. On several nodes each node has
such a folder (lockstep.loop.peer_checkpoint_server), which also holds parts of the ranks of other nodes.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import CheckpointError, ConfigError
from lockstep.observe.files import file_errors, write_atomic
from lockstep.observe.lock import SHARED_MEMORY

PLACE = SHARED_MEMORY
LEAST_BYTES = 2**24
"""Least free memory at the start; the amount needed is known once the model is loaded."""
_PREFIX = "lockstep-copies-"
_FOLDER = re.compile(_PREFIX + r"[a-z0-9_]{8}")
_STEP = re.compile(r"step-(\d{6,12})")
_FILE = re.compile(r"(?:[a-z_]{1,40}/)?[A-Za-z0-9_][A-Za-z0-9_.-]{0,120}")
"""A file of the policy, or of another role in its folder."""


def is_in_memory(path: Path) -> bool:
    """Return whether a file is of a copy in memory: it lies in a step's folder, right below a launcher's."""
    return any(_FOLDER.fullmatch(a) and _STEP.fullmatch(b) for a, b in itertools.pairwise(path.parts))


@contextlib.contextmanager
def copy_folder(place: Path) -> Iterator[Path]:
    """Make a folder for the copies of one run, and remove it at the end.

    Raises:
        ConfigError: `place` is not a folder, not writable, or full.
    """
    _check_place(place)
    remove_leftovers(place)
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
        raise ConfigError(f"no-such-file: cluster.copy_dir = {str(place)!r} is not a folder; {advice}")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot-write: cluster.copy_dir = {str(place)!r} cannot be written; {advice}")
    free = shutil.disk_usage(place).free
    if free < LEAST_BYTES:
        raise ConfigError(
            f"no-space: cluster.copy_dir = {str(place)!r} has {free} bytes free; cluster.peer_copy needs "
            f"room for two copies of the train state there, at least {LEAST_BYTES} bytes. Free some, enlarge "
            "it (mount -o remount,size=..., a container's --shm-size), use another tmpfs, or set "
            "cluster.peer_copy = false"
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


def remove_leftovers(place: Path) -> None:
    """Remove the folders of launchers that were killed."""
    for folder in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or gone
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
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


@dataclass(frozen=True, slots=True)
class CopiedFile:
    """A file of a part."""

    bytes: int
    sha256: str = ""
    """Empty where it stays on this machine: nothing is hashed."""


def complete(path: Path, rank: int, files: Mapping[str, CopiedFile]) -> None:
    """Say that the folder of a step has the part of a rank: these files by name. Raises OSError."""
    write_atomic(path / part_name(rank), part_text(files))


def part_name(rank: int) -> str:
    """The name of the file that says so."""
    return f"complete-{rank}.json"


def part_text(files: Mapping[str, CopiedFile]) -> str:
    """Its content."""
    return json.dumps({name: [file.bytes, file.sha256] for name, file in files.items()})


def read_part(text: str | bytes) -> dict[str, CopiedFile]:
    """The files that it lists. Raises ValueError: it is damaged."""
    listed = json.loads(text)
    if not isinstance(listed, dict):
        raise ValueError("it lists no files")
    files = {}
    for name, entry in listed.items():
        size, sha256 = entry if isinstance(entry, list) and len(entry) == 2 else (None, None)
        if _FILE.fullmatch(name) is None or type(size) is not int or type(sha256) is not str or size < 0:
            raise ValueError(f"{name[:80]!r} is not a file of a copy, or its entry is damaged")
        files[name] = CopiedFile(size, sha256)
    return files


def is_copied_file(path: str) -> bool:
    """Whether a relative path may be that of a file in the folder.

    Example:
        >>> is_copied_file("step-000003/value/model.safetensors"), is_copied_file("step-000003/../a")
        (True, False)
    """
    step, _, name = path.partition("/")
    return _STEP.fullmatch(step) is not None and _FILE.fullmatch(name) is not None


def part_files(path: Path, rank: int) -> dict[str, CopiedFile] | None:
    """The files of a rank's part in the folder of a step, if all are there in their sizes; None: it is not
    whole."""
    try:
        files = read_part((path / part_name(rank)).read_text())
        whole = all((path / name).stat().st_size == file.bytes for name, file in files.items())
    except (OSError, ValueError):
        return None
    return files if whole else None


def check_ours(folder: Path) -> None:
    """Raise CheckpointError unless only we may write in a folder of copies, as in the one that was made."""
    with file_errors(folder, CheckpointError):
        found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022:
        return
    raise CheckpointError(
        f"not-ours: {folder} is no longer private to this run: other users may be able to write to it. "
        "Continue from the last checkpoint, with cluster.copy_dir set to a folder that other users cannot "
        "write to"
    )


def whole_parts(folder: Path, ranks: int) -> dict[int, list[int]]:
    """Return which ranks' parts are whole in the folder of each step.

    Raises:
        CheckpointError: the folder is somebody else's.
    """
    if not os.path.lexists(folder):
        return {}
    check_ours(folder)
    matches = [(path, _STEP.fullmatch(path.name)) for path in folder.glob("step-*")]
    return {
        int(match[1]): [rank for rank in range(ranks) if part_files(path, rank) is not None]
        for path, match in matches
        if match
    }


def committed_steps(folder: Path, ranks: int) -> list[int]:
    """Return the steps that all ranks have completed and whose files are as they left them, in order."""
    return sorted(step for step, parts in whole_parts(folder, ranks).items() if len(parts) == ranks)
