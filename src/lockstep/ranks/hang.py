"""Why ranks make no progress, from their flight records, Python stacks and process states.

    report = examine(folder)          # of live, stopped or ended ranks; asks live ones for their stacks
    echo(report.text())

Compares the collectives of all ranks by their number in each process group: the first number at which they
differ, or that a rank did not reach, is what the others wait for. Loads no torch.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lockstep.errors import DataError
from lockstep.observe import flight, lock
from lockstep.observe.files import open_plain
from lockstep.observe.flight import Collective, Flight
from lockstep.observe.lock import holding, holds
from lockstep.observe.text import printable
from lockstep.ranks.stacks import Frame, children_of, parse_stacks

_STACKS_SECONDS = 3.0
"""How long a process may take to write its stacks."""
_STACKS_BYTES = 2**22
"""Of the end of a file of stacks; no process writes more at once."""
_SHOWN_FRAMES = 5
_LONGEST_HISTORY = 4
"""Collectives before one that decide whether it was called in order."""
_PLUMBING = re.compile(r"torch/distributed/(c10d_logger|distributed_c10d)\.py|ranks/collectives\.py")
"""Frames that are the same in every collective."""
_CROSSED = 2
_STOPPED = ("T", "t")
_ENDED = ("finished", "interrupted")
_ANYWHERE = (
    ("sleeping reward", r"rollout/rewards\.py score\b|rollout/reward_process\.py"),
    ("remote role does not answer", r"loop/role_worker\.py _ask\b"),
    ("engine does not answer", r"engine/(remote|vllm|sglang)/"),
)
"""A likely cause, and what "file function source" of a frame is then, in any thread."""
_FILES = (
    (
        "slow or stuck file",
        r"observe/files\.py|\bfsync\b|safetensors/|/checkpoint\w*\.py"
        r"|recording/(entries|files|format|shards|weights)\.py",
    ),
)
_WAITS = (
    ("queue without a producer", r"queue\.py get\b|multiprocessing/(queues|connection)|\.get\(\)"),
    (
        "lock that nobody frees",
        r"threading\.py (acquire|__enter__)\b|\.acquire\(|with \w*[._]?lock\b|filelock",
    ),
)
_SAYS_LITTLE = ("transport", "busy or stuck", "unknown", "ended")
"""Causes that a node which does not answer explains better."""
_JOINS = "_wait_for_tstate_lock"
"""The function in which a thread waits for the end of another."""


@dataclass(frozen=True, kw_only=True)
class RankState:
    """One rank at the time of the report."""

    flight: Flight
    state: str | None
    """A letter of proc(5); None: the process has gone."""
    threads: tuple[tuple[Frame, ...], ...] = ()
    """Python stacks, innermost frame first; the main thread's first. Empty: it did not answer."""
    children: tuple[str, ...] = ()
    """A line for each process below it."""

    @property
    def rank(self) -> int:
        return self.flight.rank

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped it."""
        return self.state in _STOPPED

    @property
    def waits(self) -> bool:
        """Whether it runs, and is inside a collective."""
        return not self.stopped and self.flight.waiting is not None


OUT_OF_STEP = ("skipped collective", "wrong shape", "other order", "ended early")
"""Causes that the records alone show, whatever a rank then failed with."""


@dataclass(frozen=True, kw_only=True)
class HangReport:
    """What the ranks wait for, who did not come, and why."""

    ranks: tuple[RankState, ...]
    collective: str | None
    """The collective that not all have entered, or that they entered differently; None: none is open."""
    cause: str
    """One of a few words, such as "stopped process" or "skipped collective"; "unknown"."""
    culprits: tuple[int, ...]
    """The ranks that the others wait for."""
    lines: tuple[str, ...]
    """The finding, in sentences."""
    missing: Mapping[int, str] = field(default_factory=dict)
    """Rank -> why its node did not say where it is."""
    time: float = field(default_factory=time.time)

    def text(self) -> str:
        """The report for one screen."""
        rows = list(self.lines)
        for each in self.ranks:
            rows += _rank_lines(each, now=self.time)
        rows += [f"rank {rank}: its node did not answer: {why}" for rank, why in self.missing.items()]
        if self.ranks:
            rows.append(f"stacks of all threads: {self.ranks[0].flight.path.parent}/rank-*.stacks")
        return "\n".join(printable(row) for row in rows)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "collective": self.collective,
            "cause": self.cause,
            "culprits": list(self.culprits),
            "lines": list(self.lines),
            "time": self.time,
            "missing": {str(rank): why for rank, why in self.missing.items()},
            "ranks": [
                {
                    "rank": each.rank,
                    "pid": each.flight.pid,
                    "state": each.state,
                    "heartbeat": dict(each.flight.heartbeat),
                    "waiting": None if each.flight.waiting is None else asdict(each.flight.waiting),
                    "stack": [frame.text for frame in each.threads[0]] if each.threads else [],
                    "children": list(each.children),
                }
                for each in self.ranks
            ],
        }


def find_records(run: Path) -> Path:
    """Return the folder with the newest flight records of a run directory.

    Raises:
        DataError: there is none.
    """
    files = [*run.glob("logs/flight/rank-*.flight"), *run.glob("logs/ranks/*/rank-*.flight")]
    files += run.glob("rank-*.flight")
    if not files:
        raise DataError(
            f"wrong-kind-of-file: {run} contains no flight records (logs/flight/rank-0.flight); give the "
            "folder of a run that this version of lockstep started"
        )
    return max(files, key=lambda path: path.lstat().st_mtime).parent


def examine(folder: Path, *, stacks: bool = True) -> HangReport:
    """Examine the ranks whose flight records are in `folder`.

    Args:
        stacks: ask the living ones for their Python stacks.

    Raises:
        DataError: a file is no flight record, or there is none.
    """
    ranks = rank_states(folder, stacks=stacks)
    if not ranks:
        raise DataError(f"wrong-kind-of-file: {folder} contains no flight records")
    return diagnose(ranks)


def rank_states(folder: Path, rank: int | None = None, *, stacks: bool = True) -> list[RankState]:
    """Return the states of the ranks, or of one of them, that run on this machine and keep their records in
    a folder. Args and errors as of `examine`, but none may be there."""
    flights = flight.read_all(folder, rank)
    if stacks:
        _ask_for_stacks(flights)
    return [_rank_state(each, stacks=stacks) for each in flights]


# --- what is looked at --------------------------------------------------------------------------------------


def _ask_for_stacks(flights: Sequence[Flight]) -> None:
    sizes: dict[Path, int] = {}
    for each in flights:
        if each.answers and _state(each) not in (None, *_STOPPED):
            with holding(each.path, pid=each.pid, started=each.born) as holder:
                # Before the signal: what is longer then is the answer.
                size = _size(each.stacks)
                # To the process that has this record mapped, and handles the signal: it ends any other.
                if holder is not None and holder.send(flight.STACKS_SIGNAL):
                    sizes[each.stacks] = size
    until = time.monotonic() + _STACKS_SECONDS
    settled: dict[Path, int] = {}
    while sizes and time.monotonic() < until:
        time.sleep(0.1)
        now = {path: _size(path) for path in sizes}
        # Two looks alike: faulthandler writes a stack piece by piece.
        if now == settled and all(now[path] > sizes[path] for path in sizes):
            return
        settled = now


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def _stacks(path: Path) -> str:
    """The end of a file of stacks; "": there is none, or it is no plain file."""
    with contextlib.suppress(DataError), open_plain(path, DataError, root=path.parent) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _STACKS_BYTES))
        return file.read(_STACKS_BYTES).decode("utf-8", errors="replace")
    return ""


def _state(each: Flight) -> str | None:
    """The state of the process that writes a record; None: it has gone, and the pid may be another's."""
    # After the last entry it does not hold the record any more.
    if each.answers and holds(each.path, pid=each.pid, started=each.born) is False:
        return None
    state = lock.state(each.pid, each.born)
    return None if state in ("Z", "X") else state


