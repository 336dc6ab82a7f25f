"""Lossless conversion of data rows to JSON and back: verifiers use tuples and integer keys, rewards dates and
bytes, which JSON lacks."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

from lockstep.errors import DataError

_TUPLE = "$tuple"
_ITEMS = "$items"
_AS_TEXT: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "$bytes": (bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
    "$datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "$date": (date, date.isoformat, date.fromisoformat),
    "$time": (time, time.isoformat, time.fromisoformat),
    "$decimal": (Decimal, str, Decimal),
}
"""Further types of parquet columns. A datetime is a date too, so it comes first."""
_TAGS = {_TUPLE, _ITEMS, *_AS_TEXT}


def encoded(value: Any, where: str) -> Any:
    """Convert a value to JSON's types; `decoded` restores it.

    Raises:
        DataError: it holds anything but numbers, texts, lists, tuples, mappings, bytes, dates and times.

    Example:
        >>> encoded({"edges": [(0, 1)], "colours": {3: "red"}}, "row 0")
        {'edges': [{'$tuple': [0, 1]}], 'colours': {'$items': [[3, 'red']]}}
    """
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)  # also numpy's, which are subclasses
    if isinstance(value, list):
        return [encoded(item, where) for item in value]
    if isinstance(value, tuple):
        return {_TUPLE: [encoded(item, where) for item in value]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and not _TAGS & value.keys():
            return {str(key): encoded(item, f"{where}.{key}") for key, item in value.items()}
        return {_ITEMS: [[encoded(key, where), encoded(item, where)] for key, item in value.items()]}
    for tag, (known, text, _) in _AS_TEXT.items():
        if isinstance(value, known):
            return {tag: text(value)}
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return encoded(value.item(), where)
    raise DataError(
        f"wrong-type: {where}: {value!r:.80} ({type(value).__name__}) cannot be written as JSON; make it a "
        "number, a text or a list in the data, or leave the column out",
        where=where,
    )


def decoded(value: Any, where: str) -> Any:
    """Restore a value that `encoded` converted.

    Raises:
        DataError: `encoded` never returns this, as in a file that was edited.
    """
    if isinstance(value, list):
        return [decoded(item, where) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value)) if len(value) == 1 else None
    if tag not in _TAGS:
        return {key: decoded(item, where) for key, item in value.items()}
    try:
        if tag == _TUPLE:
            return tuple(decoded(item, where) for item in value[_TUPLE])
        if tag == _ITEMS:
            return {decoded(key, where): decoded(item, where) for key, item in value[_ITEMS]}
        return _AS_TEXT[tag][2](value[tag])
    except (ValueError, TypeError, ArithmeticError) as error:
        raise DataError(
            f"wrong-row: {where}: {value!r:.80} is not what {tag} stands for: {error}", where=where
        ) from error
