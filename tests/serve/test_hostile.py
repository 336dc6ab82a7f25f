"""Requests that no client of good will sends: typed errors, and nothing executed or lost."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
from typing import Any

import pytest
from serving import message, post, result

from lockstep.observe.memory import peak_rss_bytes

zstandard = pytest.importorskip("zstandard", reason="of the client")


def session(served: Any, user: str = "ada") -> str:
    body = {"tags": [], "user_metadata": None, "sdk_version": "0"}
    return str(post(served, "create_session", body, user=user)[1]["session_id"])


def client(served: Any, user: str = "ada") -> str:
    """A training client that is there."""
    body = {"session_id": session(served, user), "model_seq_id": 0, "base_model": "tiny"}
    asked = post(served, "create_model", body | {"lora_config": {"rank": 2, "seed": 1}}, user=user)[1]
    return str(result(served, asked["request_id"], user=user)["model_id"])


def step(served: Any, body: bytes) -> tuple[int, dict[str, Any]]:
    return post(served, "forward_backward", body, **{"Content-Type": "application/x-protobuf"})


@pytest.fixture(scope="module")
def mine(served: Any) -> str:
    """One client for tests that do not change it."""
    return client(served)


def test_nobody_gets_in_without_a_token(served: Any) -> None:
    assert post(served, "create_session", {}, user=None)[0] == 401
    assert post(served, "create_session", {}, user=None, **{"X-API-Key": "tml-guess"})[0] == 401
    status, answer = post(served, "create_session", {}, Host="evil.example")
    assert (status, answer["code"]) == (401, "not-authenticated")
    assert post(served, "forward_backward", b"\xff" * 100, user=None)[0] == 401


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", "not-json"),
        (b"\xff\xfe", "not-json"),
        (b"[" * 100_000, "too-deep"),
        (b"NaN", "not-json"),
        (b"[]", "wrong-field"),
        ({"tags": [], "user_metadata": None, "sdk_version": "0", "shell": "rm"}, "wrong-field"),
        ({"tags": 3, "user_metadata": None, "sdk_version": "0"}, "wrong-field"),
    ],
)
def test_bad_json(served: Any, body: Any, code: str) -> None:
    status, answer = post(served, "create_session", body)
    assert (status, answer["code"]) in ((400, code), (400, "not-json"))


def test_too_much_and_compressed_bodies(served: Any) -> None:
    status, answer = post(served, "forward_backward", bytes(2**26 + 1))
    assert (status, answer["code"]) == (413, "too-large")
    status, answer = post(served, "forward_backward", b"x", **{"Content-Encoding": "zstd"})
    assert (status, answer["code"]) == (400, "refused")


def test_ids_of_others_are_unknown(served: Any) -> None:
    bobs = client(served, "bob")
    assert step(served, message(bobs))[0] == 404
    assert post(served, "get_info", {"model_id": bobs})[0] == 404
    assert post(served, "retrieve_future", {"request_id": f"{bobs}:0"})[0] == 404
    assert post(served, "save_weights", {"model_id": bobs, "seq_id": 1, "path": "x"})[0] == 404
    assert post(served, "get_info", {"model_id": bobs}, user="bob")[0] == 200


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/tmp/x", ".hidden", "a/b", "", "x" * 200, "ephemeral-1"]
)
def test_names_cannot_leave_the_folder(served: Any, mine: str, name: str) -> None:
    status, answer = post(served, "save_weights", {"model_id": mine, "seq_id": 1, "path": name})
    assert (status, answer["code"]) == (400, "bad-file-name")
    path = {"tinker_path": f"tinker://../weights/{name}"}
    assert post(served, "weights_info", path)[0] == 404


def test_a_request_is_executed_once(served: Any) -> None:
    model_id = client(served)
    first, again = (step(served, message(model_id))[1]["request_id"] for _ in range(2))
    assert first == again
    adam = {"model_id": model_id, "adam_params": {"learning_rate": 0.1}}
    asked = [post(served, "optim_step", adam | {"seq_id": 2})[1]["request_id"] for _ in range(3)]
    assert len(set(asked)) == 1
    assert result(served, asked[0])["metrics"]["grad_norm"] > 0
    # Executed twice, the step would have found no gradients.
    left = post(served, "optim_step", adam | {"seq_id": 3})[1]["request_id"]
    assert result(served, left)["error"].startswith("no-gradients")
    status, answer = post(served, "optim_step", adam | {"seq_id": 9})
    assert (status, answer["code"], answer["expected"]) == (400, "out-of-order", 4)


def test_malformed_documents(served: Any) -> None:
    model_id, seq_id = client(served), 0
    cases = [
        (message(model_id, 1, tokens=b"\5\0\0"), "wrong-format"),
        (message(model_id, 2, tokens=b"\xff\xff\xff\x7f"), "outside-vocabulary"),
        (message(model_id, 3, tokens=bytes(4 * 5000)), "too-long"),
        (message(model_id, 4, tokens=b""), "too-long"),
        (message(model_id, 5, targets=bytes(16)), "wrong-shape"),
        (message(model_id, 6, targets=b"\xff" * 8), "outside-vocabulary"),
        (message(model_id, 7, weights=b"\0\0\xc0\x7f"), "not-finite"),
        (message(model_id, 8, prices=bytes(4)), "unknown-name"),
        (message(model_id, 9, target_tokens=bytes(4)), "wrong-type"),  # as float32
    ]
    for body, code in cases:
        seq_id += 1
        answer = result(served, step(served, body)[1]["request_id"])
        assert answer["error"].startswith(code) and answer["category"] == "user"
    assert step(served, b"\xff" * 64)[1]["code"] == "wrong-format"
    left = post(served, "optim_step", {"model_id": model_id, "seq_id": seq_id + 1, "adam_params": {}})[1][
        "request_id"
    ]
    assert result(served, left)["error"].startswith("no-gradients")  # nothing was executed


@pytest.mark.parametrize(
    "change",
    [
        {"num_samples": 10**9},
        {"num_samples": 0},
        {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [10**6]}]}},
        {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [5] * 5000}]}},
        {"prompt": {"chunks": []}},
        {"sampling_params": {"max_tokens": -1}},
        {"sampling_params": {"temperature": -1.0}},
        {"sampling_params": {"top_p": 0.0}},
        {"sampling_params": {"stop": ["x"] * 1000}},
        {"topk_prompt_logprobs": 65},
        {"topk_sample_logprobs": -1},
        {"target_prompt_logprobs": {"data": [5, 6], "dtype": "int64", "shape": [2]}},
        {"target_prompt_logprobs": {"data": [10**6], "dtype": "int64", "shape": [1, 1]}},
        {"target_prompt_logprobs": {"data": [2**64], "dtype": "int64", "shape": [1, 1]}},
        {"prompt_logprobs_last_n": 1},
        {"prompt_alt_tokens_k": 2},
        {"seq_id": -1},
        {"sampling_session_id": "s-0:sample:0"},
    ],
)
def test_bad_sample_requests(served: Any, change: dict[str, Any]) -> None:
    opened = {"session_id": session(served), "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampling = post(served, "create_sampling_session", opened)[1]["sampling_session_id"]
    body = {
        "sampling_session_id": sampling,
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
        "sampling_params": {"max_tokens": 1},
    }
    status, answer = post(served, "asample", body | change)
    assert status in (400, 404) and answer["code"]


def test_what_is_not_served_is_refused_by_name(served: Any) -> None:
    from lockstep.serve.app import REFUSED

    for name in REFUSED:
        status, answer = post(served, name, {})
        assert (status, answer["code"], answer["request"]) == (400, "refused", name)


NAMES = ("../x", "a/b", "/etc/passwd", ".", "..", "\0", "x" * 10**5, "%2e%2e", "a\nb", "$(id)", "", "\ud800")
BOMB = zstandard.compress(bytes(2**26))


def hostile(number: int, chance: random.Random, mine: str, bobs: str) -> tuple[str, Any, dict[str, str]]:
    """Path, body and headers of a request that must be refused."""
    fields: dict[str, dict[str, Any]] = {
        "create_model": {
            "session_id": "s",
            "model_seq_id": 0,
            "base_model": "tiny",
            "lora_config": {"rank": 2},
        },
        "optim_step": {"model_id": bobs, "seq_id": 1, "adam_params": {"learning_rate": 0.1}},
        "save_weights": {"model_id": bobs, "seq_id": 1, "path": "x"},
        "save_weights_for_sampler": {"model_id": bobs, "seq_id": 1, "path": "x"},
        "save_weights_external": {"model_id": bobs, "seq_id": 1, "path": "x"},
        "load_weights": {"model_id": mine, "seq_id": 1, "path": "tinker://x", "optimizer": True},
        "create_sampling_session": {"session_id": "s", "sampling_session_seq_id": 0, "base_model": "tiny"},
        "retrieve_future": {"request_id": f"{bobs}:0"},
        "get_info": {"model_id": bobs},
        "weights_info": {"tinker_path": "tinker://x/weights/y"},
        "session_heartbeat": {"session_id": bobs.partition(":")[0]},
    }
    path = chance.choice(list(fields))
    if number % 5 == 0:  # protobuf with a length that is a lie, cut and changed
        raw = message(mine, 1)
        cut = bytearray(raw[: chance.randrange(len(raw))])
        for _ in range(chance.randrange(1, 6)):
            cut.insert(chance.randrange(len(cut) + 1), chance.randrange(256))
        return "forward_backward", b"\x12\xff\xff\xff\xff\x7f" + bytes(cut), {}
    if number % 5 == 1:
        return path, BOMB, {"Content-Encoding": chance.choice(["zstd", "gzip", "br", "x"])}
    if number % 5 == 2:  # JSON that is cut, deep, or of another kind
        raw = json.dumps(fields[path]).encode()
        cut_json = raw[: chance.randrange(1, len(raw))]
        broken = (cut_json, b"[" * 10**5, b'{"a":' * 10**4, b"9" * 10**5, b"\xff")
        return path, chance.choice(broken), {}
    if number % 5 == 3:
        body = {"model_id": mine, "seq_id": 1, "path": chance.choice(NAMES)}
        return chance.choice(["save_weights", "save_weights_external", "load_weights"]), body, {}
    wrong = (None, -1, 2**70, [], {}, "", "\0", "x" * 10**5, f"tinker://{bobs}/weights/x", [[]])
    return path, {**fields[path], chance.choice(list(fields[path])): chance.choice(wrong)}, {}


def status_before_the_body(served: Any, size: int) -> int:
    """The status of a request by nobody, of which only the headers are sent."""
    with contextlib.closing(http.client.HTTPConnection(*served.url.split("//")[1].split(":"))) as connection:
        connection.timeout = 60
        connection.putrequest("POST", "/api/v1/forward_backward")
        connection.putheader("Content-Length", str(size))
        connection.endheaders()
        return connection.getresponse().status


def test_500_generated_requests(served: Any) -> None:
    """Each gets a typed refusal, none changes the clients that it is about, and memory stays bounded."""
    chance, before = random.Random(5), peak_rss_bytes()
    mine, bobs = client(served), client(served, "bob")
    for number in range(500):
        path, body, headers = hostile(number, chance, mine, bobs)
        status, answer = post(served, path, body, **headers)
        assert 400 <= status < 500 and answer["code"], (number, path, status, answer)
    for size in (len(message(mine, 1)), 10**6, len(BOMB)):
        assert status_before_the_body(served, size) == 401
    assert peak_rss_bytes() - before < 2**28
    adam = {"model_id": mine, "seq_id": 1, "adam_params": {}}
    left = post(served, "optim_step", adam)[1]["request_id"]
    assert result(served, left)["error"].startswith("no-gradients")  # nothing was executed, nothing lost
    assert post(served, "get_info", {"model_id": bobs}, user="bob")[0] == 200
