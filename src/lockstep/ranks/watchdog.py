"""Notices when ranks make no progress, from outside of them.

    dog = Watchdog(folder, seconds=1800)
    while ...:
        if dog.stalled():
            echo(dog.report().text())

A rank makes progress when its heartbeat or its collectives go on (lockstep.observe.flight), or when it
computes: outside of collectives, CPU time of its process or of one below it is a sign of life, so a
compilation of an hour, or a reward that works, is no hang. Inside a collective it depends on the others. One
parent watches, whichever provider started the ranks; it needs their files only.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import psutil

from lockstep.errors import DataError
from lockstep.observe import flight
from lockstep.observe.flight import Flight
from lockstep.ranks.hang import HangReport, examine

_COMPUTES = 0.05
"""Share of a core above which a rank outside of collectives computes."""
_LOOKS = 20
"""Looks per deadline."""
_LONGEST_PAUSE = 5.0


class Watchdog:
    """Watches the flight records in a folder.

    Args:
        seconds: without any progress of any rank, after which they hang.
    """

    def __init__(self, folder: Path, *, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds
        self._pause = min(_LONGEST_PAUSE, seconds / _LOOKS)
        self._looked = self._progress = time.monotonic()
        self._signs: dict[int, tuple[int, int, float]] = {}
        self._cpu: dict[int, float] = {}

    def stalled(self) -> bool:
        """Return whether nothing has made progress for `seconds`. Looks a few times per deadline."""
        now = time.monotonic()
        if now - self._looked < self._pause:
            return False
        flights: list[Flight] = []
        with contextlib.suppress(DataError, OSError):
            flights = flight.read_all(self.folder)
        # all of them, as each look updates what is known of a rank
        progress = [self._has_progress(each, now - self._looked) for each in flights]
        if any(progress):
            self._progress = now
        self._looked = now
        return bool(flights) and now - self._progress > self.seconds

    def _has_progress(self, each: Flight, passed: float) -> bool:
        before, self._signs[each.rank] = self._signs.get(each.rank), each.signs
        used = sum(flight.cpu_seconds(pid, flight.born(pid)) for pid in [each.pid, *_below(each.pid)])
        used_before, self._cpu[each.rank] = self._cpu.get(each.rank, used), used
        computes = each.waiting is None and used - used_before > _COMPUTES * passed
        return before != each.signs or computes

    def report(self) -> HangReport:
        """Examine the ranks. Raises DataError."""
        return examine(self.folder)


def _below(pid: int) -> list[int]:
    with contextlib.suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []
