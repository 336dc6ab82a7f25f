"""`lockstep stop`: ask a run to save a checkpoint and exit, and wait for it.

lockstep stop runs/demo-20260101-120000
lockstep stop /data/runs/a --cluster http://head:8265
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lockstep.cli import arguments as values
from lockstep.observe.text import echo
from lockstep.ranks.watched_run import stop


def main(argv: Sequence[str]) -> int:
    """Exit status 0: the run has ended; 1: it has not in time."""
    arguments = _parser().parse_args(argv)
    if arguments.cluster is not None:
        from lockstep.cluster.jobs import Jobs

        job = Jobs(arguments.cluster).stop(str(arguments.run), seconds=arguments.timeout, say=_say)
        echo(job.text())
        return 0
    echo(stop(arguments.run, seconds=arguments.timeout, say=_say).text())
    return 0


def _say(text: str) -> None:
    echo(f"stop: {text}")


def _parser() -> argparse.ArgumentParser:
    parser = values.command_parser(
        "lockstep stop",
        "Ask a run on this machine to save a checkpoint and exit at its next step boundary, like Ctrl-C in "
        "the shell that started it. All its ranks end together.",
    )
    parser.add_argument("run", type=values.path, metavar="RUN_DIR", help="the run directory")
    flags = values.Flags(parser)
    flags.cluster()
    flags.value(
        "--timeout", values.above_zero, "how long to wait for the run to end", 600.0, metavar="SECONDS"
    )
    return parser
