"""lockstep status, stop and logs, from beside a run that another process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from raising import raises

from lockstep.cli.main import main
from lockstep.errors import LockstepError
from lockstep.view.look import look

HOLDER = """
import signal, sys, time
from pathlib import Path
from lockstep.observe.lock import RunLock
signal.signal(signal.SIGTERM, signal.SIG_IGN)
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


@contextmanager
def held(run: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the run's lock, and does not end when it is asked to."""
    command = [sys.executable, "-c", HOLDER, str(run / "lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text("steps = 9\n")
    return run


@pytest.mark.slow
def test_a_run_is_seen_and_stopped_from_another_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = ["train", "grpo", "--recipe", "tiny", "--run-dir", str(run), "--steps", "100000"]
    command = [sys.executable, "-m", "lockstep", *words, "--eval.no-before", "--eval.no-after"]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 120
        while not (run / "metrics.jsonl").exists() or not look(run).steps:
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.05)
        assert main(["status", str(run), "--json", str(tmp_path / "status.json")]) == 0
        out = capsys.readouterr().out
        assert f"{run}: running, process {process.pid} on" in out and "of 100000 steps" in out, out
        assert "rank 0: " in out and "lockstep train --resume" not in out
        (told,) = json.loads((tmp_path / "status.json").read_text())
        assert told["state"] == "running" and told["steps"] >= 1 and "reward/mean" in told["last"]
        assert main(["logs", str(run), "--lines", "100000"]) == 0
        assert "step 1/100000" in capsys.readouterr().out
        assert main(["stop", str(run)]) == 0
        out = capsys.readouterr().out
        assert "asked process" in out and f"{run}: interrupted" in out and "newest checkpoint" in out
        assert f"resume with: lockstep train --resume {run}" in out
        assert process.wait(timeout=60) == 143
        done = look(run).steps
        assert (run / "checkpoints" / f"step-{done:06d}").is_dir()
        assert main(["stop", str(run)]) == 1
        assert "nothing to stop; the run is interrupted" in capsys.readouterr().err
        assert main(["logs", str(run), "--lines", "1", "--follow"]) == 0  # it has ended, so this does
        assert "interrupted after" in capsys.readouterr().out
    finally:
        process.kill()
        process.wait()


def test_a_process_that_does_not_end_in_time_is_an_error_and_one_that_was_killed_has_died(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with held(run) as process:
        assert look(run).state == "running"
        assert main(["stop", str(run), "--timeout", "0.2"]) == 1
        error = capsys.readouterr().err
        assert f"process {process.pid} on" in error and "has not ended within 0.2 s" in error
        assert f"kill -9 {process.pid}" in error and "lockstep hang" in error
    seen = look(run)
    assert (seen.state, seen.steps, seen.total) == ("died", 0, 9)
    assert f"resume with: lockstep train --resume {run}" in seen.text()


def test_a_run_of_another_machine_is_not_asked(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "lock").write_text(json.dumps({"pid": os.getpid(), "started": "1", "host": "far"}))
    assert look(run).state == "elsewhere"
    assert main(["stop", str(run)]) == 1
    assert f"process {os.getpid()} on far; run the command there" in capsys.readouterr().err


def test_what_is_no_run_is_named(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("status", "stop", "logs"):
        assert main([command, str(tmp_path)]) == 2
        assert "contains no run (config.toml)" in capsys.readouterr().err
    assert look(run).state == "not started"
    assert main(["logs", str(run), "--rank", "3"]) == 2
    assert "rank-3.log: no such log; available: none" in capsys.readouterr().err
    (run / "logs").symlink_to(tmp_path)
    with raises(LockstepError, "leads-out-of-folder: logs"):
        look(run)
