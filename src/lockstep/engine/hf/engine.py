"""Engine `hf`: a decode loop of ours over a transformers model that shares the trainer's Parameters.

requests ──► prefill (packed, once per prompt) ──► running samples ──► one forward per token ──► completions
                                                         ▲                      │
                                                         └── gaps are closed ◄──┘ when 1/8 have finished
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.config.engine import EngineConfig
from lockstep.engine.embedded import EmbeddedEngine, EndedSample, Sample
from lockstep.engine.hf.kv_cache import Decode, Prefill, SampleCache, Skeleton
from lockstep.engine.sampling import Sampler
from lockstep.engine.streaming import Ending, OnToken, Turn
from lockstep.models.load import LoadedModel
from lockstep.schema.contract import KernelContract

NAME = "hf"


class HFEngine(EmbeddedEngine):
    """See EmbeddedEngine. A sample depends on its batch only through rounding: in float32 on CPU tokens are
    equal alone and in a batch."""

    contract: KernelContract | None = None

    def __init__(self, config: EngineConfig, *, model: LoadedModel) -> None:
        self._skeleton = Skeleton(model.module)
        self._module = self._skeleton.module
        super().__init__(NAME, config, model=model, vocab_size=self._skeleton.vocab_size)
        self._generation: Generation | None = None
        self._cache = SampleCache()
        self._sampler = Sampler()

    @torch.inference_mode()
    def _run(self) -> list[EndedSample]:
        if self._generation is None:
            self._skeleton.linears.refresh()
            self._generation = Generation(
                self._skeleton,
                self._cache,
                sampler=self._sampler,
                model=self._model,
                max_batch=self._config.max_batch,
                on_token=self.on_token,
            )
        ended = self._generation.advance(self._inbox, abort=self._abort, border=self._border)
        self._recomputed_tokens += self._generation.pop_recomputed()
        return ended

    def _out_of_memory(self) -> tuple[str, str]:
        return (
            "engine.max_batch",
            f"engine {NAME} ran out of memory with a KV cache of {self._cache.num_bytes} bytes "
            f"(engine.max_batch = {self._config.max_batch}); lower engine.max_batch or sampling.max_tokens",
        )

    def _end(self) -> None:
        self._generation = None
        self._kv_bytes = max(self._kv_bytes, self._cache.num_bytes)
        self._cache.clear()

    def _give_back(self) -> None:
        self._end()
        self._skeleton.linears.clear()
        self._sampler = Sampler()

    def _weights_changed(self) -> None:
        # Only these: the cache is empty between streams.
        self._skeleton.linears.clear()


# Which samples run, wait and have ended, of a stream.


_PREFILL_TOKENS = 8192
"""Prompt tokens of one prefill forward: bounds its activations."""
_COMPACT_SHARE = 8
"""Gaps are closed, and waiting samples enter, when one in this many rows has finished."""


@dataclass(kw_only=True, slots=True)
class Group:
    """A prompt in use, and its samples that wait for a row."""

    turn: Turn
    length: int
    """Tokens of the prompt."""
    waiting: deque[int]
    running: int = 0
    hidden: Tensor | None = None
    """[C]: the last hidden state of the prompt, while samples wait for it."""


@dataclass(kw_only=True, slots=True, eq=False)
class Row(Sample):
    """One running sample."""

    group: Group


class Generation:
    """Runs turns as they come until all have ended, or an abort.

    Rows are dense: row r of the cache is `self._rows[r]`. A finished row goes on computing, unread, until
    enough have finished for the gaps to be closed; its place is then taken by the last row.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        cache: SampleCache,
        *,
        sampler: Sampler,
        model: LoadedModel,
        max_batch: int,
        on_token: OnToken | None,
    ) -> None:
        self._skeleton = skeleton
        self._cache = cache
        self._sampler = sampler
        self._model = model
        self._max_batch = max_batch
        self._on_token = on_token
        self._ended: list[EndedSample] = []
        self._queue: deque[Group] = deque()
        self._groups: list[Group] = []
        self._rows: list[Row] = []
        self._counts: list[int] = []
        self._last: Tensor = torch.empty(0, dtype=torch.int64, device=skeleton.device)
        self._plan: Decode | None = None
        self._recomputed = 0

    def pop_recomputed(self) -> int:
        """Return how many tokens of earlier turns were computed again since the last call."""
        recomputed, self._recomputed = self._recomputed, 0
        return recomputed

    def advance(
        self, inbox: deque[Turn], *, abort: threading.Event, border: Callable[[], None]
    ) -> list[EndedSample]:
        """Run until a sample has ended, and take what comes into `inbox` meanwhile. Returns nothing when
        nothing is left. Calls `border` before each token."""
        while not self._ended:
            border()
            while inbox:
                turn = inbox.popleft()
                length, samples = len(turn.request.prompt_token_ids), range(len(turn.samples))
                if turn.after is not None:
                    before = turn.after.completion
                    self._recomputed += len(before.prompt_token_ids) + len(before.token_ids)
                self._queue.append(Group(turn=turn, length=length, waiting=deque(samples)))
            if abort.is_set():
                self._abort_all()
            elif self._gaps_are_due():
                self._close_gaps()
                self._admit()
            if self._rows:
                self._step()
            elif not self._queue:
                break
        ended, self._ended = self._ended, []
        return ended

    def _gaps_are_due(self) -> bool:
        done = sum(row.done for row in self._rows)
        if done == len(self._rows):
            return True
        free = self._max_batch - len(self._rows) + done
        waiting = self._queue or any(group.waiting for group in self._groups)
        if waiting and free * _COMPACT_SHARE >= self._max_batch:
            return True
        return done * _COMPACT_SHARE >= len(self._rows)

    # admission

    def _admit(self) -> None:
        """Fill the free rows: first with waiting samples of prompts in use, then with new prompts."""
        free = self._max_batch - len(self._rows)
        admitted: list[Row] = []
        new: list[Group] = []
        for group in self._groups:
            admitted += self._take(group, free - len(admitted))
        while self._queue and len(admitted) < free:
            group = self._queue.popleft()
            new.append(group)
            admitted += self._take(group, free - len(admitted))
        if not admitted:
            return
        self._cache.reserve(
            prompts=len(self._groups) + len(new),
            prompt_length=max(group.length for group in (*self._groups, *new)),
            rows=len(self._rows) + len(admitted),
            length=max(self._counts, default=0) + 1,
        )
        self._prefill(new)
        self._groups += new
        slot_of = {id(group): slot for slot, group in enumerate(self._groups)}
        self._cache.start(len(self._rows), [slot_of[id(row.group)] for row in admitted])
        # None: a prompt lost it while samples waited for it, and stack raises
        hidden = torch.stack([row.group.hidden for row in admitted])  # type: ignore[misc]
        self._rows += admitted
        self._counts += [0] * len(admitted)
        for group in self._groups:
            if not group.waiting:
                group.hidden = None
        self._plan = None
        self._last = torch.cat([self._last, self._sample(hidden, admitted)])

    def _take(self, group: Group, count: int) -> list[Row]:
        taken = [group.waiting.popleft() for _ in range(min(count, len(group.waiting)))]
        group.running += len(taken)
        return [
            Row.of(group.turn, i, model=self._model, group=group, cached_tokens=group.length if i else 0)
            for i in taken
        ]

    def _prefill(self, new: Sequence[Group]) -> None:
        """Compute the prompts, a bounded number of tokens at a time, and keep each one's last hidden
        state."""
        device, first_slot, start = self._skeleton.device, len(self._groups), 0
        while start < len(new):
            stop, tokens = start + 1, new[start].length
            while stop < len(new) and tokens + new[stop].length <= _PREFILL_TOKENS:
                tokens += new[stop].length
                stop += 1
            groups = new[start:stop]
            lengths = tuple(group.length for group in groups)
            ids = [i for group in groups for i in group.turn.request.prompt_token_ids]
            positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
            self._cache.plan = Prefill(
                lengths=lengths, slots=tuple(range(first_slot + start, first_slot + stop))
            )
            hidden = self._skeleton.hidden_states(torch.tensor(ids, device=device), positions, self._cache)
            ends = torch.tensor(lengths).cumsum(0) - 1
            for group, last in zip(groups, hidden[ends.to(device)], strict=True):
                group.hidden = last
            start = stop

    # decoding

    def _step(self) -> None:
        """Sample one token for every row."""
        if self._plan is None:
            self._plan = make_plan(self._groups, self._rows, self._counts, self._skeleton.device)
        else:
            self._plan.counts = self._plan.counts + 1
            self._plan.max_count += 1
            self._plan.masks = {}
        plan = self._cache.plan = self._plan
        self._cache.reserve(prompts=0, prompt_length=0, rows=0, length=plan.max_count + 1)
        positions = plan.prompt_lengths[plan.prompt_of] + plan.counts
        hidden = self._skeleton.hidden_states(self._last, positions, self._cache)
        self._counts = [count + 1 for count in self._counts]
        self._last = self._sample(hidden, self._rows)

    def _sample(self, hidden: Tensor, rows: Sequence[Row]) -> Tensor:
        """Sample and append each row's next token; report rows that it ends and mark them done. [R] int64."""
        states = [row.state for row in rows]
        tokens, logprobs = self._sampler.sample(self._skeleton.logits(hidden), states)
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            if row.done:
                continue
            ending = row.add(token, logprob, self._on_token)
            if ending is not None:
                self._finish(row, ending)
        return tokens

    def _finish(self, row: Row, ending: Ending) -> None:
        row.done = True
        row.group.running -= 1
        self._ended.append((row, ending))

    def _abort_all(self) -> None:
        for row in self._rows:
            if not row.done:
                self._finish(row, ("abort", None))
        for group in (*self._groups, *self._queue):
            for row in self._take(group, len(group.waiting)):
                self._finish(row, ("abort", None))
        self._queue.clear()
        self._groups, self._rows, self._counts, self._plan = [], [], [], None
        self._last = self._last[:0].clone()

    # compaction

    def _close_gaps(self) -> None:
        """Move the last rows, and the last prompts, over those that are finished."""
        moves, kept = _closing_moves([row.done for row in self._rows])
        if kept < len(self._rows):
            used = max(self._counts, default=0)
            self._cache.move_rows(moves, used=used)
            for source, target in moves:
                self._rows[target], self._counts[target] = self._rows[source], self._counts[source]
                self._last[target] = self._last[source]
            del self._rows[kept:], self._counts[kept:]
            self._last = self._last[:kept].clone()
            self._plan = None
        moves, kept = _closing_moves([not group.running and not group.waiting for group in self._groups])
        if kept < len(self._groups):
            used = max((self._groups[m[0]].length for m in moves), default=0)
            self._cache.move_prompts(moves, used=used)
            for source, target in moves:
                self._groups[target] = self._groups[source]
            del self._groups[kept:]


