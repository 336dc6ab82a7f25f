"""Data rows as JSON and back, unchanged: verifiers look at tuples and at integer keys, which JSON has not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.errors import DataError

_TUPLE = "$tuple"
_ITEMS = "$items"


def encoded(value: Any, where: str) -> Any:
    """The value in JSON's types; `decoded` gives it back.

    Raises:
        DataError: it holds something else than numbers, texts, lists, tuples and mappings.

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
        if all(isinstance(key, str) for key in value) and not {_TUPLE, _ITEMS} & value.keys():
            return {str(key): encoded(item, f"{where}.{key}") for key, item in value.items()}
        return {_ITEMS: [[encoded(key, where), encoded(item, where)] for key, item in value.items()]}
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return encoded(value.item(), where)
    raise DataError(
        f"{where}: {value!r:.80} ({type(value).__name__}) cannot be kept in a file of samples; make it a "
        "number, a text or a list in the data, or leave the column out"
    )


def decoded(value: Any) -> Any:
    """What `encoded` was given."""
    if isinstance(value, list):
        return [decoded(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {_TUPLE}:
            return tuple(decoded(item) for item in value[_TUPLE])
        if value.keys() == {_ITEMS}:
            return {decoded(key): decoded(item) for key, item in value[_ITEMS]}
        return {key: decoded(item) for key, item in value.items()}
    return value
