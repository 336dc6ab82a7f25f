"""Real ranks that hang, and one that is only slow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.ranks import watchdog
from lockstep.ranks.hang import examine
from lockstep.ranks.launch import HANG_FILE, launch_command
from lockstep.ranks.watchdog import Watchdog, signs

WORKER = Path(__file__).with_name("hang_worker.py")
SECONDS = 4.0


def launch(mode: str, logs: Path) -> int:
    return launch_command(
        [sys.executable, str(WORKER), mode], ranks=2, timeout=300, log_dir=logs, watch=SECONDS
    )


def test_a_stopped_rank_is_named_with_the_collective_that_it_never_came_to(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch("stopped", tmp_path) == 1
    text = capfd.readouterr().err
    assert "lockstep: no rank has made progress for 4 s; the run was ended" in text
    report = json.loads((tmp_path / HANG_FILE).read_text())
    assert (report["cause"], report["culprits"]) == ("stopped process", [1])
    assert "all_reduce [64] float32 (step 2: optimizer)" in report["collective"]
    waiting, stopped = report["ranks"]
    assert stopped["state"] == "T" and stopped["heartbeat"]["step"] == 2
    assert any("hang_worker.py" in frame and "all_reduce" in frame for frame in waiting["stack"])
    assert f"rank 1 (pid {stopped['pid']}) is stopped by a signal" in text
    # the same again when all have ended
    again = examine(tmp_path)
    assert again.collective == report["collective"] and again.culprits == (1,)


@pytest.mark.slow
def test_a_skipped_collective_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch("skipped", tmp_path) != 0
    text = capfd.readouterr().err
    assert "likely cause: rank 1 skipped all_reduce [64] float32 (step 2: optimizer)" in text


@pytest.mark.exhaustive
def test_a_rank_that_computes_for_longer_than_the_deadline_does_not_hang(tmp_path: Path) -> None:
    assert launch("slow", tmp_path) == 0
    assert not (tmp_path / HANG_FILE).exists()


PROGRAM = """
import sys, time
from pathlib import Path
from lockstep.observe import flight
recorder = flight.start(Path(sys.argv[1]), rank=0, world_size=1)
flight.note(step=0, phase="reward")
print("ready", flush=True)
if sys.argv[2] == "child computes":
    import subprocess
    subprocess.run([sys.executable, "-c", "while True: pass"])
if sys.argv[2] == "beats":
    while True:
        flight.note(completions=[1, 2])
        time.sleep(0.02)
time.sleep(600)
"""


@pytest.mark.parametrize(("life", "hangs"), [("sleeps", True), ("child computes", False), ("beats", False)])
def test_signs_of_life(life: str, hangs: bool, tmp_path: Path) -> None:
    """A process that sleeps, one whose child computes, and one that notes completions."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path), life], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        dog = Watchdog(lambda known: signs(tmp_path, known=known), seconds=1.0)
        stalled = [dog.stalled() for _ in ticks(2.5)]
        report = examine(tmp_path)
        for child in report.ranks[0].children:
            subprocess.run(["kill", child.split()[1]], check=True)
        process.kill()
    assert any(stalled) == hangs
    assert report.culprits == (0,) and "phase" in report.ranks[0].flight.heartbeat


def ticks(seconds: float):
    """Often, for so long."""
    import time

    until = time.monotonic() + seconds
    while time.monotonic() < until:
        yield
        time.sleep(0.02)


def test_ranks_that_never_begin_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "START_SECONDS", 30.0)
    clock = [100.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock[0])
    dog = Watchdog(lambda _: [], seconds=10.0)
    stalled = []
    for clock[0] in (115.0, 129.0, 131.0):
        stalled.append(dog.stalled())
    assert stalled == [False, False, True]
