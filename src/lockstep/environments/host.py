"""Live environments for a trainer: each in a process that can hurt only its own sample.

    host = ToolHost("my_module:Calculator", max_live=512)
    instance = await host.open(row, seed=7, where="rows.jsonl row 3")     # waits for room
    prompt = await instance.reset()
    result = await instance.call("multiply", {"a": 3, "b": 2}, turn=0, call=0)
    reward = await instance.reward({"messages": [...]})
    await instance.close()
    host.close()                                                          # leaves no process

Everything that is awaited has a deadline, except room. The event loop may be any, one for an instance.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import psutil

from lockstep.environments.channel import Message, packets, receive_within, send_within
from lockstep.environments.results import EnvironmentFailure, ToolResult, is_reply, without_controls
from lockstep.environments.room import Room, allow_descriptors
from lockstep.environments.zygote import FORK, PRINTED_BYTES, SHARE, Settings
from lockstep.errors import ConfigError, EngineError
from lockstep.observe.text import printable
from lockstep.processes.child import JobProcess, ProcessEnded, describe_status
from lockstep.processes.programs import PYTHON_TOOL, TOOLS
from lockstep.rollout.reward_functions import TEXT_LENGTH, encoded
from lockstep.rollout.reward_process import show_output

START_SECONDS = 600.0
"""Deadline of the author's imports."""
FORK_SECONDS = 60.0
"""Deadline of a fork, beyond the deadline of its first call."""
END_SECONDS = 10.0
"""Deadline for a killed instance, and what it has started, to be gone."""
_GONE_SECONDS = 2.0
BLOCKED_SECONDS = 5.0
"""Grace period of a shared process, which keeps its deadlines itself, after which its loop is blocked."""
MOST_LIVE = 512
"""Instances at a time, if memory allows them."""
LEAST_BYTES = 4 << 20
"""Memory that an instance is planned with at least: what it writes to of the pages that forks share."""

Isolation = Literal["process", "shared", "sandbox"]


