"""What a rank's log takes, and what it leaves as it was."""

import io
import logging
import os
import re
import warnings
from pathlib import Path

import pytest
from raising import raises

from lockstep.errors import ConfigError
from lockstep.observe.display import Display, RunLog

TIME = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", re.MULTILINE)


@pytest.fixture
def log(tmp_path):
    log = RunLog(tmp_path / "rank-0.log")
    yield log
    log.close()


def lines(log):
    """Without their times, of which each has one."""
    text = log.path.read_text()
    assert len(TIME.findall(text)) == len(text.splitlines())
    return TIME.sub("", text).splitlines()


def test_each_line_is_there_at_once_and_harmless_to_a_terminal(log):
    log.line("two\nlines")
    assert lines(log) == ["two", "lines"]
    log.line("\x1b]0;pwn\x07 \u202e \ud800 \r")
    log.line("")
    assert lines(log)[2:] == ["\\x1b]0;pwn\\x07 \\u202e \\ud800 ", ""]
    log.close()
    log.line("too late")
    RunLog(log.path).line("appended")
    assert lines(log)[4:] == ["appended"]


def test_the_display_says_the_same_with_and_without_it(log, capsys):
    for own in (None, log):
        for mode in ("plain", "off"):
            with Display("demo", total_steps=2, mode=mode) as display:
                display.log = own
                display.step(0, {"loss": 0.5}, seconds=1.0)
                display.note("saved")
    first, second = capsys.readouterr().out.split("saved\n")[:2]
    assert first == second
    assert lines(log) == [first.strip(), "saved"] * 2


def test_warnings_and_records_are_written_and_shown(log, capsys):
    root, seen = logging.getLogger(), []
    handlers, root.handlers = root.handlers, []  # pytest's
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = show = lambda *parts, **more: seen.append(str(parts[0]))
            with log.records():
                warnings.warn("deprecated", FutureWarning, stacklevel=1)
                logging.getLogger("some.library").warning("low on %s", "memory")
                logging.getLogger("some.library").info("not this")
            assert warnings.showwarning is show and root.handlers == []
            logging.getLogger("some.library").warning("afterwards")
    finally:
        root.handlers = handlers
    first, second = lines(log)
    assert first.endswith("FutureWarning: deprecated") and "test_run_log.py:" in first
    assert second == "WARNING some.library: low on memory"
    shown = capsys.readouterr().err
    assert seen == ["deprecated"] and shown == "low on memory\nafterwards\n"


@pytest.mark.parametrize("kind", ["fifo", "link", "folder"])
def test_what_is_no_file_of_its_own_is_refused(tmp_path, kind):
    path, victim = tmp_path / "rank-0.log", tmp_path / "victim"
    victim.write_text("mine")
    {"fifo": os.mkfifo, "folder": Path.mkdir, "link": lambda p: p.symlink_to(victim)}[kind](path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if kind == "fifo" else None
    with raises(ConfigError, "not-a-file: rank-0.log" if kind == "fifo" else "cannot-write: rank-0.log"):
        RunLog(path)
    if reader is not None:
        os.close(reader)
    assert victim.read_text() == "mine"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_said_once_and_ends_no_run(log, capsys):
    log._file = io.FileIO("/dev/full", "a")
    log.line("x")
    log.error(ValueError("the run's own"))
    said = f"{log.path} cannot be written (No space left on device); it ends here\n"
    assert capsys.readouterr().err == said
