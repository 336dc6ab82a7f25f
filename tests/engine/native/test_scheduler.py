"""The whole of scheduling around a model that anybody can compute.

Its next token is a hash of all keys that the sample attends to and of the seed; a key is the token at a
position. So a key that is missing, stale, moved wrongly or another sample's changes every token after it.
"""

import random
import threading
import types

import numpy as np
import pytest
import torch
from raising import raises

from lockstep.engine.native.engine import Counts, Generation, Mode
from lockstep.engine.native.kv_cache import KVCache, KVShape
from lockstep.engine.native.runner import POSITION, SEED, SLOT, SOURCE, START, TOKEN, USED
from lockstep.engine.native.scheduler import Sample, Scheduler
from lockstep.engine.streaming import Turn
from lockstep.errors import EngineError
from lockstep.protocols.engine import Handle
from lockstep.schema.rollout import GenerationRequest, SamplingParams

EOS = 5
MODEL = types.SimpleNamespace(eos_token_ids=(EOS,), tokenizer=None, max_positions=1 << 20)
SHAPE = KVShape(layers=1, heads=1, head_dim=1, dtype=torch.float64, device=torch.device("cpu"))


def next_token(keys, seed):
    total = seed * 31
    for position, token in enumerate(keys):
        total = (total * 7 + int(token) * (position + 3)) % 100_003
    return total % 40


def expected(prompt, seed, max_tokens):
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tokens, seed))
        if tokens[-1] == EOS:
            return tokens[len(prompt) :], "stop"
    return tokens[len(prompt) :], "length"


class HashRunner:
    """Stands in for lockstep.engine.native.runner.Runner."""

    def __init__(self, kv_cache, *, chunk, documents):
        self.kv_cache, self.chunk, self.documents = kv_cache, chunk, documents
        self.last = []
        self.prefilled = 0
        self.finite = True

    def chunk_for(self, tokens):
        return self.chunk if tokens >= self.chunk else 1 + tokens // 2

    def prefill(self, chunk):
        assert len(chunk.token_ids) <= self.chunk and len(chunk.lengths) <= self.documents
        ends = np.cumsum(chunk.lengths)
        for end, length, start, used in zip(ends, chunk.lengths, chunk.starts, chunk.used, strict=True):
            part = slice(end - length, end)
            assert chunk.positions[part].tolist() == list(range(used - length, used))
            assert chunk.slots[part].tolist() == list(range(start + used - length, start + used))
        self.kv_cache.keys[0][chunk.slots, 0, 0] = torch.from_numpy(chunk.token_ids).double()
        self.prefilled += len(chunk.token_ids)

    def step(self, columns, *, temperature, states):
        keys = self.kv_cache.keys[0][:, 0, 0]
        tokens = []
        for row in columns.T:
            token = row[TOKEN] if row[SOURCE] < 0 else self.last[row[SOURCE]]
            keys[row[SLOT]] = float(token)
            assert row[USED] == row[POSITION] + 1 and row[SLOT] == row[START] + row[POSITION]
            tokens.append(next_token(keys[row[START] : row[START] + row[USED]].tolist(), row[SEED]))
        self.last = tokens
        return Done(tokens, [-1.0 if self.finite else float("nan")] * len(tokens))


class Done:
    def __init__(self, *both):
        self.both = both

    def read(self):
        return self.both


def samples_of(requests, first=0):
    for index, (prompt, seeds, max_tokens) in enumerate(requests):
        sampling = SamplingParams(max_tokens=max_tokens)
        request = GenerationRequest(prompt_token_ids=prompt, sampling=sampling, seeds=seeds)
        handle = Handle(request=request, index=first + index)
        turn = Turn(handle=handle, request=request, samples=tuple(range(len(seeds))))
        owners = []
        for i in range(len(seeds)):
            yield Sample.of(turn, i, model=MODEL, owners=owners)


def run(requests, *, capacity, max_rows, ahead, abort=None, **how):
    """Everything to the end. `how`: roomy, chunk, documents; requests `joining` one after the other, and the
    `mode` from then on."""
    kv_cache = KVCache(SHAPE, capacity)
    runner = HashRunner(kv_cache, chunk=how.get("chunk", 16), documents=how.get("documents", 3))
    samples = list(samples_of(requests))
    scheduler = Scheduler(samples, kv_cache=kv_cache, max_rows=max_rows, roomy=how.get("roomy", False))
    counts, seen, abort = Counts(), {}, abort or threading.Event()
    generation = Generation(runner, scheduler, mode=Mode(ahead=ahead, temperature=1.0), counts=counts)
    joining = [(i, list(samples_of([one], i))) for i, one in enumerate(how.get("joining", ()), len(requests))]
    while joining or not generation.idle:
        if joining and (generation.idle or counts.steps >= 5 * (joining[0][0] - len(requests) + 1)):
            more = joining.pop(0)[1]
            samples += more
            generation.add(more, mode=how.get("mode", generation.mode), roomy=False)
        for sample, (reason, _) in generation.abort() if abort.is_set() else generation.step(abort):
            key = sample.turn.index, sample.index
            assert key not in seen
            seen[key] = (sample.state.token_ids, reason)
            assert sample.state.token_ids == [] or len(sample.logprobs) == len(sample.state.token_ids)
            scheduler.forget(sample)
        if abort.is_set() and len(seen) == len(samples):
            break
    assert len(seen) == len(samples)
    if not abort.is_set():
        generation.drain()
        counts.preemptions += scheduler.preemptions
        assert scheduler.use == 0.0 and not scheduler.waiting
    return seen, counts, runner


