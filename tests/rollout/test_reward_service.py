"""A reward behind http: a real server, and every way in which it can answer badly."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from raising import raises

from lockstep.config.load import build
from lockstep.config.rollout import RewardConfig
from lockstep.errors import ConfigError, RewardError
from lockstep.protocols.reward import RewardInput
from lockstep.rollout.reward_functions import RewardFailure
from lockstep.rollout.reward_service import PROTOCOL, read_reply
from lockstep.rollout.rewards import RewardSet

Answer = Callable[[dict[str, Any], int], tuple[int, bytes] | None]
"""Of a request and how often it came, (status, body); None: no answer until the connection is cut."""


def lengths(request: dict[str, Any], tries: int) -> tuple[int, bytes]:
    """Scores by the length of the completion."""
    scores = [len(sample["completion"]) for sample in request["samples"]]
    return 200, json.dumps({"request_id": request["request_id"], "scores": scores}).encode()


class Service:
    """Answers requests that have samples with `answer`, others as the protocol asks."""

    def __init__(self) -> None:
        self.answer: Answer = lengths
        self.requests: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.most_at_once = self._now = 0
        self._lock, self._ended = threading.Lock(), threading.Event()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with service._lock:
                    service.requests.append(request)
                    service.headers.append(self.headers)
                    service._now += 1
                    service.most_at_once = max(service.most_at_once, service._now)
                    tries = sum(each["request_id"] == request["request_id"] for each in service.requests)
                reply = (service.answer if request["samples"] else lengths)(request, tries)
                with service._lock:
                    service._now -= 1
                if reply is None:
                    service._ended.wait(30)
                    return
                self.send_response(reply[0])
                self.end_headers()
                self.wfile.write(reply[1])

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/score?model=a"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    yield service
    service.close()


def samples(*completions: str) -> list[RewardInput]:
    return [
        RewardInput(
            prompt=f"<|user|>{i}",
            completion=text,
            row={"answer": i, "pair": (1, 2)},
            prompt_token_ids=(1, 2),
            completion_token_ids=(3,),
            finish_reason="stop",
            index=i,
            conversation=[{"role": "user", "content": str(i)}],
        )
        for i, text in enumerate(completions)
    ]


def rewards_of(service: Service, **settings: Any) -> RewardSet:
    return RewardSet([RewardConfig(name="http", url=service.url, **settings)])


def test_batches_go_out_and_a_score_of_0_is_a_score(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "secret")
    rewards = rewards_of(service, batch_size=2, weight=2.0, token_env="REWARD_TOKEN")
    scored = rewards.score(samples("", "a", "bb", "ccc", "dddd"))
    assert [s.by_name["http"] for s in scored] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [s.total for s in scored] == [0.0, 2.0, 4.0, 6.0, 8.0]
    first, *rest = service.requests  # the first one asks whether anybody is there
    assert first["samples"] == [] and sorted(len(r["samples"]) for r in rest) == [1, 2, 2]
    assert len({r["request_id"] for r in rest}) == 3 and {r["protocol"] for r in rest} == {PROTOCOL}
    (sent,) = (s for r in rest for s in r["samples"] if s["completion"] == "bb")
    assert sent == {
        "prompt": "<|user|>2",
        "completion": "bb",
        "conversation": [{"role": "user", "content": "2"}],
        "row": {"answer": 2, "pair": {"$tuple": [1, 2]}},
        "prompt_token_ids": [1, 2],
        "completion_token_ids": [3],
        "finish_reason": "stop",
        "index": 2,
    }
    for request, headers in zip(service.requests, service.headers, strict=True):
        assert headers["Idempotency-Key"] == request["request_id"]
        assert headers["Authorization"] == "Bearer secret"
    before = {r["request_id"] for r in rest}
    rewards.score(samples("", "a", "bb", "ccc", "dddd"))
    assert {r["request_id"] for r in service.requests[4:]} == before  # the same samples, the same id


def test_no_more_requests_at_a_time_than_allowed(service: Service) -> None:
    together = threading.Barrier(2)

    def answer(request: dict[str, Any], tries: int) -> tuple[int, bytes]:
        together.wait(30)  # two are under way at once
        return lengths(request, tries)

    service.answer = answer
    rewards = rewards_of(service, batch_size=1, max_concurrency=2)
    assert [s.total for s in rewards.score(samples("a", "bb", "ccc", "dddd"))] == [1, 2, 3, 4]
    assert service.most_at_once == 2


def test_a_busy_service_is_asked_again_with_the_same_id(service: Service) -> None:
    service.answer = lambda request, tries: (503, b"busy") if tries < 3 else lengths(request, tries)
    rewards = rewards_of(service)
    assert [s.total for s in rewards.score(samples("abc"))] == [3.0]
    assert rewards.pop_counts() == {"http/retried": 2}
    assert len({r["request_id"] for r in service.requests if r["samples"]}) == 1


def changed(change: Callable[[dict[str, Any]], Any]) -> Answer:
    """`lengths` with another reply object."""

    def answer(request: dict[str, Any], tries: int) -> tuple[int, bytes]:
        return 200, json.dumps(change(json.loads(lengths(request, tries)[1]))).encode()

    return answer


BAD = {
    "late": (lambda request, tries: None, "did not answer within 0.5 s (2 attempts)"),
    "busy": (lambda request, tries: (503, b"no room"), "answered with status 503: 'no room' (2 attempts)"),
    "refuses": (lambda request, tries: (401, b"who?"), "answered with status 401: 'who?'"),
    "no JSON": (lambda request, tries: (200, b"<html>"), "is not JSON: '<html>'"),
    "a list": (changed(lambda reply: reply["scores"]), "is not an object with 'scores'"),
    "too few": (changed(lambda reply: reply | {"scores": reply["scores"][1:]}), "1 scores for 2 samples"),
    "too many": (changed(lambda reply: reply | {"scores": [1.0] * 3}), "3 scores for 2 samples"),
    "a text": (changed(lambda reply: reply | {"scores": "12"}), "scores = '12' for 2 samples"),
    "of another": (changed(lambda reply: reply | {"request_id": "x"}), "request_id 'x' for request"),
    "too long": (changed(lambda reply: reply | {"more": "x" * 10**6}), "sent a response of more than"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_answer_drops_or_fails_every_sample_of_its_request(service: Service, case: str) -> None:
    bad, message = BAD[case]
    service.answer = lambda request, tries: (
        bad if request["samples"][0]["completion"] == "bad" else lengths
    )(request, tries)
    settings: dict[str, Any] = {"batch_size": 2, "retries": 1, "timeout_seconds": 0.5}
    dropping = rewards_of(service, **settings, on_error="drop")
    scored = dropping.score(samples("bad", "a", "bb", "ccc"))
    assert [None if s is None else s.total for s in scored] == [None, None, 2.0, 3.0]
    counts = dropping.pop_counts()
    assert counts.pop("http/retried", 0) == (case in ("late", "busy"))
    assert counts == {"http/failed": 2, "dropped": 2}
    with pytest.raises(RewardError) as info:
        rewards_of(service, **settings).score(samples("bad", "a", "bb", "ccc"))
    assert message in str(info.value) and "row 1" in str(info.value)


@pytest.mark.parametrize(
    ("score", "message"),
    [
        ("NaN", "score nan"),
        ("-Infinity", "score -inf"),
        ("1e999", "score inf"),
        ("1" + "0" * 400, "a finite number"),
        ("null", "score None"),
        ("true", "score True"),
        ('"3"', "score '3'"),
        ('{"error": "no \\u001b answer"}', "reported 'no \\\\x1b answer'"),
    ],
)
def test_one_bad_score_is_that_sample_s_alone(service: Service, score: str, message: str) -> None:
    def answer(request: dict[str, Any], tries: int) -> tuple[int, bytes]:
        return 200, f'{{"request_id": "{request["request_id"]}", "scores": [0, {score}, 2]}}'.encode()

    service.answer = answer
    dropping = rewards_of(service, on_error="drop")
    scored = dropping.score(samples("a", "b", "c"))
    assert [None if s is None else s.total for s in scored] == [0.0, None, 2.0]
    assert dropping.pop_counts() == {"http/failed": 1, "dropped": 1}
    with pytest.raises(RewardError) as info:
        rewards_of(service).score(samples("a", "b", "c"))
    assert message in str(info.value) and "row 2" in str(info.value)


def test_bytes_that_drip_do_not_put_off_the_deadline(service: Service) -> None:
    """A socket's own timeout would begin anew with each of them."""
    listener = socket.create_server(("127.0.0.1", 0))
    done = threading.Event()

    def drip() -> None:
        for number in range(3):
            connection, _ = listener.accept()
            head = connection.recv(1 << 16)
            if number == 0:  # the question at the start
                while b'"samples":[]}' not in head:
                    head += connection.recv(1 << 16)
                request = json.loads(head.partition(b"\r\n\r\n")[2])
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + lengths(request, 1)[1])
                connection.close()
                continue
            connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            try:
                while not done.wait(0.05):
                    connection.sendall(b"x")
            except OSError:
                pass
            connection.close()

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    config = RewardConfig(name="http", url=url, timeout_seconds=0.5, retries=1, on_error="drop")
    rewards = RewardSet([config])
    assert rewards.score(samples("a")) == [None]
    assert rewards.pop_counts() == {"http/failed": 1, "http/retried": 1, "dropped": 1}
    done.set()
    thread.join(30)
    listener.close()
    assert not thread.is_alive()


