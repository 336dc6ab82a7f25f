"""Lockstep's engines in processes of their own: what the conformance suite does not ask."""

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from raising import raises

sys.path.insert(0, str(Path(__file__).parent))

from conformance_parts import conformance_model, prompt, request
from local_server_parts import Served, spec_of

from lockstep.config.engine import EngineConfig
from lockstep.engine.build import is_external, make_engine
from lockstep.engine.local_server.engine import make_server
from lockstep.engine.remote.driver import EventStreams
from lockstep.engine.remote.http import HttpClient, Unreachable
from lockstep.errors import ConfigError, EngineError
from lockstep.schema.rollout import Border, Span
from lockstep.schema.weights import UpdateSession, WeightBucket
from lockstep.wire.server_token import TOKEN


@pytest.fixture(scope="module")
def model():
    return conformance_model()


@pytest.fixture(scope="module")
def served(model, tmp_path_factory):
    made = Served(model, tmp_path_factory.mktemp("served"), transfer="disk", verify="always")
    made.push(1)
    yield made
    made.close()


def session(version=2):
    return UpdateSession(policy_version=version, run_id="test", deadline=time.monotonic() + 120)


def pid_of(engine):
    return engine._client.get("/info", seconds=30.0).object()["pid"]


def test_it_has_weights_of_its_own(model):
    own = EngineConfig(name="native", process="separate")
    assert is_external(own) and not is_external(EngineConfig(name="native"))
    with raises(ConfigError, "missing-argument"):
        make_engine(own, model=model)


def test_it_answers_only_who_knows_the_token(served):
    spec = served.engine._server.spec
    for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": f"Bearer {spec.token}x"}):
        stranger = HttpClient(spec.url, name="stranger", headers=headers)
        assert stranger.get("/info", seconds=30.0).status == 401
        for path in ("/generate", "/abort", "/sleep", "/weights/begin", "/weights/read"):
            assert stranger.post(path, {"flow": "x", "groups": []}, seconds=30.0).status == 401
    assert spec.token not in json.dumps(served.engine.describe()) + " ".join(spec.command)
    assert all(spec.token not in file.read_text() for file in spec.log.parent.glob("*.*") if file.is_file())


def test_what_is_no_request_is_an_answer(served):
    client = served.engine._client
    assert client.get("/no-such-path", seconds=30.0).status == 404
    assert client.post("/weights/read", {"wrong": 1}, seconds=30.0).status == 500
    assert client.post("/generate", {"flow": "x"}, seconds=30.0).status == 400
    assert client.post("/generate", b"no json", seconds=30.0).status == 400
    assert len(served.engine.generate([request(prompt(4), temperature=0.0)])[0]) == 1


def begun_of(completions, tokens, version):
    """The first tokens of each completion, as what this version wrote."""
    return tuple(
        (
            Span(
                author="policy",
                token_ids=c.token_ids[:tokens],
                logprobs=c.logprobs[:tokens],
                policy_version=version,
            ),
        )
        for c in completions
    )


def test_a_sample_that_an_earlier_request_began_goes_on(served, monkeypatch):
    asked = request(prompt(4), (0, 1), max_tokens=8)
    (whole,) = served.engine.generate([asked])
    version = served.engine.stats().policy_version
    asked = replace(asked, begun=begun_of(whole, 3, version - 1))
    (again,) = served.engine.generate([asked])
    for one, other in zip(again, whole, strict=True):
        assert one.token_ids == other.token_ids and one.logprobs[:3] == other.logprobs[:3]
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)  # it is not batch-invariant
        assert one.versions == ((version - 1, 3), (version, 5)) and one.policy_version == version

    driver = served.engine._local_server
    plain = driver.read
    for lost in ("token_ids", "logprobs"):  # as if the first one had not come back after the pause

        def read(job, reply, lost=lost):
            sample = plain(job, reply)
            kept = getattr(sample, lost)
            return replace(sample, **{lost: [*kept[1:], kept[-1]]})

        monkeypatch.setattr(driver, "read", read)
        with raises(EngineError, "wrong-result: start with the 3 tokens that were begun"):
            served.engine.generate([asked])
    monkeypatch.undo()
    assert len(served.engine.generate([asked])[0]) == 2


