"""A comparison of engines for the terminal, and its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.lab.engine_parity.compare import BAR_NAMES
from lockstep.lab.engine_parity.html import page
from lockstep.lab.engine_parity.result import EngineResult, EnginesResult, number
from lockstep.lab.engine_parity.text import (
    COLUMNS,
    DIVERGENCE_HEADS,
    EXAMPLE_HEADS,
    NOTHING,
    PARTS,
    cell,
    divergences,
    example_cells,
    explanation,
    lines_of,
    markdown,
    problems,
)
from lockstep.observe.files import write_atomic, write_json
from lockstep.observe.text import printable_lines

if TYPE_CHECKING:
    from rich.console import Console


def progress_line(engine: EngineResult, done: int, total: int) -> str:
    """Format a line about an engine that has just ended."""
    gaps = [phase.gap for phase in engine.phases if phase.gap is not None]
    far = f", logprob gap mean {number(max(g.mean for g in gaps))}" if gaps else ""
    why = f": {engine.why[0]}" if engine.why else ""
    return printable_lines(
        f"[{done}/{total}] {engine.name}: {engine.verdict}{far}, {engine.seconds:.1f} s{why}"
    )


def show(result: EnginesResult, console: Console) -> None:
    """Print the tables, then the settings and what did not pass."""
    from rich.text import Text

    for part in PARTS:
        part_columns = [column for column in COLUMNS if column.part == part]
        rows = []
        for engine, phase in lines_of(result):
            name = phase.phase if phase is not None else NOTHING
            rows.append((engine, [engine.name, name, *(cell(c, engine, phase) for c in part_columns)]))
        _table(console, ["engine", "phase", *(c.short for c in part_columns)], rows, left=part == "samples")
    bars = [
        (engine, [engine.name, phase.phase, *(str(n or "") for n in phase.gap.histogram)])
        for engine, phase in lines_of(result)
        if phase is not None and phase.gap is not None
    ]
    _table(console, ["gaps from", "phase", *BAR_NAMES], bars)
    examples = [
        (engine, list(example_cells(engine, phase, example)))
        for engine, phase in lines_of(result)
        if phase is not None
        for example in (phase.examples[0], phase.examples[-1])[: len(phase.examples)]
    ]
    _table(console, list(EXAMPLE_HEADS), examples, left=True)
    apart = divergences(result)
    if apart:
        by = {engine.name: engine for engine in result.engines}
        _table(console, list(DIVERGENCE_HEADS), [(by[row[0]], list(row)) for row in apart])
    for name, value in result.settings.items():
        console.print(Text(printable_lines(f"{name}: {value}")), soft_wrap=True)
    for line in (*result.notes, explanation(result)):
        console.print(Text(printable_lines(line)), soft_wrap=True)
    for name, problem in problems(result):
        console.print(Text(printable_lines(f"{name}: {problem}")), soft_wrap=True)


def _table(
    console: Console,
    heads: Sequence[str],
    rows: Sequence[tuple[EngineResult, Sequence[str]]],
    *,
    left: bool = False,
) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for index, name in enumerate(heads):
        first = index < 2
        table.add_column(name, justify="left" if first or left else "right", overflow="fold", no_wrap=first)
    for engine, cells in rows:
        table.add_row(*(Text(printable_lines(text)) for text in cells), style=None if engine.ok else "red")
    console.print(table)
    console.print()


def write_reports(result: EnginesResult, out: Path) -> None:
    """Write engines.json, engines.md and engines.html into `out`."""
    write_json(out / "engines.json", result.as_dict())
    write_atomic(out / "engines.md", markdown(result))
    write_atomic(out / "engines.html", page(result))
