"""A reward behind http or https: samples go out in batches, one score for each comes back.

    POST url  {"protocol": "lockstep-reward-1", "request_id": ID, "samples": [{"completion": ..., ...}, ...]}
    200       {"request_id": ID, "scores": [0.5, {"error": "no answer found"}, ...]}

ID is a hash of the samples: a request that is sent again, by a retry or a resumed run, has the same, so a
service may answer it from what it has. Every attempt has a deadline, at whatever pace the other side sends.
An answer is checked whole: the id, the number of scores, and that each one is a finite number.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import math
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from lockstep.errors import ConfigError, LockstepError, hide, redacted
from lockstep.observe.text import printable
from lockstep.protocols.reward import RewardInput
from lockstep.rollout.reward_functions import RewardFailure
from lockstep.rollout.reward_process import sent

PROTOCOL = "lockstep-reward-1"
RETRIED_STATUS = (408, 425, 429, 500, 502, 503, 504)
"""Statuses after which a retry may succeed."""
_WAIT_SECONDS = 0.25
"""Before the first retry; doubled for each further one."""
_REPLY_BYTES = 1 << 16
_SCORE_BYTES = 1 << 12
"""Largest answer: the first, and the second for each sample."""
_PREVIEW = 200
_LOOKED_AT = _PREVIEW + 4096
"""Of an answer, for a token that reaches beyond its preview."""


class _Retriable(RewardFailure):
    """A failure after which the request is retried."""


class RewardService:
    """The client of one reward service. It sends a request without samples at once, so that a wrong address
    is found before the first step.

    Args:
        token_env: the variable with the token; None: none is sent.
        batch_size: most samples of a request.
        concurrency: most requests at a time.
        timeout: seconds of a request.

    Raises:
        ConfigError: no service responds, it uses another protocol, or it refuses the token; or the variable
            of the token is not set.
    """

    def __init__(
        self,
        url: str,
        *,
        token_env: str | None,
        batch_size: int,
        concurrency: int,
        retries: int,
        timeout: float,
    ) -> None:
        self._url, self._timeout, self._retries = url, timeout, retries
        self._batch_size, self._concurrency = batch_size, concurrency
        self._parts = urlsplit(url)
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if token_env is not None:
            token = os.environ.get(token_env, "")
            if not token or not token.isascii() or not token.isprintable():
                raise ConfigError(
                    f"wrong-environment: reward 'http': token_env = {token_env!r} names a variable that is "
                    "unset or does not hold a valid token; set the variable, or leave token_env out",
                    setting="rewards.token_env",
                )
            hide(token)
            self._headers["Authorization"] = f"Bearer {token}"
        self._tls = ssl.create_default_context() if self._parts.scheme == "https" else None
        self._lock = threading.Lock()
        self._open: set[_Attempt] = set()
        self._stop = threading.Event()
        try:
            self._ask([], threading.Event())
        except RewardFailure as error:
            raise ConfigError(
                f"unreachable: reward 'http' cannot be used: {error}. Start the service, or correct "
                "rewards.url (docs/how-to/own-reward.md has the protocol)"
            ) from error

    def score(self, inputs: Sequence[RewardInput]) -> tuple[list[Any], int]:
        """Return a score or an exception for each sample, in order, and the number of retries."""
        outcomes: list[Any] = [None] * len(inputs)
        ready: list[tuple[int, dict[str, Any]]] = []
        for position, sample in enumerate(inputs):
            try:
                ready.append((position, {**sent(sample), "conversation": _conversation(sample)}))
            except LockstepError as error:
                outcomes[position] = error
        size, stop = self._batch_size, self._stop
        batches = [ready[i : i + size] for i in range(0, len(ready), size)]
        if not batches:
            return outcomes, 0

        def ask(batch: Sequence[tuple[int, dict[str, Any]]]) -> tuple[list[Any], int]:
            try:
                return self._ask([sample for _, sample in batch], stop)
            except RewardFailure as error:
                return [error] * len(batch), int(getattr(error, "retried", 0))

        with ThreadPoolExecutor(min(self._concurrency, len(batches)), "reward-service") as pool:
            replies = list(pool.map(ask, batches))
        for batch, (scores, _) in zip(batches, replies, strict=True):
            for (position, _), score in zip(batch, scores, strict=True):
                outcomes[position] = score
        return outcomes, sum(retried for _, retried in replies)

    def close(self) -> None:
        """Cancel every request in progress; a later call sends new ones."""
        self._stop.set()
        self._stop = threading.Event()
        with self._lock:
            attempts = list(self._open)
        for attempt in attempts:
            attempt.cut()

    def _ask(self, samples: Sequence[dict[str, Any]], stop: threading.Event) -> tuple[list[Any], int]:
        """Return (outcomes, retries). Raises RewardFailure, with the number of retries as `retried`."""
        request_id, body = request_of(samples)
        for retried in range(self._retries + 1):
            try:
                return read_reply(self._post(body, request_id), request_id, len(samples)), retried
            except _Retriable as error:
                last = retried == self._retries
                if last or stop.wait(_WAIT_SECONDS * 2**retried):
                    tries = f" ({retried + 1} attempts)" if retried else ""
                    failure = RewardFailure(f"{error}{tries}")
                    failure.retried = retried  # type: ignore[attr-defined]
                    raise failure from error
        raise AssertionError("the last attempt returns or raises")

    def _post(self, body: bytes, request_id: str) -> bytes:
        """Return the body of a 2xx response. Raises RewardFailure; _Retriable if a retry may succeed."""
        limit = _REPLY_BYTES + _SCORE_BYTES * body.count(b'"completion"')
        seconds, url = self._timeout, printable(self._url)
        attempt = _Attempt(self._connection(seconds), seconds)
        with self._tracked(attempt):
            try:
                reply = attempt.post(self._target(), body, {**self._headers, "Idempotency-Key": request_id})
                content = reply.read(limit + 1)
            except ssl.SSLCertVerificationError as error:
                raise RewardFailure(f"{url} has a certificate that is not trusted: {error}") from error
            except (OSError, http.client.HTTPException) as error:
                if attempt.overdue:
                    raise _Retriable(f"{url} did not answer within {seconds:g} s") from error
                what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                raise _Retriable(f"{url} cannot be reached ({printable(what)})") from error
            if attempt.overdue:  # what a cut connection gave may be a part
                raise _Retriable(f"{url} did not answer within {seconds:g} s")
        if not 200 <= reply.status < 300:
            kind = _Retriable if reply.status in RETRIED_STATUS else RewardFailure
            raise kind(f"{url} answered with status {reply.status}: {_preview(content)}")
        if len(content) > limit:
            raise RewardFailure(f"{url} sent a response of more than {limit} bytes")
        return content

    def _connection(self, seconds: float) -> http.client.HTTPConnection:
        host, port = str(self._parts.hostname), self._parts.port
        if self._tls is not None:
            return http.client.HTTPSConnection(host, port, timeout=seconds, context=self._tls)
        return http.client.HTTPConnection(host, port, timeout=seconds)

    def _target(self) -> str:
        return (self._parts.path or "/") + (f"?{self._parts.query}" if self._parts.query else "")

    @contextlib.contextmanager
    def _tracked(self, attempt: _Attempt) -> Iterator[None]:
        with self._lock:
            self._open.add(attempt)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(attempt)
            attempt.end()


class _Attempt:
    """One request on its own connection, which is closed at its deadline: a socket's own timeout restarts
    with every byte."""

    def __init__(self, connection: http.client.HTTPConnection, seconds: float) -> None:
        self._connection = connection
        self._until = time.monotonic() + seconds
        self._timer = threading.Timer(seconds, self.cut)
        self._timer.daemon = True
        self._socket: socket.socket | None = None

    @property
    def overdue(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self._until

    def post(self, target: str, body: bytes, headers: dict[str, str]) -> http.client.HTTPResponse:
        """Raises OSError, HTTPException."""
        self._timer.start()
        self._connection.connect()
        self._socket = self._connection.sock  # the connection forgets it once the answer's head is there
        if self.overdue:
            raise TimeoutError
        self._connection.request("POST", target, body=body, headers={**headers, "Connection": "close"})
        return self._connection.getresponse()

    def cut(self) -> None:
        """Interrupt the request."""
        if (sock := self._socket or self._connection.sock) is not None:
            with contextlib.suppress(OSError):  # it has ended by itself
                sock.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        self._timer.cancel()
        self._connection.close()


def request_of(samples: Sequence[dict[str, Any]]) -> tuple[str, bytes]:
    """Return the id and the body of a request: the same for the same samples."""
    text = json.dumps(samples, separators=(",", ":"))
    request_id = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return request_id, (f'{{"protocol":"{PROTOCOL}","request_id":"{request_id}","samples":{text}}}'.encode())


def read_reply(body: bytes, request_id: str, count: int) -> list[float | RewardFailure]:
    """Return a finite score or a failure for each of `count` samples.

    Raises:
        RewardFailure: the whole response is invalid: not a JSON object, for another request, or with a wrong
            number of scores.
    """
    try:
        reply = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RewardFailure(f"the service sent a response that is not JSON: {_preview(body)}") from error
    if not isinstance(reply, dict) or "scores" not in reply:
        raise RewardFailure(f"the service's response is not an object with 'scores': {_preview(body)}")
    if reply.get("request_id") != request_id:
        raise RewardFailure(
            f"the service returned request_id {short(repr(reply.get('request_id'))):.60} for request "
            f"{request_id!r}; it must return the id unchanged"
        )
    scores = reply["scores"]
    if not isinstance(scores, list) or len(scores) != count:
        found = f"{len(scores)} scores" if isinstance(scores, list) else f"scores = {short(repr(scores)):.60}"
        raise RewardFailure(f"the service returned {found} for {count} samples; return one score per sample")
    return [_score(score) for score in scores]


def _score(score: Any) -> float | RewardFailure:
    match score:
        case {"error": str() as text}:
            return RewardFailure(f"the service reported {printable(short(text[:_LOOKED_AT]))!r}")
        case bool():
            pass
        case int() | float():
            with contextlib.suppress(OverflowError):  # an integer beyond any float
                if math.isfinite(value := float(score)):
                    return value
    return RewardFailure(
        f"the service returned the score {short(repr(score)):.60}; return a finite number or {{'error': "
        "TEXT}"
    )


def _conversation(sample: RewardInput) -> Any:
    talk = sample.conversation
    return talk if talk is None or isinstance(talk, str) else [dict(message) for message in talk]


def _preview(content: bytes) -> str:
    return repr(short(content[:_LOOKED_AT].decode(errors="replace")))


def short(text: str) -> str:
    """Return the redacted beginning of a response, which may contain our token."""
    return redacted(text)[:_PREVIEW]
