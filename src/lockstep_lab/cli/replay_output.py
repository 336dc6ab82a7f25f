"""The display of `lockstep replay` while it runs, and at its end."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.observe.text import echo

if TYPE_CHECKING:
    from lockstep_lab.replay.replayer import Replayer
    from lockstep_lab.replay.results import ReplayFiles, ReplayRow
    from lockstep_lab.replay.run import ReplayResult

INTERRUPTED = 130
"""Exit status after Ctrl-C."""


class Progress:
    """A bar in a terminal, a plain line per input elsewhere (at most one a second), nothing with --quiet."""

    def __init__(self, files: ReplayFiles, *, quiet: bool) -> None:
        self._files, self._quiet = files, quiet
        self._live = sys.stdout.isatty() and not quiet
        self._bar: Any = None
        self._task: Any = None
        self._last = 0.0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def ready(self, replayer: Replayer) -> None:
        """Start the display: the first input comes next."""
        if not self._live:
            return
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        from lockstep.observe.console import PlainConsole

        self._bar = Bar(
            TextColumn("replay"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[last]}", markup=False),
            console=PlainConsole(),
        )
        self._bar.start()
        self._task = self._bar.add_task("replay", total=len(replayer.order), last="")

    def row(self, row: ReplayRow, done: int, total: int) -> None:
        """Show that an input is done."""
        from lockstep_lab.replay.results import row_text

        if self._quiet:
            return
        if self._bar is not None:
            text = "" if row.forward_ms is None else f"forward {row.forward_ms:.0f} ms"
            self._bar.update(self._task, completed=done, last=text if row.status == "ok" else row.status)
            if row.error is not None:
                self._bar.console.print(row_text(row))
            return
        now = time.monotonic()
        if row.error is not None or done == total or now - self._last >= 1.0:
            self._last = now
            echo(f"[{done}/{total}] {row_text(row)}", flush=True)


def conclude(result: ReplayResult, files: ReplayFiles, *, copy: Path | None, quiet: bool) -> int:
    """Print the summary; return the exit status."""
    from lockstep_lab.replay.summary import closing

    if copy is not None:
        files.summary(result.summary, copy=copy)
    for line in closing(result.summary):
        files.line(line, show=not quiet)
    for row in result.rows:
        if row.error is not None:
            log = files.out / row.error["log"]
            files.line(
                f"input {row.index} {row.status}: {row.error['type']}: {row.error['line']} ({log})",
                show=not quiet,
            )
    files.line(f"results: {files.out}", show=not quiet)
    files.line(result.summary["verdict"], show=False)
    echo(result.summary["verdict"])
    if result.interrupted:
        return INTERRUPTED
    return 0 if result.ok else 1
