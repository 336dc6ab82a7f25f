"""Programs under the supervisor, as real processes: nothing of them is left, whoever ends first."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from starting import alive, until

from lockstep.processes import child as module
from lockstep.processes.child import Child, describe_status, end

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
PARENT = """
import json, os, subprocess, sys, time
from pathlib import Path
deaf = [sys.executable, "-c", {deaf!r}]
below = [subprocess.Popen(deaf).pid, subprocess.Popen(deaf, start_new_session=True).pid]
Path({pids!r}).write_text(json.dumps([os.getpid(), os.getppid(), *below]))
{then}
"""


@pytest.fixture
def start(tmp_path: Path):
    """Start a program with two children that are deaf to SIGTERM; its pid, its supervisor's and theirs."""
    children = []

    def start(then: str, **settings):
        pids = tmp_path / f"pids-{len(children)}"
        code = PARENT.format(deaf=DEAF, pids=str(pids), then=then)
        children.append(Child([sys.executable, "-c", code], **{"linger": 0.2, **settings}))
        until(lambda: pids.exists() and pids.read_text())
        return children[-1], json.loads(pids.read_text())

    yield start
    end(children)


@pytest.mark.parametrize(
    ("then", "status", "words"),
    [
        ("", 0, "exited with status 0"),
        ("sys.exit(7)", 7, "exited with status 7"),
        ("os.kill(os.getpid(), 11)", -11, "was killed by SIGSEGV"),
        ("os.kill(os.getpid(), 9)", -9, "was killed by SIGKILL"),
        ("os.kill(os.getpid(), 40)", -40, "was killed by signal 40"),
    ],
)
def test_it_ends_as_the_program_did_and_nothing_is_left(start, then: str, status: int, words: str) -> None:
    child, pids = start(then)
    assert child.wait(30.0) == status and describe_status(status) == words
    assert child.pid == pids[1] and not any(map(alive, pids))


def test_grace_is_for_the_program_and_no_grace_is_sigkill(start) -> None:
    answer = "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(3)); time.sleep(600)"
    for settings, status in (({"grace": 60.0}, 3), ({}, -9), ({"grace": 0.2}, -9)):
        then = answer if settings != {"grace": 0.2} else "exec(" + repr(DEAF) + ")"
        child, pids = start("print(end='')\n" + then, **settings)
        assert child.poll() is None and not child.closed
        time.sleep(0.2)  # until it has its handler
        child.end()
        assert child.closed and child.poll() == status and not any(map(alive, pids))


