"""`lockstep hang`: explain, from another shell, why a run makes no progress.

lockstep hang runs/demo-20260101-120000
lockstep hang runs/demo-20260101-120000 --json hang.json
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lockstep.cli import arguments as values
from lockstep.observe.files import check_writable, write_json
from lockstep.observe.text import echo
from lockstep.ranks.hang import find_records
from lockstep.ranks.watchdog import PROGRESS, SECONDS, examine_twice, name_recording


def main(argv: Sequence[str]) -> int:
    """Exit status 0: the report is about the run as it is."""
    arguments = _parser().parse_args(argv)
    check_writable(arguments.json)
    report = examine_twice(
        find_records(arguments.run), seconds=arguments.seconds, stacks=not arguments.no_stacks
    )
    if report.cause != PROGRESS:
        report = name_recording(report)
    echo(report.text())
    if arguments.json is not None:
        write_json(arguments.json, report.as_dict())
    who = ", ".join(map(str, report.culprits))
    cause = "none, the run makes progress" if report.cause == PROGRESS else report.cause
    echo(f"hang: {cause}" + (f", rank {who}" if who else ""))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = values.command_parser(
        "lockstep hang",
        "Report what every rank of a run is doing: its phase, its last collective, its stack. The run may be "
        "running, hanging, stopped or finished; it is not disturbed. Running ranks are checked twice: a rank "
        "that made progress in between does not hang.",
    )
    parser.add_argument("run", type=values.path, metavar="RUN_DIR", help="the run directory")
    flags = values.Flags(parser)
    flags.value("--seconds", values.above_zero, "time between the two checks", SECONDS, metavar="SECONDS")
    flags.switch("--no-stacks", "send no signal to the ranks")
    flags.value("--json", values.path, "write the report to this file")
    return parser
