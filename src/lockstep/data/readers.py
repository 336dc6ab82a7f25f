"""Readers of untrusted JSON lines and Parquet files: whatever they hold, the result is rows or a
DataError."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.common_errors import missing_package
from lockstep.errors import DataError, LockstepError
from lockstep.observe.text import printable

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

JSON_COLUMNS = b"lockstep.json_columns"
"""Key in the metadata of Parquet files of ours: names of the columns that hold JSON."""
_BUFFER_BYTES = 2**20
"""Buffer for reading a column; without it, a row group's whole column would be read at once."""
ROW_DEPTH = 200
"""Deepest nesting of lists and objects: functions that walk a row recurse once or twice a level."""


def parse_row(line: bytes, where: str) -> dict[str, Any]:
    """Parse one JSON object.

    Raises:
        DataError: it is no JSON, no object, or nested too deeply.
    """
    value = parse_value(line, where)
    if not isinstance(value, dict):
        raise DataError(
            f"wrong-row: {where}: a row must be a JSON object, got {type(value).__name__}: {line[:80]!r}"
        )
    return value


def parse_value(text: bytes, where: str) -> Any:
    """Parse any JSON value.

    Raises:
        DataError: it is no JSON, or nested too deeply.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # also bytes that are no text
        raise DataError(
            f"not-json: {where}: not valid JSON ({printable(str(error))}): {text[:80]!r}"
        ) from error
    if text.count(b"[") + text.count(b"{") > ROW_DEPTH and _deeper(value, ROW_DEPTH):
        raise DataError(
            f"too-deep: {where}: lists and objects are nested more than {ROW_DEPTH} deep; flatten them"
        )
    return value


def check_surrogates(value: Any, where: str) -> None:
    """Raise DataError for half a surrogate pair in a text of `value`: JSON may hold it, and no text may."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"not-text: {where}: holds half a surrogate pair ({error.object[error.start]!r}), which is not "
            "text; correct or remove the row"
        ) from error


@contextlib.contextmanager
def opened_parquet(path: Path) -> Iterator[ParquetFile]:
    """Open a Parquet file. Errors in the block count as errors of the file.

    Raises:
        ConfigError: pyarrow is missing.
        DataError: the file cannot be read, or is damaged.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise missing_package(f"{path}: reading Parquet", "pyarrow", extra="data", cause=error) from error
    errors = foreign_errors(f"{path}: not a readable Parquet file", pyarrow.ArrowException)
    with errors, pyarrow.parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES) as file:
        yield file


@contextlib.contextmanager
def foreign_errors(what: str, *more: type[Exception]) -> Iterator[None]:
    """Turn what a library raises over a damaged file into one DataError that begins with `what`.

    Flipped bits in a Parquet file alone give OSError, UnicodeDecodeError and five kinds of ArrowException.
    """
    kinds: tuple[type[Exception], ...] = (OSError, ValueError, TypeError, AttributeError, LookupError)
    kinds += (ArithmeticError, RuntimeError, MemoryError, *more)
    try:
        yield
    except LockstepError:
        raise
    except kinds as error:
        text = printable(str(error))[:300]
        raise DataError(f"cannot-read: {what} ({type(error).__name__}: {text})") from error


def restorer(
    schema: Any, *, rendered: Collection[str], source: str, decoded: bool = False
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that makes of a row that Arrow kept what it was before: in the columns `rendered`
    without the keys that Arrow adds, as nulls, because another row has them. Arrow does not tell those from
    nulls that were written, so that these go, too; values of its type for JSON keep theirs, and become what
    the JSON says. So do texts of columns that a Parquet file of ours says are JSON.

    Args:
        schema: the Arrow schema of the rows, which is read here once: for each row that would take longer
            than the row.
        decoded: values of Arrow's type for JSON are no text any more.

    Raises:
        DataError: a column that should hold JSON holds no text. The function raises it for a value that
            should be JSON and is none.
    """
    import pyarrow.types as types

    changes: dict[str, _Change] = {}
    for field in schema:
        how = _Kept(drop=field.name in rendered, decoded=decoded, where=f"{source}, {field.name}")
        if (change := _change(field.type, how)) is not None:
            changes[field.name] = change
    for name in json.loads((schema.metadata or {}).get(JSON_COLUMNS, b"[]")):
        if (position := schema.get_field_index(name)) < 0:
            continue  # what selects columns of our files keeps their metadata
        kind = schema.field(position).type
        if not (types.is_string(kind) or types.is_large_string(kind) or types.is_null(kind)):
            raise DataError(
                f"cannot-read: {source} says that its column {name!r} holds JSON, but its values are {kind}, "
                "not text"
            )
        changes[name] = _Kept(drop=False, decoded=False, where=f"{source}, {name}").parsed

    def restored(row: dict[str, Any]) -> dict[str, Any]:
        for name, change in changes.items():
            if (value := row.get(name)) is not None:
                row[name] = change(value)
        return row

    return restored


_Change = Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    """How to restore a column."""

    drop: bool
    """Nulls of objects."""
    decoded: bool
    where: str

    def parsed(self, value: Any) -> Any:
        return parse_value(value.encode(), self.where) if isinstance(value, str) else value


def _change(kind: Any, how: _Kept) -> _Change | None:
    """Return the function that restores a non-null value of this Arrow type; None: it needs no change."""
    import pyarrow.types as types

    if getattr(kind, "extension_name", "") == "arrow.json":
        return None if how.decoded else how.parsed
    if types.is_struct(kind):
        inside = {field.name: change for field in kind if (change := _change(field.type, how)) is not None}
        return partial(_object, inside, drop=how.drop) if inside or how.drop else None
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        item = _change(kind.value_type, how)
        return None if item is None else partial(_list, item)
    return None


def _object(inside: Mapping[str, _Change], value: Any, *, drop: bool) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        name: inside[name](item) if name in inside and item is not None else item
        for name, item in value.items()
        if not (drop and item is None)
    }


def _list(change: _Change, value: Any) -> Any:
    return [None if item is None else change(item) for item in value] if isinstance(value, list) else value


def _deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        level = [
            item
            for outer in level
            if isinstance(outer, dict | list)
            for item in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True
