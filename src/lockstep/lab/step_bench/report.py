"""The result of `lockstep bench step` as a table for the terminal and as bench.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.lab.step_bench.result import BenchResult, CellResult
from lockstep.observe.files import write_atomic, write_json
from lockstep.observe.text import printable_lines

if TYPE_CHECKING:
    from rich.console import Console

NOTHING = "-"
_GIB = 1024**3
_SMALL = ("optimizer", "weights")
"""Shown without their spread."""
_PHASES = ("step", "generate", "forward", "backward", "optimizer", "weights")

Column = tuple[str, Callable[[CellResult, CellResult], str]]
"""Head, and the text of (a cell, the first cell)."""


def _milliseconds(value: float) -> str:
    return f"{1e3 * value:,.0f}" if value >= 0.1 else f"{1e3 * value:.3g}"


def _seconds(phase: str) -> Callable[[CellResult, CellResult], str]:
    def text(cell: CellResult, _: CellResult) -> str:
        spread = cell.spread(phase)
        if spread is None:
            return NOTHING
        number = _milliseconds(spread.median)
        return number if phase in _SMALL else f"{number} ±{100 * spread.share / 2:.0f}%"

    return text


def _ratio(phase: str) -> Callable[[CellResult, CellResult], str]:
    def text(cell: CellResult, first: CellResult) -> str:
        return _number(cell.ratio(first, phase), "{:.3f}")

    return text


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None else form.format(value)


def times(_: BenchResult) -> tuple[Column, ...]:
    """Milliseconds of each phase."""
    return (
        ("ranks", lambda cell, _: str(cell.ranks or NOTHING)),
        *((f"{phase} ms" if phase == "step" else phase, _seconds(phase)) for phase in _PHASES),
    )


def ratios(result: BenchResult) -> tuple[Column, ...]:
    """The figures of cells compared with the first one, and their costs."""
    return (
        ("x step", _ratio("step")),
        ("x gen", _ratio("generate")),
        ("x train", _ratio("train")),
        ("gen/s", lambda cell, _: _number(cell.generated_per_second, "{:,.0f}")),
        ("train/s", lambda cell, _: _number(cell.trained_per_second, "{:,.0f}")),
        *((("MFU", _mfu),) if any(cell.mfu is not None for cell in result.cells) else ()),
        ("GiB", _memory),
        ("compile", lambda cell, _: NOTHING if cell.ready is None else f"{cell.ready.compile_seconds:.1f}"),
        ("first", _first),
        ("recomp", lambda cell, _: NOTHING if cell.outcome is None else str(cell.outcome.recompiles)),
        ("gap", _gap),
    )


def _mfu(cell: CellResult, _: CellResult) -> str:
    return _number(cell.mfu, "{:.3f}")


def _memory(cell: CellResult, _: CellResult) -> str:
    peak = 0 if cell.outcome is None else cell.outcome.peak_memory_bytes
    return f"{peak / _GIB:.2f}" if peak else NOTHING


def _first(cell: CellResult, _: CellResult) -> str:
    return NOTHING if cell.ready is None else f"{cell.ready.first_step_seconds:.1f}"


def _gap(cell: CellResult, _: CellResult) -> str:
    gap = None if cell.outcome is None else cell.outcome.logprob_gap
    return NOTHING if gap is None else "0" if gap == 0 else f"{gap:.1e}"


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


def show(result: BenchResult, console: Console) -> None:
    """Print two tables, then the settings and what was not measured."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    for columns in ((("", lambda cell, _: cell.status), *times(result)), ratios(result)):
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
        width = min(32, max(len(cell.name) for cell in result.cells))
        table.add_column("cell", overflow="fold", min_width=width)
        for head, _ in columns:
            table.add_column(head, justify="right" if head else "left", no_wrap=True)
        for cell in result.cells:
            texts = [Text(text(cell, result.reference)) for _, text in columns]
            style = "red" if cell.status in ("failed", "oom", "hung") else None
            table.add_row(Text(cell.name), *texts, style=style)
        console.print(table)
        console.print()
    for name, value in result.settings.items():
        console.print(Text(printable_lines(f"{name}: {value}")), soft_wrap=True)
    for line in (*result.notes, explanation(result)):
        console.print(Text(printable_lines(line)), soft_wrap=True)
    for cell in result.cells:
        if cell.reason:
            console.print(Text(printable_lines(f"{cell.name}: {cell.status}: {cell.reason}")), soft_wrap=True)


def write_reports(result: BenchResult, out: Path) -> None:
    """Write bench.json and bench.md into `out`."""
    write_json(out / "bench.json", result.as_dict())
    write_atomic(out / "bench.md", markdown(result))


def markdown(result: BenchResult) -> str:
    """Format bench.md: the tables and everything needed to repeat them."""
    lines = [
        f"# One RL step: {printable_lines(str(result.settings.get('model', '')))}",
        "",
        result.verdict,
        "",
    ]
    for columns in (times(result), ratios(result)):
        lines += ["| cell | | " + " | ".join(head for head, _ in columns) + " |"]
        lines += ["|---|---|" + "---:|" * len(columns)]
        for cell in result.cells:
            texts = [text(cell, result.reference) for _, text in columns]
            lines.append("| " + " | ".join([cell.name, cell.status, *texts]) + " |")
        lines.append("")
    lines += [explanation(result) + ".", ""]
    lines += [f"- {printable_lines(note)}" for note in result.notes]
    lines += [f"- {cell.name}: {printable_lines(cell.reason)}" for cell in result.cells if cell.reason]
    lines += ["", "| | |", "|---|---|"]
    facts = [*result.settings.items(), *result.machine.items()]
    lines += [f"| {name} | {printable_lines(str(value)).replace('|', '/')} |" for name, value in facts]
    command = printable_lines(result.command).replace("\n", " ").replace("```", "'''")
    return "\n".join([*lines, "", "```text", command, "```", ""])
