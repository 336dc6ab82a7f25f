"""Commands about a run from another shell: `lockstep status`, `stop`, `logs` and `hang`.

lockstep status runs/demo-20260101-120000
lockstep status runs/* --json status.json
lockstep status runs/demo-20260101-120000 --ledger
lockstep status --cluster http://head:8265
lockstep stop runs/demo-20260101-120000
lockstep stop /data/runs/a --cluster http://head:8265
lockstep logs runs/demo-20260101-120000
lockstep logs runs/demo-20260101-120000 --rank 1 --follow
lockstep logs /data/runs/a --cluster http://head:8265 --follow
lockstep hang runs/demo-20260101-120000
lockstep hang runs/demo-20260101-120000 --json hang.json

Everything is read from the run directory, so it does not matter who started the run or whether that process
is still alive. Loads no torch.
"""

from __future__ import annotations

import argparse
import io
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from lockstep.cli import arguments as values
from lockstep.errors import ConfigError, DataError, TrainError
from lockstep.observe.files import check_writable, open_plain, write_json
from lockstep.observe.lock import holding
from lockstep.observe.metrics import check_ledger
from lockstep.observe.run_history import read_summary
from lockstep.observe.text import echo
from lockstep.ranks.hang import find_records
from lockstep.ranks.watchdog import PROGRESS, SECONDS, examine_twice, name_recording
from lockstep.view.look import RunLook, look, rank_lines, run_owner, run_state

_POLL_SECONDS = 0.1
_LOG_POLL_SECONDS = 0.25


def status(argv: Sequence[str]) -> int:
    """Run `lockstep status`. Exit status 0, whatever the state of the runs; 1 if --ledger found a problem."""
    arguments = _status_parser().parse_args(argv)
    good = True
    check_writable(arguments.json)
    if arguments.cluster is not None:
        from lockstep.cluster.jobs import Jobs

        jobs = Jobs(arguments.cluster)
        found = [jobs.find(str(name)) for name in arguments.run] or jobs.all()
        if not found:
            echo(f"no runs were submitted to {arguments.cluster}")
        texts, values_of = [job.text() for job in found], [asdict(job) for job in found]
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
            "missing-setting: no run was given; give a run directory, or pass --cluster http://HEAD:8265"
        )
    for line in texts:
        echo(line)
    if arguments.json is not None:
        write_json(arguments.json, values_of)
    return 0 if good else 1


def _status_parser() -> argparse.ArgumentParser:
    parser = values.command_parser(
        "lockstep status",
        "Show whether runs are alive, how many steps they have done, and what each rank is doing. This only "
        "reads the run directory and does not disturb the run.",
    )
    parser.add_argument("run", type=values.path, nargs="*", metavar="RUN_DIR", help="run directories")
    flags = values.Flags(parser)
    flags.cluster()
    flags.switch(
        "--ledger", "also check ledger.jsonl; exit status 1 if samples were lost or trained on twice"
    )
    flags.value("--json", values.path, "write the status to this file")
    return parser


def stop(argv: Sequence[str]) -> int:
    """Run `lockstep stop`. Exit status 0: the run has ended; 1: it has not in time."""
    arguments = _stop_parser().parse_args(argv)
    if arguments.cluster is not None:
        from lockstep.cluster.jobs import Jobs

        job = Jobs(arguments.cluster).stop(str(arguments.run), seconds=arguments.timeout, say=_say)
        echo(job.text())
        return 0
    echo(stop_run(arguments.run, seconds=arguments.timeout, say=_say).text())
    return 0


def _say(text: str) -> None:
    echo(f"stop: {text}")


def _stop_parser() -> argparse.ArgumentParser:
    parser = values.command_parser(
        "lockstep stop",
        "Ask a run on this machine to save a checkpoint and exit at its next step boundary, like Ctrl-C in "
        "the shell that started it. All its ranks end together.",
    )
    parser.add_argument("run", type=values.path, metavar="RUN_DIR", help="the run directory")
    flags = values.Flags(parser)
    flags.cluster()
    flags.value(
        "--timeout", values.above_zero, "how long to wait until the run has ended", 600.0, metavar="SECONDS"
    )
    return parser


