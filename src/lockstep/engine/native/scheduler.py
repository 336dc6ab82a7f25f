"""Which samples run, which wait, and where their keys and values are.

A sample enters with a block of the KV cache and the keys and values of all its tokens but the last: copied
from a sample of the same prompt that has them, computed by prefill otherwise. Its last token, of the prompt
or of what it had sampled before it lost its place, is the input of its first decode step. So every token is
sampled in one place, and a sample that was preempted goes on with the bits it would have had.

    waiting ──admit: block, prefix copied, rest prefilled──► rows ──end, stop, abort──► finished
       ▲                                                        │
       └──────────────── preempted: block freed ◄───────────────┘ no room for the next key

A finished sample keeps its block until `forget`, because its trajectory may go on: the next turn is a new
sample with `before`, which takes the block over and computes only what was added. Kept blocks are freed when
others need their memory, those of the youngest first; then the turn computes its whole context again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lockstep.engine import embedded
from lockstep.engine.native.kv_cache import SCRATCH, KVBlock, KVBlockAllocator, KVCache, Move
from lockstep.engine.native.peers import Chunk, Columns
from lockstep.engine.native.runner import (
    POSITION,
    SEED,
    SLOT,
    SOURCE,
    START,
    TOKEN,
    USED,
)

_ROOM, _LAST = 7, 8
"""Two more columns, for the host: keys that fit into the sample's block, and the position whose successor
ends the sample at the latest."""
_HEADROOM = 16
"""Where samples do not all fit at full length, each gets room for so many tokens more than it has, for a
quarter of its share of the KV cache, or for a quarter of what it has, whichever is most."""
_ADMIT_SHARE = 8
"""Samples enter when one row in this many is free: a prefill of a few tokens costs as much as a step."""
_PATIENCE = 16
"""Steps after which later turns enter although fewer rows are free."""
_BUSY_SHARE = 2
"""First turns do not take the memory of kept blocks while more than one row in this many runs."""


@dataclass(kw_only=True, slots=True, eq=False)
class Sample(embedded.Sample):
    """One sample, from the request to its end."""

    owners: list[Sample]
    """Samples that own a copy of the keys and values of the trajectory's prompt."""
    before: Sample | None = None
    """The trajectory's previous turn, if the engine still knew it."""
    reach: int = 0
    """Keys that the whole trajectory may come to, if the request says so."""
    computed: int = 0
    """Keys of the trajectory that were computed at some time."""
    in_flight: int = 0
    """Tokens that were launched and not read yet."""

    @property
    def known(self) -> int:
        """Tokens on the host."""
        return self.state.position

    @property
    def most_keys(self) -> int:
        """Keys that the turn, or the trajectory, may come to."""
        return max(self.end - 1, self.reach)

    @property
    def shared(self) -> int:
        """Keys that all trajectories of the prompt have in common."""
        return len(self.turn.handle.request.prompt_token_ids) - 1

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
    """The work that computes new samples up to their last token, in this order."""

    prompts: list[Part] = field(default_factory=list)
    copies: list[tuple[Sample, Sample]] = field(default_factory=list)
    """(source, target) of the keys and values of a prompt without its last token."""
    rest: list[Part] = field(default_factory=list)
    """The tokens after a copied prompt, of samples that had been preempted."""


