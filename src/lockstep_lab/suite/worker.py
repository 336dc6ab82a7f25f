"""The worker of a suite: one job file, one result file, whatever ends it."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, TypeVar

from pydantic import BaseModel

from lockstep.errors import ConfigError, LockstepError, ModelError
from lockstep.observe.files import jsonable, naming
from lockstep.observe.text import echo
from lockstep.processes.child import relax_gc
from lockstep.ranks.environment import in_launcher, without_local_rank
from lockstep.ranks.launch import launch_command, leave
from lockstep_lab.suite.job_files import RANK_LOGS, RESULT, Job, WorkerOutcome, read_job_file
from lockstep_lab.suite.process import error_line, is_out_of_memory

if TYPE_CHECKING:
    import torch

    from lockstep.ranks.context import RankContext

JobKind = TypeVar("JobKind", bound=Job)
REFUSED = 2
"""Exit status: the settings cannot work."""
_TRACEBACK_SECONDS = 15.0
"""Seconds before the deadline at which a process writes where it is."""


class Worker(ABC, Generic[JobKind]):
    """Runs one job: its only process, or each of its ranks. Whatever ends it, the result file says so.

    A subclass does the job in `work`, and says in `facts` what is known about it so far.
    """

    MODULE: ClassVar[str]
    """The module that `python -m` runs."""
    OUTCOME: ClassVar[type[WorkerOutcome]]
    REFUSALS: ClassVar[tuple[type[Exception], ...]] = (ConfigError, ModelError)
    """Errors that refuse the settings, as long as nothing has begun."""
    ranks: RankContext
    """Once the ranks have met; a job of one process has none."""

    def __init__(self, job: JobKind) -> None:
        self.job = job
        self.begun = False
        """Whether the first step has begun: errors from then on are failures, not refusals."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What the log calls the job."""

    @abstractmethod
    def work(self) -> None:
        """Do the job, and write its outcome."""

    def launch(self) -> tuple[int, float | None]:
        """The ranks to start before the job is done, and how long they have; 0: this process does it."""
        return 0, None

    def facts(self) -> dict[str, Any]:
        """Fields of the outcome, as far as they are known."""
        return {}

    @classmethod
    def main(cls, kind: type[JobKind], argv: Sequence[str] | None = None) -> int:
        """Run the job of a command line; return the exit status: 0, REFUSED, or 1 for anything else."""
        arguments = without_local_rank(sys.argv[1:] if argv is None else argv)
        if len(arguments) != 1:
            echo(f"usage: python -m {cls.MODULE} JOB.json", file=sys.stderr)
            return REFUSED
        path = Path(arguments[0]).resolve()
        worker = cls(read_job_file(path, kind))
        ranks, seconds = worker.launch()
        if not ranks or in_launcher():
            return worker.run()
        command = [sys.executable, "-u", "-m", cls.MODULE, str(path)]
        return launch_command(command, ranks=ranks, timeout=seconds, log_dir=worker.job.out / RANK_LOGS)

    def run(self) -> int:
        """Do this process's part of the job; return the exit status. An error that is not ours is raised."""
        faulthandler.enable()
        try:
            self.work()
            return 0
        except LockstepError as error:
            refused = isinstance(error, self.REFUSALS) and not self.begun
            self.give_up("refused" if refused else "failed", error)
            return REFUSED if refused else 1
        except Exception as error:
            self.give_up("failed", error)
            raise

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, or the only process."""
        return not hasattr(self, "ranks") or self.ranks.is_first

    def say(self, text: str) -> None:
        """Print a line on rank 0."""
        if self.is_first:
            echo(text, flush=True)

    def end(self, status: str, reason: str = "", **facts: Any) -> None:
        """Write the outcome."""
        from lockstep_lab.suite.machine import versions

        values = {"status": status, "reason": reason, "versions": versions(), **self.facts(), **facts}
        self.OUTCOME.model_validate(values).write(self.job.out)

    def give_up(self, status: str, error: Exception) -> None:
        """Write why there is no more, unless another rank has: the first to fail may not be rank 0, and what
        the others then say of a lost peer explains nothing."""
        from lockstep.ranks.context import is_peer_failure

        echo(f"{self.name}: {status}: {error}", flush=True)
        first = hasattr(self, "ranks") and self.ranks.is_first
        if (self.job.out / RESULT).exists() and (is_peer_failure(error) or not first):
            return
        prefix = "" if isinstance(error, LockstepError) else f"{type(error).__name__}: "
        self.end("oom" if is_out_of_memory(error) else status, prefix + error_line(error))


@contextlib.contextmanager
def watched(timeout: float, *, least: float = 0.5) -> Iterator[None]:
    """Write the tracebacks of all threads to stderr shortly before the suite ends the process.

    Args:
        least: the share of `timeout` that is over by then.
    """
    faulthandler.dump_traceback_later(max(least * timeout, timeout - _TRACEBACK_SECONDS), exit=False)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def clock(device: torch.device) -> float:
    """The time, when the device is done with everything that it was given."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
    return time.perf_counter()


def leave_with(main: Callable[[], int], name: str) -> NoReturn:
    """End the process with main's exit status; an error that it raises is one line on stderr."""
    relax_gc()
    try:
        status = main()
    except LockstepError as error:
        echo(f"{name} worker: {error}", file=sys.stderr)
        status = REFUSED if isinstance(error, ConfigError) else 1
    leave(status)
    sys.exit(status)


def append_rows(path: Path, rows: Iterable[BaseModel]) -> None:
    """Append a line of JSON per row."""
    with naming(path), path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(jsonable(row), ensure_ascii=False, allow_nan=False) + "\n")
