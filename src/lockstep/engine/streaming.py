"""The streaming interface of an engine, and `generate` on top of it: one implementation for all engines.

    submit ────┐                                           ┌──► Finished ──► consumer
               ├──► _check ──► _inbox ──► _advance, again ──┤                    │
    continue_ ─┘     any thread           one thread        └──► _end            │
        └───────────────── the whole context as a prompt, the same seed ◄────────┘

A continued sample is an ordinary request with `after`. An engine may keep the keys of a sample that has
ended for as long as it is in `_held`; a continued sample is in `_inbox` before it leaves `_held`.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.engine.spec import Decoding, RequestCheck, completion_text
from lockstep.errors import EngineError
from lockstep.protocols.engine import EngineStats, Finished, Handle, OnCompletion
from lockstep.schema.rollout import Completion, FinishReason, GenerationRequest, SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Turn:
    """A unit of sampling: a submitted request, or the next turn of one of its samples."""

    handle: Handle
    request: GenerationRequest
    """In a later turn: a single sample whose prompt is the whole context."""
    samples: tuple[int, ...]
    """The index in `handle.request` of each sample of `request`."""
    after: Finished | None = None
    """The previous turn. None in the first turn."""

    @property
    def index(self) -> int:
        """Number of the request in error messages. Third-party engines use it, too."""
        return self.handle.index

    def drawn_seed(self, sample: int) -> int:
        """Return the seed of a sample for an engine whose noise does not depend on positions: the sample's
        own seed in the first turn, another one in each later turn."""
        seed = self.request.seeds[sample]
        return seed if self.after is None else turn_seed(seed, len(self.request.prompt_token_ids))


def version_counts(marks: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Completion.versions of a sample.

    Args:
        marks: (version, tokens up to its last), in order; the last one is of the version that ended it.
    """
    counts, start, last = list[tuple[int, int]](), 0, 0
    for version, stop in marks:
        if counts and counts[-1][0] == version:
            counts[-1] = (version, counts[-1][1] + stop - start)
        elif stop > start:
            counts.append((version, stop - start))
        start, last = stop, version
    return tuple(counts) if len(counts) > 1 or (counts and counts[0][0] != last) else ()