def _rank_state(each: Flight, *, stacks: bool) -> RankState:
    state = _state(each)
    threads: tuple[tuple[Frame, ...], ...] = ()
    if stacks and state is not None and state not in _STOPPED:
        threads = parse_stacks(_stacks(each.stacks), each.main_thread)
    return RankState(
        flight=each,
        state=state,
        threads=threads,
        children=children_of(each.pid) if state is not None and each.answers else (),
    )


# --- what follows from it -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Difference:
    """The first collective of a group at which its ranks are not in step."""

    group: str
    sequence: int
    at: Mapping[int, Collective | None]
    """Rank -> the collective that it entered under this number; None: it did not come so far."""

    @property
    def began(self) -> float:
        return min(each.began for each in self.at.values() if each is not None)

    @property
    def absent(self) -> tuple[int, ...]:
        """The ranks that did not come so far."""
        return tuple(rank for rank, each in self.at.items() if each is None)

    def severity(self, by_rank: Mapping[int, RankState]) -> int:
        """How directly it explains a hang: ranks that are in different collectives; ranks that are in none;
        ranks that wait in another group, for whatever reason (_CROSSED)."""
        if not self.absent:
            return 0
        states = [by_rank.get(rank) for rank in self.absent]
        elsewhere = all(each is not None and each.waits for each in states)
        return _CROSSED if elsewhere else 1


