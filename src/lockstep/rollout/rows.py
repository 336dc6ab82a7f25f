"""Files of samples: rows are appended atomically, and a later command can continue the file.

    F               the rows, one JSON object per line, in order of completion F.meta.json     the settings of
    the rows, and whether they are complete; written before the first row F.part.jsonl    rows of a Parquet
    file F until they are complete; then F is written from it, sorted, at once

A row is named by (index, sample): the number of its prompt in the data, and of the sample among the prompt's.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from lockstep.common_errors import cannot_write, damaged, missing_package
from lockstep.data.readers import JSON_COLUMNS, opened_parquet, parse_row, restorer
from lockstep.data.rows import PlacedRow
from lockstep.errors import ConfigError, DataError
from lockstep.observe.files import check_writable, file_errors, read_json, sync_folder, write_json

Row = Mapping[str, Any]
Key = tuple[int, int]
SUFFIXES = (".jsonl", ".parquet")
FORMAT = 1


def meta_path(path: Path) -> Path:
    """Return the file beside `path` that describes its rows."""
    return path.with_name(path.name + ".meta.json")


def check_out(path: Path, *, flag: str = "--out") -> None:
    """Raise ConfigError if rows cannot be written to `path`; leaves no trace."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(
            f"wrong-format: {flag} {str(path)!r}: the name must end in {' or '.join(SUFFIXES)}; choose one"
        )
    check_writable(path, flag=flag)
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError as error:
            raise missing_package(f"{flag} {str(path)!r}", "pyarrow", extra="data", cause=error) from error


class RowFile:
    """Appends rows to `path`, which may be the file of an earlier, equal command. One process at a time.

    Args:
        command: the writing command, for messages: "generate". identity: JSON values that determine every
        row; those of an earlier file must be equal, except `may_differ`. expected: rows of the whole file.
        overwrite: begin anew, even if there is a file. may_differ: dotted names in `identity` that do not
        change the rows.

    Raises:
        ConfigError: `path` cannot be written, another process writes it, it was made with other settings or
            data (every difference is named), or it is no file of ours.
        DataError: a row in it is damaged.
    """

    def __init__(
        self,
        path: Path,
        *,
        command: str,
        identity: Mapping[str, Any],
        expected: int,
        overwrite: bool = False,
        may_differ: Sequence[str] = (),
    ) -> None:
        check_out(path)
        self.path = path
        self.command = command
        self.expected = expected
        self.done: set[Key] = set()
        """Rows in the file."""
        self.complete = False
        """Whether all rows are written and `path` is in its final form."""
        self._identity = _plain(identity)
        self._journal = path if path.suffix == ".jsonl" else path.with_name(path.name + ".part.jsonl")
        self._writing = threading.Lock()
        self._offsets: dict[Key, int] = {}
        # Opened before anything is read: the lock is on it.
        self._fd = _open_locked(self._journal)
        try:
            if overwrite:
                self._clear()
            self._take_over(may_differ)
        except BaseException:
            if self._journal != path and not os.fstat(self._fd).st_size:
                self._journal.unlink(missing_ok=True)
            self.close()
            raise

    @property
    def resumed(self) -> bool:
        """Whether the file has rows of an earlier command."""
        return bool(self.done)

    def append(self, rows: Sequence[Row]) -> None:
        """Append rows, each atomically; may be called from several threads.

        Raises:
            DataError: the disk is full, or the file cannot be written. Existing rows stay.
        """
        lines = [(_key(row, str(self.path)), _line(row)) for row in rows]
        with self._writing:
            size = os.fstat(self._fd).st_size
            try:
                _write_all(self._fd, b"".join(line for _, line in lines))
            except OSError as error:
                with contextlib.suppress(OSError):
                    # Half a line would be a damaged row to whoever goes on with the file.
                    os.ftruncate(self._fd, size)
                raise DataError(
                    f"cannot-write: cannot write to {self._journal}: {error.strerror}; {len(self.done)} of "
                    f"{self.expected} rows are saved. Free some space, then run the command again to "
                    "continue"
                ) from error
            for key, line in lines:
                self.done.add(key)
                self._offsets[key] = size
                size += len(line)

    def sync(self) -> None:
        """Flush appended rows to disk, so that they survive a power cut."""
        os.fsync(self._fd)

    def finish(self, summary: Mapping[str, Any] | None = None) -> None:
        """Finish a file that has all its rows; a Parquet file is written now.

        Raises:
            DataError: rows are missing (a bug in the caller), or the file cannot be written.
        """
        if len(self.done) != self.expected:
            raise DataError(f"incomplete: {self.path}: {len(self.done)} rows, expected {self.expected}")
        self.sync()
        if self._journal != self.path:
            write_parquet(self.path, self._sorted_rows())
            sync_folder(self.path.parent)
        # Between the two: whenever this stops, the journal or a file that is marked complete has all rows.
        self._write_meta(complete=True, summary=summary)
        if self._journal != self.path:
            self._journal.unlink()
        self.complete = True

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> RowFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _clear(self) -> None:
        """Remove the files of an earlier command."""
        os.ftruncate(self._fd, 0)
        meta_path(self.path).unlink(missing_ok=True)
        if self._journal != self.path:
            self.path.unlink(missing_ok=True)

    def _take_over(self, may_differ: Sequence[str]) -> None:
        meta = read_meta(self.path)
        if meta is None:
            if os.fstat(self._fd).st_size or (self._journal != self.path and self.path.exists()):
                raise ConfigError(
                    f"already-exists: --out {str(self.path)!r} exists, but {meta_path(self.path).name}, "
                    "which describes it, does not; choose another file, or start over with --overwrite"
                )
            self._write_meta(complete=False)
            return
        if not os.fstat(self._fd).st_size and (self._journal == self.path or not self.path.exists()):
            self._write_meta(complete=False)  # nothing was made of those settings
            return
        self._compare(meta, may_differ)
        if self._journal != self.path and self.path.exists() and meta["complete"]:
            self.complete = True
            self.done = {_key(row, str(self.path)) for row in read_parquet(self.path)}
            self._journal.unlink(missing_ok=True)
            return
        self._offsets = _scan(self._fd, self._journal)
        self.done = set(self._offsets)
        self.complete = bool(meta["complete"]) and len(self.done) == self.expected
        if not self.complete:
            self._write_meta(complete=False)

    def _compare(self, meta: Mapping[str, Any], may_differ: Sequence[str]) -> None:
        old = {"command": meta["command"], "rows": meta["rows"], **_flat(meta["identity"])}
        new = {"command": self.command, "rows": self.expected, **_flat(self._identity)}
        changed = [
            name
            for name in dict.fromkeys([*old, *new])
            if old.get(name) != new.get(name) and not _covers(may_differ, name)
        ]
        lines = [f"  {name}: {old.get(name)!r} in the file, now {new.get(name)!r}" for name in changed]
        if lines:
            raise ConfigError(
                f"contradiction: --out {str(self.path)!r} was written with different settings or data; "
                "continue with the original ones, choose another file, or start over with --overwrite:\n"
                + "\n".join(lines)
            )

    def _write_meta(self, *, complete: bool, summary: Mapping[str, Any] | None = None) -> None:
        meta = {"format": FORMAT, "command": self.command, "identity": self._identity, "rows": self.expected}
        more = {} if summary is None else {"summary": summary}
        try:
            write_json(meta_path(self.path), {**meta, "complete": complete, **more})
        except OSError as error:
            raise cannot_write(DataError, meta_path(self.path), error, "make room") from error

    def _sorted_rows(self) -> Iterator[dict[str, Any]]:
        with self._journal.open("rb") as file:
            for key in sorted(self._offsets):
                file.seek(self._offsets[key])
                yield json.loads(file.readline())


