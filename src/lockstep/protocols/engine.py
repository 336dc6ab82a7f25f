from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeGuard

from torch import Tensor

from lockstep.protocols.train import TrainBackend
from lockstep.schema.contract import KernelContract
from lockstep.schema.rollout import Completion, GenerationRequest, SamplingParams
from lockstep.schema.weights import MemoryReport, Transport, UpdateSession, WeightBucket, WeightUpdate

OnCompletion = Callable[[int, int, Completion], None]
"""Called with (request index, sample index, completion) as soon as a sample finishes."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Handle:
    """A submitted request. It equals itself only, so it can be the key of a dict."""

    request: GenerationRequest
    index: int = 0
    """Its number among those submitted since the engine was last idle: what error messages call it by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A sample whose turn has ended."""

    handle: Handle
    sample: int
    """Index in `handle.request.seeds`."""
    completion: Completion
    """Of this turn: its prompt is the whole context before it."""


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
    """Samples that are accepted and not finished."""
    kv_cache_use: float | None = None
    """Share of the KV cache in use now; None: the engine does not say."""
    restarts: int = 0
    """Times that a server died and was started again."""

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens per second of `generate`; 0 before the first."""
        return self.completion_tokens / self.generate_seconds if self.generate_seconds else 0.0

    @property
    def cache_hit_rate(self) -> float:
        """Share of the prompt tokens that was not computed; 0 before the first."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class SamplesTokens(Protocol):
    """Token ids in, token ids and logprobs out.

        handles = [engine.submit(request) for request in requests]
        for done in engine.finished():
            reply = environment(done.completion)              # token ids, or None: the trajectory is over
            if reply is not None:
                engine.continue_(done, reply, sampling=next_turn)

    `submit`, `continue_` and `abort` may be called from any thread, also while another one waits in
    `finished`. lockstep.engine.streaming.Streaming has all of this for an engine that says how to run.
    """

    def submit(self, request: GenerationRequest) -> Handle:
        """Queue a request and return at once. Raises EngineError when it is impossible, or can never fit;
        what was submitted before goes on."""
        ...

    def continue_(
        self, finished: Finished, token_ids: Sequence[int] = (), *, sampling: SamplingParams
    ) -> None:
        """Queue the next turn of a sample; its Finished has the same handle and sample index.

        The prompt of the turn is the prompt and the tokens of `finished`, then `token_ids`; its seed is the
        sample's. An engine that draws Lockstep's noise goes on as if the sample had never ended, since the
        noise is a function of (seed, position); one that does not draws with a seed made of both.

        Args:
            finished: of this stream, an earlier one, or another engine with the same model.
            token_ids: what the policy did not write: a tool's reply. Empty to go on with a sample that ended
                by "length" or "abort".
            sampling: of this turn alone. `max_tokens` is what the turn may write and not what the trajectory
                may: whoever has a budget gives the smaller of the turn's limit and what is left. The rest of
                a sample that was cut after k tokens is `max_tokens - k` (`min_tokens - k`, at least 0).
                min_tokens, penalties of the output and stop strings look at the turn's own tokens.

        Raises:
            EngineError: as `submit`; a context that leaves no room for a token is one of its reasons.
        """
        ...

    def finished(self) -> Generator[Finished, None, None]:
        """Run what was submitted, and yield each sample as its turn ends; ends when nothing is left.

        Engines in this process work while the caller waits for the next item, in the caller's thread. An
        exception, or closing the generator early, drops everything that was not yielded.

        Raises:
            EngineError: another thread or an outer loop runs this engine, memory ran out, logits are not
                finite, a server died for good.
        """
        ...

    def generate(
        self, requests: Sequence[GenerationRequest], *, on_completion: OnCompletion | None = None
    ) -> list[list[Completion]]:
        """Submit all requests and run them to their ends: one list per request, in request order, its samples
        in seed order. Raises EngineError, also while anything else is submitted; then nothing is left of the
        call."""
        ...

    def abort(self) -> None:
        """End every sample that was submitted and not yielded, with finish_reason "abort" and the tokens that
        it has. They are still yielded; until the last of them was, new ones may end in the same way."""
        ...


class InferenceEngine(SamplesTokens, Protocol):
    """It gets weights by one of the two protocols below; lockstep.transfer knows both. `external` says which,
    and how lockstep.engine.build.make_engine makes it:

        Engine(config, model=LoadedModel)    external = False, SharesWeights
        Engine(config, spec=EngineSpec)      external = True, ReceivesWeights
    """

    external: bool
    """Of the class: it has weights of its own, which are sent to it."""

    def sleep(self) -> None:
        """Free as much memory as possible; sampling is an error until `wake`. Raises EngineError while
        samples are running."""
        ...

    def wake(self) -> None: ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...


class SharesWeights(InferenceEngine, Protocol):
    """An engine over the trainer's modules, or over modules in the same process."""

    contract: KernelContract | None
    """The kernels that it computes with, if they are batch-invariant; None: it promises no bits."""

    def update_weights(self, update: WeightUpdate) -> None:
        """Take this version of the weights and drop every cache made with an older one. Raises EngineError
        before anything was changed, also while samples are running."""
        ...


