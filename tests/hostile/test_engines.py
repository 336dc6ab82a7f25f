"""Servers that answer with the wrong types, other tokens, NaN counters, or without end."""

import json
import math
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises
from sampled import engine_spec

from lockstep.config.engine import EngineConfig
from lockstep.engine.remote import driver as silence
from lockstep.engine.remote.driver import Job, read_load
from lockstep.engine.remote.http import BadReply, HttpClient, Reply
from lockstep.engine.sglang.driver import SGLangDriver, check_server
from lockstep.engine.sglang.engine import _Flow
from lockstep.engine.sglang.translate import Partial, read_event
from lockstep.engine.vllm.server import VLLMDriver
from lockstep.errors import EngineError
from lockstep.schema.rollout import GenerationRequest, SamplingParams

SPEC = engine_spec(folder=Path("model"), weights="folder", eos_token_ids=(99,), work_dir=Path("work"))
REQUEST = GenerationRequest(prompt_token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=4), seeds=(0,))
JOB = Job(id="j", request=REQUEST, index=0, sample=0)
JUNK = [
    None,
    True,
    False,
    -1,
    7.5,
    10**400,
    1e308,
    "7",
    "\x1b]0;x\x07",
    [],
    [[]],
    {},
    [None],
    [True],
    [7.5],
    [-1],
    [10**400],
    {"type": "x"},
    {"type": []},
]


def event(**meta):
    """What SGLang sends of a whole sample of two tokens."""
    return {
        "output_ids": [5, 9],
        "meta_info": {
            "id": "j.",
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "cached_tokens": 0,
            "finish_reason": {"type": "stop", "matched": 9},
            "output_token_logprobs": [[-0.5, 5, None], [-0.25, 9, None]],
        }
        | meta,
    }


def partial():
    return Partial(job=JOB, incremental=True)


def add(one):
    return partial().add(one, aborting=False, weight_version=None)


# types and ids of replies


def test_a_right_event_is_a_sample():
    sample = add(event())
    assert (sample.token_ids, sample.logprobs, sample.stop_reason) == ([5, 9], [-0.5, -0.25], 9)


@pytest.mark.parametrize(
    "wrong",
    [
        event() | {"output_ids": [7.5, 7.0]},
        event() | {"output_ids": [True, True]},
        event(output_token_logprobs=[[-0.5, 5, None], [-0.25, 8, None]]),  # of another token
        event(output_token_logprobs=[[-0.5, 5.0, None], [-0.25, 9, None]]),
        event(output_token_logprobs=[[False, 5, None], [-0.25, 9, None]]),
        event(output_token_logprobs=[[-(10**400), 5, None], [-0.25, 9, None]]),
        event(cached_tokens=-5),
        event(cached_tokens=1e308),
        event(prompt_tokens=3.0),
        event(finish_reason={"type": "stop", "matched": [9]}),
        event(finish_reason={"matched": 9}),
        event(completion_tokens=5, output_token_logprobs=[[-0.5, 5, None]] * 5) | {"output_ids": [5] * 5},
    ],
)
def test_sglang_events_of_wrong_types_or_other_tokens_are_refused(wrong):
    with pytest.raises(BadReply):
        add(wrong)


@pytest.mark.parametrize("name", ["output_ids", "meta_info", *event()["meta_info"]])
@pytest.mark.parametrize("junk", JUNK, ids=lambda junk: ascii(junk)[:20])
def test_any_field_of_an_sglang_event_may_be_junk(name, junk):
    one = event(**{name: junk}) if name in event()["meta_info"] else event() | {name: junk}
    try:
        sample = add(one)
    except EngineError as error:
        assert str(error).isprintable()
        return
    assert sample is None or set(map(type, sample.token_ids)) <= {int}
    assert sample is None or set(map(type, sample.logprobs)) <= {float}


def test_an_abort_that_nobody_asked_for_is_told_without_its_escapes():
    with pytest.raises(EngineError) as caught:
        add(event(finish_reason={"type": "abort", "message": "\x1b[2Jgone"}))
    assert "\\x1b[2Jgone" in str(caught.value) and "\x1b" not in str(caught.value)
    with pytest.raises(EngineError) as caught:
        read_event(b'{"error": {"message": "\\u001b[2Jgone"}}', "engine sglang")
    assert "\x1b" not in str(caught.value)


