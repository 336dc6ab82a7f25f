"""The matrix as text: tables for a terminal, and matrix.md to paste into a README or an issue."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.lab.matrix.html import write_html
from lockstep.lab.matrix.result import CellResult, MatrixResult
from lockstep.lab.matrix.text import (
    agreement,
    columns,
    conditions,
    footnotes,
    limits_text,
    problems,
    result_text,
)
from lockstep.observe.files import write_atomic
from lockstep.observe.text import printable_lines

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 100


def write_reports(result: MatrixResult, out: Path) -> None:
    """Write matrix.md and matrix.html into `out`, beside its matrix.json."""
    write_atomic(out / "matrix.md", markdown(result))
    write_html(result, out / "matrix.html")


def markdown(result: MatrixResult) -> str:
    """Format matrix.md: the table with one column per axis, and everything needed to repeat it."""
    axes = list(result.axes)
    heads = [*axes, "result", *(column.head for column in columns()), "log"]
    lines = [
        f"# Compatibility matrix: {_plain(result.recording.get('path', ''))}",
        "",
        f"**{_plain(result.verdict)}**",
        "",
        "| " + " | ".join(heads) + " |",
        "|" + "|".join([*("---" for _ in axes), "---", *("---:" for _ in columns()), "---"]) + "|",
    ]
    for cell in result.cells:
        if cell.is_extra:
            names = [f"*{_plain(cell.name)}*", *("" for _ in axes[1:])]
        else:
            names = [_plain(cell.values.get(axis, "")) for axis in axes]
        figures = [_plain(column.text(result, cell)) for column in columns()]
        log = f"[log]({_link(cell.log)})" if cell.log else ""
        lines.append("| " + " | ".join([*names, _plain(result_text(cell)), *figures, log]) + " |")
    lines.append("")
    broken = problems(result)
    if broken:
        lines += ["## What did not work", ""]
        for cell, why in broken:
            log = f" ([log]({_link(cell.log)}))" if cell.log else ""
            lines += [f"- **{_plain(cell.name)}**: {_plain(why)}{log}", f"  `{_code(cell.command)}`"]
        lines.append("")
    lines += [
        f"- {_plain(text)}" if mark == "-" else f"{mark} {_plain(text)}\n" for mark, text in footnotes(result)
    ]
    lines += ["", _plain(limits_text(result)), "", "| | |", "|---|---|"]
    lines += [f"| {_plain(name)} | {_plain(value)} |" for name, value in conditions(result)]
    lines += ["", "Each cell as a command:", "", "```text"]
    lines += [f"{_fenced(cell.command)}" for cell in result.cells]
    return "\n".join([*lines, "```", ""])


def show(result: MatrixResult, console: Console) -> None:
    """Print two tables, one of speed and one of differences, then what did not work."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    def text(value: str) -> Text:
        return Text(printable_lines(value))

    width = min(30, max(len(cell.name) for cell in result.cells))
    for head, part in (("works", "speed"), ("agrees", "numbers")):
        part_columns = [column for column in columns() if column.part == part]
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
        table.add_column("cell", overflow="fold", min_width=width)
        table.add_column(head, overflow="fold", min_width=9)
        for column in part_columns:
            table.add_column(column.short, justify="right", no_wrap=True)
        for cell in result.cells:
            style = None if cell.works and cell.agrees is not False else "yellow" if not cell.fails else "red"
            table.add_row(
                text(cell.name),
                text(cell.status if part == "speed" else agreement(cell)),
                *(text(column.text(result, cell)) for column in part_columns),
                style=style,
            )
        console.print(table)
        console.print()
    for cell, why in problems(result):
        console.print(text(f"{cell.name}: {why}"), soft_wrap=True)
        if cell.log:
            console.print(text(f"    log: {cell.log}"), soft_wrap=True, highlight=False)
    for mark, note in footnotes(result):
        console.print(text(f"{mark} {note}"), soft_wrap=True)
    console.print(text(limits_text(result)), soft_wrap=True)


def progress_line(cell: CellResult, done: int, total: int) -> str:
    """Format a line about a cell that has just ended."""
    seconds = "" if cell.seconds is None else f", {cell.seconds:.1f} s"
    why = f": {cell.reason}" if cell.reason else ""
    apart = cell.comparison.logprob_max if cell.comparison is not None else None
    far = "" if apart is None else f", {apart:.2g} nats from the reference"
    return printable_lines(f"[{done}/{total}] {cell.name}: {cell.status}{why}{far}{seconds}")


def _plain(text: object) -> str:
    """Escape text so that Markdown shows it as it is: no markup, no HTML, no new cell or line."""
    line = printable_lines(str(text)).replace("\n", " ")
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~$!#])", r"\\\1", line)


def _code(text: str) -> str:
    return printable_lines(text).replace("\n", " ").replace("`", "'")


def _fenced(text: str) -> str:
    return _code(text).replace("```", "'''")


def _link(path: str | None) -> str:
    """Escape a relative path that the matrix made: letters, digits, dots, dashes and slashes."""
    return "" if path is None else re.sub(r"[^A-Za-z0-9._/-]", "-", path)
