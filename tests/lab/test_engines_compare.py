"""Comparisons of completions, against numbers worked out by hand."""

import math
from typing import Any

import pytest

from lockstep_lab.engine_parity.job import Row
from lockstep_lab.engine_parity.stats import (
    BAR_NAMES,
    EDGES,
    divergence,
    ends,
    first_difference,
    gap,
    matrix,
    seed_match,
    spread,
)


def row(token_ids: tuple[int, ...], **changes: Any) -> Row:
    values: dict[str, Any] = {
        "phase": "before",
        "kind": "sampled",
        "prompt": 0,
        "sample": 0,
        "seed": 7,
        "prompt_ids": (5, 6),
        "token_ids": token_ids,
        "logprobs": (-1.0,) * len(token_ids),
        "trainer": (-1.0,) * len(token_ids),
        "finish_reason": "length",
        "stop_reason": None,
        "text": None,
        "policy_version": 1,
        "told_seed": 7,
    }
    return Row.model_validate(values | changes)


def test_a_gap_is_worked_out_per_token():
    # engine - trainer: 0.5, 0, -0.25 and 0.001 nats
    found = gap([((-1.0, -2.0), (-1.5, -2.0)), ((-1.0, -0.001), (-0.75, -0.002))])
    assert found is not None
    assert found.tokens == 4
    assert found.mean == pytest.approx((0.5 + 0.0 + 0.25 + 0.001) / 4)
    assert found.max == 0.5
    assert found.p99 == 0.5, "of four values the 99th percentile is the largest"
    # log r = trainer - engine: r - 1 - log r of -0.5, 0, 0.25, -0.001
    k3 = (math.exp(-0.5) - 1 + 0.5) + 0.0 + (math.exp(0.25) - 1 - 0.25) + (math.exp(-0.001) - 1 + 0.001)
    assert found.k3 == pytest.approx(k3 / 4, rel=1e-9)
    # 0 below 1e-7; 0.001 in [1e-3, 1e-2); 0.25 and 0.5 in [0.1, 1)
    assert dict(zip(BAR_NAMES, found.histogram, strict=True)) == {
        "0": 1, "1e-7": 0, "1e-6": 0, "1e-5": 0, "1e-4": 0, "1e-3": 1, "1e-2": 0, "1e-1": 2, "1": 0,
    }  # fmt: skip


def test_the_99th_percentile_is_a_nearest_rank():
    engine = [-float(i) for i in range(1, 201)]
    found = gap([(engine, [0.0] * 200)])
    assert found is not None and (found.p99, found.max) == (198.0, 200.0)
    assert found.histogram[-1] == 200 and len(found.histogram) == len(EDGES) + 1


def test_a_logprob_that_is_not_finite_spoils_every_figure():
    found = gap([((-1.0, -math.inf), (-1.0, -1.0))])
    assert found is not None and math.isnan(found.mean) and math.isnan(found.max) and found.tokens == 2
    assert gap([]) is None


@pytest.mark.parametrize(
    ("left", "right", "at"),
    [((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1,), (1, 2), 1), ((), (4,), 0), ((), (), None)],
)
def test_the_first_difference(left: tuple[int, ...], right: tuple[int, ...], at: int | None):
    assert first_difference(left, right) == at == first_difference(right, left)


def test_a_divergence_has_both_ids_and_the_margin():
    reference = row((4, 9, 8), trainer=(-0.1, -0.7, -3.0), logprobs=(-0.1, -0.71, -3.0))
    own = row((4, 3, 8), trainer=(-0.1, -0.9, -1.0), logprobs=(-0.1, -0.65, -1.0), prompt=6)
    found = divergence(reference, own)
    assert found is not None
    assert (found.prompt, found.position, found.reference_id, found.engine_id) == (6, 1, 9, 3)
    assert found.margin == pytest.approx(0.2), "the trainer prefers the reference's id by 0.2 nats"
    assert found.engine_margin == pytest.approx(-0.06), "the engine preferred its own"
    assert found.is_tie(0.21) and not found.is_tie(0.19)
    assert divergence(own, own) is None


def test_a_completion_that_ends_early_is_no_tie():
    found = divergence(row((4, 9)), row((4,)))
    assert found is not None
    assert (found.position, found.reference_id, found.engine_id, found.margin) == (1, 9, None, None)
    assert not found.is_tie(1e9)


def test_seeds_are_judged_by_what_chance_could_share():
    # every token costs 1 nat: pairs share 4, 1 and 0 of their 4 tokens
    pairs = [
        (row((1, 2, 3, 4)), row((1, 2, 3, 4))),
        (row((1, 2, 3, 4)), row((1, 7, 3, 4))),
        (row((1, 2, 3, 4)), row((7, 2, 3, 4))),
    ]
    found = seed_match(pairs)
    assert found is not None
    assert (found.pairs, found.equal, found.first) == (3, 1, 0)
    assert (found.shared_nats, found.total_nats) == (5.0, 12.0)
    assert found.by_chance and not found.all_equal, "5 nats <= 3 + 6 sqrt(3) + 6"


def test_what_long_pairs_share_is_not_chance():
    same = [(row(tuple(range(8))), row(tuple(range(8))))] * 4  # 32 nats > 4 + 12 + 6
    found = seed_match(same)
    assert found is not None and found.all_equal and not found.by_chance
    late = [(row(tuple(range(40))), row((*range(39), 99)))] * 4  # part at the last of 40 tokens
    found = seed_match(late)
    assert found is not None and found.equal == 0 and not found.by_chance and found.first == 39


def test_certain_tokens_say_nothing_about_seeds():
    sure = [(row((1, 2), trainer=(0.0, 0.0)), row((1, 2), trainer=(0.0, 0.0)))] * 50
    found = seed_match(sure)
    assert found is not None and found.all_equal and found.by_chance
    assert seed_match([]) is None


def test_lengths_and_the_matrix():
    found = spread([10, 1, 3, 2, 4])
    assert found is not None
    assert (found.min, found.median, found.mean, found.p90, found.max) == (1, 3, 4.0, 10, 10)
    assert spread([]) is None
    # 2 prompt ids each: rows of 3, 6 and 4 tokens in a rectangle of 3 x 6
    made = matrix([row((1,)), row((1, 2, 3, 4)), row((1, 2))])
    assert made is not None and (made.samples, made.longest, made.tokens) == (3, 6, 13)
    assert made.fill == pytest.approx(13 / 18)
    assert matrix([]) is None


def test_heads_and_tails():
    assert ends(range(9)) == ((0, 1, 2, 3, 4), (4, 5, 6, 7, 8))
    assert ends([1]) == ((1,), (1,))
