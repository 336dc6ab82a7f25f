"""Turn what a cell's process left behind into the cell's result."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lockstep.errors import RecordingError
from lockstep.lab.matrix.compare import Comparison, compare_outputs
from lockstep.lab.matrix.result import CELL, CellResult, read_measures
from lockstep.lab.suite.job_files import first_problem
from lockstep.lab.suite.process import (
    ExitStatus,
    line_that_matters,
    looks_out_of_memory,
    read_tail,
    stalled_in,
)
from lockstep.observe.files import read_json, read_plain
from lockstep.observe.text import printable_lines
from lockstep.processes.child import signal_name

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
    log = read_tail(folder / "log.txt").partition("\n")[2] if (folder / "log.txt").exists() else ""
    rows, summary = read_rows(folder / "replay" / "results.jsonl"), _read(folder / "replay" / "summary.json")
    status, reason = _status(exit_status, log=log, rows=rows, summary=summary, timeout=timeout)
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
            f"{file}: not a cell's result ({first_problem(error)}); delete {folder} and resume"
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


def _status(
    exit_status: ExitStatus,
    *,
    log: str,
    rows: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any] | None,
    timeout: float,
) -> tuple[str, str]:
    if exit_status.timed_out:
        where = stalled_in(log)
        progress = f"{len(rows)} inputs were done" if rows else "no input was done"
        return f"timeout after {timeout:g} s", progress + (f"; it was in {where}" if where else "")
    code = exit_status.returncode
    assert code is not None
    if code < 0:
        name = signal_name(code)
        line = line_that_matters(log)
        if name == "SIGKILL":
            line = "killed from outside, as the system does when memory runs out" + (
                f"; {line}" if line else ""
            )
        return f"crashed: {name}", line or "no output"
    if summary is not None:
        status, reason = _inputs(rows, summary)
        if status == "ok" and code != 0:  # all inputs ran, and the process failed behind them
            return "failed", f"exit status {code}: {line_that_matters(log) or 'no output'}"
        return status, reason
    line = line_that_matters(log) or "no output"
    if code == _USAGE_STATUS and line.startswith("lockstep ") and ": error: " not in line:
        return "refused", line.partition(": ")[2]
    line = line.partition(": ")[2] if line.startswith("lockstep replay: ") else line
    if looks_out_of_memory(line):
        return "out of memory", line
    return "failed", f"exit status {code}: {line}"


def _inputs(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> tuple[str, str]:
    """(status, reason) of a replay that ran to its end."""
    bad = [row for row in rows if row.get("status") != "ok"]
    if not bad:
        if not rows:
            return "failed", "no input was replayed"
        if summary.get("interrupted"):
            return "failed", "the replay was interrupted"
        return "ok", ""
    bad.sort(key=lambda row: row.get("error") is None)  # inputs that were skipped cannot say why
    error = bad[0].get("error") or {}
    line = ": ".join(str(error[key]) for key in ("type", "line") if error.get(key)) or "no reason given"
    tried = [row for row in bad if row.get("status") != "skipped"]
    status = "out of memory" if tried and all(row.get("status") == "oom" for row in tried) else "failed"
    # A device that an error has broken fails every later input as well: the first one says why.
    return status, f"{len(bad)} of {len(rows)} inputs; input {bad[0].get('index')}: {line}"


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
