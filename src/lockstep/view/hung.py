"""Whether a run that is alive hangs, by its flight records."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from lockstep.errors import DataError
from lockstep.observe import flight
from lockstep.ranks.hang import find_records
from lockstep.ranks.watchdog import Signs, progress, signs_of

_BETWEEN_SECONDS = 0.5
"""Between two looks at the CPU time, at least."""


class HangWatch:
    """Looks at the ranks of one run now and then. Safe from several threads."""

    def __init__(self, run: Path) -> None:
        self._run, self._lock = run, threading.Lock()
        self._looked: tuple[float, dict[int, Signs]] | None = None

    def hangs(self, limit: float) -> str | None:
        """Return since when the run hangs and in which phase, in words; None if it makes progress, or has no
        record that can be read.

        Args:
            limit: seconds without a heartbeat or a collective of any rank, after which a run hangs unless a
                rank computes.
        """
        try:
            folder = find_records(self._run)
            flights = flight.read_all(folder)
        except DataError:
            return None
        last, rank = max(((_last_sign(each), each.rank) for each in flights), default=(0.0, 0))
        age = time.time() - last
        if not flights or age <= limit or self._computes(folder):
            return None
        phase = next(each.heartbeat.get("phase", "start") for each in flights if each.rank == rank)
        return f"no sign of life for {age:.0f} s, rank {rank} last in {phase}; ask: lockstep hang {self._run}"

    def _computes(self, folder: Path) -> bool:
        with self._lock:
            if self._looked is None:
                self._looked = time.monotonic(), _signs(folder)
            then, before = self._looked
            # The system counts CPU time in hundredths of a second.
            time.sleep(max(0.0, then + _BETWEEN_SECONDS - time.monotonic()))
            passed, now = time.monotonic() - then, _signs(folder)
            self._looked = time.monotonic(), now
        return any(progress(before.get(rank), each, passed) for rank, each in now.items())


def _signs(folder: Path) -> dict[int, Signs]:
    try:
        return {each.rank: each for each in signs_of(folder)}
    except DataError:  # replaced while it was read
        return {}


def _last_sign(each: flight.Flight) -> float:
    """Unix seconds of the last that a rank recorded."""
    collectives = [one.ended or one.began for one in each.collectives]
    return max(each.started, float(each.heartbeat.get("time", 0.0)), *collectives)
