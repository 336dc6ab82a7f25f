"""Runs in folders, and everything that a run directory tells, read as the run goes on.

    for reader in open_runs([Path("runs")]).values():
        reader.row()                                    # a line of the table that `lockstep runs` prints
        reader.curves().json(["reward/mean"])
        reader.rollouts.page(RolloutQuery(text="therefore"))

A reader is kept open: asked again, it reads what was appended. What is damaged or missing is in `problems`.
A run that a newer version wrote is refused: its row says so, and the other methods raise DataError.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from lockstep.errors import DataError, LockstepError
from lockstep.observe.files import parse_json, read_plain
from lockstep.observe.run_history import EVALUATION, RANK_TIMEOUT, is_step
from lockstep.ranks.environment import WAIT_SECONDS
from lockstep.version import __version__
from lockstep.view.about import About, read_about
from lockstep.view.curves import CurveReader, Curves
from lockstep.view.hung import HangWatch
from lockstep.view.lines import ends_of
from lockstep.view.look import run_owner, run_state
from lockstep.view.presets import Preset, presets
from lockstep.view.rollout_reader import RolloutReader
from lockstep.view.steps import StepDetail, step_detail
from lockstep.view.tokens import TokenSpeller

STATES = (
    *("training", "finished", "interrupted", "died", "hung", "failed", "elsewhere", "not started"),
    *("unreadable", "newer version"),
)
_ACCURACIES = ("lenient_accuracy", "strict_accuracy", "accuracy")
_SMALL_BYTES = 8 * 2**20
"""A metrics.jsonl up to this size is read whole for a row; of a larger one the two ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRow:
    """A run in a table of runs."""

    id: str
    """Names it in URLs."""
    path: Path
    state: str
    """One of STATES. hung: its ranks have neither moved nor computed for longer than its --rank-timeout (half
    an hour for a run without one). elsewhere: another machine has the run, and cannot be asked from here.
    unreadable: its folder is gone or damaged, see problems."""
    where: str | None
    """The process and its machine, while there is one; how long it hangs."""
    model: str
    algorithm: str
    """algorithm.name, such as dapo; for other kinds of run the kind."""
    kind: str
    """grpo, ppo, sft, dpo or rm."""
    steps: int
    """Number of steps that are done."""
    total: int | None
    started: float | None
    """Unix seconds."""
    seconds: float | None
    """Of the whole run, if it has ended, summed over resumes; else from its start to now or its last line."""
    reward: float | None
    """Mean reward of the last step."""
    accuracy_before: float | None
    """Held-out: the first of lenient, strict and pair accuracy that the run has."""
    accuracy_after: float | None
    """The same of the newest evaluation of trained weights."""
    tokens_per_second: float | None
    gap: float | None
    """Mean abs(trainer - engine) of the last step's logprobs, in nats."""
    error: str | None
    problems: tuple[str, ...] = ()


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the run directories among `paths`, and those up to two levels below them, in order.

    Raises:
        DataError: there is none.
    """
    found: dict[Path, None] = {}
    for path in paths:
        levels = [path], _folders(path), [below for one in _folders(path) for below in _folders(one)]
        for folders in levels:
            runs = [each for each in folders if os.path.isfile(each / "config.toml")]
            found |= dict.fromkeys(runs)
            if path in runs:  # what is below a run belongs to it
                break
    runs_below = {run for run in found if any(above in found for above in run.parents)}
    if not found:
        names = ", ".join(map(str, paths))
        raise DataError(
            f"wrong-kind-of-file: {names} contains no run (config.toml), not even two levels below; give run "
            "directories, or folders of runs"
        )
    return [run for run in found if run not in runs_below]


def _folders(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.name[0] != "." and _is_dir(entry))
    except OSError:  # no folder, or not ours to read
        return []


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, or into a folder that is not ours to read
        return False


def open_runs(
    paths: Sequence[Path], *, known: Mapping[str, RunReader] | None = None, cache: Path | None = None
) -> dict[str, RunReader]:
    """Return a reader of each run under `paths`, by unique id: those of `known`, and one of each run that has
    none there. Args of RunReader; raises as `find_runs`."""
    readers = dict(known or {})
    there = {reader.path for reader in readers.values()}
    for path in find_runs(paths):
        if path in there:
            continue
        own = _folder_name(path)
        name, number = own, 1
        while name in readers:
            number += 1
            name = f"{own}-{number}"
        readers[name] = RunReader(path, id=name, cache=cache)
    return readers


def _folder_name(path: Path) -> str:
    """Return the name of a folder, as a URL can hold it: a file name may be no UTF-8."""
    return os.fsencode(path.resolve().name).decode("utf-8", "replace")


class RunReader:
    """One run, kept open. Its methods may be called from several threads.

    Args:
        id: names the run in URLs; None: the folder's name.
        cache: folder of the index of rollouts; None: the user's cache folder.
    """

    def __init__(self, path: Path, *, id: str | None = None, cache: Path | None = None) -> None:
        self.path, self.id = path, id or _folder_name(path)
        self._config = _File(path / "config.toml", _toml)
        self._manifest = _File(path / "manifest.json", _json)
        self._summary = _File(path / "summary.json", _json)
        self._curves = CurveReader(path)
        self._hang = HangWatch(path)
        speller = TokenSpeller(path, model=lambda: _name_of(self._config.value.get("model")))
        self._rollouts = RolloutReader(path, pieces=speller.pieces, cache=cache)

    def row(self) -> RunRow:
        """Return the run's line in a table of runs. Never raises LockstepError: what is wrong with the run is
        in the state and the problems."""
        problems = list[str]()
        state, where = self._state(problems)
        steps, evaluations, lines_wrong = self._lines() if state != "newer version" else ([], [], ())
        config, last = self._config.value, steps[-1] if steps else {}
        kind = str(config.get("kind", ""))
        before, after = self._accuracies(evaluations)
        total, summary = config.get("steps"), self._summary.value
        files = (self._config, self._manifest, self._summary)
        problems += [each.problem for each in files if each.problem] + list(lines_wrong)
        return RunRow(
            id=self.id,
            path=self.path,
            state=state,
            where=where,
            model=_name_of(config.get("model")) or str(self._manifest.value.get("model", "")),
            algorithm=_name_of(config.get("algorithm")) or kind,
            kind=kind,
            steps=int(last["step"]) + 1 if last else 0,
            total=total if is_step(total) else None,
            started=self._started(),
            seconds=self._seconds(state, last),
            reward=_finite(last.get("reward/mean")),
            accuracy_before=before,
            accuracy_after=after,
            tokens_per_second=_finite(last.get("throughput/tokens_per_second")),
            gap=_finite(last.get("logprob_gap_mean")),
            error=str(summary["error"]) if state == "failed" and "error" in summary else None,
            problems=tuple(dict.fromkeys(problems)),
        )

    def curves(self) -> Curves:
        """Return the metrics that are there now. Raises DataError: a newer version wrote the run."""
        self._check_version()
        return self._curves.read(started=self._started())

    def presets(self) -> tuple[Preset, ...]:
        """Return the charts that this kind of run has first."""
        config = self._config.value
        return presets(str(config.get("kind", "")), _name_of(config.get("algorithm")))

    @property
    def rollouts(self) -> RolloutReader:
        """The rollouts. Raises DataError: a newer version wrote the run."""
        self._check_version()
        return self._rollouts

    def step(self, number: int) -> StepDetail:
        """Return one step; what is missing of it is in its problems. Raises DataError as `curves`."""
        return step_detail(self.path, number, self.curves(), manifest=self._manifest.value)

    def about(self) -> About:
        """Return what the run is. Raises DataError as `curves`."""
        state, _ = self._state([])
        return read_about(
            self.path,
            config=self._config.value,
            manifest=self._manifest.value,
            evaluations=self.curves().evaluations,
            rollouts=self.rollouts,
            ended_early=state in ("interrupted", "failed", "died", "hung"),
        )

    def close(self) -> None:
        """End what the reader does in the background."""
        self._rollouts.close()

    def _state(self, problems: list[str]) -> tuple[str, str | None]:
        try:
            self._check_version()
        except DataError as error:
            problems.append(str(error))
            return "newer version", None
        try:
            state, where = run_state(self.path, run_owner(self.path), self._summary.value)
        except LockstepError as error:
            problems.append(str(error))
            return "unreadable", None
        if state == "running":
            limit = _finite(self._manifest.value.get(RANK_TIMEOUT)) or WAIT_SECONDS
            if (why := self._hang.hangs(limit)) is not None:
                return "hung", f"{where}, {why}"
            return "training", where
        if state not in STATES:
            problems.append(f"summary.json says that the run is {state!r:.40}, which no run writes")
            return "unreadable", where
        return state, where

    def _check_version(self) -> None:
        written = str(self._manifest.value.get("lockstep", ""))
        if _version(written) > _version(__version__):
            raise DataError(
                f"version-differs: {self.path} was written by Lockstep {written}, but this is {__version__}; "
                "update Lockstep to look at it"
            )

    def _lines(self) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]], tuple[str, ...]]:
        """Steps (at least the last) and evaluations, oldest first, and what is wrong with metrics.jsonl."""
        path = self.path / "metrics.jsonl"
        try:
            small = path.stat().st_size <= _SMALL_BYTES
        except OSError:
            return [], [], ()
        if small or self._curves.is_read:
            curves = self._curves.read(started=self._started())
            last = [
                {"step": step, "timestamp": time + (curves.started or 0.0), **curves.at(int(step))}
                for step, time in zip(curves.steps[-1:], curves.times[-1:], strict=True)
            ]
            return [*last], [*curves.evaluations], curves.problems
        rows = [row for row in ends_of(path, root=self.path) if is_step(row.get("step"))]
        steps: list[Mapping[str, Any]] = [row for row in rows if EVALUATION not in row]
        return steps, [row for row in rows if EVALUATION in row], ()

    def _accuracies(self, evaluations: Sequence[Mapping[str, Any]]) -> tuple[float | None, float | None]:
        """Held-out accuracy before training, and at the newest evaluation of trained weights."""
        told = [self._summary.value.get(name) for name in ("eval_before", "eval_after")]
        kept = [
            {f"eval/{key}": v for key, v in each.items()} if isinstance(each, dict) else {} for each in told
        ]
        before = [row for row in evaluations if row.get(EVALUATION) == "before"]
        after = [row for row in evaluations if row.get(EVALUATION) != "before"]
        rows = (before[0] if before else kept[0], after[-1] if after else kept[1])

        def accuracy(row: Mapping[str, Any]) -> float | None:
            values = (_finite(row.get(f"eval/{name}")) for name in _ACCURACIES)
            return next((value for value in values if value is not None), None)

        return accuracy(rows[0]), accuracy(rows[1])

    def _started(self) -> float | None:
        text = self._manifest.value.get("started")
        try:
            return datetime.fromisoformat(text).timestamp() if isinstance(text, str) else None
        except ValueError:
            return None

    def _seconds(self, state: str, last: Mapping[str, Any]) -> float | None:
        told, started = _finite(self._summary.value.get("wall_seconds")), self._started()
        if told is not None and state not in ("training", "hung"):
            return told
        until = time.time() if state in ("training", "hung") else _finite(last.get("timestamp"))
        return None if started is None or until is None else max(0.0, until - started)


@dataclass(slots=True)
class _File:
    """A small file that is parsed again when it has changed."""

    path: Path
    parse: Callable[[Path], Mapping[str, Any]]
    problem: str = ""
    _seen: tuple[int, int, int] | None = None
    _value: Mapping[str, Any] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def value(self) -> Mapping[str, Any]:
        """What is in it; empty if it is missing or damaged, which `problem` then says."""
        with self._lock:
            try:
                status = self.path.stat()
                seen = (status.st_ino, status.st_size, status.st_mtime_ns)
            except OSError:
                self._seen, self._value, self.problem = None, {}, ""
                return self._value
            if seen != self._seen:
                self._seen, self.problem = seen, ""
                try:
                    self._value = self.parse(self.path)
                except DataError as error:
                    self._value, self.problem = {}, str(error)
            return self._value


def _json(path: Path) -> Mapping[str, Any]:
    value = parse_json(read_plain(path, DataError, root=path.parent), str(path), DataError)
    if not isinstance(value, dict):
        raise DataError(f"wrong-type: {path} is not a JSON object")
    return value


def _toml(path: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(read_plain(path, DataError, root=path.parent).decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"not-toml: {path} is not TOML: {error}") from error


def _version(text: str) -> tuple[int, ...]:
    """The numbers of a version; empty, which is below all, if it has none."""
    match = re.match(r"\d{1,6}(\.\d{1,6}){0,3}", text)
    return tuple(map(int, match[0].split("."))) if match else ()


def _name_of(table: Any) -> str:
    name = table.get("name") if isinstance(table, dict) else None
    return name if isinstance(name, str) else ""


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer that no float holds
        return None
    return number if math.isfinite(number) else None
