import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from starting import wait_for

from lockstep_lab.suite.process import (
    ProcessRunner,
    line_that_matters,
    looks_out_of_memory,
    read_tail,
    stalled_in,
)


def run(tmp_path: Path, code: str, *, timeout: float = 30.0) -> tuple[object, str]:
    log = tmp_path / "log.txt"
    exit_status = ProcessRunner().run([sys.executable, "-c", code], log=log, timeout=timeout)
    return exit_status, read_tail(log)


def gone(pid: int) -> bool:
    """Dead, or a zombie whose parent has gone too."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def test_a_process_that_ends(tmp_path: Path) -> None:
    exit_status, log = run(tmp_path, "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    assert exit_status.returncode == 3 and not exit_status.timed_out and exit_status.seconds > 0
    assert log.splitlines() == ["out", "err"]


def test_a_real_segmentation_fault_names_the_place(tmp_path: Path) -> None:
    code = "import ctypes\ndef kernel():\n    ctypes.string_at(0)\nkernel()\n"
    (tmp_path / "crash.py").write_text(code)
    log = tmp_path / "log.txt"
    exit_status = ProcessRunner().run([sys.executable, str(tmp_path / "crash.py")], log=log, timeout=30.0)
    assert exit_status.returncode == -signal.SIGSEGV
    assert exit_status.describe() == "it was killed by SIGSEGV"
    # The innermost frame is ctypes' own; the line says the file and the line in it.
    assert line_that_matters(read_tail(log)).startswith(
        "Fatal Python error: Segmentation fault, in string_at ("
    )


def test_a_hang_ends_at_its_deadline_with_a_traceback(tmp_path: Path) -> None:
    exit_status, log = run(
        tmp_path, "import time\ndef collective():\n    time.sleep(600)\ncollective()", timeout=5.0
    )
    assert exit_status.timed_out and exit_status.returncode is None
    assert stalled_in(log) == "collective (<string>:3)"


def test_a_process_that_ignores_signals_and_its_children_are_killed(tmp_path: Path) -> None:
    child = tmp_path / "child.pid"
    code = (
        "import faulthandler, pathlib, signal, subprocess, sys, time\n"
        "faulthandler.disable()\n"
        "signal.signal(signal.SIGABRT, signal.SIG_IGN)\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(child)!r}).write_text(str(p.pid))\n"
        "time.sleep(600)\n"
    )
    exit_status, _ = run(tmp_path, code, timeout=6.0)
    assert exit_status.timed_out
    assert wait_for(lambda: gone(int(child.read_text())))


def test_children_of_a_process_that_ended_are_killed(tmp_path: Path) -> None:
    child = tmp_path / "child.pid"
    code = (
        "import pathlib, subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(child)!r}).write_text(str(p.pid))\n"
    )
    exit_status, _ = run(tmp_path, code)
    assert exit_status.returncode == 0
    assert wait_for(lambda: gone(int(child.read_text())))


def test_stop_kills_what_runs_and_starts_nothing_more(tmp_path: Path) -> None:
    runner, started = ProcessRunner(), tmp_path / "pid"
    code = (
        "import os, pathlib, time\n"
        f"pathlib.Path({str(started)!r}).write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    raised: list[BaseException] = []

    def work() -> None:
        try:
            runner.run([sys.executable, "-c", code], log=tmp_path / "log.txt", timeout=600.0)
        except KeyboardInterrupt as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert wait_for(lambda: started.exists() and started.read_text())
    runner.stop()
    thread.join(timeout=10.0)
    assert not thread.is_alive() and len(raised) == 1
    assert gone(int(started.read_text()))
    with pytest.raises(KeyboardInterrupt):
        runner.run([sys.executable, "-c", "pass"], log=tmp_path / "log.txt", timeout=10.0)


KILLED_SUITE = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from lockstep_lab.suite.process import ProcessRunner

folder, words = Path(sys.argv[1]), sys.argv[2:]
runner = ProcessRunner()
with ThreadPoolExecutor(2) as pool:  # as `lockstep matrix --jobs 2` does
    for n in range(2):
        pool.submit(runner.run, [sys.executable, *words], log=folder / f"{n}.log", timeout=600)
"""
HOLDS_THE_LOCK = "import ctypes\nprint('waiting', flush=True)\nctypes.PyDLL(None).sleep(600)"
"""In a C call that no thread of the process can look out of; it answers SIGTERM when it is over."""
LOADS = "import runpy\nprint('waiting', flush=True)\nrunpy.run_module('lockstep', run_name='__main__')"


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends them, on Linux")
@pytest.mark.parametrize(
    "words",
    [["-c", HOLDS_THE_LOCK], ["-c", LOADS, "replay", "--device", "cpu"]],
    ids=["in a C call", "a replay that loads"],
)
def test_no_cell_outlives_a_suite_that_is_killed(words: list[str], tmp_path: Path) -> None:
    suite = subprocess.Popen([sys.executable, "-c", KILLED_SUITE, str(tmp_path), *words], cwd=tmp_path)
    try:
        logs = [tmp_path / "0.log", tmp_path / "1.log"]
        assert wait_for(lambda: all("waiting" in read_tail(log) for log in logs), seconds=30.0)
        cells = [cell for supervisor in children(suite.pid) for cell in children(supervisor)]
        assert len(cells) == 2 and not any(map(gone, cells))
    finally:
        suite.kill()
        suite.wait()
    try:
        assert wait_for(lambda: all(map(gone, cells)), seconds=5.0)
    finally:
        for cell in cells:
            with contextlib.suppress(ProcessLookupError):
                os.kill(cell, signal.SIGKILL)