def read_meta(path: Path) -> dict[str, Any] | None:
    """Read the description beside `path`. None if it does not exist.

    Raises:
        ConfigError: it is damaged, or from a later version.
    """
    file = meta_path(path)
    if not os.path.lexists(file):
        return None
    try:
        meta = read_json(file, ConfigError)
    except ConfigError as error:
        raise error.with_message(f"{error}; start over with --overwrite") from error
    if not isinstance(meta, dict) or not isinstance(meta.get("format"), int):
        raise damaged(ConfigError, file, "it does not name its format", fix="start over with --overwrite")
    if meta["format"] != FORMAT:
        raise ConfigError(
            f"version-differs: {file}: its format is {meta['format']!r}, but this version of Lockstep reads "
            f"format {FORMAT}; use the version that wrote the file"
        )
    kinds = {"command": str, "identity": dict, "rows": int, "complete": bool}
    for name, kind in kinds.items():
        if not isinstance(meta.get(name), kind):
            why = f"{name} = {str(meta.get(name))[:80]!r}"
            raise damaged(ConfigError, file, why, fix="start over with --overwrite")
    return meta


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Read the rows of any .jsonl or .parquet file.

    Raises:
        ConfigError: a file of another kind.
        DataError: the file does not exist, is damaged, or is not finished.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(
            f"wrong-format: --data {str(path)!r} must end in {' or '.join(SUFFIXES)}; give a file of samples"
        )
    meta = read_meta(path)
    if meta is not None and not meta["complete"]:
        raise DataError(
            f"incomplete: {path} is not complete: `lockstep {meta['command']}` was stopped before it had "
            f"written all {meta['rows']} rows; run that command again to continue where it stopped"
        )
    if not path.is_file():
        raise DataError(f"no-such-file: --data {str(path)!r}: no such file")
    return read_parquet(path) if path.suffix == ".parquet" else _read_lines(path)


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    with file_errors(path, DataError), path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                yield PlacedRow(parse_row(line, where), where=where)


def _scan(fd: int, path: Path) -> dict[Key, int]:
    """Return the offset of each row in the journal. A truncated last line is removed."""
    offsets: dict[Key, int] = {}
    end = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                os.ftruncate(fd, end)
                break
            where = f"{path}, line {number}"
            key = _key(parse_row(line, where), where)
            if key in offsets:
                raise DataError(
                    f"duplicate: {where}: sample {key[1]} of prompt {key[0]} occurs twice; remove one"
                )
            offsets[key] = end
            end += len(line)
    return offsets


