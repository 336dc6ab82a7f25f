"""The process that has imported an author's module, and forks one process per live environment.

    supervisor   ends the whole tree when the trainer is gone, see lockstep.processes
      zygote     imports the module, never torch; forks, reaps, relays output; calls nothing of the author's
        instance   one object of the author's class, with a socket of its own to the trainer
          ...        whatever the author's code starts; it ends with its instance

The trainer sends one end of a socket pair for each instance. The zygote keeps a copy of it: when the trainer
shuts its end down, or is gone, the instance is killed; when the instance has ended, with everything that it
started, the zygote says so in a packet END. Both are subreapers: what an instance leaves behind becomes a
child of the zygote, which knows its own and kills the rest.

With `sandbox`, the zygote has an empty environment and locks itself in after the import, and its instances
further: they can compute, and answer on their sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import os
import resource
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from lockstep.environments import shared
from lockstep.environments.author import EnvironmentClass
from lockstep.environments.channel import END, Message, packets, readable, receive, send
from lockstep.environments.instance import Instance
from lockstep.errors import ConfigError
from lockstep.processes import child, supervisor
from lockstep.processes.supervisor import PR_SET_CHILD_SUBREAPER, close_all_but, name_process, prctl
from lockstep.registry import load_object
from lockstep.rollout import sandbox
from lockstep.rollout.reward_functions import raised

SHOWN_BYTES = 1 << 12
"""What an instance prints is shown up to here."""
PRINTED_BYTES = 8 << 20
"""An instance that prints more is ended."""
MEMORY_BYTES = 512 << 20
"""Address space of an instance in a sandbox, unless the class has `_memory_bytes`."""
FORK, SHARE = b"fork", b"share"
"""Requests: one instance, or one process for many of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the trainer asks for."""

    isolation: str
    limit: int
    """Characters of a result."""
    seconds: float
    """Deadline of a call, here of making the first object."""


@dataclass(kw_only=True, slots=True)
class _Live:
    pid: int
    channel: int
    output: int | None
    printed: int = 0
    status: int | None = None


class Zygote:
    """Forks instances, and tells how they ended.

    Args:
        control: where requests come from, each with a descriptor.
        run: the program of a fork, given its request and its descriptor.
        kept: children that the import of the module has started; None: instances can start no processes.
    """

    def __init__(
        self, control: socket.socket, run: Callable[[bytes, int], None], *, kept: set[int] | None
    ) -> None:
        self._control, self._run, self._kept = control, run, kept
        self._live: dict[int, _Live] = {}  # by pid
        self._ended: list[_Live] = []
        self._files: dict[int, Callable[[], None]] = {}  # what to do when a descriptor is ready
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._wakeup, waker = os.pipe()
        for pipe in (self._wakeup, waker):
            _unblock(pipe)
        self._poll.register(self._wakeup, select.POLLIN)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        """Serve requests until the trainer closes the control socket."""
        self._reap()  # what the first object, which only showed its size, has left
        while True:
            ready = dict(self._poll.poll())
            requested = ready.pop(self._control.fileno(), 0)
            for fd in ready:
                if fd == self._wakeup:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wakeup, 4096)
                    self._reap()
                elif act := self._files.get(fd):  # otherwise it was closed in this round
                    act()
            # Last, as it opens descriptors, whose numbers may have been those of closed ones.
            if requested and not self._accept():
                return

    def _accept(self) -> bool:
        request, descriptors, *_ = socket.recv_fds(self._control, 16, 1)
        for channel in descriptors:
            reader, writer = os.pipe()
            try:
                pid = os.fork()
            except OSError as error:
                os.close(writer)
                live = _Live(pid=0, channel=channel, output=reader)
                self._tell(live, {"ended": 1, "refused": f"cannot be forked: {error.strerror}"})
                continue
            if pid == 0:
                self._child(request, channel, writer)
            os.close(writer)
            _unblock(reader)
            self._watch(_Live(pid=pid, channel=channel, output=reader))
        return bool(request)

    def _child(self, request: bytes, channel: int, output: int) -> NoReturn:
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()  # a signal to its group reaches no other instance
            for standard in (1, 2):
                os.dup2(output, standard)
            close_all_but(0, 1, 2, channel)
            name_process("tool")
            self._run(request, channel)
            status = 0
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(status & 0xFF)

    def _watch(self, live: _Live) -> None:
        self._live[live.pid] = live
        assert live.output is not None
        self._files[live.output] = lambda: self._relay(live)
        self._poll.register(live.output, select.POLLIN)
        self._files[live.channel] = lambda: self._kill(live)
        # Not for what the trainer writes, which the instance reads.
        self._poll.register(live.channel, select.POLLRDHUP)

    def _relay(self, live: _Live) -> None:
        """Show what an instance prints, up to a limit; end one that goes on."""
        if live.output is None:
            return
        with contextlib.suppress(BlockingIOError):
            data = os.read(live.output, 1 << 16)
            if not data:
                self._forget(live.output)
                live.output = None
                return
            # What is printed in a sandbox is the policy's.
            room = 0 if self._kept is None else SHOWN_BYTES - live.printed
            if room > 0:
                end = b"\n[more output of this environment is not shown]\n" if len(data) >= room else b""
                with contextlib.suppress(BlockingIOError, BrokenPipeError):  # the trainer reads too slowly
                    os.write(1, data[:room] + end)
            live.printed += len(data)
            if live.printed > PRINTED_BYTES:
                self._kill(live)

    def _kill(self, live: _Live) -> None:
        if live.channel in self._files:
            del self._files[live.channel]
            self._poll.unregister(live.channel)
        if live.pid in self._live:  # otherwise the pid may be another's
            os.kill(live.pid, signal.SIGKILL)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if (live := self._live.pop(found[0], None)) is not None:
                    live.status = os.waitstatus_to_exitcode(found[1])
                    self._ended.append(live)
        left = set[int]() if self._kept is None else supervisor.children() - self._live.keys() - self._kept
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            except PermissionError:  # it has changed its user: waited for no longer
                self._kept = (self._kept or set()) | {pid}
        if left:
            return  # the end of these wakes us, and what they have left is here then
        for live in self._ended:
            self._relay(live)
            self._tell(live, {"ended": live.status, "flood": live.printed > PRINTED_BYTES})
        self._ended.clear()

    def _tell(self, live: _Live, how: Message) -> None:
        """Send the last packet, and close what belonged to the instance."""
        room = select.poll()
        room.register(live.channel, select.POLLOUT)
        if room.poll(0):  # otherwise the trainer reads nothing: it will see the end of the stream
            (packet,) = packets(how)
            with contextlib.suppress(OSError):
                os.write(live.channel, END + packet[1:])
        for fd in (live.channel, live.output):
            if fd is not None:
                self._forget(fd)

    def _forget(self, fd: int) -> None:
        if self._files.pop(fd, None) is not None:
            self._poll.unregister(fd)
        os.close(fd)


def _unblock(fd: int) -> None:
    """os.set_blocking makes an ioctl, which no sandbox allows."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_NONBLOCK)


