"""Atomic writes, safe reads of untrusted files, and JSON without bare NaN."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

import pydantic_core

from lockstep.common_errors import leads_out
from lockstep.errors import ConfigError, LockstepError

JSON_BYTES = 16 * 2**20
"""Largest JSON document that is read from a file that Lockstep did not just write."""
JSON_VALUES = 1_000_000
"""Most values in one document; with JSON_BYTES it bounds what parsing may take to some hundred MB."""
_PATH_BYTES, _NAME_BYTES = 4096, 255
"""PATH_MAX, which counts a NUL at the end, and NAME_MAX of Linux and its usual file systems."""


def _of_the_system(folder: Path) -> bool:
    """Whether its names stand for devices and for what processes have open."""
    return folder == Path("/dev") or folder.is_relative_to("/proc")


def check_writable(path: Path | None, *, flag: str = "--json") -> None:
    """Check, before the work, that its result can be written; leaves no trace. None: nothing is written.

    Raises:
        ConfigError: no file can be made or replaced at `path`.
    """
    if path is None:
        return
    if problem := path_problem(str(path)):
        raise ConfigError(
            f"bad-file-name: {flag} {str(path)[:40]!r} is not a valid file name: {problem}; choose another"
        )
    if path.is_dir():
        raise ConfigError(f"not-a-file: {flag} {str(path)!r} is a folder; give the name of a file")
    # The result would take the place of the device, or of /dev/stdout, which leads to a file after `> FILE`.
    if path.exists() and (not path.is_file() or _of_the_system(path.parent.resolve())):
        raise ConfigError(
            f"not-a-file: {flag} {str(path)!r} is a device or a pipe, not a regular file; choose another file"
        )
    if not path.parent.is_dir():
        raise ConfigError(
            f"no-such-file: {flag} {str(path)!r}: no such folder: {str(path.parent)!r}; create it first"
        )
    # Asked of the system, not of mode bits: they are not all there is to it.
    if not os.access(path.parent, os.W_OK | os.X_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise ConfigError(
            f"cannot-write: {flag} {str(path)!r} cannot be written (permission denied); choose another file"
        )


def check_above(path: Path, *, flag: str = "--out") -> None:
    """Raises ConfigError: `path` cannot be made, as it would lie in a file."""
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir():
        raise ConfigError(
            f"not-a-file: {flag} {str(path)!r}: {str(above)!r} is not a folder; change the path"
        )


def path_problem(text: str) -> str | None:
    """Return why no file can have this name; None: a file can.

    The system raises an error of its own for such names, even for a test whether they exist.
    """
    if "\0" in text:
        return "it contains a NUL character"
    data = text.encode("utf-8", "surrogatepass")
    if len(data) >= _PATH_BYTES:
        return f"it is {len(data):,} bytes long; the maximum is {_PATH_BYTES - 1:,}"
    longest = max(map(len, data.split(b"/")))
    if longest > _NAME_BYTES:
        return f"one part of it is {longest:,} bytes long; the maximum is {_NAME_BYTES}"
    return None


@contextlib.contextmanager
def file_errors(
    path: Path, error: type[LockstepError], doing: str = "read", *, advice: str = ""
) -> Iterator[None]:
    """Turn the system's errors about a file (missing, no space left, not UTF-8, ...) into one `error`.

    Args:
        advice: what to do about it; ends the message.

    Raises:
        LockstepError: of type `error`, with the file's name, what was being done to it, and the cause.
    """
    try:
        yield
    except LockstepError:
        raise
    except OSError as cause:
        reason = cause.strerror or str(cause)
        end = f"; {advice}" if advice else ""
        raise error(
            f"{path} cannot be {_PAST.get(doing, doing)} ({reason}){end}",
            code="cannot-read" if doing == "read" else "cannot-write",
        ) from cause
    except UnicodeError as cause:
        raise error(f"not-text: {path} is not UTF-8 text ({cause}); the file is damaged") from cause
    except RecursionError as cause:
        raise error(f"too-deep: {path} is nested too deeply to be read; the file is damaged") from cause


_PAST = {"write": "written", "remove": "removed"}


_OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""How libraries in Rust quote an error of the system."""


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raise the system's errors inside as OSErrors that name a file.

    A write that fails names none, and the libraries of safetensors and tokenizers, in Rust, raise errors of
    their own, with the system's in the text.

    Args:
        path: the file, or a model folder: then its file that the library writes, or that was written last.
    """
    try:
        yield
    except OSError as error:
        # With a name, the text of one without a number would be "[Errno None] None".
        if error.filename is None and error.errno is not None:
            error.filename = str(_written_last(path))
        raise
    except Exception as error:  # tokenizers raises plain Exception
        quoted = type(error).__name__ in ("Exception", "SafetensorError")
        found = _OS_ERROR.search(str(error)) if quoted else None
        if found is None:
            raise
        number = int(found[1])
        if path.is_dir():
            path /= "tokenizer.json" if type(error) is Exception else "model.safetensors"
        raise OSError(number, os.strerror(number), str(path)) from error


def _written_last(path: Path) -> Path:
    if not path.is_dir():
        return path
    files = [file for file in path.iterdir() if file.is_file()]
    return max(files, key=lambda file: file.stat().st_mtime_ns, default=path)


def check_inside(path: Path, error: type[LockstepError], *, root: Path) -> None:
    """Raise if `path` is a link out of `root`; links within `root` are allowed.

    Raises:
        LockstepError: of type `error`: `path`, links followed, lies outside of `root`.
    """
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
        raise leads_out(error, path, root)


@contextlib.contextmanager
def open_plain(
    path: Path, error: type[LockstepError], *, root: Path | None = None
) -> Iterator[BufferedReader]:
    """Open a plain file for reading in bytes. A fifo or a device, which could block for ever, is refused.

    Args:
        root: folder that the file must lie in, links followed.

    Raises:
        LockstepError: of type `error`: the file is missing, cannot be read, is no plain file, or lies outside
            of `root`.
    """
    with file_errors(path, error):
        try:
            # O_NONBLOCK: opening a fifo that nobody writes would wait for a writer.
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except ValueError as cause:  # a NUL in the name
            raise error(f"bad-file-name: {str(path)!r} is not a valid file name ({cause})") from cause
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise error(f"not-a-file: {path} is not a regular file; replace it with one")
    with os.fdopen(handle, "rb") as file:
        if root is not None:
            check_inside(path, error, root=root)
        with file_errors(path, error):
            yield file


def read_plain(
    path: Path,
    error: type[LockstepError],
    *,
    root: Path | None = None,
    limit: int = JSON_BYTES,
    advice: str = "no valid file is that large",
) -> bytes:
    """Read all bytes of a plain file (see `open_plain`) of at most `limit` bytes.

    Args:
        advice: what to do about one that is larger; ends the message.

    Raises:
        LockstepError: of type `error`.
    """
    with open_plain(path, error, root=root) as file:
        size = os.fstat(file.fileno()).st_size
        # Python allocates as much as is asked for; a file that grows has more than it says.
        data = file.read(size + 1) if size <= limit else b""
        if size < len(data) <= limit:
            data += file.read(limit + 1 - len(data))
    if size > limit or len(data) > limit:
        raise error(f"too-large: {path} is larger than {limit:,} bytes; {advice}")
    return data


def read_json(
    path: Path, error: type[LockstepError], *, root: Path | None = None, limit: int = JSON_BYTES
) -> Any:
    """Read the value of a JSON file, within the limits of `parse_json`.

    Raises:
        LockstepError: of type `error`, with the file's name.
    """
    return parse_json(read_plain(path, error, root=root, limit=limit), str(path), error, limit=limit)


def parse_json(raw: bytes, where: str, error: type[LockstepError], *, limit: int = JSON_BYTES) -> Any:
    """Parse JSON; refuses NaN, infinities, duplicate keys and more than `limit` bytes. The number of values
    is bounded in proportion (JSON_VALUES in JSON_BYTES).

    Raises:
        LockstepError: of type `error`; names `where`.
    """
    # Counted before anything is parsed: parsing is what a crafted document would make expensive.
    most = JSON_VALUES * limit // JSON_BYTES
    if len(raw) > limit or sum(map(raw.count, (b",", b"[", b"{"))) > most:
        raise error(
            f"too-large: {where}: {len(raw):,} bytes of JSON exceed a limit ({limit:,} bytes, {most:,} "
            "values)",
        )

    def no_constant(name: str) -> NoReturn:
        raise error(f"not-json: {where}: {name} is not a JSON number")

    def finite(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise error(f"out-of-range: {where}: the number {text[:40]} is too large for a float")
        return value

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        # JSON's readers differ in which of two values they take, so that a check could see another one.
        if len(value) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise error(f"duplicate: {where}: the key {twice[:80]!r} occurs twice in one object")
        return value

    try:
        return json.loads(
            raw.decode("utf-8"), parse_constant=no_constant, parse_float=finite, object_pairs_hook=unique
        )
    except error:
        raise
    except (ValueError, RecursionError) as cause:
        raise error(f"not-json: {where} is not valid JSON ({cause}); the file is damaged") from cause


def write_atomic(path: Path, text: str) -> None:
    """Replace `path` by `text`: a reader, also after a crash, sees the old file or the new one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            # Before the rename: after a crash the new name could otherwise lead to an empty file.
            os.fsync(file.fileno())
        # mkstemp makes a file that only its owner may read.
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        if isinstance(error, OSError):  # a write that fails names no file
            error.filename, error.filename2 = str(path), None
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames and new files in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Mapping[str, Any] | Sequence[Any]) -> None:
    """Write a value as indented JSON, atomically, with `jsonable` values."""
    write_atomic(path, json.dumps(jsonable(value), indent=2, allow_nan=False) + "\n")


