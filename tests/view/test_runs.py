"""Runs in folders: their states, their lines in the table, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from raising import raises

from lockstep.errors import DataError
from lockstep.observe.lock import process_start
from lockstep.view.runs import RunReader, find_runs, open_runs

CONFIG = 'kind = "grpo"\nsteps = 4\n[model]\nname = "shape:tiny-llama"\n[algorithm]\nname = "dapo"\n'
STARTED = "2026-01-01T00:00:00+00:00"
BEGAN = 1767225600.0
RANK = """
import sys, time
from pathlib import Path
from lockstep.observe import flight
from lockstep.observe.lock import RunLock
run = Path(sys.argv[1])
lock = RunLock(run / "lock")
recorder = flight.start(run / "logs" / "flight", rank=0, world_size=1)
flight.note(step=1, phase="generate")
print("ready", flush=True)
while sys.argv[2] == "computes":
    pass
time.sleep(600)
"""


def make(run: Path, **manifest: object) -> Path:
    """A run of two steps and three evaluations, of which nothing says how it ended."""
    run.mkdir(parents=True)
    (run / "config.toml").write_text(CONFIG)
    (run / "manifest.json").write_text(json.dumps({"lockstep": "0.1.0", "started": STARTED, **manifest}))
    rows = [
        {"step": 0, "evaluation": "before", "timestamp": BEGAN + 1, "eval/lenient_accuracy": 0.25},
        {"step": 0, "timestamp": BEGAN + 2, "reward/mean": 0.1, "throughput/tokens_per_second": 10.0},
        {"step": 1, "evaluation": "during", "timestamp": BEGAN + 3, "eval/lenient_accuracy": 0.5},
        {"step": 1, "timestamp": BEGAN + 9, "reward/mean": 0.75, "logprob_gap_mean": 0.01},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def test_runs_are_found_in_folders_and_not_within_runs(tmp_path: Path) -> None:
    runs = [make(tmp_path / name) for name in ("a", "b/x", "c/x")]
    make(tmp_path / "a" / "before-restart-1")
    make(tmp_path / "too" / "far" / "down" / "run")
    assert find_runs([tmp_path]) == runs
    assert find_runs([runs[0], runs[0], tmp_path / "c"]) == [runs[0], runs[2]]
    assert [*open_runs([tmp_path])] == ["a", "x", "x-2"]
    known = open_runs([tmp_path / "c"])
    later = open_runs([tmp_path], known=known)
    assert {id: (reader.id, reader.path) for id, reader in later.items()} == {
        "x": ("x", runs[2]),
        "a": ("a", runs[0]),
        "x-2": ("x-2", runs[1]),
    }
    assert later["x"] is known["x"]
    with raises(DataError, "wrong-kind-of-file: nothing"):
        find_runs([tmp_path / "nothing"])


def test_what_cannot_be_a_run_does_not_hide_the_others(tmp_path: Path) -> None:
    run = make(Path(os.fsdecode(os.fsencode(tmp_path) + b"/run-\xff")))
    (tmp_path / "loop").symlink_to("loop")
    assert find_runs([tmp_path]) == [run]
    assert list(open_runs([tmp_path])) == ["run-\N{REPLACEMENT CHARACTER}"]


def test_a_row_has_what_the_files_say(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    row = RunReader(run).row()
    assert (row.state, row.where, row.error, row.problems) == ("not started", None, None, ())
    assert (row.model, row.algorithm, row.kind) == ("shape:tiny-llama", "dapo", "grpo")
    assert (row.steps, row.total, row.started, row.seconds) == (2, 4, BEGAN, 9.0)
    assert (row.accuracy_before, row.accuracy_after) == (0.25, 0.5)
    assert (row.reward, row.gap, row.tokens_per_second) == (0.75, 0.01, None)


def test_a_large_file_has_the_same_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(tmp_path / "run")
    whole = RunReader(run).row()
    monkeypatch.setattr("lockstep.view.runs._SMALL_BYTES", 10)
    assert RunReader(run).row() == whole


def test_a_reader_follows_its_run(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    reader = RunReader(run)
    assert reader.row().steps == 2
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "timestamp": BEGAN + 12, "reward/mean": 1.0}) + "\n")
    summary = {"outcome": "failed", "error": "DataError: row 3", "wall_seconds": 40.5}
    (run / "summary.json").write_text(json.dumps(summary))
    row = reader.row()
    assert (row.state, row.error, row.steps, row.reward) == ("failed", "DataError: row 3", 3, 1.0)
    assert row.seconds == 40.5
    assert reader.about().resume == f"lockstep train --restart {run}"


def test_what_is_damaged_is_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    (run / "manifest.json").write_text("{")
    (run / "summary.json").write_text('{"outcome": "excellent"}')
    (run / "metrics.jsonl").write_text('{"step": 0, "reward/mean": 0.5}\n{"st\n')
    reader = RunReader(run)
    row = reader.row()
    assert (row.state, row.steps, row.reward, row.started) == ("unreadable", 1, 0.5, None)
    said = " ".join(row.problems)
    assert "manifest.json is not valid JSON" in said and "metrics.jsonl, line 2" in said
    assert "'excellent', which no run writes" in said
    assert reader.curves().steps.tolist() == [0] and reader.about().versions == {}
    (run / "config.toml").write_text("= 1")
    assert "is not TOML" in " ".join(reader.row().problems) and reader.about().config == ()


def test_a_number_that_no_float_holds_is_none(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    (run / "summary.json").write_text(f'{{"outcome": "finished", "wall_seconds": 1{"0" * 400}}}')
    assert (RunReader(run).row().state, RunReader(run).row().seconds) == ("finished", 9.0)


def test_a_run_that_is_deleted_while_it_is_open(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    reader = RunReader(run)
    assert reader.row().steps == 2
    for path in run.iterdir():
        path.unlink()
    run.rmdir()
    row = reader.row()
    assert (row.state, row.steps) == ("unreadable", 0) and "contains no run" in row.problems[0]
    assert (len(reader.curves().steps), reader.rollouts.steps(), reader.step(0).metrics) == (0, [], {})
    assert reader.about().config == ()


@pytest.mark.parametrize("version", ["0.2.0", "1.0", "99.9.9rc1"])
def test_a_run_of_a_newer_version_is_refused_by_name(tmp_path: Path, version: str) -> None:
    reader = RunReader(make(tmp_path / "run", lockstep=version))
    row = reader.row()
    assert row.state == "newer version" and version in row.problems[0] and row.steps == 0
    for ask in (reader.curves, reader.about, lambda: reader.step(0), lambda: reader.rollouts):
        with raises(DataError, f"version-differs: run, {version}"):
            ask()


def test_a_run_of_an_earlier_version_is_shown(tmp_path: Path) -> None:
    run = make(tmp_path / "run", lockstep="0.0.9")
    assert RunReader(run).row().steps == 2
    (run / "manifest.json").unlink()
    reader = RunReader(run)
    assert reader.row().steps == 2 and reader.curves().times.tolist() == [1.0, 8.0]


def test_a_run_of_another_machine_is_elsewhere_and_one_without_its_process_died(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    reader = RunReader(run)
    (run / "lock").write_text(json.dumps({"pid": os.getpid(), "started": "1", "host": "far"}))
    assert (reader.row().state, reader.row().where) == ("elsewhere", f"process {os.getpid()} on far")
    (run / "lock").write_text(json.dumps({"pid": os.getpid(), "started": "1", "host": socket.gethostname()}))
    assert reader.row().state == "died"
    assert reader.about().resume == f"lockstep train --restart {run}"


def test_a_run_hangs_when_it_neither_moves_nor_computes_for_longer_than_its_own_limit(
    tmp_path: Path,
) -> None:
    seen = {}
    for what in ("sleeps", "computes"):
        run = make(tmp_path / what, rank_timeout=0.5)
        command = [sys.executable, "-c", RANK, str(run), what]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None and process.stdout.readline() == "ready\n"
                assert process_start(process.pid) is not None
                time.sleep(0.6)
                reader = RunReader(run)
                seen[what] = [reader.row().state, reader.row().state]
                (run / "manifest.json").write_text("{}")
                seen[f"{what}, without a limit"] = [reader.row().state]
                if what == "computes":
                    (run / "manifest.json").write_text('{"rank_timeout": 0.5}')
                    process.send_signal(signal.SIGSTOP)
                    until = time.monotonic() + 30
                    while reader.row().state != "hung" and time.monotonic() < until:
                        time.sleep(0.3)
                    where = reader.row().where
                    assert where is not None and "no sign of life for" in where and "in generate" in where
            finally:
                process.kill()
        assert reader.row().state == "died"
    assert seen == {
        "sleeps": ["hung", "hung"],
        "sleeps, without a limit": ["training"],
        "computes": ["training", "training"],
        "computes, without a limit": ["training"],
    }
