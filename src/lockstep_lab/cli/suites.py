"""The end of every command that runs a suite of the lab: reports, the verdict and the exit status."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from lockstep.errors import ConfigError, unknown_name
from lockstep.observe.files import write_json
from lockstep.observe.text import echo

if TYPE_CHECKING:
    from lockstep.observe.console import PlainConsole
    from lockstep_lab.matrix.result import MatrixResult
    from lockstep_lab.suite.report import Report
    from lockstep_lab.suite.result import SuiteResult


Commands = Mapping[str, tuple[str, Callable[[Sequence[str]], int]]]
"""Command -> a line of help, and what runs it."""


def run_command(name: str, about: str | None, commands: Commands, argv: Sequence[str]) -> int:
    """Run one of the commands of `lockstep NAME`, or list them; return the exit status.

    Raises:
        ConfigError: there is no such command.
    """
    if not argv or argv[0] in ("-h", "--help"):
        lines = "\n".join(f"  {command:<8} {text}" for command, (text, _) in commands.items())
        echo(f"usage: lockstep {name} COMMAND [OPTIONS]\n\n{about}\ncommands:\n{lines}")
        return 0 if argv else 2
    command, *rest = argv
    if command not in commands:
        raise ConfigError(unknown_name(f"command of lockstep {name}", command, commands), code="unknown-name")
    return commands[command][1](rest)


def conclude(result: SuiteResult | MatrixResult, report: Report, args: argparse.Namespace, files: str) -> int:
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
