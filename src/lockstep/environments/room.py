"""Room for a number of things at a time."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import threading
from collections import deque


class Room:
    """Room for a number of instances, given in the order of asking. Those who wait may be in several event
    loops, which asyncio's semaphores may not."""

    def __init__(self, most: int) -> None:
        self._free = most
        self._lock = threading.Lock()
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()

    async def enter(self) -> None:
        """Wait for room."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._free > 0:
                self._free -= 1
                return
            turn = loop.create_future()
            self._waiting.append((loop, turn))
        try:
            await turn
        except asyncio.CancelledError:
            with self._lock, contextlib.suppress(ValueError):
                self._waiting.remove((loop, turn))
            if not turn.cancelled():
                self.leave()  # it was given in the same moment
            raise

    def enter_now(self) -> None:
        """Take room that may not be there: others wait until as much has been given back."""
        with self._lock:
            self._free -= 1

    def leave(self) -> None:
        """Give room back, or on to the one who has waited longest."""
        while True:
            with self._lock:
                if not self._waiting or self._free < 0:
                    self._free += 1
                    return
                loop, turn = self._waiting.popleft()
            with contextlib.suppress(RuntimeError):  # its loop is closed: nobody waits
                loop.call_soon_threadsafe(self._give, turn)
                return

    def _give(self, turn: asyncio.Future[None]) -> None:
        if turn.cancelled():
            self.leave()
        else:
            turn.set_result(None)


def allow_descriptors(more: int) -> None:
    """Raise the soft limit of descriptors, of which many systems allow 1024, by one for each instance."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1024 + more if hard == resource.RLIM_INFINITY else min(1024 + more, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
