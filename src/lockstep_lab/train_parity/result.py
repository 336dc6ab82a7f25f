"""The results of a parity run: a row per stack, its two verdicts, parity.json.

Agreement: the stacks take the steps of the reference. Learning: the loss falls. Stacks may agree on a
loss that does not fall.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lockstep_lab.loss_curves.differences import WINDOW, Falls, ratio
from lockstep_lab.suite.result import SuiteResult, SuiteRow
from lockstep_lab.train_parity.compare import Comparison
from lockstep_lab.train_parity.job import Role, StepRow

ENOUGH_STEPS = 2 * WINDOW
"""Steps that are enough to show whether a loss falls; in fewer, a loss that does not fall proves nothing."""
Learning = Literal["falls", "does not fall", "not shown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StackResult(SuiteRow):
    """One stack; the name of a value model's row: see `row_name`."""

    role: Role = "policy"
    """The model that was trained: value is PPO's second one."""
    ranks: int = 0
    rows: tuple[StepRow, ...] = ()
    falls: Falls | None = None
    comparison: Comparison | None = None
    """None for the reference, and where there is nothing to compare."""
    is_reference: bool = False
    attention: str = ""
    dtype: str = ""
    statement: str = ""
    problems: tuple[str, ...] = ()
    """Why the stack does not agree; empty: it does, or was skipped."""
    learning: Learning | None = None
    """The other verdict; None: the stack did not run to its end."""

    @property
    def learning_problem(self) -> str:
        """Why learning does not hold; empty: it does, or too few steps show it."""
        if self.learning != "does not fall" or self.falls is None:
            return ""
        f = self.falls
        return (
            f"the loss does not fall: {f.first:.6g} in the first {f.window} steps, {f.last:.6g} in the last, "
            f"standard error {f.standard_error:.2g}"
        )

    @property
    def completed(self) -> bool:
        return self.status == "ok"

    @property
    def verdict(self) -> str:
        """The verdict on agreement, one word."""
        if self.status != "ok":
            return self.status
        if self.problems:
            return "differs" if any("differ" in text for text in self.problems) else "fails"
        return "reference" if self.is_reference else "agrees"

    @property
    def step_seconds(self) -> float | None:
        """Median seconds of the steps after the first, which includes warm-up."""
        steady = [row.seconds for row in self.rows[1:]] or [row.seconds for row in self.rows]
        return statistics.median(steady) if steady else None

    @property
    def tokens_per_second(self) -> float | None:
        """Median of the steps after the first."""
        steady = [row.tokens_per_second for row in self.rows[1:]] or [
            row.tokens_per_second for row in self.rows
        ]
        return statistics.median(steady) if steady else None

    @property
    def peak_memory_bytes(self) -> int | None:
        """Peak memory of the rank that needed most."""
        return max((row.peak_memory_bytes for row in self.rows), default=None)

    def as_dict(self) -> dict[str, Any]:
        """The row with its curves in place of its steps."""
        figures = ("verdict", "learning_problem", "step_seconds", "tokens_per_second", "peak_memory_bytes")
        values = self.fields() | {name: getattr(self, name) for name in figures}
        del values["rows"]
        columns = ("loss", "grad_norm", "seconds", "tokens")
        curves = {name: [getattr(row, name) for row in self.rows] for name in columns}
        return values | {"steps": len(self.rows), "curves": curves}


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityResult(SuiteResult):
    """The whole run."""

    stacks: tuple[StackResult, ...]
    reference: str
    threshold: float
    algorithm: str
    must_fall: bool = True
    """False (--allow-flat): learning is reported, but does not count."""

    @property
    def judged(self) -> list[StackResult]:
        """The stacks that were not skipped."""
        return [stack for stack in self.stacks if stack.status != "skipped"]

    @property
    def agrees(self) -> bool:
        """Whether every stack that was not skipped took the reference's steps."""
        return self.complete and all(not s.problems and s.status == "ok" for s in self.judged)

    @property
    def learns(self) -> bool | None:
        """Every loss falls; None: too few steps show it, or nothing ran."""
        words = {stack.learning for stack in self.judged} - {None}
        if "does not fall" in words:
            return False
        return True if words == {"falls"} else None

    @property
    def ok(self) -> bool:
        """Whether the stacks agree and no loss is shown not to fall."""
        return self.agrees and not (self.must_fall and self.learns is False)

    @property
    def agreement(self) -> str:
        """The first verdict."""
        compared = [s for s in self.judged if not s.is_reference]
        agree = [s for s in compared if s.verdict == "agrees"]
        text = f"{len(agree)} of {len(compared)} stacks agree with {self.reference}"
        if agree:
            worst = max(agree, key=lambda s: s.comparison.loss.max if s.comparison else 0.0)
            assert worst.comparison is not None
            text += f" (largest relative loss difference {ratio(worst.comparison.loss.max)})"
        wrong = [s for s in self.judged if s.verdict not in ("agrees", "reference")]
        return text + "".join(
            f"; {s.name} {'does not pass' if s.verdict == 'fails' else s.verdict}" for s in wrong
        )

    @property
    def learning(self) -> str:
        """The second verdict."""
        ran = [stack for stack in self.judged if stack.learning is not None]
        if not ran:
            return "learning: nothing ran"
        if self.learns:
            return "learning: every loss falls"
        if self.learns is None:
            steps = max(len(stack.rows) for stack in ran)
            return f"learning: not shown in {steps} steps (--steps {ENOUGH_STEPS})"
        flat = [stack.name for stack in ran if stack.learning == "does not fall"]
        allowed = "" if self.must_fall else " (--allow-flat)"
        return f"learning: the loss does not fall in {len(flat)} of {len(ran)} ({', '.join(flat)}){allowed}"

    @property
    def verdict(self) -> str:
        """Both verdicts, which are printed last."""
        return f"parity: {self.agreement}; {self.learning}" + ("" if self.complete else "; interrupted")

    def details(self) -> dict[str, Any]:
        """The result with the curves."""
        return {
            "agreement": {"ok": self.agrees, "verdict": self.agreement},
            "learning": {"ok": self.learns, "verdict": self.learning, "counts": self.must_fall},
            "reference": self.reference,
            "threshold": self.threshold,
            "algorithm": self.algorithm,
            "stacks": self.stacks,
        }


