"""Locks: of a run directory, of files that processes hold, and of folders that they own."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from lockstep.errors import CheckpointError, ConfigError, TrainError
from lockstep.observe.files import file_errors, parse_json
from lockstep.observe.trust import check_own, read_own

# The lock of a run directory, so that one process writes it: a file with the owner's pid and start time.
#
# The owner keeps the file open, by which `lockstep stop` knows it (lockstep.observe.lock).


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
        flag: names the folder on the command line.

    Raises:
        ConfigError: another live process holds it, or the folder cannot be written.
        TrainError: the disk is full or fails.
    """

    def __init__(self, path: Path, *, restarted: bool = False, flag: str = "--run-dir") -> None:
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
                    f"{owner.host!r}; wait until it ends, use another {flag}, or, if you are sure that "
                    f"it no longer runs, delete {str(path)!r}"
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
    with file_errors(
        path.parent, ConfigError, "write", advice="choose another folder, or make this one writable"
    ):
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        handle = os.open(path, flags, 0o664)
        with os.fdopen(handle, "r+b", buffering=0) as file:
            check_own(path, handle, ConfigError, owners=[path.parent.stat().st_uid])
            _flock(handle, path)
            yield file


def _flock(handle: int, path: Path) -> None:
    if not flock_within(_FLOCK_SECONDS, handle):
        raise ConfigError(
            f"locked: another process has held {path} for {_FLOCK_SECONDS:g} s; end that process"
        )


def flock_within(seconds: float, handle: int) -> bool:
    """Wait at most so long for the lock of an open file; returns whether it is held now. Raises OSError: the
    file system has no locks."""
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                return False
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


# The process that a file names by its pid: whether it writes the file, and signals to it.
#
#     with holding(file, pid=record.pid, started=record.born) as holder:
#         if holder is not None:
#             holder.send(signal.SIGUSR2)
#
# A pid in a file may be stale, another process's by now, or planted by whoever can write the file. A process
# is believed to be ours if it started when the file says, runs as the owner of the file or as our user, and
# has this very file open: flight records and locks are held open for that as long as their process uses
# them.


_LARGEST_PID = 2**22
"""PID_MAX_LIMIT of Linux."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A process that was checked, see `holding`."""

    pid: int
    _handle: int | None
    """A pidfd: signals to it never reach another process that got the pid since."""

    def send(self, number: signal.Signals) -> bool:
        """Send a signal; returns whether the process was there to get it."""
        try:
            if self._handle is not None:
                signal.pidfd_send_signal(self._handle, number)
            else:
                os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True


@contextlib.contextmanager
def holding(path: Path, *, pid: int, started: str | int | None) -> Iterator[Holder | None]:
    """Give the process `pid` if it is the one that holds the file at `path` open, else None.

    Args:
        started: when it started, as `process_start` says.
    """
    handle = _open(pid)
    try:
        # Checked after the pidfd is open: what passes the check is the process of the pidfd.
        ours = holds(path, pid=pid, started=started)
        yield Holder(pid=pid, _handle=handle) if ours else None
    finally:
        if handle is not None:
            os.close(handle)


def holds(path: Path, *, pid: int, started: str | int | None) -> bool | None:
    """Return whether `pid` is the process that holds the file at `path` open; None: it started then, and is
    another user's: we may not see what it has open, or it holds the file and runs as neither its owner nor
    our user, as where several users go on with one run."""
    if started is None or process_start(pid) != str(started):
        return False
    try:
        wanted = os.lstat(path)
        user = psutil.Process(pid).uids().effective
    except (OSError, psutil.Error):
        return False
    if not stat.S_ISREG(wanted.st_mode):
        return False
    files = _open_files(pid)
    if files is None:
        return None
    if not any(os.path.samestat(each, wanted) for each in files):
        return False
    return True if user in (wanted.st_uid, os.geteuid()) else None


