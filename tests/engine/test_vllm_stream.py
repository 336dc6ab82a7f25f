"""VLLMEngine's stream over a fake of its core: no vLLM. tests/vllm has the same over vLLM itself."""

import threading
import time
import types

import pytest
from raising import raises

from lockstep.config.engine import EngineConfig
from lockstep.engine.streaming import turn_seed
from lockstep.engine.vllm import engine as module
from lockstep.engine.vllm.engine import VLLMEngine
from lockstep.errors import EngineError
from lockstep.schema.rollout import SamplingParams
from lockstep.schema.weights import UpdateSession

from .servers import requests_of, spec_in


class FakeCore:
    """As `Core`: each step gives every sample a token, its seed and so on."""

    def __init__(self, config, spec):
        self.seconds, self.last_progress, self.description = 0.0, 0.0, {}
        self.running, self.submitted, self.slow = {}, [], 0.0

    def submit(self, samples):
        for key, sampling in samples:
            self.running[key] = (sampling, [])
            self.submitted.append((key[0].request.prompt_token_ids, sampling["seed"]))

    def advance(self, abort, more):
        while self.running and not more:
            if abort.is_set():
                return self.abort_all()
            time.sleep(self.slow)
            for sampling, ids in self.running.values():
                ids.append((sampling["seed"] + len(ids)) % 100)
            done = [k for k, (sampling, ids) in self.running.items() if len(ids) == sampling["max_tokens"]]
            if done:
                return [(key, self._output(key, "length")) for key in done]
        return []

    def abort_all(self):
        return [(key, self._output(key, "abort")) for key in list(self.running)]

    def _output(self, key, reason):
        _, ids = self.running.pop(key)
        flat = types.SimpleNamespace(token_ids=ids, logprobs=[-1.0] * len(ids))
        answer = types.SimpleNamespace(token_ids=ids, logprobs=flat, finish_reason=reason, stop_reason=None)
        prompt = key[0].request.prompt_token_ids
        return types.SimpleNamespace(outputs=[answer], prompt_token_ids=prompt, num_cached_tokens=0)

    def rpc(self, method, *arguments):
        return {"kv_cache_bytes": 1000} if method == "lockstep_memory" else {"ok": True}

    def kv_cache_use(self):
        return 0.0

    def reset_prefix_cache(self):
        return True

    def shutdown(self):
        assert not self.running


@pytest.fixture
def engine(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "Core", FakeCore)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(module, "claim", lambda *_: None)
    monkeypatch.setattr(module, "release", lambda *_: None)
    made = VLLMEngine(EngineConfig(name="vllm"), spec=spec_in(tmp_path))
    yield made
    made.close()


def session(seconds=20.0):
    return UpdateSession(policy_version=1, run_id="test", deadline=time.monotonic() + seconds)


def test_generate_is_in_request_order(engine):
    results = engine.generate(requests_of(11, 12, max_tokens=3) + requests_of(20, max_tokens=1))
    assert [[c.token_ids for c in row] for row in results] == [[(11, 12, 13), (12, 13, 14)], [(20,)]]
    assert engine.stats().queued == 0 and engine.stats().requests == 2


def test_a_turn_has_the_whole_context_and_a_seed_of_its_own(engine):
    (handle,) = [engine.submit(one) for one in requests_of(11, 12, max_tokens=2)]
    seen = []
    for done in engine.finished():
        seen.append((done.sample, done.completion.seed, len(done.completion.token_ids)))
        assert done.handle is handle
        if len(seen) == 1:
            with raises(EngineError, "wrong-state: already generating"):
                engine.begin_update(session())
            with raises(EngineError, "wrong-state: already generating"):
                engine.sleep()
            engine.continue_(done, (7,), sampling=SamplingParams(max_tokens=4))
    assert seen == [(0, 11, 2), (1, 12, 2), (0, 11, 4)]
    assert engine._core.submitted[2] == ((1, 2, 3, 11, 12, 7), turn_seed(11, 6))
    engine.begin_update(session())
    engine.fail_update("the test")


def test_a_request_joins_in_the_middle_of_a_long_sample(engine):
    engine._core.slow = 0.005
    engine.submit(requests_of(1, max_tokens=60)[0])
    threading.Timer(0.05, lambda: engine.submit(requests_of(2, max_tokens=2)[0])).start()
    assert [done.completion.seed for done in engine.finished()] == [2, 1]


def test_an_abort_ends_all_and_they_go_on(engine):
    engine._core.slow = 0.005
    engine.submit(requests_of(1, 2, max_tokens=50)[0])
    threading.Timer(0.1, engine.abort).start()
    seen = []
    for done in engine.finished():
        seen.append(done)
        if len(seen) <= 2:
            engine.continue_(done, sampling=SamplingParams(max_tokens=3))
    assert [done.completion.finish_reason for done in seen] == ["abort"] * 2 + ["length"] * 2


def test_a_consumer_that_leaves_leaves_nothing_running(engine):
    engine.submit(requests_of(1, max_tokens=2)[0])
    engine.submit(requests_of(2, 3, max_tokens=40)[0])
    stream = engine.finished()
    next(stream)
    stream.close()
    assert not engine._core.running and engine.stats().queued == 0
    assert len(engine.generate(requests_of(4))[0]) == 1


def test_an_update_waits_for_another_threads_stream(engine):
    engine._core.slow = 0.01
    results = []
    thread = threading.Thread(target=lambda: results.append(engine.generate(requests_of(1, max_tokens=40))))
    thread.start()
    while not engine.stats().queued:
        time.sleep(0.001)
    with raises(EngineError, "deadline", samples=1):
        engine.begin_update(session(seconds=0.05))
    engine.begin_update(session())
    thread.join(10)
    assert len(results[0][0][0].token_ids) == 40
    with raises(EngineError, "wrong-state: is being updated"):
        engine.submit(requests_of(1)[0])
    engine.fail_update("the test")


def test_closing_ends_what_another_thread_runs(engine):
    engine._core.slow = 0.01
    results = []
    thread = threading.Thread(target=lambda: results.append(engine.generate(requests_of(1, max_tokens=60))))
    thread.start()
    while not engine.stats().queued:
        time.sleep(0.001)
    engine.close()
    thread.join(10)
    assert results[0][0][0].finish_reason == "abort"
