"""`lockstep runs`: a table of the runs in folders.

lockstep runs
lockstep runs runs other-runs/demo-20260101-120000
lockstep runs runs --json runs.json
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from lockstep.cli import arguments as values
from lockstep.observe.files import check_writable, write_json
from lockstep.observe.text import echo, printable
from lockstep.view.runs import STATES, RunRow, open_runs

_COLUMNS = ("run", "state", "model", "algorithm", "steps", "reward", "accuracy", "tok/s", "gap", "time")
_WIDEST = 40
"""Characters of a cell."""


def main(argv: Sequence[str]) -> int:
    """Run `lockstep runs`. Exit status 0, whatever the state of the runs."""
    parser = values.command_parser(
        "lockstep runs",
        "List runs with their state, steps, reward, held-out accuracy before and after training, tokens per "
        "second and the gap between trainer and engine. This only reads the folders.",
    )
    parser.add_argument(
        "folder",
        type=values.path,
        nargs="*",
        default=[Path("runs")],
        metavar="DIR",
        help="run directories, or folders with runs up to two levels below (runs)",
    )
    flags = values.Flags(parser)
    flags.value("--json", values.path, "write the table to this file, with more columns")
    arguments = parser.parse_args(argv)
    check_writable(arguments.json)
    rows = [reader.row() for reader in open_runs(arguments.folder).values()]
    rows.sort(key=lambda row: row.started or 0.0)
    for line in table(rows):
        echo(line)
    if arguments.json is not None:
        write_json(arguments.json, [asdict(row) for row in rows])
    counts = Counter(row.state for row in rows)
    told = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    echo(f"runs: {len(rows)}; {told}")
    return 0


def table(rows: Sequence[RunRow]) -> list[str]:
    """Return the lines of the table, and under it what is wrong with runs."""
    cells = [_COLUMNS, *(_cells(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(_COLUMNS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    for row in rows:
        lines += [f"{row.id}: {printable(text)}" for text in (row.error, *row.problems) if text]
        if row.state == "hung" and row.where is not None:
            lines.append(f"{row.id}: {printable(row.where)}")
    return lines


def _cells(row: RunRow) -> tuple[str, ...]:
    steps = str(row.steps) + ("" if row.total is None else f"/{row.total}")
    accuracy = f"{_figure(row.accuracy_before, '.3f')} -> {_figure(row.accuracy_after, '.3f')}"
    seconds = "-" if row.seconds is None else _duration(row.seconds)
    texts = (row.id, row.state, row.model or "-", row.algorithm or "-", steps)
    figures = (
        _figure(row.reward, ".3f"),
        accuracy if (row.accuracy_before, row.accuracy_after) != (None, None) else "-",
        _figure(row.tokens_per_second, ",.0f"),
        _figure(row.gap, ".2g"),
    )
    return tuple(_cut(printable(text)) for text in (*texts, *figures, seconds))


def _cut(text: str) -> str:
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _duration(seconds: float) -> str:
    """As 1:02:03, or 2:03."""
    text = time.strftime("%M:%S", time.gmtime(seconds)).removeprefix("0")
    return (
        f"{seconds // 3600:.0f}:{time.strftime('%M:%S', time.gmtime(seconds))}" if seconds >= 3600 else text
    )
