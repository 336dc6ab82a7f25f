"""The file that outlives the process which writes it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from raising import raises

from lockstep.errors import DataError
from lockstep.observe import flight, lock
from lockstep.observe.flight import FlightRecorder

PROGRAM = """
import os, sys, time
from pathlib import Path
from lockstep.observe import flight
recorder = flight.start(Path(sys.argv[1]), rank=1, world_size=2)
flight.note(step=3, phase="generate")
recorder.introduce("0", [0, 1])
with flight.purpose("the step's boundary"):
    recorder.leave(recorder.enter(recorder.label("allreduce", group="0", shapes="[4] float32")))
recorder.enter(recorder.label("broadcast", group="0", shapes="[8] int64"))
def waiting_here():
    print("ready", flush=True)
    time.sleep(600)
waiting_here()
"""


@pytest.fixture
def process(tmp_path: Path):
    started = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE)
    assert started.stdout is not None and started.stdout.readline() == b"ready\n"
    yield started
    started.kill()
    started.wait()


def test_a_record_is_read_while_its_process_is_stopped_and_when_it_is_dead(
    process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    for number, states in ((signal.SIGSTOP, "T"), (signal.SIGKILL, None)):
        os.kill(process.pid, number)
        if number == signal.SIGKILL:
            process.wait()
        else:
            os.waitpid(process.pid, os.WUNTRACED)
        record = flight.read(tmp_path / "rank-1.flight")
        assert lock.state(record.pid, record.born) == states
        assert (record.rank, record.world_size, record.pid) == (1, 2, process.pid)
        assert record.heartbeat["step"] == 3 and record.heartbeat["phase"] == "generate"
        assert record.groups == {"0": (0, 1)}
        first, second = record.collectives
        assert (first.sequence, first.op, first.purpose) == (1, "allreduce", "the step's boundary")
        assert first.ended is not None and second.ended is None
        assert record.waiting == second and second.text == "broadcast [8] int64 (step 3: generate)"


def test_the_signal_writes_stacks_and_a_pid_of_another_process_is_none(
    process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    record = flight.read(tmp_path / "rank-1.flight")
    assert record.answers
    assert lock.state(record.pid, record.born + 1) is None
    os.kill(record.pid, flight.STACKS_SIGNAL)
    for _ in range(600):
        if "waiting_here" in record.stacks.read_text():
            break
        time.sleep(0.05)
    assert "waiting_here" in record.stacks.read_text() and process.poll() is None


def test_the_ring_keeps_the_newest_and_long_texts_are_cut(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path, rank=0, world_size=1)
    recorder.introduce("0", [0])
    label = recorder.label("allreduce", group="0", shapes="[1] float32, " * 50)
    numbers = [recorder.enter(label) for _ in range(flight.SLOTS + 7)]
    recorder.leave(numbers[0])  # overwritten since: its slot is another's
    record = flight.read(recorder.path)
    recorder.close()
    assert len(record.collectives) == flight.SLOTS
    assert [each.number for each in record.collectives] == numbers[7:]
    assert all(each.ended is None for each in record.collectives)
    assert record.collectives[0].shapes.endswith("..")
    assert not flight.read(recorder.path).answers


def test_a_collective_that_nobody_waits_for_is_not_waited_in(tmp_path: Path) -> None:
    """Or a rank that computes after it would seem to wait."""
    recorder = FlightRecorder(tmp_path, rank=0, world_size=1)
    for group in ("0", "1"):
        recorder.introduce(group, [0])
    recorder.enter(recorder.label("broadcast", group="1", shapes=""))
    label = recorder.label("allreduce", group="0", shapes="")
    recorder.leave(recorder.enter(label))
    assert flight.read(recorder.path).waiting is None
    first = recorder.enter(label)
    recorder.enter(label)
    waiting = flight.read(recorder.path).waiting
    recorder.close()
    assert waiting is not None and waiting.number == first


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rank-0.flight").write_bytes(b"x" * 10)
    with raises(DataError, "damaged-file: rank-0.flight"):
        flight.read_all(tmp_path)


def test_a_fork_has_no_recorder(tmp_path: Path) -> None:
    flight.start(tmp_path, rank=0, world_size=1)
    try:
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.write(writing, json.dumps(flight.current() is None).encode())
            os._exit(0)
        os.close(writing)
        assert os.read(reading, 10) == b"true"
        os.close(reading)
        os.wait()
        assert flight.current() is not None
    finally:
        flight.stop()
    assert flight.current() is None
