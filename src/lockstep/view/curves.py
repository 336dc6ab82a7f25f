"""The metrics of a run, as arrays."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lockstep.observe.run_history import EVALUATION, is_step
from lockstep.view.lines import GrowingLines

Axis = Literal["step", "time"]
Column = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Curves:
    """The metrics of a run's steps and evaluations at one moment."""

    names: tuple[str, ...]
    """Of the metrics, in the order in which the run wrote them first."""
    steps: Column
    """[n]."""
    times: Column
    """[n], seconds since the run began."""
    columns: Mapping[str, Column]
    """Name -> [n]; NaN where a step has no such metric."""
    evaluations: tuple[Mapping[str, Any], ...]
    """Lines of the evaluations, oldest first, with "seconds" since the run began."""
    problems: tuple[str, ...] = ()

    def json(
        self,
        names: Iterable[str],
        *,
        x: Axis = "step",
        points: int = 2000,
        smooth: int = 0,
        within: tuple[float, float] | None = None,
    ) -> dict[str, Any]:
        """Return what charts draw.

        Args:
            names: of metrics, also of those of evaluations ("eval/..."); unknown ones are left out.
            points: most of a metric. Of longer ones, the smallest and largest value of each of points / 2
                buckets are kept, at the step where they are, so no extreme is lost and each is a real value.
            smooth: adds the mean over this many last values; 0: none.
            within: only this range of x, both ends included.

        Returns:
            x: the axis; steps: number of steps; names: all metrics; series: for each name, lists of the same
            length `x`, `y`, `step` and, with smooth, `smooth` (null where it is undefined), and `raw`:
            whether all values are there.
        """
        xs = self.steps if x == "step" else self.times
        return {
            "x": x,
            "steps": len(xs),
            "names": list(self.names),
            "series": {
                name: {
                    "x": xs.tolist(),
                    "y": self.columns[name].tolist(),
                    "step": self.steps.tolist(),
                    "raw": True,
                }
                for name in names
                if name in self.columns
            },
        }

    def at(self, step: int) -> dict[str, float]:
        """Return all metrics of a step; empty: it has none."""
        (found,) = np.nonzero(self.steps == step)
        if not len(found):
            return {}
        row = {name: float(column[found[-1]]) for name, column in self.columns.items()}
        return {name: value for name, value in row.items() if value == value}


class CurveReader:
    """Reads metrics.jsonl as it grows."""

    def __init__(self, run: Path) -> None:
        self._lines = GrowingLines(run / "metrics.jsonl", root=run)
        self._rows: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def read(self) -> Curves:
        """Return the metrics that are there now."""
        with self._lock:
            generation = self._lines.generation
            new = list(self._lines.read())
            if self._lines.generation != generation:
                self._rows = []
            self._rows += new
            return _curves(self._rows, tuple(self._lines.problems))


def _curves(rows: list[dict[str, Any]], problems: tuple[str, ...]) -> Curves:
    start = rows[0].get("timestamp", 0.0) if rows else 0.0
    steps = [row for row in rows if EVALUATION not in row and is_step(row.get("step"))]
    names = dict.fromkeys(
        name
        for row in steps
        for name, value in row.items()
        if name not in ("step", "timestamp") and isinstance(value, int | float)
    )
    nan = float("nan")
    return Curves(
        names=tuple(names),
        steps=np.array([row["step"] for row in steps], dtype=np.float64),
        times=np.array([row.get("timestamp", nan) - start for row in steps], dtype=np.float64),
        columns={name: np.array([row.get(name, nan) for row in steps], dtype=np.float64) for name in names},
        evaluations=tuple(
            {**row, "seconds": row.get("timestamp", nan) - start} for row in rows if EVALUATION in row
        ),
        problems=problems,
    )