def judge(
    stack: StackResult,
    *,
    threshold: float,
    steps: int,
    reference_ran: bool,
) -> tuple[str, ...]:
    """Judge a stack: why it does not agree; empty: it does."""
    if stack.status == "skipped":
        return ()
    if stack.status != "ok":
        return (stack.reason or stack.status,)
    problems = []
    if len(stack.rows) != steps:
        problems.append(f"{len(stack.rows)} of {steps} steps were done")
    if stack.is_reference:
        return tuple(problems)
    if stack.comparison is None:
        problems.append(
            "there is nothing to compare it with: the reference did no step"
            if not reference_ran
            else "it did no step"
        )
    elif not stack.comparison.loss.max <= threshold:  # NaN too
        loss = stack.comparison.loss
        problems.append(
            f"losses differ by {ratio(loss.max)} at step {loss.at}, more than the threshold of "
            f"{ratio(threshold)}"
        )
    return tuple(problems)


def learning(stack: StackResult, reference: StackResult) -> Learning | None:
    """The stack's second verdict. A loss that does not fall in fewer than ENOUGH_STEPS steps shows nothing
    where the reference's does not fall either."""
    if stack.falls is None or stack.status != "ok":
        return None
    if stack.falls.trend == "falls":
        return "falls"
    if any(not math.isfinite(row.loss) for row in stack.rows):
        return "does not fall"
    fell = reference.falls is not None and reference.falls.trend == "falls"
    conclusive = len(stack.rows) >= ENOUGH_STEPS or (fell and stack.falls.trend == "does not fall")
    return "does not fall" if conclusive else "not shown"


def row_name(stack: str, role: Role) -> str:
    """The name of a stack's row in the table."""
    return stack if role == "policy" else f"{stack} ({role})"


def by_name(stacks: Sequence[StackResult], name: str) -> StackResult | None:
    """The stack of that name; None: there is none."""
    return next((stack for stack in stacks if stack.name == name), None)
