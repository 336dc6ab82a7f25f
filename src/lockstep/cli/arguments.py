"""Shared by the argparse commands: values of flags, and where their results go."""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from lockstep.config.base import FilePath, Seconds, Seed
from lockstep.config.run import MAX_RANKS

MOST = 2**31 - 1
"""The largest value of a count."""
SMALLEST, LARGEST = 1e-30, 1e30
"""Limits of a number that is not a time, the same as for settings."""
_DIGITS = 400
"""Python refuses to read many more."""
_Value = TypeVar("_Value", int, float, Path)
_SEED: TypeAdapter[int] = TypeAdapter(Seed)
_SECONDS: TypeAdapter[float] = TypeAdapter(Seconds)
_PATH: TypeAdapter[Path] = TypeAdapter(FilePath)


def positive(text: str) -> int:
    """A whole number from 1 on. Raises ArgumentTypeError."""
    return _whole(text, least=1)


def count(text: str) -> int:
    """A whole number from 0 on. Raises ArgumentTypeError."""
    return _whole(text, least=0)


def seed(text: str) -> int:
    """A whole number from 0 on, of at most 63 bits. Raises ArgumentTypeError."""
    return _bounded(_SEED, _whole(text, least=0, most=None), text)


def ranks(text: str) -> int:
    """A number of processes. Raises ArgumentTypeError."""
    return _whole(text, least=1, most=MAX_RANKS)


def above_zero(text: str) -> float:
    """A number above 0, not infinite, that no use of it overflows. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is no number above 0")
    if not SMALLEST <= value <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not between {SMALLEST:g} and {LARGEST:g}")
    return value


def seconds(text: str) -> float:
    """A time to wait. Raises ArgumentTypeError."""
    return _bounded(_SECONDS, above_zero(text), text)


def path(text: str) -> Path:
    """A file or folder, which need not exist. Raises ArgumentTypeError: no file can have this name."""
    if text == "":
        raise argparse.ArgumentTypeError("'' is no name of a file or folder")
    return _bounded(_PATH, Path(text), text)


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


def _whole(text: str, *, least: int, most: int | None = MOST) -> int:
    digits = text.strip().lstrip("+")
    if not digits.isdecimal() or (len(digits) <= _DIGITS and int(digits) < least):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is no whole number of at least {least}")
    if len(digits) > _DIGITS or (most is not None and int(digits) > most):
        above = "" if most is None else f" than {most:,}"
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is more{above}, which no use of it could be")
    return int(digits)


def _bounded(kind: TypeAdapter[_Value], value: _Value, text: str) -> _Value:
    """`value`, if a setting of this type may have it."""
    try:
        return kind.validate_python(value)
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise argparse.ArgumentTypeError(f"{text[:80]!r}: {message}") from None


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add --cluster: the run is a job that `lockstep submit` started."""
    parser.add_argument(
        "--cluster",
        metavar="URL",
        help="ask the Ray cluster with this dashboard (http://HEAD:8265) about a run that was submitted to "
        "it, by its run directory or its job's id",
    )
