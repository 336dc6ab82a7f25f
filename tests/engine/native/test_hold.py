"""Trajectories of many turns: whatever becomes of their keys, the bits are those of one document."""

import dataclasses
import random
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from raising import raises

sys.path.insert(0, str(Path(__file__).parent))

from native_parts import policy
from test_bits import trainers_logprobs
from test_scheduler import SHAPE, HashRunner, expected, samples_of

from lockstep.config.engine import EngineConfig
from lockstep.engine.build import make_engine
from lockstep.engine.native.engine import Counts, Generation, Mode
from lockstep.engine.native.kv_cache import KVCache
from lockstep.engine.native.scheduler import Sample, Scheduler
from lockstep.engine.streaming import Turn
from lockstep.errors import EngineError
from lockstep.protocols.engine import Finished
from lockstep.schema.rollout import Completion, GenerationRequest, SamplingParams, Trajectory

TURN = SamplingParams(max_tokens=6, temperature=0.7, ignore_eos=True)


def asked(prompts=(1, 7, 40), samples=3, trajectory_tokens=0):
    return [
        GenerationRequest(
            prompt_token_ids=tuple(
                torch.randint(3, 200, (n,), generator=torch.Generator().manual_seed(n)).tolist()
            ),
            sampling=TURN,
            seeds=tuple(range(samples)),
            trajectory_tokens=trajectory_tokens,
        )
        for n in prompts
    ]


def reply(turn):
    return tuple(range(10 + turn, 13 + turn))


def trajectories(engine, requests, *, turns, act=lambda engine, held: None, delay=0):
    """Run everything to its end; a turn is continued when `delay` others have ended, or nothing else is
    left."""
    handles = [engine.submit(one) for one in requests]
    found, held = {}, []
    left = sum(len(one.seeds) for one in requests)
    while left:
        for done in engine.finished(wait=False):
            key = handles.index(done.handle), done.sample
            before = found.get(key)
            added = () if before is None else reply(len(before.spans))
            found[key] = (
                Trajectory.of(done.completion) if before is None else before.continued(added, done.completion)
            )
            if len(found[key].spans) < 2 * turns:
                engine.hold(done)
                held.append((key, done))
            else:
                left -= 1
            act(engine, held)
            if len(held) > delay:
                go_on(engine, found, *held.pop(0))
        if held:
            go_on(engine, found, *held.pop(0))
    return found


def go_on(engine, found, key, done):
    engine.continue_(done, reply(len(found[key].spans)), sampling=TURN)


def engine_of(model, **settings):
    engine = make_engine(EngineConfig(name="native", **settings), model=model)
    return engine


def completions_of(trajectory):
    """Its turns, as the trainer's test wants them."""
    found, context = [], ()
    for span in trajectory.spans:
        if span.author == "policy":
            one = Completion(
                prompt_token_ids=context,
                token_ids=span.token_ids,
                logprobs=span.logprobs,
                finish_reason="length",
                stop_reason=None,
                text=None,
                seed=trajectory.seed,
                engine="native",
                policy_version=0,
            )
            found.append(one)
        context += span.token_ids
    return found


@pytest.fixture(scope="module")
def model():
    return policy("tiny-llama", "float32")


KEPT = {"max_batch": 16, "prefill_chunk": 64, "kv_cache_tokens": 3000}
SHORT = {"max_batch": 3, "prefill_chunk": 32, "kv_cache_tokens": 100}
"""Not much more than the longest trajectory."""


