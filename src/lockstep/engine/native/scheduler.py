"""Who runs, who waits, and where everybody's keys and values are.

A sample enters with an extent of the KV pool and the keys and values of all its tokens but the last: copied
from a sample of the same prompt that has them, computed by prefill otherwise. Its last token, of the prompt
or of what it had sampled before it lost its place, is the input of its first decode step. So every token is
sampled in one place, and a sample that was preempted goes on with the bits it would have had.

    waiting ──admit: extent, prefix copied, rest prefilled──► rows ──end, stop, abort──► finished
       ▲                                                        │
       └──────────────── preempted: extent taken ◄──────────────┘ no room for the next key
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lockstep.engine.native.extents import Extent, Extents
from lockstep.engine.native.pool import SCRATCH, KVPool, Move
from lockstep.engine.native.runner import (
    POSITION,
    SEED,
    SLOT,
    SOURCE,
    START,
    TOKEN,
    USED,
    Chunk,
    Columns,
)
from lockstep.engine.sampling import SampleState
from lockstep.engine.stop import StopStrings
from lockstep.schema.rollout import GenerationRequest

_ROOM, _LAST = 7, 8
"""Two more columns, for the host: keys that fit into the sample's extent, and the position whose successor
ends the sample at the latest."""
_HEADROOM = 16
"""Where samples do not all fit at full length, each gets room for so many tokens more than it has, for a
quarter of its share of the pool, or for a quarter of what it has, whichever is most."""
_ADMIT_SHARE = 8
"""Samples enter when one row in this many is free: a prefill of a few tokens costs as much as a step."""


@dataclass(kw_only=True, slots=True, eq=False)
class Group:
    """A prompt and its samples that hold its keys and values."""

    index: int
    request: GenerationRequest
    holders: list[Sample] = field(default_factory=list)


@dataclass(kw_only=True, slots=True, eq=False)
class Sample:
    """One sample, from the request to its end."""

    group: Group
    index: int
    state: SampleState
    stops: StopStrings | None
    end: int
    """Tokens of prompt and completion at most."""
    logprobs: list[float] = field(default_factory=list)
    in_flight: int = 0
    """Tokens that are being sampled: launched, not read."""
    done: bool = False
    cached_tokens: int | None = None
    """Prompt tokens whose keys and values were copied when it first ran; None: it has not."""

    @property
    def known(self) -> int:
        """Tokens on the host."""
        return self.state.position

    @property
    def prompt_length(self) -> int:
        return len(self.state.prompt_token_ids)

    def tokens(self, first: int, stop: int) -> list[int]:
        """Tokens `first` to `stop` of prompt + completion."""
        return [*self.state.prompt_token_ids, *self.state.token_ids][first:stop]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Tokens of a sample whose keys and values are to be computed."""

    sample: Sample
    first: int
    stop: int


@dataclass(kw_only=True, slots=True)
class Admission:
    """What brings new samples up to their last token, in this order."""

    prompts: list[Part] = field(default_factory=list)
    copies: list[tuple[Sample, Sample]] = field(default_factory=list)
    """(from, to): the prompt but its last token."""
    rest: list[Part] = field(default_factory=list)
    """What follows a copied prompt in samples that had been preempted."""


