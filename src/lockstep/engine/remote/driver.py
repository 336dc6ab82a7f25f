"""The protocol behind which each server's own HTTP interface is, and the check of every sample from it."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep.config.engine import EngineConfig
from lockstep.engine.remote.http import BadReply, Exchange, Exchanges, Head, HttpClient, HttpError, Reply
from lockstep.engine.remote.server import ServerProcess, masked
from lockstep.engine.spec import Decoding, EngineSpec
from lockstep.engine.streaming import Turn
from lockstep.errors import EngineError
from lockstep.schema.rollout import FinishReason, GenerationRequest, Span
from lockstep.schema.weights import Transport, UpdateSession, WeightBucket

SHORT_SECONDS = 10.0
"""Deadline in seconds of a request that a running server answers at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One sample to request from the server."""

    id: str
    """Id of the HTTP request; unique."""
    request: GenerationRequest
    index: int
    """Index of the request."""
    sample: int
    turn: Turn | None = None
    """What it is a sample of; None: of a first turn."""

    @property
    def seed(self) -> int:
        return self.request.seeds[self.sample]

    @property
    def drawn_seed(self) -> int:
        """The seed that the server is given."""
        return self.seed if self.turn is None else self.turn.drawn_seed(self.sample)

    @property
    def begun(self) -> tuple[Span, ...]:
        """What an earlier request wrote of it."""
        return self.request.begun[self.sample] if self.request.begun else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A sample as the server reports it; `RemoteEngine` checks it."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    stop_reason: int | str | None
    """As the server reports it; None when its interface does not."""
    cached_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The load that a server reports while it works."""

    progress: float | None
    """Tokens, by the server's own count: it grows while anything is computed. None: not reported."""
    kv_cache_use: float | None
    """In [0, 1]; None: not reported."""


def read_load(tokens: Any, kv_cache_use: Any) -> Load:
    """Read a server's load; values that are not finite numbers of at least 0 are left out."""
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
        """None when the server is ready, else what it is waiting for. Does not raise for a server that is
        starting."""
        ...

    def check(self) -> None:
        """Check that the server has a supported version and serves this model in this way."""
        ...

    def body(self, job: Job) -> dict[str, Any]: ...

    def read(self, job: Job, reply: Mapping[str, Any]) -> Sample: ...

    def load(self, seconds: float) -> Load:
        """Read the load within `seconds`."""
        ...

    def abort(self, ids: Sequence[str]) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def begin(self, session: UpdateSession) -> None: ...

    def receive(self, bucket: WeightBucket, seconds: float) -> None: ...

    def finish(self, session: UpdateSession) -> None:
        """Finish the update and flush the prefix cache. Raises EngineError if it is not empty afterwards."""
        ...

    def fail(self, reason: str) -> None: ...

    def read_back(self, names: Sequence[str]) -> dict[str, Tensor] | None: ...

    def memory(self) -> dict[str, int]: ...

    def describe(self) -> dict[str, Any]: ...


class ServerDriver:
    """Base of the drivers: how a server is asked, and what it says of itself."""

    name: str
    ready_path = "/health"
    _version = ""
    """Of the server's program."""

    def __init__(
        self, config: EngineConfig, spec: EngineSpec, *, client: HttpClient, server: ServerProcess | None
    ) -> None:
        self._config, self._spec = config, spec
        self._client, self._server = client, server

    def ready(self) -> str | None:
        """See Driver."""
        try:
            reply = self._client.get(self.ready_path, seconds=2.0)
        except HttpError as error:
            return str(error)
        return None if reply.status == 200 else f"{reply.what} answered {reply.status}"

    def describe(self) -> dict[str, Any]:
        """See Driver: the server for the run's manifest."""
        description: dict[str, Any] = {"engine": self.name, "version": self._version, "url": self._client.url}
        if self._server is not None:
            spec = self._server.spec
            description |= {
                "command": list(spec.command),
                "environment": masked(spec.environment),
                "log": str(spec.log),
                "pid": self._server.pid,
            }
        return description

    def _post(self, path: str, body: Any = None, *, seconds: float) -> Reply:
        """Raises BadReply unless the status is 200."""
        reply = self._client.post(path, body, seconds=seconds)
        if reply.status != 200:
            raise bad_status(reply)
        return reply


def bad_status(reply: Reply) -> BadReply:
    """Build the error for a non-200 reply. `remote_data`: code and fields if the server raised one of our
    errors."""
    try:
        remote = {"remote_data": dict(json.loads(reply.body)["data"])}
    except (ValueError, KeyError, TypeError, RecursionError):
        remote = {}
    return BadReply(f"{reply.what} answered {reply.status}: {reply.error_text()}", code="bad-reply", **remote)


def seconds_left(session: UpdateSession, config: EngineConfig) -> float:
    """Until the session's deadline. Raises EngineError: it has passed."""
    left = session.deadline - time.monotonic()
    if left <= 0:
        raise EngineError(
            f"deadline: engine {config.name}: the update to policy version {session.policy_version} did not "
            f"finish within engine.update_seconds = {config.update_seconds:g}; raise it"
        )
    return left