# The program of an instance.


def serve(environment: EnvironmentClass, channel: int, *, limit: int) -> None:
    """Do jobs until the trainer closes the channel."""
    instance, process = Instance(environment, limit=limit), os.getpid()
    run: Callable[[Coroutine[Any, Any, Message]], Message] = _plain
    runner = asyncio.Runner() if environment.asynchronous else None
    if runner is not None:
        run = runner.run  # one event loop, to which the author's clients are bound

    def received() -> Message | None:
        if runner is not None:
            runner.run(readable(channel))  # meanwhile they answer their servers' pings
        return receive(channel)

    while (job := received()) is not None:
        reply = run(instance.reply(job))
        if os.getpid() != process:  # the tool forked, and this is the copy: nobody waits for it
            os._exit(1)
        with contextlib.suppress(Exception):  # it is the author's to replace or close
            sys.stdout.flush()
        send(channel, {**reply, "id": job["id"]})


def _plain(reply: Coroutine[Any, Any, Message]) -> Message:
    """Run what awaits nothing, without an event loop."""
    try:
        reply.send(None)
    except StopIteration as ended:
        message: Message = ended.value
        return message
    reply.close()
    return {
        "problem": "a method returned an awaitable, but none is `async def`; write it so",
        "kind": "wrong-result",
    }


