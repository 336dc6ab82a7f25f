"""At most one process writes a run: a lock file with the owner's pid and start time."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError


class RunLock:
    """Held from construction to `release`. A lock whose process is gone (or whose pid now belongs to another
    process) is taken over; a lock from another host cannot be checked and is respected.

    Raises:
        ConfigError: another live process holds it, or the folder cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._me: dict[str, Any] = {
            "pid": os.getpid(),
            "started": process_start(os.getpid()),
            "host": socket.gethostname(),
        }
        # flock makes read-then-write one step. The content is the lock: a flock would live on in a child that
        # a killed run has forked.
        try:
            opened = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{str(path.parent)!r} cannot be written ({error.strerror}); name another folder, or make it "
                "writable"
            ) from error
        with opened as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            owner = _parse(file.read())
            if owner is not None and owner != self._me and _alive(owner, self._me["host"]):
                raise ConfigError(
                    f"{str(path.parent)!r} is being written by process {owner['pid']} on host "
                    f"{owner['host']!r}; wait for it, use another --run-dir, or, if it is surely gone, "
                    f"delete {str(path)!r}"
                )
            self._write(file, json.dumps(self._me))

    def release(self) -> None:
        """Give it up. Safe to call twice, and after someone else took over."""
        if not self.path.exists():
            return
        with self.path.open("r+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _parse(file.read()) == self._me:
                self._write(file, "")

    @staticmethod
    def _write(file: Any, text: str) -> None:
        file.seek(0)
        file.truncate()
        file.write(text)
        file.flush()


def process_start(pid: int) -> str | None:
    """When process `pid` started, in the system's own notation; None when there is no such process."""
    if os.path.exists("/proc/self/stat"):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return None
        # The name (field 2) is in parentheses and may hold spaces; state is field 3, start time field 22.
        fields = stat.rpartition(")")[2].split()
        return None if fields[0] == "Z" else fields[19]
    shown = subprocess.run(
        ["ps", "-p", str(pid), "-o", "lstart="], capture_output=True, text=True, check=False
    )
    return shown.stdout.strip() or None


def _parse(text: str) -> dict[str, Any] | None:
    """The owner in a lock file; None when it is free, or cut off by a crash in the middle of a write."""
    try:
        owner = json.loads(text)
    except json.JSONDecodeError:
        return None
    return owner if isinstance(owner, dict) and {"pid", "started", "host"} <= owner.keys() else None


def _alive(owner: dict[str, Any], host: str) -> bool:
    return bool(owner["host"] != host or process_start(int(owner["pid"])) == owner["started"])
