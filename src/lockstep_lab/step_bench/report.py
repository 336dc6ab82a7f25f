"""The columns of `lockstep bench step`: times, ratios and costs of cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lockstep_lab.step_bench.result import BenchResult, CellResult
from lockstep_lab.suite.report import (
    NOTHING,
    Column,
    Head,
    Problem,
    Report,
    Table,
    Tone,
    figures,
    gib,
    milliseconds,
)

_SMALL = ("optimizer", "weights")
"""Shown without their spread."""
_PHASES = ("step", "generate", "forward", "backward", "optimizer", "weights")
_TONES: dict[str, Tone] = {"ok": "good", "refused": "warn", "interrupted": "warn"}


def report(result: BenchResult) -> Report:
    """Describe the measurement for its reports."""
    has_peak = any(cell.mfu is not None for cell in result.cells)  # known of some GPUs only
    return Report(
        title=f"One RL step: {result.settings.get('model', '')}",
        verdict=result.verdict,
        tone="good" if result.ok else "bad",
        tables=[
            _table(result, TIMES),
            _table(result, [column for column in RATIOS if column.head != "MFU" or has_peak]),
        ],
        problems=[
            Problem(name=cell.name, why=f"{cell.status}: {cell.reason}", tone=_tone(cell))
            for cell in result.cells
            if cell.reason
        ],
        notes=[*result.notes, explanation(result)],
        settings=result.settings,
        facts=result.machine,
        command=result.command,
    )


def _tone(cell: CellResult) -> Tone:
    return _TONES.get(cell.status, "bad")


def _table(result: BenchResult, columns: Sequence[Column]) -> Table:
    rows = (([cell.name, cell.status], (cell, result.reference), _tone(cell)) for cell in result.cells)
    return figures(columns, rows, before=[Head("cell", kind="name"), Head("", kind="tone")])


def _time(phase: str) -> Callable[[CellResult, CellResult], str | None]:
    """The column of a phase: its median and, of the larger ones, half the distance of least and largest."""

    def text(cell: CellResult, _: CellResult) -> str | None:
        spread = cell.spread(phase)
        if spread is None:
            return None
        median = milliseconds(spread.median) if spread.median >= 0.1 else f"{1000 * spread.median:.3g}"
        return median if phase in _SMALL else f"{median} ±{100 * spread.share / 2:.0f}%"

    return text


def _ratio(phase: str) -> Callable[[CellResult, CellResult], float | None]:
    return lambda cell, first: cell.ratio(first, phase)


def _memory(cell: CellResult, _: CellResult) -> int | None:
    return None if cell.outcome is None else cell.outcome.peak_memory_bytes or None


TIMES = (
    Column("ranks", "times", lambda cell, _: cell.ranks or None),
    *(Column("step ms" if phase == "step" else phase, "times", _time(phase)) for phase in _PHASES),
)
"""Milliseconds of each phase."""
RATIOS = (
    Column("x step", "ratios", _ratio("step"), ".3f"),
    Column("x gen", "ratios", _ratio("generate"), ".3f"),
    Column("x train", "ratios", _ratio("train"), ".3f"),
    Column("gen/s", "ratios", "generated_per_second", ",.0f"),
    Column("train/s", "ratios", "trained_per_second", ",.0f"),
    Column("MFU", "ratios", "mfu", ".3f"),
    Column("GiB", "ratios", _memory, gib),
    Column("compile", "ratios", "ready.compile_seconds", ".1f"),
    Column("first", "ratios", "ready.first_step_seconds", ".1f"),
    Column("recomp", "ratios", "outcome.recompiles", "d"),
    Column("gap", "ratios", "outcome.logprob_gap", lambda gap: "0" if gap == 0 else f"{gap:.1e}"),
)
"""Cells compared with the first one, and what they cost."""


def explanation(result: BenchResult) -> str:
    """Explain what the figures mean."""
    kinds = {cell.outcome.memory_kind for cell in result.measured if cell.outcome is not None}
    first = result.reference.name if result.cells else NOTHING
    return (
        "times are medians in milliseconds, ± half the distance of least and largest; x is the median over "
        f"turns of the time beside {first}'s; train is forward and backward with what is between them; gen/s "
        "are tokens sampled, train/s tokens trained on with their prompts; compile and first (the first "
        "step) are seconds; gap is the largest difference of a sampled token's logprob, in nats"
        + (f"; GiB: {', '.join(sorted(kinds))}" if kinds else "")
    )
