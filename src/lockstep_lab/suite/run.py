"""The run of a suite: its folder, its parts one after the other, and how a worker ended."""

from __future__ import annotations

import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from lockstep.errors import ConfigError
from lockstep.observe.files import write_json
from lockstep.ranks.environment import in_launcher
from lockstep.ranks.launch import TIMED_OUT
from lockstep_lab.suite.job_files import Job, WorkerOutcome
from lockstep_lab.suite.process import (
    ExitStatus,
    ProcessRunner,
    line_that_matters,
    looks_out_of_memory,
    read_tail,
    stalled_in,
)
from lockstep_lab.suite.result import Status, SuiteResult

Part = TypeVar("Part")
Row = TypeVar("Row")
Result = TypeVar("Result", bound=SuiteResult)


class Suite(ABC, Generic[Part, Row, Result]):
    """A run under way: a row per part, each by a worker in processes of its own.

    Args:
        options: Options with a device; `out` exists.
        stem: the name of its JSON file.
        progress: called with each row, its number, and how many there are.
    """

    def __init__(self, options: Any, stem: str, *, progress: Callable[[Row, int, int], None]) -> None:
        self.options, self.stem, self.progress = options, stem, progress
        self.out: Path = options.out.resolve()
        self.runner = ProcessRunner()
        self.parts: Sequence[Part] = ()
        self.results: list[Row] = []
        self.interrupted = False

    @abstractmethod
    def run(self, part: Part) -> Row:
        """Run one part to its end, whatever that is."""

    @abstractmethod
    def result(self) -> Result:
        """The result so far."""

    def run_all(self) -> Result:
        """Run all parts. Ctrl-C ends the run with the results so far, which are on disk after each part."""
        try:
            for number, part in enumerate(self.parts, start=1):
                row = self.run(part)
                self.results.append(row)
                self.progress(row, number, len(self.parts))
                write_json(self.out / f"{self.stem}.json", self.result().as_dict())
        except KeyboardInterrupt:
            self.interrupted = True
        return self.result()

    def work(self, worker: Sequence[str], job: Job, *, log: Path, timeout: float) -> ExitStatus:
        """Write a job and run its worker, the interpreter with these arguments, until its end."""
        log.unlink(missing_ok=True)
        argv = [sys.executable, "-u", *worker, str(job.write())]
        return self.runner.run(argv, log=log, timeout=timeout)

    def facts(self) -> dict[str, Any]:
        """Fields that the results of all suites have."""
        complete = not self.interrupted and len(self.results) == len(self.parts)
        return {"command": self.options.command, "complete": complete, "machine": self.machine}

    @functools.cached_property
    def machine(self) -> dict[str, str]:
        """The machine and the versions."""
        from lockstep_lab.suite.machine import machine  # loads torch

        return machine(self.options.device)


def check_folder(out: Path, command: str, *, name: str = "--out") -> None:
    """Check that a suite may run here and write into `out`.

    Raises:
        ConfigError: this process is a rank of a launcher, or `out` is a file or holds something.
    """
    if in_launcher():
        raise ConfigError(
            f"wrong-environment: lockstep {command} starts processes itself; run it without torchrun or "
            "deepspeed (RANK and WORLD_SIZE are set in the environment)"
        )
    check_empty(out, name)


def check_empty(out: Path, name: str = "--out") -> None:
    """Raise ConfigError: `out` is a file or holds something."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"already-exists: {name} {out} already exists and is not an empty folder; choose another"
        )


def make_folder(folder: Path, name: str = "--out") -> None:
    """Make a folder. Raises ConfigError: it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot-write: {name} {folder} cannot be created ({error.strerror}); choose another"
        ) from error


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
    status, reason = broken(tail, exit_status.describe())
    if (
        exit_status.returncode is not None
        and exit_status.returncode <= 0
        and reason != exit_status.describe()
    ):
        # The log of a process that was killed, or left as if all were well, knows nothing of that.
        reason = f"{exit_status.describe()}: {reason}"
    return status, reason


def broken(tail: str, ending: str) -> tuple[Status, str]:
    """Return status and reason of a worker that said nothing itself.

    Args:
        tail: the end of its log.
        ending: how the process ended; the reason where the log is empty.
    """
    return ("oom" if looks_out_of_memory(tail) else "failed"), line_that_matters(tail) or ending