def lengths_under(served, border, asked):
    """Tokens of each sample, and whether it was cut off, of a stream with a border."""
    engine = served.engine
    engine.border = border
    (found,) = engine.generate([asked])
    assert engine.border is None  # of this stream alone
    return [(len(one.token_ids), one.finish_reason == "abort") for one in found]


def test_samples_are_cut_off_at_a_border_of_logical_time(served, monkeypatch):
    """Two slots, 12 tokens in each sample; the step's are those of seeds 0 and 1: E = 12, K = 24 / 2."""
    asked = request(prompt(4), tuple(range(6)), max_tokens=12, ignore_eos=True)
    border = Border(seeds=frozenset({0, 1}), tokens=0, slots=2)
    whole = [(12, False)] * 4
    assert lengths_under(served, border, asked) == [*whole, (0, True), (0, True)]
    later = replace(border, tokens=3)  # K = 27 / 2, rounded up
    assert lengths_under(served, later, asked) == [*whole, (2, True), (2, True)]

    driver = served.engine._local_server
    before = driver.load(30.0).progress
    assert lengths_under(served, Border(seeds=frozenset(), tokens=7, slots=6), asked) == [(2, True)] * 6
    assert driver.load(30.0).progress - before < 6 * 12  # it stops there

    plain = driver.read

    def read(job, reply):  # an engine that loses the last token of those that are cut off
        if reply["finish_reason"] == "abort":
            reply = reply | {name: reply[name][:-1] for name in ("token_ids", "logprobs")}
        return plain(job, reply)

    monkeypatch.setattr(driver, "read", read)
    with raises(EngineError, "wrong-result: 1 new tokens of sample 4: fewer"):
        lengths_under(served, later, asked)
    monkeypatch.undo()
    assert lengths_under(served, None, asked) == [(12, False)] * 6


def test_a_connection_that_breaks_while_cut_samples_arrive_changes_none(served, monkeypatch):
    """Sample 4 has arrived, as far as the border; sample 5 is asked for again."""
    plain, broken = EventStreams.poll, []

    def poll(self, seconds):
        for key, event in plain(self, seconds):
            yield key, event
            if not broken and isinstance(event, bytes) and b'"abort"' in event:
                broken.append(event)
                yield key, Unreachable("unreachable: the connection broke")
                return

    monkeypatch.setattr(EventStreams, "poll", poll)
    asked = request(prompt(4), tuple(range(6)), max_tokens=12, ignore_eos=True)
    border = Border(seeds=frozenset({0, 1}), tokens=3, slots=2)
    assert lengths_under(served, border, asked) == [(12, False)] * 4 + [(2, True)] * 2
    assert broken


def test_an_answer_of_an_old_version_is_refused(served, monkeypatch):
    driver = served.engine._local_server
    plain = driver.read
    monkeypatch.setattr(driver, "read", lambda job, reply: plain(job, reply | {"policy_version": 0}))
    with raises(EngineError, "bad-reply: policy_version 0 is not 1"):
        served.engine.generate([request(prompt(4))])


