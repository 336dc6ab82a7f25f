"""Rows of samples as Parquet: known columns in their own types, free-form ones (`row`, ...) as JSON text."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from lockstep.data.sources import JSON_COLUMNS, opened_parquet, restorer
from lockstep.errors import DataError

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
        raise DataError(
            f"cannot-write: cannot write {path}: {error}. Make room, or choose .jsonl, and run it again"
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
            f"wrong-row: rows have different columns: {unknown} are not in the first row; write .jsonl",
            names=unknown,
        )
    for message in _messages(row):
        if more := sorted(set(message) - {"role", "content"}):
            raise DataError(
                f"wrong-row: a message has {', '.join(more)}, for which Parquet has no column; write .jsonl",
                names=more,
            )
    return {
        name: json.dumps(row[name]) if name in as_json and row.get(name) is not None else row.get(name)
        for name in known
    }


def _messages(row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for name in ("prompt", "messages"):
        if isinstance(row.get(name), list):
            yield from row[name]
