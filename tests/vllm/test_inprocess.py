"""Life of vLLM in this process: what it must leave alone, deadlines, refusals, closing."""

import gc
import os
import random
import threading
import time
import weakref

import inprocess
import numpy as np
import pytest
import torch
import torch.distributed as dist
from conformance import EOS, LONG, VOCAB, conformance_model, gaps, prompt, request
from raising import raises

from lockstep.engine.vllm.translate import vllm_environment
from lockstep.errors import ConfigError, EngineError

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model():
    return conformance_model()


@pytest.fixture
def started(model, tmp_path):
    """Start engines that are closed at the end; `weights=False` leaves one dirty."""
    engines = []

    def start(weights=True, **settings):
        engines.append(inprocess.start(settings.pop("model", model), tmp_path, **settings))
        if weights:
            inprocess.push(engines[-1], settings.get("model", model))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def noise():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def settings():
    return {
        "set_num_threads": torch.set_num_threads,
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "affinity": os.sched_getaffinity(0),
        "group": dist.is_initialized(),
    }


@pytest.mark.exhaustive
def test_the_process_is_afterwards_as_it_was(model, tmp_path):
    """Random numbers, threads, default dtype, gradients, affinity, process group; a second engine starts."""
    for _ in range(2):
        before, outside = noise(), settings()
        engine = inprocess.start(model, tmp_path)
        assert noise() == before
        inprocess.push(engine, model)
        engine.generate([request(prompt(5), range(3)), request(prompt(5), temperature=0.0)])
        assert noise() == before
        assert {**settings(), "group": outside["group"]} == outside
        threads = threading.active_count()
        kernel_model = weakref.ref(
            engine._core._engine.model_executor.driver_worker.worker.model_runner.model
        )
        engine.close()
        assert noise() == before and settings() == outside
        assert threading.active_count() < threads
        del engine
        gc.collect()
        assert kernel_model() is None


