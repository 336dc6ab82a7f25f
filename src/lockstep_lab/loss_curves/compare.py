"""`lockstep parity compare`: the losses of two runs, or another figure, step by step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import ConfigError
from lockstep_lab.loss_curves.differences import Spread, direction, ratio, relative, spread
from lockstep_lab.loss_curves.draw import COLOURS, Curve, Panel, write_png
from lockstep_lab.loss_curves.read import Losses
from lockstep_lab.suite.report import Column, Head, Row, figures, print_line, print_table

if TYPE_CHECKING:
    from rich.console import Console

LEAST = 1e-4
"""Differences of values nearer to 0 are relative to this: at a threshold of 0.05, 5e-6 passes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveComparison:
    """Two runs, b against a."""

    a: Losses
    b: Losses
    steps: tuple[int, ...]
    """The steps compared, by a's numbers."""
    losses: tuple[tuple[float, float], ...]
    """(a's, b's) at each of them."""
    differences: tuple[float, ...]
    """Relative to a's value."""
    floor: float
    """Values of a below it count as this large; 0 unless a's values change their sign."""
    threshold: float
    notes: tuple[str, ...]

    @property
    def spread(self) -> Spread:
        return spread(self.differences)

    @property
    def ok(self) -> bool:
        """Whether no difference is above the threshold, and every value is finite."""
        return self.spread.max <= self.threshold

    @property
    def name(self) -> str:
        """What is compared, after a number of them: "losses", or "values of KEY"."""
        keys = dict.fromkeys((self.a.key, self.b.key))
        return "losses" if all("loss" in key.lower() for key in keys) else f"values of {' and '.join(keys)}"

    @property
    def verdict(self) -> str:
        """The verdict, which is printed last."""
        for losses in (self.a, self.b):
            for step, value in zip(losses.steps, losses.values, strict=True):
                if not math.isfinite(value):
                    return f"parity: differs, {losses.key} of {losses.path} is {value} at step {step}"
        spread, limit = self.spread, ratio(self.threshold)
        at = self.steps[spread.at - 1]
        if self.ok:
            return (
                f"parity: {len(self.steps)} {self.name} agree within {limit} (largest relative difference "
                f"{ratio(spread.max)} at step {at})"
            )
        over = sum(not difference <= self.threshold for difference in self.differences)
        return (
            f"parity: {over} of {len(self.steps)} {self.name} differ by more than {limit} (largest "
            f"relative difference {ratio(spread.max)} at step {at})"
        )

    def as_dict(self) -> dict[str, Any]:
        """The comparison as JSON values."""
        return {
            "ok": self.ok,
            "verdict": self.verdict,
            "threshold": self.threshold,
            "steps": list(self.steps),
            "max": self.spread.max,
            "mean": self.spread.mean,
            "at_step": self.steps[self.spread.at - 1],
            "differences": list(self.differences),
            "floor": self.floor,
            "notes": list(self.notes),
            "a": _run_dict(self.a),
            "b": _run_dict(self.b),
        }


def compare_losses(a: Losses, b: Losses, *, threshold: float, common: bool = False) -> CurveComparison:
    """Step by step, by step number where both have the same ones, else in order.

    Args:
        common: compare the steps that both have, however many each has.

    Raises:
        ConfigError: the runs have different numbers of values, or nothing in common.
    """
    notes = [f"{losses.path}: {note}" for losses in (a, b) for note in losses.notes]
    ours, theirs = dict(zip(a.steps, a.values, strict=True)), dict(zip(b.steps, b.values, strict=True))
    if a.steps == b.steps:
        pairs = [(step, ours[step], theirs[step]) for step in a.steps]
    elif len(a.steps) == len(b.steps):
        notes.append(
            f"steps {a.steps[0]} to {a.steps[-1]} of a and {b.steps[0]} to {b.steps[-1]} of b are compared "
            "in their order"
        )
        pairs = list(zip(a.steps, a.values, b.values, strict=True))
    elif not common:
        raise ConfigError(
            f"wrong-shape: {a.path} has {len(a.steps)} values of {a.key}, but {b.path} has {len(b.steps)}; "
            "with --common only the steps that both have are compared"
        )
    else:
        pairs = [(step, ours[step], theirs[step]) for step in a.steps if step in theirs]
        notes.append(f"{len(pairs)} steps are in both, of {len(a.steps)} and {len(b.steps)}")
    if not pairs:
        raise ConfigError(
            f"nothing-to-do: {a.path} (steps {a.steps[0]} to {a.steps[-1]}) and {b.path} (steps {b.steps[0]} "
            f"to {b.steps[-1]}) have no step in common"
        )
    floor = _floor([value for _, value, _ in pairs])
    if floor:
        notes.append(f"the values of a are around 0: differences are relative to at least {floor:.3g}")
    return CurveComparison(
        a=a,
        b=b,
        steps=tuple(step for step, _, _ in pairs),
        losses=tuple((x, y) for _, x, y in pairs),
        differences=tuple(relative(y, x, floor=floor) for _, x, y in pairs),
        floor=floor,
        threshold=threshold,
        notes=tuple(notes),
    )


