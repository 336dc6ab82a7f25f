"""Child processes that never outlive this one, and jobs sent to them."""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import logging
import os
import select
import signal
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from lockstep.processes.programs import marked
from lockstep.processes.supervisor import AT_ONCE as AT_ONCE

# A program as a child of this process, under a supervisor: it never outlives this process.
#
#     child = Child(["prog", "--flag"], output=log, grace=8.0)
#     child.wait(60.0)           # its status; None: it still runs
#     child.ask_for_traceback()  # SIGABRT, which Python's faulthandler answers
#     child.end()                # it, and everything that it started
#     describe_status(child.poll())
#
# Whatever ends this process, `supervisor.py` holds a pipe to it, and ends the program with its whole tree
# when the pipe closes. A fork of this process ends nobody else's children.


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
        env: its whole environment, besides the marker of our processes; None: ours.
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
                env=marked(os.environ if env is None else env),
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
    """End children and everything that they started: signal all of them, then wait for them together."""
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
            log.error("cannot end processes %s, which were started by a child that was killed", members)
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


# Jobs to a child process that this one never waits for without a deadline: one reply for each job.


# A child may be sandboxed because it may send anything: a longer reply is not read.
REPLY_BYTES = 64 << 20
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
"""The folder that Lockstep is imported from."""
_LONGEST_POLL = 2**31 - 1
"""Milliseconds: 24 days."""


class ProcessEnded(RuntimeError):
    """The process died, or sent something that is no reply."""


def _pipe(reader: contextlib.ExitStack, writer: contextlib.ExitStack) -> tuple[int, int]:
    """A pipe whose two ends are closed with the stacks."""
    ends = os.pipe()
    reader.callback(os.close, ends[0])
    writer.callback(os.close, ends[1])
    return ends


