"""Jobs to a child process that this one never waits for without a deadline: one reply for each job."""

from __future__ import annotations

import contextlib
import json
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from lockstep.processes import child
from lockstep.processes.child import END_SECONDS, Child, describe_status
from lockstep.processes.messages import Message, packed

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
        env: its whole environment; None: ours, and our Python path.
        output: a descriptor for its standard output and error; None: nothing is kept of them.
        traceback: ask for one before a process that took too long is ended; its supervisor passes SIGABRT on.
    """

    def __init__(
        self,
        module: str,
        *arguments: Any,
        role: str,
        env: Mapping[str, str] | None = None,
        output: int | None = None,
        traceback: bool = False,
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
                "from lockstep.processes.garbage import search_rarely; search_rarely()\n"
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
                env=env,
                pass_fds=(theirs_in, theirs_out),
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
            raise ProcessEnded("it replied something that is no reply to the job")
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


def end(processes: Iterable[JobProcess], *, last: Message | None = None, seconds: float = 0.0) -> None:
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
    child.end(open_ones)


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