def make_plan(
    groups: Sequence[Group], rows: Sequence[Row], counts: Sequence[int], device: torch.device
) -> Decode:
    """The plan of the next step: `counts[r]` completion tokens of row r are stored."""
    slot_of = {id(group): slot for slot, group in enumerate(groups)}
    prompt_of = [slot_of[id(row.group)] for row in rows]
    members: list[list[int]] = [[] for _ in groups]
    for r, slot in enumerate(prompt_of):
        members[slot].append(r)
    most = max(len(m) for m in members)
    gather = [r for m in members for r in (m + [0] * (most - len(m)))]
    scatter = [0] * len(rows)
    for slot, m in enumerate(members):
        for j, r in enumerate(m):
            scatter[r] = slot * most + j
    lengths = [g.length for g in groups]
    return Decode(
        prompt_of=torch.tensor(prompt_of, device=device),
        prompt_lengths=torch.tensor(lengths, device=device),
        max_prompt=max(lengths),
        uniform_prompts=len(set(lengths)) == 1,
        gather=torch.tensor(gather, device=device),
        scatter=torch.tensor(scatter, device=device),
        identity=gather == list(range(len(rows))),
        counts=torch.tensor(counts, device=device),
        max_count=max(counts),
        uniform_counts=len(set(counts)) == 1,
        masks={},
    )


def _closing_moves(gone: Sequence[bool]) -> tuple[list[tuple[int, int]], int]:
    """(source, target) moves that fill gaps from the end, and how many entries are left."""
    kept = len(gone) - sum(gone)
    targets = [i for i in range(kept) if gone[i]]
    sources = [i for i in range(kept, len(gone)) if not gone[i]]
    return list(zip(sources, targets, strict=True)), kept