def diagnose(states: Sequence[RankState], missing: Mapping[int, str] | None = None) -> HangReport:
    """Compare the states of ranks, wherever they were taken.

    Args:
        states: at least one, or one in `missing`.
        missing: rank -> why its node did not answer.
    """
    if missing:
        known = diagnose(states) if states else None
        if known is None or known.cause in _SAYS_LITTLE or _only_wait(states, known.cause):
            return _without_answer(tuple(states), missing)
        return replace(known, missing=missing)
    ranks = tuple(states)
    by_rank = {each.rank: each for each in ranks}
    difference = _first_difference(ranks)
    if difference is None:
        return _without_collective(ranks)
    arrived = {rank: each for rank, each in difference.at.items() if each is not None}
    first = next(iter(arrived.values()))
    title = f"collective {difference.sequence} of group {difference.group}: {first.text}"
    if not difference.absent:
        cause, culprits, lines = _why_different(difference, by_rank)
        return HangReport(ranks=ranks, collective=title, cause=cause, culprits=culprits, lines=tuple(lines))
    if difference.severity(by_rank) == _CROSSED:
        return _crossed(ranks, difference, title)
    absent = difference.absent
    lines = [f"{_names(absent)} never came to {title}"]
    lines += [f"{_names((rank,))} has waited there {_ago(each.began)}" for rank, each in arrived.items()]
    cause, more = _why_absent([by_rank[rank] for rank in absent if rank in by_rank], absent)
    return HangReport(ranks=ranks, collective=title, cause=cause, culprits=absent, lines=(*lines, *more))


def _only_wait(states: Sequence[RankState], cause: str) -> bool:
    """Whether all these ranks are in the same collective, in which they can only wait."""
    return cause not in OUT_OF_STEP and all(each.waits for each in states)


def _without_answer(ranks: tuple[RankState, ...], missing: Mapping[int, str]) -> HangReport:
    """The ranks that are seen do not explain it."""
    waiting = {each.rank: each.flight.waiting for each in ranks}
    inside = {rank: each for rank, each in waiting.items() if each is not None}
    lines = [f"rank {rank} has waited {_ago(each.began)} in {each.text}" for rank, each in inside.items()]
    lines.append(f"likely cause: the node of {_names(tuple(missing))}, which does not answer")
    return HangReport(
        ranks=ranks,
        collective=next((each.text for each in inside.values()), None),
        cause="node does not answer",
        culprits=tuple(missing),
        lines=tuple(lines),
        missing=missing,
    )


