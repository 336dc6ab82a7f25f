"""The run of a suite: its folder, and how a worker ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from lockstep.errors import ConfigError
from lockstep.lab.suite.job_files import WorkerOutcome
from lockstep.lab.suite.process import (
    ExitStatus,
    line_that_matters,
    looks_out_of_memory,
    read_tail,
    stalled_in,
)
from lockstep.ranks.launch import TIMED_OUT, in_launcher

Status = Literal["ok", "refused", "failed", "oom", "hung", "skipped", "interrupted"]
"""How a row of a suite ended. hung: it did not come to an end in time. skipped: by a flag. interrupted: by
Ctrl-C."""


def check_folder(out: Path, command: str, *, name: str = "--out") -> None:
    """Check that a suite may run here and write into `out`.

    Raises:
        ConfigError: this process is a rank of a launcher, or `out` is a file or holds something.
    """
    if in_launcher():
        raise ConfigError(
            f"lockstep {command} starts processes itself; run it without torchrun or deepspeed (RANK and "
            "WORLD_SIZE are set in the environment)"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{name} {out} is there already and not an empty folder; name a new one")


def make_folder(folder: Path, name: str = "--out") -> None:
    """Make a folder. Raises ConfigError: it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{name} {folder}: cannot be made ({error.strerror}); name another") from error


def how_it_ended(
    exit_status: ExitStatus,
    outcome: WorkerOutcome | None,
    *,
    log: Path,
    timeout: float,
    where: Callable[[], str] | None = None,
) -> tuple[Status, str]:
    """Return the status of a worker that has ended, and the reason unless it is ok.

    Args:
        outcome: what the worker says itself; None: it wrote nothing.
        timeout: seconds that it had.
        where: where a worker hung, if not where its log says.
    """
    tail = read_tail(log)
    if exit_status.timed_out or exit_status.returncode == TIMED_OUT:
        place = f", in {stalled_in(tail)}" if stalled_in(tail) else ""
        return "hung", f"no end after {timeout:g} s (--timeout){where() if where else place}"
    if outcome is not None and outcome.status != "ok":
        return outcome.status, outcome.reason
    if outcome is not None and exit_status.returncode == 0:
        return "ok", ""
    return broken(tail, exit_status.describe())


def broken(tail: str, ending: str) -> tuple[Status, str]:
    """Return status and reason of a worker that said nothing itself.

    Args:
        tail: the end of its log.
        ending: how the process ended; the reason where the log is empty.
    """
    return ("oom" if looks_out_of_memory(tail) else "failed"), line_that_matters(tail) or ending