# Its start.


def _load(target: str) -> EnvironmentClass:
    try:
        return EnvironmentClass.of(load_object(target, what=f"environment {target!r}"), target)
    except ConfigError:
        raise
    except BaseException as error:  # SystemExit of a script, for example
        raise ConfigError(
            f"wrong-part: environment {target!r}: importing its module {raised(error)}"
        ) from error


def _check(environment: EnvironmentClass, settings: Settings) -> None:
    what = f"environment {environment.target!r}"
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if threads:
        raise ConfigError(
            f"wrong-part: {what}: the import of its module has started threads ({', '.join(threads)}), and a "
            "process with threads cannot be forked safely; start them in `__init__` or `reset`"
        )
    plain = [n for n in (*environment.tools, "step") if n not in environment.asynchronous]
    if environment.form == "toolbox":
        plain = [name for name in plain if name != "step"]
    elif "step" in plain:
        plain = ["step"]
    if settings.isolation == "shared" and plain:
        raise ConfigError(
            f"unsupported-combination: environment.isolation = 'shared' and {what}: {', '.join(plain)} "
            "is not async, so each call would stop all environments; write `async def`, or set 'process'"
        )
    needs = getattr(environment.made, "_isolation", None)
    if needs not in (None, settings.isolation):
        raise ConfigError(
            f"unsupported-combination: environment.isolation = {settings.isolation!r} and {what}, which runs "
            f"with {needs!r} only; set that"
        )
    if settings.isolation == "sandbox":
        _check_sandboxed(what, environment)


def _check_sandboxed(what: str, environment: EnvironmentClass) -> None:
    setting = f"environment.isolation = 'sandbox' and {what}"
    if environment.reward is not None:
        raise ConfigError(
            f"unsupported-combination: {setting}, whose {environment.reward} would run in the process of the "
            "policy's code, which could tell any reward; set `rewards`"
        )
    if environment.asynchronous:
        names = ", ".join(environment.asynchronous)
        raise ConfigError(
            f"unsupported-combination: {setting}: {names} is async, and a sandbox has no event loop; write "
            "`def`"
        )


def _in_fork(make: Callable[[], Message], *, what: str, seconds: float) -> Message:
    """Return what `make` returns in a fork, of which nothing stays here.

    Raises:
        ConfigError: it raised, died, or took too long.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        try:
            try:
                reply = make()
            except ConfigError as error:
                reply = {"refused": str(error), "code": error.code}
            except BaseException as error:
                reply = {"refused": f"{what} {raised(error)}", "code": "wrong-part"}
            send(theirs.fileno(), reply)
        finally:
            os._exit(0)
    theirs.close()
    try:
        if not select.select([ours], [], [], seconds)[0]:
            raise ConfigError(f"deadline: {what} took longer than {seconds:g} s")
        told = receive(ours.fileno())
    finally:
        ours.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if told is None:
        raise ConfigError(f"process-died: {what} ended its process")
    if "refused" in told:
        raise ConfigError(str(told["refused"]), code=str(told["code"]))
    return told


_SCHEMA_SECONDS = 300.0
"""Importing transformers from a cold disk."""


def _described(environment: EnvironmentClass, settings: Settings) -> Message:
    what = f"environment {environment.target!r}"

    def made() -> Message:
        before = _memory()
        kept = environment.make()
        return {"instance_bytes": max(0, _memory() - before), "kept": kept is not None}

    probe = _in_fork(made, what=f"{what}: making an object of it", seconds=settings.seconds)
    schemas = _in_fork(
        lambda: {"tools": environment.schemas()}, what=f"{what}: its tools", seconds=_SCHEMA_SECONDS
    )
    return {
        "form": environment.form,
        "tools": schemas["tools"],
        "reward": environment.reward,
        "reads": environment.reads,
        "asynchronous": list(environment.asynchronous),
        "instance_bytes": probe["instance_bytes"],
        "has_torch": "torch" in sys.modules,
        "restarts": getattr(environment.made, "_restarts", False),
        "repeatable": getattr(environment.made, "_repeatable", False),
    }


def _memory() -> int:
    """Bytes that are this process's own."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith("Private_"))


