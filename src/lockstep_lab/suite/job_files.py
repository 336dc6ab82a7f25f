"""Files between a suite of the lab and its workers: a job, and what the worker leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, ValidationError

from lockstep.config.base import Record, Seconds
from lockstep.config.problems import first_data
from lockstep.errors import ConfigError
from lockstep.observe.files import read_plain, write_atomic, write_json

RESULT, RANK_LOGS = "result.json", "ranks"
"""How a worker ended; the folder of what its ranks print."""
_LINES_BYTES = 2**30
"""The largest file of lines that is read."""
_Kind = TypeVar("_Kind", bound=Record)


class Options(Record):
    """What a suite is asked to do. What its jobs are told as well is declared once, in a base of both."""

    out: Path
    timeout: Seconds = 600.0
    """Seconds of a part of the suite."""
    command: str = ""
    """The command line, for the reports."""

    def __init__(self, **values: Any) -> None:
        """Raises ConfigError: a value that cannot be right."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(first_problem(error), **first_data(error)) from error


class Job(Record):
    """What a worker is told to do."""

    FILE: ClassVar[str] = "job.json"
    out: Path
    """An existing folder."""

    def write(self) -> Path:
        """Write OUT/FILE."""
        path = self.out / self.FILE
        write_atomic(path, self.model_dump_json(indent=2) + "\n")
        return path


class WorkerOutcome(Record):
    """result.json: how a worker ended."""

    status: Literal["ok", "refused", "failed", "oom"]
    """refused: the settings cannot work or something is not installed, and nothing was run."""
    reason: str = ""
    peak_memory_bytes: int = 0
    """Of the rank that needed most: allocated on a GPU, resident on a CPU."""
    versions: dict[str, str] = Field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Read a worker's outcome; None: it has written none, or the file holds something else."""
        return read_if_whole(folder / RESULT, cls)

    def write(self, folder: Path) -> None:
        """Write result.json."""
        write_json(folder / RESULT, self.model_dump())


def same_fields(kind: type[Record], options: object) -> dict[str, Any]:
    """The fields of a job that the suite's options have by the same name."""
    return {name: getattr(options, name) for name in kind.model_fields if hasattr(options, name)}


def read_job_file(path: Path, kind: type[_Kind]) -> _Kind:
    """Read a worker's job. Raises ConfigError."""
    try:
        return kind.model_validate_json(read_plain(path, ConfigError))
    except ValidationError as error:
        raise ConfigError(f"{path}: {first_problem(error)}", **first_data(error)) from error


def first_problem(error: ValidationError) -> str:
    """The first field that is wrong, and what is wrong with it."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the job'}: {first['msg']}"


def read_if_whole(path: Path, kind: type[_Kind]) -> _Kind | None:
    """Read what a worker wrote; None where there is no file yet, or it holds something else."""
    try:
        return kind.model_validate_json(read_plain(path, ConfigError))
    except (ConfigError, ValidationError):
        return None


def read_lines(path: Path, kind: type[_Kind]) -> list[_Kind]:
    """Read one value per line; a last line that is cut off is left out. No file gives no values."""
    if not path.exists():
        return []
    values = []
    text = read_plain(path, ConfigError, limit=_LINES_BYTES).decode("utf-8", errors="replace")
    for line in text.split("\n"):  # splitlines() would cut a text at U+2028 too
        try:
            values.append(kind.model_validate_json(line))
        except ValidationError:
            break
    return values
