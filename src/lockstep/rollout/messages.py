"""Jobs to child processes: JSON behind a 4-byte length, one reply for each job, with the job's id.

`receive` and `send` are for the child, which waits as long as it takes. JobProcess is for the parent, which
waits for nothing without a deadline.
"""

from __future__ import annotations

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
from collections.abc import Mapping
from typing import Any

from lockstep.rollout.sandbox import ROOT

Message = dict[str, Any]

REPLY_BYTES = 64 << 20
END_SECONDS = 10.0
_LONGEST_POLL = 2**31 - 1
"""Milliseconds: 24 days."""


def receive(fd: int) -> Message:
    """The next message; ends the process when there will be none."""
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
    """The message as it is sent."""
    text = json.dumps(message).encode()
    return struct.pack("<I", len(text)) + text


class ProcessEnded(RuntimeError):
    """The process died, or said something that is no reply."""


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
        self._finalizer = weakref.finalize(self, _end, self._process, self._jobs, self._replies)

    @property
    def pid(self) -> int:
        """Of the process that stands for the whole tree."""
        return self._process.pid

    @property
    def closed(self) -> bool:
        """Whether the process was ended."""
        return not self._finalizer.alive

    def exchange(self, job: Message, *, seconds: float) -> Message:
        """The reply to `job`.

        Raises:
            TimeoutError: there was none within `seconds`.
            ProcessEnded: the process died, or replied something else.

        After any exception the process is ended: a late reply must not answer another job.
        """
        self._count += 1
        try:
            reply = self._exchange({**job, "id": self._count}, time.monotonic() + seconds)
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
        self._finalizer()

    def _exchange(self, job: Message, deadline: float) -> Any:
        data = memoryview(packed(job))
        try:
            while data:
                _ready(deadline, write=self._jobs)
                data = data[os.write(self._jobs, data[: 1 << 16]) :]
        except BrokenPipeError:
            self._died()
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
    """Wait until the descriptor is ready, in Python's own steps, so that Ctrl-C is heard."""
    poll = select.poll()
    if read is not None:
        poll.register(read, select.POLLIN)
    if write is not None:
        poll.register(write, select.POLLOUT)
    if not poll.poll(min(max(0.0, deadline - time.monotonic()) * 1000, _LONGEST_POLL)):
        raise TimeoutError


def _end(process: subprocess.Popen[bytes], *pipes: int) -> None:
    for pipe in pipes:
        os.close(pipe)
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
