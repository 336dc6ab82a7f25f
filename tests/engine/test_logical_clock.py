"""Logical time under rollout.schedule = "fixed"."""

from __future__ import annotations

import json
import random

from lockstep.engine.local_server.clock import Entry, LogicalClock, border_json


def run(
    lengths: list[int], *, first: int, slots: int, order: random.Random, begun: int = 0
) -> tuple[int | None, list[int]]:
    """The border, and the new tokens of each sample up to it, where an engine draws a token of any sample at
    any time. lengths: at which each ends."""
    queue = [Entry(str(i), i < first, begun) for i in range(len(lengths))]
    about = json.loads(json.dumps(border_json(slots=slots, tokens=0, queue=queue)))
    clock, drawn = LogicalClock.of_json(about), [0] * len(lengths)
    while not clock.reached:
        i = order.choice([i for i, length in enumerate(lengths) if drawn[i] < length])
        drawn[i] += 1
        clock.drew(str(i), begun + drawn[i])
        if drawn[i] == lengths[i]:
            clock.ended(str(i))
    return clock.border, [clock.limit(str(i)) for i in range(len(lengths))]


def test_an_example_worked_by_hand() -> None:
    """Two slots; samples 0 and 1 are the step's, and have 2 + 6 tokens.

    slot 0   00222222|2         E = 6, K = (2 + 6) / 2 = 4, border 10
    slot 1   1111113333|
    """
    border, limits = run([2, 6, 7, 9, 5], first=2, slots=2, order=random.Random(0))
    assert border == 10
    assert limits == [2, 6, 7, 4, 1]  # sample 2 ends at 9, and sample 4 draws one token in its slot


def test_what_was_begun_counts_to_the_tokens_of_the_step_and_not_to_time() -> None:
    border, limits = run([2, 6, 7, 9, 5], first=2, slots=2, begun=3, order=random.Random(0))
    assert (border, limits) == (6 + (2 + 6 + 2 * 3) // 2, [2, 6, 7, 7, 4])


def test_the_order_of_the_engine_changes_nothing() -> None:
    draw = random.Random(1)
    for case in range(60):
        lengths = [draw.randint(1, 30) for _ in range(draw.randint(2, 24))]
        first, slots = draw.randint(0, len(lengths)), draw.choice([1, 2, 5, 100])
        found = [run(lengths, first=first, slots=slots, order=random.Random(n)) for n in range(4)]
        assert all(each == found[0] for each in found), case
        border, limits = found[0]
        assert border is not None and limits[:first] == lengths[:first]


def test_samples_that_had_ended_before_a_restart_count_as_they_are() -> None:
    """Of the worked example: the engine died after sample 0."""
    queue = [Entry("0", True, 0, 2, True), *(Entry(str(i), i < 2, 0) for i in range(1, 5))]
    clock = LogicalClock.of_json(border_json(slots=2, tokens=0, queue=queue))
    for id, length in {"1": 6, "2": 7, "3": 9, "4": 5}.items():
        for written in range(1, length + 1):
            clock.drew(id, written)
        clock.ended(id)
    assert clock.border == 10 and [clock.limit(str(i)) for i in range(5)] == [2, 6, 7, 4, 1]


def test_without_samples_of_the_step_the_border_follows_from_its_tokens() -> None:
    clock = LogicalClock(slots=4, tokens=9, queue=[Entry("a", False, 0)])
    assert clock.border == 3 and not clock.reached
    for written in range(1, 4):
        clock.drew("a", written)
    assert clock.reached and clock.limit("a") == 3


def test_a_sample_loses_what_is_beyond_the_border() -> None:
    clock = LogicalClock(slots=1, tokens=2, queue=[Entry("a", False, 1), Entry("b", False, 0)])
    for written in range(2, 6):
        clock.drew("a", written)
    clock.ended("a")
    sample = {
        "token_ids": [7, 8, 9, 10, 11],
        "logprobs": [0.0] * 5,
        "finish_reason": "stop",
        "stop_reason": 11,
    }
    assert clock.shortened("a", sample) == {
        "token_ids": [7, 8, 9],
        "logprobs": [0.0] * 3,
        "finish_reason": "abort",
        "stop_reason": None,
    }
    assert clock.shortened("b", sample | {"token_ids": [7], "logprobs": [0.0]})["token_ids"] == []
