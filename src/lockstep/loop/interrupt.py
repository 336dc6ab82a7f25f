"""Ctrl-C and SIGTERM: finish the current write, save, show how to resume. A second signal stops at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any


class Interrupted(KeyboardInterrupt):
    """The run was stopped at once; `summary` has its state and the command that resumes it."""

    def __init__(self, summary: Mapping[str, Any]) -> None:
        super().__init__("interrupted")
        self.summary = summary


class Interrupt:
    """Context manager around a run. A signal raises KeyboardInterrupt, except inside `deferred`: there the
    first one sets `requested` and calls `on_request` (which ends generation early), and the loop looks at
    `requested` where a step may be dropped or ended; the second one raises.

    Outside the main thread, where Python delivers no signals, it does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self.at_once = False
        """A second signal came, or one outside `deferred`."""
        self.signal: signal.Signals | None = None
        """The last one that came."""
        self._came = False
        """This process got one, inside `deferred`; `requested` may stem from another rank's."""
        self._on_request: Callable[[], None] | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)  # type: ignore[arg-type]
        self._previous.clear()

    @contextlib.contextmanager
    def deferred(self, on_request: Callable[[], None]) -> Iterator[Interrupt]:
        """Inside, the first signal only sets `requested` and calls `on_request`."""
        self._on_request = on_request
        try:
            yield self
        finally:
            self._on_request = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        if self._came or self._on_request is None:
            self.at_once = True
            raise KeyboardInterrupt
        self._came = True
        # A launcher signals its ranks one by one: this rank may know of the request from another already.
        if not self.requested:
            self.request(self.signal)

    def request(self, number: signal.Signals) -> None:
        """Do what the first signal does; also called when another rank got it."""
        self.signal = number
        self.requested = True
        if self._on_request is not None:
            self._on_request()

    def agree(self, gather: Callable[[str | None], Sequence[str | None]]) -> bool:
        """Return whether the first signal came to any rank; then it counts here, too.

        Args:
            gather: returns what every rank gives, on all of them: the name of its signal, or None.
        """
        requested = self.signal.name if self.requested and self.signal else None
        first = next(filter(None, gather(requested)), None)
        if first is not None and not self.requested:
            self.request(signal.Signals[first])
        return first is not None