def test_closing_ends_a_request_that_waits(service: Service) -> None:
    asked = threading.Event()

    def answer(request: dict[str, Any], tries: int) -> None:
        asked.set()

    service.answer = answer
    rewards = rewards_of(service, timeout_seconds=300.0, on_error="drop")
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.extend(rewards.score(samples("a"))))
    thread.start()
    assert asked.wait(30)
    rewards.close()
    thread.join(30)
    assert not thread.is_alive() and result == [None]
    service.answer = lengths
    assert [s.total for s in rewards.score(samples("a"))] == [1.0]


def test_what_is_no_such_service_is_refused_at_the_start(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with raises(ConfigError, "unreachable: rewards.url"):
        RewardSet([RewardConfig(name="http", url=f"http://127.0.0.1:{port}/", retries=0)])
    monkeypatch.delenv("NO_SUCH_TOKEN", raising=False)
    with raises(ConfigError, "wrong-environment: rewards.token_env"):
        rewards_of(service, token_env="NO_SUCH_TOKEN")


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"name": "http"}, "needs the service's address"),
        ({"name": "http", "url": "ftp://host/"}, "needs the service's address"),
        ({"name": "http", "url": "http://a b"}, "needs the service's address"),
        ({"name": "http", "url": "http://host:99999/"}, "is not of the form"),
        ({"name": "http", "url": "https://me:hunter2@host/"}, "contains a password in a URL"),
        ({"name": "ids", "url": "http://host/"}, "has no effect with name = 'ids'"),
        ({"name": "http", "url": "http://host/", "retries": -1}, "retries"),
    ],
)
def test_settings_that_cannot_work_are_refused(reward: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as info:
        build({"kind": "grpo", "rewards": [reward]}, origin="test")
    assert message in str(info.value) and "hunter2" not in str(info.value)


def test_a_reply_is_read_as_the_protocol_says() -> None:
    scores = read_reply(b'{"request_id": "7", "scores": [0, 0.5, {"error": "x"}]}', "7", 3)
    assert scores[:2] == [0.0, 0.5] and isinstance(scores[2], RewardFailure)
