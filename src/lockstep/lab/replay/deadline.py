"""An input that takes too long ends the process: a thread that hangs in a kernel cannot be stopped."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from lockstep.observe.text import echo

if TYPE_CHECKING:
    from lockstep.lab.replay.results import ReplayFiles

_TICK = 0.1


class Deadline:
    """A context manager around all inputs; `start` and `stop` around each.

    When one takes longer, the stacks of all threads go to OUT/tracebacks, the results so far are written, and
    the process ends with status 1.

    Args:
        seconds: of one input; None: no deadline.
        on_expiry: called with the input's index, to write what there is.
        leave: ends the process.
    """

    def __init__(
        self,
        seconds: float | None,
        *,
        files: ReplayFiles | None,
        on_expiry: Callable[[int], None],
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        self.seconds, self.files, self.on_expiry, self.leave = seconds, files, on_expiry, leave
        self._running: tuple[int, float] | None = None
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Deadline:
        if self.seconds is not None:
            self._thread = threading.Thread(target=self._watch, name="deadline", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()

    def start(self, index: int) -> None:
        """Start the clock for input `index`."""
        self._running = (index, time.monotonic())

    def stop(self) -> None:
        """Stop the clock: the input is done."""
        self._running = None

    def _watch(self) -> None:
        assert self.seconds is not None
        while not self._end.wait(_TICK):
            running = self._running
            if running is not None and time.monotonic() - running[1] > self.seconds:
                self._expire(running[0])
                return

    def _expire(self, index: int) -> None:
        where = "no traceback was kept"
        if self.files is not None:
            (self.files.out / "tracebacks").mkdir(parents=True, exist_ok=True)
            path = self.files.out / f"tracebacks/{index:06d}.txt"
            with path.open("w", encoding="utf-8") as file:
                faulthandler.dump_traceback(file)
            where = f"all threads' stacks are in {path}"
        try:
            self.on_expiry(index)
        finally:
            echo(
                f"replay: input {index} took more than --timeout {self.seconds:g} s; {where}",
                file=sys.stderr,
                flush=True,
            )
            sys.stdout.flush()
            self.leave(1)
