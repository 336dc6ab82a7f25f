"""Processes that run jobs: several are ended at one deadline."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.processes import child
from lockstep.processes.child import JobProcess, end_jobs

SOCIABLE = """
import os, signal, time
from pathlib import Path
from lockstep.processes.child import receive, send

def main(folder, name, others, *, jobs, replies):
    def leave(*_):  # once all have been told to
        Path(folder, name).touch()
        while not all(Path(folder, other).exists() for other in others):
            time.sleep(0.01)
        Path(folder, name + "-left").touch()
        os._exit(7)
    signal.signal(signal.SIGHUP, leave)
    send(replies, {"id": receive(jobs)["id"]})
    while True:
        time.sleep(1)
"""
NAMES = ("a", "b", "c")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "sociable.py").write_text(SOCIABLE)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def started(folder: Path) -> list[JobProcess]:
    processes = [JobProcess("sociable", str(folder), name, NAMES, role="test") for name in NAMES]
    for process in processes:
        assert process.exchange({}, seconds=60) == {}
    return processes


def test_all_are_told_before_any_is_waited_for(folder: Path) -> None:
    processes = started(folder)
    end_jobs(processes)
    assert [process._process.returncode for process in processes] == [7, 7, 7]
    assert all(process.closed for process in processes)
    end_jobs(processes)  # which changes nothing


def test_whoever_does_not_end_is_killed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "END_SECONDS", 0.2)
    alone, *others = started(folder)
    alone.end()
    assert alone._process.returncode == -9
    end_jobs(others)


STALLS = """
import faulthandler, os, signal, subprocess, sys, time
from lockstep.processes.child import receive, send
from lockstep.processes.supervisor import supervise

def main(*, jobs, replies):
    supervise(jobs, passed_on=[signal.SIGABRT])
    faulthandler.enable()
    below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    send(replies, {"id": receive(jobs)["id"], "pids": [os.getpid(), below.pid]})
    receive(jobs)
    stalls()

def stalls():
    time.sleep(600)
"""


def test_a_traceback_is_asked_for_before_it_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stalling.py").write_text(STALLS)
    monkeypatch.syspath_prepend(tmp_path)
    with (tmp_path / "log").open("wb") as log:
        process = JobProcess("stalling", role="test", output=log.fileno(), traceback=True)
    pids = process.exchange({}, seconds=60)["pids"]
    with pytest.raises(TimeoutError, match=r"^took longer than 0.3 s$"):
        process.exchange({}, seconds=0.3)
    assert process.closed and process.poll() == -signal.SIGABRT
    assert "in stalls" in (tmp_path / "log").read_text()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


EXIT = """
import os, sys
from pathlib import Path
folder = {folder!r}
sys.path[:0] = [folder, {tests!r}]
from test_jobs import started
processes = started(Path(folder))
if os.fork() == 0:
    sys.exit()  # which ends the processes of nobody else
os.wait()
sys.stdout.write(str([name for name in os.listdir(folder) if name.endswith("-left")]))
"""


def test_the_end_of_the_program_tells_all_before_it_waits_and_a_fork_ends_none(folder: Path) -> None:
    code = EXIT.format(folder=str(folder), tests=str(Path(__file__).parent))
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "[]"), ended.stderr
    assert {path.name for path in folder.glob("*-left")} == {f"{name}-left" for name in NAMES}


def open_files() -> set[str]:
    """What this process's descriptors stand for, by inode: a number may be closed and used again."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of listdir itself
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return found


def test_a_process_that_cannot_be_started_leaves_no_descriptor(folder: Path) -> None:
    """The kernel refuses one argument of more than 128 KiB."""
    before = open_files()
    for _ in range(3):
        with pytest.raises(OSError, check=lambda error: error.errno == errno.E2BIG):
            JobProcess("sociable", "x" * 200_000, role="test")
    assert open_files() <= before
