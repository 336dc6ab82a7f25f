"""Real processes and real signals: what the launcher starts ends, whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from raising import raises
from selected import exhaustive
from starting import alive, wait_for

import lockstep.ranks.launch
from lockstep.errors import ConfigError
from lockstep.ranks.environment import in_launcher, threads_per_rank, without_local_rank
from lockstep.ranks.launch import launch_command, launch_ranks

WORKER = Path(__file__).with_name("rank_worker.py")
SCRIPT = (
    "import sys; from pathlib import Path; from lockstep.ranks.launch import launch_command; "
    "sys.exit(launch_command(sys.argv[2:], ranks=2, timeout=None, log_dir=Path(sys.argv[1])))"
)


@pytest.fixture(autouse=True)
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUT", str(tmp_path))
    return tmp_path


def launch(mode: str, out: Path, *, timeout: float = 300) -> int:
    return launch_command([sys.executable, str(WORKER), mode], ranks=2, timeout=timeout, log_dir=out / "logs")


def test_rank_0_is_shown_and_every_rank_has_a_log(out, capfd):
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    assert launch("sums", out) == 0
    shown = capfd.readouterr()
    assert "this is rank 0 of 2" in shown.out and "rank 1" not in shown.out
    assert "stderr of rank 0" in shown.err and "stderr of rank 1" not in shown.err
    for rank in range(2):
        assert f"this is rank {rank} of 2" in (out / f"logs/rank-{rank}.log").read_text()
        assert f"stderr of rank {rank}" in (out / f"logs/rank-{rank}.err.log").read_text()
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    threads = json.loads((out / "rank-1.json").read_text())["threads"]
    assert threads == os.environ.get("OMP_NUM_THREADS", str(threads_per_rank(2)))


def test_the_rank_that_failed_comes_first_with_its_traceback(out, capfd):
    assert launch("raises", out) == 1
    text = capfd.readouterr().err
    said = text[text.index("lockstep: ") :].splitlines()
    assert said[0] == (
        "lockstep: rank 1 of 2 exited with status 1; last seen at step 3: forward and backward of input 7"
    )
    assert said[1] == "  | Traceback (most recent call last):"
    assert any(
        line == "  | ValueError: input 7 is ?[31m not for me" for line in said
    )  # no control characters
    assert any(line.startswith("rank 0 ") and "last seen at step 3" in line for line in said)


def test_a_killed_rank_is_named_and_ends_the_others(out, capfd):
    assert launch("killed", out) == 128 + 9
    text = capfd.readouterr().err
    assert "lockstep: rank 1 of 2 was killed by SIGKILL; last seen at step 3: forward" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "status"),
    [
        ("fails_with_a_bad_shutdown", 1),
        ("interrupted_with_a_bad_shutdown", 130),
        ("told_with_a_bad_shutdown", 5),
    ],
)
def test_the_status_is_that_of_the_failure_however_python_shuts_down(mode, status, out, capfd):
    assert launch(mode, out) == status
    assert ("RankError: no luck" in capfd.readouterr().err) == (status == 1)


@pytest.mark.slow
def test_a_rank_that_hangs_is_named(out, capfd, monkeypatch):
    """The message of the rank that waited in vain does not say for whom."""
    monkeypatch.setattr("lockstep.ranks.launch._GRACE_SECONDS", 1.0)
    assert launch("in_vain", out) == 1
    assert "rank 1 was stopped; last seen at step 3: forward" in capfd.readouterr().err


@pytest.mark.slow
def test_a_rank_that_ignores_sigterm_is_killed_with_its_children(out, monkeypatch):
    assert lockstep.ranks.launch._GRACE_SECONDS + lockstep.ranks.launch._CLOSE_SECONDS < 30
    monkeypatch.setattr("lockstep.ranks.launch._GRACE_SECONDS", 2.0)
    monkeypatch.setattr("lockstep.ranks.launch._CLOSE_SECONDS", 2)
    assert launch("stubborn", out) == 3
    pids = [int(pid) for pid in (out / "pids").read_text().split()]
    assert wait_for(lambda: not any(map(alive, pids)), seconds=60)


@pytest.mark.slow
def test_the_deadline_ends_all_and_says_where_they_were(out, capfd):
    for seconds in (8, 40, 160):  # until the ranks have started, which takes a busy machine longer
        assert launch("waits", out, timeout=seconds) == 124
        text = capfd.readouterr().err
        if "rank 1 was stopped; last seen" in text:
            break
    assert "stopped at the deadline" in text
    assert "rank 1 was stopped; last seen at step 0: a long wait" in text
    assert not any(alive(int((out / f"pid-{rank}").read_text())) for rank in range(2))


@pytest.fixture
def launcher(out: Path) -> Iterator[subprocess.Popen[str]]:
    """A launcher in a process of its own, whose ranks wait."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(out / "logs"), sys.executable, str(WORKER), "waits"],
        stderr=subprocess.PIPE,
        text=True,
        # a shell without job control starts background processes with SIGINT ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    yield process
    if process.poll() is None:
        process.kill()
    process.communicate(timeout=90)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", exhaustive([signal.SIGINT, signal.SIGTERM, signal.SIGKILL], quick=[signal.SIGTERM])
)
def test_signals_end_the_launcher_and_leave_no_process(launcher, out, number):
    paths = [out / f"pid-{rank}" for rank in range(2)]
    assert wait_for(lambda: all(p.exists() and p.read_text() for p in paths), seconds=300)
    pids = [int(path.read_text()) for path in paths]
    assert all(map(alive, pids))
    launcher.send_signal(number)
    _, text = launcher.communicate(timeout=90)
    assert wait_for(lambda: not any(map(alive, pids)), seconds=60)
    if number != signal.SIGKILL:  # then the kernel ends the ranks
        assert launcher.returncode == 128 + number
        assert f"{number.name}: all 2 ranks ended" in text


