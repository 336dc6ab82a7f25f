"""Runs in folders, and everything that a run directory tells, read as the run goes on."""

from __future__ import annotations

import json
import threading
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from lockstep.errors import DataError
from lockstep.view.about import About
from lockstep.view.curves import CurveReader, Curves
from lockstep.view.presets import Preset, presets
from lockstep.view.rollout_reader import RolloutReader
from lockstep.view.steps import StepDetail, step_detail

STATES = (
    "training",
    "finished",
    "interrupted",
    "died",
    "hung",
    "failed",
    "elsewhere",
    "not started",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRow:
    """A run in a table of runs."""

    id: str
    """Names it in URLs."""
    path: Path
    state: str
    """One of STATES, or "unreadable"."""
    where: str | None
    """The process and its machine, or since when it hangs."""
    model: str
    algorithm: str
    """Such as grpo or dapo; for other kinds of run, the kind."""
    kind: str
    """grpo, ppo, sft, dpo, kto, reward, ..."""
    steps: int
    total: int | None
    started: float | None
    """Unix seconds."""
    seconds: float | None
    """From the start to now, or to the last sign of the run."""
    reward: float | None
    accuracy_before: float | None
    accuracy_after: float | None
    tokens_per_second: float | None
    gap: float | None
    """Mean abs(trainer - engine) logprob, in nats."""
    error: str | None
    problems: tuple[str, ...] = ()


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the run directories among `paths`, and those up to two levels below them, in order.

    Raises:
        DataError: there is none.
    """
    found: dict[Path, None] = {}
    for path in paths:
        for pattern in ("config.toml", "*/config.toml", "*/*/config.toml"):
            runs = sorted(file.parent for file in path.glob(pattern))
            found |= dict.fromkeys(runs)
            if pattern == "config.toml" and runs:
                break
    if not found:
        names = ", ".join(map(str, paths))
        raise DataError(f"wrong-kind-of-file: {names} contains no run (config.toml); give a --run-dir")
    return list(found)


def open_runs(paths: Sequence[Path]) -> dict[str, RunReader]:
    """Return a reader of each run under `paths`, by unique id. Raises as `find_runs`."""
    readers: dict[str, RunReader] = {}
    for path in find_runs(paths):
        name, number = path.resolve().name, 1
        while name in readers:
            number += 1
            name = f"{path.resolve().name}-{number}"
        readers[name] = RunReader(path, id=name)
    return readers


class RunReader:
    """One run, kept open. Its methods may be called from several threads."""

    def __init__(self, path: Path, *, id: str | None = None) -> None:
        self.path, self.id = path, id or path.resolve().name
        self._curves = CurveReader(path)
        self.rollouts = RolloutReader(path)
        self._lock = threading.Lock()

    def row(self) -> RunRow:
        """Return the run's line in a table of runs."""
        config, manifest, summary = self._config(), self._json("manifest.json"), self._json("summary.json")
        curves = self.curves()
        before, after = (summary.get(f"eval_{name}") or {} for name in ("before", "after"))
        started = manifest.get("started")
        kind = str(config.get("kind", ""))

        def last(name: str) -> float | None:
            column = curves.columns.get(name)
            return None if column is None or not len(column) else float(column[-1])

        return RunRow(
            id=self.id,
            path=self.path,
            state=str(summary.get("outcome", "training")),
            where=None,
            model=str(config.get("model", {}).get("name", "")),
            algorithm=str(config.get("algorithm", {}).get("name", kind)),
            kind=kind,
            steps=len(curves.steps),
            total=config.get("steps"),
            started=None if started is None else datetime.fromisoformat(started).timestamp(),
            seconds=summary.get("wall_seconds"),
            reward=last("reward/mean"),
            accuracy_before=before.get("lenient_accuracy"),
            accuracy_after=after.get("lenient_accuracy"),
            tokens_per_second=last("throughput/tokens_per_second"),
            gap=last("logprob_gap_mean"),
            error=summary.get("error"),
            problems=curves.problems,
        )

    def curves(self) -> Curves:
        """Return the metrics that are there now."""
        return self._curves.read()

    def presets(self) -> tuple[Preset, ...]:
        """Return the charts that this kind of run has first."""
        return presets(str(self._config().get("kind", "")))

    def step(self, number: int) -> StepDetail:
        """Return one step; what is missing of it is in its problems."""
        return step_detail(number, self.curves().at(number))

    def about(self) -> About:
        """Return what the run is."""
        manifest = self._json("manifest.json")
        return About(
            config=(),
            versions={
                name: str(manifest[name]) for name in ("lockstep", "torch", "python") if name in manifest
            },
            axes={name: str(value) for name, value in manifest.get("axes", {}).items()},
            contract=manifest.get("contract"),
            plan=manifest.get("axes", {}).get("memory", {}),
            evaluations=self.curves().evaluations,
            samples=(),
            log=(),
            resume=None,
            reports=(),
        )

    def changed(self) -> float:
        """Return the Unix seconds at which one of the run's files changed last, for an ETag."""
        files = [self.path / name for name in ("metrics.jsonl", "summary.json", "manifest.json", "rollouts")]
        return max((file.stat().st_mtime for file in files if file.exists()), default=time.time())

    def _config(self) -> dict[str, Any]:
        return tomllib.loads((self.path / "config.toml").read_text(encoding="utf-8"))

    def _json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
