"""Server-sent events of several POSTs at once, in one thread.

    with EventStreams(client) as streams:
        streams.open("wave 0", "/generate", body)
        for key, event in streams.poll(0.1): ...

    event = Message    the text of one event, JSON
          | Reply      the server answered with something else than events, such as an error
          | HttpError  the connection broke
          | None       the server said that this was all

Deadlines are up to the caller, who knows what silence means.
"""

from __future__ import annotations

import errno
import re
import selectors
import socket
from collections.abc import Hashable, Iterator
from typing import Self

from lockstep.engine.remote.http import MAX_REPLY_BYTES, BadReply, HttpClient, HttpError, Reply, Unreachable

Event = bytes | Reply | HttpError | None

_DATA, _DONE = b"data: ", b"[DONE]"
_READ_BYTES = 1 << 20
_MAX_HEAD_BYTES = 64 * 1024


class EventStreams:
    """The open streams; not thread-safe."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._selector = selectors.DefaultSelector()
        self._open: set[_Stream] = set()
        self._failed: list[tuple[Hashable, Event]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection."""
        for stream in list(self._open):
            self._drop(stream)
        self._selector.close()

    def open(self, key: Hashable, path: str, body: bytes) -> None:
        """Queue a POST; `poll` sends it. A failure to connect is an event."""
        what = self._client.describe("POST", path)
        try:
            sock = self._client.connect()
        except HttpError as error:
            self._failed.append((key, error))
            return
        stream = _Stream(key, sock, what, self._client.request("POST", path, body))
        self._open.add(stream)
        self._selector.register(sock, selectors.EVENT_WRITE, stream)

    def poll(self, seconds: float) -> list[tuple[Hashable, Event]]:
        """Return the events so far, in order within each stream; waits up to `seconds` for the first."""
        events, self._failed = self._failed, []
        for key, mask in self._selector.select(0.0 if events else max(seconds, 0.0)):
            stream: _Stream = key.data
            try:
                if mask & selectors.EVENT_WRITE:
                    if stream.send():
                        self._selector.modify(stream.sock, selectors.EVENT_READ, stream)
                    continue
                events += [(stream.key, event) for event in stream.receive()]
            except HttpError as error:
                events.append((stream.key, error))
                stream.ended = True
            except OSError as error:
                events.append((stream.key, Unreachable(f"{stream.what}: the connection failed ({error})")))
                stream.ended = True
            if stream.ended:
                self._drop(stream)
        return events

    def _drop(self, stream: _Stream) -> None:
        self._open.discard(stream)
        self._selector.unregister(stream.sock)
        stream.sock.close()


class _Stream:
    """One request and the events that answer it."""

    def __init__(self, key: Hashable, sock: socket.socket, what: str, request: bytes) -> None:
        self.key, self.sock, self.what = key, sock, what
        self.ended = False
        self._to_send = memoryview(request)
        self._connected = False
        self._raw = bytearray()
        self._status: int | None = None
        self._events = self._chunked = False
        self._body = bytearray()

    def send(self) -> bool:
        """Send what the socket takes; True when all is sent."""
        if not self._connected:
            code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise ConnectionError(code, errno.errorcode.get(code, str(code)))
            self._connected = True
        try:
            self._to_send = self._to_send[self.sock.send(self._to_send) :]
        except BlockingIOError:
            return False
        return not self._to_send

    def receive(self) -> Iterator[Event]:
        """Read once; returns the events. Raises HttpError and OSError."""
        try:
            data = self.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        self._raw += data
        if self._status is None and not self._read_head() and data:
            return
        self._read_body()
        if self._events:
            yield from self._split_events()
        if data or self.ended:
            return
        self.ended = True
        if self._status is None or self._events:
            raise ConnectionError("the server closed the connection in the middle of its answer")
        yield Reply(status=self._status, body=bytes(self._body), what=self.what)

    def _read_head(self) -> bool:
        end = self._raw.find(b"\r\n\r\n")
        if end < 0:
            if len(self._raw) > _MAX_HEAD_BYTES:
                raise BadReply(f"{self.what} did not answer in HTTP: {bytes(self._raw[:200])!r}")
            return False
        first, *rest = self._raw[:end].decode("latin-1").split("\r\n")
        version, _, tail = first.partition(" ")
        if not (version.startswith("HTTP/1.") and re.match("[0-9]{3}( |$)", tail)):
            raise BadReply(f"{self.what} did not answer in HTTP: {first[:200]!r}")
        fields = {k.strip().lower(): v.strip().lower() for k, _, v in (line.partition(":") for line in rest)}
        del self._raw[: end + 4]
        self._status = int(tail[:3])
        self._chunked = fields.get("transfer-encoding") == "chunked"
        self._events = self._status == 200 and fields.get("content-type", "").startswith("text/event-stream")
        return True

    def _read_body(self) -> None:
        """Move complete chunks from the raw bytes to the body."""
        if self._status is None:
            return
        raw, at = self._raw, 0
        if not self._chunked:
            self._body += raw
            at = len(raw)
        while self._chunked and (end := raw.find(b"\r\n", at)) >= 0:
            try:
                size = int(bytes(raw[at:end]).partition(b";")[0], 16)
            except ValueError:
                raise BadReply(
                    f"{self.what} sent a chunk without a size: {bytes(raw[at : at + 40])!r}"
                ) from None
            if size < 0 or size > MAX_REPLY_BYTES:
                raise BadReply(f"{self.what} announced a chunk of {size} bytes; at most {MAX_REPLY_BYTES}")
            if len(raw) < end + 2 + size + 2:
                break
            self._body += raw[end + 2 : end + 2 + size]
            at = end + 2 + size + 2
        del raw[:at]
        if len(self._body) > MAX_REPLY_BYTES:
            raise BadReply(f"{self.what} answered more than {MAX_REPLY_BYTES} bytes at once")

    def _split_events(self) -> Iterator[Event]:
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
