"""Plans and diagnoses against hand-worked examples."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises

from lockstep.errors import ConfigError
from lockstep.schema.recording import InputMeta
from lockstep_lab.replay.step_plan import PlannedStep, StepPlan, diagnose, plan_steps


def metas(keys: Sequence[tuple[int, int, int]], *, world_size: int) -> list[InputMeta]:
    """keys: (update, micro_batch, rank)."""
    return [
        InputMeta(
            step=update,
            update=update,
            micro_batch=micro_batch,
            num_micro_batches=9,
            rank=rank,
            world_size=world_size,
        )
        for update, micro_batch, rank in keys
    ]


def rows(plan: StepPlan) -> list[tuple[int | None, ...]]:
    return [step.inputs for step in plan.steps]


# update 0: rank 0 has two micro-batches, rank 1 has one; update 1: one each
KEYS = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 0, 1)]
LENGTHS = [(5,), (3,), (9,), (4, 4), (8,)]


def test_each_rank_gets_what_the_rank_of_its_number_had() -> None:
    plan = plan_steps(metas(KEYS, world_size=2), LENGTHS, ranks=2)
    assert plan.order == "recorded ranks"
    assert rows(plan) == [(0, 1), (2, None), (3, 4)]
    assert [step.update for step in plan.steps] == [0, 0, 1]
    assert plan.inputs_of(1) == [1, None, 4]


def test_other_world_sizes_are_dealt_round_robin_and_never_across_optimizer_steps() -> None:
    plan = plan_steps(metas(KEYS, world_size=4), LENGTHS, ranks=2)
    assert plan.order == "round robin"
    assert rows(plan) == [(0, 1), (2, None), (3, 4)]
    assert rows(plan_steps(metas(KEYS, world_size=2), LENGTHS, ranks=4)) == [
        (0, 1, 2, None),
        (3, 4, None, None),
    ]
    assert rows(plan_steps(metas(KEYS, world_size=2), LENGTHS, ranks=1)) == [(i,) for i in range(5)]


def test_only_the_chosen_inputs_are_dealt() -> None:
    plan = plan_steps(metas(KEYS, world_size=2), LENGTHS, ranks=2, indices=[1, 2])
    assert rows(plan) == [(2, 1)]  # rank 0's first micro-batch was left out


@given(
    tokens=st.lists(st.integers(1, 5), min_size=1, max_size=60),
    ranks=st.integers(1, 5),
    seed=st.integers(0, 9),
)
def test_shuffled_deals_every_input_once_and_the_same_way_for_a_seed(
    tokens: list[int], ranks: int, seed: int
) -> None:
    keys = metas([(i, 0, 0) for i in range(len(tokens))], world_size=1)
    lengths = [(n,) for n in tokens]
    plan = plan_steps(keys, lengths, ranks=ranks, shuffle=True, seed=seed)
    assert plan == plan_steps(keys, lengths, ranks=ranks, shuffle=True, seed=seed)
    dealt = [i for row in rows(plan) for i in row if i is not None]
    assert sorted(dealt) == list(range(len(tokens)))
    assert all(any(i is not None for i in row) or ranks == 1 for row in rows(plan))
    remaining = list(tokens)
    for row in rows(plan):
        own = [tokens[i] for i in row if i is not None]
        # equal lengths meet in a step only where the inputs left have no other length
        assert len(set(own)) == min(len(own), len(set(remaining)))
        for n in own:
            remaining.remove(n)


def test_shuffled_leaves_one_rank_without_an_input_in_one_of_eight_steps() -> None:
    keys = metas([(i, 0, 0) for i in range(62)], world_size=1)
    plan = plan_steps(keys, [(i + 1,) for i in range(62)], ranks=2, shuffle=True, seed=3)
    short = [step.step for step in plan.steps if None in step.inputs]
    assert len(plan.steps) == 33  # 62 inputs fill 31 steps of two, and four places stay empty
    assert len(short) == 4 and {b - a for a, b in itertools.pairwise(short)} == {8}
    two = plan_steps(keys[:4], [(1,), (2,), (3,), (4,)], ranks=2, shuffle=True, seed=0)
    assert sum(None in row for row in rows(two)) >= 1


def test_other_seeds_shuffle_otherwise() -> None:
    keys = metas([(i, 0, 0) for i in range(20)], world_size=1)
    lengths = [(i + 1,) for i in range(20)]
    plans = {plan_steps(keys, lengths, ranks=2, shuffle=True, seed=s).steps for s in range(4)}
    assert len(plans) == 4


def test_nothing_to_deal_and_no_rank_are_refused() -> None:
    with raises(ConfigError, "nothing-to-do: --max-inputs"):
        plan_steps([], [], ranks=2)
    with raises(ConfigError, "out-of-range: --ranks"):
        plan_steps(metas(KEYS, world_size=2), LENGTHS, ranks=0)


def test_diagnosis_against_figures_worked_by_hand() -> None:
    plan = plan_steps(metas(KEYS, world_size=2), LENGTHS, ranks=2)
    report = diagnose(plan, LENGTHS)
    first, second, third = report.steps
    # step 0: [1, 5] and [1, 3]: rank 1 pads its row by 2; 5 / mean(5, 3) = 1.25
    assert (first.tokens, first.shapes, first.padding_added) == ((5, 3), ((1, 5), (1, 3)), 2)
    assert first.imbalance == pytest.approx(1.25)
    # step 1: rank 1 has run out: 9 / mean(9, 0) = 2, nothing to pad
    assert (second.tokens, second.shapes, second.padding_added) == ((9, 0), ((1, 9), (0, 0)), 0)
    assert second.imbalance == pytest.approx(2.0) and second.without_input == (1,)
    # step 2: [2, 4] and [1, 8]: rank 0 pads both rows by 4; 8 tokens each
    assert (third.shapes, third.padding_added, third.imbalance) == (((2, 4), (1, 8)), 8, 1.0)
    assert report.tokens == 33 and report.padding_added == 10 and report.worst_step == 1
    assert report.idle_share == pytest.approx(1 - 33 / (2 * (5 + 9 + 8)))
    assert {finding.kind: finding.steps for finding in report.findings} == {
        "no-input": (1,),
        "lengths-differ": (0, 2),
        "rows-differ": (2,),
        "mean-of-means": (0,),
    }


def test_the_text_names_the_ranks_the_shapes_and_the_collective_that_waits() -> None:
    plan = plan_steps(metas(KEYS, world_size=2), LENGTHS, ranks=2)
    text = "\n".join(diagnose(plan, LENGTHS).lines())
    assert "step 1: rank 0 input 2, 9 tokens, [1, 9]; rank 1 no input" in text
    assert "rank 1 has no micro-batch (per rank over the whole replay: [3, 2])" in text
    assert "gradient all-reduce" in text and "1.67x as much" in text  # 5 tokens against 3
    for stage, where in ((3, "all-gather of the first layer's parameters"), (2, "gradient bucket")):
        assert where in "\n".join(diagnose(plan, LENGTHS, zero_stage=stage).lines())


def test_equal_shapes_have_nothing_to_diagnose() -> None:
    steps = (PlannedStep(step=0, update=0, inputs=(0, 1)),)
    report = diagnose(StepPlan(ranks=2, steps=steps, order="round robin"), [(4, 2), (2, 4)])
    assert report.findings == () and report.idle_share == 0.0
    assert "nothing to diagnose" in report.lines()[-1]
    json.dumps(report.to_json())


def test_imbalance_is_reported_above_a_quarter_over_the_mean() -> None:
    steps = (PlannedStep(step=0, update=0, inputs=(0, 1)),)
    plan = StepPlan(ranks=2, steps=steps, order="round robin")
    kinds = {finding.kind for finding in diagnose(plan, [(6,), (2,)]).findings}  # 6 / 4 = 1.5
    assert "imbalance" in kinds
    assert "imbalance" not in {f.kind for f in diagnose(plan, [(5,), (3,)]).findings}  # 1.25