def check_sample(
    sample: Sample, request: GenerationRequest, spec: EngineSpec, *, engine: str
) -> int | str | None:
    """Check that a sample is what was requested; returns its stop reason, None if it ended by length or
    abort.

    The reason comes from the tokens: servers differ in what they report, some report nothing, and an end that
    our stop ids and strings do not explain is one that the engine added by itself. A last token that is both
    an end and the last that fits is an end, which SGLang calls length and vLLM stop.

    Raises:
        EngineError: the sample is not what was requested.
    """
    ids, logprobs, params = sample.token_ids, sample.logprobs, request.sampling
    if len(ids) != len(logprobs) or len(ids) > params.max_tokens:
        raise _wrong(
            engine, f"{len(ids)} tokens with {len(logprobs)} logprobs for max_tokens = {params.max_tokens}"
        )
    if ids and (min(ids) < 0 or max(ids) >= spec.vocab_size):
        raise _wrong(engine, f"a token id outside the vocabulary of {spec.vocab_size} entries")
    finite = all(map(math.isfinite, logprobs))  # min and max do not see NaN
    # Rounding may lift a certain token just above 0; below -1e4 lie only masked tokens, which nobody draws.
    if logprobs and not (finite and min(logprobs) > -1e4 and max(logprobs) <= 1e-3):
        raise _wrong(
            engine,
            f"logprobs from {min(logprobs)} to {max(logprobs)}, some of which are not finite, below -1e4 or "
            "positive",
        )
    if sample.finish_reason == "abort":
        return None
    if not ids:
        raise _wrong(engine, "a sample without tokens")
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(spec.eos_token_ids))
    if ids[-1] in ends and len(ids) > params.min_tokens:
        return ids[-1]
    if sample.finish_reason == "length":
        longest = min(params.max_tokens, spec.max_model_len - len(request.prompt_token_ids))
        if len(ids) < longest:
            raise _wrong(engine, f"{len(ids)} tokens with finish reason 'length', although {longest} fit")
        return None
    if params.stop:
        text = Decoding.of(spec.tokenizer, params, eos_token_ids=spec.eos_token_ids)(ids)
        matches = [(text.find(s), s) for s in params.stop if s in text]
        if matches:
            return min(matches)[1]
    raise _wrong(
        engine,
        f"a sample that stopped at token {ids[-1]} ({sample.stop_reason!r}), which is neither an eos id "
        f"{list(spec.eos_token_ids)}, nor a stop id, nor the end of one of the request's stop strings",
    )


def check_begun(sample: Sample, begun: Sequence[Span], *, engine: str) -> None:
    """Raises EngineError: a sample that goes on with what was begun does not start with it, token by token
    and with the logprobs that it was sampled with."""
    token_ids = [token for span in begun for token in span.token_ids]
    logprobs = [logprob for span in begun for logprob in span.logprobs]
    written = len(token_ids)
    if sample.token_ids[:written] != token_ids or sample.logprobs[:written] != logprobs:
        raise _wrong(engine, f"a sample that does not start with the {written} tokens that were begun")


def _wrong(engine: str, what: str) -> EngineError:
    return EngineError(f"wrong-result: engine {engine} returned {what}, which does not match the request")


def tensor_from_hex(dtype: str, text: str) -> Tensor:
    """Raises ValueError for a dtype that torch does not have or bytes that do not fit it."""
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"{dtype!r} is not a torch dtype")
    # A bytearray, because torch warns about memory that cannot be written to.
    return torch.frombuffer(bytearray.fromhex(text), dtype=kind)


# Typed, bounded fields of a server's reply: a server is not trusted to send what it should.
#
# Each function returns the field's value, or raises ValueError with the field's name. Callers add which
# reply it was. `bool` is no number here, although it is one in Python, and 7.0 is no token id.


MOST = 2**53
"""Largest whole number in a reply: a float still holds it exactly."""


def mapping(value: Any, name: str) -> Mapping[str, Any]:
    """Return a JSON object."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {_preview(value)}, not an object")
    return value


def whole(value: Any, name: str, *, least: int = 0, most: int = MOST) -> int:
    """Return an integer from `least` to `most`."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {_preview(value)}, not a whole number from {least} to {most}")
    return value


def number(value: Any, name: str) -> float:
    """Return a finite number as a float."""
    try:
        result = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise ValueError(f"{name} is {_preview(value)}, not a finite number")
    return result


def token_ids(value: Any, name: str) -> list[int]:
    """Return a list of integers of at least 0; `check_sample` compares them with the vocabulary."""
    if not isinstance(value, list) or set(map(type, value)) - {int} or (value and min(value) < 0):
        raise ValueError(f"{name} is {_preview(value)}, not a list of token ids")
    return value