class Scheduler:
    """Rows are dense and in order of admission: the last one is the youngest.

    Args:
        samples: in the order in which they are to run.
        kv_cache: the scheduler allocates its rows, and copies them when a sample moves.
        max_rows: samples that run together.
        roomy: all samples that can run together fit at full length.
    """

    def __init__(self, samples: Iterable[Sample], *, kv_cache: KVCache, max_rows: int, roomy: bool) -> None:
        self.rows: list[Sample] = []
        self.preemptions = 0
        self.recomputed_tokens = 0
        self._waiting = deque[Sample]()
        self._returning = deque[Sample]()
        """Later turns and preempted samples, see `_next`."""
        self._patience = _PATIENCE
        self._kept: dict[Sample, None] = {}
        """Finished samples with a block, the oldest first."""
        self._kv_cache, self._allocator = kv_cache, KVBlockAllocator(kv_cache.capacity, first=SCRATCH + 1)
        self._max_rows, self._roomy = max_rows, roomy
        self._headroom = max(_HEADROOM, kv_cache.capacity // (4 * max_rows))
        self._columns: Columns = np.zeros((_LAST + 1, 0), np.int64)
        self._blocks: dict[Sample, KVBlock] = {}
        self._moves: list[Move] = []
        self._left: list[KVBlock] = []
        self._full = False
        self._queue(samples)

    @property
    def waiting(self) -> int:
        """Samples without a row."""
        return len(self._waiting) + len(self._returning)

    @property
    def kept(self) -> Collection[Sample]:
        """Finished samples whose keys are still there."""
        return self._kept.keys()

    @property
    def use(self) -> float:
        """Share of the KV cache that samples hold."""
        return 1.0 - self._allocator.free / self._allocator.capacity

    def unfinished(self) -> list[Sample]:
        """All unfinished samples, running ones first."""
        every = (*self._blocks, *self._returning, *self._waiting)
        return [sample for sample in every if not sample.done]

    def add(self, samples: Iterable[Sample], *, roomy: bool) -> None:
        """Let more samples run, after those that wait.

        Args:
            roomy: all that can run together still fit at full length.
        """
        self._queue(samples)
        self._roomy = roomy

    def _queue(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            (self._waiting if sample.turn.after is None else self._returning).append(sample)

    def finish(self, sample: Sample) -> None:
        """Remove a sample that has ended: its row at the next step, its keys and values with `forget`, or
        when their memory is needed."""
        sample.done = True
        sample.before = None
        if sample in self._blocks:
            sample.computed = max(sample.computed, sample.known - 1)
            self._kept[sample] = None
            block, keys = self._blocks[sample], sample.known
            if not self._roomy and block.size > keys:
                self._allocator.release(KVBlock(block.start + keys, block.size - keys))
                block.size = keys
        else:  # preempted when its last token was on its way
            (self._returning if sample in self._returning else self._waiting).remove(sample)
        self._full = False

    def recompute(self) -> None:
        """Let every sample compute its keys again. No token may be on its way."""
        for sample in list(self._kept):
            self.forget(sample)
        while self._blocks:
            self._preempt()
            self.preemptions -= 1
        self.rows, self._columns = [], self._columns[:, :0]
        self._full = False

    def forget(self, sample: Sample) -> None:
        """Free the keys and values of a finished sample, if they are still there."""
        if sample in self._kept:
            del self._kept[sample]
            self._release(sample)
            self._full = False

    # a step

    def advance(self) -> None:
        """Advance each row to its next token: rows that have ended are removed, the others get room for its
        key."""
        columns = self._columns
        columns[SOURCE] = np.arange(columns.shape[1])
        columns[POSITION] += 1
        keep = columns[POSITION] <= columns[_LAST]
        keep &= np.fromiter((not sample.done for sample in self.rows), bool, len(self.rows))
        self._keep(keep)
        self._grow()

    def columns(self) -> Columns:
        """The columns of the next step, for `Runner.step`."""
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
        """Give free rows and KV blocks to waiting samples; they run once the admission is done."""
        free = self._max_rows - len(self.rows)
        if not self.waiting or self._full or not self._due(free):
            return None
        admission = Admission()
        new: list[Sample] = []
        while (queue := self._next()) and len(new) < free:
            sample = queue[0]
            # A preempted sample may still have a token on its way; until that is read, its tokens are not all
            # known here.
            running = len(self.rows) + len(new)
            if sample.in_flight or not self._place(sample, admission, running=running):
                break
            queue.popleft()
            self._bring_up(sample, admission)
            new.append(sample)
        if not new:
            return None
        self._settle()
        self.rows += new
        self._columns = np.concatenate([self._columns, np.array([_column(s) for s in new]).T], 1)
        self._update_block_columns()
        return admission

    def _next(self) -> deque[Sample]:
        """The queue whose first sample is the next to run: later turns, whose keys take memory meanwhile.

        Where memory holds all trajectories from beginning to end, those that have not begun come first:
        otherwise nothing would run beside the last of them while they wait for their tools.
        """
        if self._waiting and self._returning and self._roomy:
            first, preempted = self._waiting[0], self._returning[0].turn.after is None
            if first.reach and not preempted and first.most_keys <= self._allocator.free:
                return self._waiting
        return self._returning or self._waiting

    def _due(self, free: int) -> bool:
        """Whether samples may enter in this step."""
        if not self.rows or free * _ADMIT_SHARE >= self._max_rows:
            self._patience = _PATIENCE
            return True
        if not free or all(sample.turn.after is None for sample in self._returning):
            return False
        self._patience -= 1
        if self._patience:
            return False
        self._patience = _PATIENCE
        return True

    def _place(self, sample: Sample, admission: Admission, *, running: int) -> bool:
        """Give a sample a block: the one of its trajectory, if it was kept. False when there is no room."""
        before = sample.before if sample.before in self._kept else None
        have = 0 if before is None else self._blocks[before].size
        size = self._room_needed(sample, sample.known)
        if sample.turn.after is not None or running * _BUSY_SHARE < self._max_rows:
            sources = {source for source, _ in admission.copies}
            self._make_room(size - have, spare=sources | {before})
        if before is not None:
            if self._allocator.free < size - have:
                return False
            self._take_over(sample, before, admission)
            if size > have:
                self._enlarge(sample, size)
            return True
        block = self._allocator.allocate(size)
        if block is None and self._allocator.free >= size:
            self._pack()
            block = self._allocator.allocate(size)
        if block is None:
            return False
        self._blocks[sample] = block
        return True

    def _take_over(self, sample: Sample, before: Sample, admission: Admission) -> None:
        """Give a later turn the block of the one before it."""
        self._blocks[sample] = self._blocks.pop(before)
        del self._kept[before]
        owners = sample.owners = before.owners
        owners[owners.index(before)] = sample  # in its place: who stands before another may be its source
        admission.copies = [(sample if s is before else s, target) for s, target in admission.copies]

    def _make_room(self, size: int, *, spare: Collection[Sample | None] = ()) -> None:
        """Free kept blocks until `size` keys fit: first those of trajectories that have not returned, the
        youngest first, then those of turns that are the last to run."""
        if size <= self._allocator.free or not self._kept:
            return
        returned = [sample.before for sample in self._returning if sample.before is not None]
        waiting = set(returned)
        for sample in [*(s for s in reversed(self._kept) if s not in waiting), *reversed(returned)]:
            if size <= self._allocator.free:
                return
            if sample not in spare:
                self.forget(sample)

    def copies(self, admission: Admission) -> None:
        """Copy keys and values of a shared prompt to the new samples of the admission."""
        self._kv_cache.move(
            [
                Move(
                    source=self._blocks[source].start,
                    target=self._blocks[target].start,
                    count=target.shared,
                )
                for source, target in admission.copies
            ]
        )

    def chunks(
        self, parts: Sequence[Part], *, tokens: Callable[[int], int], documents: int
    ) -> Iterator[Chunk]:
        """Split the parts, end to end, into forwards of at most `documents` documents and `tokens(left)`
        tokens, where `left` tokens remain."""
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
        starts = [self._blocks[part.sample].start for part in parts]
        positions = [np.arange(part.first, part.stop) for part in parts]
        return Chunk(
            token_ids=np.concatenate([part.sample.tokens(part.first, part.stop) for part in parts]),
            positions=np.concatenate(positions),
            slots=np.concatenate([start + at for start, at in zip(starts, positions, strict=True)]),
            lengths=np.array([part.stop - part.first for part in parts]),
            starts=np.array(starts),
            used=np.array([part.stop for part in parts]),
        )

    def _bring_up(self, sample: Sample, admission: Admission) -> None:
        """Add to `admission` how the sample gets the keys and values of all its tokens but the last."""
        wanted = sample.known - 1
        if sample in sample.owners:  # it took over its trajectory's block
            assert sample.before is not None
            present = sample.before.known - 1
        elif sample.owners and sample.shared:
            present = sample.shared
            admission.copies.append((sample.owners[0], sample))
            sample.owners.append(sample)
        else:
            present = 0
            sample.owners.append(sample)
        if present < wanted or not present:
            parts = admission.rest if present else admission.prompts
            parts.append(Part(sample=sample, first=present, stop=wanted))
        if sample.cached_tokens is None:
            sample.cached_tokens = present
        self.recomputed_tokens += max(0, min(sample.computed, wanted) - present)
        sample.before = None

    # room

    def _room_needed(self, sample: Sample, keys: int) -> int:
        """Size of the block for a sample that has, or is about to have, this many keys."""
        if self._roomy:
            return sample.most_keys
        return min(sample.end - 1, keys + max(self._headroom, keys // 4))

    def _grow(self) -> None:
        """Make room for each row's next key; rows without room are preempted, the youngest first."""
        short = np.flatnonzero(self._columns[POSITION] >= self._columns[_ROOM])
        if not len(short):
            return
        for sample, keys in [(self.rows[i], int(self._columns[POSITION, i]) + 1) for i in short]:
            if sample in self._blocks:
                self._make_room(self._room_needed(sample, keys) - self._blocks[sample].size)
            while sample in self._blocks and not self._enlarge(sample, keys):
                self._preempt()
        self._settle()
        self._keep(np.fromiter((sample in self._blocks for sample in self.rows), bool, len(self.rows)))
        self._update_block_columns()

    def _enlarge(self, sample: Sample, keys: int) -> bool:
        block = self._blocks[sample]
        # With room for later keys, so that this does not happen each step; if there is none, for the next key
        # alone.
        sizes = (self._room_needed(sample, keys), keys)
        if any(self._allocator.extend(block, size) for size in sizes):
            return True
        for size in sizes:
            new = self._allocator.allocate(size)
            if new is not None:
                held = min(keys - 1, block.size)
                self._moves.append(Move(source=block.start, target=new.start, count=held))
                self._left.append(block)
                self._blocks[sample] = new
                return True
        self._settle()
        if self._allocator.free < keys - block.size:
            return False
        self._pack(last=sample, size=keys)
        return True

    def _preempt(self) -> None:
        """Preempt the youngest row, which is the first to come back."""
        youngest = next(sample for sample in reversed(self.rows) if sample in self._blocks)
        youngest.computed = max(youngest.computed, youngest.known + youngest.in_flight - 1)
        self._release(youngest)
        self._returning.appendleft(youngest)
        self._full = True  # until somebody has finished: else it would be back at once, and out again
        self.preemptions += 1

    def _release(self, sample: Sample) -> None:
        self._settle()
        # After the moves: one of them may still read these rows, which the next sample overwrites.
        self._allocator.release(self._blocks.pop(sample))
        # From here on nobody may copy the prompt's keys from it.
        sample.owners.remove(sample)

    def _settle(self) -> None:
        """Do the pending moves, then free the blocks that were left."""
        self._kv_cache.move(self._moves)
        for block in self._left:
            self._allocator.release(block)
        self._moves, self._left = [], []

    def _pack(self, *, last: Sample | None = None, size: int = 0) -> None:
        """Close all gaps; `last` comes after the others, with room for `size` tokens."""
        self._settle()
        order = sorted(self._blocks, key=lambda s: (s is last, self._blocks[s].start))
        # Taken before `pack`, which changes where blocks start; of each block only the rows that hold keys.
        before = [
            Move(source=e.start, target=0, count=min(e.size, s.known + s.in_flight))
            for s in order
            for e in (self._blocks[s],)
        ]
        if last is not None:
            self._blocks[last].size = size
        self._allocator.pack([self._blocks[s] for s in order])
        self._kv_cache.move(
            [
                Move(source=old.source, target=self._blocks[s].start, count=old.count)
                for s, old in zip(order, before, strict=True)
                if old.source != self._blocks[s].start
            ]
        )
        self._update_block_columns()

    def _update_block_columns(self) -> None:
        """Write the position and size of each row's block into the columns."""
        held = [self._blocks.get(sample) for sample in self.rows]
        self._columns[START] = [0 if block is None else block.start for block in held]
        self._columns[_ROOM] = [0 if block is None else block.size for block in held]


def _column(sample: Sample) -> list[int]:
    """Column values of a new row; `_update_block_columns` fills in its block."""
    column = [0] * (_LAST + 1)
    column[SOURCE] = -1
    column[TOKEN] = sample.tokens(sample.known - 1, sample.known)[0]
    column[POSITION] = sample.known - 1
    column[SEED] = sample.state.seed
    column[_LAST] = sample.end - 2
    return column
