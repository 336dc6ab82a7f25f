"""The columns of `lockstep bench step`: times, ratios and costs of cells."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.lab.step_bench.result import BenchResult, CellResult
from lockstep.lab.suite.report import GIB, NOTHING, Column, Head, Line, Problem, Report, Table, Tone, number

_SMALL = ("optimizer", "weights")
"""Shown without their spread."""
_PHASES = ("step", "generate", "forward", "backward", "optimizer", "weights")
_TONES: dict[str, Tone] = {"ok": "good", "refused": "warn", "interrupted": "warn"}


def report(result: BenchResult) -> Report:
    """Describe the measurement for its reports."""
    return Report(
        title=f"One RL step: {result.settings.get('model', '')}",
        verdict=result.verdict,
        tone="good" if result.ok else "bad",
        tables=[_table(result, times()), _table(result, ratios(result))],
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


def _table(result: BenchResult, columns: list[Column]) -> Table:
    return Table(
        heads=[Head("cell", kind="name"), Head("", kind="tone"), *(Head(column.head) for column in columns)],
        lines=[
            Line([cell.name, cell.status, *(c.text(cell, result.reference) for c in columns)], _tone(cell))
            for cell in result.cells
        ],
    )


_Text = Callable[[CellResult, CellResult], str]
"""The text of (a cell, the first cell)."""


def times() -> list[Column]:
    """Milliseconds of each phase."""
    columns: dict[str, _Text] = {"ranks": lambda cell, _: str(cell.ranks or NOTHING)}
    columns |= {f"{phase} ms" if phase == "step" else phase: _milliseconds(phase) for phase in _PHASES}
    return [Column(head, head, "times", text) for head, text in columns.items()]


def ratios(result: BenchResult) -> list[Column]:
    """The figures of cells compared with the first one, and their costs."""
    columns: dict[str, _Text] = {
        "x step": _ratio("step"),
        "x gen": _ratio("generate"),
        "x train": _ratio("train"),
        "gen/s": lambda cell, _: number(cell.generated_per_second, ",.0f"),
        "train/s": lambda cell, _: number(cell.trained_per_second, ",.0f"),
    }
    if any(cell.mfu is not None for cell in result.cells):
        columns["MFU"] = lambda cell, _: number(cell.mfu, ".3f")
    columns |= {
        "GiB": _memory,
        "compile": lambda cell, _: number(getattr(cell.ready, "compile_seconds", None), ".1f"),
        "first": lambda cell, _: number(getattr(cell.ready, "first_step_seconds", None), ".1f"),
        "recomp": lambda cell, _: number(getattr(cell.outcome, "recompiles", None), "d"),
        "gap": _gap,
    }
    return [Column(head, head, "ratios", text) for head, text in columns.items()]


def _milliseconds(phase: str) -> _Text:
    def text(cell: CellResult, _: CellResult) -> str:
        spread = cell.spread(phase)
        if spread is None:
            return NOTHING
        median = f"{1e3 * spread.median:,.0f}" if spread.median >= 0.1 else f"{1e3 * spread.median:.3g}"
        return median if phase in _SMALL else f"{median} ±{100 * spread.share / 2:.0f}%"

    return text


def _ratio(phase: str) -> _Text:
    return lambda cell, first: number(cell.ratio(first, phase), ".3f")


def _memory(cell: CellResult, _: CellResult) -> str:
    peak = 0 if cell.outcome is None else cell.outcome.peak_memory_bytes
    return f"{peak / GIB:.2f}" if peak else NOTHING


def _gap(cell: CellResult, _: CellResult) -> str:
    gap = None if cell.outcome is None else cell.outcome.logprob_gap
    return "0" if gap == 0 else number(gap, ".1e")


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
