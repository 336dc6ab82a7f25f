"""A small HTTP client for an engine's server: JSON, deadlines, many requests at once in one thread.

    client = HttpClient("http://127.0.0.1:8000", name="vllm")
    client.get("/version", seconds=5).json()
    with client.batch(limit=256) as batch:
        batch.submit("a", "/generate", body)
        while batch.waiting:
            for key, reply in batch.poll(0.1): ...

    EngineError
    └── HttpError
        ├── Unreachable    nothing listens, or the connection broke: the server may be dead
        ├── Timeout         the deadline passed without an answer
        └── BadReply       the answer is not HTTP, not JSON, or larger than agreed

httpx takes 11 times the CPU for such replies, 3 times for events (benchmarks/http_client.py).

One connection for one request: loopback connections are cheap next to a sample, and none can be stale.
Closing a batch closes its connections, at which servers end the work that they were for. Replies are not
trusted: each has a largest size, and JSON is checked by whoever reads it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import selectors
import socket
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar
from urllib.parse import urlsplit

import pydantic_core

from lockstep.common_errors import too_large
from lockstep.errors import ConfigError, EngineError, redacted
from lockstep.observe.text import printable

CONNECT_SECONDS = 10.0
_SECRET_CHARS = 4096
"""Longest token that is looked for across the end of a preview."""
MAX_REPLY_BYTES = 256 * 1024 * 1024
_MAX_HEAD_BYTES = 64 * 1024
_READ_BYTES = 256 * 1024
_PREVIEW_CHARS = 400
_STATUS = re.compile(r"[0-9]{3}( |$)")
# A dozen digits: int() of a text without a limit takes quadratic time, and the server is not trusted.
_LENGTH = re.compile(r"[0-9]{1,12}")
_TRIES = 3
_RETRY_SECONDS = 0.2

Answer = TypeVar("Answer")
"""What answers a request: a `Reply`, or each event of a stream."""


class HttpError(EngineError):
    """No usable answer."""


class Unreachable(HttpError):
    """Nothing listens, or the connection broke."""


class Timeout(HttpError):
    """No answer within the deadline."""


class BadReply(HttpError):
    """An answer that is not valid."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """A complete answer."""

    status: int
    body: bytes
    what: str
    """The request, for messages: "vllm: GET http://127.0.0.1:8000/version"."""

    def json(self) -> Any:
        """Raises BadReply unless the status is 2xx and the body is JSON without NaN and infinity."""
        if not 200 <= self.status < 300:
            hint = (
                "; is its token the one in the variable that engine.token_env names?"
                if self.status == 401
                else ""
            )
            raise BadReply(f"bad-reply: {self.what} answered {self.status}: {self.error_text()}{hint}")
        try:
            # half the time of the standard library's, which counts with 100,000 logprobs
            return pydantic_core.from_json(self.body, allow_inf_nan=False, cache_strings="keys")
        except ValueError as error:
            raise BadReply(
                f"not-json: {self.what} returned something that is not JSON ({error}): {_preview(self.body)}"
            ) from error

    def object(self) -> dict[str, Any]:
        """Like `json`; raises BadReply unless it is an object."""
        value = self.json()
        if not isinstance(value, dict):
            raise BadReply(
                f"wrong-type: {self.what} returned a JSON {type(value).__name__}, not an object: "
                f"{_preview(self.body)}"
            )
        return value

    def error_text(self) -> str:
        """Return the server's error message, escaped, without the JSON around it if its form is known."""
        try:
            value = json.loads(self.body)
        except (ValueError, RecursionError):
            return _preview(self.body)
        for key in ("error", "message", "detail"):
            while isinstance(value, dict) and key in value:
                value = value[key]
        return printable(redacted(value)[:_PREVIEW_CHARS]) if isinstance(value, str) else _preview(self.body)


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """What counts of the head of an answer."""

    status: int
    length: int | None
    chunked: bool
    content_type: str
    """In lower case; empty if the server gave none."""


