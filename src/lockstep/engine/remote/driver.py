"""What a server says in its own HTTP interface, behind one seam, and the check of every sample of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep.engine.remote.reply_fields import number
from lockstep.engine.spec import EngineSpec
from lockstep.engine.stop import completion_text
from lockstep.errors import EngineError
from lockstep.schema.rollout import FinishReason, GenerationRequest
from lockstep.schema.weights import Transport, UpdateSession, WeightBucket

SHORT_SECONDS = 10.0
"""Deadline of a question that a living server answers at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One sample to be asked for."""

    id: str
    """Of the HTTP request; unique."""
    request: GenerationRequest
    index: int
    """Of the request."""
    sample: int

    @property
    def seed(self) -> int:
        return self.request.seeds[self.sample]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """What a server says about one sample, checked by `RemoteEngine`."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    stop_reason: int | str | None
    """As the server says; None when its interface does not."""
    cached_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What a server says about itself while it works."""

    progress: float | None
    """Tokens, by the server's own count: it grows while anything is computed. None: it did not say."""
    kv_cache_use: float | None
    """In [0, 1]; None: it did not say."""


def read_load(tokens: Any, kv_cache_use: Any) -> Load:
    """What a server says of its load; what is no finite number at least 0 is left out."""
    try:
        progress = number(tokens, "tokens")
    except ValueError:
        progress = None
    try:
        use = number(kv_cache_use, "KV cache use")
    except ValueError:
        use = None
    inside = use is not None and 0.0 <= use <= 1.0
    return Load(progress=progress, kv_cache_use=use if inside else None)


class Driver(Protocol):
    """One engine's HTTP interface. Every method raises EngineError in words of its own."""

    name: str
    generate_path: str
    transports: tuple[Transport, ...]

    def ready(self) -> str | None:
        """None when the server answers, else what it does not do yet. Does not raise for a server that is
        starting."""
        ...

    def check(self) -> None:
        """The server is of a supported version and serves this model in this way."""
        ...

    def body(self, job: Job) -> dict[str, Any]: ...

    def read(self, job: Job, reply: Mapping[str, Any]) -> Sample: ...

    def load(self, seconds: float) -> Load:
        """Within that many seconds."""
        ...

    def abort(self, ids: Sequence[str]) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def begin(self, session: UpdateSession) -> None: ...

    def receive(self, bucket: WeightBucket, seconds: float) -> None: ...

    def finish(self, session: UpdateSession) -> None:
        """Includes the prefix cache: it is empty afterwards, or EngineError."""
        ...

    def fail(self, reason: str) -> None: ...

    def read_back(self, names: Sequence[str]) -> dict[str, Tensor] | None: ...

    def memory(self) -> dict[str, int]: ...

    def describe(self) -> dict[str, Any]: ...


def check_sample(
    sample: Sample, request: GenerationRequest, place: EngineSpec, *, engine: str
) -> int | str | None:
    """The stop reason of a sample that is what was asked for; None: it ended by length or was aborted.

    The reason is found in the tokens: servers differ in what they say, some say nothing, and an end that our
    stop ids and strings do not explain is one that the engine added by itself. A last token that is both an
    end and the last that fits is an end, which SGLang calls length and vLLM stop.

    Raises:
        EngineError: it is something else.
    """
    ids, logprobs, params = sample.token_ids, sample.logprobs, request.sampling
    if len(ids) != len(logprobs) or len(ids) > params.max_tokens:
        raise _wrong(
            engine, f"{len(ids)} tokens with {len(logprobs)} logprobs, of max_tokens {params.max_tokens}"
        )
    if ids and (min(ids) < 0 or max(ids) >= place.vocab_size):
        raise _wrong(engine, f"a token id outside the vocabulary of {place.vocab_size} entries")
    finite = all(map(math.isfinite, logprobs))  # min and max do not see NaN
    if logprobs and not (finite and min(logprobs) > -1e4 and max(logprobs) <= 1e-3):
        raise _wrong(engine, f"logprobs from {min(logprobs)} to {max(logprobs)}: not finite, or positive")
    if sample.finish_reason == "abort":
        return None
    if not ids:
        raise _wrong(engine, "a sample without tokens")
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(place.eos_token_ids))
    if ids[-1] in ends and len(ids) > params.min_tokens:
        return ids[-1]
    if sample.finish_reason == "length":
        longest = min(params.max_tokens, place.max_model_len - len(request.prompt_token_ids))
        if len(ids) < longest:
            raise _wrong(engine, f"{len(ids)} tokens that ended by length, where {longest} fit")
        return None
    if params.stop:
        text = completion_text(place.tokenizer, ids, stop=None, keep=True) or ""
        found = [(text.find(s), s) for s in params.stop if s in text]
        if found:
            return min(found)[1]
    raise _wrong(
        engine,
        f"a sample that stopped at token {ids[-1]} ({sample.stop_reason!r}), which is neither an eos id "
        f"{list(place.eos_token_ids)}, nor a stop id, nor the end of a stop string of the request",
    )


def _wrong(engine: str, what: str) -> EngineError:
    return EngineError(f"engine {engine} returned {what}; it does not do what it was asked for")


def tensor_from_hex(dtype: str, text: str) -> Tensor:
    """Raises ValueError for a dtype that torch does not have or bytes that do not fit it."""
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"{dtype!r} is no dtype of torch")
    return torch.frombuffer(bytearray.fromhex(text), dtype=kind)