def logs(argv: Sequence[str]) -> int:
    """Run `lockstep logs`. Exit status 0; with --follow once the run has ended."""
    arguments = _logs_parser().parse_args(argv)
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
            f"unsupported-combination: --rank {arguments.rank} with --cluster: the cluster keeps only the "
            "log of rank 0; the logs of the other ranks are in logs/ranks of the run directory"
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
        time.sleep(_LOG_POLL_SECONDS)


def _logs_parser() -> argparse.ArgumentParser:
    parser = values.command_parser(
        "lockstep logs",
        "Print the end of a rank's log. The output of libraries is in logs/ranks/ of the run directory.",
    )
    parser.add_argument("run", type=values.path, metavar="RUN_DIR", help="the run directory")
    flags = values.Flags(parser)
    flags.cluster()
    flags.value("--rank", values.count, "rank whose log to show", 0)
    flags.value("--lines", values.positive, "number of lines from the end", 40)
    flags.switch("--follow", "show new lines until the run ends")
    return parser


def hang(argv: Sequence[str]) -> int:
    """Run `lockstep hang`. Exit status 0: the report is about the run as it is."""
    arguments = _hang_parser().parse_args(argv)
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


def _hang_parser() -> argparse.ArgumentParser:
    parser = values.command_parser(
        "lockstep hang",
        "Report what every rank of a run is doing: its phase, its last collective and its stack. The run may "
        "be running, hanging, stopped or finished, and is not disturbed. Running ranks are checked twice. A "
        "rank that makes progress in between is not hanging.",
    )
    parser.add_argument("run", type=values.path, metavar="RUN_DIR", help="the run directory")
    flags = values.Flags(parser)
    flags.value("--seconds", values.above_zero, "time between the two checks", SECONDS, metavar="SECONDS")
    flags.switch("--no-stacks", "do not send the ranks a signal to get their stacks")
    flags.value("--json", values.path, "write the report to this file")
    return parser


# How a run is stopped, and where its logs are.


def stop_run(run: Path, *, seconds: float, say: Callable[[str], None]) -> RunLook:
    """Ask a run to save and end, as Ctrl-C does, and wait until it has; return what became of it.

    Args:
        seconds: the deadline.
        say: called with what happens.

    Raises:
        DataError: there is no run in the folder, or none that runs on this machine.
        TrainError: it has not ended in time, and goes on ending.
    """
    owner = run_owner(run)
    state, where = run_state(run, owner, read_summary(run / "summary.json") or {})
    if owner is None or state != "running":
        raise DataError(
            f"wrong-state: {run}: there is nothing to stop; the run is {state}"
            + (f": {where}; run the command there" if state == "elsewhere" else "")
        )
    with holding(run / "lock", pid=owner.pid, started=owner.started) as holder:
        if holder is None or not holder.send(signal.SIGTERM):
            raise DataError(
                f"wrong-state: {run}: nothing was stopped: {where} belongs to another user, or has just "
                "ended; run the command as the user who started the run"
            )
    say(f"asked {where} to save and end after its step")
    until = time.monotonic() + seconds
    while owner.alive():
        if time.monotonic() > until:
            doing = "; ".join(rank_lines(run)) or "no flight record"
            raise TrainError(
                f"deadline: {run}: {where} has not ended within {seconds:g} s ({doing}). It will end after "
                f"its current step. To see why that takes so long: lockstep hang {run}. To end it at once, "
                f"and lose everything after the newest checkpoint: kill -9 {owner.pid}"
            )
        time.sleep(_POLL_SECONDS)
    return look(run)


def log_file(run: Path, *, rank: int) -> Path:
    """Return the log of a rank.

    Raises:
        DataError: there is no run in the folder, or no such log.
    """
    run_owner(run)
    path = run / "logs" / f"rank-{rank}.log"
    if not path.is_file():
        there = sorted(each.stem for each in (run / "logs").glob("rank-*.log"))
        raise DataError(f"no-such-file: {path}: no such log; available: {', '.join(there) or 'none'}")
    return path
