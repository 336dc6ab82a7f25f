"""The lock of a run directory, so that one process writes it: a file with the owner's pid and start time."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lockstep.errors import ConfigError, TrainError
from lockstep.observe.files import file_errors, parse_json

_MAX_BYTES = 4096
_FLOCK_SECONDS = 10.0
"""The flock is held for a read and a write of a hundred bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """Who says in a lock file that it writes the run."""

    pid: int
    started: str | None
    """See `process_start`."""
    host: str

    def alive(self, *, elsewhere: bool = True) -> bool:
        """Return whether the process is there. elsewhere: the answer for one of another host."""
        if self.host != socket.gethostname():
            return elsewhere
        return process_start(self.pid) == self.started


class RunLock:
    """Held from construction to `release`. A lock whose process is gone (or whose pid now belongs to another
    process) is taken over; a lock from another host cannot be checked and is respected.

    Args:
        restarted: whoever started this process knows that what held the lock on another host has ended: that
            one is taken over as well.

    Raises:
        ConfigError: another live process holds it, or the folder cannot be written.
        TrainError: the disk is full or fails.
    """

    def __init__(self, path: Path, *, restarted: bool = False) -> None:
        self.path = path
        pid = os.getpid()
        self._me = Owner(pid=pid, started=process_start(pid), host=socket.gethostname())
        # flock makes read-then-write one step. The content is the lock: a flock would live on in a child that
        # a killed run has forked.
        with _locked(path) as file:
            owner = _parse(file.read(_MAX_BYTES))
            if owner is not None and owner != self._me and owner.alive(elsewhere=not restarted):
                raise ConfigError(
                    f"{str(path.parent)!r} is being written by process {owner.pid} on host "
                    f"{owner.host!r}; wait for it, use another --run-dir, or, if it is surely gone, "
                    f"delete {str(path)!r}",
                    code="locked",
                    pid=owner.pid,
                    host=owner.host,
                )
            with file_errors(path, TrainError, "write", advice="free some space and try again"):
                self._write(file, json.dumps(asdict(self._me)))

    def release(self) -> None:
        """Release the lock. Safe to call twice, and after another process took over."""
        if not self.path.exists():
            return
        with _locked(self.path) as file:
            if _parse(file.read(_MAX_BYTES)) == self._me:
                self._write(file, "")

    @staticmethod
    def _write(file: BinaryIO, text: str) -> None:
        """Overwrite the file in place, which works on a full disk."""
        data = text.encode()
        file.seek(0)
        file.write(data)
        file.truncate(len(data))


def read_owner(path: Path) -> Owner | None:
    """Return the owner in a lock file; None: there is no such file, or the lock is free."""
    try:
        return _parse(path.read_bytes()[:_MAX_BYTES])
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """The lock file, open and under an flock. Links are not followed: its text is overwritten."""
    with file_errors(path.parent, ConfigError, "write", advice="name another folder, or make it writable"):
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        handle = os.open(path, flags, 0o666)
        with os.fdopen(handle, "r+b", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise ConfigError(f"{path}: is not a regular file; delete it", code="not-a-file", path=path)
            _flock(handle, path)
            yield file


def _flock(handle: int, path: Path) -> None:
    end = time.monotonic() + _FLOCK_SECONDS
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise ConfigError(
                    f"{path}: another process holds it for {_FLOCK_SECONDS:g} s; end that process",
                    code="locked",
                    path=path,
                ) from None
            time.sleep(0.02)


def process_start(pid: int) -> str | None:
    """Return when process `pid` started, in the system's notation; None when there is no such process."""
    if os.path.exists("/proc/self/stat"):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return None
        # The name (field 2) is in parentheses and may hold spaces; state is field 3, start time field 22.
        fields = stat.rpartition(")")[2].split()
        return None if fields[0] == "Z" else fields[19]
    listing = subprocess.run(
        ["ps", "-p", str(pid), "-o", "lstart="], capture_output=True, text=True, check=False
    )
    return listing.stdout.strip() or None


def _parse(raw: bytes) -> Owner | None:
    """The owner in a lock file; None when it is free, or truncated by a crash in the middle of a write."""
    try:
        owner = parse_json(raw, "lock", ConfigError)
    except ConfigError:
        return None
    kinds: dict[str, Any] = {"pid": int, "started": (str, type(None)), "host": str}
    if not isinstance(owner, dict) or not all(isinstance(owner.get(n, ...), k) for n, k in kinds.items()):
        return None
    return Owner(**{name: owner[name] for name in kinds})
