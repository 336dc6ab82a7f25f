import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises

from lockstep.errors import DataError
from lockstep.packing import balance

# benchmarks' rl_32: lengths of 32 rollouts, lognormal and clipped.
RL_32 = [
    *(228, 393, 420, 215, 620, 434, 335, 215, 404, 822, 386, 557, 569, 2048, 780, 922),
    *(408, 295, 1085, 764, 1219, 789, 418, 1170, 1438, 588, 138, 241, 694, 431, 380, 606),
]


def heaviest(lengths, packs):
    return max(sum(lengths[i] for i in pack) for pack in packs)


def brute_force(lengths, budget, limit):
    """(fewest packs, smallest maximum with that many) over every assignment."""
    for num_packs in range(1, len(lengths) + 1):
        best = None
        for assignment in itertools.product(range(num_packs), repeat=len(lengths)):
            packs = [[i for i, p in enumerate(assignment) if p == k] for k in range(num_packs)]
            if all(0 < len(p) <= limit for p in packs) and heaviest(lengths, packs) <= budget:
                best = min(best or budget, heaviest(lengths, packs))
        if best is not None:
            return num_packs, best
    raise AssertionError


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    budget=st.integers(20, 45),
    limit=st.integers(1, 6),
)
def test_equals_brute_force_on_small_cases(lengths, budget, limit):
    packs = balance(lengths, token_budget=budget, max_documents=limit)
    assert (len(packs), heaviest(lengths, packs)) == brute_force(lengths, budget, limit)


@settings(max_examples=100)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=80),
    min_packs=st.integers(1, 6),
    limit=st.integers(1, 40),
)
def test_every_document_once_and_no_pack_overflows(lengths, min_packs, limit):
    packs = balance(lengths, token_budget=300, min_packs=min_packs, max_documents=limit)
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    assert heaviest(lengths, packs) <= 300
    assert all(0 < len(pack) <= limit for pack in packs)
    assert len(packs) >= min(min_packs, len(lengths))
    assert packs == balance(lengths, token_budget=300, min_packs=min_packs, max_documents=limit)


def test_first_fit_would_need_three():
    """4+4+4, 6+6 fill two packs of 12; first-fit decreasing makes 6+6, 4+4+4 too, but 6+5, 5+... does not."""
    assert balance([4, 4, 4, 6, 6], token_budget=12) == [[0, 1, 2], [3, 4]]
    # FFD: 7+5, 6+6 | largest differencing alone: 7+6, 6+5. Only one split of these fits 12.
    assert balance([7, 6, 6, 5], token_budget=12) == [[0, 3], [1, 2]]


@pytest.mark.parametrize(("budget", "num_packs"), [(10112, 2), (6784, 3)])
def test_rl_32_fills_its_packs(budget, num_packs):
    packs = balance(RL_32, token_budget=budget)
    assert len(packs) == num_packs
    assert heaviest(RL_32, packs) <= 1.001 * sum(RL_32) / num_packs


@pytest.mark.parametrize("lengths", [[3, 0], [3, 11]])
def test_refuses_what_no_pack_can_hold(lengths):
    with raises(DataError, "too-long: train.token_budget"):
        balance(lengths, token_budget=10)
