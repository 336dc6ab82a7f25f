"""The planner's rows of author A agree with the byte formulas beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import ceil

import pytest
from planner_rows_a import (
    CASES,
    EXPECTED,
    LONGEST_BUDGET,
    SHAPES,
    SWIGLU_TENSORS,
    Case,
    Plan,
    available_gib,
    documents,
    engine_gib,
    gradients_gib,
    peak_gib,
    persistent_gib,
)

FUSED = SWIGLU_TENSORS[0]


def budgets(case: Case) -> list[int]:
    longest = documents(case)[1]
    return sorted({longest, *range(ceil(longest / 512) * 512, LONGEST_BUDGET + 1, 512)})


def plans(case: Case) -> Iterator[Plan]:
    """Every combination of the settings, without a budget."""
    for checkpointing, reshard, reduce, offload, device, ref in product(
        (False, True),
        (False, True),
        ("per_step", "per_micro_batch"),
        (False, True),
        ("model", "cpu"),
        (False, True),
    ):
        yield Plan(
            activation_checkpointing=checkpointing,
            reshard_after_forward=reshard,
            reduce_gradients=reduce,
            engine_offload=offload,
            optimizer_device=device,
            offload_ref=ref,
        )


def fitting(case: Case, acceptable: dict[str, object]) -> list[Plan]:
    """Each combination that agrees with `acceptable`, with the largest budget that fits (fused SwiGLU)."""
    low = acceptable.get("token_budget_at_least", 0)
    high = acceptable.get("token_budget_at_most", LONGEST_BUDGET)
    assert isinstance(low, int) and isinstance(high, int)
    fixed = {key: value for key, value in acceptable.items() if not key.startswith("token_budget")}
    found = []
    for plan in plans(case):
        if any(getattr(plan, key) != value for key, value in fixed.items()):
            continue
        sized = [replace(plan, token_budget=slots) for slots in budgets(case) if low <= slots <= high]
        found += [plan for plan in sized if peak_gib(case, plan, FUSED) <= available_gib(case)][-1:]
    return found


def test_8b_on_four_ranks_has_the_known_parts() -> None:
    case = CASES["8b grpo 4x80"]
    assert engine_gib(case)[0] == pytest.approx(15.0, abs=0.05)
    assert gradients_gib(case, Plan(token_budget=8192)) == pytest.approx(29.9, abs=0.05)
    assert persistent_gib(case, Plan()) == pytest.approx(7.5 + 15.0, abs=0.1)  # float32 shards, AdamW
    assert SHAPES["8b"].parameters == 8_030_261_248  # Llama 3.1 8B


def test_every_case_has_a_row() -> None:
    assert list(EXPECTED) == list(CASES)
    assert len(CASES) == 40


FITTING = [name for name, row in EXPECTED.items() if row.fits]
DEAR = [
    (name, setting, cheap)
    for name in FITTING
    for setting, cheap in (("activation_checkpointing", False), ("optimizer_device", "model"))
    if all(acceptable[setting] != cheap for acceptable in EXPECTED[name].acceptable)
]


@pytest.mark.parametrize("name", FITTING)
def test_each_alternative_fits_and_peaks_in_the_interval(name: str) -> None:
    case, row = CASES[name], EXPECTED[name]
    low, high = row.peak_gib
    assert high <= ceil(available_gib(case))
    for acceptable in row.acceptable:
        found = fitting(case, acceptable)
        assert found, acceptable
        least = acceptable.get("token_budget_at_least", documents(case)[1])
        assert isinstance(least, int)
        for plan in found:
            smaller = replace(plan, token_budget=max(plan.token_budget // 2, least))
            assert low <= peak_gib(case, smaller, FUSED), smaller
            assert peak_gib(case, plan, FUSED) <= high, plan


@pytest.mark.parametrize("name", [name for name, row in EXPECTED.items() if not row.fits])
def test_nothing_fits_where_the_row_says_so(name: str) -> None:
    assert not fitting(CASES[name], {})


@pytest.mark.parametrize(("name", "setting", "cheap"), DEAR)
def test_nothing_cheaper_fits_where_every_alternative_is_dear(name: str, setting: str, cheap: object) -> None:
    assert not fitting(CASES[name], {setting: cheap, "optimizer_device": "model"})