@contextlib.contextmanager
def reply_errors(what: str) -> Iterator[None]:
    """Around the code that takes a parsed reply apart: what a missing or odd field raises there becomes a
    BadReply of `what`, the beginning of its message, and of `fields`."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        reason = f"no field {error}" if isinstance(error, KeyError) else f"{kind}{error}"
        raise BadReply(f"bad-reply: {what}: {reason}") from error


def _preview(body: bytes) -> str:
    # Taken out before the cut: a server may give back the token that it was sent.
    text = redacted(body[: _PREVIEW_CHARS + _SECRET_CHARS].decode("utf-8", errors="replace"))
    return repr(text[:_PREVIEW_CHARS]) + (f" ... ({len(body)} bytes)" if len(text) > _PREVIEW_CHARS else "")


class HttpClient:
    """Requests to one server. May be used from several threads."""

    def __init__(self, url: str, *, name: str, headers: Mapping[str, str] | None = None) -> None:
        """Raises ConfigError for a url that is not http://host[:port][/path]."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError as error:
            raise ConfigError(
                f"wrong-format: url {url!r} has no valid port ({error}); give http://host:port"
            ) from error
        if parts.scheme != "http" or not parts.hostname or parts.query or parts.username:
            raise ConfigError(
                f"wrong-format: url {url!r} is not of the form http://host:port; engine servers speak plain "
                "http"
            )
        self.name = name
        self.url = url.rstrip("/")
        self._address = (parts.hostname, port or 80)
        self._path = parts.path.rstrip("/")
        self._headers = "".join(f"{k}: {v}\r\n" for k, v in (headers or {}).items())

    def get(self, path: str, *, seconds: float) -> Reply:
        """Send a GET; it is sent again when the connection broke, since a GET changes nothing."""
        deadline, tries = time.monotonic() + seconds, 0
        while True:
            try:
                return self._one("GET", path, None, deadline)
            except Unreachable:
                tries += 1
                if tries == _TRIES or time.monotonic() + _RETRY_SECONDS > deadline:
                    raise
                time.sleep(_RETRY_SECONDS)

    def post(self, path: str, body: Any = None, *, seconds: float) -> Reply:
        """Send a POST; it is never sent again, since the server may have acted on it."""
        return self._one("POST", path, body, time.monotonic() + seconds)

    def batch(self, *, limit: int) -> HttpBatch:
        """A batch of concurrent POSTs, at most `limit` at a time."""
        return HttpBatch(self, limit=limit)

    def describe(self, method: str, path: str) -> str:
        return f"{self.name}: {method} {self.url}{path}"

    def connect(self) -> socket.socket:
        """Open a connection; it may still be connecting."""
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM)[
                0
            ]
        except OSError as error:
            raise Unreachable(
                f"unreachable: {self.name}: host {self._address[0]!r} cannot be resolved ({error})"
            ) from error
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        # Otherwise the end of a long request waits until the server has acknowledged what came before.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = sock.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            raise Unreachable(
                f"unreachable: {self.name}: cannot connect to {self.url} ({errno.errorcode.get(code, code)})"
            )
        return sock

    def request(self, method: str, path: str, body: Any) -> bytes:
        """The bytes of a request; `body` is made JSON unless it is bytes or None."""
        host, port = self._address
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body, separators=(",", ":")).encode()
        lines = f"{method} {self._path}{path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
        lines += f"Accept: application/json\r\n{self._headers}"
        if method == "POST":
            lines += f"Content-Type: application/json\r\nContent-Length: {len(body or b'')}\r\n"
        return f"{lines}\r\n".encode("latin-1") + (body or b"")

    def _one(self, method: str, path: str, body: Any, deadline: float) -> Reply:
        with HttpBatch(self, limit=1) as batch:
            batch.submit(None, path, body, method=method)
            while True:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise Timeout(f"deadline: {self.describe(method, path)} was not answered in time")
                for _, reply in batch.poll(left):
                    if isinstance(reply, HttpError):
                        raise reply
                    return reply


