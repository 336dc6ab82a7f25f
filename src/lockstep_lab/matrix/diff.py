"""Two matrices against each other: two torch versions, two commits, two machines.

Cells are matched by their axis values. What is worse in the second is a regression: a cell that worked and
does not, or agreed with its reference and does not. Changed times and differences are only reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from lockstep_lab.matrix.report import result_text
from lockstep_lab.matrix.result import CellResult, MatrixResult
from lockstep_lab.suite.report import NOTHING, Column, Row, Tone, at, figures, print_line, print_table

if TYPE_CHECKING:
    from rich.console import Console

Change = Literal["worse", "better", "other", "same", "only in A", "only in B"]

SPEED_THRESHOLD = 0.1
"""A relative change of tokens per second above this is reported."""
GREW = 2.0
"""A difference to the reference cell that grew by more than this factor is reported."""
NOISE = {"logprob": 1e-6, "gradient": 1e-6}
"""Differences below these are noise and have not grown: nats, relative."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CellDiff:
    """One cell in both matrices."""

    name: str
    change: Change
    """How the status changed: whether the cell works, and agrees."""
    before: str
    after: str
    """The cell's status: "works, agrees"; with the reason where it does not work."""
    speed: float | None
    """Tokens per second, B over A; None: not known or not comparable in both."""
    speed_changed: bool
    memory: float | None
    """Peak memory, B over A."""
    logprob: tuple[float | None, float | None]
    """Largest logprob difference to the reference cell in A and in B, nats."""
    gradient: tuple[float | None, float | None]
    """Gradient relative error in A and in B."""
    grew: tuple[str, ...]
    """Which of "logprob" and "gradient" are farther from the reference than before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixDiff:
    """The result of `lockstep matrix diff A B`."""

    cells: tuple[CellDiff, ...]
    environment: Mapping[str, tuple[str, str]]
    """The conditions that differ: versions, machine, commit, recording, shared flags."""

    @property
    def regressions(self) -> tuple[CellDiff, ...]:
        return tuple(cell for cell in self.cells if cell.change == "worse")

    @property
    def verdict(self) -> str:
        """The verdict, which is printed last."""
        counts = {
            "worse": len(self.regressions),
            "better": sum(cell.change == "better" for cell in self.cells),
            "in one of the two only": sum(cell.change.startswith("only") for cell in self.cells),
        }
        both = len(self.cells) - counts["in one of the two only"]
        parts = [f"{count} {name}" for name, count in counts.items() if count]
        speeds = [c for c in self.cells if c.speed_changed and c.speed is not None]
        slower = [cell for cell in speeds if cell.speed is not None and cell.speed < 1]
        if speeds:
            parts.append(f"{len(slower)} slower, {len(speeds) - len(slower)} faster")
        grew = sum(bool(cell.grew) for cell in self.cells)
        if grew:
            parts.append(f"{grew} farther from the reference")
        cells = "1 cell" if both == 1 else f"{both} cells"
        return f"matrix diff: {cells} in both: {', '.join(parts) or 'nothing changed'}"

    def as_dict(self) -> dict[str, Any]:
        """The diff as JSON values, for --json."""
        return {
            "verdict": self.verdict,
            "regressions": [cell.name for cell in self.regressions],
            "environment": {name: list(pair) for name, pair in self.environment.items()},
            "cells": [asdict(cell) for cell in self.cells],
        }


def diff_matrices(
    a: MatrixResult, b: MatrixResult, *, speed_threshold: float = SPEED_THRESHOLD, grew: float = GREW
) -> MatrixDiff:
    """Compare two matrices: the changes from `a` to `b`.

    Args:
        speed_threshold: relative change of tokens per second above which a cell is reported.
        grew: factor by which a difference must have grown to be reported.
    """
    first, second = ({_key(cell): cell for cell in result.cells} for result in (a, b))
    cells = [
        _diff(first.get(key), second.get(key), speed_threshold=speed_threshold, grew=grew)
        for key in dict.fromkeys((*first, *second))
    ]
    settings = [_conditions(result) for result in (a, b)]
    names = dict.fromkeys((*settings[0], *settings[1]))
    pairs = {name: (settings[0].get(name, "-"), settings[1].get(name, "-")) for name in names}
    return MatrixDiff(
        cells=tuple(cells), environment={name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    )


def show_diff(diff: MatrixDiff, console: Console, *, everything: bool = False) -> None:
    """Print the table; unchanged cells only with `everything`."""
    for name, (before, after) in diff.environment.items():
        print_line(f"{name}: {before} -> {after}", console)
    tones: dict[str, Tone] = {"worse": "bad", "better": "good"}
    shown: list[Row] = [
        ([], (cell,), tones.get(cell.change, ""))
        for cell in diff.cells
        if everything or cell.change != "same" or cell.speed_changed or cell.grew
    ]
    if shown:
        print_table(figures(COLUMNS, shown, before=[], wraps=True), console)


def _diff(a: CellResult | None, b: CellResult | None, *, speed_threshold: float, grew: float) -> CellDiff:
    """Compare a cell in both matrices; None: it is not in that one."""
    speed = None
    if not any(cell is not None and cell.timing_note for cell in (a, b)):
        speed = _ratio(at(a, "measures.tokens_per_second"), at(b, "measures.tokens_per_second"))
    distances = {
        name: (at(a, f"comparison.{path}"), at(b, f"comparison.{path}"))
        for name, path in (("logprob", "logprob_max"), ("gradient", "gradient_relative_error"))
    }
    return CellDiff(
        name=at(b or a, "name"),
        change=_change(a, b),
        before=_state(a),
        after=_state(b),
        speed=speed,
        speed_changed=speed is not None and not 1 - speed_threshold <= speed <= 1 + speed_threshold,
        memory=_ratio(at(a, "measures.peak_memory_bytes"), at(b, "measures.peak_memory_bytes")),
        **distances,
        grew=tuple(
            name
            for name, (old, new) in distances.items()
            if old is not None and new is not None and not new <= max(grew * old, NOISE[name])
        ),
    )


def _change(a: CellResult | None, b: CellResult | None) -> Change:
    if a is None or b is None:
        return "only in A" if b is None else "only in B"
    before, after = _rank(a), _rank(b)
    if before == after:
        return "same" if a.status == b.status else "other"
    if "interrupted" in (a.status, b.status):
        return "other"
    return "worse" if after < before else "better"


def _rank(cell: CellResult) -> int:
    """Rank a cell: agrees 4, works 3, works but disagrees 2, is refused 1, fails 0."""
    if cell.works:
        return 2 if cell.agrees is False else 4 if cell.agrees or cell.reference is None else 3
    return 1 if cell.status == "refused" else 0


def _state(cell: CellResult | None) -> str:
    if cell is None:
        return NOTHING
    text = result_text(cell)
    return f"{text}: {cell.reason}" if cell.reason and not cell.works else text


def _key(cell: CellResult) -> tuple[Any, ...]:
    return (cell.is_extra, tuple(sorted(cell.values.items())) or cell.name)


def _conditions(result: MatrixResult) -> dict[str, str]:
    settings = dict(result.environment)
    settings |= {"recording": str(result.recording.get("path")), "model": str(result.recording.get("model"))}
    return settings | {"shared flags": " ".join(result.shared) or "none"}


def _ratio(a: float | None, b: float | None) -> float | None:
    return b / a if a and b else None


def _arrow(pair: tuple[float | None, float | None]) -> str:
    if pair[0] is None and pair[1] is None:
        return NOTHING
    return " -> ".join(NOTHING if value is None else f"{value:.2g}" for value in pair)


COLUMNS = (
    Column("cell", "", "name", kind=""),
    Column("A", "", "before", kind=""),
    Column("B", "", "after", kind=""),
    Column("speed", "", "speed", "{:.2f}x".format),
    Column("GiB", "", "memory", "{:.2f}x".format),
    Column("max Δlogp", "", "logprob", _arrow),
    Column("grad err", "", "gradient", _arrow),
)
"""Of a cell in both matrices."""