def test_a_command_that_does_not_exist_says_so(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    exit_status = ProcessRunner().run([str(tmp_path / "none")], log=log, timeout=30.0)
    assert exit_status.returncode == 127
    assert read_tail(log) == f"cannot start {tmp_path}/none: No such file or directory\n"


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("", ""),
        ("loading\n  \n", "loading"),
        (
            'Traceback (most recent call last):\n  File "x", line 1\nValueError: no such kernel\n',
            "ValueError: no such kernel",
        ),
        (
            "torch._dynamo.exc.Unsupported: Graph break in user code\n  Explanation: ...\n\nfrom user:\n",
            "Unsupported: Graph break in user code",
        ),
        ("KeyError: 'first'\nduring that\nRuntimeError: second\nbye\n", "RuntimeError: second"),
        (
            "note: fine\nlockstep replay: error[no-effect]: train.attention = 'x' is not supported\n",
            "lockstep replay: error[no-effect]: train.attention = 'x' is not supported",
        ),
        (
            "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried\n",
            "OutOfMemoryError: CUDA out of memory. Tried",
        ),
        ("INFO: all well\nNote: still well\n", "Note: still well"),
    ],
)
def test_the_line_that_matters(log: str, line: str) -> None:
    assert line_that_matters(log) == line


def test_a_long_line_is_cut() -> None:
    line = line_that_matters("ValueError: " + "x" * 10_000)
    assert len(line) == 300 and line.endswith(" ...")


def test_out_of_memory_is_recognised() -> None:
    assert looks_out_of_memory("torch.OutOfMemoryError: CUDA out of memory")
    assert looks_out_of_memory(
        "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"
    )
    assert not looks_out_of_memory("ValueError: out of range")


def test_only_the_end_of_a_huge_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("first\n" + "x" * 1_000_000 + "\nlast\n")
    tail = read_tail(log)
    assert len(tail) == 256 * 1024 and tail.endswith("last\n")
    assert read_tail(tmp_path / "none") == ""
    assert os.path.exists(log)


def test_a_log_is_read_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "0123456789-of-the-hub")
    (tmp_path / "log.txt").write_text("no access with 0123456789-of-the-hub\n")
    assert read_tail(tmp_path / "log.txt") == "no access with [secret]\n"