class Exchange(ABC, Generic[Answer]):
    """One request and what answers it, over one connection; decoded as it comes."""

    def __init__(self, key: Hashable, sock: socket.socket, what: str, request: bytes) -> None:
        self.key, self.sock, self.what = key, sock, what
        self.began = time.monotonic()
        self.connected = False
        self.ended = False
        """Nothing more is of interest."""
        self._to_send = memoryview(request)
        self._raw = bytearray()
        """Received, not decoded."""
        self._head: Head | None = None
        self._body = bytearray()
        self._complete = False
        """The body has all that the head announced."""

    def send(self) -> bool:
        """Send what the socket takes; True when all is sent."""
        if not self.connected:
            # connect() was not waited for, so this is where a refusal is said.
            code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            self.connected = True
        try:
            self._to_send = self._to_send[self.sock.send(self._to_send) :]
        except BlockingIOError:
            return False
        return not self._to_send

    def receive(self) -> Iterator[Answer]:
        """Receive once; returns what is new. Raises HttpError and OSError."""
        try:
            data = self.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        self._raw += data
        if self._head is None:
            self._head = self._read_head()
        if self._head is not None:
            self._read_body(self._head, closed=not data)
            yield from self._answers(self._head)
        if not data and not self.ended:
            raise self._broken()

    @abstractmethod
    def _answers(self, head: Head) -> Iterator[Answer]:
        """Return what is new in the body; sets `ended` at the end."""

    def _broken(self) -> ConnectionError:
        return ConnectionError("the server closed the connection in the middle of its reply")

    def _reply(self, head: Head) -> Reply:
        return Reply(status=head.status, body=bytes(self._body), what=self.what)

    def _read_head(self) -> Head | None:
        end = self._raw.find(b"\r\n\r\n")
        if end < 0:
            if len(self._raw) > _MAX_HEAD_BYTES:
                raise BadReply(
                    f"bad-reply: {self.what} did not return an HTTP reply: {_preview(bytes(self._raw[:500]))}"
                )
            return None
        first, *rest = self._raw[:end].decode("latin-1").split("\r\n")
        del self._raw[: end + 4]
        fields = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in rest)}
        version, _, tail = first.partition(" ")
        if not (version.startswith("HTTP/1.") and _STATUS.match(tail)):
            raise BadReply(f"bad-reply: {self.what} did not return an HTTP reply: {first[:_PREVIEW_CHARS]!r}")
        length = fields.get("content-length")
        if length is not None and not (_LENGTH.fullmatch(length) and int(length) <= MAX_REPLY_BYTES):
            size = ascii(length)[1:41]
            raise BadReply(
                f"too-large: {self.what}: Content-Length is {size}; at most {MAX_REPLY_BYTES} bytes are read"
            )
        return Head(
            status=int(tail[:3]),
            length=int(length) if length is not None else None,
            chunked=fields.get("transfer-encoding", "").lower() == "chunked",
            content_type=fields.get("content-type", "").lower(),
        )

    def _read_body(self, head: Head, *, closed: bool) -> None:
        """Move what is decoded from the raw bytes to the body."""
        if head.chunked:
            self._read_chunks()
        else:
            self._body += self._raw
            self._raw.clear()
            if head.length is None:
                self._complete = closed
            elif len(self._body) >= head.length:
                del self._body[head.length :]
                self._complete = True
        if len(self._body) > MAX_REPLY_BYTES:
            raise BadReply(f"too-large: {self.what} returned more than {MAX_REPLY_BYTES} bytes")

    def _read_chunks(self) -> None:
        raw, at = self._raw, 0
        while not self._complete and (end := raw.find(b"\r\n", at)) >= 0:
            try:
                size = int(bytes(raw[at:end]).partition(b";")[0], 16)
            except ValueError:
                preview = _preview(bytes(raw[at : at + 40]))
                raise BadReply(f"bad-reply: {self.what} sent a chunk without a size: {preview}") from None
            if not 0 <= size <= MAX_REPLY_BYTES:
                raise too_large(BadReply, f"a chunk of {self.what}", size, MAX_REPLY_BYTES)
            if size == 0:
                self._complete = True
            elif len(raw) < end + 2 + size + 2:
                break
            else:
                self._body += raw[end + 2 : end + 2 + size]
                at = end + 2 + size + 2
        # Once for all chunks: each deletion moves everything behind it.
        del raw[:at]