def _floor(values: list[float]) -> float:
    """Where values change their sign their mean size; and never less than LEAST where one is smaller: the
    loss of GRPO on the sampling policy is 0 but for the float32 rounding of its terms."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return 0.0
    changes_sign = min(finite) <= 0 <= max(finite)
    floor = math.fsum(map(abs, finite)) / len(finite) if changes_sign else 0.0
    return max(floor, LEAST) if min(map(abs, finite)) < LEAST else floor


def show(comparison: CurveComparison, console: Console) -> None:
    """Print a row per run, a row per step (at most 20 of them), and the notes."""
    runs: list[Row] = [
        ([f"{letter}: {losses.path}"], (losses,), "")
        for letter, losses in (("a", comparison.a), ("b", comparison.b))
    ]
    print_table(figures(RUNS, runs, before=[Head("run", kind="")]), console)
    steps: list[Row] = [
        ([], (comparison, i), "" if comparison.differences[i] <= comparison.threshold else "bad")
        for i in _shown(len(comparison.steps))
    ]
    print_table(figures(STEPS, steps, before=[]), console)
    for note in comparison.notes:
        print_line(note, console)


def _shown(count: int, *, most: int = 20) -> list[int]:
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def plot(comparison: CurveComparison, path: Path) -> None:
    """Draw both curves and their differences as a PNG. Raises ConfigError."""
    if not path.parent.is_dir():
        raise ConfigError(f"no-such-file: --plot {path}: there is no folder {path.parent}")
    losses = [
        Curve(
            name=f"{name}: {run.path}",
            steps=comparison.steps,
            values=[pair[i] for pair in comparison.losses],
            colour=COLOURS[i],
            dashed=i == 1,
        )
        for i, (name, run) in enumerate((("a", comparison.a), ("b", comparison.b)))
    ]
    far = Curve(name="difference", steps=comparison.steps, values=comparison.differences, colour=COLOURS[2])
    write_png(
        [
            Panel(title=comparison.a.key, curves=losses),
            Panel(title="relative difference (0 is drawn at 1e-9)", curves=[far], log=True),
        ],
        path,
    )


def _run_dict(losses: Losses) -> dict[str, Any]:
    return {
        "path": str(losses.path),
        "key": losses.key,
        "source": losses.source,
        "steps": list(losses.steps),
        "values": list(losses.values),
        "trend": direction(losses.values),
        "notes": list(losses.notes),
    }


RUNS = (
    Column("taken from", "", "source", kind=""),
    Column("steps", "", lambda run: len(run.steps)),
    Column("first", "", lambda run: run.values[0], ".6g"),
    Column("last", "", lambda run: run.values[-1], ".6g"),
    Column("trend", "", lambda run: direction(run.values), kind=""),
)
STEPS = (
    Column("step", "", lambda both, i: both.steps[i]),
    Column("a", "", lambda both, i: both.losses[i][0], ".6g"),
    Column("b", "", lambda both, i: both.losses[i][1], ".6g"),
    Column("difference", "", lambda both, i: both.differences[i], ratio),
)
"""Of a comparison and the position of one of its steps."""
