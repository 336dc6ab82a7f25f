"""Files that are either whole or not there, and JSON without bare NaN."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError


def check_writable(path: Path | None, *, flag: str = "--json") -> None:
    """Before the work whose result goes there; leaves no trace. None: nothing is written.

    Raises:
        ConfigError: no file can be made or replaced at `path`.
    """
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{flag} {str(path)!r} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"{flag} {str(path)!r}: no such folder: {str(path.parent)!r}; create it first")
    # Asked of the system, not of mode bits: they are not all there is to it.
    if not os.access(path.parent, os.W_OK | os.X_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise ConfigError(f"{flag} {str(path)!r} cannot be written (permission denied); choose another file")


def write_atomic(path: Path, text: str) -> None:
    """Replace `path` by `text`: a reader, also after a crash, sees the old file or the new one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes a file that only its owner may read.
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames and new files in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Atomically, indented, with `jsonable` values."""
    write_atomic(path, json.dumps(jsonable(value), indent=2, allow_nan=False) + "\n")


def json_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """One JSON object per line."""
    return "".join(json.dumps(jsonable(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows)


def jsonable(value: Any) -> Any:
    """Plain JSON values. NaN and infinities become strings float() reads: "NaN", "Infinity", "-Infinity".

    Raises:
        TypeError: for what is neither plain, a path, nor a number-like scalar with `item()` (numpy, torch).
    """
    if isinstance(value, bool) or value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(v) for v in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        return jsonable(value.item())
    raise TypeError(f"{value!r} ({type(value).__name__}) cannot be written as JSON")


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
