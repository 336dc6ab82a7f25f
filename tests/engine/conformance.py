"""What every engine must do, as tests over a fixture `subject`: an engine and the slow reference for it.

An engine's own test file says which engine, and takes everything else from here:

    sys.path.insert(0, str(Path(__file__).parent))  # where this file is
    from conformance import *

    @pytest.fixture(scope="module")
    def subject(): yield Subject(...)

The reference is transformers' own eager attention over the whole sequence, one sample at a time, with the
weights that the engine must hold. Nothing here compares an engine with itself alone.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import random
import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from conformance_parts import (
    EOS,
    LONG,
    MAX_MODEL_LEN,
    TEMPERATURES,
    VOCAB,
    Subject,
    gaps,
    prompt,
    reference_greedy,
    reference_logits,
    request,
    sharpen,
)
from conformance_parts import conformance_model as conformance_model  # for those who import this
from raising import raises

from lockstep.engine.spec import require_engine
from lockstep.errors import EngineError
from lockstep.protocols.engine import Finished
from lockstep.rollout.environment import Environment, Sampler, TrajectoryRules
from lockstep.rollout.episodes import at_once, run_episodes
from lockstep.schema.rollout import Completion, GenerationRequest, Prompt, SamplingParams, Trajectory
from lockstep.schema.weights import UpdateSession


def check_shape(completion: Completion, asked: GenerationRequest, seed: int, subject: Subject) -> None:
    assert completion.prompt_token_ids == asked.prompt_token_ids
    assert len(completion.logprobs) == len(completion.token_ids)
    assert all(0 <= token < VOCAB for token in completion.token_ids)
    assert all(isinstance(token, int) for token in completion.token_ids)
    assert completion.seed == seed and completion.policy_version == subject.version


# what is sampled


@pytest.mark.parametrize("length", [1, 17, LONG])
def test_greedy_is_the_argmax_of_full_forwards(subject, length):
    asked = request(prompt(length), temperature=0.0, max_tokens=10)
    ((completion,),) = subject.generate(asked)
    check_shape(completion, asked, 0, subject)
    assert completion.finish_reason == "length" and completion.stop_reason is None
    assert gaps(subject.model, completion, 0.0).max() <= subject.tolerance
    if subject.exact:
        assert list(completion.token_ids) == reference_greedy(subject.model, asked.prompt_token_ids, 10)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_logprobs_are_those_of_logits_over_temperature(subject, temperature):
    if temperature not in subject.temperatures:
        with raises(EngineError, "unsupported-sampling: sampling.temperature"):
            subject.generate(request(prompt(5), temperature=temperature))
        return
    asked = [request(prompt(n), range(3), temperature=temperature) for n in (3, 40, LONG)]
    for one, completions in zip(asked, subject.generate(*asked), strict=True):
        for seed, completion in enumerate(completions):
            check_shape(completion, one, seed, subject)
            assert gaps(subject.model, completion, temperature).max() <= subject.tolerance


def test_temperatures_may_be_mixed_in_one_batch(subject):
    asked = [request(prompt(20 + i), (i,), temperature=t) for i, t in enumerate(subject.temperatures)]
    for one, (completion,) in zip(asked, subject.generate(*asked), strict=True):
        assert gaps(subject.model, completion, one.sampling.temperature).max() <= subject.tolerance


@pytest.mark.parametrize(
    ("name", "changes"),
    [("top_k", {"top_k": 5}), ("top_p", {"top_p": 0.6}), ("min_p", {"min_p": 0.2})],
)
def test_truncation_takes_tokens_away_and_leaves_logprobs_alone(subject, name, changes):
    asked = request(prompt(30), range(12), temperature=subject.hottest(), **changes)
    if name in subject.refuses:
        with raises(EngineError, f"unsupported-sampling: sampling.{name}"):
            subject.generate(asked)
        return
    for completion in subject.generate(asked)[0]:
        assert gaps(subject.model, completion, subject.hottest()).max() <= subject.tolerance
        assert all(_allowed(subject, completion, **changes))


def _allowed(
    subject: Subject,
    completion: Completion,
    top_k: int = VOCAB,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> list[bool]:
    """Whether each token is among those that truncation leaves, with room for rounding."""
    model, temperature, room = subject.model, subject.hottest(), max(1e-3, 2 * subject.tolerance)
    start = len(completion.prompt_token_ids)
    logits = reference_logits(model, completion.prompt_token_ids + completion.token_ids)
    found = []
    for position, token in enumerate(completion.token_ids):
        chances = (logits[start + position - 1] / temperature).softmax(-1)
        larger = chances[chances > chances[token] * (1 + room)]
        kept = len(larger) < top_k and float(larger.sum()) <= top_p + room / 10
        found.append(kept and bool(chances[token] >= min_p * chances.max() * (1 - room)))
    return found


def test_a_repetition_penalty_counts_prompt_and_completion(subject):
    asked = request(prompt(8), temperature=0.0, repetition_penalty=1.5, max_tokens=16)
    if "penalties" in subject.refuses:
        with raises(EngineError, "unsupported-sampling: sampling.repetition_penalty"):
            subject.generate(asked)
        return
    ((completion,),) = subject.generate(asked)
    ids, wanted = list(asked.prompt_token_ids), []
    for _ in range(16):
        logits = reference_logits(subject.model, ids)[-1]
        seen = torch.tensor(sorted(set(ids)))
        logits[seen] = torch.where(logits[seen] > 0, logits[seen] / 1.5, logits[seen] * 1.5)
        wanted.append(int(logits.argmax()))
        ids.append(wanted[-1])
    if subject.exact:
        assert list(completion.token_ids) == wanted
    assert gaps(subject.model, completion, 0.0).max() <= subject.tolerance  # logprobs are without penalties


@pytest.mark.parametrize("changes", [{"presence_penalty": 1.5}, {"frequency_penalty": 1.5}])
def test_presence_and_frequency_count_the_completion(subject, changes):
    asked = request(prompt(8), temperature=0.0, max_tokens=16, **changes)
    if "penalties" in subject.refuses:
        with raises(EngineError, f"unsupported-sampling: sampling.{next(iter(changes))}"):
            subject.generate(asked)
        return
    ((completion,),) = subject.generate(asked)
    wanted: list[int] = []
    for _ in range(16):
        logits = reference_logits(subject.model, [*asked.prompt_token_ids, *wanted])[-1]
        counts = torch.bincount(torch.tensor(wanted, dtype=torch.long), minlength=VOCAB).float()
        logits -= 1.5 * (counts if "frequency_penalty" in changes else (counts > 0).float())
        wanted.append(int(logits.argmax()))
    if subject.exact:
        assert list(completion.token_ids) == wanted
    assert gaps(subject.model, completion, 0.0).max() <= subject.tolerance


# seeds


def test_a_seed_decides_a_sample_whatever_is_in_its_batch(subject):
    if not subject.seeded:
        pytest.skip("the engine has no seeds")
    hot = subject.hottest()
    alone = subject.generate(request(prompt(25), (11, 2**62 + 5), temperature=hot))[0]
    others = [request(prompt(10 + i, 1), range(3), temperature=hot) for i in range(6)]
    batch = subject.generate(*others[:3], request(prompt(25), (2**62 + 5, 11), temperature=hot), *others[3:])
    if subject.exact:
        assert [c.token_ids for c in batch[3]] == [alone[1].token_ids, alone[0].token_ids]
    assert alone[0].token_ids != alone[1].token_ids


def test_n_samples_are_n_different_ones_in_seed_order(subject):
    asked = request(prompt(12), range(40, 56), temperature=subject.hottest())
    (completions,) = subject.generate(asked)
    assert [c.seed for c in completions] == list(range(40, 56))
    assert len({c.token_ids for c in completions}) == 16


def test_greedy_samples_of_one_prompt_are_one_and_the_same(subject):
    (completions,) = subject.generate(request(prompt(12), range(4), temperature=0.0))
    assert len(completions) == 4
    if subject.exact:
        assert len({c.token_ids for c in completions}) == 1


def test_sampling_follows_the_distribution(subject):
    """256 first tokens of one prompt against the reference's probabilities: a chi-squared test of the five
    largest and the rest, far from its limit for a right sampler."""
    hot = subject.hottest()
    (completions,) = subject.generate(request(prompt(9), range(256), temperature=hot, max_tokens=1))
    chances = (reference_logits(subject.model, prompt(9))[-1] / hot).softmax(-1)
    top = chances.topk(5).indices.tolist()
    wanted = [256 * float(chances[i]) for i in top]
    wanted.append(256 - sum(wanted))
    seen = [sum(c.token_ids[0] == i for c in completions) for i in top]
    seen.append(256 - sum(seen))
    assert sum((s - w) ** 2 / w for s, w in zip(seen, wanted, strict=True)) < 25  # p = 1e-4 at 5 degrees


# where a sample ends


def text_of(subject: Subject, token_ids: Sequence[int]) -> str:
    """The text of a completion, by transformers: everything but the end of sequence."""
    return str(subject.model.tokenizer.decode([i for i in token_ids if i != EOS], skip_special_tokens=False))


def greedy(subject: Subject, count: int) -> tuple[tuple[int, ...], list[int]]:
    """A prompt, and the reference's tokens behind it without end of sequence; those of the engine itself
    where it rounds in another way."""
    for seed in range(20):
        ids = prompt(14, seed)
        if subject.exact:
            tokens = reference_greedy(subject.model, ids, count)
        else:
            ((completion,),) = subject.generate(request(ids, temperature=0.0, max_tokens=count))
            tokens = list(completion.token_ids)
        if EOS not in tokens and len(set(tokens)) == count:
            return ids, tokens
    raise AssertionError("no prompt suits the tests of stops")


def test_eos_ends_a_sample_and_stays_in_it(subject):
    asked = request(prompt(6), range(64), temperature=subject.hottest(), ignore_eos=False, max_tokens=48)
    (completions,) = subject.generate(asked)
    ended = [c for c in completions if c.finish_reason == "stop"]
    assert ended, "no sample reached the end-of-sequence id: the test shows nothing"
    for completion in ended:
        assert completion.stop_reason == EOS and completion.token_ids[-1] == EOS
        assert EOS not in completion.token_ids[:-1]
    for completion in completions:
        if completion.finish_reason == "length":
            assert len(completion.token_ids) == 48 and EOS not in completion.token_ids
    assert "<eos>" not in (ended[0].text or "")
    longer = subject.generate(
        request(prompt(6), [c.seed for c in ended], temperature=subject.hottest(), max_tokens=48)
    )[0]
    assert all(len(c.token_ids) == 48 and c.finish_reason == "length" for c in longer)
    if subject.seeded and subject.exact:
        for before, after in zip(ended, longer, strict=True):
            assert after.token_ids[: len(before.token_ids)] == before.token_ids


def test_a_stop_id_ends_a_sample_and_stays_in_it(subject):
    ids, wanted = greedy(subject, 8)
    stop = wanted[5]
    asked = request(ids, temperature=0.0, stop_token_ids=(stop,), ignore_eos=False)
    ((completion,),) = subject.generate(asked)
    assert list(completion.token_ids) == wanted[: wanted.index(stop) + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.token_ids[-1] == stop and len(completion.logprobs) == len(completion.token_ids)


@pytest.mark.parametrize("keep", [True, False])
def test_a_stop_string_ends_a_sample_and_only_its_text_may_lose_it(subject, keep):
    ids, wanted = greedy(subject, 10)
    text = text_of(subject, wanted)
    stop = text[9:12]  # the end of token 4, token 5: found when token 5 is there
    asked = request(ids, temperature=0.0, stop=(stop,), keep_stop=keep)
    if "stop" in subject.refuses:
        with raises(EngineError, "unsupported-sampling: sampling.stop"):
            subject.generate(asked)
        return
    ((completion,),) = subject.generate(asked)
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    cut = text.find(stop)
    assert completion.text == text[: cut + len(stop) if keep else cut]
    assert list(completion.token_ids) == wanted[: (cut + len(stop) + 1) // 2]
    assert len(completion.logprobs) == len(completion.token_ids)


def test_min_tokens_holds_stop_ids_back(subject):
    ids, wanted = greedy(subject, 3)
    stop = wanted[2]
    asked = request(ids, temperature=0.0, stop_token_ids=(stop,), min_tokens=6, ignore_eos=False)
    if "min_tokens" in subject.refuses:
        with raises(EngineError, "unsupported-sampling: sampling.min_tokens"):
            subject.generate(asked)
        return
    ((completion,),) = subject.generate(asked)
    assert len(completion.token_ids) >= 6
    assert not {stop, EOS} & set(completion.token_ids[:6])
    assert gaps(subject.model, completion, 0.0).max() <= subject.tolerance


@pytest.mark.parametrize(("at", "ends"), [(3, 12), (6, 6)])
def test_min_tokens_holds_stop_strings_back(subject, at, ends):
    """A stop string that is there with token `at`, and min_tokens = 6."""
    ids, wanted = greedy(subject, 12)
    texts = [text_of(subject, wanted[:n]) for n in range(13)]
    stop = texts[at][-3:]
    assert [n for n in range(1, 13) if stop in texts[n] and stop not in texts[n - 1]] == [at]
    assert texts[12].count(stop) == 1, "the prompt does not suit the test"
    asked = request(ids, temperature=0.0, stop=(stop,), min_tokens=6, max_tokens=12)
    if subject.refuses & {"min_tokens", "min_tokens with stop", "stop"}:
        field = "stop" if "stop" in subject.refuses else "min_tokens"
        with raises(EngineError, f"unsupported-sampling: sampling.{field}"):
            subject.generate(asked)
        return
    ((completion,),) = subject.generate(asked)
    assert list(completion.token_ids) == wanted[:ends]
    assert completion.stop_reason == (stop if ends < 12 else None)


def test_max_tokens_and_the_context_end_a_sample_by_length(subject):
    short, full = subject.generate(
        request(prompt(5), temperature=0.0, max_tokens=1),
        request(prompt(MAX_MODEL_LEN - 6), temperature=0.0, max_tokens=40),
    )
    assert (short[0].finish_reason, len(short[0].token_ids)) == ("length", 1)
    assert (full[0].finish_reason, len(full[0].token_ids)) == ("length", 6)


# the interface


def test_every_sample_is_reported_once_as_it_finishes(subject):
    seen: dict[tuple[int, int], Completion] = {}

    def note(index: int, sample: int, completion: Completion) -> None:
        assert (index, sample) not in seen
        seen[index, sample] = completion

    asked = [
        request(prompt(4 + i), range(3), temperature=subject.hottest(), max_tokens=2 + 3 * i)
        for i in range(3)
    ]
    results = subject.generate(*asked, on_completion=note)
    assert seen == {(i, j): c for i, row in enumerate(results) for j, c in enumerate(row)}
    assert [[len(c.token_ids) for c in row] for row in results] == [[2] * 3, [5] * 3, [8] * 3]
    assert results[1][0].text == text_of(subject, results[1][0].token_ids)


def test_every_declared_member_is_there(subject):
    assert require_engine(subject.engine, name="of this suite") is subject.engine


def test_no_requests_are_no_work(subject):
    assert subject.generate() == []


def test_the_trainers_random_numbers_are_left_alone(subject):
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    wanted = torch.rand(3).tolist(), random.random(), np.random.rand()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    subject.generate(request(prompt(7), range(4), temperature=subject.hottest()))
    assert (torch.rand(3).tolist(), random.random(), np.random.rand()) == wanted


@pytest.mark.parametrize(
    ("ids", "changes", "message"),
    [
        ((), {}, "empty"),
        ((1, VOCAB), {}, f"outside-vocabulary: {VOCAB}"),
        ((1, -1), {}, "outside-vocabulary: -1"),
        (prompt(MAX_MODEL_LEN), {}, f"too-long: {MAX_MODEL_LEN}"),
        ((1, 2), {"max_tokens": 0}, "out-of-range: sampling.max_tokens"),
        ((1, 2), {"top_p": 0.0}, "out-of-range: sampling.top_p"),
        ((1, 2), {"top_k": 0}, "out-of-range: sampling.top_k"),
        ((1, 2), {"min_tokens": 20}, "out-of-range: sampling.min_tokens"),
        ((1, 2), {"temperature": -1.0}, "out-of-range: sampling.temperature"),
        ((1, 2), {"stop_token_ids": (VOCAB,), "ignore_eos": False}, "out-of-range: sampling.stop_token_ids"),
        ((1, 2), {"stop": ("",)}, "empty: sampling.stop"),
    ],
)
def test_bad_input_is_refused_and_nothing_else_is_lost(subject, ids, changes, message):
    seeds = (0,)
    with raises(EngineError, message):
        subject.generate(request(prompt(4), temperature=0.0), request(ids, seeds, **changes))
    assert len(subject.generate(request(prompt(4), temperature=0.0))[0][0].token_ids) == 12


@pytest.mark.parametrize("seed", [-1, 1 << 63])
def test_a_seed_has_63_bits(subject, seed):
    with raises(EngineError, "out-of-range: seed"):
        subject.generate(request(prompt(4), (seed,)))


def test_abort_ends_what_runs_and_the_engine_goes_on(subject):
    """Many samples to the end of the context; aborted from another thread once some tokens are there."""
    hot = subject.hottest()
    asked = [request(prompt(3), (9,), max_tokens=2, temperature=hot)]
    asked += [request(prompt(5 + i), range(16), max_tokens=480, temperature=hot) for i in range(4)]
    started = threading.Event()

    def abort() -> None:
        started.wait(60)
        for _ in range(3):
            time.sleep(0.02)
            subject.engine.abort()

    thread = threading.Thread(target=abort)
    thread.start()
    results = subject.generate(*asked, on_completion=lambda *_: started.set())
    thread.join()
    reasons = {c.finish_reason for row in results for c in row}
    assert "abort" in reasons and [len(row) for row in results] == [1, 16, 16, 16, 16]
    assert results[0][0].finish_reason == "length"
    for one, row in zip(asked, results, strict=True):
        for completion in row:
            assert completion.prompt_token_ids == one.prompt_token_ids
            assert len(completion.logprobs) == len(completion.token_ids)
            assert completion.stop_reason is None
    assert len(subject.generate(request(prompt(4), temperature=0.0))[0][0].token_ids) == 12


def test_stats_count_what_was_done(subject):
    before = subject.engine.stats()
    subject.generate(request(prompt(10), range(3), max_tokens=4, temperature=subject.hottest()))
    after = subject.engine.stats()
    assert after.requests - before.requests == 1
    assert after.prompt_tokens - before.prompt_tokens == 30
    assert after.completion_tokens - before.completion_tokens == 12
    assert after.generate_seconds > before.generate_seconds and after.queued == 0
    assert after.policy_version == subject.version
    assert 0.0 <= after.cache_hit_rate <= 1.0


# the stream


def settings(changed: GenerationRequest, **changes: object) -> SamplingParams:
    return dataclasses.replace(changed.sampling, **changes)


def test_a_sample_that_is_cut_and_continued_is_the_one_made_at_once(subject):
    """In three parts, of 5, 1 and 6 tokens. An engine without Lockstep's noise is compared where it has
    none."""
    ours = subject.ours
    asked = request(prompt(20), range(3), temperature=subject.hottest() if ours else 0.0, max_tokens=12)
    (whole,) = subject.generate(asked)
    handle = subject.engine.submit(dataclasses.replace(asked, sampling=settings(asked, max_tokens=5)))
    tokens: list[list[int]] = [[], [], []]
    for done in subject.engine.finished():
        completion, before = done.completion, tokens[done.sample]
        assert done.handle is handle and completion.seed == asked.seeds[done.sample]
        assert completion.prompt_token_ids == (*asked.prompt_token_ids, *before)
        assert gaps(subject.model, completion, asked.sampling.temperature).max() <= subject.tolerance
        before += completion.token_ids
        if len(before) < 12:
            more = 1 if len(before) == 5 else 6
            subject.engine.continue_(done, sampling=settings(asked, max_tokens=more))
    assert [len(found) for found in tokens] == [12] * 3
    if subject.exact:
        assert [tuple(found) for found in tokens] == [c.token_ids for c in whole]


def test_turns_go_on_behind_what_others_wrote(subject):
    """Three turns of each of 24 samples of unlike lengths, and a request more between two items."""
    hot = subject.hottest()
    asked = [
        request(prompt(5 + 9 * i), range(4), temperature=hot, max_tokens=2 + 3 * i, ignore_eos=False)
        for i in range(6)
    ]
    late = request(prompt(8, 3), temperature=hot, max_tokens=3)
    numbers = {subject.engine.submit(one): i for i, one in enumerate(asked)}
    expected = {(i, sample): one.prompt_token_ids for i, one in enumerate(asked) for sample in range(4)}
    turns = dict.fromkeys(expected, 0)
    for done in subject.engine.finished():
        completion = done.completion
        assert gaps(subject.model, completion, hot).max() <= subject.tolerance
        assert completion.policy_version == subject.version
        if not any(turns.values()):
            numbers[subject.engine.submit(late)] = -1
            expected[-1, 0], turns[-1, 0] = late.prompt_token_ids, 2
        key = numbers[done.handle], done.sample
        assert completion.prompt_token_ids == expected[key]
        turns[key] += 1
        if turns[key] < 3:
            reply = prompt(3, turns[key])
            expected[key] = (*expected[key], *completion.token_ids, *reply)
            subject.engine.continue_(done, reply, sampling=settings(late, max_tokens=4))
    assert set(turns.values()) == {3} and len(turns) == 25
    assert subject.engine.stats().queued == 0


def test_a_held_turn_is_waited_for_and_goes_on_like_any_other(subject):
    """Its reply comes from another thread, when nothing else is left."""
    ours = subject.ours
    asked = request(prompt(20), range(3), temperature=subject.hottest() if ours else 0.0, max_tokens=5)
    more = settings(asked, max_tokens=6)
    subject.engine.submit(asked)
    threads, turns = [], {}
    for done in subject.engine.finished():
        turns.setdefault(done.sample, []).append(done.completion)
        if done.sample == 1 and len(turns[1]) == 1:
            subject.engine.hold(done, seconds=60)
            go_on = functools.partial(subject.engine.continue_, done, prompt(3), sampling=more)
            threads.append(threading.Timer(0.3, go_on))
            threads[-1].start()
    first, second = turns[1]
    assert [len(found) for found in turns.values()].count(1) == 2
    context = (*first.prompt_token_ids, *first.token_ids, *prompt(3))
    assert second.prompt_token_ids == context and len(second.token_ids) == 6
    assert gaps(subject.model, second, asked.sampling.temperature).max() <= subject.tolerance
    assert subject.engine.stats().queued == 0
    for thread in threads:
        thread.join()


class Tools(Environment):
    """Replies late to the first turn, and at once to the second."""

    async def run(self, task: Prompt, sample: Sampler) -> Trajectory:
        await sample()
        await asyncio.sleep(0.05 * (1 + task.index))
        await sample(prompt(3, 1))
        return await sample(prompt(2, 2))


def test_three_turns_of_an_environment_have_the_logprobs_of_the_whole(subject):
    """Two samples of each of three tasks, each compared with one forward over its three turns."""
    hot = subject.hottest()
    tasks = [Prompt(index=i, token_ids=prompt(5 + 9 * i), text="") for i in range(3)]
    sampling = request(prompt(5), temperature=hot, max_tokens=4).sampling
    rules = TrajectoryRules(sampling=sampling, max_tokens=20, max_turns=3, wait_seconds=60.0)
    groups = run_episodes(
        subject.engine,
        Tools(),
        at_once([(task, (11, 12)) for task in tasks]),
        rules=rules,
        on_end=lambda *_: None,
    )
    for task, group in zip(tasks, groups, strict=True):
        assert len(group) == 2
        for one in group:
            assert [span.author for span in one.spans] == ["prompt", *(["policy", "tool"] * 3)[:-1]]
            assert [span.token_ids for span in one.spans[::2]] == [task.token_ids, prompt(3, 1), prompt(2, 2)]
            logprobs = (reference_logits(subject.model, one.token_ids) / hot).log_softmax(-1)
            at = 0
            for span in one.spans:
                if span.author == "policy":
                    assert len(span.token_ids) == 4
                    wanted = [logprobs[at + i - 1, token].item() for i, token in enumerate(span.token_ids)]
                    assert span.logprobs == pytest.approx(wanted, rel=0, abs=subject.tolerance)
                at += len(span.token_ids)
    assert subject.engine.stats().queued == 0


def test_a_refused_request_or_turn_leaves_the_others_alone(subject):
    asked = request(prompt(6), range(2), temperature=0.0, max_tokens=4)
    handle = subject.engine.submit(asked)
    with raises(EngineError, "empty"):
        subject.engine.submit(request((), (0,)))
    seen = []
    for done in subject.engine.finished():
        seen.append((done.handle, done.sample, len(done.completion.token_ids)))
        with raises(EngineError, f"too-long: {MAX_MODEL_LEN}"):
            subject.engine.continue_(done, prompt(MAX_MODEL_LEN - 10), sampling=asked.sampling)
        with raises(EngineError, "outside-vocabulary", token=VOCAB):
            subject.engine.continue_(done, (VOCAB,), sampling=asked.sampling)
    assert sorted(seen, key=lambda one: one[1]) == [(handle, 0, 4), (handle, 1, 4)]
    assert list(subject.engine.finished()) == []


def test_an_abort_ends_what_was_submitted_and_it_can_be_continued(subject):
    ours = subject.ours
    asked = request(prompt(9), range(4), temperature=subject.hottest() if ours else 0.0, max_tokens=120)
    (whole,) = subject.generate(asked)
    first = subject.engine.submit(request(prompt(4), temperature=0.0, max_tokens=2))
    handle = subject.engine.submit(asked)
    cut: dict[int, Completion] = {}
    ended: set[int] = set()
    for done in subject.engine.finished():
        if done.handle is first:
            subject.engine.abort()
        elif done.completion.finish_reason == "abort" or ours:
            assert done.completion.finish_reason == "abort"
            cut[done.sample] = done.completion
        else:  # a server samples on while it is told
            ended.add(done.sample)
    assert sorted([*cut, *ended]) == list(range(4))
    for sample, completion in cut.items():
        left = settings(asked, max_tokens=120 - len(completion.token_ids))
        part = Finished(handle=handle, sample=sample, completion=completion)
        subject.engine.continue_(part, sampling=left)
    rest = {done.sample: done.completion for done in subject.engine.finished()}
    assert rest.keys() == cut.keys()
    for sample, completion in rest.items():
        assert completion.finish_reason == "length"
        if subject.exact:
            assert cut[sample].token_ids + completion.token_ids == whole[sample].token_ids


def test_a_consumer_that_leaves_takes_everything_with_it(subject):
    hot = subject.hottest()
    for _ in range(2):
        subject.engine.submit(request(prompt(4), range(2), max_tokens=2, temperature=hot))
        subject.engine.submit(request(prompt(5), range(8), max_tokens=300, temperature=hot))
        stream = subject.engine.finished()
        assert len(next(stream).completion.token_ids) == 2
        stream.close()
        assert subject.engine.stats().queued == 0 and list(subject.engine.finished()) == []
    with pytest.raises(ZeroDivisionError):
        subject.generate(
            request(prompt(4), max_tokens=2, temperature=hot),
            request(prompt(5), range(8), max_tokens=300, temperature=hot),
            on_completion=lambda *_: 1 / 0,
        )
    assert len(subject.generate(request(prompt(4), temperature=0.0))[0][0].token_ids) == 12


def test_weights_and_sleep_wait_for_the_end_of_a_stream(subject):
    engine = subject.engine
    engine.submit(request(prompt(4), range(2), temperature=0.0))

    def refused():
        with raises(EngineError, "wrong-state: already generating"):
            engine.sleep()
        with raises(EngineError, "wrong-state: already generating"):
            if engine.external:
                engine.begin_update(
                    UpdateSession(policy_version=9, run_id="test", deadline=time.monotonic() + 60)
                )
            else:
                subject.push(subject.version + 1)
        with raises(EngineError, "wrong-state: already generating"):
            engine.generate([request(prompt(4), temperature=0.0)])

    refused()
    for done in engine.finished():
        refused()
        assert done.completion.policy_version == subject.version
    assert engine.stats().policy_version == subject.version


def test_nothing_joins_a_generate(subject):
    def listen(*_: object) -> None:
        with raises(EngineError, "wrong-state: already generating", call="submit"):
            subject.engine.submit(request(prompt(4), temperature=0.0))
        with raises(EngineError, "wrong-state: already generating", call="finished"):
            next(subject.engine.finished())

    assert len(subject.generate(request(prompt(4), temperature=0.0), on_completion=listen)) == 1


def test_another_thread_may_submit_while_samples_run(subject):
    first = subject.engine.submit(request(prompt(5), range(4), max_tokens=90, temperature=0.0))
    short = request(prompt(7), max_tokens=3, temperature=0.0)
    second = []
    thread = threading.Timer(0.05, lambda: second.append(subject.engine.submit(short)))
    thread.start()
    lengths = {
        (done.handle, done.sample): len(done.completion.token_ids) for done in subject.engine.finished()
    }
    thread.join()
    if len(lengths) == 4:  # it came when all had ended
        lengths |= {(done.handle, done.sample): 3 for done in subject.engine.finished()}
    assert lengths == {(first, i): 90 for i in range(4)} | {(second[0], 0): 3}


# weights


def test_an_update_is_seen_at_once_also_by_prompts_that_were_cached(subject):
    """The same long prompts before and after: what a prefix cache kept of the old weights would show."""
    asked = [request(prompt(LONG), range(2), temperature=0.0), request(prompt(LONG, 1), temperature=0.0)]
    subject.generate(*asked)
    before = subject.generate(*asked)
    for version, seed in ((subject.version + 1, 21), (subject.version + 2, 22)):
        sharpen(subject.model.module, seed=seed)
        subject.push(version)
        subject.version = version
        after = subject.generate(*asked)
        for row, old in zip(after, before, strict=True):
            for completion, earlier in zip(row, old, strict=True):
                assert gaps(subject.model, completion, 0.0).max() <= subject.tolerance
                assert completion.policy_version == version
                assert completion.token_ids != earlier.token_ids
        if subject.exact:
            wanted = reference_greedy(subject.model, prompt(LONG), 12)
            assert [list(c.token_ids) for c in after[0]] == [wanted, wanted]
        before = after


def test_half_an_update_is_refused_until_a_whole_one(subject):
    if not subject.engine.external:
        pytest.skip("the engine shares the trainer's weights")
    session = UpdateSession(policy_version=9, run_id="test", deadline=time.monotonic() + 60)
    subject.engine.begin_update(session)
    subject.engine.fail_update("the test stops here")
    assert subject.engine.dirty
    with raises(EngineError, "wrong-state: dirty"):
        subject.generate(request(prompt(4), temperature=0.0))
    subject.version += 1
    subject.push(subject.version)
    assert not subject.engine.dirty
    ((completion,),) = subject.generate(request(prompt(LONG), temperature=0.0))
    assert completion.policy_version == subject.version
    assert gaps(subject.model, completion, 0.0).max() <= subject.tolerance


def test_an_engine_that_sleeps_refuses_and_wakes_as_it_was(subject):
    if not subject.sleeps:
        pytest.skip("the engine was made without sleep")
    subject.engine.sleep()
    with raises(EngineError, "wrong-state: asleep"):
        subject.generate(request(prompt(4), temperature=0.0))
    subject.engine.wake()
    if subject.engine.external and subject.engine.dirty:
        subject.version += 1
        subject.push(subject.version)
    ((completion,),) = subject.generate(request(prompt(LONG), temperature=0.0))
    assert gaps(subject.model, completion, 0.0).max() <= subject.tolerance