def vllm_reply(**fields):
    choice = {
        "token_ids": [5, 9],
        "logprobs": {"content": [{"token_id": 5, "logprob": -0.5}, {"token_id": 9, "logprob": -0.25}]},
        "finish_reason": "stop",
    }
    usage = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}}
    return {"choices": [choice | fields], "usage": usage | fields.get("usage", {})}


@pytest.fixture(scope="module")
def drivers():
    client = HttpClient("http://127.0.0.1:9", name="x")
    vllm = VLLMDriver(EngineConfig(name="vllm", url=client.url), SPEC, client=client, server=None)
    sglang = SGLangDriver(
        EngineConfig(name="sglang", url=client.url, unseeded=True), SPEC, client=client, server=None
    )
    return SimpleNamespace(vllm=vllm, sglang=sglang)


def test_a_right_vllm_reply_is_a_sample(drivers):
    assert drivers.vllm.read(JOB, vllm_reply()).logprobs == [-0.5, -0.25]


@pytest.mark.parametrize("junk", JUNK, ids=lambda junk: ascii(junk)[:20])
@pytest.mark.parametrize(
    "name",
    ["token_ids", "logprobs", "logprob", "token_id", "finish_reason", "cached_tokens", "prompt_tokens"],
)
def test_any_field_of_a_vllm_reply_may_be_junk(drivers, name, junk):
    reply = vllm_reply()
    choice, usage = reply["choices"][0], reply["usage"]
    holder = {
        "logprob": choice["logprobs"]["content"][0],
        "token_id": choice["logprobs"]["content"][0],
        "cached_tokens": usage["prompt_tokens_details"],
        "prompt_tokens": usage,
    }.get(name, choice)
    holder[name] = junk
    try:
        sample = drivers.vllm.read(JOB, reply)
    except EngineError as error:
        assert str(error).isprintable()
        return
    assert set(map(type, sample.token_ids)) == {int} and set(map(type, sample.logprobs)) == {float}
    # null is NaN until check_sample, which refuses it by name
    assert junk is None or all(map(math.isfinite, sample.logprobs))
    assert type(sample.cached_tokens) is int and sample.cached_tokens >= 0


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, derandomize=True)
@given(value=json_values)
def test_what_a_server_says_of_itself_may_be_anything(drivers, value):
    """Every reading of /v1/loads, /server_info and of an update's answer: a result or EngineError."""
    body = json.dumps(value).encode()

    def answer(*_, **__):
        return Reply(status=200, body=body, what="sglang: GET /x")

    def wrapped(name):
        return lambda *_, **__: Reply(status=200, body=json.dumps({name: value}).encode(), what="x")

    sglang = drivers.sglang
    reads = [
        (wrapped("loads"), lambda: sglang.load(1.0)),
        (answer, lambda: sglang.load(1.0)),
        (wrapped("internal_states"), sglang.memory),
        (answer, lambda: sglang._done("/x", {}, seconds=1.0)),
    ]
    for reply, read in reads:
        sglang._client = SimpleNamespace(get=reply, post=reply)
        try:
            read()
        except EngineError as error:
            assert str(error).isprintable()


