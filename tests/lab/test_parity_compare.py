import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from lockstep_lab.loss_curves.differences import direction, falls, relative, spread
from lockstep_lab.train_parity.compare import compare, gradient_error, gradient_errors, logprob_spread
from lockstep_lab.train_parity.job import StepRow


def row(step: int, loss: float, grad_norm: float = 1.0) -> StepRow:
    return StepRow(
        step=step,
        loss=loss,
        grad_norm=grad_norm,
        lr=1e-3,
        tokens=10,
        seconds=0.5,
        tokens_per_second=20.0,
        peak_memory_bytes=1,
    )


def test_a_loss_falls_by_more_than_three_standard_errors() -> None:
    # first five: mean 3.0, variance 2.5; last five: mean m, variance 2.5; standard error sqrt(5 / 5) = 1
    head = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert falls([*head, *(x - 3.1 for x in head)]).trend == "falls"
    found = falls([*head, *(x - 2.9 for x in head)])
    assert found.trend == "does not fall"
    assert found.first == 3.0 and found.last == pytest.approx(0.1)
    assert found.standard_error == pytest.approx(1.0) and found.window == 5
    # what lies between the two windows does not count
    assert falls([*head, 100.0, 100.0, *(x - 3.1 for x in head)]).trend == "falls"


def test_a_loss_that_rises_stays_or_is_not_finite_does_not_fall() -> None:
    assert falls([1.0] * 10).trend == "does not fall"
    assert falls([float(i) for i in range(10)]).trend == "does not fall"
    assert falls([5.0, 4.0, math.nan, 2.0, 1.0, 0.0, -1.0, -2.0, -3.0, -4.0]).trend == "does not fall"
    assert falls([math.inf, *(5.0 - i for i in range(10))]).trend == "does not fall"


def test_a_direction_is_a_fall_a_rise_or_neither() -> None:
    # as above: the means differ by 3.1 and 2.9 standard errors
    head = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert direction([*head, *(x - 3.1 for x in head)]) == "falls"
    assert direction([*head, *(x + 3.1 for x in head)]) == "rises"
    assert direction([*head, *(x + 2.9 for x in head)]) == "flat"
    assert direction([1.0, math.nan, 2.0, 3.0]) == "not finite"
    assert direction([1.0, 2.0, 3.0]) == "too few steps"


def test_short_runs_are_judged_by_their_halves() -> None:
    # halves of 3: means 5 and 2, variances 1 and 1, standard error sqrt(2 / 3) = 0.816
    found = falls([6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    assert (found.window, found.trend) == (3, "falls")
    assert found.standard_error == pytest.approx(math.sqrt(2 / 3))
    for steps in range(4):
        assert falls([3.0, 2.0, 1.0][:steps]).trend == "too few steps"
    assert falls([4.0, 3.9, 2.0, 1.9]).trend == "falls"


def test_a_relative_difference() -> None:
    assert relative(1.1, 1.0) == pytest.approx(0.1)
    assert relative(-1.1, -1.0) == pytest.approx(0.1)
    assert relative(0.0, 0.0) == 0.0
    assert relative(0.1, 0.0) == math.inf
    assert relative(0.1, 0.0, floor=2.0) == pytest.approx(0.05)
    assert relative(4.4, 4.0, floor=2.0) == pytest.approx(0.1)
    for a, b in ((math.nan, 1.0), (1.0, math.nan), (math.inf, math.inf)):
        assert math.isnan(relative(a, b))


def test_nan_is_the_largest_difference() -> None:
    found = spread([0.5, math.nan, math.inf])
    assert math.isnan(found.max) and found.at == 2
    assert spread([0.5, 2.0, 1.0]).max == 2.0 and spread([0.5, 2.0, 0.5]).mean == 1.0


def test_logprobs_of_all_trained_tokens(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "a", tmp_path / "b"
    for folder, shift in ((ours, 0.25), (theirs, 0.0)):
        folder.mkdir()
        first, second = np.array([-1.0, -2.0 + shift], np.float32), np.array([-3.0 - 2 * shift], np.float32)
        save_file({"step-000000": first, "step-000001": second}, folder / "logprobs.safetensors")
    found = logprob_spread(ours, theirs, steps=2)
    assert found is not None
    assert (found.max, found.mean, found.at) == (0.5, 0.25, 2)  # (0 + 0.25 + 0.5) / 3
    only = logprob_spread(ours, theirs, steps=1)
    assert only is not None and only.max == 0.25
    assert logprob_spread(ours, tmp_path / "nowhere", steps=2) is None
    save_file({"step-000000": np.zeros(7, np.float32)}, theirs / "logprobs.safetensors")
    other = logprob_spread(ours, theirs, steps=2)
    assert other is not None and math.isnan(other.max), "other tokens are no agreement"


def test_gradients_by_their_worst_parameter(tmp_path: Path) -> None:
    theirs = {"a": np.array([3.0, 4.0]), "b": np.array([0.0, 0.0]), "c": np.array([1e-9])}
    ours = {"a": np.array([3.0, 4.5]), "b": np.array([0.0, 0.0]), "c": np.array([1e-9])}
    assert gradient_error(ours, theirs) == (pytest.approx(0.1), "a")  # 0.5 / 5
    # a parameter whose gradient is zero is measured against 1e-6 of all of them: 5e-7 / 5e-6
    assert gradient_error(theirs | {"b": np.array([5e-7, 0.0])}, theirs) == (pytest.approx(0.1), "b")
    assert gradient_error({"a": theirs["a"]}, theirs) == (math.inf, "b")
    assert gradient_error(theirs | {"a": np.array([3.0])}, theirs) == (math.inf, "a")
    error, where = gradient_error(theirs | {"a": np.array([math.nan, 4.0])}, theirs)
    assert math.isnan(error) and where == "a"
    for name, values in (("a", ours), ("b", theirs)):
        (tmp_path / name).mkdir()
        save_file(values, tmp_path / name / "gradients-000000.safetensors")
    save_file(ours, tmp_path / "a" / "gradients-000019.safetensors")  # only one has it
    assert gradient_errors(tmp_path / "a", tmp_path / "b") == ({"1": pytest.approx(0.1)}, "a")


def test_two_stacks(tmp_path: Path) -> None:
    reference = [row(1, 2.0, 1.0), row(2, 1.0, 2.0), row(3, 0.5)]
    ours = [row(1, 2.1, 1.0), row(2, 1.2, 1.8)]
    found = compare(ours, reference, folders=(tmp_path, tmp_path), relative_to_loss=True)
    assert found is not None
    assert (found.steps, found.loss.max, found.loss.at) == (2, pytest.approx(0.2), 2)
    assert found.loss.mean == pytest.approx(0.125) and found.loss_floor == 0.0
    assert found.grad_norm.max == pytest.approx(0.1) and found.logprob is None and found.gradients == {}
    # GRPO: relative to the mean absolute loss where that is larger
    floored = compare(
        [row(1, 0.01), row(2, -2.2)],
        [row(1, 0.0), row(2, -2.0)],
        folders=(tmp_path, tmp_path),
        relative_to_loss=False,
    )
    assert floored is not None and floored.loss_floor == 1.0
    assert floored.loss.max == pytest.approx(0.1) and floored.loss.mean == pytest.approx((0.01 + 0.1) / 2)
    assert compare([], reference, folders=(tmp_path, tmp_path), relative_to_loss=True) is None
