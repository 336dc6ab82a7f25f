"""Shared by the argparse commands: flags, their values, and where results go."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from lockstep.config.base import FilePath, Seconds, Seed
from lockstep.config.run_config import MAX_RANKS
from lockstep.errors import ConfigError, nearest

MOST = 2**31 - 1
"""The largest value of a count."""
SMALLEST, LARGEST = 1e-30, 1e30
"""Limits of a number that is not a time, the same as for settings."""
MOST_NUMBERS = 10**7
"""The most numbers of one range."""
_DIGITS = 400
"""Python refuses to read many more."""
_Value = TypeVar("_Value", int, float, Path)
_Options = TypeVar("_Options")
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
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a number above 0")
    if not SMALLEST <= value <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not between {SMALLEST:g} and {LARGEST:g}")
    return value


def seconds(text: str) -> float:
    """A time to wait. Raises ArgumentTypeError."""
    return _bounded(_SECONDS, above_zero(text), text)


def path(text: str) -> Path:
    """A file or folder, which need not exist. Raises ArgumentTypeError: no file can have this name."""
    if text == "":
        raise argparse.ArgumentTypeError("'' is not the name of a file or folder")
    return _bounded(_PATH, Path(text), text)


def steps(text: str) -> tuple[int | None, int | None]:
    """ "A:B", either of which may be missing: steps from A on, below B. Raises ArgumentTypeError."""
    first, colon, last = text.partition(":")
    if not colon or any(part and not part.isdecimal() for part in (first, last)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of steps, such as 10:20, 10: or :20")
    return int(first) if first else None, int(last) if last else None


def numbers(text: str) -> tuple[int, ...]:
    """Numbers and ranges such as "3,7,10-20", in this order. Raises ArgumentTypeError."""
    listed: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a list of numbers such as 3,7,10-20")
        low, high = int(first), int(last) if dash else int(first)
        if not low <= high < low + MOST_NUMBERS:
            raise argparse.ArgumentTypeError(f"{part[:80]!r} is not a range of numbers such as 10-20")
        listed += range(low, high + 1)
    return tuple(listed)


def default_out(command: str) -> Path:
    """runs/COMMAND-TIMESTAMP, with a number when two start in one second."""
    name = time.strftime(f"{command}-%Y%m%d-%H%M%S")
    candidates = (Path("runs", name if n == 0 else f"{name}-{n}") for n in range(1000))
    return next(path for path in candidates if not path.exists())


def options(kind: type[_Options], args: argparse.Namespace, **others: Any) -> _Options:
    """A record of options: a field is from `others`, else from the flag of its name, else its default."""
    names = kind.model_fields if issubclass(kind, BaseModel) else kind.__dataclass_fields__  # type: ignore[attr-defined]
    same = {name: getattr(args, name) for name in names if hasattr(args, name)}
    return kind(**same | others)


def pair(flag: str, word: str, *, example: str) -> tuple[str, str]:
    """The two parts of NAME=VALUE. Raises ConfigError."""
    name, equals, value = word.partition("=")
    if not equals or not name:
        raise ConfigError(f"wrong-format: {flag} {word!r}: write NAME=VALUE, such as {example}")
    return name, value


def leading_word(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split (word, flags): what the command is about, such as a file, comes before all flags."""
    words = list(argv)
    if words and not words[0].startswith("-"):
        return words[0], words[1:]
    return None, words


def nothing(_: str) -> None:
    """Says nothing, for --quiet."""


def _whole(text: str, *, least: int, most: int | None = MOST) -> int:
    digits = text.strip().lstrip("+")
    if not digits.isdecimal() or (len(digits) <= _DIGITS and int(digits) < least):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a whole number of at least {least}")
    if len(digits) > _DIGITS or (most is not None and int(digits) > most):
        maximum = "" if most is None else f"; the maximum is {most:,}"
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is too large{maximum}")
    return int(digits)


