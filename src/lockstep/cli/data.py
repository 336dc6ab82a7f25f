"""`lockstep data check`: check every row of a run's data before the run.

lockstep data check run.toml
lockstep data check sft --model.name MODEL --data.source conversations.jsonl --workers 8
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import tyro

from lockstep.cli.flags import parse_run
from lockstep.config.load import recipes
from lockstep.config.run import RunConfig
from lockstep.errors import ConfigError, unknown_name
from lockstep.observe.files import check_writable, write_json
from lockstep.observe.text import echo, printable

if TYPE_CHECKING:
    from lockstep.loop.data_check import SetReport

USAGE = """usage: lockstep data check RUN.toml [OPTIONS]
       lockstep data check grpo|ppo|sft|dpo|rm [OPTIONS]
       lockstep data check --recipe NAME [OPTIONS]

Recipes: {recipes}
Renders and tokenises every row as the run would, and prints how many are trained on, how long they are, and
which are at fault. A run on the same data finds the result, and knows from the start which rows it leaves
out. Every setting of the run is also a flag. The exit status is 1 if a row is at fault and data.on_bad_row =
"fail"."""
_HELP = ("-h", "--help")
_SHOWN = 20
"""Rows at fault that are printed; --json has more."""


class General(TypedDict):
    """Flags of `lockstep data check` that are not settings of the run."""

    recipe: Annotated[str | None, tyro.conf.arg(help="Check the data of this recipe.", metavar="NAME")]
    json: Annotated[Path | None, tyro.conf.arg(help="Write the result to this file.", metavar="FILE")]
    workers: Annotated[
        int | None,
        tyro.conf.arg(help="Number of processes. By default one per CPU core.", metavar="N"),
    ]
    quiet: Annotated[bool, tyro.conf.arg(help="Show no progress.")]


def main(argv: Sequence[str]) -> int:
    """Print what the rows become; 0 when a run would take them.

    Raises:
        ConfigError: a setting is wrong.
        DataError: a source cannot be read.
    """
    if not argv or argv[0] in _HELP or (argv[0] == "check" and argv[1:2] and argv[1] in _HELP):
        echo(USAGE.format(recipes=", ".join(recipes()) or "none"))
        return 0 if argv else 2
    if argv[0] != "check":
        raise ConfigError(unknown_name("command of lockstep data", argv[0], ["check"]), code="unknown-name")
    run, general = parse(argv[1:])
    check_writable(general["json"])
    workers = general["workers"] or len(os.sched_getaffinity(0))
    if workers < 1:
        raise ConfigError(f"out-of-range: --workers {workers}: must be at least 1")
    from lockstep.cli.batch_common import Rows
    from lockstep.loop.data_check import check_data
    from lockstep.models.architectures import silence_transformers

    with silence_transformers(), Rows("data check", quiet=general["quiet"]) as progress:
        reports = check_data(run, workers=workers, progress=progress)
    for report in reports:
        show(report)
    if general["json"] is not None:
        write_json(general["json"], [dataclasses.asdict(report) for report in reports])
    refused = any(report.bad and getattr(run, report.section).on_bad_row == "fail" for report in reports)
    return 1 if refused else 0


def parse(argv: Sequence[str]) -> tuple[RunConfig, dict[str, Any]]:
    """Return the checked run and the values of General. Raises ConfigError."""
    return parse_run(
        argv,
        general=General,
        command="lockstep data check",
        verb="check",
        description="Check every row of a run's data.",
    )


def show(report: SetReport) -> None:
    """Print one section's result."""
    speed = f"{report.rows / report.seconds:,.0f} rows/s" if report.seconds else ""
    echo(f"{report.section}: {report.rows:,} rows of {report.source} in {report.seconds:.1f} s ({speed})")
    lengths = ", ".join(f"{name} {tokens:,}" for name, tokens in report.lengths.items())
    trained = f", {report.trained_tokens:,} of them trained on" if report.trained_tokens else ""
    echo(f"  kept: {report.kept:,}, with {report.tokens:,} tokens{trained}; tokens of one: {lengths}")
    if report.truncated:
        echo(f"  truncated: {report.truncated:,}")
    for reason, count in report.left_out.items():
        echo(f"  left out: {count:,} {reason.replace('_', ' ')}")
    for message in report.bad[:_SHOWN]:
        echo(f"    {printable(message)}")
    for note in report.notes:
        echo(f"  {note}")
    if report.kept_in is not None:
        echo(f"  a run on the same data finds this in {report.kept_in}")
