"""lockstep runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.cli.main import main
from lockstep.cli.run_table import table
from lockstep.view.runs import RunRow

ROW = RunRow(
    id="first",
    path=Path("runs/first"),
    state="hung",
    where="process 7 on host, no sign of life for 90 s",
    model="org/model\x1b[31m" + "x" * 60,
    algorithm="dapo",
    kind="grpo",
    steps=3,
    total=10,
    started=1.0,
    seconds=3723.4,
    reward=0.5,
    accuracy_before=0.25,
    accuracy_after=None,
    tokens_per_second=12345.6,
    gap=0.00123,
    error=None,
    problems=("metrics.jsonl, line 2: not valid JSON",),
)


def test_the_table_is_aligned_and_escaped() -> None:
    assert table([ROW]) == [
        "run    state  model                                     algorithm  steps  reward  accuracy    "
        "tok/s   gap     time",
        "first  hung   org/model\\x1b[31mxxxxxxxxxxxxxxxxxxxx...  dapo       3/10   0.500   0.250 -> -  "
        "12,346  0.0012  1:02:03",
        "first: metrics.jsonl, line 2: not valid JSON",
        "first: process 7 on host, no sign of life for 90 s",
    ]


def test_runs_by_start_with_a_verdict_and_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, started in (("late", "2026-01-02"), ("early", "2026-01-01")):
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        (run / "config.toml").write_text('kind = "sft"\n')
        (run / "manifest.json").write_text(json.dumps({"started": f"{started}T00:00:00+00:00"}))
    (tmp_path / "runs" / "late" / "summary.json").write_text('{"outcome": "finished"}')
    assert main(["runs", "--json", "out.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in lines[1:3]] == [
        ["early", "not", "started", "-"],
        ["late", "finished", "-", "sft"],
    ]
    assert lines[3:] == ["runs: 2; 1 finished, 1 not started"]
    told = json.loads((tmp_path / "out.json").read_text())
    assert [(row["id"], row["state"], row["path"]) for row in told] == [
        ("early", "not started", "runs/early"),
        ("late", "finished", "runs/late"),
    ]