def _bounded(kind: TypeAdapter[_Value], value: _Value, text: str) -> _Value:
    """`value`, if a setting of this type may have it."""
    try:
        return kind.validate_python(value)
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise argparse.ArgumentTypeError(f"{text[:80]!r}: {message}") from None


METAVARS: dict[Callable[[str], Any], str] = {
    **dict.fromkeys((positive, count, seed, ranks), "N"),
    above_zero: "X",
    seconds: "SECONDS",
    path: "FILE",
    steps: "A:B",
    numbers: "LIST",
}
"""The placeholder of a value of this kind in the help."""


class _Parser(argparse.ArgumentParser):
    """Names the nearest flags in the error about an unknown one."""

    def error(self, message: str) -> NoReturn:
        """See ArgumentParser."""
        _, unknown, words = message.partition("unrecognized arguments: ")
        if unknown:
            near = [
                each
                for word in words.split()
                if word.startswith("--")
                for each in nearest(word.partition("=")[0], self._option_string_actions)
            ]
            message += f"; did you mean {' or '.join(near)}?" if near else ""
        super().error(message)


def command_parser(prog: str, description: str | None, **more: Any) -> argparse.ArgumentParser:
    """A parser that takes no abbreviated flags; a description of several lines is shown as it is."""
    lines = description is not None and "\n" in description
    shape = argparse.RawDescriptionHelpFormatter if lines else argparse.HelpFormatter
    return _Parser(prog=prog, description=description, formatter_class=shape, allow_abbrev=False, **more)


class Flags:
    """The flags of a parser, or of a group with a title; a default is shown behind the help."""

    def __init__(self, parser: argparse.ArgumentParser, title: str | None = None) -> None:
        self._group = parser if title is None else parser.add_argument_group(title)

    def value(
        self,
        flag: str,
        kind: Callable[[str], Any] | str,
        text: str = "",
        default: Any = None,
        *,
        metavar: str | None = None,
    ) -> None:
        """A flag with a value, which `kind` reads; a word as `kind` stands for any text in the help."""
        read, shown = (str, kind) if isinstance(kind, str) else (kind, metavar or METAVARS[kind])
        text = _with_default(text, default)
        self._group.add_argument(flag, type=read, default=default, metavar=shown, help=text)

    def choice(self, flag: str, choices: Sequence[Any], text: str = "", default: Any = None) -> None:
        """A flag with one of some values, all of the same type."""
        kind = type(choices[0])
        self._group.add_argument(
            flag, type=kind, choices=choices, default=default, help=_with_default(text, default)
        )

    def many(self, flag: str, metavar: str, text: str) -> None:
        """A flag that may be given several times: a list of texts."""
        self._group.add_argument(flag, action="append", default=[], metavar=metavar, help=text)

    def switch(self, flag: str, text: str) -> None:
        """A flag without a value: True if it is given."""
        self._group.add_argument(flag, action="store_true", help=text)

    def on_off(self, flag: str, text: str, default: bool | None = None) -> None:
        """--FLAG and --no-FLAG."""
        self._group.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=text)

    def cluster(self) -> None:
        """--cluster: the run is a job that `lockstep submit` started."""
        self.value(
            "--cluster",
            "URL",
            "dashboard of the Ray cluster (http://HEAD:8265) to which the run was submitted; name the run "
            "by its run directory or by its job id",
        )

    def results(self, command: str, json: str = "also write the result to this file") -> None:
        """--out, --json and --quiet of a command that writes a folder of results."""
        self.value("--out", path, f"new folder (runs/{command}-TIME)", metavar="DIR")
        self.value("--json", path, json)
        self.switch("--quiet", "print only the verdict")


def _with_default(text: str, default: Any) -> str:
    if default is None or default == "":
        return text
    shown = f"{default:g}" if isinstance(default, float) else default
    return f"{text} ({shown})".lstrip()
