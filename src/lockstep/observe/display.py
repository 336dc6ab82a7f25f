"""The display of a run: live in a terminal, one plain line per step elsewhere.

A thread redraws (or, in plain mode, reports a slow phase), so that a phase of minutes still ticks.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import logging
import os
import stat
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TextIO

from lockstep.errors import ConfigError, LockstepError, redacted
from lockstep.observe.files import file_errors
from lockstep.observe.text import echo, printable

if TYPE_CHECKING:
    from rich.console import RenderableType

Mode = Literal["auto", "live", "plain", "off"]

COMPILED_SPANS = frozenset({"logprobs", "forward", "backward", "forward_backward"})
"""Spans that a compiled execution mode compiles on their first run."""

SLOW_SECONDS = 30.0
"""Plain mode reports a phase that has run this long, and again each time as much has passed."""
_SOON = {"save": 3.0, "export": 3.0}
"""The phases whose first report comes sooner: nothing else happens meanwhile."""


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
    "reward/mean": "reward {:z.3f}",
    "loss": "loss {:z.4f}",
    "accuracy": "accuracy {:.3f}",
    "reward_margin": "margin {:z.3f}",
    "rollout/completion_tokens_mean": "length {:.0f}",
    "grad_norm": "grad {:.3g}",
    "throughput/tokens_per_second": "{:,.0f} tok/s",
}
"""The metrics of a step's line, in this order, as far as the step has them. z drops the sign of a rounded 0,
as the loss of GRPO on its own samples is 0 but for rounding."""


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
        since, slow = self._status.phase_since, SLOW_SECONDS
        if self._reported < since:  # not yet in this phase
            slow = min(_SOON.get(self._status.phase, SLOW_SECONDS), SLOW_SECONDS)
        if now - max(since, self._reported) >= slow:
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


# The text log of one rank of a run, logs/rank-0.log: its notes, its warnings, and the error that ends it.
#
#     log = RunLog(run_dir.logs / "rank-0.log")
#     with log.records():            # warnings and log records of libraries too, as they come
#         log.line("step 1/10 ...")
#
# Each line is written at once, with its time, and with control characters escaped. A resumed run appends.
# The log does not change what the terminal shows.


_MAX_CHARS = 20_000
"""Longest text: of a longer one only the end is written."""


class RunLog:
    """Lines of one file. Safe from several threads.

    Raises:
        ConfigError: the file cannot be written, or is no plain file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # O_NONBLOCK: opening a fifo without a reader would wait for ever; it is refused below.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with file_errors(path, ConfigError, "write"):
            handle = os.open(path, flags, 0o644)
        self._file: io.FileIO | None = io.FileIO(handle, "a")
        self._lock = threading.Lock()
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            self._file.close()
            raise ConfigError(f"not-a-file: {path} is not a regular file; remove it")

    def line(self, text: str) -> None:
        """Write a text of one line or several.

        A full disk does not end the run here: it is reported once on stderr, and later lines are dropped.
        """
        time = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
        lines = [f"{time} {printable(line)}\n" for line in redacted(text)[-_MAX_CHARS:].splitlines() or [""]]
        with self._lock:
            if self._file is None:
                return
            try:
                self._file.write("".join(lines).encode("utf-8", errors="backslashreplace"))
            except OSError as error:
                echo(f"{self.path} cannot be written ({error.strerror}); it ends here", file=sys.stderr)
                self._file.close()
                self._file = None

    def error(self, error: BaseException) -> None:
        """Write the traceback of an error, and the code of one of Lockstep's."""
        code = f"error code: {error.code}\n" if isinstance(error, LockstepError) else ""
        self.line("".join(traceback.format_exception(error)) + code)

    def close(self) -> None:
        """Close the file; later lines are dropped."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    @contextlib.contextmanager
    def records(self) -> Iterator[None]:
        """Write Python's warnings and log records from WARNING on too; both are still shown as before."""
        handler = _Records(self)
        root, show = logging.getLogger(), warnings.showwarning

        def log_and_show(
            message: Any, category: Any, filename: str, lineno: int, *rest: Any, **more: Any
        ) -> None:
            self.line(f"{filename}:{lineno}: {category.__name__}: {message}")
            show(message, category, filename, lineno, *rest, **more)

        root.addHandler(handler)
        warnings.showwarning = log_and_show
        try:
            yield
        finally:
            root.removeHandler(handler)
            if warnings.showwarning is log_and_show:  # nobody has replaced it since
                warnings.showwarning = show


class _Records(logging.Handler):
    def __init__(self, log: RunLog) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.line(f"{record.levelname} {record.name}: {self.format(record)}")
        if logging.lastResort is not None and not self._others(logging.getLogger(record.name)):
            logging.lastResort.handle(record)  # as without this handler

    def _others(self, logger: logging.Logger | None) -> bool:
        """Whether another handler gets the logger's records."""
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False