def test_keys_kept_dropped_and_recomputed_give_the_bits_of_the_trainer(model):
    turns = 3
    kept = engine_of(model, **KEPT)
    wanted = trajectories(kept, asked(), turns=turns, delay=2)
    stats = kept.stats()
    assert stats.recomputed_tokens == 0
    # Cached of a later turn: everything but the last token and the reply. Of a first turn: what its prompt
    # has in common with the others of its group.
    cached = sum(
        sum(n + 6 * (turn + 1) + 3 * turn - 1 for turn in range(turns - 1)) * 3 + (n - 1) * 2
        for n in (1, 7, 40)
    )
    assert stats.cached_tokens == sum(t.cached_tokens for t in wanted.values()) == cached
    # Computed besides: each prompt once, without its last token, which is the input of a step; and of each
    # later turn the token that ended the last one and the reply, without its last token.
    assert kept.counts.prefill_tokens == (0 + 6 + 39) + 9 * (turns - 1) * 3

    def drop(engine, held):
        for sample in list(engine._generation.scheduler.kept):
            engine._generation.scheduler.forget(sample)

    without = engine_of(model, **KEPT)
    dropped = trajectories(without, asked(), turns=turns, delay=2, act=drop)
    assert without.stats().recomputed_tokens > 0
    short = engine_of(model, **SHORT)
    recomputed = trajectories(short, asked(), turns=turns, delay=8)
    assert short.stats().recomputed_tokens > 0
    for other in (dropped, recomputed):
        assert {key: one.spans for key, one in other.items()} == {
            key: one.spans for key, one in wanted.items()
        }
    for trajectory in wanted.values():
        parts = completions_of(trajectory)
        found = torch.tensor([p for part in parts for p in part.logprobs])
        assert torch.equal(found, trainers_logprobs(model, parts))


def test_a_trajectory_says_how_much_it_needs_and_nothing_is_moved_or_recomputed(model):
    budget = 4 * 9 - 3
    engine = engine_of(model, max_batch=4)
    trajectories(engine, asked(trajectory_tokens=budget), turns=4, delay=5)
    assert engine._kv_cache.capacity == sum(3 * (n + budget - 1) for n in (1, 7, 40))
    assert engine.stats().recomputed_tokens == 0 and engine.counts.preemptions == 0
    grows = engine_of(model, max_batch=4)
    trajectories(grows, asked(), turns=4, delay=5)
    assert grows.stats().recomputed_tokens > 0


@pytest.mark.parametrize(
    ("trajectory_tokens", "right"),
    [(0, [0, 0, 1, 1, 2, 2]), (13, [0, 1, 2, 0, 1, 2]), (300, [0, 0, 1, 1, 2, 2])],
)
def test_turns_that_come_back_run_before_first_turns_unless_all_trajectories_fit(
    trajectory_tokens, right, model
):
    engine = engine_of(model, max_batch=1, kv_cache_tokens=500)
    requests = asked((4, 5, 6), samples=1, trajectory_tokens=trajectory_tokens)
    handles = [engine.submit(one) for one in requests]
    order = []
    for done in engine.finished():
        order.append(handles.index(done.handle))
        if order.count(order[-1]) < 2:
            engine.continue_(done, (3,), sampling=TURN)
    assert order == right


def test_a_turn_that_comes_back_does_not_wait_for_an_eighth_of_the_rows(model):
    engine = engine_of(model, max_batch=16, kv_cache_tokens=4000)
    long = dataclasses.replace(TURN, max_tokens=120)
    others = dataclasses.replace(asked((4,), samples=15)[0], sampling=long)
    first = engine.submit(asked((9,), samples=1)[0])
    engine.submit(others)
    steps = []
    for done in engine.finished():
        if done.handle is first:
            steps.append(engine.counts.steps)
            if len(steps) < 3:
                engine.continue_(done, (3,), sampling=TURN)
    assert steps == [6, 6 + 16 + 6 - 1, 6 + 2 * (16 + 6 - 1)]


def test_a_stream_stays_open_while_a_turn_is_held_and_ends_when_it_is_released(model):
    engine = engine_of(model, **KEPT)
    (request,) = asked((5,), samples=2)
    engine.submit(request)
    seen, threads = [], []

    def later(done):
        if len(seen) < 3:
            engine.continue_(done, (3, 4), sampling=TURN)
        else:
            engine.release(done)

    for done in engine.finished():
        seen.append(done.sample)
        if done.sample == 0:
            engine.hold(done)
            threads.append(threading.Timer(0.1, later, [done]))
            threads[-1].start()
            with raises(EngineError, "wrong-state: already generating"):
                engine.sleep()
    assert seen == [0, 1, 0] and engine.stats().queued == 0
    for thread in threads:
        thread.join()
    engine.sleep()


