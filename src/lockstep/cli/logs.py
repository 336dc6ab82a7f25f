"""`lockstep logs`: print the end of a rank's log; --follow keeps following it.

lockstep logs runs/demo-20260101-120000
lockstep logs runs/demo-20260101-120000 --rank 1 --follow
lockstep logs /data/runs/a --cluster http://head:8265 --follow
"""

from __future__ import annotations

import argparse
import io
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from lockstep.cli import arguments as values
from lockstep.errors import ConfigError, DataError
from lockstep.observe.files import open_plain
from lockstep.observe.text import echo
from lockstep.ranks.watched_run import log_file, look

_POLL_SECONDS = 0.25


def main(argv: Sequence[str]) -> int:
    """Exit status 0; with --follow once the run has ended."""
    arguments = _parser().parse_args(argv)
    if arguments.cluster is not None:
        return _of_job(arguments)
    path = log_file(arguments.run, rank=arguments.rank)
    with (
        open_plain(path, DataError, root=arguments.run) as plain,
        io.TextIOWrapper(plain, encoding="utf-8", errors="replace") as file,
    ):
        for line in deque(file, maxlen=arguments.lines):
            echo(line.rstrip("\n"))
        if arguments.follow:
            _follow(file, arguments.run)
    return 0


def _of_job(arguments: argparse.Namespace) -> int:
    """Print the log of a submitted run's driver, which mirrors rank 0."""
    from lockstep.cluster.jobs import Jobs

    if arguments.rank:
        raise ConfigError(
            f"unsupported-combination: --rank {arguments.rank} with --cluster: the cluster keeps what rank 0 "
            "says; the logs of the others are in logs/ranks of the run directory"
        )
    jobs, name = Jobs(arguments.cluster), str(arguments.run)
    log = jobs.log(name)
    for line in log.splitlines()[-arguments.lines :]:
        echo(line)
    if arguments.follow:
        for text in jobs.follow(name, said=len(log)):
            echo(text, end="")
    return 0


def _follow(file: TextIO, run: Path) -> None:
    while True:
        # Asked before reading: a run that ends in between still has its last lines shown.
        running = look(run).state == "running"
        while line := file.readline():
            echo(line.rstrip("\n"))
        if not running:
            return
        time.sleep(_POLL_SECONDS)


def _parser() -> argparse.ArgumentParser:
    parser = values.command_parser(
        "lockstep logs",
        "Print the end of a rank's log. The output of libraries is under logs/ranks/ of the run.",
    )
    parser.add_argument("run", type=values.path, metavar="RUN_DIR", help="the run directory")
    flags = values.Flags(parser)
    flags.cluster()
    flags.value("--rank", values.count, "rank whose log to show", 0)
    flags.value("--lines", values.positive, "number of lines from the end", 40)
    flags.switch("--follow", "show new lines until the run ends")
    return parser
