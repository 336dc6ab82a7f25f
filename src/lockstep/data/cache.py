"""The cache of data sources between runs: indexes, copies and verdicts, named by their content."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from lockstep.errors import DataError
from lockstep.observe.files import cache_root
from lockstep.observe.lock import flock_within

CACHE_VERSION = 1
"""Part of every name in the cache: another version reads none of the files of this one."""
CACHE_DAYS = 30
"""Files of the cache that were not used for so long are removed when another one is written."""
MAKER_SECONDS = 1800.0
"""Deadline for the index or the copy that another process makes."""


def touch(path: Path) -> None:
    """Note that a file of the cache is used."""
    with contextlib.suppress(OSError):  # another's cache, which is read only
        os.utime(path)


def cached(name: str) -> Path:
    """Return the place of a file in the cache."""
    return cache_root() / "data" / f"v{CACHE_VERSION}-{name}"


@contextlib.contextmanager
def one_maker(name: str, source: Path) -> Iterator[None]:
    """Hold the lock on making a file of the cache, which may be there by the time it is held: ranks of a node
    that start together make it once. The lock of a process that dies is free again. In a folder that cannot
    be written to, or has no locks, nothing is locked.

    Raises:
        DataError: another process holds it for MAKER_SECONDS.
    """
    lock = cached("").parent / f".{name}.lock"
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            lock.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o664)
            held.callback(os.close, handle)
            _wait_for_lock(handle, source)
            held.callback(lock.unlink, missing_ok=True)
        yield


def _wait_for_lock(handle: int, source: Path) -> None:
    if not flock_within(MAKER_SECONDS, handle):
        raise DataError(
            f"deadline: another process has been indexing or copying {source} into the cache "
            f"({cached('').parent}) for {MAKER_SECONDS:g} s; wait until it is done and start again, or end "
            "that process"
        )


@contextlib.contextmanager
def new_cache_file(name: str) -> Iterator[Path]:
    """The path to write a file of the cache to, which gets its name once it is whole; nothing of it stays
    otherwise."""
    path = cached(name)
    clean_cache()
    descriptor, new = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(descriptor)
    try:
        yield Path(new)
        Path(new).replace(path)
    except BaseException:
        Path(new).unlink(missing_ok=True)
        raise


def clean_cache() -> None:
    """Make the folder of the cache if it is not there, and remove from it what was not used for long."""
    folder = cached("").parent
    folder.mkdir(parents=True, exist_ok=True)
    for other in folder.iterdir():
        days = 1 if other.name.startswith(".") else CACHE_DAYS  # what a killed process was writing
        with contextlib.suppress(FileNotFoundError):  # another process removes it, too
            if other.stat().st_mtime < time.time() - days * 86_400:
                other.unlink()
