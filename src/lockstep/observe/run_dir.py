"""The folder of one run.

    config.toml      the resolved config
    manifest.json    versions, resolved axes, data report, ...
    metrics.jsonl    one object per step, and one per evaluation
    ledger.jsonl     one object per sample that a step asked for
    left_out.jsonl   rows of the data that were dropped, excluded or skipped, as they were found
    summary.json     written at the end
    rollouts/        step-000012.jsonl, evaluation-NAME.jsonl
    journal/         what tools have answered since the last checkpoint
    checkpoints/     written by the loop
    export/          a Hugging Face folder of the final policy, written by the loop
    logs/            rank-0.log, tensorboard/, and whatever else is logged

Steps count from 0. After `n` steps, steps 0 to n - 1 are done: a checkpoint named n holds the weights after n
steps, an evaluation with "step": n is of those weights.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.common_errors import cannot_write
from lockstep.errors import CheckpointError, ConfigError, TrainError
from lockstep.observe.files import file_errors, json_lines, read_json, write_atomic, write_json
from lockstep.observe.lock import RunLock
from lockstep.observe.run_history import (
    EVALUATIONS,
    FILES,
    FOLDERS,
    STEP_FILE,
    bytes_before,
    check_layout,
    check_lines,
    is_step,
    metric_lines,
    read_summary,
    recorded_steps,
    way_on,
)

OF_NODE = "of-rank-0.txt"
"""Marks the folder that a node has because it does not see that of rank 0."""
_ASIDE = "before-restart-"
"""What the folders begin with that have the history of a run from before a restart."""
RANK_LOGS = "ranks"
"""The folder in logs/ that the launcher of several ranks writes."""
_UNFINISHED = re.compile(
    r"\.(config\.toml|manifest\.json|(metrics|ledger)\.jsonl|summary\.json)\.[a-z0-9_]{8}"
    r"|\.(evaluation-\w+(-\d+)?|step-\d+)\.jsonl\.[a-z0-9_]{8}"
    r"|\.export\.(tmp|old)-[a-z0-9_]{8}"
)
"""Names of files that a process leaves when it is killed inside `write_atomic`, or while it exports."""


class RunDir:
    """The open folder of a run, locked against other processes until `close` (or the end of a `with`).

    What is written raises TrainError when the disk is full or fails; the run can then be resumed.
    """

    def __init__(self, path: Path, lock: RunLock) -> None:
        self._lock = lock
        self._before: frozenset[Path] | None = None
        """For `discard`: what was there before `create`, see `_there`."""
        self._name_files(path)
        try:
            check_layout(path)
            for folder in (self.rollouts, self.checkpoints, self.logs):
                with file_errors(folder, TrainError, "created"):
                    folder.mkdir(exist_ok=True)
            self._remove_unfinished()
        except BaseException:
            self.close()
            raise

    def _name_files(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.manifest = path / "manifest.json"
        self.metrics = path / "metrics.jsonl"
        self.ledger = path / "ledger.jsonl"
        self.left_out = path / "left_out.jsonl"
        self.summary = path / "summary.json"
        self.rollouts = path / "rollouts"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"

    def _remove_unfinished(self) -> None:
        """Remove what a killed process left half-written."""
        for path in [*self.path.iterdir(), *self.rollouts.iterdir()]:
            if not _UNFINISHED.fullmatch(path.name):
                continue
            with file_errors(path, TrainError, "remove"):
                if path.is_symlink() or not path.is_dir():
                    path.unlink()
                elif path.name.startswith(".export.old-") and not (self.path / "export").exists():
                    path.rename(self.path / "export")
                else:
                    shutil.rmtree(path)

    @contextlib.contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """Turn errors of writing the run's file `path` into TrainError.

        Raises:
            TrainError: the disk is full or fails.
        """
        try:
            yield
        except OSError:
            advice = f"free some space, then continue with `{way_on(self.path)}`"
            with file_errors(path, TrainError, "write", advice=advice):
                raise

    @classmethod
    def create(
        cls, path: Path, *, config_toml: str, manifest: Mapping[str, Any], restart: bool = False
    ) -> RunDir:
        """Create a new run in `path`, which must hold no run with any progress (see `check_free`).

        Args:
            restart: of a run that is there, what it has written goes to a folder `before-restart-N` in it.

        Raises:
            ConfigError: `path` holds a run (with `restart`: none), or is a file, or cannot be written, or
                another process is writing it.
        """
        if restart:
            _check_run(path, verb="restart")
        else:
            check_free(path)
        try:
            before = _there(path)
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(
                ConfigError, path, error, "choose another --run-dir", done="created"
            ) from error
        run_dir = cls(path, RunLock(path / "lock"))
        run_dir._before = None if restart else before  # what was set aside stays
        try:
            if restart:
                run_dir._set_aside()
            check_free(path)  # another process may have been first, and be done already
            (path / OF_NODE).unlink(missing_ok=True)
            with file_errors(path, TrainError, "write", advice="free some space, then start the run again"):
                write_json(run_dir.manifest, manifest)
                write_atomic(run_dir.config, config_toml)
        except BaseException:
            run_dir.discard()
            run_dir.close()
            raise
        return run_dir

    def _set_aside(self) -> None:
        """Move all that a run has written to a folder of its own. Renames need no room on a full disk."""
        number = 1
        while (aside := self.path / f"{_ASIDE}{number}").exists():
            number += 1
        # First the checkpoints, last metrics.jsonl: no resume takes what a kill leaves of this for a run.
        kept = {"lock", "logs", "config.toml", "metrics.jsonl"}
        there = [p.name for p in self.path.iterdir() if p.name not in kept and not p.name.startswith(_ASIDE)]
        logs = [f"logs/{path.name}" for path in self.logs.iterdir() if path.name not in ("ranks", "flight")]
        names = [*sorted(there, key=lambda name: (name != "checkpoints", name)), *logs, "metrics.jsonl"]
        with file_errors(aside, TrainError, "write", advice="free some space, then run the command again"):
            (aside / "logs").mkdir(parents=True)
            for name in names:
                if (self.path / name).exists() or (self.path / name).is_symlink():
                    (self.path / name).rename(aside / name)
            shutil.copyfile(self.config, aside / "config.toml")
            for folder in (self.rollouts, self.checkpoints):
                folder.mkdir(exist_ok=True)

    @property
    def is_new(self) -> bool:
        """Whether this process made the run: `discard` removes no other."""
        return self._before is not None

    def discard(self) -> None:
        """Remove a new run in which nothing has begun, with the folders that `create` made. What somebody
        else put there stays, and so do the logs of ranks, which their launcher is writing. Does nothing with
        a run that was opened.

        Raises:
            TrainError: something cannot be removed.
        """
        if self._before is None:
            return
        for path in [*self.path.iterdir()]:
            parts = [path]
            if path in self._before or (path == self.logs and (path / RANK_LOGS).exists()):
                parts = [*path.iterdir()] if path.name in FOLDERS else []
            with file_errors(path, TrainError, "remove"):
                _remove(each for each in parts if each not in self._before and each != self.logs / RANK_LOGS)
        for folder in (self.path, *self.path.parents):
            if folder in self._before or any(folder.iterdir()):
                break
            with file_errors(folder, TrainError, "remove"):
                folder.rmdir()

    @classmethod
    def open(cls, path: Path, *, restarted: bool = False) -> RunDir:
        """Open an existing run, to resume it; call `rewind` before writing.

        Args:
            restarted: as of RunLock.

        Raises:
            ConfigError: `path` holds no run, or another process is writing it.
            CheckpointError: something in it leads out of it, or is no file or folder.
        """
        _check_run(path, verb="resume")
        return cls(path, RunLock(path / "lock", restarted=restarted))

    def rewind(self, steps_done: int, *, evaluated: Collection[str] = EVALUATIONS) -> None:
        """Remove what was written after the first `steps_done` steps, so that a resumed run writes it again.

        Keeps lines of steps below `steps_done` and of evaluations up to it; drops a half-written last line.

        Args:
            evaluated: which evaluations of the weights after `steps_done` steps will not be made again.

        Raises:
            CheckpointError: metrics.jsonl or ledger.jsonl is damaged.
            TrainError: the disk is full or fails.
        """
        if self.metrics.exists():
            kept = b"".join(
                line.raw
                for line in metric_lines(self.metrics)
                if line.step < steps_done or (line.step == steps_done and line.evaluation in evaluated)
            )
            with self.writing(self.metrics):
                _keep(self.metrics, kept)
        if self.ledger.exists():
            size = bytes_before(self.ledger, steps_done)
            with self.writing(self.ledger):
                os.truncate(self.ledger, size)
        for file in self.rollouts.iterdir():
            match = STEP_FILE.fullmatch(file.name)
            if match and int(match[2]) >= steps_done + bool(match[1]):
                with file_errors(file, TrainError, "remove"):
                    file.unlink()
        with file_errors(self.summary, TrainError, "remove"):
            self.summary.unlink(missing_ok=True)

    def check_history(
        self, steps_done: int, *, evaluations: Collection[tuple[int, str]], saved: Collection[int] = ()
    ) -> set[tuple[int, str]]:
        """Check that metrics.jsonl has every line that a checkpoint of `steps_done` steps has: see
        `check_lines`."""
        lines = metric_lines(self.metrics)
        return check_lines(self.metrics, lines, done=steps_done, evaluations=evaluations, saved=saved)

    def check_nothing_done(self) -> None:
        """Check that a run without a checkpoint may begin again at its first step.

        Raises:
            CheckpointError: steps are done, which would be lost.
        """
        done, file = recorded_steps(self.path)
        if done:
            raise CheckpointError(
                f"incomplete: {self.checkpoints} contains no checkpoint, but {file} shows {done} finished "
                "steps, which would be lost because the run would start again. Restore the folder from a "
                f"copy; or, if no checkpoint was saved yet, start again with `{way_on(self.path)}`, which "
                f"keeps the existing files in a folder {_ASIDE}N"
            )

    def read_manifest(self) -> dict[str, Any]:
        """Read the values of manifest.json.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        kinds = {"spread": dict, "resumed": list, "contract": (dict, type(None)), "axes": dict}
        kinds["plans"] = list
        try:
            value = read_json(self.manifest, CheckpointError, root=self.path)
            if not isinstance(value, dict):
                raise CheckpointError(f"wrong-type: {self.manifest} is not a JSON object")
            for name, kind in kinds.items():
                if name in value and not isinstance(value[name], kind):  # type: ignore[arg-type]
                    raise CheckpointError(
                        f"wrong-field: {self.manifest}: field {name!r} is of the wrong type: "
                        f"{value[name]!r:.80}"
                    )
        except CheckpointError as error:
            raise error.with_message(
                f"{error}. Restore it from a copy; or write {{}} into it, but then data and versions cannot "
                "be compared with those at the start of the run"
            ) from error
        return value

    def update_manifest(self, values: Mapping[str, Any]) -> None:
        """Add or replace top-level keys of manifest.json."""
        updated = self.read_manifest() | dict(values)
        with self.writing(self.manifest):
            write_json(self.manifest, updated)

    def write_rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
        """Write all rollouts of one step, atomically."""
        return self._write_rows(self.rollouts / f"step-{step:06d}.jsonl", rows)

    def write_evaluation(self, name: str, rows: Iterable[Mapping[str, Any]]) -> Path:
        """Write all rollouts of one evaluation. `name`: before, after, or step-000012 for one after 12
        steps."""
        return self._write_rows(self.rollouts / f"evaluation-{name}.jsonl", rows)

    def _write_rows(self, path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
        with self.writing(path):
            write_atomic(path, json_lines(rows))
        return path

    def write_summary(self, values: Mapping[str, Any]) -> None:
        """Write summary.json, at the end of the run."""
        with self.writing(self.summary):
            write_json(self.summary, values)

    def close(self) -> None:
        """Release the lock, so that other processes can write the run."""
        self._lock.release()

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class FollowedRunDir(RunDir):
    """The folder of a run that rank 0, another process, writes: methods that would write do nothing."""

    def __init__(self, path: Path, lock: RunLock | None = None) -> None:
        self._node_lock = lock
        self._before = None
        self._name_files(path)

    @classmethod
    def of_node(cls, path: Path, files: Mapping[str, str]) -> FollowedRunDir:
        """Make the folder of a node that does not see rank 0's, and lock it.

        Args:
            files: of rank 0's folder, which every rank reads: name -> text.

        Raises:
            ConfigError: there is a run in it, another process writes it, or it cannot be made.
        """
        check_layout(path)
        with file_errors(path, ConfigError, "created", advice="choose another folder with --run-dir"):
            before = _there(path)
            path.mkdir(parents=True, exist_ok=True)
            made = cls(path, RunLock(path / "lock"))
            made._before = None if (path / OF_NODE).exists() else before
            try:
                made._check_free()
                write_atomic(path / OF_NODE, "Of this node's ranks; the run is on the node of rank 0.\n")
                made.logs.mkdir(exist_ok=True)
                for name, text in files.items():
                    write_atomic(path / name, text)
            except BaseException:
                made.close()
                raise
        return made

    def _check_free(self) -> None:
        if (self.path / OF_NODE).exists() and not self.metrics.exists():
            # What a start before this one was sent, to resume, is sent again.
            shutil.rmtree(self.checkpoints, ignore_errors=True)
        try:
            check_free(self.path)
        except ConfigError as error:
            raise ConfigError(
                f"already-exists: {str(self.path)!r} on {platform.node()} contains a different run than the "
                "folder of that name on the node of rank 0, which this node cannot see. To continue the "
                "run on this node, start the ranks so that rank 0 is here; otherwise move the folder, or "
                "choose another --run-dir"
            ) from error

    def discard(self) -> None:
        """Remove a node's own folder, in which nothing has begun; rank 0's is not ours."""
        if self._node_lock is not None:
            super().discard()

    def rewind(self, steps_done: int, *, evaluated: Collection[str] = EVALUATIONS) -> None:
        """Nothing."""

    def update_manifest(self, values: Mapping[str, Any]) -> None:
        """Nothing."""

    def _write_rows(self, path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
        """Nothing is written."""
        return path

    def write_summary(self, values: Mapping[str, Any]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Release the lock of a node's own folder; rank 0's is not ours."""
        if self._node_lock is not None:
            self._node_lock.release()


def _there(path: Path) -> frozenset[Path]:
    """What is there before a run starts in `path`: the folder and those above it, what is in it, and what is
    in folders that have the names of a run's. An earlier start in which nothing had begun does not count."""
    found = {each for each in (path, *path.parents) if each.exists()}
    if path in found:
        found |= {*path.iterdir()}
        found |= {each for name in FOLDERS if (path / name).is_dir() for each in (path / name).iterdir()}
    if _is_of_a_run(path / "manifest.json"):
        mine = {path / name for name in (*FILES, *FOLDERS, OF_NODE)}
        found = {each for each in found if not mine & {each, each.parent}}
    return frozenset(found)


def _is_of_a_run(manifest: Path) -> bool:
    """Whether a start of ours wrote it."""
    try:
        value = read_json(manifest, CheckpointError)
    except CheckpointError:
        return False
    return isinstance(value, dict) and {"lockstep", "torch", "started"} <= value.keys()


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path)


def _keep(path: Path, kept: bytes) -> None:
    """Drop all of a file but `kept`; mostly its end, which needs no room on a full disk."""
    if path.read_bytes().startswith(kept):
        os.truncate(path, len(kept))
    else:
        write_atomic(path, kept.decode("utf-8"))


def _check_run(path: Path, *, verb: str) -> None:
    """Raise ConfigError unless a run was started in `path`, on this node."""
    check_layout(path)
    if (path / OF_NODE).exists():
        raise ConfigError(
            f"wrong-kind-of-file: cannot {verb} {str(path)!r} on {platform.node()}: it contains only this "
            f"node's share of a run whose folder is on the node of rank 0 ({OF_NODE}). Start the ranks so "
            f"that rank 0 is on that node; or, if the whole run was copied here, delete {OF_NODE}"
        )
    if not (path / "config.toml").is_file():
        raise ConfigError(
            f"wrong-kind-of-file: cannot {verb} {str(path)!r}: it has no config.toml, so no run began there"
        )


def new_path(name: str) -> Path:
    """Return the folder of a run whose config names none."""
    return Path("runs") / f"{name}-{datetime.datetime.now().strftime('%Y%m%d-%H%M%S')}"


def check_free(path: Path) -> None:
    """Check that a run can start in `path`. What a run leaves that failed before its first evaluation or step
    does not matter.

    Raises:
        ConfigError: `path` is a file, or holds metrics, rollouts, checkpoints or the summary of a run that
            made any progress.
        CheckpointError: something in it leads out of it, or is no file or folder.
    """
    with file_errors(path, ConfigError, "used", advice="give another --run-dir"):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"not-a-file: run_dir {str(path)!r} is a file; give a folder as --run-dir")
    check_layout(path)
    metrics, summary = path / "metrics.jsonl", read_summary(path / "summary.json") or {}
    if (
        (metrics.exists() and metrics.stat().st_size)
        or any((path / "checkpoints").glob("step-*"))
        or any((path / "rollouts").glob("*step-*.jsonl"))
        or summary.get("steps")
    ):
        advice = "give another --run-dir"
        if (path / "config.toml").is_file():
            advice = f"continue it with `{way_on(path)}`, or {advice}"
        raise ConfigError(f"already-exists: {str(path)!r} already contains a run; {advice}")


def finished(path: Path, *, steps: int) -> dict[str, Any] | None:
    """Return the summary of the run in `path` if it has finished with exactly `steps` steps, else None; also
    None where it is damaged: the run writes it again.

    Raises:
        CheckpointError: something in `path` leads out of it, or is no file or folder.
    """
    check_layout(path)
    summary = read_summary(path / "summary.json")
    if summary is None or summary.get("outcome") != "finished" or summary.get("steps") != steps:
        return None
    seconds, evaluations = (
        summary.get("wall_seconds"),
        [summary.get(f"eval_{n}") for n in ("before", "after")],
    )
    whole = isinstance(seconds, int | float) and isinstance(summary.get("run_dir"), str)
    whole &= all(each is None or is_evaluation(each) for each in evaluations)
    return summary if whole else None


def is_evaluation(value: Any) -> bool:
    """Return whether a JSON value is the result of an evaluation, with the number of steps before it."""
    return (
        isinstance(value, dict)
        and is_step(value.get("step"))
        and all(each is None or isinstance(each, int | float) for each in value.values())
    )
