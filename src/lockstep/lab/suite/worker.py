"""The worker of a suite: one job file, one result file, whatever ends it."""

from __future__ import annotations

import faulthandler
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from pydantic import BaseModel

from lockstep.errors import ConfigError, LockstepError
from lockstep.lab.suite.failure import error_line, is_out_of_memory
from lockstep.observe.files import jsonable
from lockstep.observe.text import echo
from lockstep.processes.garbage import search_rarely
from lockstep.ranks.launch import leave, without_local_rank

REFUSED = 2
"""Exit status: the settings cannot work."""
_TRACEBACK_SECONDS = 15.0
"""Seconds before the deadline at which a process writes where it is, but not in the first half."""


def job_path(argv: Sequence[str] | None, module: str) -> Path | None:
    """Return the job file of a worker's command line; None, with the usage on stderr: it names none."""
    arguments = without_local_rank(sys.argv[1:] if argv is None else argv)
    if len(arguments) == 1:
        return Path(arguments[0]).resolve()
    echo(f"usage: python -m {module} JOB.json", file=sys.stderr)
    return None


def run_job(
    work: Callable[[], None],
    *,
    give_up: Callable[[str, Exception], None],
    refuses: Callable[[], tuple[type[Exception], ...]],
) -> int:
    """Do the work of a job, and have every error written down.

    Args:
        give_up: called with "refused" or "failed" and the error.
        refuses: which errors refuse the settings, asked when one has happened: none behind the first step.

    Returns:
        The exit status: 0, REFUSED, or 1 for another error of ours; one that is not ours is raised.
    """
    try:
        work()
        return 0
    except LockstepError as error:
        refused = isinstance(error, refuses())
        give_up("refused" if refused else "failed", error)
        return REFUSED if refused else 1
    except Exception as error:
        give_up("failed", error)
        raise


def watch(timeout: float) -> None:
    """Write the tracebacks of all threads to stderr shortly before the suite ends the process."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(timeout / 2, timeout - _TRACEBACK_SECONDS), exit=False)


def leave_with(main: Callable[[], int], name: str) -> NoReturn:
    """End the process with main's exit status; an error that it raises is one line on stderr."""
    search_rarely()
    try:
        status = main()
    except LockstepError as error:
        echo(f"{name} worker: {error}", file=sys.stderr)
        status = REFUSED if isinstance(error, ConfigError) else 1
    leave(status)
    sys.exit(status)


def says_it_already(result: Path, error: Exception, *, first: bool) -> bool:
    """Whether another rank's result explains more: the first rank to fail may not be rank 0, and what the
    others then say of a lost peer explains nothing."""
    from lockstep.ranks.context import lost_peer

    return result.exists() and (lost_peer(error) or not first)


def failure(status: str, error: Exception) -> dict[str, str]:
    """Return `status`, or oom, and the reason, as an outcome has them."""
    prefix = "" if isinstance(error, LockstepError) else f"{type(error).__name__}: "
    return {"status": "oom" if is_out_of_memory(error) else status, "reason": prefix + error_line(error)}


def append_rows(path: Path, rows: Iterable[BaseModel]) -> None:
    """Append a line of JSON per row."""
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(jsonable(row.model_dump()), ensure_ascii=False, allow_nan=False) + "\n")