def json_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the rows as JSON lines: one object per line."""
    return "".join(_json_line(row) for row in rows)


def _json_line(row: Mapping[str, Any]) -> str:
    fields = (f"{json.dumps(str(name), ensure_ascii=False)}: {_json(value)}" for name, value in row.items())
    return "{" + ", ".join(fields) + "}\n"


def _json(value: Any) -> str:
    if isinstance(value, list) and _are_numbers(value):  # most of what is written, in a fourth of json's time
        return pydantic_core.to_json(value, inf_nan_mode="strings").decode().replace(",", ", ")
    return json.dumps(jsonable(value), ensure_ascii=False, allow_nan=False)


def jsonable(value: Any) -> Any:
    """Convert to plain JSON values: a record (a dataclass, a pydantic model) to its fields, or to what its
    `as_dict` returns. NaN and infinities become strings that float() reads: "NaN", "Infinity",
    "-Infinity".

    Raises:
        TypeError: for what is neither plain, a record, a path, nor a scalar with `item()` (numpy, torch).
    """
    if isinstance(value, bool) or value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, list) and _are_numbers(value) and all(map(math.isfinite, value)):
        return value
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(v) for v in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        return jsonable(value.item())
    for dump in ("as_dict", "model_dump"):
        if hasattr(value, dump):
            return jsonable(getattr(value, dump)())
    if dataclasses.is_dataclass(value):
        return {field.name: jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    raise TypeError(f"{value!r} ({type(value).__name__}) cannot be written as JSON")


def _are_numbers(values: list[Any]) -> bool:
    """Whether all are integers, or all floats, such as token ids and logprobs."""
    return set(map(type, values)) in ({int}, {float})


def _umask() -> int:
    # There is no way to read it but to set it.
    current = os.umask(0)
    os.umask(current)
    return current


# Where Lockstep keeps what it can make again.


def cache_root() -> Path:
    """Return $LOCKSTEP_CACHE, else $XDG_CACHE_HOME/lockstep, else ~/.cache/lockstep."""
    if own := os.environ.get("LOCKSTEP_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "lockstep"