def logprobs(value: Any, name: str) -> list[float]:
    """Return a list of floats; null, which JSON has for what is not finite, is NaN."""
    if not isinstance(value, list) or set(map(type, value)) - {int, float, type(None)}:
        raise ValueError(f"{name} is {_preview(value)}, not a list of numbers")
    try:
        return [math.nan if entry is None else float(entry) for entry in value]
    except OverflowError as error:
        raise ValueError(f"{name} contains a number that is too large for a float") from error


def _preview(value: Any) -> str:
    text = ascii(value)  # a lone surrogate must not reach a terminal
    return text if len(text) <= 80 else text[:80] + "..."


# Server-sent events of several POSTs at once, in one thread.
#
#     with EventStreams(client) as streams:
#         streams.open("wave 0", "/generate", body)
#         for key, event in streams.poll(0.1): ...
#
#     event = Message    the text of one event, JSON
#           | Reply      the server answered with something else than events, such as an error
#           | HttpError  the connection broke
#           | None       the server said that this was all
#
# Deadlines are up to the caller, who knows what silence means.


Event = bytes | Reply | HttpError | None

_DATA, _DONE = b"data: ", b"[DONE]"


class EventStreams(Exchanges[bytes | Reply | None]):
    """The open streams; not thread-safe."""

    def open(self, key: Hashable, path: str, body: bytes) -> None:
        """Queue a POST; `poll` sends it. A failure to connect is an event."""
        self._start(_Stream, key, path, body)

    def poll(self, seconds: float) -> list[tuple[Hashable, Event]]:
        """Return the events so far, in order within each stream; waits up to `seconds` for the first."""
        return self._turn(seconds)


class _Stream(Exchange[bytes | Reply | None]):
    """A request that events answer."""

    def _answers(self, head: Head) -> Iterator[bytes | Reply | None]:
        if head.status == 200 and head.content_type.startswith("text/event-stream"):
            yield from self._split_events()
            if self._complete and not self.ended:
                raise self._broken()
        elif self._complete:
            self.ended = True
            yield self._reply(head)

    def _split_events(self) -> Iterator[bytes | None]:
        *events, rest = bytes(self._body).split(b"\n\n")
        if events:
            self._body = bytearray(rest)
        for event in events:
            if not event.startswith(_DATA):
                continue  # a comment, by which some proxies keep a connection alive
            text = event[len(_DATA) :]
            if text == _DONE:
                self.ended = True
                yield None
                return
            yield text


# Stall detector: whether a server that generates has made no progress for too long.


_FIRST_LOOK_SECONDS, _LOOK_SECONDS = 1.0, 5.0
"""Seconds between requests for a generating server's progress and the use of its KV cache."""
_RECOMPUTED = 4
"""A server that runs out of KV cache recomputes tokens; recomputing more than this many times all of them is
no progress."""


class Watched(Protocol):
    """What the detector needs of an engine."""

    name: str
    request_seconds: float
    max_model_len: int

    def note_load(self, *, seconds: float) -> float | None:
        """The server's own count of tokens; None: it has none."""
        ...

    def stalled(self, reason: str) -> EngineError:
        """Handle a stall; returns the error to raise."""
        ...


class StallDetector:
    """Time since the last progress of a server that generates.

    Progress is a sample that finished, new tokens of one, or growth of the server's own count of tokens, if
    that is finite and no more than the samples could need: a count that runs on by itself, or is NaN, keeps
    nobody waiting.
    """

    def __init__(self, engine: Watched) -> None:
        self._engine = engine
        self._limit = engine.request_seconds
        self._last = self._last_look = time.monotonic()
        self._wait = min(_FIRST_LOOK_SECONDS, self._limit / 4)
        self._counted: float | None = None
        self._grown = 0.0

    def news(self) -> None:
        """Note that a sample has finished, or that new tokens of one have come."""
        self._last = time.monotonic()
        self._grown = 0.0

    def check(self, missing: int) -> None:
        """Raise EngineError after request_seconds without progress; `missing` samples have not finished."""
        now = time.monotonic()
        left = self._last + self._limit - now
        if left > 0 and now - self._last_look < self._wait:
            return
        self._last_look, self._wait = now, min(_LOOK_SECONDS, self._limit / 4)
        if self._look(missing, seconds=min(_LOOK_SECONDS, max(left, 1.0))):
            self._last = time.monotonic()
        elif left <= 0:
            raise self._engine.stalled(
                f"engine {self._engine.name} sent nothing new and made no progress for "
                f"engine.request_seconds = {self._limit:g}; {missing} samples are missing"
            )

    def _look(self, missing: int, *, seconds: float) -> bool:
        """Ask the server for its count of tokens; True if it grew by no more than the samples explain."""
        before, count = self._counted, None
        with contextlib.suppress(HttpError):  # no answer is no progress
            count = self._engine.note_load(seconds=seconds)
        if count is None:
            return False
        self._counted = count
        if before is None or count <= before:
            return False
        self._grown += count - before
        return self._grown <= _RECOMPUTED * missing * self._engine.max_model_len