class Scheduler:
    """Rows are dense and in order of admission: the last one is the youngest.

    Args:
        samples: in the order in which they are to run.
        pool: its rows are given out here, and copied when a sample moves.
        max_rows: samples that run together.
        roomy: every sample that can run at a time fits at full length.
    """

    def __init__(self, samples: Iterable[Sample], *, pool: KVPool, max_rows: int, roomy: bool) -> None:
        self.rows: list[Sample] = []
        self.preemptions = 0
        self._waiting = deque(samples)
        self._pool, self._extents = pool, Extents(pool.capacity, first=SCRATCH + 1)
        self._max_rows, self._roomy = max_rows, roomy
        self._headroom = max(_HEADROOM, pool.capacity // (4 * max_rows))
        self._columns: Columns = np.zeros((_LAST + 1, 0), np.int64)
        self._holders: dict[Sample, Extent] = {}
        self._moves: list[Move] = []
        self._left: list[Extent] = []
        self._full = False

    @property
    def waiting(self) -> int:
        """Samples without a row."""
        return len(self._waiting)

    @property
    def use(self) -> float:
        """Share of the pool that samples hold."""
        return 1.0 - self._extents.free / self._extents.capacity

    def unfinished(self) -> list[Sample]:
        """Everybody, those that run first."""
        return [sample for sample in (*self._holders, *self._waiting) if not sample.done]

    def finish(self, sample: Sample) -> None:
        """It has ended: its row goes at the next step, its keys and values now."""
        sample.done = True
        if sample in self._holders:
            self._release(sample)
        else:  # preempted when its last token was on its way
            self._waiting.remove(sample)
        self._full = False

    # a step

    def advance(self) -> None:
        """On to each row's next token: rows that have ended go, the others get room for its key."""
        columns = self._columns
        columns[SOURCE] = np.arange(columns.shape[1])
        columns[POSITION] += 1
        keep = columns[POSITION] <= columns[_LAST]
        keep &= np.fromiter((not sample.done for sample in self.rows), bool, len(self.rows))
        self._keep(keep)
        self._grow()

    def columns(self) -> Columns:
        """The next step's, for `Runner.step`."""
        columns = self._columns
        columns[SLOT] = columns[START] + columns[POSITION]
        columns[USED] = columns[POSITION] + 1
        return columns[: SEED + 1]

    def _keep(self, keep: npt.NDArray[np.bool_]) -> None:
        if not keep.all():
            self._columns = self._columns[:, keep]
            self.rows = [sample for sample, kept in zip(self.rows, keep, strict=True) if kept]

    # admission

    def admit(self) -> Admission | None:
        """Waiting samples take rows and room, as many as there are; they run once the admission is done."""
        free = self._max_rows - len(self.rows)
        if not self._waiting or self._full or (self.rows and free * _ADMIT_SHARE < self._max_rows):
            return None
        admission = Admission()
        new: list[Sample] = []
        while self._waiting and len(new) < free:
            sample = self._waiting[0]
            extent = None if sample.in_flight else self._room_for(sample)
            if extent is None:
                break
            self._waiting.popleft()
            self._holders[sample] = extent
            _bring_up(sample, admission)
            new.append(sample)
        if not new:
            return None
        self.rows += new
        self._columns = np.concatenate([self._columns, np.array([_column(s) for s in new]).T], 1)
        self._place_rows()
        return admission

    def _room_for(self, sample: Sample) -> Extent | None:
        size = self._wanted(sample, sample.known)
        extent = self._extents.allocate(size)
        if extent is None and self._extents.free >= size:
            self._pack()
            extent = self._extents.allocate(size)
        return extent

    def copies(self, admission: Admission) -> None:
        """Give the samples of the admission what others of their prompt have."""
        self._pool.move(
            [
                Move(
                    source=self._holders[source].start,
                    target=self._holders[target].start,
                    count=target.prompt_length - 1,
                )
                for source, target in admission.copies
            ]
        )

    def chunks(
        self, parts: Sequence[Part], *, tokens: Callable[[int], int], documents: int
    ) -> Iterator[Chunk]:
        """The parts, end to end, in forwards of at most so many documents, and tokens: a function of how many
        are left."""
        left = sum(part.stop - part.first for part in parts)
        taken: list[Part] = []
        room = tokens(left)
        for part in parts:
            first = part.first
            while first < part.stop:
                stop = min(part.stop, first + room)
                taken.append(Part(sample=part.sample, first=first, stop=stop))
                room -= stop - first
                left -= stop - first
                first = stop
                if not room or len(taken) == documents:
                    yield self._chunk(taken)
                    taken, room = [], tokens(left)
        if taken:
            yield self._chunk(taken)

    def _chunk(self, parts: Sequence[Part]) -> Chunk:
        starts = [self._holders[part.sample].start for part in parts]
        positions = [np.arange(part.first, part.stop) for part in parts]
        return Chunk(
            token_ids=np.concatenate([part.sample.tokens(part.first, part.stop) for part in parts]),
            positions=np.concatenate(positions),
            slots=np.concatenate([start + at for start, at in zip(starts, positions, strict=True)]),
            lengths=np.array([part.stop - part.first for part in parts]),
            starts=np.array(starts),
            used=np.array([part.stop for part in parts]),
        )

    # room

    def _wanted(self, sample: Sample, keys: int) -> int:
        """Room for a sample that has so many keys, or is about to."""
        full = sample.end - 1
        return full if self._roomy else min(full, keys + max(self._headroom, keys // 4))

    def _grow(self) -> None:
        """Room for each row's next key; who gets none waits, the youngest first."""
        short = np.flatnonzero(self._columns[POSITION] >= self._columns[_ROOM])
        if not len(short):
            return
        for sample, keys in [(self.rows[i], int(self._columns[POSITION, i]) + 1) for i in short]:
            while sample in self._holders and not self._enlarge(sample, keys):
                self._preempt()
        self._settle()
        self._keep(np.fromiter((sample in self._holders for sample in self.rows), bool, len(self.rows)))
        self._place_rows()

    def _enlarge(self, sample: Sample, keys: int) -> bool:
        extent = self._holders[sample]
        sizes = (self._wanted(sample, keys), keys)
        if any(self._extents.extend(extent, size) for size in sizes):
            return True
        for size in sizes:
            new = self._extents.allocate(size)
            if new is not None:
                self._moves.append(Move(source=extent.start, target=new.start, count=keys - 1))
                self._left.append(extent)
                self._holders[sample] = new
                return True
        self._settle()
        if self._extents.free < keys - extent.size:
            return False
        self._pack(last=sample, size=keys)
        return True

    def _preempt(self) -> None:
        """The youngest row loses its room, and is the first to come back."""
        youngest = next(sample for sample in reversed(self.rows) if sample in self._holders)
        self._release(youngest)
        self._waiting.appendleft(youngest)
        self._full = True  # until somebody has finished: else it would be back at once, and out again
        self.preemptions += 1

    def _release(self, sample: Sample) -> None:
        self._settle()
        self._extents.release(self._holders.pop(sample))
        sample.group.holders.remove(sample)

    def _settle(self) -> None:
        """Make the moves that were decided on; the places that were left are free then."""
        self._pool.move(self._moves)
        for extent in self._left:
            self._extents.release(extent)
        self._moves, self._left = [], []

    def _pack(self, *, last: Sample | None = None, size: int = 0) -> None:
        """Close all gaps; `last` comes behind the others, and has `size` tokens of room."""
        self._settle()
        order = sorted(self._holders, key=lambda s: (s is last, self._holders[s].start))
        before = [
            Move(source=e.start, target=0, count=min(e.size, s.known + s.in_flight))
            for s in order
            for e in (self._holders[s],)
        ]
        if last is not None:
            self._holders[last].size = size
        self._extents.pack([self._holders[s] for s in order])
        self._pool.move(
            [
                Move(source=old.source, target=self._holders[s].start, count=old.count)
                for s, old in zip(order, before, strict=True)
                if old.source != self._holders[s].start
            ]
        )
        self._place_rows()

    def _place_rows(self) -> None:
        """Tell the rows where their extents are."""
        held = [self._holders.get(sample) for sample in self.rows]
        self._columns[START] = [0 if extent is None else extent.start for extent in held]
        self._columns[_ROOM] = [0 if extent is None else extent.size for extent in held]


def _bring_up(sample: Sample, admission: Admission) -> None:
    """Note how the sample gets the keys and values of all its tokens but the last."""
    group, shared, wanted = sample.group, sample.prompt_length - 1, sample.known - 1
    if group.holders and shared:
        admission.copies.append((group.holders[0], sample))
        if wanted > shared:
            admission.rest.append(Part(sample=sample, first=shared, stop=wanted))
    else:
        shared = 0
        admission.prompts.append(Part(sample=sample, first=0, stop=wanted))
    if sample.cached_tokens is None:
        sample.cached_tokens = shared
    group.holders.append(sample)


def _column(sample: Sample) -> list[int]:
    """A new row; `_place_rows` fills in where it is."""
    column = [0] * (_LAST + 1)
    column[SOURCE] = -1
    column[TOKEN] = sample.tokens(sample.known - 1, sample.known)[0]
    column[POSITION] = sample.known - 1
    column[SEED] = sample.state.seed
    column[_LAST] = sample.end - 2
    return column