class JobProcess(Child):
    """A child process that runs `module`'s main(*arguments, jobs=FD, replies=FD).

    It must call `supervisor.supervise(jobs)` before anything else, so that it ends with all its descendants.

    Args:
        role: a word of at most six letters for its name, see `supervisor.name_process`.
        env: its whole environment, besides the marker; None: ours, and our Python path.
        output: a descriptor for its standard output and error; None: nothing is kept of them.
        traceback: ask for one before a process that took too long is ended; its supervisor passes SIGABRT on.
        inherited: more descriptors that it gets, under the same numbers.
    """

    def __init__(
        self,
        module: str,
        *arguments: Any,
        role: str,
        env: Mapping[str, str] | None = None,
        output: int | None = None,
        traceback: bool = False,
        inherited: Sequence[int] = (),
    ) -> None:
        confined = env is not None
        path = [ROOT] if confined else sys.path
        more = package_places() if confined else []
        sink = subprocess.DEVNULL if output is None else output
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            theirs_in, self._jobs = _pipe(theirs, ours)
            self._replies, theirs_out = _pipe(ours, theirs)
            code = (
                f"import sys; sys.path[:{0 if confined else ''}] = {path!r}; sys.path += {more!r}\n"
                "from lockstep.processes.child import relax_gc; relax_gc()\n"
                f"from lockstep.processes.supervisor import name_process; name_process({role!r})\n"
                f"from {module} import main\n"
                f"main(*{arguments!r}, jobs={theirs_in}, replies={theirs_out})"
            )
            process = subprocess.Popen(
                # -P: otherwise Python would search the working directory for what our own sys.path lacks.
                [sys.executable, *(["-I", "-B", "-W", "ignore"] if confined else ["-P"]), "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env=marked(os.environ if env is None else env),
                pass_fds=(theirs_in, theirs_out, *inherited),
                start_new_session=True,
            )
            ours.pop_all()  # kept: the process is there
        # A pipe that is ready may have room for less than is written: a blocking write would wait for the
        # child beyond every deadline.
        os.set_blocking(self._jobs, False)
        self._count = 0
        self._traceback = traceback
        self._own(process, self._jobs, self._replies, seconds=0.0)

    def exchange(self, job: Message, *, seconds: float) -> Message:
        """Send a job and return its reply.

        Raises:
            TimeoutError: there was none within `seconds`.
            ProcessEnded: the process died, or replied something else.

        After any exception the process is ended: a late reply must not answer another job.
        """
        deadline = time.monotonic() + seconds
        try:
            try:
                self._give(job, deadline)
            except BrokenPipeError:
                self._died()
            reply = self._reply(deadline)
        except TimeoutError:
            if self._traceback:
                self.ask_for_traceback()
            self.end()
            raise TimeoutError(f"took longer than {seconds:g} s") from None
        except BaseException:
            self.end()
            raise
        if not isinstance(reply, dict) or type(reply.get("id")) is not int or reply.pop("id") != self._count:
            self.end()
            raise ProcessEnded("it sent an invalid reply to the job")
        return reply

    def _give(self, job: Message, deadline: float) -> None:
        self._count += 1
        data = memoryview(packed({**job, "id": self._count}))
        while data:
            _ready(deadline, write=self._jobs)
            data = data[os.write(self._jobs, data[: 1 << 16]) :]

    def _reply(self, deadline: float) -> Any:
        size = struct.unpack("<I", self._read(4, deadline))[0]
        if size > REPLY_BYTES:
            raise ProcessEnded(f"it sent a reply of {size} bytes, more than allowed")
        try:
            return json.loads(self._read(size, deadline))
        except (ValueError, RecursionError) as error:
            raise ProcessEnded(f"it sent a reply that is not JSON ({type(error).__name__})") from None

    def _read(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            _ready(deadline, read=self._replies)
            chunk = os.read(self._replies, min(size - len(data), 1 << 20))
            if not chunk:
                self._died()
            data += chunk
        return bytes(data)

    def _died(self) -> None:
        status = self.wait(END_SECONDS)
        raise ProcessEnded(
            "it closed its pipe" if status is None else f"its process {describe_status(status)}"
        )


def _ready(deadline: float, *, read: int | None = None, write: int | None = None) -> None:
    """Wait in Python until the descriptor is ready, so that Ctrl-C works."""
    poll = select.poll()
    if read is not None:
        poll.register(read, select.POLLIN)
    if write is not None:
        poll.register(write, select.POLLOUT)
    if not poll.poll(min(max(0.0, deadline - time.monotonic()) * 1000, _LONGEST_POLL)):
        raise TimeoutError


def end_jobs(processes: Iterable[JobProcess], *, last: Message | None = None, seconds: float = 0.0) -> None:
    """End the processes and everything that they started; all are waited for together.

    Args:
        last: a job that is first sent to each, on which they end by themselves.
        seconds: deadline of that, also for all of them together.
    """
    open_ones = [process for process in processes if not process.closed]
    if last is not None:
        deadline = time.monotonic() + seconds
        for process in open_ones:
            with contextlib.suppress(TimeoutError, BrokenPipeError):
                process._give(last, deadline)
        for process in open_ones:
            with contextlib.suppress(TimeoutError):  # the pipe closes, or there is a reply that nobody needs
                _ready(deadline, read=process._replies)
    end(open_ones)


def package_places() -> list[str]:
    """Return the entries of sys.path that hold packages: not the working directory, a folder around it, or
    that of the script that was started. Those hold the user's files (data, checkpoints, .env), and reading a
    name such as "module:function" puts the working directory on sys.path."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    own = {os.path.realpath(os.getcwd())} | ({os.path.realpath(os.path.dirname(script))} if script else set())
    inside = sys.prefix, sys.base_prefix, sys.exec_prefix
    places = []
    for path in filter(None, sys.path):
        real = os.path.realpath(path)
        holds = any(folder == real or folder.startswith(real.rstrip("/") + "/") for folder in own)
        if not holds or any(real.startswith(os.path.realpath(prefix) + "/") for prefix in inside):
            places.append(path)
    return places


# JSON behind a 4-byte length: jobs to a child process, and its replies, each with its job's id.
#
# This is what the child needs, which waits without a limit. Standard library only: sandboxed processes load
# it.


Message = dict[str, Any]


def receive(fd: int) -> Message:
    """Read the next message; ends the process when there will be none."""
    size = struct.unpack("<I", _read(fd, 4))[0]
    message: Message = json.loads(_read(fd, size))
    return message


def _read(fd: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = os.read(fd, min(size - len(data), 1 << 20))
        if not chunk:
            os._exit(0)
        data += chunk
    return bytes(data)


def send(fd: int, message: Message) -> None:
    """Write one message."""
    data = memoryview(packed(message))
    while data:
        data = data[os.write(fd, data) :]


def packed(message: Message) -> bytes:
    """Return the bytes of a message."""
    text = json.dumps(message, ensure_ascii=False).encode(errors="surrogatepass")  # as json.loads decodes
    return struct.pack("<I", len(text)) + text


# Python's search for garbage, held back while nearly everything that is made stays.


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Leave garbage that is in cycles alone in the body: imports and exported graphs make a million objects
    that stay, and going through them again and again took a fifth of a start and a twelfth of an export."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def relax_gc() -> None:
    """Look for garbage in cycles seven times less often, and not when the process ends, which the system then
    cleans up. For a process that is all ours: of the 4.9 s that torch, transformers and the loop take to be
    imported and left again, 1.2 s were the last search and 0.4 s the others. A second call does nothing.
    """
    # Python's own threshold is 700.
    gc.set_threshold(5_000, 10, 10)
    atexit.unregister(gc.freeze)
    # freeze() takes all objects out of the search that Python makes when it ends.
    atexit.register(gc.freeze)
