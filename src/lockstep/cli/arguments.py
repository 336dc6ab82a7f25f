"""What the argparse commands have in common: values of flags, and where their results go."""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path


def positive(text: str) -> int:
    """A whole number from 1 on. Raises ArgumentTypeError."""
    return _whole(text, least=1)


def count(text: str) -> int:
    """A whole number from 0 on. Raises ArgumentTypeError."""
    return _whole(text, least=0)


def above_zero(text: str) -> float:
    """A number above 0, not infinite. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def steps(text: str) -> tuple[int | None, int | None]:
    """ "A:B", either of which may be missing: steps from A on, below B. Raises ArgumentTypeError."""
    first, colon, last = text.partition(":")
    if not colon or any(part and not part.isdecimal() for part in (first, last)):
        raise argparse.ArgumentTypeError(f"{text!r} is no range of steps; write it like 10:20, 10: or :20")
    return int(first) if first else None, int(last) if last else None


def default_out(command: str) -> Path:
    """runs/COMMAND-TIMESTAMP, with a number when two start in one second."""
    name = time.strftime(f"{command}-%Y%m%d-%H%M%S")
    candidates = (Path("runs", name if n == 0 else f"{name}-{n}") for n in range(1000))
    return next(path for path in candidates if not path.exists())


def nothing(_: str) -> None:
    """Says nothing, for --quiet."""


def _whole(text: str, *, least: int) -> int:
    if not text.strip().lstrip("+").isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
    return int(text)
