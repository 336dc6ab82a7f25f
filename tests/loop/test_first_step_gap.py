import math

import pytest
from raising import raises

from lockstep.errors import EngineError
from lockstep.loop.gap_check import GapWatch, gap_complaint
from lockstep.loop.metrics import combine


def gap(mean: float) -> dict[str, float]:
    return {f"logprob_gap_{name}": mean for name in ("mean", "p99", "max", "k3")}


def test_a_first_gap_that_rounding_explains_is_fine() -> None:
    assert gap_complaint(gap(9e-4), dtype="float32", temperature=1.0) is None
    assert gap_complaint(gap(0.04), dtype="bfloat16", temperature=1.5) is None
    assert gap_complaint(gap(0.09), dtype="bfloat16", temperature=0.5) is None


def test_a_larger_one_warns() -> None:
    text = gap_complaint(gap(2e-3), dtype="float32", temperature=1.0)
    assert text is not None and "mean 0.002, p99 0.002, max 0.002, k3 0.002 nats" in text
    assert gap_complaint(gap(0.06), dtype="bfloat16", temperature=1.5) is not None


@pytest.mark.parametrize("mean", [0.2, math.nan, math.inf])
def test_other_weights_stop_the_run(mean: float) -> None:
    with raises(EngineError, "values-differ: logprob_gap_mean"):
        gap_complaint(gap(mean), dtype="float32", temperature=1.0)


def test_updates_without_a_metric_do_not_count_in_its_mean() -> None:
    updates = [{"lr": 1.0, "loss": 2.0}, {"lr": 0.5, "loss": 4.0, "entropy": 3.0, "logprob_gap_max": 1.0}]
    assert combine(updates) == {"lr": 0.5, "loss": 3.0, "entropy": 3.0, "logprob_gap_max": 1.0}


def test_steps_of_which_nothing_is_compared_are_told_once_in_a_row() -> None:
    notes: list[str] = []
    watch = GapWatch(temperature=1.0, note=notes.append)
    steps = [gap(0.0) | {"logprob_gap_share": 1.0}, *[{"logprob_gap_share": 0.0}] * 2]
    found = [watch.check(step, dtype="float32") for step in [{"loss": 1.0}, *steps, steps[0], *steps[1:]]]
    assert found == [None, True, None, None, None, None, None]
    assert len(notes) == 2 and all("logprob_gap_share is 0" in note for note in notes)


def test_the_first_gap_that_there_is_is_checked() -> None:
    notes: list[str] = []
    watch = GapWatch(temperature=1.0, note=notes.append)
    assert watch.check({"logprob_gap_share": 0.0}, dtype="float32") is None
    with raises(EngineError, "values-differ: logprob_gap_mean"):
        watch.check(gap(0.2) | {"logprob_gap_share": 0.5}, dtype="float32")