class ReceivesWeights(InferenceEngine, Protocol):
    """An engine with its own weights: they are sent in buckets, all of them in one session.

    It is *dirty* before its first update, and again from the first bucket of a session to its `finish`: a
    dirty engine refuses to generate, and only a whole session makes it clean.
    """

    recover: Callable[..., None] | None
    """Set by the sender of the weights. An engine that restarts its server calls it without arguments: it
    sends the current weights in a session of its own. One that never restarts keeps it and calls nothing."""

    @property  # as the next two: a plain attribute serves as well
    def transports(self) -> tuple[Transport, ...]:
        """The transports that it can receive by here, best first."""
        ...

    @property
    def dirty(self) -> bool:
        """Whether it refuses to generate until the next whole session."""
        ...

    @property
    def receivers(self) -> int:
        """Processes that each receive every bucket: ranks of a collective besides the trainer's. In
        process: 1."""
        ...

    def begin_update(self, session: UpdateSession) -> None:
        """Refuse new requests, wait for running ones, open a session. Raises EngineError when samples are
        running that do not end in time."""
        ...

    def receive(self, bucket: WeightBucket) -> None:
        """Load the tensors of one bucket; returns when its memory may be reused."""
        ...

    def finish_update(self, session: UpdateSession) -> None:
        """Close the session, flush the prefix cache and check that it is flushed, adopt the version."""
        ...

    def fail_update(self, reason: str) -> None:
        """End the session early: keep what is half loaded, stay dirty. Does not raise."""
        ...

    def read_back(self, names: Sequence[str]) -> Mapping[str, Tensor] | None:
        """Return the first 64 values of each weight as it holds them, flat, by Hugging Face name; without
        those that it cannot tell. None: it can tell of none."""
        ...

    def memory(self) -> Mapping[str, float]:
        """Return bytes by what they are for; for messages when memory runs out. Raises EngineError."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """Return what the manifest of a run says of it (version, command, ...), as plain JSON."""
        ...


def receives_weights(engine: InferenceEngine) -> TypeGuard[ReceivesWeights]:
    """Whether the engine implements ReceivesWeights; otherwise it implements SharesWeights."""
    return engine.external


class WeightTransfer(Protocol):
    """Sends the trainer's weights to an engine, all of them, in one push."""

    before: MemoryReport | None
    """Before the last push, as is `after` after it; None: not measured."""
    after: MemoryReport | None

    @property
    def transport(self) -> Transport | Literal["shared"]:
        """How weights travel; shared: they do not, the engine reads the trainer's."""
        ...

    def push(self, source: TrainBackend, target: InferenceEngine, *, policy_version: int) -> None:
        """Send the weights of `source`, from which `target` samples afterwards. Raises EngineError; after a
        push that failed the engine must not sample from half an update."""
        ...

    def check(self, target: InferenceEngine) -> bool:
        """Compare the weights of the last push with what the engine holds; False: there is nothing to
        compare. Raises EngineError: it holds others, and is dirty now."""
        ...

    def close(self) -> None: ...
