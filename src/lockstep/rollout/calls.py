"""Calling a user's reward function with a time limit, sync or async, without ever hanging the caller.

Sync functions run one after another in a thread of their own; async ones run together in an event loop in a
thread of its own, so it does not matter whether the caller (a notebook) has a running loop. The caller waits
in small steps that Ctrl-C interrupts. Python cannot end a thread: one that overran is left behind and
replaced. Code that holds the interpreter lock for ever (a runaway regular expression) cannot be timed out
this way.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Call = Callable[[], Any]

LOOP_GRACE_SECONDS = 5.0
"""What a batch of async calls may take beyond its calls' own limits before the loop counts as blocked."""


STEP_SECONDS = 0.5
"""A signal that comes right before a wait begins is only seen at its end."""


def _in_steps(
    wait: Callable[[float], T],
    expired: type[Exception],
    seconds: float,
    done: Callable[[], bool] = lambda: False,
) -> T:
    """What `wait(timeout)` gives within `seconds`, asked in steps, so that Ctrl-C is heard. Raises `expired`
    after them. done: there is an outcome, so that what `wait` raises is that."""
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


class CallThread:
    """One daemon thread that runs calls in order."""

    def __init__(self) -> None:
        self._calls: queue.Queue[tuple[Call, queue.Queue[tuple[bool, Any]]]] | None = None

    def run(self, call: Call, *, timeout: float) -> Any:
        """What the call returns; what it raises is raised here. TimeoutError after `timeout` seconds."""
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
    while True:
        call, reply = calls.get()
        try:
            reply.put((True, call()))
        except BaseException as error:  # carried to the caller, which raises it
            reply.put((False, error))


class LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(
        self, calls: Sequence[Callable[[], Awaitable[Any]]], *, timeout: float, concurrency: int
    ) -> list[Any]:
        """One outcome per call, in order: its value, or the exception it raised.

        At most `concurrency` calls run at a time; each may take `timeout` seconds (then a TimeoutError is
        its outcome).

        Raises:
            TimeoutError: a call blocks the event loop itself, so that nothing can be timed out one by one.
        """
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="reward-async", daemon=True).start()
        limit = -(-len(calls) // concurrency) * timeout + LOOP_GRACE_SECONDS
        future = asyncio.run_coroutine_threadsafe(_gather(calls, timeout, concurrency), self._loop)
        try:
            return _in_steps(lambda seconds: future.result(timeout=seconds), TimeoutError, limit, future.done)
        except BaseException as error:
            future.cancel()
            if isinstance(error, TimeoutError):
                self._loop = None
                raise TimeoutError(
                    f"blocks the event loop: {len(calls)} calls were not done after {limit:g} s; await "
                    "inside it, or make it a plain function"
                ) from None
            raise


async def _gather(
    calls: Sequence[Callable[[], Awaitable[Any]]], timeout: float, concurrency: int
) -> list[Any]:
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

    return await asyncio.gather(*(one(call) for call in calls), return_exceptions=True)
