"""The metrics of a run, as arrays that grow with metrics.jsonl."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lockstep.observe.run_history import EVALUATION, is_step
from lockstep.view.lines import GrowingLines

Axis = Literal["step", "time"]
Column = NDArray[np.float64]
LONGEST_MEAN = 1000
"""Most steps that are smoothed over."""
_BATCH = 200
"""Lines that are in memory as objects at a time."""
_NUMBERS = {float, int, type(None)}
_SPELLED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, kw_only=True, slots=True)
class Curves:
    """The metrics of a run's steps and evaluations at one moment."""

    names: tuple[str, ...]
    """Names of the metrics, in the order in which the run wrote them first."""
    steps: Column
    """[n]."""
    times: Column
    """[n], seconds since the run began."""
    started: float | None
    """Unix seconds of time 0; None before the first line."""
    columns: Mapping[str, Column]
    """Name -> [n]; NaN where a step has no such metric."""
    not_finite: Mapping[str, tuple[int, ...]]
    """Name -> the steps at which NaN or an infinity was logged."""
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
            points: most of a metric. Of longer ones, the first and the last value and the smallest and the
                largest of each of about points / 2 buckets are kept, at the step where they are: no extreme
                is lost, and every point is a value that was logged. A smaller range shows more of them.
            smooth: adds the mean over this many last values, up to LONGEST_MEAN; 0: none.
            within: only this range of x, both ends included.

        Returns:
            x: the axis; steps: number of steps; names: of all metrics of steps; series: for each name, lists
            of the same length `x`, `y`, `step` and, with smooth, `smooth`; `raw`: whether all values are
            there; `not_finite`: steps at which NaN or an infinity was logged, which have no point.
        """
        series = {}
        for name in names:
            found = self._series(name)
            if found is not None:
                steps, times, values = found
                xs = steps if x == "step" else times
                series[name] = {
                    **_drawn(xs, values, steps, points=points, smooth=smooth, within=within),
                    "not_finite": list(self.not_finite.get(name, ())),
                }
        return {"x": x, "steps": len(self.steps), "names": list(self.names), "series": series}

    def _series(self, name: str) -> tuple[Column, Column, Column] | None:
        """Steps, times and values of a metric, of evaluations too; None if there is none."""
        if name in self.columns:
            return self.steps, self.times, self.columns[name]
        rows = [row for row in self.evaluations if name.startswith("eval/") and name in row]
        if not rows:
            return None
        steps, times = (_column([row.get(key) for row in rows]) for key in ("step", "seconds"))
        return steps, times, _column([row[name] for row in rows])

    def at(self, step: int) -> dict[str, float]:
        """Return all metrics of a step, as they were logged; empty if there is none."""
        (found,) = np.nonzero(self.steps == step)
        if not len(found):
            return {}
        row = {name: float(column[found[-1]]) for name, column in self.columns.items()}
        return {n: v for n, v in row.items() if v == v or step in self.not_finite.get(n, ())}


def _drawn(
    xs: Column,
    ys: Column,
    steps: Column,
    *,
    points: int,
    smooth: int,
    within: tuple[float, float] | None,
) -> dict[str, Any]:
    there = np.isfinite(ys) & np.isfinite(xs)
    xs, ys, steps = xs[there], ys[there], steps[there]
    means = trailing_mean(ys, min(smooth, LONGEST_MEAN)) if smooth > 1 else None
    shown = np.arange(len(xs))
    if within is not None:
        shown = shown[(xs >= within[0]) & (xs <= within[1])]
    kept = shown[thin(ys[shown], points)]
    drawn: dict[str, Any] = {"x": xs[kept].tolist(), "y": ys[kept].tolist()}
    drawn["step"] = steps[kept].astype(int).tolist()
    if means is not None:
        # Means of values near the largest float can be infinite, for which JSON has no number.
        drawn["smooth"] = [mean if math.isfinite(mean) else None for mean in means[kept].tolist()]
    return {**drawn, "raw": len(kept) == len(shown)}


def thin(values: Column, points: int) -> NDArray[np.intp]:
    """Return the indices of at most about `points` of [n] values, in order: the first, the last, and the
    smallest and the largest of buckets of equal size."""
    count = len(values)
    if count <= points:
        return np.arange(count)
    buckets = max(1, points // 2 - 1)
    width = math.ceil(count / buckets)
    # The last bucket is filled up with its last value, which changes neither extreme.
    filled = np.concatenate([values, np.full(-count % width, values[-1])]).reshape(-1, width)
    starts = np.arange(len(filled)) * width
    extremes = [starts + filled.argmin(axis=1), starts + filled.argmax(axis=1)]
    kept: NDArray[np.intp] = np.unique(np.concatenate([[0, count - 1], *extremes]))
    return kept


def trailing_mean(values: Column, width: int) -> Column:
    """Return, for each of [n] values, the mean of it and the up to width - 1 values before it."""
    if not len(values):
        return values
    # Not a difference of cumulative sums: there, one huge value would spoil all means after it.
    sums = np.convolve(values, np.ones(width))[: len(values)]
    means: Column = sums / np.minimum(np.arange(1, len(values) + 1), width)
    return means


class CurveReader:
    """Reads metrics.jsonl as it grows. Safe from several threads."""

    def __init__(self, run: Path) -> None:
        self._lines = GrowingLines(run / "metrics.jsonl", root=run)
        self._table = _Table()
        self._lock = threading.Lock()
        self._curves: Curves | None = None

    @property
    def is_read(self) -> bool:
        """Whether the file was read already, so that `read` is quick."""
        return self._curves is not None

    def read(self, *, started: float | None = None) -> Curves:
        """Return the metrics that are there now.

        Args:
            started: Unix seconds at which the run began; None: at its first line.
        """
        with self._lock:
            before, generation = self._curves, self._lines.generation
            rows, changed = self._lines.read(), False
            while batch := list(islice(rows, _BATCH)):
                if self._lines.generation != generation:
                    generation, self._table = self._lines.generation, _Table()
                self._table.add(batch)
                changed = True
            if self._lines.generation != generation:  # it has no lines now
                self._table, changed = _Table(), True
            problems = tuple(self._lines.problems)
            if before is None or changed or problems != before.problems:
                self._curves = before = self._table.curves(problems, started=started)
            return before


@dataclass(slots=True)
class _Grown:
    """A column that grows. What `values` returned stays as it was."""

    count: int = 0
    _data: Column = field(default_factory=lambda: np.empty(0))

    def pad(self, count: int) -> None:
        """Fill up with NaN."""
        self.add(np.full(count - self.count, np.nan))

    def add(self, values: Column) -> None:
        end = self.count + len(values)
        if end > len(self._data):
            grown = np.empty(max(end, len(self._data) * 3 // 2))
            grown[: self.count] = self._data[: self.count]
            self._data = grown
        self._data[self.count : end] = values
        self.count = end

    def values(self) -> Column:
        return self._data[: self.count]


class _Table:
    """The lines of metrics.jsonl by column."""

    def __init__(self) -> None:
        self._count = 0
        self._steps, self._stamps = _Grown(), _Grown()
        self._columns: dict[str, _Grown] = {}
        self._not_finite: dict[str, list[int]] = {}
        self._evaluations: list[dict[str, Any]] = []
        self._first: float | None = None

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add lines."""
        if self._first is None and rows:
            self._first = _number(rows[0].get("timestamp"))
        self._evaluations += [dict(row) for row in rows if EVALUATION in row and is_step(row.get("step"))]
        steps = [row for row in rows if EVALUATION not in row and is_step(row.get("step"))]
        self._steps.add(_column([row["step"] for row in steps]))
        self._stamps.add(_column([row.get("timestamp") for row in steps]))
        for name, values in _by_name(steps):
            if name not in ("step", "timestamp"):
                self._add(name, values, steps)
        self._count += len(steps)

    def _add(self, name: str, values: Sequence[Any], rows: Sequence[Mapping[str, Any]]) -> None:
        column = _column(values)
        if not np.isfinite(column).all():
            odd = [index for index, value in enumerate(column) if not math.isfinite(value)]
            logged = [rows[index]["step"] for index in odd if _number(values[index]) is not None]
            if logged:
                self._not_finite.setdefault(name, []).extend(logged)
            elif len(odd) == len(values) and name not in self._columns:
                return  # text, such as weights_hash
        grown = self._columns.setdefault(name, _Grown())
        grown.pad(self._count)
        grown.add(column)

    def curves(self, problems: tuple[str, ...], *, started: float | None) -> Curves:
        """Return what there is."""
        started = self._first if started is None else started
        start = started or 0.0
        for column in self._columns.values():
            column.pad(self._count)
        evaluations = [
            {**row, "seconds": (_number(row.get("timestamp")) or math.nan) - start}
            for row in self._evaluations
        ]
        return Curves(
            names=tuple(self._columns),
            steps=self._steps.values(),
            times=self._stamps.values() - start,
            started=started,
            columns={name: column.values() for name, column in self._columns.items()},
            not_finite={name: tuple(steps) for name, steps in self._not_finite.items()},
            evaluations=tuple(evaluations),
            problems=problems,
        )


def _by_name(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield the values of each name; None where a row has none."""
    names = tuple(rows[0]) if rows else ()
    if all(tuple(row) == names for row in rows):  # as nearly always; much faster than to look up each
        yield from zip(names, zip(*(row.values() for row in rows), strict=True), strict=True)
        return
    for name in dict.fromkeys(chain.from_iterable(rows)):
        yield name, [row.get(name) for row in rows]


def _column(values: Sequence[Any]) -> Column:
    """Numbers as an array; NaN for what is none."""
    if set(map(type, values)) <= _NUMBERS:
        try:
            return np.array(values, dtype=np.float64)
        except OverflowError:  # an integer that no float holds
            pass
    return np.array([math.nan if (each := _number(value)) is None else each for value in values])


def _number(value: Any) -> float | None:
    """A number of a line, where NaN and infinities are text; None: it is none."""
    if isinstance(value, str):
        return _SPELLED.get(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return float(value) if isinstance(value, bool) else None
    try:
        return float(value)
    except OverflowError:
        return None
