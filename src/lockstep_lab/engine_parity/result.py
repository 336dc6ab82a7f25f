"""The results of a comparison of engines: a row per engine, the verdict, engines.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep_lab.engine_parity.criteria import Problem
from lockstep_lab.engine_parity.job import Outcome, Phase
from lockstep_lab.engine_parity.stats import PhaseReport
from lockstep_lab.suite.result import SuiteResult, SuiteRow


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineResult(SuiteRow):
    """One engine."""

    engine: str
    """EngineConfig.name."""
    is_reference: bool = False
    phases: tuple[PhaseReport, ...] = ()
    """The phases that the engine reached: before the update of weights, after it."""
    problems: tuple[tuple[Phase, Problem], ...] = ()
    outcome: Outcome | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of its EngineConfig that are not the defaults."""

    @property
    def ok(self) -> bool:
        return self.status == "ok" and not self.problems

    @property
    def verdict(self) -> str:
        """The verdict in one word."""
        if self.status != "ok":
            return self.status
        return "differs" if self.problems else "reference" if self.is_reference else "agrees"

    @property
    def faults(self) -> tuple[str, ...]:
        """The names of the faults, each once."""
        return tuple(dict.fromkeys(problem.fault for _, problem in self.problems))

    @property
    def why(self) -> tuple[str, ...]:
        """Why the engine does not pass, in sentences; empty: it does."""
        reasons = [self.reason or self.status] if self.status != "ok" else []
        return (*reasons, *(f"{phase}: {problem.text}" for phase, problem in self.problems))

    def as_dict(self) -> dict[str, Any]:
        """The row with all figures, by phase."""
        return self.fields() | {
            "verdict": self.verdict,
            "problems": [
                {"phase": phase, "fault": problem.fault, "text": problem.text}
                for phase, problem in self.problems
            ],
            "phases": {phase.phase: phase for phase in self.phases},
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class EnginesResult(SuiteResult):
    """The whole run."""

    engines: tuple[EngineResult, ...]
    reference: str
    threshold: float
    """Largest mean gap, nats."""

    @property
    def ok(self) -> bool:
        return self.complete and bool(self.engines) and all(engine.ok for engine in self.engines)

    @property
    def verdict(self) -> str:
        """The verdict, which is printed last."""
        good = [engine for engine in self.engines if engine.ok]
        head = f"parity engines: {len(good)} of {len(self.engines)} engines agree with the trainer"
        if len(self.engines) > 1:
            head += f" and with the greedy tokens of {self.reference}"
        gaps = [phase.gap for engine in good for phase in engine.phases if phase.gap is not None]
        if gaps:
            worst = max(gaps, key=lambda gap: gap.mean)
            head += (
                f" (largest logprob gap: mean {number(worst.mean)}, max {number(max(g.max for g in gaps))})"
            )
        bad = [engine for engine in self.engines if not engine.ok]
        tail = "".join(
            f"; {engine.name}: {', '.join(engine.faults) if engine.status == 'ok' else engine.status}"
            for engine in bad
        )
        return head + tail + ("" if self.complete else "; interrupted")

    def details(self) -> dict[str, Any]:
        """The result with all figures."""
        return {
            "reference": self.reference,
            "threshold": self.threshold,
            "engines": self.engines,
        }


def number(value: float | None) -> str:
    """Format nats as tables show them."""
    if value is None:
        return "-"
    return "NaN" if math.isnan(value) else f"{value:.1e}" if value < 0.01 else f"{value:.3g}"
