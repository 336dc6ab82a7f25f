"""The folder of one run.

    config.toml      the resolved config
    manifest.json    versions, resolved axes, data report, ...
    metrics.jsonl    one object per step, and one per evaluation
    summary.json     written at the end
    rollouts/        step-000012.jsonl, evaluation-NAME.jsonl
    checkpoints/     written by the loop
    export/          a Hugging Face folder of the final policy, written by the loop
    logs/            tensorboard/, and whatever else is logged

Steps count from 0. After `n` steps, steps 0 to n - 1 are done: a checkpoint named n holds the weights after n
steps, an evaluation with "step": n is of those weights.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import CheckpointError, ConfigError
from lockstep.observe.files import json_lines, write_atomic, write_json
from lockstep.observe.lock import RunLock

EVALUATION = "evaluation"
"""The key that tells an evaluation's line in metrics.jsonl from a step's."""
EVALUATIONS = ("before", "during", "after")
"""Its values."""

_STEP_FILE = re.compile(r"(evaluation-)?step-(\d+)\.jsonl")


class RunDir:
    """The open folder of a run, locked against other processes until `close` (or the end of a `with`)."""

    def __init__(self, path: Path, lock: RunLock) -> None:
        self._lock = lock
        self._name_files(path)
        for folder in (self.rollouts, self.checkpoints, self.logs):
            folder.mkdir(exist_ok=True)

    def _name_files(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.manifest = path / "manifest.json"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        self.rollouts = path / "rollouts"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"

    @classmethod
    def create(cls, path: Path, *, config_toml: str, manifest: Mapping[str, Any]) -> RunDir:
        """A new run in `path`, which must not hold one that got anywhere (see `check_free`).

        Raises:
            ConfigError: `path` holds a run, or is a file, or cannot be written, or another process is
                writing it.
        """
        check_free(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the run directory {str(path)!r} cannot be made ({error.strerror}); name another with "
                "--run-dir"
            ) from error
        run_dir = cls(path, RunLock(path / "lock"))
        try:
            check_free(path)  # another process may have been first, and be done already
            write_json(run_dir.manifest, manifest)
            write_atomic(run_dir.config, config_toml)
        except BaseException:
            run_dir.close()
            raise
        return run_dir

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """An existing run, to go on with; call `rewind` before writing.

        Raises:
            ConfigError: `path` holds no run, or another process is writing it.
        """
        if not (path / "config.toml").is_file():
            raise ConfigError(
                f"cannot resume {str(path)!r}: it holds no config.toml, so no run was started there"
            )
        return cls(path, RunLock(path / "lock"))

    def rewind(self, steps_done: int, *, evaluated: Collection[str] = EVALUATIONS) -> None:
        """Forget what was written after the first `steps_done` steps, so that a resumed run writes it again.

        Keeps lines of steps below `steps_done` and of evaluations up to it; drops a half-written last line.

        Args:
            evaluated: which evaluations of the weights after `steps_done` steps will not be made again.

        Raises:
            CheckpointError: a line in the middle of metrics.jsonl is not JSON.
        """
        if self.metrics.exists():
            lines = read_lines(self.metrics)
            kept = [
                line
                for line in lines
                if line["step"] < steps_done
                or (line["step"] == steps_done and line.get(EVALUATION) in evaluated)
            ]
            write_atomic(self.metrics, json_lines(kept))
        for file in self.rollouts.iterdir():
            match = _STEP_FILE.fullmatch(file.name)
            if match and int(match[2]) >= steps_done + bool(match[1]):
                file.unlink()
        self.summary.unlink(missing_ok=True)

    def read_manifest(self) -> dict[str, Any]:
        """The values of manifest.json."""
        return dict(json.loads(self.manifest.read_text(encoding="utf-8")))

    def update_manifest(self, values: Mapping[str, Any]) -> None:
        """Add or replace top-level keys of manifest.json."""
        write_json(self.manifest, self.read_manifest() | dict(values))

    def write_rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
        """All rollouts of one step, whole or not at all."""
        path = self.rollouts / f"step-{step:06d}.jsonl"
        write_atomic(path, json_lines(rows))
        return path

    def write_evaluation(self, name: str, rows: Iterable[Mapping[str, Any]]) -> Path:
        """All rollouts of one evaluation. `name`: before, after, or step-000012 for one after 12 steps."""
        path = self.rollouts / f"evaluation-{name}.jsonl"
        write_atomic(path, json_lines(rows))
        return path

    def write_summary(self, values: Mapping[str, Any]) -> None:
        """The run's last word."""
        write_json(self.summary, values)

    def close(self) -> None:
        """Let other processes write the run."""
        self._lock.release()

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class FollowedRunDir(RunDir):
    """The folder of a run that another process writes, rank 0 of the same run: what would write does
    nothing."""

    def __init__(self, path: Path) -> None:
        self._name_files(path)

    def rewind(self, steps_done: int, *, evaluated: Collection[str] = EVALUATIONS) -> None:
        """Nothing."""

    def update_manifest(self, values: Mapping[str, Any]) -> None:
        """Nothing."""

    def write_rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
        """Nothing is written; the path that it would have."""
        return self.rollouts / f"step-{step:06d}.jsonl"

    def write_evaluation(self, name: str, rows: Iterable[Mapping[str, Any]]) -> Path:
        """Nothing is written; the path that it would have."""
        return self.rollouts / f"evaluation-{name}.jsonl"

    def write_summary(self, values: Mapping[str, Any]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing is locked."""


def new_path(name: str) -> Path:
    """Where a run without a folder of its own is written."""
    return Path("runs") / f"{name}-{datetime.datetime.now().strftime('%Y%m%d-%H%M%S')}"


def check_free(path: Path) -> None:
    """Raise ConfigError when a run cannot start in `path`: it is a file, or holds metrics or checkpoints.

    A run that failed before its first evaluation or step has neither, and its folder may be used again.
    """
    if path.exists() and not path.is_dir():
        raise ConfigError(f"run_dir {str(path)!r} is a file; give a folder as --run-dir")
    metrics = path / "metrics.jsonl"
    if (metrics.exists() and metrics.stat().st_size) or any((path / "checkpoints").glob("step-*")):
        raise ConfigError(
            f"{str(path)!r} already holds a run; go on with it by `lockstep train --resume {path}`, or "
            "give another --run-dir"
        )


def finished(path: Path, *, steps: int) -> dict[str, Any] | None:
    """The summary of the run in `path` when it has finished with just `steps` steps, else None."""
    try:
        summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):  # still to be written, or damaged: it is made again
        return None
    done = (
        isinstance(summary, dict) and summary.get("outcome") == "finished" and summary.get("steps") == steps
    )
    return summary if done else None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file; a last line that a crash cut off is left out.

    Raises:
        CheckpointError: any other line is not a JSON object.
    """
    rows: list[dict[str, Any]] = []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        last = number == len(lines)  # what follows the last newline: empty, or cut off
        if last or not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise CheckpointError(
                f"{path}, line {number}: not JSON ({error}); the file was edited or damaged"
            ) from error
        if not isinstance(row, dict):
            raise CheckpointError(
                f"{path}, line {number}: a JSON object was expected, not {type(row).__name__}"
            )
        rows.append(row)
    return rows