def _crossed(ranks: tuple[RankState, ...], difference: _Difference, title: str) -> HangReport:
    """Ranks wait for each other, each in a collective of another group."""
    by_rank = {each.rank: each for each in ranks}
    usual = next(rank for rank, each in difference.at.items() if each is not None)
    odd = difference.absent[0]
    inside = {rank: by_rank[rank].flight.waiting for rank in (usual, odd)}
    at = {rank: each for rank, each in inside.items() if each is not None}
    lines = [f"{_names(difference.absent)} never came to {title}"]
    lines += [f"  rank {rank} waits in {each.text}, {_ago(each.began)}" for rank, each in at.items()]
    if len(at) < 2:  # one of them has left it by now
        return HangReport(ranks=ranks, collective=title, cause="unknown", culprits=(odd,), lines=tuple(lines))
    skipped = _who_skipped(by_rank, at, usual, odd)
    missed = at[usual] if skipped == odd else at[odd]
    lines.append(f"likely cause: rank {skipped} skipped {missed.text}")
    return HangReport(
        ranks=ranks, collective=title, cause="skipped collective", culprits=(skipped,), lines=tuple(lines)
    )


def _first_difference(ranks: Sequence[RankState]) -> _Difference | None:
    """Of the groups that have a difference, the one that explains the others; then the oldest."""
    differences = []
    members: dict[str, tuple[int, ...]] = {}
    for each in ranks:
        members |= each.flight.groups
    for group, who in members.items():
        if group.endswith(flight.PAIRS):
            continue
        history = {
            each.rank: {c.sequence: c for c in each.flight.collectives if c.group == group}
            for each in ranks
            if each.rank in who
        }
        if len(history) > 1 and (difference := _difference(group, history)) is not None:
            differences.append(difference)
    by_rank = {each.rank: each for each in ranks}
    return min(differences, key=lambda each: (each.severity(by_rank), each.began), default=None)


def _difference(group: str, history: Mapping[int, Mapping[int, Collective]]) -> _Difference | None:
    first = max((min(entered, default=1) for entered in history.values()), default=1)
    # Of the numbers that are there: a damaged record may hold one of any size.
    for sequence in sorted({each for entered in history.values() for each in entered if each >= first}):
        at = {rank: entered.get(sequence) for rank, entered in history.items()}
        entered = [each for each in at.values() if each is not None]
        if len(entered) < len(at) or len({(e.op, e.purpose) for e in entered}) > 1:
            return _Difference(group=group, sequence=sequence, at=at)
        # shapes that could differ, as those of an all_to_all, have gone through
        if len({each.shapes for each in entered}) > 1 and any(each.ended is None for each in entered):
            return _Difference(group=group, sequence=sequence, at=at)
    return None


def _why_different(
    difference: _Difference, by_rank: Mapping[int, RankState]
) -> tuple[str, tuple[int, ...], list[str]]:
    at = {rank: each for rank, each in difference.at.items() if each is not None}
    odd = _minority(at)
    usual = next(rank for rank in at if rank not in odd)
    lines = [
        f"as number {difference.sequence} of group {difference.group} the ranks have different collectives:"
    ]
    lines += [f"  rank {rank}: {each.text}, {_ago(each.began)} ago" for rank, each in at.items()]
    a, b = at[usual], at[odd[0]]
    after = {rank: _kind(_after(by_rank[rank].flight, at[rank])) for rank in (usual, odd[0])}
    swapped = after[usual] == _kind(b) and after[odd[0]] in (_kind(a), None)
    if swapped or (after[odd[0]] == _kind(a) and after[usual] is None):
        lines.append(f"likely cause: {_names(odd)} has the two in another order than rank {usual}")
        return "other order", odd, lines
    in_turn = any(_follows(by_rank[usual].flight, *pair) for pair in ((a, b), (b, a)))
    if (a.op, a.purpose) == (b.op, b.purpose) and not in_turn:
        lines.append(f"likely cause: wrong shape: {a.shapes} on rank {usual}, {b.shapes} on {_names(odd)}")
        return "wrong shape", odd, lines
    skipped = _who_skipped(by_rank, at, usual, odd[0])
    missed = at[usual] if skipped != usual else at[odd[0]]
    lines.append(f"likely cause: rank {skipped} skipped {missed.text}")
    return "skipped collective", (skipped,), lines


