"""Temporary folders that name their owner, so that what a killed process left is removed by the next one.

/dev/shm/lockstep-weights-5f1c09aa-1234-567890-x1y2z3ab/     host and pid namespace, pid, start time
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import re
import shutil
import socket
import tempfile
from pathlib import Path

from lockstep.observe.holder import process_start

SHARED_MEMORY = Path("/dev/shm")
"""Where memory is a folder, on Linux."""
_OWNED = re.compile(r"lockstep-(?:weights|engine|world)-([0-9a-f]{8})-(\d{1,10})-(\w{1,40})-[a-z0-9_]{8}")


class OwnedFolder:
    """A folder of this process, removed by `close`, at its exit, or, if it is killed, by the next process of
    ours that makes or looks for one in the same place.

    Args:
        kind: weights, engine or world: a part of the name.
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
