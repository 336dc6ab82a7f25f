"""Named timers: where the seconds of a step went."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

WORK = frozenset(
    {
        "generate",
        "reward",
        "logprobs",
        "values",
        "forward",
        "backward",
        "forward_backward",
        "optimizer",
        "value",
    }
)
"""Spans that count as the step's work; the rest of a step is host overhead."""


@dataclass(slots=True)
class _Open:
    name: str
    started: float
    children: float = 0.0


@dataclass(slots=True)
class Spans:
    """Timers of one thread, nested.

    `with spans("generate"): ...` adds to time/generate what passed outside inner spans (self-time).

    Args:
        synchronize: called on entry and exit of every span, such as torch.cuda.synchronize: without it a span
            on an asynchronous device measures only what the host waited for.
        on_change: called with the names of the open spans, outermost first, whenever they change.
    """

    synchronize: Callable[[], None] | None = None
    on_change: Callable[[tuple[str, ...]], None] | None = None
    work: frozenset[str] = WORK
    clock: Callable[[], float] = time.perf_counter
    _stack: list[_Open] = field(default_factory=list)
    _self_time: dict[str, float] = field(default_factory=dict)
    _work_time: float = 0.0
    _since: float | None = None

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the body under `name`. Raises ValueError for "step", "host" and "host_share"."""
        if name in ("step", "host", "host_share"):
            raise ValueError(f"span {name!r}: this name is taken by what Spans reports about the whole step")
        if self._since is None:
            self._since = self.clock()
        if self.synchronize is not None:
            self.synchronize()
        self._stack.append(_Open(name, self.clock()))
        if self.on_change is not None:
            self.on_change(self.open)
        try:
            yield
        finally:
            # No synchronisation on the way out of an error: it could raise over the error that matters.
            if self.synchronize is not None and sys.exc_info()[0] is None:
                self.synchronize()
            span = self._stack.pop()
            elapsed = self.clock() - span.started
            self._self_time[span.name] = self._self_time.get(span.name, 0.0) + elapsed - span.children
            if self._stack:
                self._stack[-1].children += elapsed
            if span.name in self.work and not any(outer.name in self.work for outer in self._stack):
                self._work_time += elapsed
            if self.on_change is not None:
                self.on_change(self.open)

    def start(self) -> None:
        """Begin the step now; without this it begins with its first span, or at the last flush."""
        self._self_time.clear()
        self._work_time = 0.0
        self._since = self.clock()

    def flush(self) -> dict[str, float]:
        """Return the seconds since the step began, and start the next one.

        Returns:
            time/NAME (self-time) per span; time/step (wall); time/host (wall less the outermost `work` spans
            and what is nested in them) and time/host_share (host / wall, 0 to 1).

        Raises:
            RuntimeError: inside a span.
        """
        if self._stack:
            raise RuntimeError(f"spans flushed inside span {self._stack[-1].name!r}; flush between steps")
        now = self.clock()
        wall = 0.0 if self._since is None else now - self._since
        host = max(0.0, wall - self._work_time)
        metrics = {f"time/{name}": seconds for name, seconds in self._self_time.items()}
        metrics |= {"time/step": wall, "time/host": host, "time/host_share": host / wall if wall > 0 else 0.0}
        self.start()
        return metrics

    @property
    def open(self) -> tuple[str, ...]:
        """Names of the open spans, outermost first."""
        return tuple(span.name for span in self._stack)
