"""HttpClient against sockets that answer what the tests say."""

import contextlib
import json
import socket
import threading
import time

import pytest
from raising import raises

from lockstep.engine.remote import http
from lockstep.engine.remote.http import BadReply, HttpClient, Timeout, Unreachable
from lockstep.errors import ConfigError


@contextlib.contextmanager
def answering(*answers):
    """A client of a server that answers its n-th connection with answers[n] (the last one again): bytes, or a
    function of the connection."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    count = [0]

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            answer = answers[min(count[0], len(answers) - 1)]
            count[0] += 1
            threading.Thread(target=handle, args=(connection, answer), daemon=True).start()

    def handle(connection, answer):
        with connection, contextlib.suppress(OSError):
            connection.recv(65536)
            if callable(answer):
                answer(connection)
            elif answer:
                connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield HttpClient(f"http://127.0.0.1:{listener.getsockname()[1]}", name="test"), count
    finally:
        listener.close()


def ok(body, extra=b""):
    return b"HTTP/1.1 200 OK\r\n" + extra + b"Content-Length: %d\r\n\r\n" % len(body) + body


def test_get_and_post():
    with answering(ok(b'{"a": [1, 2.5, null]}')) as (client, _):
        assert client.get("/x", seconds=5).object() == {"a": [1, 2.5, None]}
        assert client.post("/x", {"b": 1}, seconds=5).json() == {"a": [1, 2.5, None]}


def test_the_request_that_is_sent():
    client = HttpClient("http://127.0.0.1:80/base/", name="test")
    head, _, body = client.request("POST", "/x?y=1", {"é": [1, 2]}).partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /base/x?y=1 HTTP/1.1" and "Host: 127.0.0.1:80" in lines
    assert json.loads(body) == {"é": [1, 2]} and f"Content-Length: {len(body)}" in lines


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "raw",
    [
        CHUNKED + b'3\r\n{"a\r\n4;x=y\r\n": 7\r\n1\r\n}\r\n0\r\n\r\n',
        b'HTTP/1.0 200 OK\r\n\r\n{"a": 7}',  # until it closes
        ok(b'{"a": 7}', b"X-Other: y\r\n"),
    ],
)
@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_bodies_in_pieces(raw, piece):
    def slowly(connection):
        for i in range(0, len(raw), piece):
            connection.sendall(raw[i : i + piece])
            if piece < 100:
                time.sleep(0.001)

    with answering(slowly) as (client, _):
        assert client.get("/x", seconds=10).json() == {"a": 7}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"SSH-2.0-hello\r\n\r\n", "bad-reply: HTTP"),
        (b"x" * 100_000, "bad-reply: HTTP"),
        (b"HTTP/1.1 OK\r\n\r\n", "bad-reply: HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", "too-large: Content-Length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "too-large: Content-Length"),
        (CHUNKED + b"zz\r\n", "bad-reply: chunk"),
        (ok(b"{"), "not-json"),
        (ok(b"[" * 100_000), "not-json"),
        (ok(b'{"a": Infinity}'), "not-json"),
        (ok(b"\xff\xfe"), "not-json"),
    ],
)
def test_replies_are_not_trusted(raw, message):
    with answering(raw) as (client, _), raises(BadReply, message):
        client.get("/x", seconds=5).json()


def test_a_reply_without_end(monkeypatch):
    monkeypatch.setattr(http, "MAX_REPLY_BYTES", 1_000_000)

    def flood(connection):
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(1000):
            connection.sendall(b"y" * 65536)

    with answering(flood) as (client, _), raises(BadReply, "too-large"):
        client.get("/x", seconds=20)


def test_errors_carry_what_the_server_says():
    body = b'{"error": {"message": "prompt too long", "code": 400}}'
    with answering(b"HTTP/1.1 400 Bad\r\nContent-Length: %d\r\n\r\n" % len(body) + body) as (client, _):
        reply = client.post("/x", {}, seconds=5)
        assert reply.status == 400
        with raises(BadReply, "bad-reply", status=400, reason="prompt too long"):
            reply.json()


def test_a_get_is_asked_again_and_a_post_is_not():
    with answering(None, None, ok(b"1")) as (client, count):
        assert client.get("/x", seconds=5).json() == 1
        assert count == [3]
    with answering(None, ok(b"1")) as (client, count), raises(Unreachable, "unreachable"):
        client.post("/x", {}, seconds=5)


def test_deadlines():
    with answering(lambda c: time.sleep(30)) as (client, _):
        for ask in (client.get, client.post):
            with raises(Timeout, "deadline"):
                ask("/x", seconds=0.3)


def test_a_connection_that_breaks_in_the_middle():
    with (
        answering(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc") as (client, _),
        raises(Unreachable, "unreachable"),
    ):
        client.post("/x", {}, seconds=5)


def test_nothing_listens():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        client = HttpClient(f"http://127.0.0.1:{probe.getsockname()[1]}", name="test")
    with raises(Unreachable, "unreachable", reason="[Errno 111] Connection refused"):
        client.get("/x", seconds=5)


def test_hundreds_at_once_never_more_than_the_limit():
    lock, now, most = threading.Lock(), [0], [0]

    def count(connection):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.02)
        with lock:
            now[0] -= 1
        connection.sendall(ok(b"1"))

    with answering(count) as (client, total), client.batch(limit=40) as batch:
        for key in range(300):
            batch.submit(key, "/x", {"key": key})
        seen = []
        while batch.waiting:
            seen += [key for key, reply in batch.poll(1.0) if reply.json() == 1]
        assert sorted(seen) == list(range(300)) and total == [300]
        assert 2 <= most[0] <= 40


def test_what_was_not_sent_can_be_taken_back():
    with answering(lambda c: time.sleep(30)) as (client, _), client.batch(limit=2) as batch:
        for key in range(5):
            batch.submit(key, "/x", {})
        assert batch.poll(0.2) == []
        assert batch.drop_unsent() == [2, 3, 4] and batch.waiting == 2


def test_closing_a_batch_closes_its_connections():
    closed = threading.Event()

    def wait(connection):
        if connection.recv(1) == b"":
            closed.set()

    with answering(wait) as (client, _):
        with client.batch(limit=1) as batch:
            batch.submit(0, "/x", {})
            batch.poll(0.2)
        assert closed.wait(5.0)


@pytest.mark.parametrize(
    "url", ["https://x:1", "127.0.0.1:8000", "http://", "http://x:99999", "http://u:p@x:1", "http://x?y"]
)
def test_urls_that_are_none(url):
    with raises(
        ConfigError,
        "wrong-format: port" if "99999" in url else "wrong-format: is not of the form http://host:port",
    ):
        HttpClient(url, name="test")