def test_a_stream_does_not_wait_for_a_held_turn_for_ever(model):
    engine = engine_of(model, **KEPT)
    engine.submit(asked((5,), samples=1)[0])
    began = time.monotonic()
    with raises(EngineError, "deadline", samples=1):
        for done in engine.finished():
            engine.hold(done, seconds=0.2)
    assert time.monotonic() - began < 60
    assert list(engine.finished()) == []
    engine.sleep()


def test_what_is_released_or_neither_held_nor_continued_gives_its_keys_back(model):
    engine = engine_of(model, **KEPT)
    engine.submit(asked((5,), samples=3)[0])
    held = []
    for done in engine.finished(wait=False):
        if done.sample:
            engine.hold(done)
            held.append(done)
    assert len(engine._generation.scheduler.kept) == 3
    engine.release(held[0])
    engine.release(held[0])
    engine.continue_(held[1], (3,), sampling=TURN)
    (done,) = engine.finished()
    assert done.completion.cached_tokens == 5 + 6 - 1
    assert engine._generation is None and engine.stats().kv_cache_use == 0.0


@pytest.mark.parametrize("ahead", [0, 1])
def test_every_trajectory_is_what_it_would_be_alone(ahead):
    """As the scheduler's test of single turns, with turns that come back at random times."""
    dropped = adopted = 0
    for case in range(60):
        rng = random.Random(case)
        recomputed, cached = _random_turns(rng, ahead)
        dropped += recomputed > 0
        adopted += cached > 0
    assert dropped > 10 and adopted > 30


def _random_turns(rng, ahead):
    requests = [
        (
            tuple(rng.choice((3, 4, 6, 7)) for _ in range(rng.randint(1, 12))),
            tuple(rng.randrange(1000) for _ in range(rng.randint(1, 4))),
            rng.randint(1, 12),
        )
        for _ in range(rng.randint(1, 6))
    ]
    turns, most = 3, 12 + 3 * (12 + 3) + 12
    capacity = most + rng.choice([0, 10, 60, 600])
    kv_cache = KVCache(SHAPE, capacity)
    runner = HashRunner(kv_cache, chunk=16, documents=3)
    samples = list(samples_of(requests))
    for sample in samples:
        sample.owners = []
    scheduler = Scheduler(samples, kv_cache=kv_cache, max_rows=rng.randint(1, 6), roomy=False)
    counts = Counts()
    generation = Generation(runner, scheduler, mode=Mode(ahead=ahead, temperature=1.0), counts=counts)
    held, left, cached = [], len(samples), 0
    while left:
        if held and (generation.idle or rng.random() < 0.1):
            turn = _next_turn(*held.pop(rng.randrange(len(held))))
            generation.add([turn], mode=generation.mode, roomy=False)
        for sample, (reason, _) in generation.step(threading.Event()):
            prompt = sample.state.prompt_token_ids
            assert (sample.state.token_ids, reason) == expected(
                prompt, sample.state.seed, sample.end - len(prompt)
            )
            number = 0 if sample.turn.after is None else int(sample.turn.after.completion.engine)
            cached += sample.cached_tokens if number else 0
            if number + 1 < turns:
                held.append((sample, number + 1, rng.randint(0, 3), rng.randint(1, 12)))
            else:
                left -= 1
                scheduler.forget(sample)
    generation.drain()
    assert scheduler.use == 0.0 and not scheduler.waiting
    return scheduler.recomputed_tokens, cached


def _next_turn(sample, number, added, max_tokens):
    from test_scheduler import MODEL

    state = sample.state
    completion = Completion(
        prompt_token_ids=state.prompt_token_ids,
        token_ids=tuple(state.token_ids),
        logprobs=tuple(sample.logprobs),
        finish_reason="length",
        stop_reason=None,
        text=None,
        seed=state.seed,
        engine=str(number),
        policy_version=0,
    )
    after = Finished(handle=sample.turn.handle, sample=0, completion=completion)
    request = GenerationRequest(
        prompt_token_ids=(*state.prompt_token_ids, *state.token_ids, *range(30, 30 + added)),
        sampling=SamplingParams(max_tokens=max_tokens),
        seeds=(state.seed,),
    )
    turn = Turn(handle=sample.turn.handle, request=request, samples=(0,), after=after)
    return Sample.of(turn, 0, model=MODEL, owners=sample.owners, before=sample, computed=sample.computed)
