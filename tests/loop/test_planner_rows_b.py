"""Author B's rows are what the formulas beside them say."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
from planner_rows_a import CASES
from planner_rows_b import (
    EXPECTED,
    LEAN,
    MAX_SLOTS,
    SHAPES,
    SMALLER_CACHE,
    TYPICAL,
    WASTEFUL,
    Case,
    Kept,
    Settings,
    available,
    kv_gib,
    params,
)

SWITCHES = {
    "activation_checkpointing": (False, True),
    "reshard_after_forward": (False, True),
    "reduce_gradients": ("per_step", "per_micro_batch"),
    "engine_offload": (False, True),
    "optimizer_device": ("model", "cpu"),
    "offload_ref": (False, True),
}


def completions(case: Case, wanted: dict[str, object]) -> Iterator[Settings]:
    """Settings that agree with `wanted`: every choice of switches, budgets that double from the least."""
    least, most = wanted.get("token_budget_at_least", 0), wanted.get("token_budget_at_most", MAX_SLOTS)
    assert isinstance(least, int) and isinstance(most, int)
    tokens = case.document * case.documents
    # A budget above all tokens of the rank is as good as exactly these.
    least, most = max(case.document, min(least, tokens)), min(most, tokens)
    slots = [least << doubling for doubling in range(16) if least << doubling <= most]
    choices = ([wanted[key]] if key in wanted else values for key, values in SWITCHES.items())
    for checkpointing, reshard, reduction, offload, device, offload_ref in product(*choices):
        for budget in slots:
            yield Settings(
                slots=budget,
                checkpointing=bool(checkpointing),
                reshard=bool(reshard),
                per_micro_batch=reduction == "per_micro_batch",
                offload=bool(offload),
                host=device == "cpu",
                offload_ref=bool(offload_ref),
            )


def fitting(key: str, wanted: dict[str, object], kept: Kept) -> list[Settings]:
    """The completions of `wanted` that fit."""
    case = Case(CASES[key])
    limit = available(case.number("gib"))
    return [settings for settings in completions(case, wanted) if case.peak(settings, kept) <= limit]


def test_every_case_has_a_row() -> None:
    assert list(EXPECTED) == list(CASES)


def test_the_formulas_give_the_figures_of_issue_31() -> None:
    # Planned there for llama-3.1-8b (8,030,261,248 parameters) on four ranks, with all 128 samples' cache.
    shape = SHAPES["8b"]
    assert params(shape) == 8_030_261_248
    case = Case(CASES["8b grpo 4x80"])
    whole = round(4 * case.p, 1)
    assert (whole, round(case.copy, 1), round(8 * case.p / 4, 1), round(4 * case.p / 4, 1)) == (
        29.9,
        15,
        15,
        7.5,
    )
    assert round(kv_gib(shape, samples=128, length=652, tp=1), 1) == 10.2


@pytest.mark.parametrize("key", EXPECTED)
def test_acceptable_plans_fit_and_peak_where_the_row_says(key: str) -> None:
    row = EXPECTED[key]
    assert row.fits == bool(row.acceptable) == any(fitting(key, {}, LEAN))
    for wanted in row.acceptable:
        for kept in (LEAN, TYPICAL, WASTEFUL):
            for settings in fitting(key, wanted, kept):
                assert row.peak_gib[0] <= Case(CASES[key]).peak(settings, kept) <= row.peak_gib[1], settings
        assert fitting(key, wanted, LEAN), wanted
    if row.fits:
        assert any(fitting(key, wanted, WASTEFUL) for wanted in row.acceptable)


@pytest.mark.parametrize("key", EXPECTED)
def test_dear_savings_are_accepted_only_where_cheaper_ones_do_not_do(key: str) -> None:
    accepted = EXPECTED[key].acceptable
    device = "model" if fitting(key, {"optimizer_device": "model"}, LEAN) else "cpu"
    assert all(wanted["optimizer_device"] == device for wanted in accepted)
    roomy: dict[str, object] = {"optimizer_device": device, "activation_checkpointing": False}
    if fitting(key, roomy | {"token_budget_at_least": 4096}, WASTEFUL):
        assert not any(wanted["activation_checkpointing"] for wanted in accepted)
    if fitting(key, roomy | {"token_budget_at_least": 8192, "engine_offload": False}, WASTEFUL):
        buying = [wanted for wanted in accepted if wanted.get("engine_offload") is not False]
        assert not Case(CASES[key]).decodes or all(
            wanted["token_budget_at_least"] == 8192 for wanted in buying
        )


def test_the_rows_that_need_a_smaller_cache_are_listed() -> None:
    tight = []
    for key, row in EXPECTED.items():
        case = Case(CASES[key])
        host = any(wanted["optimizer_device"] == "cpu" for wanted in row.acceptable)
        if row.fits and case.decodes and case.room_for_keys(Settings(slots=0, host=host)) < case.kv_cache:
            tight.append(key)
    assert tuple(tight) == SMALLER_CACHE
