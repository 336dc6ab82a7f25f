"""Calling a Python callable as a reward with a time limit, sync or async, without ever hanging the caller.

A named reward has its own process, see reward_process; this is for callables, which cannot be sent to one.
Sync functions run one after another in their own thread; async ones run together in an event loop in its own
thread, so it does not matter whether the caller (a notebook) has a running loop.
The caller waits in small steps that Ctrl-C interrupts. Python cannot end a thread: one that overran is left
behind and replaced. Code that holds the interpreter lock for ever (a runaway regular expression) cannot be
timed out this way.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from lockstep.rollout.reward_functions import text_of

T = TypeVar("T")
Call = Callable[[], Any]

LOOP_GRACE_SECONDS = 5.0
"""Time of a batch of async calls beyond its calls' own limits before the loop counts as blocked."""


STEP_SECONDS = 0.5
"""Longest single wait: a signal that comes right before a wait begins is only seen at its end."""


def _in_steps(
    wait: Callable[[float], T],
    expired: type[Exception],
    seconds: float,
    done: Callable[[], bool] = lambda: False,
) -> T:
    """Return what `wait(timeout)` gives within `seconds`, waiting in steps, so that Ctrl-C works. Raises
    `expired` after them. done: whether there is an outcome; an `expired` that `wait` raises is then that."""
    until = time.monotonic() + seconds
    while True:
        left = until - time.monotonic()
        try:
            return wait(min(STEP_SECONDS, max(left, 0.0)))
        except expired:
            if done():
                return wait(0.0)
            if left <= STEP_SECONDS:
                raise


class CallFailure(RuntimeError):
    """A call raised SystemExit, KeyboardInterrupt or GeneratorExit, or was left by a fork: it may end neither
    its thread nor the run."""


def _contained(error: BaseException) -> Exception:
    """Return the error as an Exception, which ends no thread."""
    return error if isinstance(error, Exception) else CallFailure(f"{type(error).__name__}: {text_of(error)}")


class CallThread:
    """One daemon thread that runs calls in order."""

    def __init__(self) -> None:
        self._calls: queue.Queue[tuple[Call, queue.Queue[tuple[bool, Any]]]] | None = None

    def run(self, call: Call, *, timeout: float) -> Any:
        """Return the call's value, or raise its error. TimeoutError after `timeout` seconds."""
        if self._calls is None:
            self._calls = queue.Queue()
            threading.Thread(target=_serve, args=(self._calls,), name="reward", daemon=True).start()
        reply: queue.Queue[tuple[bool, Any]] = queue.Queue()
        self._calls.put((call, reply))
        try:
            ok, value = _in_steps(lambda seconds: reply.get(timeout=seconds), queue.Empty, timeout)
        except BaseException as error:
            self._calls = None  # the thread is busy with a call that nobody waits for any more
            if isinstance(error, queue.Empty):
                raise TimeoutError(f"took longer than {timeout:g} s") from None
            raise
        if ok:
            return value
        raise value


def _serve(calls: queue.Queue[tuple[Call, queue.Queue[tuple[bool, Any]]]]) -> None:
    process = os.getpid()
    while True:
        call, reply = calls.get()
        try:
            outcome: tuple[bool, Any] = (True, call())
        except BaseException as error:  # carried to the caller, which raises it
            outcome = (False, _contained(error))
        if os.getpid() != process:  # the call forked, and this is the copy: nobody waits for it
            os._exit(1)
        reply.put(outcome)


class LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(
        self, calls: Sequence[Callable[[], Awaitable[Any]]], *, timeout: float, concurrency: int
    ) -> list[Any]:
        """Return one outcome per call, in order: its value, or the exception that it raised.

        At most `concurrency` calls run at a time; each may take `timeout` seconds (then a TimeoutError is
        its outcome).

        Raises:
            TimeoutError: a call blocks the event loop itself, so that nothing can be timed out one by one.
        """
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            # Daemon threads: one that hangs in a reward must not keep the program from exiting.
            threading.Thread(target=self._loop.run_forever, name="reward-async", daemon=True).start()
        limit = seconds_together(len(calls), timeout, concurrency)
        future = asyncio.run_coroutine_threadsafe(gather(calls, timeout, concurrency), self._loop)
        try:
            return _in_steps(lambda seconds: future.result(timeout=seconds), TimeoutError, limit, future.done)
        except BaseException as error:
            future.cancel()
            if isinstance(error, TimeoutError):
                # The loop is stuck in a call that never awaits; the next batch gets a new one.
                self._loop = None
                raise blocked(len(calls), limit) from None
            raise


def seconds_together(count: int, timeout: float, concurrency: int) -> float:
    """Return how long `count` async calls may take."""
    return -(-count // concurrency) * timeout + LOOP_GRACE_SECONDS


def blocked(count: int, limit: float) -> TimeoutError:
    """Return the error for calls that were not done after `limit` seconds, although each has a timeout."""
    return TimeoutError(
        f"blocks the event loop: {count} calls were not done after {limit:g} s; await inside it, or make it "
        "a plain function"
    )


async def gather(
    calls: Sequence[Callable[[], Awaitable[Any]]], timeout: float, concurrency: int
) -> list[Any]:
    """Return one outcome per call, in order, see LoopThread.run."""
    slots = asyncio.Semaphore(concurrency)

    async def one(call: Callable[[], Awaitable[Any]]) -> Any:
        async with slots:
            try:
                async with asyncio.timeout(timeout) as limit:
                    return await call()
            except TimeoutError:
                if limit.expired():
                    raise TimeoutError(f"took longer than {timeout:g} s") from None
                raise
            except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
                raise _contained(error) from error  # the loop itself would end

    return await asyncio.gather(*(one(call) for call in calls), return_exceptions=True)
