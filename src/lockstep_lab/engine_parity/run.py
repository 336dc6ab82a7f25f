"""`lockstep parity engines`: the same requests to several engines, each in a process of its own.

prompts ─► job.json per engine ─► worker: trainer + engine ─► rows.jsonl ─► figures ─► verdict

A worker that crashes, hangs or cannot start is a row with its reason; the others go on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.config.base import Seconds
from lockstep.config.engine import EngineConfig
from lockstep_lab.engine_parity.criteria import Limits, Problem, judge
from lockstep_lab.engine_parity.job import (
    PASSES,
    ROWS,
    EnginesJob,
    EnginesSettings,
    Outcome,
    Pass,
    Phase,
    Row,
)
from lockstep_lab.engine_parity.prompts import Prompts
from lockstep_lab.engine_parity.result import EngineResult, EnginesResult
from lockstep_lab.engine_parity.stats import PhaseReport, report
from lockstep_lab.suite.job_files import Options, read_lines, same_fields
from lockstep_lab.suite.run import Suite, check_folder, how_it_ended, make_folder

WORKER = ("-m", "lockstep_lab.engine_parity.worker")
"""Arguments of the interpreter that run a job file."""
PHASES: tuple[Phase, ...] = ("before", "after")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineChoice:
    """One engine to compare."""

    name: str
    """For people, files and flags."""
    config: EngineConfig


class EnginesOptions(Options, EnginesSettings):
    """The engines to compare, and on what; `timeout` is that of each engine."""

    engines: Sequence[EngineChoice]
    """The first is the reference."""
    prompts: Prompts
    threshold: float = 1e-4
    timeout: Seconds = 900.0


class _Suite(Suite[EngineChoice, EngineResult, EnginesResult]):
    """The run under way; the first engine is the reference."""

    options: EnginesOptions

    def __init__(self, options: EnginesOptions, progress: Callable[[EngineResult, int, int], None]) -> None:
        super().__init__(options, "engines", progress=progress)
        self.parts = options.engines
        self.reference_rows: tuple[Row, ...] = ()

    # --- one engine -----------------------------------------------------------------------------------------

    def run(self, part: EngineChoice) -> EngineResult:
        """Run one engine's worker and return the engine's row."""
        options = self.options
        folder = self.out / file_stem(part.name)
        log = self.out / "logs" / f"{file_stem(part.name)}.log"
        folder.mkdir()
        own = {"name": part.name, "engine": part.config, "prompts": options.prompts.ids, "out": folder}
        job = EnginesJob(**same_fields(EnginesJob, options) | own)
        exit_status = self.work(WORKER, job, log=log, timeout=options.timeout)
        outcome, rows = Outcome.read(folder), tuple(read_lines(folder / ROWS, Row))
        phases = self._phases(rows, read_lines(folder / PASSES, Pass), outcome)
        status, reason = how_it_ended(exit_status, outcome, log=log, timeout=options.timeout)
        return EngineResult(
            name=part.name,
            engine=part.config.name,
            status=status,
            reason=reason,
            is_reference=not self.results,
            phases=phases,
            problems=self._problems(part, rows, phases, outcome),
            outcome=outcome,
            seconds=exit_status.seconds,
            folder=folder.name,
            log=str(log.relative_to(self.out)),
            settings=part.config.model_dump(mode="json", exclude_defaults=True),
        )

    def _phases(
        self, rows: tuple[Row, ...], passes: Sequence[Pass], outcome: Outcome | None
    ) -> tuple[PhaseReport, ...]:
        is_reference = not self.results
        if is_reference:
            self.reference_rows = rows
        reports = (
            report(
                phase,
                rows,
                prompts=self.options.prompts.ids,
                passes=passes,
                outcome=outcome,
                reference=None if is_reference else self.reference_rows,
            )
            for phase in PHASES
        )
        return tuple(phase for phase in reports if phase is not None)

    def _problems(
        self,
        choice: EngineChoice,
        rows: Sequence[Row],
        phases: Sequence[PhaseReport],
        outcome: Outcome | None,
    ) -> tuple[tuple[Phase, Problem], ...]:
        if outcome is None:
            return ()
        limits = limits_of(self.options, choice.config)
        all_problems: list[tuple[Phase, Problem]] = []
        earlier: tuple[PhaseReport, Sequence[Row]] | None = None
        for phase in phases:
            own = [row for row in rows if row.phase == phase.phase]
            problems = judge(
                phase,
                own,
                prompts=self.options.prompts.ids,
                limits=limits,
                outcome=outcome,
                earlier=earlier,
            )
            all_problems += [(phase.phase, problem) for problem in problems]
            earlier = phase, own
        return tuple(all_problems)

    # --- all of them ----------------------------------------------------------------------------------------

    def result(self) -> EnginesResult:
        """The result so far."""
        options = self.options
        return EnginesResult(
            engines=tuple(self.results),
            reference=options.engines[0].name,
            threshold=options.threshold,
            settings=self._settings(),
            notes=options.prompts.notes,
            **self.facts(),
        )

    def _settings(self) -> Mapping[str, Any]:
        options = self.options
        ran = next((row.outcome for row in self.results if row.outcome and row.outcome.dtype), None)
        moved = next(
            (r.outcome.update_effect for r in self.results if r.outcome and r.outcome.update_effect), None
        )
        update = f"noise of {options.update_scale:g} times each matrix's root mean square"
        effect = "" if moved is None else f"; moves the trainer's logprobs by {moved:.2g} nats on average"
        return {
            "model": options.model.name,
            "data": options.prompts.source,
            "prompts": len(options.prompts.ids),
            "samples": f"{options.num_samples} of each prompt at temperature {options.temperature:g}",
            "max tokens": options.max_tokens,
            "dtype": options.model.dtype,
            "trainer": "" if ran is None else f"local backend, attention {ran.attention}",
            "weights": "pushed by the trainer" if options.weights == "pushed" else "loaded from a folder",
            "update": f"{update}{effect}" if options.update else "none",
            "threshold": f"mean gap {options.threshold:.2g} nats, one token {10 * options.threshold:.2g}",
            "seed": options.seed,
        }


def limits_of(options: EnginesOptions, config: EngineConfig) -> Limits:
    """The limits for one engine."""
    return Limits(
        mean=options.threshold,
        strict=options.model.dtype == "float32" or config.batch_invariant,
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        ignore_eos=options.ignore_eos,
        seeded=not config.unseeded,
        first_version=1 if options.weights == "pushed" else 0,
    )


def run_engines(
    options: EnginesOptions, *, progress: Callable[[EngineResult, int, int], None] = lambda *_: None
) -> EnginesResult:
    """Send the same requests to every engine and compare the results.

    Args:
        progress: called with each row, its number, and how many there are.

    Raises:
        ConfigError: OUT holds something, or this process is a rank of a launcher.
    """
    check_folder(options.out, "parity engines")
    make_folder(options.out / "logs")
    return _Suite(options, progress).run_all()


def file_stem(name: str) -> str:
    """Make a file name that any file system accepts."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("._") or "engine"