def turn_seed(seed: int, position: int) -> int:
    """Return the 63-bit seed of a turn that starts at `position` of its trajectory: the first 8 bytes of
    BLAKE2b over both numbers, without the top bit."""
    # A hash instead of a sum: seed + position would be the seed of another sample in the batch.
    digest = hashlib.blake2b(f"lockstep turn {seed} {position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


OnToken = Callable[[int, int, Sequence[int]], None]
"""Called after each token with (request number, sample index, token ids of the turn so far)."""
Ended = tuple[Turn, int, Completion]
"""A turn, the index of a sample in its request, and the completion."""
HeldKey = tuple[Handle, int]
"""Handle and sample index: the name of a trajectory in an engine."""
HOLD_SECONDS = 3600.0
_LOOK_SECONDS = 0.5
"""Between two looks for an abort while every turn is held."""


class Streaming:
    """Base class of engines. A subclass implements:

        _require_ready()    raise EngineError unless the engine can sample now
        _check(turn)        raise EngineError for a turn that it cannot sample; any thread calls it
        _advance()          take the turns of `_inbox`, work until samples have ended, return them;
                            end all samples if `_abort` is set
        _end()              all samples have ended or were dropped: free caches

    An engine with `pauses` calls `_border` in `_advance` between two tokens, and implements `_settle`.

    `_advance` is called in the thread that iterates `finished`. It may read `_inbox` only at its start; turns
    that arrive while it works then wait until something ends. An engine that can only sample whole batches
    takes all of `_inbox`, samples it, and returns it.

    `sleep` and `update_weights` must start with `_require_idle`, and `close` with `_close_stream`.
    """

    pauses = False
    """Whether the engine can `pause`."""
    partial_rollouts = False
    """Whether it goes on with samples that an earlier request began."""

    def __init__(self, name: str) -> None:
        self.name = name
        """Name of the engine in messages."""
        self._turn = threading.Condition()
        """Guards the fields below; notified when the engine becomes idle."""
        self._inbox: deque[Turn] = deque()
        self._ended: deque[Ended] = deque()
        self._open = 0
        """Number of samples that were submitted and not yet yielded."""
        self._held: dict[HeldKey, float] = {}
        """Samples that were yielded and wait for `continue_` or `release`, with their deadlines."""
        self._holds_changed = False
        """Whether a sample was released since `_advance` last looked."""
        self._running = False
        """Whether a generator of `finished` is active."""
        self._consumer: int | None = None
        """The thread of that generator."""
        self._in_generate = False
        self._advancing = self._standing = False
        """Whether a thread is in `_advance`, and whether it waits there for `resume`."""
        self._resume_by: float | None = None
        """The deadline of a pause; None: the engine is not paused."""
        self._submitted = 0
        """Number of requests since the engine was last idle."""
        self._abort = threading.Event()
        self._requests = 0
        self._seconds = 0.0
        """Seconds spent in `_advance`."""

    # what an engine implements

    def _require_ready(self) -> None:
        raise NotImplementedError

    def _check(self, turn: Turn) -> None:
        raise NotImplementedError

    def _advance(self) -> Sequence[Ended]:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError

    # the protocol

    def submit(self, request: GenerationRequest) -> Handle:
        """See lockstep.protocols.SamplesTokens."""
        with self._turn:
            self._require_no_generate("submit")
            return self._submit(request)

    def continue_(
        self, finished: Finished, token_ids: Sequence[int] = (), *, sampling: SamplingParams
    ) -> None:
        """See lockstep.protocols.SamplesTokens."""
        before = finished.completion
        request = GenerationRequest(
            prompt_token_ids=(*before.prompt_token_ids, *before.token_ids, *token_ids),
            sampling=sampling,
            seeds=(before.seed,),
        )
        turn = Turn(handle=finished.handle, request=request, samples=(finished.sample,), after=finished)
        with self._turn:
            self._require_no_generate("continue_")
            self._require_ready()
            self._queue(turn)
            self._held.pop((finished.handle, finished.sample), None)
            self._turn.notify_all()

    def hold(self, finished: Finished, *, seconds: float = HOLD_SECONDS) -> None:
        """See lockstep.protocols.HoldsTurns."""
        with self._turn:
            self._require_no_generate("hold")
            self._require_ready()
            self._held[finished.handle, finished.sample] = time.monotonic() + seconds

    def release(self, finished: Finished) -> None:
        """See lockstep.protocols.HoldsTurns."""
        with self._turn:
            if self._held.pop((finished.handle, finished.sample), None) is None:
                return
            self._holds_changed = True
            if not self._open and not self._held and not self._running:
                self._become_idle()
            self._turn.notify_all()

    def pause(self, *, seconds: float = HOLD_SECONDS) -> None:
        """See lockstep.protocols.Pauses."""
        if not self.pauses:
            raise EngineError(
                f"unsupported-combination: engine {self.name} cannot pause between two tokens; wait for the "
                "end of the stream, or set engine.name = 'native'",
                setting="engine.name",
            )
        with self._turn:
            if self._resume_by is not None:
                raise EngineError(f"wrong-state: engine {self.name} is already paused; call resume() first")
            deadline = self._resume_by = time.monotonic() + seconds
            if not self._advancing:
                self._settle()
            while self._advancing and not self._standing and self._consumer != threading.get_ident():
                if not self._turn.wait(deadline - time.monotonic()):
                    self._resume_by = None
                    raise EngineError(
                        f"deadline: engine {self.name} did not reach a token border within {seconds:g} s"
                    )

    def resume(self) -> None:
        """See lockstep.protocols.Pauses."""
        with self._turn:
            self._resume_by = None
            self._turn.notify_all()

    def finished(self, *, wait: bool = True) -> Generator[Finished, None, None]:
        """See lockstep.protocols.SamplesTokens and HoldsTurns."""
        self._require_no_generate("finished")
        yield from self._stream(wait=wait)

    def generate(
        self, requests: Sequence[GenerationRequest], *, on_completion: OnCompletion | None = None
    ) -> list[list[Completion]]:
        """Sample every request. Returns one list per request, in request order, with samples in seed order.

        Args:
            on_completion: called in this thread as soon as a sample finishes.

        Raises:
            EngineError: a request is invalid, the engine is not ready or busy, or as `finished`. The call
            then
                leaves nothing behind.
        """
        self._require_ready()
        with self._turn:
            self._require_idle("another generate")
            self._in_generate = True
        try:
            numbers = {handle: i for i, handle in enumerate(self._submit_all(requests))}
            results: list[dict[int, Completion]] = [{} for _ in requests]
            with contextlib.closing(self._stream()) as stream:
                for done in stream:
                    number = numbers[done.handle]
                    results[number][done.sample] = done.completion
                    if on_completion is not None:
                        on_completion(number, done.sample, done.completion)
            return [[group[i] for i in sorted(group)] for group in results]
        except BaseException:
            self._drop()
            raise
        finally:
            with self._turn:
                self._in_generate = False

    def abort(self) -> None:
        """See lockstep.protocols.SamplesTokens; no effect if nothing is submitted."""
        self._abort.set()

    # for the engines

    def submit_all(self, requests: Sequence[GenerationRequest]) -> list[Handle]:
        """Submit requests that are known together, which replicas spread evenly; see `submit`."""
        with self._turn:
            self._require_no_generate("submit")
            return self._submit_all(requests)

    def _submit_all(self, requests: Sequence[GenerationRequest]) -> list[Handle]:
        return [self._submit(request) for request in requests]

    def _submit(self, request: GenerationRequest) -> Handle:
        self._require_ready()
        if request.begun and not self.partial_rollouts:
            raise EngineError(
                f"unsupported-combination: engine {self.name} cannot go on with samples that an earlier "
                "request began; set engine.name = 'native', or rollout.max_lag = 0",
                setting="engine.name",
            )
        with self._turn:
            if self._is_idle():
                self._submitted = 0
            handle = Handle(request=request, index=self._submitted)
            self._queue(Turn(handle=handle, request=request, samples=tuple(range(len(request.seeds)))))
            self._submitted += 1
            self._requests += 1
        return handle

    def _queue(self, turn: Turn) -> None:
        """Accept a turn, or raise. The caller holds `_turn`."""
        if self._is_idle():
            self._abort.clear()
        self._accept(turn)
        self._open += len(turn.samples)

    def _accept(self, turn: Turn) -> None:
        self._check(turn)
        if turn.samples:
            self._inbox.append(turn)

    def _is_idle(self) -> bool:
        return not self._open and not self._held and not self._running

    def _require_idle(self, what: str) -> None:
        """Raise EngineError while samples are submitted and not yielded, or a stream is active."""
        if not self._is_idle():
            raise EngineError(
                f"wrong-state: engine {self.name} is already generating: {self._open} samples have not been "
                f"yielded, and {len(self._held)} are held; exhaust finished() before {what}, or close it, "
                "and release what is held"
            )

    def _wait_until_idle(self, what: str, *, deadline: float) -> None:
        """Wait until the stream of another thread has ended. The caller holds `_turn`.

        Args:
            deadline: time.monotonic().

        Raises:
            EngineError: the stream did not end in time, or belongs to this thread.
        """
        while not self._is_idle():
            if self._consumer in (None, threading.get_ident()):  # nobody else would end it
                self._require_idle(what)
            if not self._turn.wait(deadline - time.monotonic()):
                raise EngineError(
                    f"deadline: engine {self.name}: {self._open} samples were still running when the "
                    f"update's deadline passed; {what} after generate has returned, or abort it"
                )

    def _require_no_generate(self, what: str) -> None:
        if self._in_generate:
            raise EngineError(
                f"wrong-state: engine {self.name} is already generating: {what}() cannot be called during "
                "generate(), which has all its requests; use submit and finished instead of generate"
            )

    # the stream

    def _stream(self, *, wait: bool = True) -> Generator[Finished, None, None]:
        self._require_ready()
        with self._turn:
            if self._running:
                raise EngineError(
                    f"wrong-state: engine {self.name} is already generating, in another finished() stream"
                )
            self._running = True
            self._consumer = threading.get_ident()
        ended = False
        try:
            while (done := self._next(wait=wait)) is not None:
                yield done
            ended = True
        finally:
            if not ended:  # else what is there now is another stream's
                self._drop()

    def _next(self, *, wait: bool = True) -> Finished | None:
        """Return the next sample. None if none are left, or, without `wait`, none but held ones."""
        while True:
            with self._turn:
                if self._ended:
                    turn, sample, completion = self._ended.popleft()
                    self._open -= 1
                    return Finished(handle=turn.handle, sample=turn.samples[sample], completion=completion)
                if not self._open:
                    if self._held and wait:
                        self._wait_for_held()
                        continue
                    if self._held:
                        self._running, self._consumer = False, None
                    else:
                        self._become_idle()
                    return None
                self._wait_for_resume()
                self._advancing = True
            started = time.perf_counter()
            try:
                ended = self._advance()
            finally:
                self._seconds += time.perf_counter() - started
                with self._turn:
                    self._advancing = False
                    self._turn.notify_all()
            with self._turn:
                self._ended.extend(ended)
                if not ended and self._open:
                    raise EngineError(
                        f"wrong-result: engine {self.name} lost {self._open} samples: it has no work left, "
                        "but they were not returned"
                    )
                if self._abort.is_set() and len(self._ended) == self._open:
                    self._abort.clear()

    def _wait_for_held(self) -> None:
        """Wait a little for a held sample to be continued or released. The caller holds `_turn`."""
        if self._abort.is_set():  # nothing runs that it could end
            self._abort.clear()
        left = min(self._held.values()) - time.monotonic()
        if left <= 0:
            raise EngineError(
                f"deadline: engine {self.name}: {len(self._held)} samples are held, and one of them was "
                "neither continued nor released in time; call continue_ or release, or raise the seconds of "
                "hold"
            )
        self._turn.wait(min(left, _LOOK_SECONDS))

    def _border(self) -> None:
        """Stand still between two tokens while the engine is paused."""
        if self._resume_by is None:
            return
        self._settle()
        with self._turn:
            self._standing = True
            self._turn.notify_all()
            try:
                self._wait_for_resume()
            finally:
                self._standing = False

    def _settle(self) -> None:
        """Finish the tokens that are being computed. Engines that compute one at a time have none."""

    def _wait_for_resume(self) -> None:
        """Wait until the engine is not paused. The caller holds `_turn`."""
        while (deadline := self._resume_by) is not None and not self._abort.is_set():
            if not self._turn.wait(min(_LOOK_SECONDS, deadline - time.monotonic())) and (
                time.monotonic() > deadline
            ):
                raise EngineError(
                    f"deadline: engine {self.name} was paused and not resumed in time; call resume()"
                )

    def _drop(self) -> None:
        """Drop every sample that was not yielded or is held, and become idle."""
        with self._turn:
            if not self._is_idle():
                self._inbox.clear()
                self._ended.clear()
                self._held.clear()
                self._open = 0
                self._become_idle()

    def _close_stream(self) -> None:
        """Drop samples that were not yielded, unless another thread runs them."""
        if self._consumer in (None, threading.get_ident()):
            self._drop()

    def _become_idle(self) -> None:
        try:
            self._end()
        finally:
            self._running = False
            self._consumer = None
            self._turn.notify_all()


# Bases of the engines: what does not depend on who computes the tokens.


Ending = tuple[FinishReason, int | str | None]
"""Finish reason of a sample, and the stop token or string that ended it."""


class ModelEngine(Streaming):
    """Base of engines for one model: tracks its state (awake, asleep, closed, broken), checks requests and
    counts tokens."""

    def __init__(
        self,
        name: str,
        *,
        vocab_size: int,
        max_positions: int,
        tokenizer: Any | None,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        super().__init__(name)
        self._tokenizer, self._eos_token_ids = tokenizer, eos_token_ids
        self._check_request = RequestCheck(
            vocab_size=vocab_size,
            max_positions=max_positions,
            tokenizer=tokenizer,
            eos_token_ids=eos_token_ids,
        )
        self._state = "awake"
        self._policy_version = 0
        self._prompt_tokens = self._cached_tokens = self._completion_tokens = 0
        self._kv_bytes = 0
        """High-water mark of the KV cache, in bytes."""
        self._kv_use: float | None = None
        self._restarts = 0
        self._recomputed_tokens = 0

    def _check(self, turn: Turn) -> None:
        self._check_request(turn.request, index=turn.index)

    def _require_open(self) -> None:
        if self._state == "closed":
            raise EngineError(f"wrong-state: engine {self.name} is closed; build a new one")
        if self._state == "broken":
            raise EngineError(
                f"wrong-state: engine {self.name} failed earlier and cannot go on; build a new one"
            )

    def _require_awake(self, what: str) -> None:
        self._require_open()
        if self._state != "awake":
            raise EngineError(f"wrong-state: engine {self.name} is {self._state}; call wake() before {what}")

    def _require_ready(self) -> None:
        if self._state != "awake":
            self._require_awake("generate")

    def decoding(self, sampling: SamplingParams) -> Decoding | None:
        """Return how completions sampled with `sampling` are decoded. None without a tokenizer."""
        if self._tokenizer is None:
            return None
        return Decoding.of(self._tokenizer, sampling, eos_token_ids=self._eos_token_ids)

    def _completion(  # the request, the sample's seed, and what was sampled
        self,
        request: GenerationRequest,
        seed: int,
        *,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        ending: Ending,
        cached_tokens: int,
    ) -> Completion:
        """Count a finished sample and return its completion."""
        reason, stop = ending
        self._prompt_tokens += len(request.prompt_token_ids)
        self._cached_tokens += cached_tokens
        begun = request.begun[request.seeds.index(seed)] if request.begun else ()
        self._completion_tokens += len(token_ids) - sum(len(span.token_ids) for span in begun)
        return Completion(
            prompt_token_ids=request.prompt_token_ids,
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs),
            finish_reason=reason,
            stop_reason=stop,
            text=completion_text(
                self.decoding(request.sampling),
                token_ids,
                stop=stop if isinstance(stop, str) else None,
                keep=request.sampling.keep_stop,
            ),
            seed=seed,
            engine=self.name,
            policy_version=self._policy_version,
            cached_tokens=cached_tokens,
        )

    def stats(self) -> EngineStats:
        """See lockstep.protocols.InferenceEngine."""
        return EngineStats(
            policy_version=self._policy_version,
            requests=self._requests,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            completion_tokens=self._completion_tokens,
            generate_seconds=self._seconds,
            kv_cache_bytes=self._kv_bytes,
            queued=self._open,
            kv_cache_use=self._kv_use,
            restarts=self._restarts,
            recomputed_tokens=self._recomputed_tokens,
        )
