"""`lockstep support`: list supported combinations, from the table behind validation and parity tests.

lockstep support
lockstep support --device cpu --attention flex
lockstep support --backend local --engine hf --attention varlen --execution eager --layout packed \
    --device cuda --dtype bfloat16

With all seven axes it checks one combination: exit status 1 if that is unsupported.
"""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Mapping, Sequence

from lockstep.cli import arguments as values
from lockstep.config.support import AXES, BATCH_INVARIANT, lookup, support_rows
from lockstep.errors import ConfigError, unknown_name
from lockstep.observe.files import check_writable, write_json
from lockstep.observe.text import echo

STATUSES = ("supported", "untested", "unsupported")


def main(argv: Sequence[str]) -> int:
    """Exit status 0, or 1 if the requested combination is unsupported."""
    arguments = _parser().parse_args(argv)
    check_writable(arguments.json)
    cell = {axis: value for axis in AXES if (value := getattr(arguments, axis)) is not None}
    _check(cell)
    rows = [row for row in support_rows() if _may_apply(row, cell)]
    if arguments.status is not None:
        rows = [row for row in rows if row["status"] == arguments.status]
    invariant = [row for row in support_rows(BATCH_INVARIANT) if _may_apply(row, cell)]
    if arguments.status not in (None, "unsupported"):
        invariant = []
    result: dict[str, object] = {"asked": cell, "rows": rows, "batch_invariant": invariant}
    status = 0
    if len(cell) == len(AXES):
        entry = lookup(cell)
        verdict = f"support: {entry.status}" + (f": {entry.reason}" if entry.reason else "")
        result["status"] = entry.status
        status = int(entry.status == "unsupported")
    else:
        counts = [f"{sum(row['status'] == name for row in rows)} {name}" for name in STATUSES]
        verdict = f"support: {', '.join(counts)} rows; the first that matches decides"
    for row in rows:
        echo(describe(row))
    for row in invariant:
        echo(describe(row | {"note": f"only with train.batch_invariant = true: {row['note']}"}))
    if arguments.json is not None:
        write_json(arguments.json, result)
    echo(verdict)
    return status


def describe(row: Mapping[str, str]) -> str:
    """One row as a paragraph: status, the axes that it restricts, the note, where it was tested."""
    axes = "; ".join(f"{axis} {row[axis]}" for axis in AXES if row[axis] != "any") or "everything else"
    width = max(60, min(110, shutil.get_terminal_size().columns))
    lines = [axes, *(text for text in (row["note"], row["tested"] and f"tested: {row['tested']}") if text)]
    indent = " " * 13
    folded = [line for text in lines for line in textwrap.wrap(text, width - len(indent))]
    return "\n".join(f"{row['status'] if i == 0 else '':<13}{line}" for i, line in enumerate(folded))


def _parser() -> argparse.ArgumentParser:
    parser = values.command_parser(
        "lockstep support",
        "List which combinations are supported. Give axes to see only rows that can apply to them; give all "
        "seven to check one combination (exit status 1 if it is unsupported).",
    )
    flags = values.Flags(parser)
    for axis, known in AXES.items():
        flags.value(f"--{axis}", "NAME", ", ".join(known))
    flags.choice("--status", STATUSES)
    flags.value("--json", values.path, "write the rows to this file")
    return parser


def _check(cell: Mapping[str, str]) -> None:
    for axis, value in cell.items():
        open_ended = axis in ("attention", "engine") and ":" in value
        if value not in AXES[axis] and not open_ended:
            raise ConfigError(f"unknown-name: --{axis}: {unknown_name(axis, value, AXES[axis])}")


def _may_apply(row: Mapping[str, str], cell: Mapping[str, str]) -> bool:
    return all(
        row[axis] == "any"
        or value in row[axis].split(", ")
        or ("hf:NAME" in row[axis] and value.startswith("hf:"))
        for axis, value in cell.items()
    )
