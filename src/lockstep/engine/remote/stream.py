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

from collections.abc import Hashable, Iterator

from lockstep.engine.remote.http import Exchange, Exchanges, Head, HttpError, Reply

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