@pytest.mark.parametrize(
    ("index", "name", "shape", "message"),
    [
        (1, "model.norm.weight", (64,), "bad-reply: out-of-order"),
        (0, "model.no.weight", (64,), "bad-reply: wrong-weights, model.no.weight"),
        (0, "model.norm.weight", (3,), "bad-reply: wrong-shape, model.norm.weight"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_leave_it_dirty(
    served, tmp_path, index, name, shape, message
):
    from safetensors.torch import save_file

    from lockstep.wire.buckets import Layout

    layout, tensor, path = Layout(1 << 20), torch.ones(shape), tmp_path / "bucket.safetensors"
    layout.place(name, tensor)
    save_file({name: tensor}, path)
    opened = session()
    served.engine.begin_update(opened)
    with raises(EngineError, message):
        served.engine.receive(
            WeightBucket(
                index=index,
                specs=tuple(layout.specs),
                num_bytes=layout.num_bytes,
                transport="disk",
                handle={"path": str(path)},
            )
        )
    with raises(EngineError, "bad-reply: wrong-weights, lm_head.weight"):
        served.engine.finish_update(opened)
    served.engine.fail_update("the test's trainer failed")
    client = served.engine._client
    assert client.post("/generate", {"flow": "x", "groups": []}, seconds=30.0).status == 409
    with raises(EngineError, "wrong-state: dirty"):
        served.engine.generate([request(prompt(4))])
    served.push(3)
    assert served.engine.generate([request(prompt(4), temperature=0.0)])[0][0].policy_version == 3


def test_a_session_of_another_run_is_refused(served):
    served.engine.begin_update(session())
    served.engine._local_server._session["run_id"] = "of another"
    with raises(EngineError, "bad-reply: wrong-state, no weight session"):
        served.engine.finish_update(served.engine._session)
    served.engine.fail_update("the test's trainer failed")
    served.push(4)


def test_a_server_that_dies_comes_back_with_the_weights(served):
    """While nothing runs, and between two samples of a stream. What is asked for again is then another batch,
    whose logprobs need not have the same bits, as this engine is not batch-invariant."""
    asked = [request(prompt(6 + i), range(4), max_tokens=6 + 40 * i) for i in range(3)]
    whole = served.engine.generate(asked)
    os.kill(pid_of(served.engine), signal.SIGKILL)
    again = served.engine.generate(asked)
    killed = []

    def kill(*_):
        if not killed:
            killed.append(pid_of(served.engine))
            os.kill(killed[0], signal.SIGKILL)

    third = served.engine.generate(asked, on_completion=kill)
    fourth = served.engine.generate(asked)  # where all samples had come before the kill, it restarts only now
    for row, *others in zip(whole, again, third, fourth, strict=True):
        for other in others:
            for ours, theirs in zip(row, other, strict=True):
                assert theirs.logprobs == pytest.approx(ours.logprobs, abs=1e-5)
                assert replace(ours, cached_tokens=0, logprobs=theirs.logprobs, attempt=1) == replace(
                    theirs, cached_tokens=0, attempt=1
                )
    assert served.engine.stats().restarts == 2 and not served.engine.dirty
    os.kill(pid_of(served.engine), signal.SIGKILL)
    with raises(EngineError, "process-died", restarts=2):
        served.engine.generate(asked)


def test_a_server_that_cannot_start_says_why(model, tmp_path):
    spec = spec_of(model, tmp_path)
    (spec.folder / "config.json").unlink()
    config = EngineConfig(name="native", process="separate")
    with raises(EngineError, "process-died", reason="exited with status 1") as caught:
        make_engine(config, spec=spec)
    assert "config.json" in str(caught.value)  # of its log


def test_nothing_secret_is_in_the_file_of_a_server(model, tmp_path, monkeypatch):
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    config = EngineConfig(name="native", process="separate", env={"NCCL_DEBUG": "INFO"})
    spec = make_server(config, spec_of(model, tmp_path)).spec
    assert spec.environment["ATEN_CPU_CAPABILITY"] == "default" and spec.environment[TOKEN] == spec.token
    assert spec.token not in (tmp_path / "native-server.json").read_text()
    with raises(ConfigError, f"contradiction: engine.env.{TOKEN}"):
        make_server(config.model_copy(update={"env": {TOKEN: "x"}}), spec_of(model, tmp_path))


def test_weights_of_a_folder_are_read_by_the_server(model, tmp_path):
    from lockstep.models.export import export_hf

    export_hf(model.module, model.tokenizer, tmp_path / "whole")
    served = Served(model, tmp_path, spec={"weights": "folder", "folder": tmp_path / "whole"}, name="hf")
    try:
        embedded = make_engine(EngineConfig(name="hf"), model=model)
        asked = [request(prompt(9), range(3), temperature=0.7)]
        ((ours, *_),), ((theirs, *_),) = served.engine.generate(asked), embedded.generate(asked)
        assert ours.token_ids == theirs.token_ids and ours.policy_version == 0
    finally:
        served.close()
