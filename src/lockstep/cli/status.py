"""`lockstep status`: show, from another shell, whether a run is alive and what it is doing.

lockstep status runs/demo-20260101-120000
lockstep status runs/* --json status.json
lockstep status runs/demo-20260101-120000 --ledger
lockstep status --cluster http://head:8265
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from lockstep.cli import arguments as values
from lockstep.errors import ConfigError
from lockstep.observe.files import check_writable, write_json
from lockstep.observe.ledger import check_ledger
from lockstep.observe.text import echo
from lockstep.ranks.watched_run import look


def main(argv: Sequence[str]) -> int:
    """Exit status 0, whatever the state of the runs; 1 if --ledger found a problem."""
    arguments = _parser().parse_args(argv)
    good = True
    check_writable(arguments.json)
    if arguments.cluster is not None:
        from lockstep.cluster.jobs import Jobs

        jobs = Jobs(arguments.cluster)
        found = [jobs.find(str(name)) for name in arguments.run] or jobs.all()
        if not found:
            echo(f"no runs were submitted to {arguments.cluster}")
        texts, values_of = [job.text() for job in found], [dataclasses.asdict(job) for job in found]
    elif arguments.run:
        looks = [look(run) for run in arguments.run]
        texts, values_of = [one.text() for one in looks], [one.as_dict() for one in looks]
        if arguments.ledger:
            checks = [check_ledger(run) for run in arguments.run]
            texts = [f"{text}\n{check.text()}" for text, check in zip(texts, checks, strict=True)]
            values_of = [
                value | {"ledger": check.as_dict()} for value, check in zip(values_of, checks, strict=True)
            ]
            good = not any(check.problems for check in checks)
    else:
        raise ConfigError(
            "missing-setting: status of what? name run directories, or --cluster http://HEAD:8265"
        )
    for line in texts:
        echo(line)
    if arguments.json is not None:
        write_json(arguments.json, values_of)
    return 0 if good else 1


def _parser() -> argparse.ArgumentParser:
    parser = values.command_parser(
        "lockstep status",
        "Show whether runs are alive, how many steps are done, and what each rank is doing. Only the run "
        "directory is read; the run is not disturbed.",
    )
    parser.add_argument("run", type=values.path, nargs="*", metavar="RUN_DIR", help="run directories")
    flags = values.Flags(parser)
    flags.cluster()
    flags.switch("--ledger", "also check ledger.jsonl; exit status 1 if samples were lost or trained twice")
    flags.value("--json", values.path, "write the status to this file")
    return parser
