"""Readers of untrusted JSON lines and Parquet files: whatever they hold, the result is rows or a
DataError."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import ConfigError, DataError, LockstepError
from lockstep.observe.text import printable

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

JSON_COLUMNS = b"lockstep.json_columns"
"""Key in the metadata of Parquet files of ours: names of the columns that hold JSON."""
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
            f"{where}: a row must be a JSON object, got {type(value).__name__}: {line[:80]!r}",
            code="wrong-row",
            where=where,
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
            f"{where}: not valid JSON ({printable(str(error))}): {text[:80]!r}", code="not-json", where=where
        ) from error
    if text.count(b"[") + text.count(b"{") > ROW_DEPTH and _deeper(value, ROW_DEPTH):
        raise DataError(
            f"{where}: lists and objects are nested more than {ROW_DEPTH} deep; flatten them",
            code="too-deep",
            where=where,
        )
    return value


def check_surrogates(value: Any, where: str) -> None:
    """Raise DataError for half a surrogate pair in a text of `value`: JSON may hold it, and no text may."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: holds half a surrogate pair ({error.object[error.start]!r}), which is not text; "
            "correct or remove the row",
            code="not-text",
            where=where,
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
        raise ConfigError(
            f"{path}: reading Parquet needs pyarrow; pip install pyarrow", code="missing-package"
        ) from error
    errors = foreign_errors(f"{path}: not a readable Parquet file", pyarrow.ArrowException)
    with errors, pyarrow.parquet.ParquetFile(path) as file:
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
        raise DataError(f"{what} ({type(error).__name__}: {text})", code="cannot-read") from error


def restored(
    row: Mapping[str, Any], schema: Any, *, rendered: Collection[str], where: str, decoded: bool = False
) -> dict[str, Any]:
    """Return a row that Arrow kept as it was before: in the columns `rendered`, without the keys that Arrow
    adds, as nulls, because another row has them. Arrow does not tell those from nulls that were written, so
    that these go, too; values of its type for JSON keep theirs, and become what the JSON says.

    Args:
        schema: the Arrow schema of the row.
        decoded: values of JSON are no text any more.

    Raises:
        DataError: a value of the type for JSON is no JSON.
    """
    result = dict(row)
    for name, value in row.items():
        if value is not None and (position := schema.get_field_index(name)) >= 0:
            kind = schema.field(position).type
            result[name] = _restored(value, kind, f"{where}, {name}", (name in rendered, decoded))
    return result


def with_json(row: Mapping[str, Any], schema: Any, *, where: str) -> dict[str, Any]:
    """Return a row of a Parquet file, with the columns parsed that ours say are JSON.

    Raises:
        DataError: one of them is no JSON.
    """
    result = dict(row)
    for name in json.loads((schema.metadata or {}).get(JSON_COLUMNS, b"[]")):
        if result[name] is not None:
            result[name] = parse_value(result[name].encode(), where)
    return result


def _restored(value: Any, kind: Any, where: str, how: tuple[bool, bool]) -> Any:
    import pyarrow.types as types

    drop, decoded = how
    if isinstance(value, str):
        is_json = not decoded and getattr(kind, "extension_name", "") == "arrow.json"
        return parse_value(value.encode(), where) if is_json else value
    if isinstance(value, dict) and types.is_struct(kind):
        return {
            field.name: _restored(value[field.name], field.type, where, how)
            for field in kind
            if field.name in value and not (drop and value[field.name] is None)
        }
    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if isinstance(value, list) and lists:
        return [_restored(item, kind.value_type, where, how) for item in value]
    return value


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
