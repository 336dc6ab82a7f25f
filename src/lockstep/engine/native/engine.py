"""Engine `native`: the trainer's layers, ops and logprob function, with a KV cache.

    requests ─► Scheduler ─► Generation ─► Runner ─► Layers ─► KVCache
                who runs      a step        sizes,    the        keys and
                and where     after the     CUDA      trainer's  values
                              other         graphs    modules

With a module that lockstep.invariant has converted, a token's logprob is bitwise the one that the trainer
computes for it later: `contract` says what that rests on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch

from lockstep.config.engine import EngineConfig
from lockstep.engine.embedded import EmbeddedEngine, end_of
from lockstep.engine.native.kv_cache import KVCache, Move, most_tokens
from lockstep.engine.native.peers import Chunk, Columns, Op, temperature_of
from lockstep.engine.native.runner import Layers, Pending, Runner
from lockstep.engine.native.scheduler import Admission, Sample, Scheduler
from lockstep.engine.sampling import is_shaped
from lockstep.engine.streaming import Ending, HeldKey, OnToken, Turn
from lockstep.errors import EngineError
from lockstep.models.forward import kernel_contract
from lockstep.models.load import LoadedModel
from lockstep.observe.metrics import Spans
from lockstep.protocols.engine import EngineStats
from lockstep.schema.contract import KernelContract
from lockstep.schema.rollout import SamplingParams
from lockstep.schema.weights import WeightUpdate

NAME = "native"
EndedSample = tuple[Sample, Ending]


class NativeEngine(EmbeddedEngine):
    """See EmbeddedEngine. The KV cache is sized for the samples that are there when the first of them begins;
    where requests say how long a trajectory may become, it is sized for all trajectories. It grows when
    nothing runs: turns beyond it wait for that, and keys of held trajectories are then computed again."""

    partial_rollouts = True

    def __init__(self, config: EngineConfig, *, model: LoadedModel) -> None:
        device = next(model.module.parameters()).device
        _check_device(device, model.dtype)
        as_trainer = model.execution != "eager"
        compiled = not config.eager and as_trainer
        self._layers = Layers(model.module, dtype=model.dtype, compiled=compiled, tp=model.tp)
        self.ranks = 1 if model.tp is None else model.tp.size
        self._module = self._layers.module
        super().__init__(NAME, config, model=model, vocab_size=self._layers.vocab_size)
        self._compiled, self._graphs = compiled, device.type == "cuda" and not config.eager
        self.contract: KernelContract | None = kernel_contract(
            self._module,
            attention="varlen",
            execution=model.execution if compiled else "eager",
            dtype=model.dtype,
            device=device,
            tp=self.ranks,
        )
        self.counts = Counts()
        self.ahead = 1 if device.type == "cuda" else 0
        """Number of steps that are launched before the previous one is read."""
        self._kv_cache: KVCache | None = None
        self._runner: Runner | None = None
        self._generation: Generation | None = None
        self._later: list[Sample] = []
        """Samples that wait until nothing runs, so that the KV cache may grow."""
        self._sampling: set[SamplingParams] = set()
        """Of all samples of the generation."""
        self._ended_samples: dict[HeldKey, Sample] = {}
        """The last sample of each trajectory that may go on."""
        self._owners: dict[tuple[int, ...], list[Sample]] = {}
        """Samples with the keys and values of each prompt."""
        self._most: int | None = None
        """Tokens of KV cache that memory allows, as of the beginning of the stream."""

    # a stream

    def _check(self, turn: Turn) -> None:
        super()._check(turn)
        most = self._most_keys(end_of(turn.request, self._model) - 1)
        if most is not None:
            self._refuse(turn, most)

    @torch.no_grad()
    def _run(self) -> list[EndedSample]:
        """Steps until one ends a sample; turns that come meanwhile join."""
        ended: list[EndedSample] = []
        self._holds_changed = True
        while not ended:
            self._border()
            if self._inbox or self._holds_changed:
                self._take_inbox()
            if self._abort.is_set():
                running = [] if self._generation is None else self._generation.abort()
                ended = [*running, *((sample, ("abort", None)) for sample in self._later)]
                self._retire()
                self._later = []
                break
            if self._generation is None or (self._later and self._generation.idle):
                self._start()
            assert self._generation is not None
            ended = self._generation.step(self._abort)
        self._ended_samples |= {_key(sample.turn, sample.index): sample for sample, _ in ended}
        return ended

    def _end(self) -> None:
        self._retire()
        self._ended_samples.clear()
        self._owners.clear()
        self._later, self._most = [], None

    def _retire(self) -> None:
        generation, self._generation = self._generation, None
        if generation is not None:
            if generation.idle:
                generation.drain()
            self.counts.preemptions += generation.scheduler.preemptions
            self._recomputed_tokens += generation.scheduler.recomputed_tokens
        for owners in self._owners.values():  # in place: samples that wait know the lists
            owners.clear()

    def _settle(self) -> None:
        if self._generation is not None:
            self._generation.drain()

    def _recompute(self) -> list[Sample]:
        if self.ranks > 1:
            self._require_idle("update_weights")
        if self._generation is None:
            return list(self._later)
        scheduler = self._generation.scheduler
        scheduler.recompute()
        ended = [sample for sample, _ in self._generation.ended]
        return [*ended, *scheduler.unfinished(), *self._later]

    # on several ranks

    def update_weights(self, update: WeightUpdate) -> None:
        """See EmbeddedEngine; of an engine that several ranks run together, each takes its part."""
        if self.ranks > 1 and update.part is not None:
            part = update.part
            update = dataclasses.replace(update, tensors=part.tensors, shapes=part.shapes)
        super().update_weights(update)

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """Around what the first of the engine's ranks samples, while the others are in `follow`."""
        try:
            yield
        finally:
            if self._layers.peers is not None:
                self._layers.peers.send(Op.END)

    @torch.no_grad()
    def follow(self) -> None:
        """Run the forwards of the engine's first rank until it is done.

        Raises:
            EngineError: out of memory.
            RuntimeError: torch's, when the first rank is gone or does not come within the deadline.
        """
        peers, pending = self._layers.peers, deque[Pending]()
        assert peers is not None and not peers.leads, "the first rank samples"
        self._require_ready()
        while True:
            op, words = peers.receive()
            if op is Op.END:
                return
            with self._explaining_memory():
                self._repeat(op, words, pending)

    def _repeat(self, op: Op, words: Columns, pending: deque[Pending]) -> None:
        runner = self._made_runner()
        if op is Op.USE:
            capacity = int(words[0])
            if self._kv_cache is None or self._kv_cache.capacity != capacity:
                runner.forget()
                self._kv_cache = None  # its memory first
                self._kv_cache = KVCache(self._layers.shape, capacity)
                self._kv_bytes = max(self._kv_bytes, self._kv_cache.num_bytes)
            runner.use(self._kv_cache)
        elif op is Op.MOVE:
            moves = words.reshape(-1, 3).tolist()
            runner.kv_cache.move([Move(source=a, target=b, count=n) for a, b, n in moves])
        elif op is Op.PREFILL:
            runner.prefill(Chunk.of_words(words))
        else:
            while len(pending) > self.ahead:  # its buffers on the host are about to be used again
                pending.popleft().wait()
            columns = words[2:].reshape(-1, int(words[0]))
            pending.append(runner.step(columns, temperature=temperature_of(int(words[1]))))

    def stats(self) -> EngineStats:
        if self._generation is None:
            self._kv_use = 0.0
            return super().stats()
        scheduler = self._generation.scheduler
        self._kv_use = scheduler.use
        stats = super().stats()
        recomputed = stats.recomputed_tokens + scheduler.recomputed_tokens
        return dataclasses.replace(stats, recomputed_tokens=recomputed)

    def _give_back(self) -> None:
        self._kv_cache = self._runner = None

    # samples

    def _take_inbox(self) -> None:
        """Let the turns of the inbox run: at once, or when nothing runs if the KV cache is too small. Keys of
        trajectories that do not go on are forgotten."""
        with self._turn:  # what is continued is in the inbox from the moment when it is no longer held
            turns = [self._inbox.popleft() for _ in range(len(self._inbox))]
            going_on = self._held.keys() | {_key(turn, 0) for turn in turns}
            self._holds_changed = False
        before = self._ended_samples
        self._ended_samples = {key: sample for key, sample in before.items() if key in self._held}
        for turn in turns:
            self._later += self._samples(turn, before)
        generation = self._generation
        if generation is None:
            return
        for key in before.keys() - going_on:
            generation.scheduler.forget(before[key])
        if generation.idle and not generation.scheduler.kept:
            return
        assert self._kv_cache is not None
        capacity = self._kv_cache.capacity
        joining = [sample for sample in self._later if sample.end - 1 <= capacity]
        self._later = [sample for sample in self._later if sample.end - 1 > capacity]
        if joining:
            together = [*generation.scheduler.unfinished(), *joining]
            roomy = self._needed(together, kept=generation.scheduler.kept) <= capacity
            generation.add(joining, mode=self._mode(joining), roomy=roomy)

    def _samples(self, turn: Turn, ended: Mapping[HeldKey, Sample]) -> list[Sample]:
        prompt = turn.handle.request.prompt_token_ids
        shares = turn.request.prompt_token_ids[: len(prompt)] == prompt
        owners = self._owners.setdefault(prompt, []) if shares else []
        trajectory = turn.handle.request.trajectory_tokens
        reach = min(len(prompt) + trajectory, self._model.max_positions) - 1 if trajectory and shares else 0
        before = ended.get(_key(turn, 0)) if turn.after is not None and shares else None
        computed = 0 if before is None else before.computed
        samples = [
            Sample.of(
                turn, i, model=self._model, owners=owners, before=before, reach=reach, computed=computed
            )
            for i in range(len(turn.samples))
        ]
        for sample in samples:
            if turn.request.begun and turn.request.begun[sample.index]:
                sample.computed = sample.known - 1
        return samples

    def _start(self) -> None:
        """Start a generation of all samples that wait; nothing runs now."""
        self._retire()
        samples, self._sampling = self._later, set()
        needed = self._needed(samples, kept=self._ended_samples.values())
        kv_cache, runner = self._sized(needed, samples)
        runner.use(kv_cache)
        scheduler = Scheduler(
            samples, kv_cache=kv_cache, max_rows=self._config.max_batch, roomy=needed <= kv_cache.capacity
        )
        self._generation = Generation(
            runner, scheduler, mode=self._mode(samples), counts=self.counts, on_token=self.on_token
        )
        self._later = []

    def _mode(self, more: Sequence[Sample]) -> Mode:
        """How to run `more` with the samples before them."""
        seen = self._sampling
        seen |= {sample.state.params for sample in more}
        temperatures = {params.temperature for params in seen}
        if len(temperatures) > 1 or any(is_shaped(params) for params in seen):
            return Mode(ahead=0, temperature=None)
        return Mode(ahead=self.ahead, temperature=temperatures.pop())

    def _needed(self, samples: Sequence[Sample], *, kept: Collection[Sample] = ()) -> int:
        """Tokens of KV cache with which all that can run together, and all trajectories, fit at full
        length."""
        going_on = {sample.before for sample in samples}
        held = [sample for sample in kept if sample not in going_on]
        together = heapq.nlargest(
            self._config.max_batch, (sample.most_keys for sample in samples if not sample.reach)
        )
        trajectories = sum(sample.most_keys for sample in samples if sample.reach)
        return sum(together) + trajectories + sum(sample.reach or sample.known for sample in held)

    def _most_keys(self, needed: int) -> int | None:
        """None if a sample that needs so many tokens of KV cache can fit; else how many there can be."""
        have = 0 if self._kv_cache is None else self._kv_cache.capacity
        if needed <= have:
            return None
        config, shape = self._config, self._layers.shape
        most = config.kv_cache_limit
        if most is None:
            if self._most is None:
                self._most = most_tokens(shape, config.memory_fraction, held=have * shape.token_bytes)
            most = max(have, self._most)
        return None if needed <= most else most

    def _sized(self, needed: int, samples: Sequence[Sample]) -> tuple[KVCache, Runner]:
        """A KV cache for the needed tokens, as far as memory allows; it is kept between streams, so that CUDA
        graphs stay valid."""
        runner = self._made_runner()
        tokens = self._config.kv_cache_limit or needed
        if self._kv_cache is None or self._kv_cache.capacity < tokens:
            self._grow_kv_cache(tokens)
        longest = max(samples, key=lambda sample: sample.end)
        if self._kv_cache is None or longest.end - 1 > self._kv_cache.capacity:  # memory was taken meanwhile
            self._refuse(longest.turn, 0 if self._kv_cache is None else self._kv_cache.capacity)
        return self._kv_cache, runner

    def _made_runner(self) -> Runner:
        if self._runner is None:
            self._runner = Runner(
                self._layers,
                max_rows=self._config.max_batch,
                chunk=self._config.prefill_chunk,
                max_keys=self._model.max_positions,
                compiled=self._compiled,
                graphs=self._graphs,
            )
        return self._runner

    def _grow_kv_cache(self, tokens: int) -> None:
        before = 0 if self._kv_cache is None else self._kv_cache.capacity
        shape, config = self._layers.shape, self._config
        if config.kv_cache_limit is None:
            # By a quarter at least: another cache costs all CUDA graphs.
            tokens = max(tokens, before + before // 4)
            held = before * shape.token_bytes
            tokens = max(before, min(tokens, most_tokens(shape, config.memory_fraction, held=held)))
        if tokens > before:
            if self._runner is not None:
                self._runner.forget()
            self._kv_cache = None  # its memory first
            self._kv_cache = KVCache(shape, tokens, peers=self._layers.peers)
            self._kv_bytes = max(self._kv_bytes, self._kv_cache.num_bytes)

    def _refuse(self, turn: Turn, capacity: int) -> NoReturn:
        request, needed = turn.request, end_of(turn.request, self._model) - 1
        remedy = (
            "raise engine.kv_cache_tokens"
            if self._config.kv_cache_limit is not None
            else "raise engine.memory_fraction, because the device's memory allows no more"
        )
        raise EngineError(
            f"too-long: request {turn.index}: a sample with a prompt of {len(request.prompt_token_ids)} "
            f"tokens and max_tokens = {request.sampling.max_tokens} can need {needed} tokens of KV cache, "
            f"but the cache holds only {max(0, capacity)}; {remedy}, or lower sampling.max_tokens"
        )

    def _out_of_memory(self) -> tuple[str, str]:
        config = self._config
        return (
            "engine.memory_fraction",
            f"engine {NAME} ran out of memory with a KV cache of {self._kv_bytes} bytes, engine.max_batch "
            f"= {config.max_batch} and engine.prefill_chunk = {config.prefill_chunk}; lower "
            "engine.memory_fraction or engine.kv_cache_tokens, or one of these",
        )


def _key(turn: Turn, sample: int) -> HeldKey:
    """The name of the trajectory of a sample of the turn."""
    return turn.handle, turn.samples[sample]


def _check_device(device: torch.device, dtype: torch.dtype) -> None:
    if device.type == "cuda" and dtype not in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        raise EngineError(
            f"unsupported-combination: engine {NAME} uses varlen attention, but CUDA flash kernels do not "
            f"support {name}; set model.dtype = 'bfloat16', or engine.name = 'hf'"
        )


# Samples that run together: a step is launched, and while it runs the one before it is read.


@dataclass(slots=True)
class Counts:
    """Counters of an engine since its construction."""

    steps: int = 0
    step_rows: int = 0
    wasted_rows: int = 0
    """Rows that were computed for samples that had ended."""
    prefill_forwards: int = 0
    prefill_tokens: int = 0
    preemptions: int = 0
    spans: Spans = field(default_factory=Spans)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """How steps are launched."""

    ahead: int
    """Steps that are launched before the first of them is read: 1 keeps a GPU busy, and costs a sample that
    ends one row; 0 where rows depend on tokens that only the host knows."""
    temperature: float | None
    """Of all samples; None: samples differ, or have more settings."""


class Generation:
    """Runs the samples of a scheduler until each has ended, or an abort.

    Args:
        mode: how steps are launched and tokens drawn; `add` may replace it.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        *,
        mode: Mode,
        counts: Counts,
        on_token: OnToken | None = None,
    ) -> None:
        self._runner, self.scheduler = runner, scheduler
        self.mode = mode
        self._counts, self._on_token = counts, on_token
        self._pending: deque[tuple[list[Sample], Pending]] = deque()
        self.ended: list[EndedSample] = []
        """Samples that have ended and were not returned yet."""

    @property
    def idle(self) -> bool:
        """Whether no sample runs or waits, also to be returned: it may be replaced."""
        return not self.ended and not self.scheduler.unfinished()

    def add(self, samples: Iterable[Sample], *, mode: Mode, roomy: bool) -> None:
        """Let more samples run, between two steps."""
        self.scheduler.add(samples, roomy=roomy)
        self.mode = mode
        # The new mode may draw from what the host knows: then every token must have been read.
        while len(self._pending) > mode.ahead:
            self._read()

    def step(self, abort: threading.Event) -> list[EndedSample]:
        """Launch a step and read the one that is due; returns the samples that it ended, or those that ended
        before. Must not be called when it is idle."""
        if self.ended:
            ended, self.ended = self.ended, []
            return ended
        launched = self._launch(abort)
        if self._pending and (not launched or len(self._pending) > self.mode.ahead):
            self._read()
        else:
            assert launched or abort.is_set(), "samples wait, and nothing runs"
        ended, self.ended = self.ended, []
        return ended

    def abort(self) -> list[EndedSample]:
        """End all samples; it cannot go on afterwards."""
        return [*self.ended, *((sample, ("abort", None)) for sample in self.scheduler.unfinished())]

    def drain(self) -> None:
        """Read every step that was launched."""
        while self._pending:
            self._read()

    def _launch(self, abort: threading.Event) -> bool:
        """Launch the next step; False when there is none now, or an abort came."""
        scheduler, spans = self.scheduler, self._counts.spans
        with spans("schedule"):
            scheduler.advance()
            admission = scheduler.admit()
        if admission is not None:
            with spans("prefill"):
                self._bring_up(admission, abort)
        rows = list(scheduler.rows)
        if not rows or abort.is_set():
            return False
        with spans("launch"):
            temperature = self.mode.temperature
            states = None if temperature is not None else [row.state for row in rows]
            pending = self._runner.step(scheduler.columns(), temperature=temperature, states=states)
        for row in rows:
            row.in_flight += 1
        self._pending.append((rows, pending))
        self._counts.steps += 1
        self._counts.step_rows += len(rows)
        return True

    def _bring_up(self, admission: Admission, abort: threading.Event) -> None:
        # In this order: a copy reads what the prompts' forwards wrote, and the rest attends to what was
        # copied.
        for parts in (admission.prompts, admission.rest):
            if parts is admission.rest:
                self.scheduler.copies(admission)
            for chunk in self.scheduler.chunks(
                parts, tokens=self._runner.chunk_for, documents=self._runner.documents
            ):
                if abort.is_set():
                    return
                self._runner.prefill(chunk)
                self._counts.prefill_forwards += 1
                self._counts.prefill_tokens += len(chunk.token_ids)

    def _read(self) -> None:
        """Append the tokens of the oldest unread step, and note the samples that they end."""
        rows, pending = self._pending.popleft()
        with self._counts.spans("wait"):
            tokens, logprobs = pending.read()
        with self._counts.spans("record"):
            for sample, token, logprob in zip(rows, tokens, logprobs, strict=True):
                sample.in_flight -= 1
                if sample.done:
                    self._counts.wasted_rows += 1
                    continue
                ending = sample.add(token, logprob, self._on_token)
                if ending is not None:
                    self.scheduler.finish(sample)
                    self.ended.append((sample, ending))
