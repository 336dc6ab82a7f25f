"""Items that are made when they come near: their order, what is left out, workers, and resumes."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest
from raising import raises

from lockstep.config.data import DataConfig
from lockstep.data import lazy
from lockstep.data.lazy import LazyItems, Outcome
from lockstep.errors import DataError

DROPPED = {n for n in range(3000) if n % 7 == 3}
BAD = {1500, 2900}


def make(numbers: Sequence[int]) -> list[Outcome[int]]:
    def outcome(number: int) -> Outcome[int]:
        if number in BAD:
            return Outcome(error=DataError(f"wrong-row: row {number}"))
        if number in DROPPED:
            return Outcome(state="dropped_overlong")
        return Outcome(item=number, tokens=2, trained=1)

    return [outcome(number) for number in numbers]


def items(length: int = 3000, *, function=make, selective: bool = True, **settings) -> LazyItems[int]:
    config = DataConfig(source="a.jsonl", **({"on_bad_row": "skip"} | settings))
    return LazyItems(length, function, config=config, selective=selective)


def expected(length: int, n: int, seed: int, steps: int) -> list[list[int]]:
    """Epochs of numpy's permutations without what is left out."""
    batches: list[list[int]] = []
    epoch = 0
    while len(batches) < steps:
        numbers = map(int, np.random.default_rng([seed, epoch]).permutation(length))
        order = [number for number in numbers if number not in DROPPED | BAD]
        batches += [order[k : k + n] for k in range(0, len(order) // n * n, n)]
        epoch += 1
    return batches[:steps]


@pytest.mark.parametrize(("workers", "prefetch"), [(0, 1), (1, 1), (1, 8), (3, 4)])
@pytest.mark.parametrize("n", [1, 7, 100, 700])
def test_batches_are_epochs_without_what_is_left_out(n, workers, prefetch):
    steps = min(3 * 2570 // n, 60)
    found = items(workers=workers, prefetch=prefetch)
    assert [found.batch(step, n, 5) for step in range(steps)] == expected(3000, n, 5, steps)
    found.close()


def test_a_batch_does_not_depend_on_who_asked_for_what_before():
    steps = expected(3000, 40, 1, 150)
    for order in ([149, 3, 3, 70], [0, 149], [64, 63, 65]):
        found = items()
        for step in order:
            assert found.batch(step, 40, 1) == steps[step]
        found.close()


def test_in_order_goes_round():
    found = items(shuffle=False, workers=2)
    kept = [n for n in range(3000) if n not in DROPPED | BAD]
    cycle = kept * 3
    assert [found.batch(s, 300, 0) for s in range(20)] == [cycle[s * 300 : (s + 1) * 300] for s in range(20)]
    found.close()


def test_a_resume_trusts_what_was_found_and_makes_no_earlier_rows():
    first = items(workers=2)
    left: dict[int, str] = {}
    for step in range(30):
        first.batch(step, 16, 9)
        left |= {each.number: each.state for each in first.pop_news()}
    first.close()
    made: list[int] = []

    def noting(numbers: Sequence[int]) -> list[Outcome[int]]:
        made.extend(numbers)
        return make(numbers)

    second = items(function=noting, workers=0)
    second.trust(left, steps=30)
    made.clear()
    assert [second.batch(s, 16, 9) for s in range(30, 33)] == expected(3000, 16, 9, 33)[30:]
    assert len(made) < 3 * 16 * 2
    second.close()
    fresh = items(function=noting, workers=0)
    made.clear()
    assert fresh.batch(30, 16, 9) == expected(3000, 16, 9, 31)[30]
    assert len(made) > 30 * 16, "nobody has told it"


@pytest.mark.parametrize("known", [{-1: "bad"}, {3000: "bad"}, {0: "kept"}, {0: "gone"}])
def test_what_cannot_be_left_out_is_refused(known):
    with raises(DataError, "wrong-field"):
        items().trust(known, steps=1)


def test_a_row_at_fault_fails_in_the_step_that_it_is_in():
    """With any number of workers, and not when a worker finds it."""
    (step,) = [s for s, batch in enumerate(_all(3000, 30)) if 1500 in batch]
    other = next(s for s, batch in enumerate(_all(3000, 30)) if 2900 in batch)
    for workers in (0, 2):
        found = items(on_bad_row="fail", workers=workers, selective=False, function=only_bad)
        for earlier in range(min(step, other)):
            found.batch(earlier, 30, 0)
        with raises(DataError, "wrong-row"):
            found.batch(min(step, other), 30, 0)
        found.close()


def only_bad(numbers: Sequence[int]) -> list[Outcome[int]]:
    return [Outcome(error=DataError(f"wrong-row: row {n}")) if n in BAD else Outcome(item=n) for n in numbers]


def _all(length: int, n: int) -> list[list[int]]:
    order = np.random.default_rng([0, 0]).permutation(length)
    return [list(map(int, order[k : k + n])) for k in range(0, length // n * n, n)]


def test_the_first_rows_are_looked_at_at_once():
    def first_bad(numbers: Sequence[int]) -> list[Outcome[int]]:
        bad = {n: Outcome(error=DataError(f"wrong-row: row {n}")) for n in (7, 999)}
        return [bad.get(n, Outcome(item=n)) for n in numbers]

    with raises(DataError, "wrong-row: row 7"):
        items(function=first_bad, on_bad_row="fail")
    skipped = items(function=first_bad)
    assert [(each.number, each.state, each.why) for each in skipped.pop_news()] == [
        (7, "bad", "row 7"),
        (999, "bad", "row 999"),
    ]
    assert len(skipped) == 2998 and skipped.examined == 1000 and not skipped.whole
    assert len(skipped.sampled) == 998 and str(skipped.first_bad) == "row 7"


def test_a_sample_without_items_goes_on_until_there_is_one():
    def late(numbers: Sequence[int]) -> list[Outcome[int]]:
        return [Outcome(item=n) if n >= 2100 else Outcome(state="excluded") for n in numbers]

    found = items(function=late)
    assert found.sampled[0] == 2100 and found[0] == 2100
    none = items(function=lambda numbers: [Outcome(state="excluded") for _ in numbers])
    assert none.sampled == [] and len(none) == 0
    with pytest.raises(IndexError):
        none[0]


def test_items_that_rows_do_not_have_are_news_for_a_resume():
    def absent(numbers: Sequence[int]) -> list[Outcome[int]]:
        return [Outcome(state="absent") if n % 5 == 1 else Outcome(item=n) for n in numbers]

    straight = items(function=absent)
    left: dict[int, str] = {}
    batches = []
    for step in range(60):
        batches.append(straight.batch(step, 16, 2))
        if step < 30:
            left |= {each.number: each.state for each in straight.pop_news()}
    resumed = items(function=absent)
    resumed.trust(left, steps=30)
    assert [resumed.batch(step, 16, 2) for step in range(30, 60)] == batches[30:]
    straight.close()
    resumed.close()


def test_a_small_set_is_made_whole_and_once():
    calls: list[int] = []

    def noting(numbers: Sequence[int]) -> list[Outcome[int]]:
        calls.extend(numbers)
        return make(numbers)

    found = items(1000, function=noting)
    assert found.whole and len(found) == 1000 - 143 and found.counts["dropped_overlong"] == 143
    assert (found.tokens, found.trained) == (2 * 857, 857)
    for step in range(300):
        found.batch(step, 16, 0)
    assert sorted(calls) == list(range(1000))
    assert list(found)[:4] == [0, 1, 2, 4] and found[3] == 4


def test_all_items_on_demand():
    found = items()
    found.make_all()
    assert found.whole and found.examined == 3000
    assert sorted(found.batch(0, len(found), 4)) == [n for n in range(3000) if n not in DROPPED | BAD]
    assert found[3] == 4


def test_more_than_there_are_is_refused_when_that_is_known():
    found = items(1000)
    with raises(DataError, "not-enough", needs=858):
        found.batch(0, 858, 0)
    large = items()
    with raises(DataError, "not-enough"):
        large.batch(0, 2600, 0)


def test_workers_are_ahead_of_the_loop():
    threads: set[str] = set()

    def noting(numbers: Sequence[int]) -> list[Outcome[int]]:
        threads.add(threading.current_thread().name.partition("_")[0])
        return make(numbers)

    found = items(function=noting, workers=2, prefetch=4)
    found.batch(0, 64, 0)
    threads.clear()
    for step in range(1, 30):
        found.batch(step, 64, 0)
        time.sleep(0.005)
    assert "data" in threads
    found.close()


def test_an_error_of_the_source_reaches_the_loop():
    broken = threading.Event()

    def changed(numbers: Sequence[int]) -> list[Outcome[int]]:
        if broken.is_set():
            raise DataError("file-changed: a.jsonl was written")
        return make(numbers)

    found = items(function=changed, workers=1)
    found.batch(0, 64, 0)
    broken.set()
    with raises(DataError, "file-changed"):
        for step in range(1, 60):
            found.batch(step, 64, 0)
    found.close()


def test_a_worker_that_does_not_end_is_named(monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(lazy, "MAKE_SECONDS", 0.2)

    def slow(numbers: Sequence[int]) -> list[Outcome[int]]:
        if threading.current_thread() is not threading.main_thread():
            release.wait(60)
        return make(numbers)

    found = items(function=slow, workers=1)
    found.batch(0, 64, 0)
    with raises(DataError, "deadline"):
        found.batch(1, 64, 0)
    release.set()
    found.close()


def test_a_batch_of_another_order_is_the_same_after_a_resume():
    """As dynamic sampling asks for more prompts: the first batch of an order of its own."""
    first = items()
    for step in range(20):
        first.batch(step, 40, 5)
    known = {
        int(n): "dropped_overlong" for n in np.flatnonzero(first._states > lazy.LAST_KEPT) if n in DROPPED
    }
    resumed = items()
    resumed.trust(known, steps=20)
    resumed.batch(20, 40, 5), first.batch(20, 40, 5)
    assert resumed.batch(0, 40, 77) == first.batch(0, 40, 77) == expected(3000, 40, 77, 1)[0]