def _key(row: Row, where: str) -> Key:
    index, sample = row.get("index"), row.get("sample")
    if type(index) is not int or type(sample) is not int:
        raise DataError(f"wrong-row: {where}: index = {index!r} and sample = {sample!r} must be integers")
    return index, sample


def _line(row: Row) -> bytes:
    try:
        return (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode()
    except UnicodeEncodeError:  # half a surrogate pair, which JSON may hold and UTF-8 may not
        return (json.dumps(row, allow_nan=False) + "\n").encode()


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _open_locked(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError as error:
        raise ConfigError(f"cannot-write: --out {str(path)!r} cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise ConfigError(
            f"locked: --out {str(path)!r} is being written by another process; wait for it to end"
        ) from error
    return fd


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value as it will be read back from JSON."""
    plain: dict[str, Any] = json.loads(json.dumps(value, default=str))
    return plain


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings by dotted name."""
    flattened: dict[str, Any] = {}
    for name, item in value.items():
        if isinstance(item, Mapping) and item:
            flattened |= _flat(item, f"{prefix}{name}.")
        elif isinstance(item, list) and item and isinstance(item[0], Mapping):
            for number, entry in enumerate(item):
                flattened |= _flat(entry, f"{prefix}{name}[{number}].")
        else:
            flattened[f"{prefix}{name}"] = item
    return flattened


def _covers(names: Sequence[str], name: str) -> bool:
    return any(name == covered or name.startswith(f"{covered}.") for covered in names)


# Rows of samples as Parquet: known columns in their own types, free-form ones (`row`, ...) as JSON text.


_RENDERED = ("prompt", "messages", "tools", "chat_template_kwargs")
# Also the number of rows that are in memory at a time, in writing and in reading.
ROWS_PER_GROUP = 4096


def write_parquet(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows to a file beside `path`, then rename it; returns their number. All rows have the first one's
    columns, with values of the same kinds.

    Raises:
        DataError: the disk is full, or a row does not fit the first one's columns.
    """
    import pyarrow
    import pyarrow.parquet

    source = iter(rows)
    first = list(islice(source, 1))
    schema, as_json = _schema(first[0] if first else {})
    temporary = path.with_name(f".{path.name}.tmp")
    count = 0
    try:
        with pyarrow.parquet.ParquetWriter(temporary, schema) as writer:
            while chunk := [*first, *islice(source, ROWS_PER_GROUP - len(first))]:
                first = []
                plain = [_encoded(row, schema.names, as_json) for row in chunk]
                writer.write_table(pyarrow.Table.from_pylist(plain, schema=schema))
                count += len(chunk)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, pyarrow.ArrowException, UnicodeError, OverflowError) as error:
        temporary.unlink(missing_ok=True)
        raise cannot_write(
            DataError, path, error, "free some space or choose .jsonl, then run the command again"
        ) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return count


def read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    """Read the rows of a Parquet file, ours or not.

    Raises:
        ConfigError: pyarrow is missing.
        DataError: it is damaged.
    """
    with opened_parquet(path) as file:
        restored = restorer(file.schema_arrow, rendered=_RENDERED, source=str(path))
        for batch in file.iter_batches(batch_size=ROWS_PER_GROUP):
            yield from map(restored, batch.to_pylist())


def _schema(row: Mapping[str, Any]) -> tuple[Any, frozenset[str]]:
    """(schema, columns that hold JSON), from the names and, of prompt, the kind of its value."""
    import pyarrow as pa

    messages = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    types = {
        **dict.fromkeys(("index", "sample", "seed", "policy_version"), pa.int64()),
        **dict.fromkeys(("prompt_text", "completion", "finish_reason", "engine"), pa.string()),
        **dict.fromkeys(("prompt_token_ids", "token_ids"), pa.list_(pa.int32())),
        "logprobs": pa.list_(pa.float64()),
        "reward": pa.float64(),
        "messages": messages,
        "prompt": pa.string() if isinstance(row.get("prompt"), str) else messages,
    }
    fields = [(name, types.get(name, pa.string())) for name in row]
    as_json = sorted(name for name in row if name not in types)
    metadata = {JSON_COLUMNS: json.dumps(as_json).encode()}
    return pa.schema(fields, metadata=metadata), frozenset(as_json)


def _encoded(row: Mapping[str, Any], names: Iterable[str], as_json: frozenset[str]) -> dict[str, Any]:
    known = set(names)
    if unknown := sorted(set(row) - known):
        raise DataError(
            f"wrong-row: rows have different columns: {unknown} are not in the first row; write .jsonl"
        )
    for message in _messages(row):
        if more := sorted(set(message) - {"role", "content"}):
            raise DataError(
                f"wrong-row: a message has {', '.join(more)}, for which Parquet has no column; write .jsonl"
            )
    return {
        name: json.dumps(row[name]) if name in as_json and row.get(name) is not None else row.get(name)
        for name in known
    }


def _messages(row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for name in ("prompt", "messages"):
        if isinstance(row.get(name), list):
            yield from row[name]
