"""The process that a file names by its pid: whether it writes the file, and signals to it.

    with holding(file, pid=record.pid, started=record.born) as holder:
        if holder is not None:
            holder.send(signal.SIGUSR2)

A pid in a file may be stale, another process's by now, or planted by whoever can write the file. A process is
believed to be ours if it started when the file says, runs as the owner of the file or as our user, and has
this very file open: flight records and locks are held open for that as long as their process uses them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

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