class ToolHost:
    """Runs the environments of one class.

    Args:
        target: `module:Class`, found from the working directory as well.
        isolation: "process": one process for each instance; "shared": one for all, for classes whose tools
            are async: a call that blocks it, or ends it, costs every instance in it; "sandbox": a process
            that can only compute. None: what the class needs, "process" for all but our own.
        max_live: most instances at a time; None: what half of the free memory holds, at most MOST_LIVE.
        tool_seconds: deadline of each call.
        on_error: what a tool that raises, hangs, floods or exits leads to: "message", a result that says so,
            or "drop", an EnvironmentFailure.
        result_characters: a longer result is cut there, and marked.

    Raises:
        ConfigError: the class cannot be imported or used, or its first object not be made; the sandbox is not
            whole.
    """

    def __init__(
        self,
        target: str,
        *,
        isolation: Isolation | None = None,
        max_live: int | None = None,
        tool_seconds: float | None = None,
        on_error: Literal["message", "drop"] = "message",
        result_characters: int = 16_384,
    ) -> None:
        ours = target.partition(":")[0] == PYTHON_TOOL
        self.target, self.on_error = target, on_error
        self.isolation: Isolation = isolation or ("sandbox" if ours else "process")
        self.tool_seconds = tool_seconds or (5.0 if ours else 30.0)
        self._owner, self._limit = os.getpid(), result_characters
        self.keeps_states = False
        """Whether to ask instances for their state after each call."""
        self._shared: socket.socket | None = None
        self._process, self._control, self._description = self._started()
        self.tools: list[dict[str, Any]] = self._description["tools"]
        self._names = [tool["function"]["name"] for tool in self.tools]
        self.max_live = self._planned() if max_live is None else max_live
        self._room = Room(self.max_live)
        allow_descriptors(self.max_live)

    def describe(self) -> dict[str, Any]:
        """Return what the class is: `target`, `form` ("toolbox" or "gym"), `tools` (JSON schemas), `reward`
        (the name of the method that tells it, "step" for the sum over a game, or None), `reads` (the columns
        that `reset` names; None: all), `asynchronous` (names of methods), `instance_bytes` (memory of the
        first object's process), `has_torch`, `repeatable` (whether its calls may be run again after a kill),
        `max_live`, `isolation`, and `sandbox` (its layers, where there is one)."""
        return {
            **self._description,
            "target": self.target,
            "max_live": self.max_live,
            "isolation": self.isolation,
        }

    def require_reward(self) -> None:
        """Check that the class tells rewards; for runs without reward functions.

        Raises:
            ConfigError: it does not.
        """
        if self._description["reward"] is None:
            raise ConfigError(
                f"wrong-part: environment {self.target!r} has no reward: define `get_reward(self) -> float` "
                "or `_reward(self, trajectory)`, or set `rewards`"
            )

    def share(self, room: Room, max_live: int) -> None:
        """Let instances take room that other hosts' take as well, before the first one is made."""
        self._room, self.max_live = room, max_live

    async def check(self, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Make and reset an instance for each row, before a first step.

        Args:
            rows: places, for errors, and rows.

        Raises:
            ConfigError: it fails for a row, which is named.
        """
        for where, row in rows:
            try:
                instance = await self.open(row, seed=0, where=where)
                try:
                    await instance.reset()
                finally:
                    await instance.close()
            except EnvironmentFailure as error:
                raise ConfigError(
                    f"wrong-part: {error}; correct the class, or leave the row out", where=where
                ) from error

    async def enter(self) -> None:
        """Wait for the room of an instance, which `open` with has_room then takes."""
        await self._room.enter()

    async def open(
        self,
        row: Mapping[str, Any],
        *,
        seed: int,
        where: str = "a sample",
        state: str | None = None,
        has_room: bool = False,
    ) -> Instance:
        """Make an instance, once there is room.

        Args:
            row: given to its `reset`.
            seed: of the sample; `random` and numpy are seeded from it, the turn and the call.
            where: place of the row, for errors.
            state: of an earlier instance, which goes on in this one without the author's constructor.
            has_room: after `enter`.

        Raises:
            EnvironmentFailure: the constructor failed.
            EngineError: the process that has imported the class is gone, or this is a fork of the trainer.
            DataError: the row holds a value that is no data.
        """
        if not has_room:
            await self._room.enter()
        instance = Instance(self, where)
        try:
            self._check_owner()
            job = {"op": "make", "row": encoded(dict(row), where), "seed": seed}
            if state is not None:
                job["state"] = state
            await instance._start(job)
        except BaseException:
            instance._abandon()
            raise
        return instance

    def ended(self, how: str, *, where: str) -> Instance:
        """Return an instance that has ended, as one of an earlier process has."""
        instance = Instance(self, where)
        instance.gone, instance._left = how, True
        return instance

    def interrupted(self, name: str, *, where: str, game: bool) -> ToolResult:
        """Return the result of a call that was running when the run was killed.

        Raises:
            EnvironmentFailure: with on_error = "drop".
        """
        problem = "was running when the run was killed, and is not run again"
        reply = {"kind": "interrupted", "problem": problem}
        return Instance(self, where)._failed(reply, name, 0.0, game=game)

    def close(self) -> None:
        """End all instances, and every process that they have started. Idempotent; safe from any thread."""
        if os.getpid() != self._owner:
            return  # they are another's
        self._process.end()
        for channel in filter(None, (self._control, self._shared)):
            channel.close()

    def _started(self) -> tuple[JobProcess, socket.socket, Message]:
        settings = Settings(isolation=self.isolation, limit=self._limit, seconds=self.tool_seconds)
        path = [] if self.target.partition(":")[0] == PYTHON_TOOL else [str(Path.cwd())]
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        reader, writer = os.pipe()
        try:
            process = JobProcess(
                *(TOOLS, self.target, path, asdict(settings), theirs.fileno()),
                role="tools",
                env=self._environment(),
                output=writer,
                inherited=(theirs.fileno(),),
            )
        except BaseException:
            os.close(reader)
            control.close()
            raise
        finally:
            os.close(writer)
            theirs.close()
        # A thread, because a full pipe would block the author's code in its print.
        threading.Thread(target=show_output, args=(reader,), name="tool-output", daemon=True).start()
        try:
            first = process.exchange({}, seconds=START_SECONDS)
        except (TimeoutError, ProcessEnded) as error:
            raise ConfigError(
                f"process-died: environment {self.target!r} cannot be started: {error}"
            ) from None
        finally:
            if process.closed:
                control.close()
        if "refused" in first:
            process.end()
            control.close()
            raise ConfigError(printable(str(first["refused"])), code=str(first["code"]))
        control.setblocking(False)
        return process, control, first

    def _environment(self) -> dict[str, str] | None:
        if self.isolation != "sandbox":
            return None
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        return {**kept, "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

    def _planned(self) -> int:
        each = max(LEAST_BYTES, 2 * int(self._description["instance_bytes"]))
        free = int(psutil.virtual_memory().available)
        return max(1, min(MOST_LIVE, free // 2 // each))

    def _check_owner(self) -> None:
        if os.getpid() != self._owner:
            raise EngineError(
                f"wrong-state: environment {self.target!r} belongs to process {self._owner}, and this is a "
                "fork of it; make a ToolHost of its own here"
            )

    async def _connected(self) -> socket.socket:
        """A socket to a new instance."""
        channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                channel.setblocking(False)
                await self._request(theirs)
            except (ConnectionError, TimeoutError) as error:
                channel.close()
                raise self._lost(error) from None
            except BaseException:
                channel.close()
                raise
        return channel

    def _lost(self, how: object) -> EngineError:
        code = "deadline" if isinstance(how, TimeoutError) else "process-died"
        return EngineError(
            f"the process of environment {self.target!r} {how}; look for what it has printed, and for the "
            "machine's memory",
            code=code,
        )

    async def _is_gone(self) -> bool:
        """Whether the process that forks ends now."""
        deadline = time.monotonic() + _GONE_SECONDS
        while self._process.poll() is None:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.02)
        return True

    async def _request(self, channel: socket.socket) -> None:
        if self.isolation != "shared":
            return await _hand_over(self._control, FORK, channel)
        try:
            await _hand_over(await self._shared_process(), FORK, channel)
        except ConnectionError:  # it has ended since its last instance closed
            self._end_shared()
            await _hand_over(await self._shared_process(), FORK, channel)

    async def _shared_process(self) -> socket.socket:
        """The socket of the process of all instances, which is started if there is none."""
        if self._shared is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                ours.setblocking(False)
                self._shared = ours
                await _hand_over(self._control, SHARE, theirs)
        return self._shared

    def _end_shared(self) -> None:
        """End the process of all instances; the next one starts another."""
        shared, self._shared = self._shared, None
        if shared is not None:
            with contextlib.suppress(OSError):  # a fork of ours may hold it open
                shared.shutdown(socket.SHUT_WR)
            shared.close()


async def _hand_over(control: socket.socket, request: bytes, channel: socket.socket) -> None:
    """Send a request with a descriptor.

    Raises:
        ConnectionError: nobody reads it any more.
        TimeoutError: nobody has read it within FORK_SECONDS.
    """
    deadline = time.monotonic() + FORK_SECONDS
    while True:
        try:
            socket.send_fds(control, [request], [channel.fileno()])
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"accepted no instance within {FORK_SECONDS:g} s") from None
            await asyncio.sleep(0.005)
        except OSError as error:  # closed, or its end is gone
            raise ConnectionError(f"has ended ({error.strerror})") from None


class Instance:
    """A live environment; made by ToolHost.open. Its calls run one after another, in the order they came."""

    def __init__(self, host: ToolHost, where: str) -> None:
        self._host, self._where = host, where
        self._channel: socket.socket | None = None
        self._shared: socket.socket | None = None
        self._lock = asyncio.Lock()
        self._sent = 0
        self.gone: str | None = None
        """How it ended."""
        self.state: str | None = None
        """The object's, where the host keeps states and the object's can be kept."""
        self._untold = False
        """Whether it ended and nobody said how."""
        self._left = False
        """Whether its room was given back."""
        self._parked = False
        self._again: Message | None = None
        """What makes a new one, for a class that allows it."""

    async def reset(self) -> str | list[dict[str, str]] | None:
        """Return what the author's `reset` adds to the conversation: a text, messages, or nothing.

        Raises:
            EnvironmentFailure: it failed.
        """
        value: str | list[dict[str, str]] | None = (await self._do("reset", {"turn": -1, "call": 1}))["value"]
        if isinstance(value, list):
            return [{**message, "content": without_controls(message["content"])} for message in value]
        return value and without_controls(value)

    async def call(self, name: str, arguments: Any, *, turn: int, call: int) -> ToolResult:
        """Call a tool with what the policy wrote.

        Args:
            arguments: by name; anything but a mapping of what the tool takes is the policy's mistake.
            turn: of the policy, from 0.
            call: of the turn, from 0.

        Raises:
            EnvironmentFailure: with on_error = "drop", the tool failed.
        """
        names = self._host._names
        if name not in names:
            known = ", ".join(names) or "none"
            text = f"there is no tool {printable(str(name)[:80])!r}; the tools are: {known}"
            return ToolResult(text=f"error: {text}", error="unknown-tool", seconds=0.0)
        if not isinstance(arguments, Mapping):
            text = f"error: the arguments of {name} are a {type(arguments).__name__}, not a JSON object"
            return ToolResult(text=text, error="wrong-arguments", seconds=0.0)
        job = {"name": name, "arguments": dict(arguments), "turn": turn, "call": call}
        return await self._result("call", job, name)

    async def calls(self, calls: Sequence[tuple[str, Any]], *, turn: int) -> list[ToolResult]:
        """Call several tools of a turn, one after another; results in the order of the calls."""
        return [await self.call(name, given, turn=turn, call=i) for i, (name, given) in enumerate(calls)]

    async def step(self, action: str, *, turn: int) -> ToolResult:
        """Take a step of a game. One that fails ends it, with reward 0.

        Raises:
            EnvironmentFailure: with on_error = "drop", the step failed.
        """
        return await self._result("step", {"action": action, "turn": turn}, "step")

    async def reward(self, trajectory: Mapping[str, Any]) -> float | dict[str, float] | None:
        """Return the reward, by name where the author names parts; None: it has none for this trajectory, or
        only those of its steps.

        Args:
            trajectory: given to `_reward`: what JSON can hold.

        Raises:
            EnvironmentFailure: the method failed, did not return finite numbers, or the instance has ended.
        """
        reply = await self._do("reward", {"trajectory": dict(trajectory), "turn": -2})
        value: float | dict[str, float] | None = reply["value"]
        return value

    async def close(self) -> None:
        """Call the author's `close`, and end the process with all that it has started. Idempotent."""
        self._again = None
        if self.gone is None:
            with contextlib.suppress(EnvironmentFailure):  # the sample has its outcome
                await self._do("close", {"turn": -3})
            await self._end("it was closed")
        self._abandon()

    def park(self) -> None:
        """Give its room to others while its trajectory waits for the next step; it lives on."""
        self._parked = True
        if not self._left:
            self._left = True
            self._host._room.leave()

    def unpark(self) -> None:
        """Take its room again, also where there is none: waiting for those that wait for it would not end."""
        self._parked = False
        if self.gone is None or self._again is not None:
            self._left = False
            self._host._room.enter_now()

    async def _start(self, job: Message) -> None:
        """Make the author's object in a new process."""
        began = time.monotonic()
        self._channel, self.gone, self._sent, self._left = None, None, 0, self._parked
        self._channel = await self._host._connected()
        self._shared = self._host._shared
        grace = max(0.0, FORK_SECONDS - (time.monotonic() - began))
        reply = await self._exchange({"op": "make", **job, "turn": -1}, grace=grace)
        if self._untold and await self._host._is_gone():
            raise self._host._lost("has ended")
        self._checked("make", reply)
        if self._host._description["restarts"]:
            self._again = job

    async def _result(self, op: str, job: Message, name: str) -> ToolResult:
        began = time.monotonic()
        async with self._lock:
            try:
                if self.gone is not None and self._again is not None:
                    await self._start(self._again)  # in the place that it has kept
                reply = await self._exchange({"op": op, **job})
            except EnvironmentFailure as failure:
                reply = {"problem": str(failure), "kind": failure.kind}
        seconds = time.monotonic() - began
        if "problem" in reply:
            return self._failed(reply, name, seconds, game=op == "step")
        return ToolResult(
            text=without_controls(reply["value"]),
            error=None,
            seconds=seconds,
            reward=reply.get("reward"),
            done=reply.get("done", False),
            truncated=reply["truncated"],
        )

    def _failed(self, reply: Message, name: str, seconds: float, *, game: bool) -> ToolResult:
        kind, problem = str(reply["kind"]), printable(str(reply["problem"])[:TEXT_LENGTH])
        detail = str(reply.get("traceback", ""))
        if self._host.on_error == "drop" and kind != "wrong-arguments":
            raise EnvironmentFailure(f"{self._where}: {name} {problem}", kind=kind, detail=detail)
        if kind not in ("wrong-arguments", "wrong-result"):
            problem = f"{name} {problem}"
        if self.gone is not None and self._again is not None:
            problem += "; the next call begins anew, without what earlier calls have left"
        return ToolResult(
            text=f"error: {problem}",
            error=kind,
            seconds=seconds,
            reward=0.0 if game else None,
            done=game,
            detail=detail,
        )

    async def _do(self, op: str, job: Message) -> Message:
        """A job whose failure is the sample's."""
        async with self._lock:
            return self._checked(op, await self._exchange({"op": op, **job}))

    def _checked(self, op: str, reply: Message) -> Message:
        if "problem" in reply:
            name = {"make": "the constructor", "reward": "the reward"}.get(op, op)
            text = f"{self._where}: environment {self._host.target!r}: {name}: {printable(reply['problem'])}"
            raise EnvironmentFailure(text, kind=str(reply["kind"]), detail=str(reply.get("traceback", "")))
        return reply

    async def _exchange(self, job: Message, *, grace: float = 0.0) -> Message:
        """Send a job and return its reply; after anything else the instance is gone."""
        host = self._host
        host._check_owner()
        if self.gone is not None or self._channel is None:
            return {"problem": f"cannot run: {self.gone or 'it never began'}", "kind": "ended"}
        self._sent += 1
        seconds, shared = host.tool_seconds, host.isolation == "shared"
        job = {**job, "seconds": seconds, "id": self._sent, "keep": host.keeps_states}
        deadline = time.monotonic() + seconds + grace + (BLOCKED_SECONDS if shared else 0.0)
        try:
            request = list(packets(job))
        except (RecursionError, TypeError, ValueError):
            return {"problem": "the arguments cannot be written as JSON", "kind": "wrong-arguments"}
        try:
            await send_within(self._channel, request, deadline)
            reply = await receive_within(self._channel, deadline)
        except TimeoutError:
            if shared and host._shared is self._shared:
                host._end_shared()
            return await self._ended_by("timeout", f"took longer than {seconds:g} s")
        except ValueError as error:
            return await self._ended_by("died", f"sent an invalid reply ({error})")
        except BaseException:  # cancelled: a late reply must not answer another job
            self._abandon()
            raise
        if reply is None or "ended" in reply:
            return await self._ended_by(*self._how(reply))
        if not is_reply(reply, job, host._limit):
            return await self._ended_by("died", "sent an invalid reply")
        self.state = reply.get("state", self.state)
        if reply.get("kind") == "timeout":
            await self._end(str(reply["problem"]))
        return reply

    def _how(self, last: Message | None) -> tuple[str, str]:
        if last is None:
            self._untold = self._host.isolation != "shared"
            if self._host.isolation == "shared" and self._host._shared is self._shared:
                self._host._end_shared()
            return "died", "ended: its process, with everything in it, is gone"
        if last.get("flood"):
            return "flood", f"printed more than {PRINTED_BYTES >> 20} MiB, and was ended"
        status = last["ended"]
        how = describe_status(status) if isinstance(status, int) else "is gone"
        return "died", str(last.get("refused") or f"ended: its process {how}")

    async def _ended_by(self, kind: str, why: str) -> Message:
        await self._end(why)
        return {"problem": why, "kind": kind}

    async def _end(self, why: str) -> None:
        """End the process, and wait until it is gone, at most END_SECONDS."""
        self.gone = why
        channel = self._channel
        try:
            if channel is not None:
                with contextlib.suppress(OSError):
                    channel.shutdown(socket.SHUT_WR)  # a fork of ours may hold it open
                deadline = time.monotonic() + END_SECONDS
                with contextlib.suppress(TimeoutError, ValueError):
                    while (
                        last := await receive_within(channel, deadline)
                    ) is not None and "ended" not in last:
                        pass  # a late reply
        finally:
            self._abandon()

    def _abandon(self) -> None:
        """Let the process be ended, without waiting for it."""
        self.gone = self.gone or "it was abandoned"
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.shutdown(socket.SHUT_WR)
            self._channel.close()
            self._channel = None
        if not self._left and self._again is None:
            self._left = True
            self._host._room.leave()
