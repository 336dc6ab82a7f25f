"""A report on ranks that may well be alive: two looks, some seconds apart. A rank that moved does not hang.

    report = examine_twice(folder, seconds=5.0)

The launcher needs one look only: it reports when nothing has moved for the whole deadline. Both mean the same
by progress (lockstep.ranks.watchdog).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from lockstep.ranks.hang import HangReport, RankState, diagnose, examine, rank_states
from lockstep.ranks.watchdog import COMPUTES, Signs, signs_of

SECONDS = 5.0
"""Between the two looks."""
PROGRESS = "progress"
"""The cause of a report on ranks that do not hang."""
_FACTS = ("stopped process", "dead process", "failed rank")
"""Causes that are so, whatever the other ranks still do."""


def examine_twice(folder: Path, *, seconds: float = SECONDS, stacks: bool = True) -> HangReport:
    """Examine the ranks whose flight records are in `folder`, as `hang.examine` does, and blame no rank of a
    run that makes progress.

    Args:
        seconds: between the looks; only ranks that run are looked at twice.
        stacks: ask the living ones for their Python stacks.

    Raises:
        DataError: a file is no flight record, or there is none.
    """
    first = rank_states(folder, stacks=False)
    if not any(_runs(each) for each in first):
        return examine(folder, stacks=stacks)
    before = {each.rank: each for each in signs_of(folder)}
    began = time.monotonic()
    time.sleep(seconds)
    # Before the stacks are asked for: writing them takes CPU time.
    after, passed = {each.rank: each for each in signs_of(folder)}, time.monotonic() - began
    states = rank_states(folder, stacks=stacks)
    return _report(states, before=before, after=after, passed=passed)


def _report(
    states: list[RankState], *, before: Mapping[int, Signs], after: Mapping[int, Signs], passed: float
) -> HangReport:
    moved = {
        each.rank: how
        for each in states
        if each.rank in after and (how := progress(before.get(each.rank), after[each.rank], passed))
    }
    report = diagnose(states)
    if moved and report.cause not in _FACTS:
        lines = [f"the run makes progress; in {passed:.0f} s:"]
        lines += [f"  rank {each.rank} {moved.get(each.rank, 'did not move')}" for each in states]
        return replace(report, cause=PROGRESS, collective=None, culprits=(), lines=tuple(lines))
    if report.collective is None and any(map(_runs, states)):
        note = (
            f"no rank moved for {passed:.0f} s; the run hangs only if what it waits for never takes so long: "
            "compare how long the phase has lasted with earlier steps"
        )
        return replace(report, lines=(*report.lines, note))
    return report


def _runs(each: RankState) -> bool:
    """Whether it runs, and still keeps its record."""
    return each.state is not None and not each.stopped and each.flight.answers


def progress(before: Signs | None, now: Signs, passed: float) -> str | None:
    """How a rank moved between two looks; None: it did not."""
    if before is None:
        return "began"
    beats, collectives = now.counts[0] - before.counts[0], now.counts[1] - before.counts[1]
    if collectives or now.counts[2] != before.counts[2]:
        return f"entered {collectives} collectives" if collectives else "left a collective"
    if beats:
        return f"went on ({beats} signs of life)"
    used = (now.cpu or 0.0) - (before.cpu or 0.0)
    # Inside of a collective it spins, and depends on the others.
    if not now.inside and used > COMPUTES * passed:
        return f"computed for {used:.1f} s of CPU time"
    return None
