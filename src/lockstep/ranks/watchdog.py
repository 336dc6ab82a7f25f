"""Notices when ranks make no progress, from outside of them.

    dog = Watchdog(lambda known: signs(folder, known=known), seconds=1800)
    while ...:
        if dog.stalled():
            echo(examine(folder).text())

A rank makes progress when its heartbeat or its collectives go on (lockstep.observe.flight), or when it
computes: outside of collectives, CPU time of its process or of one below it is a sign of life, so a
compilation of an hour, or a reward that works, is no hang. Inside a collective it depends on the others. One
parent watches, whichever provider started the ranks: their signs are read where they run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from lockstep.errors import DataError
from lockstep.observe import flight, lock

COMPUTES = 0.05
"""Share of a core above which a rank outside of collectives computes."""
_LOOKS = 20
"""Looks per deadline."""
START_SECONDS = 600.0
"""How long all ranks may be without a record, as before they have imported what they need, where the deadline
is shorter."""
# A twentieth of half an hour, a usual deadline, would report a hang 90 s late.
_LONGEST_PAUSE = 15.0

Counts = tuple[int, int, float]
"""Of a rank's heartbeat and collectives; they change with each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Signs:
    """What shows of a rank that it makes progress."""

    rank: int
    counts: Counts
    inside: bool
    """Whether it is in a collective."""
    cpu: float | None
    """Seconds, of its process and of those below it; None: not asked for, as it has made progress."""


def signs(folder: Path, rank: int | None = None, *, known: Mapping[int, Counts] | None = None) -> list[Signs]:
    """Return the signs of the ranks, or of one of them, that run on this machine and keep their records in a
    folder; none from a record that cannot be read now.

    Args:
        known: the counts of the last look: where they have changed, the CPU time is not asked for, which
            takes a look at every process of the machine.
    """
    with contextlib.suppress(DataError):
        return [
            _signs(each, cpu=(known or {}).get(each.rank) == each.counts)
            for each in flight.glance_all(folder, rank)
        ]
    return []


def signs_of(folder: Path) -> list[Signs]:
    """Return the signs of the ranks that run on this machine and keep their records in a folder, with the CPU
    time of all.

    Raises:
        DataError: a file is no flight record.
    """
    return [_signs(each, cpu=True) for each in flight.glance_all(folder)]


def _signs(each: flight.Glance, *, cpu: bool) -> Signs:
    seconds = _cpu_seconds(each.pid) if cpu else None
    return Signs(rank=each.rank, counts=each.counts, inside=each.inside, cpu=seconds)


class Watchdog:
    """Notices when no rank makes progress.

    Args:
        look: returns the signs of all ranks that can be seen; it is given the counts of the last look.
        seconds: without any progress of any rank, after which they hang.
    """

    def __init__(self, look: Callable[[Mapping[int, Counts]], Sequence[Signs]], *, seconds: float) -> None:
        self.seconds, self._look = seconds, look
        self.pause = min(_LONGEST_PAUSE, seconds / _LOOKS)
        """Seconds between two looks."""
        self._looked = self._progress = time.monotonic()
        self._signs: dict[int, Signs] = {}

    def stalled(self) -> bool:
        """Return whether nothing has made progress for `seconds`, or nobody has begun for START_SECONDS.
        Looks a few times per deadline."""
        now = time.monotonic()
        if now - self._looked < self.pause:
            return False
        seen = self._look({each.rank: each.counts for each in self._signs.values()})
        # all of them, as each look updates what is known of a rank
        progress = [self._has_progress(each, now - self._looked) for each in seen]
        if any(progress):
            self._progress = now
        self._looked = now
        return now - self._progress > (self.seconds if seen else max(self.seconds, START_SECONDS))

    def _has_progress(self, now: Signs, passed: float) -> bool:
        before, self._signs[now.rank] = self._signs.get(now.rank), now
        if before is None or before.counts != now.counts:
            return True
        if now.inside:
            return False
        # Not asked for at the last look, which saw progress: what came then is known at the next one.
        if now.cpu is None or before.cpu is None:
            return True
        return now.cpu - before.cpu > COMPUTES * passed


def _cpu_seconds(pid: int) -> float:
    return sum(lock.cpu_seconds(each, lock.born(each)) for each in [pid, *_below(pid)])


def _below(pid: int) -> list[int]:
    with contextlib.suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []
