from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeGuard

from torch import Tensor

from lockstep.protocols.train import TrainBackend
from lockstep.schema.contract import KernelContract
from lockstep.schema.rollout import Border, Completion, GenerationRequest, SamplingParams
from lockstep.schema.weights import MemoryReport, Transport, UpdateSession, WeightBucket, WeightUpdate

OnCompletion = Callable[[int, int, Completion], None]
"""Called with (request index, sample index, completion) as soon as a sample finishes."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Handle:
    """A submitted request. Compared by identity, so it can be a dict key."""

    request: GenerationRequest
    index: int = 0
    """Number of the request since the engine was last idle; error messages use it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A sample whose turn has ended."""

    handle: Handle
    sample: int
    """Index in `handle.request.seeds`."""
    completion: Completion
    """The completion of this turn; its prompt is the whole context before it."""
    more: bool = False
    """Others have ended as well, and come next, before the engine works on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """Totals since the engine started."""

    policy_version: int
    requests: int
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose computation was shared or cached."""
    completion_tokens: int
    generate_seconds: float
    kv_cache_bytes: int
    """High-water mark."""
    queued: int = 0
    """Accepted samples that have not finished."""
    kv_cache_use: float | None = None
    """Share of the KV cache in use. None if the engine does not report it."""
    restarts: int = 0
    """Restarts of a server that died."""
    recomputed_tokens: int = 0
    """Tokens whose keys and values were computed again, because their memory had been needed for others."""

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens per second of `generate`; 0 before the first call."""
        return self.completion_tokens / self.generate_seconds if self.generate_seconds else 0.0

    @property
    def cache_hit_rate(self) -> float:
        """Share of prompt tokens that were not computed; 0 before the first."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class SamplesTokens(Protocol):
    """Token ids in, token ids and logprobs out.

        handles = [engine.submit(request) for request in requests]
        for done in engine.finished():
            reply = environment(done.completion)              # token ids, or None: the trajectory is over
            if reply is not None:
                engine.continue_(done, reply, sampling=next_turn)

    The engine stands still while `environment` works: see HoldsTurns.
    `submit`, `continue_` and `abort` may be called from any thread, even while another thread waits in
    `finished`. lockstep.engine.streaming.Streaming implements all of this on top of an engine's `_run`.
    """

    def submit(self, request: GenerationRequest) -> Handle:
        """Queue a request and return at once. Raises EngineError if the request is invalid or can never fit;
        earlier requests are not affected."""
        ...

    def continue_(
        self, finished: Finished, token_ids: Sequence[int] = (), *, sampling: SamplingParams
    ) -> None:
        """Queue the next turn of a sample; its Finished has the same handle and sample index.

        The prompt of the turn is the prompt and the tokens of `finished`, followed by `token_ids`. Its seed
        is the sample's. An engine that draws Lockstep's noise continues as if the sample had never ended,
        since the noise is a function of (seed, position); other engines sample with a seed derived from both.

        Args:
            finished: from this stream, an earlier one, or another engine with the same model. token_ids:
            tokens that the policy did not write, such as a tool's reply. Empty to continue a sample
                that ended with "length" or "abort".
            sampling: for this turn only. `max_tokens` limits the turn, not the trajectory: with a budget for
            the
                trajectory, pass the smaller of the turn's limit and what is left. To finish a sample that was
                cut after k tokens, pass `max_tokens - k` (and `min_tokens - k`, at least 0). min_tokens,
                output penalties and stop strings apply to the turn's own tokens.

        Raises:
            EngineError: as `submit`, for example if the context leaves no room for a token.
        """
        ...

    def finished(self) -> Generator[Finished, None, None]:
        """Run the submitted samples and yield each as its turn ends; stop when none are left.

        In-process engines work in the caller's thread while it waits for the next item. An exception, or
        closing the generator early, drops every sample that was not yielded.

        Raises:
            EngineError: another thread or an outer loop already runs this engine, memory ran out, logits are
            not
                finite, or a server died for good.
        """
        ...

    def generate(
        self, requests: Sequence[GenerationRequest], *, on_completion: OnCompletion | None = None
    ) -> list[list[Completion]]:
        """Submit all requests and run them to the end. Returns one list per request, in request order, with
        samples in seed order. Raises EngineError, also if other samples are submitted; the call then leaves
        nothing behind."""
        ...

    def abort(self) -> None:
        """End every sample that was submitted and not yielded, with finish_reason "abort" and its tokens so
        far. These samples are still yielded; until then, new samples may be aborted as well."""
        ...


class HoldsTurns(SamplesTokens, Protocol):
    """An engine whose stream stays open while trajectories wait for something else, such as a tool:

        for done in engine.finished():
            engine.hold(done)         # before the next item is asked for
            ...                       # in another thread: continue_(done, reply), or release(done)

    A sample that is continued before the next item is asked for need not be held. Turns that come back run
    before first turns.
    """

    def hold(self, finished: Finished, *, seconds: float = ...) -> None:
        """Expect another turn of a sample that was just yielded: until `continue_` or `release` the stream
        does not end, and the sample's keys are kept where the engine can, and recomputed where their memory
        was needed meanwhile. The bits are the same.

        Args:
            seconds: after which a stream that has nothing else to do raises EngineError.
        """
        ...

    def release(self, finished: Finished) -> None:
        """Expect no other turn. May be called from any thread, and more than once."""
        ...

    def finished(self, *, wait: bool = True) -> Generator[Finished, None, None]:
        """As SamplesTokens. While samples are held, wait for them when nothing else is left; without `wait`,
        return instead: the samples stay held, and the next call goes on."""
        ...


class Pauses(SamplesTokens, Protocol):
    """An engine that can stand still between two tokens of its samples, which keep their place."""

    pauses: bool
    """Whether it can; `pause` raises EngineError otherwise."""

    def pause(self, *, seconds: float = ...) -> None:
        """Return once no token is being computed, and compute none until `resume`. May be called from any
        thread. An abort goes through.

        Args:
            seconds: after which a stream that waits for `resume` raises EngineError.
        """
        ...

    def resume(self) -> None:
        """Go on. No effect if the engine is not paused."""
        ...


class CutsAtBorders(SamplesTokens, Protocol):
    """An engine that samples while the trainer works, and cuts samples off where logical time says."""

    border: Border | None
    """Set before the samples of a stream are submitted, and for this stream alone."""


def cuts_at_borders(engine: SamplesTokens) -> TypeGuard[CutsAtBorders]:
    """Return whether the engine can do so."""
    return getattr(engine, "cuts_at_borders", False)


def holds_turns(engine: SamplesTokens) -> TypeGuard[HoldsTurns]:
    """Return whether the engine can hold turns."""
    return hasattr(engine, "hold")


class InferenceEngine(SamplesTokens, Protocol):
    """An engine gets weights through one of the two protocols below; lockstep.transfer handles both.
    `external` says which one, and how lockstep.engine.build.make_engine constructs the engine:

        Engine(config, model=LoadedModel)    external = False, SharesWeights
        Engine(config, spec=EngineSpec)      external = True, ReceivesWeights
    """

    external: bool
    """Class attribute: whether the engine has its own copy of the weights, which are sent to it."""

    def sleep(self) -> None:
        """Free as much memory as possible; sampling raises an error until `wake`. Raises EngineError while
        samples are running."""
        ...

    def wake(self) -> None: ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...


class SharesWeights(InferenceEngine, Protocol):
    """An engine over the trainer's modules, or over modules in the same process."""

    contract: KernelContract | None
    """The kernels of the forward pass, if they are batch-invariant. None: bits may differ."""

    def update_weights(self, update: WeightUpdate) -> None:
        """Switch to this version of the weights and drop every cache made with an older one. Raises
        EngineError, before anything changes, while samples are running. A paused engine may take the update:
        its samples then go on with this version, and `Completion.versions` tells which one wrote what."""
        ...


