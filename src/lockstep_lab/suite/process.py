"""One cell's subprocess: a log of its own, a deadline, and how it ended in a few words.

A process that hangs is first asked for a traceback of all its threads (SIGABRT, which Python's faulthandler
answers), then ended with everything it started. It does not outlive this process, whatever ends that.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import ConfigError, redacted
from lockstep.observe import memory
from lockstep.observe.files import open_plain
from lockstep.processes.child import Child, describe_status, end

TAIL_BYTES = 256 * 1024
"""How much of a log's end is searched for the line that matters."""
_LINGER_SECONDS = 12.0
"""What a cell left behind, such as the server of an engine, has this long to end by itself."""

_ERROR = re.compile(r"^(?:\[?rank ?\d+\]?:? ?)?((?:[A-Za-z_]\w*\.)*[A-Z]\w*): (.+)$")
_ERROR_NAME = re.compile(r"(Error|Exception|Interrupt|Exit|Unsupported|Failed|Failure)$")
_FRAME = re.compile(r'^\s*File "(.+)", line (\d+) in (\S+)')
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA out of memory|MemoryError|can't allocate memory|Cannot allocate memory"
    r"|std::bad_alloc"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitStatus:
    """The end of a process."""

    returncode: int | None
    """As subprocess reports it: negative for a signal. None: killed at its deadline or by Ctrl-C."""
    timed_out: bool
    seconds: float

    def describe(self) -> str:
        """ "it exited with status 1", "it was killed by SIGSEGV" or "it was killed"."""
        if self.returncode is None:
            return "it was killed"
        kernel = self.returncode == -signal.SIGKILL
        return f"it {describe_status(self.returncode)}" + (
            ", as the system does when memory runs out" if kernel else ""
        )


def start_logged(argv: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None) -> Child:
    """Start `argv` with stdout and stderr at the end of `log`."""
    # Unbuffered: the last lines before a kill are those that matter.
    variables = {**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1", **(environment or {})}
    with log.open("ab") as file:
        return Child(argv, output=file, env=variables, linger=_LINGER_SECONDS)


class ProcessRunner:
    """Run commands, from several threads if need be; `stop` kills those that are running."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[Child] = set()
        self._stopped = False

    def run(self, argv: Sequence[str], *, log: Path, timeout: float) -> ExitStatus:
        """Run `argv` with stdout and stderr in `log`, until it ends or `timeout` seconds are over.

        Raises:
            KeyboardInterrupt: Ctrl-C, or `stop` was called; the process is dead by then.
        """
        start = time.monotonic()
        with self._lock:
            if self._stopped:
                raise KeyboardInterrupt
            # Under the lock: a `stop` between the look and the start would miss this child.
            child = start_logged(argv, log=log)
            self._running.add(child)
        try:
            status = child.wait(timeout)
            if status is None:
                child.ask_for_traceback()
        finally:
            child.end()
            with self._lock:
                self._running.discard(child)
        if self._stopped:
            raise KeyboardInterrupt
        return ExitStatus(
            returncode=status,
            timed_out=status is None,
            seconds=time.monotonic() - start,
        )

    def stop(self) -> None:
        """Kill what runs, and start nothing more."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        end(running)


def read_tail(log: Path) -> str:
    """The last TAIL_BYTES of a log, without secrets; "" where there is none."""
    if not log.exists():
        return ""
    with open_plain(log, ConfigError) as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - TAIL_BYTES))
        return redacted(file.read().decode("utf-8", errors="replace"))


def line_that_matters(text: str, *, limit: int = 300) -> str:
    """The one line of a log that says why: where a fatal signal hit, else the last error that is named, else
    the last line that is not the command itself ("$ ...").

    Example:
        >>> line_that_matters("Traceback ...\\n  File ...\\nValueError: no such kernel\\n\\nhint\\n")
        'ValueError: no such kernel'
    """
    lines = text.splitlines()
    fatal = _fatal(lines)
    if fatal:
        return _shorten(fatal, limit)
    for line in reversed(lines):
        stripped = line.strip()
        if stripped.startswith("lockstep ") and ": " in stripped:
            return _shorten(stripped, limit)
        match = _ERROR.match(line)
        if match and _ERROR_NAME.search(match[1]):
            return _shorten(f"{match[1].rpartition('.')[2]}: {match[2]}", limit)
    last = next((line.strip() for line in reversed(lines) if line.strip() and line[:2] != "$ "), "")
    return _shorten(last, limit)


def looks_out_of_memory(text: str) -> bool:
    """Whether an error or a log says that memory ran out, on a device or on the host."""
    return _OUT_OF_MEMORY.search(text) is not None


def _fatal(lines: Sequence[str]) -> str | None:
    """ "Fatal Python error: Segmentation fault, in NAME (FILE:LINE)" from faulthandler's report."""
    starts = [i for i, line in enumerate(lines) if line.startswith("Fatal Python error: ")]
    if not starts:
        return None
    # The thread that was hit comes as "Current thread"; its first frame is the innermost one.
    after = starts[-1] + 1
    current = next((i for i in range(after, len(lines)) if lines[i].startswith("Current thread")), None)
    for line in lines[after if current is None else current :]:
        frame = _FRAME.match(line)
        if frame:
            return f"{lines[starts[-1]].strip()}, in {frame[3]} ({_short_path(frame[1])}:{frame[2]})"
    return lines[starts[-1]].strip()


def stalled_in(text: str) -> str | None:
    """The function a process was in when it was asked for a traceback, as "NAME (FILE:LINE)"."""
    line = _fatal(text.splitlines())
    return line.partition(", in ")[2] or None if line is not None else None


def _short_path(path: str) -> str:
    """Keep the part that names library and file: .../site-packages/torch/x.py -> torch/x.py."""
    for root in ("/site-packages/", "/dist-packages/", "/src/"):
        if root in path:
            return path.rpartition(root)[2]
    return Path(path).name


def _shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 4] + " ..."


_LINE = 400


def error_line(error: BaseException) -> str:
    """The message's first line that is not blank, cut at 400 characters."""
    lines = (line.strip() for line in str(error).splitlines())
    line = next((line for line in lines if line), "")
    return line if len(line) <= _LINE else f"{line[: _LINE - 1]}…"


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error, or one that it was raised from, is an out-of-memory error."""
    while error is not None:
        if memory.is_out_of_memory(error):
            return True
        error = error.__cause__ or error.__context__
    return False
