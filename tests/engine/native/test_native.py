"""What is the engine's own: where it refuses, what it gives back, what it counts."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from raising import raises

sys.path.insert(0, str(Path(__file__).parent))

from native_parts import ROOMY, TIGHT, generated, policy, requests

from lockstep.config.engine import EngineConfig
from lockstep.engine.build import make_engine
from lockstep.engine.native import kv_cache as kv_caches
from lockstep.errors import EngineError
from lockstep.models import memory
from lockstep.schema.rollout import GenerationRequest, SamplingParams


@pytest.fixture(scope="module")
def model():
    return policy("tiny-llama", "float32")


def engine_of(model, **settings):
    return make_engine(EngineConfig(name="native", **settings), model=model)


def greedy(length, max_tokens):
    return GenerationRequest(
        prompt_token_ids=tuple(range(3, 3 + length)),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        seeds=(0,),
    )


def host(monkeypatch, *, total, free):
    """A host with so many bytes."""
    monkeypatch.setattr(kv_caches, "total_bytes", lambda: total)
    monkeypatch.setattr(kv_caches, "available_bytes", lambda device: (free, "free host memory"))


def test_a_sample_that_can_never_fit_is_refused_before_anything_runs(model):
    engine = engine_of(model, kv_cache_tokens=40)
    wanted = "too-long: 1, 41, 40"
    with raises(EngineError, wanted):
        engine.generate([greedy(3, 3), greedy(20, 22)])
    assert engine.counts.steps == 0
    ((completion,),) = engine.generate([greedy(20, 21)])  # 40 keys: the last token's are never needed
    assert len(completion.token_ids) == 21 and engine.stats().kv_cache_use == 0.0


def test_memory_bounds_the_pool_when_nothing_else_does(model, monkeypatch):
    token_bytes = 2 * 2 * 2 * 16 * 4
    host(monkeypatch, total=100 * token_bytes, free=100 * token_bytes)
    tight = engine_of(model, memory_fraction=0.3)
    with raises(EngineError, "too-long", request=0, needed=41, capacity=29):
        tight.generate([greedy(20, 22)])
    assert len(tight.generate([greedy(20, 8), greedy(10, 8)])) == 2
    assert tight.stats().kv_cache_bytes == 30 * token_bytes


@pytest.mark.parametrize(("total", "free", "most"), [(1000, 1000, 249), (1000, 100, 89), (1000, 1, -1)])
def test_a_pool_on_the_host_takes_its_share_and_leaves_a_tenth_of_what_is_free(
    total, free, most, monkeypatch
):
    shape = kv_caches.KVShape(layers=1, heads=1, head_dim=1, dtype=torch.float32, device=torch.device("cpu"))
    host(monkeypatch, total=total * shape.token_bytes, free=free * shape.token_bytes)
    assert kv_caches.most_tokens(shape, 0.25) == most
    held = 50 * shape.token_bytes  # what the cache before has is free once it goes
    assert kv_caches.most_tokens(shape, 0.25, held=held) == min(249, int(0.9 * (free + 50)) - 1)


def test_a_host_is_no_larger_than_its_cgroup(monkeypatch):
    monkeypatch.setattr(memory, "_cgroup_limit", lambda root: None)
    host_bytes = kv_caches.total_bytes()
    for limit, total in ((12_345, 12_345), (2 * host_bytes, host_bytes)):
        monkeypatch.setattr(memory, "_cgroup_limit", lambda root, limit=limit: (limit, root))
        assert kv_caches.total_bytes() == total


def test_memory_for_no_token_at_all_is_refused_like_memory_for_too_few(model):
    engine = engine_of(model, memory_fraction=1e-9)
    with raises(EngineError, "too-long", request=0, needed=5, capacity=0):
        engine.generate([greedy(3, 3)])


def test_running_out_of_memory_says_what_to_set_and_gives_the_pool_back(model, monkeypatch):
    engine = engine_of(model)
    engine.generate([greedy(4, 4)])

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(type(engine._runner), "prefill", fail)
        with raises(EngineError, "out-of-memory: engine.memory_fraction"):
            engine.generate([greedy(4, 4)])
    assert engine._kv_cache is None
    assert len(engine.generate([greedy(4, 4)])[0][0].token_ids) == 4


def test_abort_while_a_prompt_is_computed_reports_every_sample(model, monkeypatch):
    engine = engine_of(model, max_batch=2)
    engine.generate([greedy(4, 4)])
    with monkeypatch.context() as patch:
        patch.setattr(type(engine._runner), "prefill", lambda *_: engine.abort())
        asked = dataclasses.replace(greedy(4, 4), seeds=(0, 1, 2, 3, 4))
        (completions,) = engine.generate([asked])
    assert [(c.finish_reason, c.token_ids) for c in completions] == [("abort", ())] * 5
    assert len(engine.generate([greedy(4, 4)])[0][0].token_ids) == 4


def test_the_pool_lives_on_and_sleep_gives_it_back(model):
    engine = engine_of(model)
    engine.generate([greedy(20, 10)])
    kv_cache = engine._kv_cache
    engine.generate([greedy(5, 10)])
    assert engine._kv_cache is kv_cache and kv_cache.capacity == 29
    engine.generate([greedy(25, 10)])
    assert engine._kv_cache.capacity == 36  # a quarter more than before, at least
    engine.sleep()
    assert engine._kv_cache is None
    with raises(EngineError, "wrong-state: asleep"):
        engine.generate([greedy(5, 10)])
    engine.wake()
    assert len(engine.generate([greedy(5, 10)])[0][0].token_ids) == 10
    engine.close()
    engine.close()
    for call in (engine.sleep, engine.wake, lambda: engine.generate([])):
        with raises(EngineError, "wrong-state: closed"):
            call()


def test_new_weights_in_place_are_seen_by_the_next_call():
    """And a module that is not converted, trained on by nobody else, gives other tokens than before."""
    model = policy("tiny-llama", "float32", converted=False)
    engine = engine_of(model)
    before = engine.generate(requests())
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.mul_(1.3)
    after = engine.generate(requests())
    again, _ = generated(model, requests())
    assert [c.token_ids for row in after for c in row] == [c.token_ids for c in again]
    assert after != before


def test_eager_turns_compilation_off_and_the_contract_says_so(model):
    trained = dataclasses.replace(model, execution="compile")
    eager = engine_of(trained, eager=True)
    compiled = engine_of(trained)
    assert eager.contract.compile == "eager" and compiled.contract.compile == "inductor"
    assert eager.contract.difference(compiled.contract)
    assert not eager._compiled and compiled._compiled


def test_settings_of_other_engines_are_refused():
    with raises(ValueError, "no-effect: engine.tp"):
        EngineConfig(name="native", tp=2)
    with raises(ValueError, "no-effect: engine.prefill_chunk"):
        EngineConfig(name="hf", prefill_chunk=64)
    with raises(ValueError, "no-effect: engine.transfer"):
        EngineConfig(name="native", transfer="disk")


# turns


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("settings", [ROOMY, TIGHT])
def test_a_sample_that_is_cut_anywhere_and_continued_is_the_same_to_the_bit(model, settings, ahead):
    """Sample k of a request is cut after k + 1 tokens and once more in the middle of the rest."""
    whole, _ = generated(model, requests(), ahead=ahead, **settings)
    engine = engine_of(model, **settings)
    engine.ahead = ahead
    asked = requests()
    handles = {engine.submit(one): i for i, one in enumerate(_cut(asked))}
    parts = {}
    for done in engine.finished():
        found = parts.setdefault((handles[done.handle], done.sample), [])
        found.append(done.completion)
        left = 30 - sum(len(c.token_ids) for c in found)
        if left:
            more = (left + 1) // 2 if len(found) == 1 else left
            sampling = dataclasses.replace(asked[0].sampling, max_tokens=more)
            engine.continue_(done, sampling=sampling)
    engine.close()
    together = [parts[i, k] for i, one in enumerate(asked) for k in range(len(one.seeds))]
    for found, one in zip(together, whole, strict=True):
        assert len(found) == 3
        assert [t for c in found for t in c.token_ids] == list(one.token_ids)
        assert [x for c in found for x in c.logprobs] == list(one.logprobs)


def _cut(asked):
    return [
        dataclasses.replace(one, sampling=dataclasses.replace(one.sampling, max_tokens=3 + i))
        for i, one in enumerate(asked)
    ]


@pytest.mark.parametrize(
    "joins", [{"temperature": 1.3}, {"top_k": 3}, {"temperature": 5.0, "frequency_penalty": -99.0}]
)
def test_a_sample_with_other_settings_joins_and_the_others_keep_their_bits(model, joins):
    whole, _ = generated(model, requests(), **ROOMY)
    engine = engine_of(model, **ROOMY, kv_cache_tokens=2000)
    engine.ahead = 1
    late = dataclasses.replace(greedy(6, 9), sampling=SamplingParams(max_tokens=9, ignore_eos=True, **joins))
    asked = requests()
    asked[0] = dataclasses.replace(asked[0], sampling=dataclasses.replace(asked[0].sampling, max_tokens=4))
    handles = [engine.submit(one) for one in asked]
    found = {}
    for done in engine.finished():
        if not found:
            handles.append(engine.submit(late))
        found[handles.index(done.handle), done.sample] = done.completion
    assert list(found)[2] == (4, 0), "it ran behind the others, and not with them"
    ((alone,),) = engine.generate([late])
    assert found.pop((4, 0)) == alone
    before = [found[i, k] for i in range(1, 4) for k in range(len(asked[i].seeds))]
    assert [c.logprobs for c in before] == [c.logprobs for c in whole[2:]]


def test_a_context_beyond_the_pool_waits_until_nothing_runs_and_the_pool_grows(model):
    engine = engine_of(model)
    handles = [engine.submit(greedy(5, most)) for most in (3, 30)]
    capacities = []
    for done in engine.finished():
        capacities.append(engine._kv_cache.capacity)
        if len(capacities) == 1:
            assert done.handle is handles[0]
            sampling = dataclasses.replace(handles[0].request.sampling, max_tokens=80)
            engine.continue_(done, (3,) * 5, sampling=sampling)
    assert capacities == [7 + 34, 41, 5 + 3 + 5 + 80 - 1]
    ((alone,),) = engine.generate(
        [dataclasses.replace(greedy(5, 80), prompt_token_ids=done.completion.prompt_token_ids)]
    )
    assert done.completion.token_ids == alone.token_ids


def test_a_turn_that_can_never_fit_is_refused_when_it_is_submitted(model):
    engine = engine_of(model, kv_cache_tokens=40)
    engine.submit(greedy(20, 5))
    with raises(EngineError, "too-long", request=1, needed=41, capacity=40):
        engine.submit(greedy(20, 22))
    (done,) = engine.finished()
    with raises(EngineError, "too-long", request=0, needed=41, capacity=40):
        engine.continue_(done, (3,) * 10, sampling=SamplingParams(max_tokens=7))
    engine.continue_(done, (3,) * 10, sampling=SamplingParams(max_tokens=6, ignore_eos=True))
    assert [len(done.completion.token_ids) for done in engine.finished()] == [6]


def test_tokens_are_told_as_they_come(model):
    engine, told = engine_of(model), []
    engine.on_token = lambda request, sample, ids: told.append((request, sample, list(ids)))
    ((completion,),) = engine.generate([greedy(4, 5)])
    assert told == [(0, 0, list(completion.token_ids[:n])) for n in range(1, 6)]