def _sandboxed(described: Message, namespaces: Sequence[str]) -> None:
    layers = sandbox.lock(sandbox.readable_places(), may_fork=True, may_serve=True)
    isolation = sandbox.Isolation(namespaces=tuple(namespaces), **layers)
    if isolation.missing:
        raise ConfigError(
            f"refused: this machine's sandbox is not whole (missing: {', '.join(isolation.missing)}), so "
            "code that the policy writes is not run here; use a kernel with user namespaces and Landlock "
            "(Linux 5.13 or later) and, in a container, a seccomp profile that allows them"
        )
    described["sandbox"] = isolation.describe()


def _start(
    target: str, settings: Settings, namespaces: Sequence[str]
) -> tuple[Message, EnvironmentClass, set[int] | None]:
    environment = _load(target)
    kept = None if settings.isolation == "sandbox" else supervisor.children()
    _check(environment, settings)
    described = _described(environment, settings)
    if settings.isolation == "sandbox":
        _sandboxed(described, namespaces)
    return described, environment, kept


def _program(environment: EnvironmentClass, settings: Settings) -> Callable[[bytes, int], None]:
    sandboxed, limit = settings.isolation == "sandbox", settings.limit
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The zygote holds two descriptors for each instance.
    resource.setrlimit(resource.RLIMIT_NOFILE, (files[1], files[1]))

    def run(request: bytes, channel: int) -> None:
        if sandboxed:
            sandbox.limits(memory=getattr(environment.made, "_memory_bytes", MEMORY_BYTES))
            sandbox.lock(None, may_fork=False)
        else:
            prctl(PR_SET_CHILD_SUBREAPER, 1)
            resource.setrlimit(resource.RLIMIT_NOFILE, files)
        if request == SHARE:
            shared.serve(environment, channel, limit=limit)
        else:
            serve(environment, channel, limit=limit)

    return run


def main(
    target: str, path: Sequence[str], settings: dict[str, Any], control: int, *, jobs: int, replies: int
) -> None:
    """Reply to the first job with what the class is, or why it cannot be used; then serve requests."""
    chosen, namespaces = Settings(**settings), list[str]()
    if chosen.isolation == "sandbox":
        namespaces = sandbox.supervise(jobs)
    else:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        supervisor.supervise(jobs)
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        for library in ("OMP", "OPENBLAS", "MKL"):  # a pool would be lost in forks, and cost memory in each
            os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    for fd in (jobs, replies, control):  # a program that the module starts must not hold them open
        os.set_inheritable(fd, False)
    requests = socket.socket(fileno=control)
    sys.path[:0] = [folder for folder in path if folder not in sys.path]
    # For a tool that imports it in a call, whose seed it would miss; and each fork would import it.
    import numpy.random  # noqa: F401

    job = child.receive(jobs)
    try:
        described, environment, kept = _start(target, chosen, namespaces)
    except ConfigError as error:
        child.send(replies, {"id": job["id"], "refused": str(error), "code": error.code})
        return
    run = _program(environment, chosen)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    zygote = Zygote(requests, run, kept=kept)
    _unblock(1)
    gc.collect()
    gc.freeze()  # so that a fork copies fewer pages
    child.send(replies, {"id": job["id"], **described})
    zygote.serve()