def _minority(at: Mapping[int, Collective]) -> tuple[int, ...]:
    """The ranks whose collective fewer ranks have; of two equal parts the one without the lowest rank."""
    parts: dict[tuple[str, str, str], tuple[int, ...]] = {}
    for rank, each in sorted(at.items()):
        key = (each.op, each.shapes, each.purpose)
        parts[key] = (*parts.get(key, ()), rank)
    return min(reversed(list(parts.values())), key=len)


_Kind = tuple[str, str, str, str]


def _kind(each: Collective | None) -> _Kind | None:
    """What a collective is, whatever the step."""
    if each is None:
        return None
    return each.group, each.op, each.shapes, re.sub(r"\d+", "#", each.purpose)


def _after(record: Flight, each: Collective) -> Collective | None:
    """The next one in its group."""
    return next(
        (c for c in record.collectives if (c.group, c.sequence) == (each.group, each.sequence + 1)), None
    )


def _who_skipped(by_rank: Mapping[int, RankState], at: Mapping[int, Collective], a: int, b: int) -> int:
    """Of two ranks in different collectives, the one that has left out that of the other."""
    if _kind(_after(by_rank[b].flight, at[b])) == _kind(at[a]):
        return a
    if _kind(_after(by_rank[a].flight, at[a])) == _kind(at[b]):
        return b
    # which of the two has never before come after what came before it?
    past = {rank: _history(by_rank[rank].flight, at[rank]) for rank in (a, b)}
    for length in range(_LONGEST_HISTORY, 0, -1):
        usual = {rank: _ends_as_before(past[rank], length) for rank in (a, b)}
        if usual[a] != usual[b]:
            return b if usual[a] else a
    return b


def _follows(record: Flight, one: Collective, other: Collective) -> bool:
    """Whether in earlier steps the other has come right after the one."""
    past = _history(record, one)[:-1]
    return (_kind(one), _kind(other)) in itertools.pairwise(past)


def _history(record: Flight, until: Collective) -> list[_Kind | None]:
    """The kinds of its collectives, to the one that is given."""
    return [_kind(each) for each in record.collectives if each.number <= until.number]


def _ends_as_before(past: Sequence[_Kind | None], length: int) -> bool:
    """Whether the last of these, with `length` others before it, have come in this order before."""
    window = length + 1
    ends = [past[end - window : end] for end in range(window, len(past))]
    return past[-window:] in ends


def _why_absent(states: Sequence[RankState], absent: tuple[int, ...]) -> tuple[str, list[str]]:
    if not states:
        return "rank without a record", [f"{_names(absent)} left no flight record here"]
    causes = [_cause(each) for each in states]
    return causes[0][0], [f"likely cause: {text}" for text in dict.fromkeys(text for _, text in causes)]


def _cause(each: RankState) -> tuple[str, str]:
    """Why a rank does not go on: a few words, and a sentence."""
    who, pid = f"rank {each.rank}", each.flight.pid
    phase = each.flight.heartbeat.get("phase")
    if phase == "failed":
        return "failed rank", f"{who} has failed; its log says how"
    if phase in _ENDED:
        return "ended early", f"{who} has ended its run ({phase}) while others go on: has it less data?"
    if each.state is None:
        return "dead process", f"{who} (pid {pid}) has died in phase {phase!r}; its log says more"
    if each.stopped:
        return "stopped process", (
            f"{who} (pid {pid}) is stopped by a signal (SIGSTOP; state {each.state}): `kill -CONT {pid}` "
            "lets it go on"
        )
    main, others = each.threads[:1], each.threads[1:]
    # A main thread that waits may wait for the thread that is stuck in a file.
    for threads, causes in ((each.threads, _ANYWHERE), (main, _FILES), (others, _FILES), (main, _WAITS)):
        for cause, pattern in causes:
            for frame in (frame for thread in threads for frame in thread if frame.name != _JOINS):
                if re.search(pattern, f"{frame.file} {frame.name} {frame.source}"):
                    return cause, f"{cause}: {who} is at {frame.text}"
    if each.threads and each.threads[0]:
        return "busy or stuck", f"{who} is in phase {phase!r}, at {_own_frame(each.threads[0]).text}"
    waits = " It waits for the disk or a device." if each.state == "D" else ""
    return "unknown", f"{who} is in phase {phase!r} and did not write its stacks (state {each.state}).{waits}"


