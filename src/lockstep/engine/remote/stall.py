"""Stall detector: whether a server that generates has made no progress for too long."""

from __future__ import annotations

import contextlib
import time
from typing import Protocol

from lockstep.engine.remote.http import HttpError
from lockstep.errors import EngineError

_FIRST_LOOK_SECONDS, _LOOK_SECONDS = 1.0, 5.0
"""Seconds between requests for a generating server's progress and the use of its KV cache."""
_RECOMPUTED = 4
"""A server that runs out of KV cache recomputes tokens; recomputing more than this many times all of them is
no progress."""


class Watched(Protocol):
    """What the detector needs of an engine."""

    name: str
    request_seconds: float
    max_model_len: int

    def note_load(self, *, seconds: float) -> float | None:
        """The server's own count of tokens; None: it has none."""
        ...

    def stalled(self, reason: str) -> EngineError:
        """Handle a stall; returns the error to raise."""
        ...


class StallDetector:
    """Time since the last progress of a server that generates.

    Progress is a sample that finished, new tokens of one, or growth of the server's own count of tokens, if
    that is finite and no more than the samples could need: a count that runs on by itself, or is NaN, keeps
    nobody waiting.
    """

    def __init__(self, engine: Watched) -> None:
        self._engine = engine
        self._limit = engine.request_seconds
        self._last = self._last_look = time.monotonic()
        self._wait = min(_FIRST_LOOK_SECONDS, self._limit / 4)
        self._counted: float | None = None
        self._grown = 0.0

    def news(self) -> None:
        """Note that a sample has finished, or that new tokens of one have come."""
        self._last = time.monotonic()
        self._grown = 0.0

    def check(self, missing: int) -> None:
        """Raise EngineError after request_seconds without progress; `missing` samples have not finished."""
        now = time.monotonic()
        left = self._last + self._limit - now
        if left > 0 and now - self._last_look < self._wait:
            return
        self._last_look, self._wait = now, min(_LOOK_SECONDS, self._limit / 4)
        if self._look(missing, seconds=min(_LOOK_SECONDS, max(left, 1.0))):
            self._last = time.monotonic()
        elif left <= 0:
            raise self._engine.stalled(
                f"engine {self._engine.name} sent nothing new and made no progress for "
                f"engine.request_seconds = {self._limit:g}; {missing} samples are missing"
            )

    def _look(self, missing: int, *, seconds: float) -> bool:
        """Ask the server for its count of tokens; True if it grew by no more than the samples explain."""
        before, count = self._counted, None
        with contextlib.suppress(HttpError):  # no answer is no progress
            count = self._engine.note_load(seconds=seconds)
        if count is None:
            return False
        self._counted = count
        if before is None or count <= before:
            return False
        self._grown += count - before
        return self._grown <= _RECOMPUTED * missing * self._engine.max_model_len
