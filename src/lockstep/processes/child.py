"""A program as a child of this process, under a supervisor: it never outlives this process.

    child = Child(["prog", "--flag"], output=log, grace=8.0)
    child.wait(60.0)           # its status; None: it still runs
    child.ask_for_traceback()  # SIGABRT, which Python's faulthandler answers
    child.end()                # it, and everything that it started
    describe_status(child.poll())

Whatever ends this process, `supervisor.py` holds a pipe to it, and ends the program with its whole tree when
the pipe closes. A fork of this process ends nobody else's children.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from lockstep.processes.supervisor import AT_ONCE as AT_ONCE

log = logging.getLogger(__name__)

LINGER_SECONDS = 3.0
"""Seconds between SIGTERM and SIGKILL for what an ended program left behind, such as other supervisors."""
TRACEBACK_SECONDS = 5.0
"""How long a process that is asked for a traceback may take to write it."""
END_SECONDS = 10.0
"""Time that a supervisor has to end, beyond grace and linger; then it is killed."""
# For the kernel to end what was killed.
_SESSION_SECONDS = 10.0
_SUPERVISOR = Path(__file__).with_name("supervisor.py")

Output = int | IO[bytes] | None


def describe_status(status: int) -> str:
    """Return `exited with status 1` or `was killed by SIGSEGV`."""
    return f"exited with status {status}" if status >= 0 else f"was killed by {signal_name(status)}"


def signal_name(status: int) -> str:
    """-11 -> "SIGSEGV"."""
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


class Child:
    """A running program, in a session of its own: the terminal's Ctrl-C comes to this process only.

    Args:
        command: program and arguments. One that cannot be started exits with status 127 and says so.
        output: where its standard output and error go, or one for each; None: nothing is kept of them.
        env: its whole environment; None: ours.
        cwd: its working directory; None: ours.
        grace: seconds between SIGTERM and SIGKILL when it is ended; 0: SIGKILL at once.
        linger: the same for what it leaves behind when it ends, in whichever way.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        output: Output | tuple[Output, Output] = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        grace: float = 0.0,
        linger: float = LINGER_SECONDS,
    ) -> None:
        theirs, lifeline = os.pipe()
        settings = (os.getpid(), theirs, grace, linger)
        out, err = output if isinstance(output, tuple) else (output, output)
        try:
            process = subprocess.Popen(
                # -I and -S: nothing of the user's environment or of site-packages is loaded, so neither slows
                # it down or breaks it.
                [sys.executable, "-I", "-S", str(_SUPERVISOR), *map(str, settings), *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if out is None else out,
                stderr=subprocess.DEVNULL if err is None else err,
                env=None if env is None else dict(env),
                cwd=cwd,
                pass_fds=(theirs,),
                start_new_session=True,
            )
        except BaseException:
            os.close(lifeline)
            raise
        finally:
            os.close(theirs)
        self._own(process, lifeline, seconds=grace + linger)

    def _own(self, process: subprocess.Popen[bytes], *pipes: int, seconds: float) -> None:
        """Answer for a process in a session of its own, which ends within `seconds` when the pipes close."""
        self._process, self._session_ended = process, False
        parts = _Parts(process=process, pipes=pipes, seconds=seconds + END_SECONDS)
        self._finalizer = weakref.finalize(self, _end, [parts])
        self._finalizer.atexit = False  # `_end_running` ends them together
        _running.add(self)

    @property
    def pid(self) -> int:
        """The pid of the supervisor, which stands for the whole tree."""
        return self._process.pid

    @property
    def closed(self) -> bool:
        """Whether the process was ended by `end`."""
        return not self._finalizer.alive

    def poll(self) -> int | None:
        """Return its exit status, or negative the signal that ended it; None while it or anything that it
        started runs."""
        status = self._process.poll()
        if status is not None and status < 0 and not self._session_ended:
            _end_session(self._process.pid)  # the supervisor may have been killed itself
            self._session_ended = True  # later the pid, and with it the session, may be another's
        return status

    def wait(self, seconds: float) -> int | None:
        """Like `poll`, after waiting for the end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, seconds))
        return self.poll()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal of supervisor.PASSED_ON to the program, and to nothing that it started; AT_ONCE is
        SIGKILL for it."""
        self._process.send_signal(number)

    def ask_for_traceback(self) -> None:
        """Send SIGABRT, on which Python's faulthandler writes where all threads are, and wait for the end, at
        most TRACEBACK_SECONDS."""
        self.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(TRACEBACK_SECONDS)

    def end(self) -> None:
        """End the program and everything that it started. Idempotent; safe from any thread."""
        end([self])


def end(children: Iterable[Child]) -> None:
    """End children and everything that they started: all are told, then waited for together."""
    finalized = [child._finalizer.detach() for child in children]
    _end([part for _, _, (parts,), _ in filter(None, finalized) for part in parts])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    """The process and the pipes of a Child that is to be ended, and may be gone."""

    process: subprocess.Popen[bytes]
    pipes: tuple[int, ...]
    seconds: float
    owner: int = field(default_factory=os.getpid)


def _end(ending: Sequence[_Parts]) -> None:
    for part in ending:
        for pipe in part.pipes:
            os.close(pipe)
    own = [part for part in ending if part.owner == os.getpid()]
    for part in ending:
        if part not in own:
            part.process.returncode = -signal.SIGKILL  # in a fork it is another's: nothing to wait for here
    for part in own:
        part.process.send_signal(signal.SIGHUP)  # a fork of ours may hold the pipe open
    late = [part.process for part in own]
    try:
        late = _late(late, max((part.seconds for part in own), default=0.0))
    finally:  # also Ctrl-C
        for process in late:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        _late(late, END_SECONDS)  # the kernel ends it when it can
        for part in own:
            if part.process.returncode is None or part.process.returncode < 0 or not _subreapers:
                _end_session(part.process.pid)


_subreapers = sys.platform == "linux"


def _late(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> list[subprocess.Popen[bytes]]:
    """Those that have not ended after `seconds`."""
    deadline, late = time.monotonic() + seconds, []
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            late.append(process)
    return late


def _end_session(session: int) -> None:
    """Kill what a killed supervisor left: the program died with it, but not the processes that the program
    started."""
    deadline = time.monotonic() + _SESSION_SECONDS
    while members := [pid for pid in psutil.pids() if _lives_in(pid, session)]:
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            log.error("processes %s, started by a child that was killed, cannot be ended", members)
            return
        time.sleep(0.02)


def _lives_in(pid: int, session: int) -> bool:
    try:
        return os.getsid(pid) == session and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, PermissionError, psutil.NoSuchProcess):
        return False


_running: weakref.WeakSet[Child] = weakref.WeakSet()


@atexit.register
def _end_running() -> None:
    end(list(_running))
