"""The display of a run: live in a terminal, one plain line per step elsewhere.

A thread redraws (or, in plain mode, reports a slow phase), so that a phase of minutes still ticks.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Literal, TextIO

from lockstep.observe.text import echo

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lockstep.observe.run_log import RunLog

Mode = Literal["auto", "live", "plain", "off"]

COMPILED_SPANS = frozenset({"logprobs", "forward", "backward", "forward_backward"})
"""Spans that a compiled execution mode compiles on their first run."""

SLOW_SECONDS = 30.0
"""Plain mode reports a phase that has run this long, and again each time as much has passed."""
_SOON = {"save": 3.0, "export": 3.0}
"""The phases that are reported sooner: nothing else happens meanwhile."""


@dataclass
class Status:
    """The state of a display. The loop's thread writes, the drawing one reads: fields are replaced whole."""

    title: str
    total_steps: int
    compiled: bool
    first_step: int = 0
    step: int = 0
    phase: str = "starting"
    phase_since: float = 0.0
    started: float = 0.0
    progress: tuple[int, int] | None = None
    seen: frozenset[str] = frozenset()
    durations: tuple[float, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)

    def activity(self, now: float) -> str:
        """Return, for example, "generate 12 s, 40/64 completions" or "compiling, 14 s"."""
        seconds = f"{max(0.0, now - self.phase_since):.0f} s"
        if self.compiled and self.phase in COMPILED_SPANS and self.phase not in self.seen:
            return f"compiling, {seconds} ({self.phase})"
        if self.progress is None:
            return f"{self.phase} {seconds}"
        return f"{self.phase} {seconds}, {self.progress[0]}/{self.progress[1]} completions"

    def eta_seconds(self) -> float | None:
        """Return seconds to the end at the median pace of recent steps, without the first; None: unknown."""
        recent = sorted(self.durations[1:][-20:] or self.durations)
        if not recent:
            return None
        return recent[len(recent) // 2] * (self.total_steps - self.step)


class Display:
    """A context manager around a run. Errors pass through it; leaving restores the terminal, also on Ctrl-C.

    Args:
        mode: auto is live in a terminal and plain elsewhere.
        compiled: the execution mode compiles, so the first forward or backward is shown as "compiling".
        stream: for plain lines, and for auto to test; None: stdout.
    """

    def __init__(
        self,
        title: str,
        *,
        total_steps: int,
        mode: Mode = "auto",
        compiled: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        out = stream if stream is not None else sys.stdout
        if mode == "auto":
            mode = "live" if out.isatty() else "plain"
        self.mode = mode
        self.status = Status(title=title, total_steps=total_steps, compiled=compiled)
        views: dict[str, Callable[[], _View]] = {
            "live": lambda: _LiveView(self.status, out),
            "plain": lambda: _PlainView(self.status, out),
            "off": _View,
        }
        self._view = views[mode]()
        self.log: RunLog | None = None
        """Also gets every note and step, in any mode."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Display:
        now = time.monotonic()
        self.status.started = self.status.phase_since = now
        self._view.start()
        if self.mode != "off":
            self._thread = threading.Thread(target=self._ticks, name="display", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        try:
            if self._thread is not None:
                self._thread.join()
        finally:
            self._view.stop()

    def begin(self, step: int) -> None:
        """Begin step `step`: the first of a resumed run, or the next one."""
        if not self.status.durations:
            self.status.first_step = step
        self.status.step = step

    def phase(self, spans: tuple[str, ...]) -> None:
        """Show the innermost of the open spans: pass this as `Spans(on_change=display.phase)`."""
        name = spans[-1] if spans else "loop"
        if name != self.status.phase:
            if self.status.phase in COMPILED_SPANS:
                self.status.seen = self.status.seen | {self.status.phase}
            self.status.progress = None
            self.status.phase_since = time.monotonic()
            self.status.phase = name

    def progress(self, done: int, total: int) -> None:
        """Show the number of completions finished in the current generation."""
        self.status.progress = (done, total)

    def step(self, step: int, metrics: Mapping[str, float], *, seconds: float) -> None:
        """Show the metrics and the duration of step `step` (0-based), which is done."""
        self.status.durations = (*self.status.durations[-50:], seconds)
        self.status.metrics = dict(metrics)
        self.status.step = step + 1
        line = step_line(self.status, seconds)
        self._view.step(line)
        if self.log is not None:
            self.log.line(line)

    def note(self, text: str) -> None:
        """Show a line above the display: an evaluation, a sample, the path of a checkpoint."""
        self._view.line(text)
        if self.log is not None:
            self.log.line(text)

    def notes(self, *texts: Iterable[str]) -> None:
        """Show each different text once, as `note` does."""
        for text in dict.fromkeys(chain(*texts)):
            self.note(text)

    def _ticks(self) -> None:
        while not self._stop.wait(0.25):
            self._view.tick()


SHOWN = {
    "reward/mean": "reward {:.3f}",
    "loss": "loss {:.4f}",
    "rollout/completion_tokens_mean": "length {:.0f}",
    "grad_norm": "grad {:.3g}",
    "throughput/tokens_per_second": "{:,.0f} tok/s",
}
"""The metrics of a step's line, in this order, as far as the step has them."""


def step_line(status: Status, seconds: float) -> str:
    """Return, for example, "step 12/100  reward 0.412  length 31  grad 0.83  1,204 tok/s  9.8 s  ETA
    14:22"."""
    values = [text.format(status.metrics[name]) for name, text in SHOWN.items() if name in status.metrics]
    eta = status.eta_seconds()
    ending = [f"{seconds:.1f} s"] + ([f"ETA {clock(eta)}"] if eta is not None and eta > 0 else [])
    return "  ".join([f"step {status.step}/{status.total_steps}", *values, *ending])


def clock(seconds: float) -> str:
    """Format as minutes:seconds, with hours when there are any."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


class _View:
    """Shows nothing."""

    def start(self) -> None: ...
    def tick(self) -> None: ...
    def line(self, text: str) -> None: ...
    def step(self, text: str) -> None: ...
    def stop(self) -> None: ...


class _PlainView(_View):
    """Whole lines only: for log files, pipes and CI."""

    def __init__(self, status: Status, stream: TextIO) -> None:
        self._status = status
        self._stream = stream
        self._reported = 0.0
        self._lock = threading.Lock()

    def tick(self) -> None:
        now = time.monotonic()
        slow = min(_SOON.get(self._status.phase, SLOW_SECONDS), SLOW_SECONDS)
        if now - max(self._status.phase_since, self._reported) >= slow:
            self._reported = now
            total = self._status.total_steps
            step = min(self._status.step + 1, total)  # the last save comes after the last step
            self.line(f"step {step}/{total}  {self._status.activity(now)} ...")

    def line(self, text: str) -> None:
        with self._lock:
            echo(text, file=self._stream, flush=True)

    def step(self, text: str) -> None:
        self.line(text)


class _LiveView(_View):
    """Redrawn in place with rich; what is printed meanwhile appears above."""

    def __init__(self, status: Status, stream: TextIO) -> None:
        from rich.live import Live

        from lockstep.observe.console import PlainConsole

        self._status = status
        self._last = ""
        self._console = PlainConsole(file=stream)
        self._live = Live(console=self._console, auto_refresh=False, get_renderable=self._render)

    def start(self) -> None:
        self._live.start(refresh=True)

    def tick(self) -> None:
        self._live.refresh()

    def line(self, text: str) -> None:
        self._console.print(text)

    def step(self, text: str) -> None:
        self._last = text

    def stop(self) -> None:
        self._live.stop()

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        status, now = self._status, time.monotonic()
        row = Table.grid(padding=(0, 1))
        row.add_row(
            Text(status.title, style="bold"),
            ProgressBar(total=max(1, status.total_steps), completed=status.step, width=24),
            Text(f"{status.step}/{status.total_steps}"),
            Text(status.activity(now), style="cyan"),
            Text(f"elapsed {clock(now - status.started)}", style="dim"),
        )
        return Group(row, Text(self._last)) if self._last else row
