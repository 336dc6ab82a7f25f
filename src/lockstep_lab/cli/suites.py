"""The end of every command that runs a suite of the lab: reports, the verdict and the exit status."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.observe.files import write_json
from lockstep.observe.text import echo

if TYPE_CHECKING:
    from lockstep.observe.console import PlainConsole
    from lockstep_lab.suite.report import Report


class Result(Protocol):
    """What every suite ends with."""

    @property
    def complete(self) -> bool: ...

    @property
    def ok(self) -> bool: ...

    @property
    def verdict(self) -> str: ...

    def as_dict(self) -> dict[str, Any]: ...


def conclude(result: Result, report: Report, args: argparse.Namespace, files: str) -> int:
    """Show the report unless --quiet, write --json, print the verdict.

    Args:
        files: what the suite has written, as the terminal names it.

    Returns:
        The exit status: 0 if `result.ok`, 130 if Ctrl-C ended it, else 1.
    """
    if not args.quiet:
        from lockstep_lab.suite.report import show

        show(report, console())
        echo(files)
    if args.json is not None:
        write_json(args.json, result.as_dict())
    echo(result.verdict)
    return 0 if result.ok else 1 if result.complete else 130


def console() -> PlainConsole:
    """A console as wide as the terminal, or as a page."""
    from lockstep.observe.console import PlainConsole
    from lockstep_lab.suite.report import WIDTH

    return PlainConsole(width=WIDTH)


def say(text: str) -> None:
    """Print a line about the progress at once."""
    echo(text, flush=True)