@pytest.mark.exhaustive
def test_the_trainers_process_group_is_kept(started, tmp_path):
    """Made before the engine, as the order must be: vLLM takes it for its own and would destroy it."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        engine = started()
        assert len(engine.generate([request(prompt(4))])[0][0].token_ids) == 12
        engine.close()
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 1 and dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()


def test_a_group_of_several_ranks_is_refused(model, tmp_path, monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    with raises(ConfigError, "unsupported-combination: process group", ranks=4):
        inprocess.start(model, tmp_path)


@pytest.mark.parametrize(
    ("config", "spec", "message"),
    [
        ({}, {"device": "cuda:1"}, "unsupported-combination: train.device"),
        ({"options": {"dtype": "float16"}}, {}, "contradiction: engine.options.dtype"),
    ],
)
def test_what_cannot_be_is_refused_at_once(model, tmp_path, config, spec, message):
    with raises(ConfigError, message):
        inprocess.start(model, tmp_path, spec=spec, **config)


def test_a_start_that_fails_says_why_and_leaves_room_for_the_next(model, tmp_path, started):
    with raises(EngineError, "refused: start"):
        inprocess.start(model, tmp_path, options={"kv_cache_memory_bytes": 1})
    assert not dist.is_initialized()
    engine = started()
    assert len(engine.generate([request(prompt(4))])[0][0].token_ids) == 12


@pytest.mark.exhaustive
def test_only_one_at_a_time(model, tmp_path, started):
    started(weights=False)
    with raises(EngineError, "wrong-state: open"):
        inprocess.start(model, tmp_path)


@pytest.mark.exhaustive
def test_another_environment_needs_another_process(model, tmp_path, started, monkeypatch):
    started(weights=False).close()
    import lockstep.engine.vllm.engine as module

    def other(config, spec, *, in_process):
        return vllm_environment(config, spec, in_process=in_process) | {"VLLM_BATCH_INVARIANT": "1"}

    monkeypatch.setattr(module, "vllm_environment", other)
    with raises(EngineError, "wrong-environment: VLLM_BATCH_INVARIANT"):
        inprocess.start(model, tmp_path)


@pytest.mark.exhaustive
def test_nothing_of_generation_config_is_merged(model, started, monkeypatch):
    """The model's folder asks for its own sampling; requests that do not must not get it."""
    own = {"temperature": 0.3, "top_k": 2, "repetition_penalty": 1.9, "max_new_tokens": 3, "do_sample": True}
    ends = list(range(VOCAB // 2))
    for name, value in (own | {"eos_token_id": ends}).items():
        monkeypatch.setattr(model.module.generation_config, name, value, raising=False)
    engine = started()
    (row,) = engine.generate([request(prompt(9), range(32), max_tokens=20, ignore_eos=False)])
    assert {t for c in row for t in c.token_ids} & set(ends) - {EOS}
    assert all(len(c.token_ids) == 20 or c.token_ids[-1] == EOS for c in row)
    assert all(gaps(model, c, 1.0).max() <= TOLERANCE for c in row)
    assert len({c.token_ids[0] for c in row}) > 2


@pytest.mark.exhaustive
def test_weights_of_a_folder_are_served_without_a_push(model, tmp_path, started):
    spec = inprocess.spec_of(model, tmp_path)
    model.module.save_pretrained(spec.folder)
    engine = started(weights=False, spec={"weights": "folder", "folder": spec.folder})
    ((completion,),) = engine.generate([request(prompt(LONG), temperature=0.0)])
    assert gaps(model, completion, 0.0).max() <= TOLERANCE


@pytest.mark.exhaustive
def test_a_dtype_is_what_was_asked_for(tmp_path, started):
    """vLLM's "auto" makes bfloat16 of a float32 checkpoint, and the other way round it keeps bfloat16."""
    low = conformance_model(dtype=torch.bfloat16)
    engine = started(model=low)
    weights = inprocess.weights_of(low)
    found = engine.read_back(["model.embed_tokens.weight"])["model.embed_tokens.weight"]
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, weights["model.embed_tokens.weight"].flatten()[:64])
    (row,) = engine.generate([request(prompt(30), range(4))])
    worst = max(float(gaps(low, c, 1.0).max()) for c in row)
    assert 1e-4 < worst < 0.5, "rounding of bfloat16, no more and no less"


@pytest.mark.exhaustive
def test_models_of_ids_alone(model, started):
    import dataclasses

    ids_only = dataclasses.replace(model, tokenizer=None)
    engine = started(model=ids_only)
    ((completion,),) = engine.generate([request(prompt(9), temperature=0.0)])
    assert completion.text is None and gaps(model, completion, 0.0).max() <= TOLERANCE
    with raises(EngineError, "no-tokenizer: sampling.stop"):
        engine.generate([request(prompt(9), stop=("ab",))])


def test_samples_of_a_group_share_their_prompt(started):
    """Siblings are next to each other, so one computes the blocks and the others find them."""
    engine = started()
    rows = engine.generate([request(prompt(LONG, i), range(8), max_tokens=2) for i in range(3)])
    for row in rows:
        assert sorted(c.cached_tokens for c in row) == [0] + [256] * 7
    stats = engine.stats()
    assert stats.cached_tokens == 3 * 7 * 256 and stats.prompt_tokens == 24 * LONG
    assert stats.kv_cache_bytes > 0 and stats.kv_cache_use == 0.0
    again = engine.generate([request(prompt(LONG), range(2), max_tokens=2)])
    assert {c.cached_tokens for c in again[0]} == {256}


@pytest.mark.exhaustive
def test_a_prefix_cache_that_is_off(started):
    engine = started(prefix_caching=False)
    rows = engine.generate([request(prompt(LONG), range(4), max_tokens=2)])
    assert {c.cached_tokens for c in rows[0]} == {0}


def test_short_samples_are_handed_on_while_long_ones_run(started):
    engine, seen = started(), []

    def note(index, sample, completion):
        seen.append((len(completion.token_ids), engine.stats().queued, engine.stats().kv_cache_use))

    engine.generate(
        [request(prompt(4), max_tokens=300), request(prompt(LONG), range(3), max_tokens=5)],
        on_completion=note,
    )
    assert [n for n, _, _ in seen] == [5, 5, 5, 300] and [q for _, q, _ in seen] == [3, 2, 1, 0]
    assert seen[0][2] > 0.0


@pytest.mark.exhaustive
def test_a_callback_that_fails_stops_what_runs(started):
    engine = started()

    def fail(*_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        engine.generate(
            [request(prompt(4), max_tokens=2), request(prompt(5), range(8), max_tokens=400)],
            on_completion=fail,
        )
    assert engine.stats().queued == 0 and engine.stats().kv_cache_use == 0.0
    assert not engine._core._engine.has_unfinished_requests()
    assert len(engine.generate([request(prompt(4))])[0][0].token_ids) == 12


@pytest.mark.exhaustive
def test_random_numbers_of_a_callback_are_its_own(started):
    """It draws from the generators between steps: the next call must not draw the same again."""
    engine, drawn = started(), []
    for _ in range(2):
        engine.generate(
            [request(prompt(4 + i), range(2), max_tokens=2 + i) for i in range(3)],
            on_completion=lambda *_: drawn.append((random.random(), float(torch.rand(1)))),
        )
    assert len(set(drawn)) == 12


@pytest.mark.exhaustive
def test_an_engine_that_never_answers_is_given_up_at_the_deadline(started, monkeypatch):
    engine = started(request_seconds=1.0)
    held, released = threading.Event(), threading.Event()

    def hang(abort, more):
        held.set()
        released.wait(30)
        return []

    monkeypatch.setattr(engine._core, "advance", hang)
    began = time.monotonic()
    with raises(EngineError, "deadline: generate"):
        engine.generate([request(prompt(4))])
    assert held.is_set() and time.monotonic() - began < 4
    with raises(EngineError, "wrong-state: failed"):
        engine.generate([request(prompt(4))])
    released.set()


@pytest.mark.exhaustive
def test_steps_without_tokens_are_no_progress(started, monkeypatch):
    """A request that the scheduler never admits: steps come and go, and nothing is computed."""
    engine = started(request_seconds=1.5)
    monkeypatch.setattr(engine._core._engine, "step", lambda: time.sleep(0.01) or [])
    with raises(EngineError, "deadline: generate"):
        engine.generate([request(prompt(4))])


@pytest.mark.exhaustive
def test_a_failure_inside_vllm_is_named_and_final(started, monkeypatch):
    engine = started()

    def fail():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(engine._core._engine, "step", fail)
    with raises(EngineError, "refused: generate"):
        engine.generate([request(prompt(4))])
    with raises(EngineError, "wrong-state: failed"):
        engine.generate([request(prompt(4))])


def test_out_of_memory_names_the_engine(started, monkeypatch):
    engine = started()

    def fail():
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    monkeypatch.setattr(engine._core._engine, "step", fail)
    with raises(EngineError, "out-of-memory: generate"):
        engine.generate([request(prompt(4))])


@pytest.mark.exhaustive
def test_what_is_not_finite_is_refused(model, tmp_path, started):
    engine = started(weights=False)
    weights = inprocess.weights_of(model) | {"model.norm.weight": torch.full((64,), float("nan"))}
    opened = inprocess.session()
    engine.begin_update(opened)
    inprocess.send(engine, weights.items())
    engine.finish_update(opened)
    with raises(EngineError, "not-finite"):
        engine.generate([request(prompt(4))])


@pytest.mark.exhaustive
def test_memory_and_description(started):
    engine = started()
    memory = engine.memory()
    assert memory["kv_cache_bytes"] == inprocess.KV_BYTES and memory["weights_bytes"] > 0
    described = engine.describe()
    assert described["engine"] == "vllm" and described["version"].startswith("0.")
    assert described["environment"]["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


@pytest.mark.exhaustive
def test_closed_is_closed(started):
    engine = started()
    engine.generate([request(prompt(4))])
    counted = engine.stats().completion_tokens
    engine.close()
    engine.close()
    assert engine.stats().completion_tokens == counted and engine.stats().kv_cache_use is None
    for call in (
        lambda: engine.generate([request(prompt(4))]),
        lambda: engine.begin_update(inprocess.session()),
        lambda: engine.read_back(["model.norm.weight"]),
        engine.sleep,
        engine.wake,
    ):
        with raises(EngineError, "wrong-state: closed"):
            call()
    engine.abort()
    engine.fail_update("nothing is open")


def test_closing_ends_what_runs(started):
    """From another thread, in the middle of a long sample."""
    engine, running, results = started(), threading.Event(), []

    def sample():
        asked = [request(prompt(3), max_tokens=2), request(prompt(5), range(8), max_tokens=480)]
        results.append(engine.generate(asked, on_completion=lambda *_: running.set()))

    thread = threading.Thread(target=sample)
    thread.start()
    assert running.wait(60)
    engine.close()
    thread.join(30)
    assert {c.finish_reason for c in results[0][1]} == {"abort"}