def process_start(pid: int) -> str | None:
    """Return when process `pid` started, in the system's notation; None when there is no such process."""
    if not 0 < pid <= _LARGEST_PID:
        return None
    if os.path.exists("/proc/self/stat"):
        fields = stat_fields(pid)
        return None if not fields or fields[0] == "Z" else fields[19]
    with contextlib.suppress(psutil.Error):
        return str(psutil.Process(pid).create_time())
    return None


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name, state first; none when there is no such process."""
    with contextlib.suppress(OSError):
        # From the last parenthesis on: the name before it may hold spaces and parentheses itself.
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return text.rpartition(")")[2].split()
    return []


def _open(pid: int) -> int | None:
    if not hasattr(os, "pidfd_open") or not 0 < pid <= _LARGEST_PID:
        return None
    with contextlib.suppress(OSError):  # it has gone, or the kernel has no pidfds
        return os.pidfd_open(pid)
    return None


def _open_files(pid: int) -> list[os.stat_result] | None:
    """What a process has open; None: we may not look."""
    try:
        if os.path.isdir("/proc/self/fd"):
            names = [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
        else:
            names = [each.path for each in psutil.Process(pid).open_files()]
    except (PermissionError, psutil.AccessDenied):
        return None
    except (OSError, psutil.Error):  # it has gone
        return []
    files = []
    for name in names:
        with contextlib.suppress(OSError):  # closed since
            files.append(os.stat(name))
    return files


# Temporary folders that name their owner, so that what a killed process left is removed by the next one.
#
# /dev/shm/lockstep-weights-5f1c09aa-1234-567890-x1y2z3ab/     host and pid namespace, pid, start time


SHARED_MEMORY = Path("/dev/shm")
"""Where memory is a folder, on Linux."""
_OWNED = re.compile(
    r"lockstep-(?:weights|engine|roles|world)-([0-9a-f]{8})-(\d{1,10})-(\w{1,40})-[a-z0-9_]{8}"
)


class OwnedFolder:
    """A folder of this process, removed by `close`, at its exit, or, if it is killed, by the next process of
    ours that makes or looks for one in the same place.

    Args:
        kind: weights, engine or roles; part of the name.
        place: where it is made; None: the system's folder for temporary files.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, kind: str, place: Path | None = None) -> None:
        place = Path(tempfile.gettempdir()) if place is None else place
        remove_left(place)
        self._pid = os.getpid()
        prefix = f"lockstep-{kind}-{_machine()}-{self._pid}-{_started(self._pid)}-"
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        atexit.register(self.close)

    def close(self) -> None:
        """Remove it. Does nothing in a fork of the process that made it."""
        if os.getpid() == self._pid:
            atexit.unregister(self.close)
            shutil.rmtree(self.path, ignore_errors=True)


def remove_left(place: Path) -> list[Path]:
    """Remove the folders in `place` that killed processes of this user left, and return them. Those of other
    machines and of other containers that share the place stay: nobody here knows what is alive there."""
    removed = []
    for path in place.glob("lockstep-*"):
        match = _OWNED.fullmatch(path.name)
        if match is None or match[1] != _machine() or match[3] == _started(int(match[2])):
            continue
        with contextlib.suppress(FileNotFoundError):  # another process removes it
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def _machine() -> str:
    """What is the same for all processes that see each other by their pids."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return hashlib.blake2b(f"{socket.gethostname()} {namespace}".encode(), digest_size=4).hexdigest()


def _started(pid: int) -> str:
    """The start time of a process, as a name may have it; empty: there is none."""
    return re.sub(r"\W", "", process_start(pid) or "")


def start_time(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0: there is none, or the system does not say."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields else 0


def state(pid: int, since: int) -> str | None:
    """Return the state of a process as one letter of proc(5), such as T (stopped), S or D (it waits), R; None
    when it has gone."""
    fields = stat_fields(pid)
    return fields[0] if fields and int(fields[19]) == since else None


def cpu_seconds(pid: int, since: int) -> float:
    """Return the CPU time of a process and of its children that have ended; 0 when it has gone."""
    fields = stat_fields(pid)
    if not fields or int(fields[19]) != since:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