def test_signals_reach_the_program_alone(start, tmp_path: Path) -> None:
    log = tmp_path / "log"
    then = (
        "import signal\n"
        "for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):\n"
        "    signal.signal(n, lambda n, _: print(signal.Signals(n).name, flush=True))\n"
        "print('ready', flush=True)\nwhile True: time.sleep(600)"
    )
    with log.open("wb") as file:
        child, pids = start(then, output=file)
    for number in (None, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        if number is not None:
            child.send_signal(number)
        until(lambda: (number.name if number else "ready") in log.read_text())  # noqa: B023
    assert child.poll() is None and all(map(alive, pids))


def test_a_traceback_is_asked_for(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        code = "import time\ndef stalls():\n    time.sleep(600)\nprint('ready', flush=True)\nstalls()"
        child = Child([sys.executable, "-X", "faulthandler", "-c", code], output=file)
    until(lambda: "ready" in log.read_text())
    child.ask_for_traceback()
    assert child.poll() == -signal.SIGABRT and "line 3 in stalls" in log.read_text()
    child.end()


def test_output_can_be_two_files_and_no_descriptor_of_ours_is_inherited(tmp_path: Path) -> None:
    (reader, writer), code = os.pipe(), "import os; print(sorted(os.listdir('/proc/self/fd'))[:-1]); x"
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        child = Child([sys.executable, "-c", code], output=(out, err), env={"A": "b"}, cwd=tmp_path)
    assert child.wait(30.0) == 1
    assert (tmp_path / "out").read_text() == "['0', '1', '2']\n"
    assert "NameError" in (tmp_path / "err").read_text()
    os.close(reader)
    os.close(writer)
    child.end()


def test_what_cannot_be_started_says_so(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        child = Child([str(tmp_path / "none"), "x"], output=file)
    assert child.wait(30.0) == 127
    assert (tmp_path / "log").read_text() == f"cannot start {tmp_path}/none: No such file or directory\n"


def test_a_killed_supervisor_takes_the_program_with_it_and_its_session(start) -> None:
    child, pids = start("time.sleep(600)")
    os.kill(child.pid, signal.SIGKILL)
    until(lambda: not alive(pids[0]))  # by the kernel, whether we look or not
    assert child.wait(10.0) == -9 and not alive(pids[2])
    assert alive(pids[3])  # in a session of its own, which nobody knows any more
    os.kill(pids[3], signal.SIGKILL)


def test_a_supervisor_that_is_stuck_is_killed(start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "END_SECONDS", 0.5)
    child, pids = start("time.sleep(600)", linger=0.0)
    os.kill(child.pid, signal.SIGSTOP)
    child.end()
    assert child.poll() == -9 and not any(map(alive, pids[:3]))
    os.kill(pids[3], signal.SIGKILL)


OWNER = """
import os, sys, threading, time
from lockstep.processes.child import Child
def start():
    global children
    children = [Child([sys.executable, "-c", code], linger=0.2) for code in sys.argv[1:]]
thread = threading.Thread(target=start)  # a child outlives the thread that started it
thread.start()
thread.join()
sys.stdin.readline()
{then}
"""


@pytest.mark.parametrize(
    "then",
    [
        "time.sleep(600)",
        "sys.exit()",
        "os._exit(0)",
        "if os.fork():\n    os.kill(os.getpid(), 9)\ntime.sleep(60)",  # the fork holds the pipe open
    ],
)
def test_nothing_outlives_its_owner(then: str, tmp_path: Path) -> None:
    files = [tmp_path / "0", tmp_path / "1"]
    codes = [PARENT.format(deaf=DEAF, pids=str(file), then="time.sleep(600)") for file in files]
    command = [sys.executable, "-c", OWNER.format(then=then), *codes]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
    try:
        until(lambda: all(file.exists() and file.read_text() for file in files))
        pids = [pid for file in files for pid in json.loads(file.read_text())]
        assert all(map(alive, pids))
        owner.stdin.write("go\n")
        owner.stdin.flush()
        if "sleep(600)" in then:
            owner.kill()
        owner.wait(30)
        until(lambda: not any(map(alive, pids)))
    finally:
        owner.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(owner.pid, signal.SIGKILL)
        owner.wait(10)


def test_a_fork_ends_nobody_elses_children(start) -> None:
    child, pids = start("time.sleep(600)")
    if (fork := os.fork()) == 0:
        child.end()
        os._exit(0 if all(map(alive, pids)) else 1)
    assert os.waitpid(fork, 0)[1] == 0 and all(map(alive, pids)) and child.poll() is None


def test_what_is_started_when_its_owner_has_gone_already_does_not_begin(tmp_path: Path) -> None:
    began, (reader, writer) = tmp_path / "began", os.pipe()
    program = [sys.executable, "-c", f"import pathlib; pathlib.Path({str(began)!r}).touch()"]
    for owner, closes in ((os.getppid(), False), (os.getpid(), True)):
        if closes:
            os.close(writer)
        command = [sys.executable, "-I", "-S", str(module._SUPERVISOR), str(owner), str(reader), "0", "0"]
        assert subprocess.run([*command, *program], pass_fds=[reader], timeout=30).returncode == 1
    os.close(reader)
    assert not began.exists()
