"""The results of `lockstep bench step`: a row per cell, medians, ratios to the first cell, the verdict."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from lockstep.models.shapes import utilisation
from lockstep_lab.step_bench.job import BenchOutcome, Ready, StepTimes
from lockstep_lab.suite.result import SuiteResult, SuiteRow

TIMED = ("step", "generate", "train", "forward", "backward", "optimizer", "weights")
"""Fields of StepTimes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Seconds of one phase over the measured steps."""

    median: float
    least: float
    largest: float

    @property
    def share(self) -> float:
        """(largest - least) / median."""
        return (self.largest - self.least) / self.median if self.median else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CellResult(SuiteRow):
    """One cell. interrupted: Ctrl-C came before its last turn, or before it was started."""

    ranks: int = 0
    times: tuple[StepTimes, ...] = ()
    ready: Ready | None = None
    outcome: BenchOutcome | None = None
    tokens: int = 0
    """Prompts and completions of one step; 0: not known."""
    sampled_tokens: int = 0
    """Completions of one step; 0: not known."""

    def spread(self, phase: str) -> Spread | None:
        """The spread of one of `TIMED`; None: nothing was measured."""
        values = [getattr(row, phase) for row in self.times]
        if not values:
            return None
        return Spread(median=statistics.median(values), least=min(values), largest=max(values))

    def median(self, phase: str) -> float | None:
        """Median seconds of a phase; None: nothing was measured."""
        spread = self.spread(phase)
        return None if spread is None else spread.median

    @property
    def generated_per_second(self) -> float | None:
        """Sampled tokens per second of generation, all ranks together."""
        return self._per_second("generate", self.sampled_tokens)

    @property
    def trained_per_second(self) -> float | None:
        """Tokens of prompts and completions per second of forward and backward."""
        return self._per_second("train", self.tokens)

    def _per_second(self, phase: str, tokens: int) -> float | None:
        seconds = self.median(phase)
        return tokens / seconds if seconds and tokens else None

    @property
    def mfu(self) -> float | None:
        """Of forward and backward, against the dense bfloat16 peak of all GPUs; None where that is not
        known."""
        seconds, outcome = self.median("train"), self.outcome
        if not seconds or outcome is None or outcome.peak_flops is None:
            return None
        return utilisation(outcome.training_flops, seconds=seconds, peak=outcome.peak_flops)

    def ratio(self, reference: CellResult, phase: str) -> float | None:
        """Of this cell's seconds to the reference's: the median over turns, each beside the other cell's step
        of the same turn, so that what slows down the whole machine for a while falls out."""
        pairs = list(zip(self.times, reference.times, strict=False))
        ratios = [getattr(a, phase) / getattr(b, phase) for a, b in pairs if getattr(b, phase) > 0]
        return statistics.median(ratios) if ratios else None


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchResult(SuiteResult):
    """The whole measurement; the first cell is what the others are compared with."""

    cells: tuple[CellResult, ...]
    """All requested cells, in the order in which they were named."""

    @property
    def reference(self) -> CellResult:
        return self.cells[0]

    @property
    def measured(self) -> list[CellResult]:
        return [cell for cell in self.cells if cell.status == "ok"]

    @property
    def ok(self) -> bool:
        """Whether every cell was measured, or refused by its settings, and the first one was measured."""
        fine = all(cell.status in ("ok", "refused") for cell in self.cells)
        return self.complete and fine and bool(self.cells) and self.reference.status == "ok"

    @property
    def verdict(self) -> str:
        """The verdict, which is printed last."""
        head = f"bench: {len(self.measured)} of {len(self.cells)} cells measured"
        if self.measured:
            fastest = min(self.measured, key=self._beside_reference)
            head += f"; fastest step {fastest.name}, {fastest.median('step'):.3g} s"
            ratio = fastest.ratio(self.reference, "step")
            if ratio is not None and fastest is not self.reference:
                head += f", {ratio:.2f} of {self.reference.name}"
        wrong = [cell for cell in self.cells if cell.status not in ("ok", "interrupted")]
        tail = "".join(f"; {cell.name} {cell.status}" for cell in wrong)
        return head + tail + ("" if self.complete else "; interrupted")

    def _beside_reference(self, cell: CellResult) -> float:
        """Ratio of the steps; where the first cell has none, seconds."""
        return cell.ratio(self.reference, "step") or cell.median("step") or 0.0

    def details(self) -> dict[str, Any]:
        """The result with every measured step."""
        return {
            "reference": self.reference.name if self.cells else None,
            "cells": [self._cell(cell) for cell in self.cells],
        }

    def _cell(self, cell: CellResult) -> dict[str, Any]:
        return {
            **{name: getattr(cell, name) for name in ("name", "status", "reason", "ranks")},
            "seconds": {phase: cell.spread(phase) for phase in TIMED},
            "ratios": {phase: cell.ratio(self.reference, phase) for phase in TIMED},
            "generated_tokens_per_second": cell.generated_per_second,
            "trained_tokens_per_second": cell.trained_per_second,
            **{name: getattr(cell, name) for name in ("mfu", "ready", "outcome", "log")},
            "steps": cell.times,
        }
