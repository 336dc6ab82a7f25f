"""The lock of a run directory, so that one process writes it: a file with the owner's pid and start time.

The owner keeps the file open, by which `lockstep stop` knows it (lockstep.observe.holder).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lockstep.errors import CheckpointError, ConfigError, TrainError
from lockstep.observe.files import file_errors, parse_json
from lockstep.observe.holder import process_start
from lockstep.observe.trust import check_own, read_own

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
        self._open: int | None = None
        pid = os.getpid()
        self._me = Owner(pid=pid, started=process_start(pid), host=socket.gethostname())
        # flock makes read-then-write one step. The content is the lock: a flock would live on in a child that
        # a killed run has forked.
        with _locked(path) as file:
            owner = _parse(file.read(_MAX_BYTES))
            if owner is not None and owner != self._me and owner.alive(elsewhere=not restarted):
                raise ConfigError(
                    f"locked: {str(path.parent)!r} is being written by process {owner.pid} on host "
                    f"{owner.host!r}; wait for it, use another --run-dir, or, if it is surely gone, delete "
                    f"{str(path)!r}",
                    pid=owner.pid,
                    host=owner.host,
                )
            with file_errors(path, TrainError, "write", advice="free some space and try again"):
                self._write(file, json.dumps(asdict(self._me)))
            self._open = os.dup(file.fileno())
            # The descriptors share the lock: kept, it would shut out whoever reads the owner.
            fcntl.flock(self._open, fcntl.LOCK_UN)

    def release(self) -> None:
        """Release the lock. Safe to call twice, and after another process took over."""
        if self.path.exists():
            with _locked(self.path) as file:
                if _parse(file.read(_MAX_BYTES)) == self._me:
                    self._write(file, "")
        if self._open is not None:
            os.close(self._open)
            self._open = None

    @staticmethod
    def _write(file: BinaryIO, text: str) -> None:
        """Overwrite the file in place, which works on a full disk."""
        data = text.encode()
        file.seek(0)
        file.write(data)
        file.truncate(len(data))


def read_owner(path: Path) -> Owner | None:
    """Return the owner in a lock file; None: there is no such file, or the lock is free.

    Raises:
        CheckpointError: it is no regular file, is too large, or cannot be read.
    """
    if not os.path.lexists(path):
        return None
    return _parse(read_own(path, CheckpointError, owners=[path.parent.stat().st_uid], limit=_MAX_BYTES))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """The lock file, open and under an flock. Links are not followed: its text is overwritten."""
    with file_errors(path.parent, ConfigError, "write", advice="name another folder, or make it writable"):
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        handle = os.open(path, flags, 0o664)
        with os.fdopen(handle, "r+b", buffering=0) as file:
            check_own(path, handle, ConfigError, owners=[path.parent.stat().st_uid])
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
                    f"locked: {path}: another process holds it for {_FLOCK_SECONDS:g} s; end that process",
                    path=path,
                ) from None
            time.sleep(0.02)


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
