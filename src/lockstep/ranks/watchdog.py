"""Notices when ranks make no progress: while they run, by a second look, and in what they have recorded."""

from __future__ import annotations

import contextlib
import re
import shlex
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from lockstep.errors import DataError
from lockstep.observe import flight, lock
from lockstep.observe.files import JSON_BYTES, open_plain, parse_json
from lockstep.ranks.hang import HangReport, RankState, diagnose, examine, rank_states

# Notices when ranks make no progress, from outside of them.
#
#     dog = Watchdog(lambda known: signs(folder, known=known), seconds=1800)
#     while ...:
#         if dog.stalled():
#             echo(examine(folder).text())
#
# A rank makes progress when its heartbeat or its collectives go on (lockstep.observe.flight), or when it
# computes: outside of collectives, CPU time of its process or of one below it is a sign of life, so a
# compilation of an hour, or a reward that works, is no hang. Inside a collective it depends on the others.
# One parent watches, whichever provider started the ranks: their signs are read where they run.


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


def _signs(each: flight.FlightState, *, cpu: bool) -> Signs:
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
    return sum(lock.cpu_seconds(each, lock.start_time(each)) for each in [pid, *_below(pid)])


def _below(pid: int) -> list[int]:
    with contextlib.suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


# A report on ranks that may well be alive: two looks, some seconds apart. A rank that moved does not hang.
#
#     report = examine_twice(folder, seconds=5.0)
#
# The launcher needs one look only: it reports when nothing has moved for the whole deadline. Both mean the
# same by progress (lockstep.ranks.watchdog).


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


# Where the inputs of a step that hangs are recorded, and the command that feeds them to the policy again.
#
#     report = name_recording(examine(folder))      # a line more, if the run records (record.enabled)
#
# A recording has a step's inputs before its forward (lockstep.recording.writer): they are `pending` until it
# is done. Loads no torch, as `lockstep hang` does not.


_FOLDER = "recordings"
_OPEN = re.compile(r"open-\d{6,12}\.safetensors")
_LENGTH = struct.Struct("<Q")
"""Before the JSON with which a file of safetensors begins."""
_LOOKED_AT = 8
"""Of the newest files of a rank: those behind the step of the hang are of a rank that went on."""


def name_recording(report: HangReport) -> HangReport:
    """Return the report with a line about what to replay, if the inputs of ranks that are in a step are
    recorded; of the ranks to blame, where they are."""
    waiting = {each.rank: found for each in report.ranks if (found := _pending(each)) is not None}
    blamed = [rank for rank in report.culprits if rank in waiting] or list(waiting)
    if not blamed:
        return report
    run, step, micro_batch = waiting[blamed[0]]
    which = f"micro-batch {micro_batch} of " if micro_batch is not None else ""
    where = run / _FOLDER
    line = (
        f"the inputs of rank {blamed[0]}, {which}step {step}, are in {where}; to run them again: lockstep "
        f"replay {shlex.quote(str(run))} --steps {step}:{step + 1}"
    )
    return replace(report, lines=(*report.lines, line))


def _pending(each: RankState) -> tuple[Path, int, int | None] | None:
    """The run, the step and the micro-batch in which a rank is, if its inputs are recorded and not done."""
    step = each.flight.heartbeat.get("step")
    run = next((above for above in each.flight.path.parents[:4] if (above / _FOLDER).is_dir()), None)
    if run is None or step is None:
        return None
    of_step = [meta for meta in _newest(run / _FOLDER / f"rank-{each.rank:04d}") if meta.get("step") == step]
    pending = [meta.get("micro_batch") for meta in of_step if meta.get("outcome") == "pending"]
    if not pending:
        return None
    now = each.flight.heartbeat.get("micro_batch")
    return run, step, now if now in pending else None


def _newest(folder: Path) -> Iterator[Mapping[str, Any]]:
    """What the newest files say of their inputs."""
    files = sorted((path for path in folder.glob("open-*") if _OPEN.fullmatch(path.name)), reverse=True)
    for path in files[:_LOOKED_AT]:
        try:
            yield from _metas(path)
        except DataError:  # it went into a shard meanwhile, or is damaged: `lockstep recording` says how
            continue


def _metas(path: Path) -> list[Mapping[str, Any]]:
    with open_plain(path, DataError, root=path.parent) as file:
        head = file.read(_LENGTH.size)
        length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
        data = file.read(min(length, JSON_BYTES))
    header = parse_json(data, str(path), DataError)
    about = header.get("__metadata__") if isinstance(header, dict) else None
    text = about.get("inputs", "[]") if isinstance(about, dict) else "[]"
    inputs = parse_json(str(text).encode(), str(path), DataError)
    metas = (
        [entry.get("meta") for entry in inputs if isinstance(entry, dict)] if isinstance(inputs, list) else []
    )
    return [meta for meta in metas if isinstance(meta, dict)]