@pytest.mark.parametrize(
    "info", [{"max_req_input_len": "x"}, {"max_req_input_len": []}, {"dp_size": "x"}, {"dp_size": 1.5}]
)
def test_an_sglang_server_that_describes_itself_wrongly(info, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    spec = SimpleNamespace(folder=tmp_path)
    with raises(EngineError, "bad-reply") as caught:
        check_server(info, {}, config=None, spec=spec, where="the server")
    assert f": {next(iter(info))} is " in str(caught.value)


def test_a_load_is_finite_or_left_out():
    assert read_load(12, 0.5).progress == 12.0
    for junk in (math.nan, math.inf, "x", None, [], True, 10**400):
        load = read_load(junk, junk)
        assert (load.progress, load.kv_cache_use) == (None, None)
    assert read_load(1, 1e308).kv_cache_use is None


# HTTP itself


@pytest.mark.parametrize(
    "answer",
    [
        "HTTP/1.1 \u00b2\u00b2\u00b2 OK\r\n\r\n".encode("latin-1"),
        "HTTP/1.1 200 OK\r\nContent-Length: \u00b2\r\n\r\nab".encode("latin-1"),
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"1" * 5000 + b"\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nContent-Length: -2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nab",
        b"\x00" * 70000,
    ],
)
def test_an_answer_that_is_not_http(answer):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        client = HttpClient(f"http://127.0.0.1:{listener.getsockname()[1]}", name="x")
        with pytest.raises(BadReply) as caught:
            client.post("/x", {}, seconds=20.0)
        thread.join(20.0)
    assert str(caught.value).isprintable()


# nothing waits for ever


class Clock:
    """Time that passes by being looked at."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(silence.time, "monotonic", self)

    def __call__(self):
        self.now += 0.05
        return self.now


class Engine:
    """As much of a RemoteEngine as a flow needs, with a scripted count of tokens."""

    name, request_seconds, max_model_len, in_flight_limit = "x", 4.0, 64, 8
    _sglang = SimpleNamespace(incremental=True, generate_path="/generate", weight_version=None)

    def __init__(self, count):
        self.count = count

    def note_load(self, *, seconds):
        return self.count()

    def stalled(self, text):
        return EngineError(text, code="wrong-state")

    def tokenizer(self):
        return None


def counts(*values):
    """A server that repeats these counts for ever."""
    state = iter(range(10**9))
    return lambda: values[next(state) % len(values)]


def rising(by):
    state = iter(range(10**9))
    return lambda: float(by * next(state))


@pytest.mark.parametrize(
    "count",
    [
        counts(None),  # what NaN and infinity are read as
        counts(5.0),
        counts(9.0, 8.0, 7.0),
        counts(0.0, 1e9),  # jumps further than samples need
        rising(1),  # runs on though nothing finishes
        rising(1e300),
    ],
)
def test_only_growth_that_samples_could_need_is_progress(monkeypatch, count):
    clock = Clock(monkeypatch)
    watch = silence.StallDetector(Engine(count))
    with raises(EngineError, "wrong-state"):
        while clock.now < 4000.0:
            watch.check(1)
    assert clock.now < 2000.0


def test_growth_that_samples_need_is_progress(monkeypatch):
    clock = Clock(monkeypatch)
    watch = silence.StallDetector(Engine(rising(1)))
    while clock.now < 40.0:  # ten times the limit, 40 of the 256 tokens that one sample may cost
        watch.check(1)


class Streams:
    """The same events at every poll."""

    def __init__(self, events):
        self.events = events

    def open(self, key, path, body):
        pass

    def poll(self, seconds):
        return [(0, one) for one in self.events]


@pytest.mark.parametrize(
    "chunk",
    [
        event(id="somebody else"),
        event(id=None),
        event(finish_reason=None, completion_tokens=0, output_token_logprobs=[]) | {"output_ids": []},
    ],
)
def test_events_without_new_tokens_are_no_progress(monkeypatch, chunk):
    clock = Clock(monkeypatch)
    flow = _Flow(Engine(counts(None)), Streams([json.dumps(chunk).encode()]))
    flow.add(JOB, {})
    with raises(EngineError, "wrong-state"):
        while clock.now < 100.0:
            flow.step()
    assert clock.now < 10.0


def test_tokens_without_end_are_refused():
    one = partial()
    chunk = event(finish_reason=None, completion_tokens=4, output_token_logprobs=[[-0.5, 5, None]] * 4)
    assert one.add(chunk | {"output_ids": [5] * 4}, aborting=False, weight_version=None) is None
    more = event(finish_reason=None, completion_tokens=5, output_token_logprobs=[[-0.5, 5, None]])
    with raises(BadReply, "bad-reply", reason="more tokens than max_tokens = 4"):
        one.add(more | {"output_ids": [5]}, aborting=False, weight_version=None)
