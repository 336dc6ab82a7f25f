"""How long is too long for nothing new from a server that generates."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from lockstep.engine.http import HttpError

if TYPE_CHECKING:
    from lockstep.engine.remote import RemoteEngine

_FIRST_LOOK_SECONDS, _LOOK_SECONDS = 1.0, 5.0
"""How often a server that generates is asked for its progress and the use of its KV cache."""


class Silence:
    """How long nothing new has come from a server that generates; asks it now and then how it is doing."""

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine
        self._limit = engine.request_seconds
        self._last = self._asked = time.monotonic()
        self._wait = min(_FIRST_LOOK_SECONDS, self._limit / 4)
        self._progress: float | None = None

    def news(self) -> None:
        """A sample has finished."""
        self._last = time.monotonic()

    def check(self, missing: int) -> None:
        """Raises EngineError after request_seconds without a finished sample and without progress."""
        now = time.monotonic()
        left = self._last + self._limit - now
        if left > 0 and now - self._asked < self._wait:
            return
        self._asked, self._wait = now, min(_LOOK_SECONDS, self._limit / 4)
        progress = self._progress
        with contextlib.suppress(HttpError):  # no answer is no progress
            progress = self._engine.note_load(seconds=min(_LOOK_SECONDS, max(left, 1.0)))
        if progress != self._progress:
            self._progress, self._last = progress, time.monotonic()
        elif left <= 0:
            raise self._engine.hung(
                f"engine {self._engine.name} sent nothing new and made no progress for "
                f"engine.request_seconds = {self._limit:g}; {missing} samples are missing"
            )