class Exchanges(Generic[Answer]):
    """The open exchanges of one thread."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._open: set[Exchange[Answer]] = set()
        self._failed: list[tuple[Hashable, Answer | HttpError]] = []
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection: the server drops unanswered requests."""
        for exchange in list(self._open):
            self._drop(exchange)
        self._selector.close()

    def _start(
        self, kind: type[Exchange[Answer]], key: Hashable, path: str, body: Any, *, method: str = "POST"
    ) -> None:
        """Connect; `_turn` sends. A failure to connect is an answer."""
        try:
            sock = self._client.connect()
        except HttpError as error:
            self._failed.append((key, error))
            return
        what = self._client.describe(method, path)
        exchange = kind(key, sock, what, self._client.request(method, path, body))
        self._open.add(exchange)
        self._selector.register(sock, selectors.EVENT_WRITE, exchange)

    def _turn(self, seconds: float) -> list[tuple[Hashable, Answer | HttpError]]:
        """Send and receive; returns answers and failures, in order within each exchange."""
        found, self._failed = self._failed, []
        for key, events in self._selector.select(0.0 if found else max(seconds, 0.0)):
            exchange: Exchange[Answer] = key.data
            try:
                if events & selectors.EVENT_READ:
                    for answer in exchange.receive():  # those before a failure count
                        found.append((exchange.key, answer))
                elif exchange.send():
                    self._selector.modify(exchange.sock, selectors.EVENT_READ, exchange)
            except HttpError as error:
                found.append((exchange.key, error))
                exchange.ended = True
            except OSError as error:
                found.append(
                    (
                        exchange.key,
                        Unreachable(f"unreachable: {exchange.what}: the connection failed ({error})"),
                    )
                )
                exchange.ended = True
            if exchange.ended:
                self._drop(exchange)
        return found

    def _drop(self, exchange: Exchange[Answer]) -> None:
        self._open.discard(exchange)
        self._selector.unregister(exchange.sock)
        exchange.sock.close()


class _Whole(Exchange[Reply]):
    """A request that one complete reply answers."""

    def _answers(self, head: Head) -> Iterator[Reply]:
        if self._complete:
            self.ended = True
            yield self._reply(head)


class HttpBatch(Exchanges[Reply]):
    """Concurrent POSTs, each over its own connection; not thread-safe."""

    def __init__(self, client: HttpClient, *, limit: int) -> None:
        super().__init__(client)
        self._limit = limit
        self._queue: deque[tuple[Hashable, str, Any, str]] = deque()

    @property
    def waiting(self) -> int:
        """Requests without an answer."""
        return len(self._queue) + len(self._open) + len(self._failed)

    def submit(self, key: Hashable, path: str, body: Any, *, method: str = "POST") -> None:
        """Queue a request; sent by `poll` as soon as fewer than `limit` are open, in this order."""
        self._queue.append((key, path, body, method))

    def drop_unsent(self) -> Sequence[Hashable]:
        """Drop requests that were not sent yet; returns their keys."""
        keys = [key for key, *_ in self._queue]
        self._queue.clear()
        return keys

    def poll(self, seconds: float) -> list[tuple[Hashable, Reply | HttpError]]:
        """Return the replies and failures so far; waits up to `seconds` for the first."""
        self._fill()
        done = self._turn(seconds) or self._overdue()
        self._fill()
        return done

    def close(self) -> None:
        super().close()
        self._queue.clear()

    def _fill(self) -> None:
        while self._queue and len(self._open) < self._limit:
            key, path, body, method = self._queue.popleft()
            self._start(_Whole, key, path, body, method=method)

    def _overdue(self) -> list[tuple[Hashable, Reply | HttpError]]:
        late = [e for e in self._open if not e.connected and time.monotonic() - e.began > CONNECT_SECONDS]
        for exchange in late:
            self._drop(exchange)
        return [
            (e.key, Unreachable(f"deadline: {e.what}: no connection within {CONNECT_SECONDS:g} s"))
            for e in late
        ]