def _own_frame(frames: Sequence[Frame]) -> Frame:
    """The innermost frame that belongs to no library."""
    return next(
        (f for f in frames if "/lib/python" not in f.file and "site-packages" not in f.file), frames[0]
    )


def _without_collective(ranks: tuple[RankState, ...]) -> HangReport:
    """All ranks are in step, or there is only one."""
    waiting = {each.rank: each.flight.waiting for each in ranks}
    inside = next((each for each in waiting.values() if each is not None), None)
    alive = [each for each in ranks if each.state is not None]
    if len(ranks) > 1 and inside is not None and all(waiting.values()):
        stopped = [each for each in ranks if each.stopped or each.state is None]
        lines = [f"all ranks have entered {inside.text}, {_ago(inside.began)} ago, and none has left it"]
        if stopped:
            cause, text = _cause(stopped[0])
            culprits = tuple(each.rank for each in stopped)
            return HangReport(
                ranks=ranks,
                collective=inside.text,
                cause=cause,
                culprits=culprits,
                lines=(*lines, f"likely cause: {text}"),
            )
        lines.append("likely cause: the network between them, or a collective of C++ that is not recorded")
        return HangReport(
            ranks=ranks, collective=inside.text, cause="transport", culprits=(), lines=tuple(lines)
        )
    if not alive:
        lines = ["no rank is running; where each of them ended:"]
        return HangReport(ranks=ranks, collective=None, cause="ended", culprits=(), lines=tuple(lines))
    suspects = [each for each in ranks if each.flight.waiting is None] or list(ranks)
    # a rank that is stopped or dead explains those that compute
    suspects.sort(
        key=lambda each: (not each.stopped, each.state is not None, each.flight.heartbeat.get("time", 0))
    )
    cause, text = _cause(suspects[0])
    lines = ["no rank waits for another", f"{_names((suspects[0].rank,))} was seen last: {text}"]
    return HangReport(
        ranks=ranks, collective=None, cause=cause, culprits=(suspects[0].rank,), lines=tuple(lines)
    )


# --- lines --------------------------------------------------------------------------------------------------


def _rank_lines(each: RankState, *, now: float) -> list[str]:
    beat, record = each.flight.heartbeat, each.flight
    what = {None: "has gone", "T": "stopped", "t": "traced", "D": "waits for a device"}.get(
        each.state, "runs"
    )
    parts = [f"rank {each.rank}: pid {record.pid} {what}"]
    if "step" in beat:
        parts.append(f"step {beat['step']}")
    if "phase" in beat:
        parts.append(f"{beat['phase']} for {max(0.0, now - float(beat.get('since', now))):.0f} s")
    if beat.get("completions"):
        parts.append("{} of {} completions".format(*beat["completions"]))
    if beat.get("micro_batch") is not None:
        parts.append(f"micro-batch {beat['micro_batch']} of documents of {_short(beat.get('inputs'))} tokens")
    if beat.get("rss"):
        parts.append(f"{beat['rss'] / 1e9:.2f} GB of host memory")
    rows = [", ".join(parts)]
    if (waiting := record.waiting) is not None:
        rows.append(f"  in {waiting.text}, number {waiting.sequence} of group {waiting.group}")
    elif record.collectives:
        last = record.collectives[-1]
        rows.append(
            f"  last left {last.text}, number {last.sequence} of {last.group}, {_ago(last.began, now)} ago"
        )
    frames = each.threads[0] if each.threads else ()
    rows += [f"  | {frame.text[:150]}" for frame in frames if not _PLUMBING.search(frame.file)][
        :_SHOWN_FRAMES
    ]
    rows += [f"  + {child}" for child in each.children[:4]]
    return rows


def _short(values: Any) -> str:
    listed = [str(value) for value in values] if isinstance(values, Iterable) else []
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")


def _names(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _ago(then: float, now: float | None = None) -> str:
    return f"{max(0.0, (time.time() if now is None else now) - then):.0f} s"
