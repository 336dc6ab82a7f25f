"""What a cell's process left behind, in a few words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep_lab.matrix.result import CellResult, with_process_result
from lockstep_lab.suite.process import ExitStatus

OK: dict[str, Any] = {"index": 0, "status": "ok"}
SKIPPED: dict[str, Any] = {"index": 1, "status": "skipped", "error": None}
OOM: dict[str, Any] = {"index": 2, "status": "oom", "error": {"type": "OutOfMemoryError", "line": "no room"}}
DESYNC: dict[str, Any] = {"index": 3, "status": "desync", "error": {"type": "Desync", "line": "rank 1 gone"}}


@pytest.mark.parametrize(
    ("rows", "code", "status", "reason"),
    [
        ([OK], 0, "ok", ""),
        ([OK], 1, "failed", "ValueError: late"),
        ([OK, SKIPPED, DESYNC], 1, "failed", "2 of 3 inputs; input 3: Desync: rank 1 gone"),
        ([OK, SKIPPED], 1, "failed", "1 of 2 inputs; input 1: no reason given"),
        ([OOM, SKIPPED], 1, "oom", "2 of 2 inputs; input 2: OutOfMemoryError: no room"),
        ([OOM, DESYNC], 1, "failed", "2 of 2 inputs; input 2: OutOfMemoryError: no room"),
        ([], 0, "failed", "no input was replayed"),
    ],
)
def test_only_a_cell_whose_inputs_and_process_ended_well_works(
    tmp_path: Path, rows: list[dict[str, Any]], code: int, status: str, reason: str
) -> None:
    replay = tmp_path / "replay"
    replay.mkdir()
    (replay / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (replay / "summary.json").write_text("{}")
    (tmp_path / "log.txt").write_text("$ python -m lockstep\nValueError: late\n")
    begun = CellResult(name="a", values={}, flags=(), command="", status="refused", folder="cells/a")
    found = with_process_result(
        begun, ExitStatus(returncode=code, timed_out=False, seconds=1.0), folder=tmp_path, timeout=9.0
    )
    assert (found.status, found.reason) == (status, reason)
