"""Turn what a cell's process left behind into the cell's result."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lockstep.config.problems import first_data
from lockstep.errors import RecordingError
from lockstep.lab.matrix.compare import Comparison, compare_outputs
from lockstep.lab.matrix.result import CELL, CellResult, read_measures
from lockstep.lab.suite.job_files import WorkerOutcome, first_problem
from lockstep.lab.suite.process import ExitStatus
from lockstep.lab.suite.run import how_it_ended
from lockstep.observe.files import read_json, read_plain
from lockstep.observe.text import printable_lines

_USAGE_STATUS = 2
"""lockstep's exit status for an invalid setting."""


def with_process_result(
    result: CellResult, exit_status: ExitStatus, *, folder: Path, timeout: float
) -> CellResult:
    """Add status, reason and measures to `result`.

    Args:
        folder: the cell's: log.txt, and replay/ with the replay's own files.
        timeout: seconds that the cell had.
    """
    rows, summary = read_rows(folder / "replay" / "results.jsonl"), _read(folder / "replay" / "summary.json")
    outcome = None if summary is None else _outcome(rows, summary)
    status, reason = how_it_ended(exit_status, outcome, log=folder / "log.txt", timeout=timeout)
    # A command that refuses its settings says so in one line with its name in front; argparse says "error".
    refuses = reason.startswith("lockstep ") and ": error: " not in reason
    if exit_status.returncode == _USAGE_STATUS and refuses:
        status = "refused"
    if reason.startswith("lockstep replay: ") or status == "refused":
        reason = reason.partition(": ")[2]
    return replace(
        result,
        status=status,
        reason=printable_lines(reason),
        log=f"{result.folder}/log.txt",
        seconds=round(exit_status.seconds, 3),
        measures=read_measures(summary or {}, rows) if summary is not None or rows else None,
    )


def compare_cells(cell: CellResult, reference: CellResult, *, out: Path) -> Comparison:
    """Compare the outputs of two cells that work.

    Raises:
        RecordingError: one of them left none, or they are of different inputs.
    """
    folders = [out / result.folder / "replay" for result in (cell, reference)]
    summed = [_summed(_read(folder / "summary.json")) for folder in folders]
    missing = ""
    if summed[0] != summed[1]:
        missing = f"the gradients are of inputs {summed[0]} here and of {summed[1]} in the reference cell"
    files = [folder / "outputs.safetensors" for folder in folders]
    return compare_outputs(files[0], files[1], gradients_missing=missing)


_ROWS_BYTES = 2**30
"""The largest results.jsonl that is read: a million inputs."""


def read_cell(folder: Path) -> CellResult | None:
    """What an earlier run of the matrix found; None: nothing yet.

    Raises:
        RecordingError: cell.json is damaged.
    """
    file = folder / "cell.json"
    if not file.exists():
        return None
    try:
        return CELL.validate_python(read_json(file, RecordingError))
    except ValidationError as error:
        raise RecordingError(
            f"{file}: not a cell's result ({first_problem(error)}); delete {folder} and resume",
            path=file,
            **first_data(error),
        ) from error


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Read the rows of a results.jsonl; a last line that a crash cut off is left out."""
    if not file.exists():
        return []
    rows = []
    text = read_plain(file, RecordingError, limit=_ROWS_BYTES).decode("utf-8", errors="replace")
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _outcome(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> WorkerOutcome:
    """How a replay that ran to its end says it went."""
    bad = [row for row in rows if row.get("status") != "ok"]
    if not rows:
        return WorkerOutcome(status="failed", reason="no input was replayed")
    if not bad:
        interrupted = bool(summary.get("interrupted"))
        reason = "the replay was interrupted" if interrupted else ""
        return WorkerOutcome(status="failed" if interrupted else "ok", reason=reason)
    # A device that an error has broken fails every later input as well: the first one says why. Inputs that
    # were skipped cannot.
    bad.sort(key=lambda row: row.get("error") is None)
    error = bad[0].get("error") or {}
    line = ": ".join(str(error[key]) for key in ("type", "line") if error.get(key)) or "no reason given"
    tried = {row.get("status") for row in bad} - {"skipped"}
    return WorkerOutcome(
        status="oom" if tried == {"oom"} else "failed",
        reason=f"{len(bad)} of {len(rows)} inputs; input {bad[0].get('index')}: {line}",
    )


def _summed(summary: Mapping[str, Any] | None) -> list[Any]:
    outputs = (summary or {}).get("outputs")
    inputs = outputs.get("gradient_inputs") if isinstance(outputs, Mapping) else None
    return list(inputs) if isinstance(inputs, list) else []


def _read(file: Path) -> dict[str, Any] | None:
    if not file.exists():
        return None
    try:
        values = read_json(file, RecordingError)
    except RecordingError:  # cut off by a crash: the log says why
        return None
    return values if isinstance(values, dict) else None