WRITES = """
import os, subprocess, sys
apart = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(os.path.join(os.environ["OUT"], "apart-" + os.environ["RANK"]), "w").write(str(apart.pid))
os.write(1, b"\\xc3\\xa4 \\xff no line end " * 20000)
os.write(2, os.environ["RANK"].encode())
sys.exit(int(os.environ["RANK"]) * 4)
"""


def test_output_is_shown_to_its_end_and_what_ranks_leave_in_other_sessions_ends(out, capfd, monkeypatch):
    monkeypatch.setattr("lockstep.ranks.launch._GRACE_SECONDS", 1.0)
    command = [sys.executable, "-c", WRITES]
    assert launch_command(command, ranks=2, timeout=300, log_dir=out / "logs") == 4
    shown = capfd.readouterr()
    assert shown.out == "\u00e4 \ufffd no line end " * 20000
    assert shown.err.startswith("0lockstep: rank 1 of 2 exited with status 4\n  | 1\nrank 0 exited with")
    assert not any(alive(int((out / f"apart-{rank}").read_text())) for rank in range(2))


def test_a_signal_that_is_ignored_stays_ignored():
    """As nohup has it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with lockstep.ranks.launch.signals_raised():
            os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(KeyboardInterrupt, check=lambda error: error.args == ("SIGTERM",)):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_environment_says_whether_somebody_started_the_ranks(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("RANK", "0")
    assert not in_launcher()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert in_launcher()
    monkeypatch.delenv("RANK")
    assert not in_launcher()


def test_ranks_do_not_start_ranks(out, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with raises(ConfigError, "contradiction: --ranks"):
        launch_ranks(["replay"], ranks=2, timeout=1, log_dir=out)


def test_no_rank_is_refused(out):
    with raises(ConfigError, "out-of-range: --ranks"):
        launch_ranks(["replay"], ranks=0, timeout=1, log_dir=out)


def test_deepspeeds_local_rank_is_taken_off_the_front():
    assert without_local_rank(["--local_rank=1", "replay", "--ranks", "2"]) == ["replay", "--ranks", "2"]
    assert without_local_rank(["--local-rank", "0", "replay"]) == ["replay"]
    assert without_local_rank(["replay", "--local_rank=1"]) == ["replay", "--local_rank=1"]
    assert without_local_rank([]) == []