class RunsOnRanks(InferenceEngine, Protocol):
    """An engine that neighbouring ranks run together, each with a part of every matrix. The first of them
    samples; meanwhile the others follow."""

    ranks: int
    """That run it together, 2 at least."""

    def leading(self) -> AbstractContextManager[None]:
        """Around what the first rank samples: at the end the others return from `follow`."""
        ...

    def follow(self) -> None:
        """On the other ranks: take part until the first rank is done."""
        ...


def runs_on_ranks(engine: InferenceEngine) -> TypeGuard[RunsOnRanks]:
    """Return whether the engine is one that several ranks run together."""
    return getattr(engine, "ranks", 1) > 1


class ReceivesWeights(InferenceEngine, Protocol):
    """An engine with its own weights, which are sent in buckets, all in one session.

    The engine is *dirty* before its first update, and again from the first bucket of a session until
    `finish_update`. A dirty engine refuses to generate, and only a complete session makes it clean.
    """

    recover: Callable[..., None] | None
    """Set by the sender of the weights. An engine that restarts its server calls it without arguments to get
    the current weights in a new session. Other engines ignore it."""

    @property  # as the next two: a plain attribute serves as well
    def transports(self) -> tuple[Transport, ...]:
        """The transports that the engine can receive by here, best first."""
        ...

    @property
    def dirty(self) -> bool:
        """Whether the engine refuses to generate until the next complete session."""
        ...

    @property
    def receivers(self) -> int:
        """Number of processes that each receive every bucket: the ranks of the collective besides the
        trainer's; 1 in process."""
        ...

    def begin_update(self, session: UpdateSession) -> None:
        """Refuse new requests, wait for running ones, open a session. Raises EngineError if running samples
        do not end in time."""
        ...

    def receive(self, bucket: WeightBucket) -> None:
        """Load the tensors of one bucket; returns when its memory may be reused."""
        ...

    def finish_update(self, session: UpdateSession) -> None:
        """Close the session, flush the prefix cache and verify that it is empty, adopt the version."""
        ...

    def fail_update(self, reason: str) -> None:
        """End the session early: the partly loaded weights stay, and the engine stays dirty. Does not
        raise."""
        ...

    def read_back(self, names: Sequence[str]) -> Mapping[str, Tensor] | None:
        """Return the first 64 values of each weight that the engine holds, flat, by Hugging Face name.
        Weights that it cannot read back are missing; None if it can read back none."""
        ...

    def memory(self) -> Mapping[str, float]:
        """Return bytes by purpose, for out-of-memory messages. Raises EngineError."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """Return its description for the manifest of a run (version, command, ...), as plain JSON."""
        ...


def receives_weights(engine: InferenceEngine) -> TypeGuard[ReceivesWeights]:
    """Whether the engine implements ReceivesWeights; otherwise it implements SharesWeights."""
    return engine.external


class WeightTransfer(Protocol):
    """Sends the trainer's weights to an engine, all of them, in one push."""

    before: MemoryReport | None
    """Before the last push; `after` is after it. None: not measured."""
    after: MemoryReport | None

    @property
    def transport(self) -> Transport | Literal["shared"]:
        """How weights are sent; shared: the engine reads the trainer's own."""
        ...

    def push(self, source: TrainBackend, target: InferenceEngine, *, policy_version: int) -> None:
        """Send the weights of `source`, from which `target` then samples. Raises EngineError; after a failed
        push the engine must not sample from a partial update."""
        ...

    def check(self, target: InferenceEngine) -> bool:
        """Compare the weights of the last push with those that the engine holds; return False if there is
        nothing to compare. Raises EngineError if they differ; the engine is then dirty."""
        ...

    def close(self) -> None: ...