def random_requests(rng):
    def prompt():
        return tuple(rng.choice([t for t in range(40) if t != EOS]) for _ in range(rng.randint(1, 30)))

    return [
        (prompt(), tuple(rng.randrange(1000) for _ in range(rng.randint(1, 6))), rng.randint(1, 60))
        for _ in range(rng.randint(1, 8))
    ]


@pytest.mark.parametrize("ahead", [0, 1])
def test_every_sample_is_what_it_would_be_alone(ahead):
    """Caches from one sample's size to plenty: everything between waiting, moving, packing and preempting."""
    preemptions = wasted = 0
    for case in range(60):
        rng = random.Random(case)
        requests = random_requests(rng)
        longest = max(len(prompt) + most for prompt, _, most in requests) - 1
        seen, counts, _ = run(
            requests,
            capacity=longest + rng.choice([0, 5, 60, 400]),
            max_rows=rng.randint(1, 12),
            ahead=ahead,
            chunk=rng.choice([1, 7, 64]),
            documents=rng.choice([1, 3]),
        )
        for index, (prompt, seeds, max_tokens) in enumerate(requests):
            for i, seed in enumerate(seeds):
                assert seen[index, i] == expected(prompt, seed, max_tokens), case
        preemptions += counts.preemptions
        wasted += counts.wasted_rows
        assert counts.step_rows == sum(len(tokens) for tokens, _ in seen.values()) + counts.wasted_rows
    assert preemptions > 20, "the cases show nothing about preemption"
    assert (wasted > 0) == bool(ahead)


@pytest.mark.parametrize("ahead", [0, 1])
def test_samples_that_join_are_what_they_would_be_alone(ahead):
    """They come every few steps, into caches that hold one of the longest samples and more; a third of the
    times from then on without a step ahead."""
    for case in range(40):
        rng = random.Random(1000 + case)
        requests, joining = random_requests(rng), random_requests(rng)
        longest = max(len(prompt) + most for prompt, _, most in requests + joining) - 1
        seen, counts, _ = run(
            requests,
            capacity=longest + rng.choice([0, 60, 400]),
            max_rows=rng.randint(1, 12),
            ahead=ahead,
            joining=joining,
            **({"mode": Mode(ahead=0, temperature=1.0)} if case % 3 == 0 else {}),
        )
        for index, (prompt, seeds, max_tokens) in enumerate(requests + joining):
            for i, seed in enumerate(seeds):
                assert seen[index, i] == expected(prompt, seed, max_tokens), case
        assert counts.step_rows == sum(len(tokens) for tokens, _ in seen.values()) + counts.wasted_rows


def test_with_room_for_all_nobody_is_moved_or_preempted_and_a_prompt_is_computed_once():
    requests = [((1, 2, 3, 4, 6, 7, 8), tuple(range(6)), 20), ((9, 9, 9), tuple(range(4)), 20)]
    _, counts, runner = run(requests, capacity=10 * 26, max_rows=16, ahead=1, roomy=True)
    assert counts.preemptions == 0
    assert runner.prefilled == 6 + 2  # the last token of a prompt is the input of the first step
    assert counts.wasted_rows <= 10  # one row for each that a stop token ended


def test_a_sample_that_ends_by_length_wastes_no_row():
    seen, counts, _ = run([((1, 2), (3, 4, 8), 4)], capacity=100, max_rows=4, ahead=1)
    by_length = [tokens for tokens, reason in seen.values() if reason == "length"]
    stopped = [tokens for tokens, reason in seen.values() if reason == "stop" and len(tokens) < 4]
    assert len(by_length) > 0 and counts.wasted_rows == len(stopped)


def test_abort_reports_everybody_once():
    abort = threading.Event()
    abort.set()
    seen, _, _ = run([((1, 2), (3, 4, 5), 9)], capacity=100, max_rows=2, ahead=1, abort=abort)
    assert seen == {(0, i): ([], "abort") for i in range(3)}


@pytest.mark.parametrize("ahead", [0, 1])
def test_abort_during_a_prefill_reports_everybody_once(ahead, monkeypatch):
    """Two samples have rows and three wait; no step was launched."""
    abort = threading.Event()
    prefill, calls = HashRunner.prefill, []

    def prefill_and_abort(runner, chunk):
        prefill(runner, chunk)
        calls.append(len(chunk.token_ids))
        abort.set()

    monkeypatch.setattr(HashRunner, "prefill", prefill_and_abort)
    requests = [((1, 2, 3, 4, 6), (3, 4, 5, 8, 9), 9)]
    seen, counts, _ = run(requests, capacity=100, max_rows=2, ahead=ahead, abort=abort)
    assert seen == {(0, i): ([], "abort") for i in range(5)}
    assert len(calls) == 1 and counts.steps == 0


def test_logits_that_are_not_finite_name_the_sample():
    kv_cache = KVCache(SHAPE, 50)
    runner = HashRunner(kv_cache, chunk=8, documents=2)
    runner.finite = False
    samples = list(samples_of([((1, 2), (3, 4), 9)]))
    generation = Generation(
        runner,
        Scheduler(samples, kv_cache=kv_cache, max_rows=4, roomy=True),
        mode=Mode(ahead=1, temperature=1.0),
        counts=Counts(),
    )
    with raises(EngineError, "not-finite", request=0, token=0):
        while not generation.idle:
            generation.step(threading.Event())
