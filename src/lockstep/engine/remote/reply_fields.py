"""Typed, bounded fields of a server's reply: a server is not trusted to send what it should.

Each function returns the field's value, or raises ValueError with the field's name. Callers add which reply
it was. `bool` is no number here, although it is one in Python, and 7.0 is no token id.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MOST = 2**53
"""Largest whole number in a reply: a float still holds it exactly."""


def mapping(value: Any, name: str) -> Mapping[str, Any]:
    """Return a JSON object."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {_preview(value)}, not an object")
    return value


def whole(value: Any, name: str, *, least: int = 0, most: int = MOST) -> int:
    """Return an integer from `least` to `most`."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {_preview(value)}, not a whole number from {least} to {most}")
    return value


def number(value: Any, name: str) -> float:
    """Return a finite number as a float."""
    try:
        result = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise ValueError(f"{name} is {_preview(value)}, not a finite number")
    return result


def token_ids(value: Any, name: str) -> list[int]:
    """Return a list of integers of at least 0; `check_sample` compares them with the vocabulary."""
    if not isinstance(value, list) or set(map(type, value)) - {int} or (value and min(value) < 0):
        raise ValueError(f"{name} is {_preview(value)}, not a list of token ids")
    return value


def logprobs(value: Any, name: str) -> list[float]:
    """Return a list of floats; null, which JSON has for what is not finite, is NaN."""
    if not isinstance(value, list) or set(map(type, value)) - {int, float, type(None)}:
        raise ValueError(f"{name} is {_preview(value)}, not a list of numbers")
    try:
        return [math.nan if entry is None else float(entry) for entry in value]
    except OverflowError as error:
        raise ValueError(f"{name} holds a number that is too large for a float") from error


def _preview(value: Any) -> str:
    text = ascii(value)  # a lone surrogate must not reach a terminal
    return text if len(text) <= 80 else text[:80] + "..."
