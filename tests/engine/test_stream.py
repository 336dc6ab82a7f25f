"""EventStreams against sockets that answer what the tests say."""

import pytest

from lockstep.engine.remote.driver import EventStreams
from lockstep.engine.remote.http import BadReply, Reply, Unreachable

from .test_http import answering, ok

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


def events_of(raw):
    """What comes of one POST, up to its end."""
    with answering(raw) as (client, _), EventStreams(client) as streams:
        streams.open("a", "/generate", b"{}")
        found = []
        while not found or isinstance(found[-1], bytes):
            found += [event for key, event in streams.poll(5.0) if key == "a"]
        return found


@pytest.mark.parametrize("piece", [1, 5, 1000])
def test_events_in_pieces(piece):
    body = b'data: {"a": 1}\n\n: still here\n\ndata: 2\n\ndata: [DONE]\n\n'
    pieces = [chunk(body[i : i + piece]) for i in range(0, len(body), piece)]
    assert events_of(HEAD + b"".join(pieces)) == [b'{"a": 1}', b"2", None]


@pytest.mark.parametrize("end", [b"", b"0\r\n\r\n", b"7\r\nda"])
def test_events_before_a_break_count(end):
    first, broken = events_of(HEAD + chunk(b"data: 1\n\n") + end)
    assert first == b"1" and isinstance(broken, Unreachable)


def test_an_answer_without_events_is_a_reply():
    (reply,) = events_of(ok(b'{"error": "no"}').replace(b"200 OK", b"400 Bad"))
    assert isinstance(reply, Reply) and (reply.status, reply.error_text()) == (400, "no")


@pytest.mark.parametrize(
    "raw", [b"SSH-2.0\r\n\r\n", HEAD + b"zz\r\n", HEAD + b"-1\r\n", HEAD + b"ffffffff\r\n"]
)
def test_answers_are_not_trusted(raw):
    (error,) = events_of(raw)
    assert isinstance(error, BadReply)
