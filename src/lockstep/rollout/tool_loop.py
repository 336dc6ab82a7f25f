"""The event loop that environments run in: one per process, in a thread of its own, started at its first use.

It lives as long as the process, because what an environment holds (pipes to a tool's process, connections)
belongs to a loop and outlives a step.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from lockstep.errors import EngineError

_TICKS = 3
"""Rounds of the loop in which a coroutine that was given a result asks for its next turn, or ends."""
_Result = TypeVar("_Result")


class ToolLoop:
    """An asyncio event loop in a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="environments", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, _Result], *, seconds: float) -> _Result:
        """Run a coroutine from another thread and return its result.

        Raises:
            TimeoutError: after `seconds`; the coroutine is cancelled. And what it raises.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout=seconds)
        finally:
            future.cancel()

    def settle(self, work: Callable[[], None], *, seconds: float) -> None:
        """Run `work` in the loop, and return when the coroutines that it woke have come as far as they can
        without waiting for anything.

        Raises:
            EngineError: the loop was not free within `seconds`. And what `work` raises.
        """
        done = threading.Event()
        errors: list[BaseException] = []

        def later(ticks: int) -> None:
            if ticks:
                self.loop.call_soon(later, ticks - 1)
            else:
                done.set()

        def begin() -> None:
            try:
                work()
            except BaseException as error:  # raised in the caller's thread
                errors.append(error)
            later(_TICKS)

        self.loop.call_soon_threadsafe(begin)
        if not done.wait(seconds):
            raise EngineError(
                f"deadline: an environment kept the event loop busy for {seconds:g} s, so that no other "
                "trajectory could go on; run slow work in a thread (await asyncio.to_thread(...))",
            )
        if errors:
            raise errors[0]


def tool_loop() -> ToolLoop:
    """Return the loop of this process."""
    return _of_process(os.getpid())


@functools.cache
def _of_process(pid: int) -> ToolLoop:
    return ToolLoop()
