"""Jobs to child processes: JSON behind a 4-byte length, one reply for each job, with the job's id.

`receive` and `send` are for the child, which waits without a limit. JobProcess is for the parent, which never
waits without a deadline.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.rollout.sandbox import ROOT

Message = dict[str, Any]

REPLY_BYTES = 64 << 20
END_SECONDS = 10.0
"""Deadline of ending processes, for all together; those that are left are killed."""
_LONGEST_POLL = 2**31 - 1
"""Milliseconds: 24 days."""


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
    text = json.dumps(message).encode()
    return struct.pack("<I", len(text)) + text


class ProcessEnded(RuntimeError):
    """The process died, or sent something that is no reply."""


class JobProcess:
    """A child process that runs `module`'s main(*arguments, jobs=FD, replies=FD).

    It must call `sandbox.supervise(jobs, ...)` first, so that it ends with all its descendants.

    Args:
        env: its whole environment; None: ours, and our Python path.
        output: a descriptor for its standard output and error; None: nothing is kept of them.
    """

    def __init__(
        self,
        module: str,
        *arguments: Any,
        env: Mapping[str, str] | None = None,
        output: int | None = None,
    ) -> None:
        theirs_in, self._jobs = os.pipe()
        self._replies, theirs_out = os.pipe()
        confined = env is not None
        path = [ROOT] if confined else sys.path
        more = [p for p in sys.path if p] if confined else []
        code = (
            f"import sys; sys.path[:{0 if confined else ''}] = {path!r}; sys.path += {more!r}\n"
            f"from {module} import main\n"
            f"main(*{arguments!r}, jobs={theirs_in}, replies={theirs_out})"
        )
        sink = subprocess.DEVNULL if output is None else output
        try:
            self._process = subprocess.Popen(
                [sys.executable, *(["-I", "-B", "-W", "ignore"] if confined else ["-P"]), "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env=env,
                pass_fds=(theirs_in, theirs_out),
                start_new_session=True,
            )
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        os.set_blocking(self._jobs, False)
        self._count = 0
        self._finalizer = weakref.finalize(self, _end, [_Parts(self._process, (self._jobs, self._replies))])
        self._finalizer.atexit = False  # `_end_running` ends them together
        _running.add(self)

    @property
    def pid(self) -> int:
        """The pid of the supervisor, which stands for the whole tree."""
        return self._process.pid

    @property
    def closed(self) -> bool:
        """Whether the process was ended."""
        return not self._finalizer.alive

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
            self.close()
            raise TimeoutError(f"took longer than {seconds:g} s") from None
        except BaseException:
            self.close()
            raise
        if not isinstance(reply, dict) or type(reply.get("id")) is not int or reply.pop("id") != self._count:
            self.close()
            raise ProcessEnded("it replied something that is no reply to the job")
        return reply

    def close(self) -> None:
        """End the process and everything that it started."""
        end([self])

    def _give(self, job: Message, deadline: float) -> None:
        self._count += 1
        data = memoryview(packed({**job, "id": self._count}))
        while data:
            _ready(deadline, write=self._jobs)
            data = data[os.write(self._jobs, data[: 1 << 16]) :]

    def _reply(self, deadline: float) -> Any:
        size = struct.unpack("<I", self._read(4, deadline))[0]
        if size > REPLY_BYTES:
            raise ProcessEnded(f"it sent a reply of {size} bytes")
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
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            raise ProcessEnded("it closed its pipe") from None
        if code >= 0:
            raise ProcessEnded(f"its process ended with exit code {code}")
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        raise ProcessEnded(f"its process was ended by {name}")


def _ready(deadline: float, *, read: int | None = None, write: int | None = None) -> None:
    """Wait in Python until the descriptor is ready, so that Ctrl-C works."""
    poll = select.poll()
    if read is not None:
        poll.register(read, select.POLLIN)
    if write is not None:
        poll.register(write, select.POLLOUT)
    if not poll.poll(min(max(0.0, deadline - time.monotonic()) * 1000, _LONGEST_POLL)):
        raise TimeoutError


def end(processes: Iterable[JobProcess], *, last: Message | None = None, seconds: float = 0.0) -> None:
    """End the processes and everything that they started; all are waited for together, END_SECONDS long.

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
    finalized = [process._finalizer.detach() for process in open_ones]
    _end([part for _, _, (parts,), _ in filter(None, finalized) for part in parts])


@dataclass(frozen=True, slots=True)
class _Parts:
    """The process and the pipes of a JobProcess that is to be ended, and may be gone."""

    process: subprocess.Popen[bytes]
    pipes: tuple[int, int]
    owner: int = field(default_factory=os.getpid)


def _end(ending: Sequence[_Parts]) -> None:
    for part in ending:
        for pipe in part.pipes:
            os.close(pipe)
    own = [part.process for part in ending if part.owner == os.getpid()]  # in a fork they are another's
    for process in own:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
    late = _late(own)
    for process in late:
        process.kill()
    _late(late)  # the kernel ends it when it can


def _late(processes: Sequence[subprocess.Popen[bytes]]) -> list[subprocess.Popen[bytes]]:
    """Those that have not ended after END_SECONDS."""
    deadline, late = time.monotonic() + END_SECONDS, []
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            late.append(process)
    return late


_running: weakref.WeakSet[JobProcess] = weakref.WeakSet()


@atexit.register
def _end_running() -> None:
    end(list(_running))
