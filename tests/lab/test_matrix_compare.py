import math
from pathlib import Path

import pytest
import torch
from raising import raises
from safetensors.torch import save_file
from torch import Tensor

from lockstep.errors import RecordingError
from lockstep_lab.matrix.compare import Comparison, compare_outputs


def outputs(path: Path, **tensors: list[float]) -> Path:
    """logprobs_0=[...] becomes "logprobs/0"."""
    made: dict[str, Tensor] = {k.replace("_", "/", 1): torch.tensor(v) for k, v in tensors.items()}
    save_file(made, path)
    return path


def compare(tmp_path: Path, one: dict[str, list[float]], other: dict[str, list[float]]) -> Comparison:
    return compare_outputs(outputs(tmp_path / "a", **one), outputs(tmp_path / "b", **other))


def test_by_hand(tmp_path: Path) -> None:
    found = compare(
        tmp_path,
        {
            "logprobs_0": [-1.0, -2.0],
            "logprobs_3": [-1.0, -4.5],
            "gradients_v": [3.0],
            "gradients_w": [4.0, 0.0],
        },
        {
            "logprobs_0": [-1.0, -2.25],
            "logprobs_3": [-1.0, -4.0],
            "gradients_v": [3.0],
            "gradients_w": [4.0, 5.0],
        },
    )
    assert (found.inputs, found.left_out, found.tokens, found.worst_input) == (2, 0, 4, 3)
    assert found.logprob_max == 0.5
    assert found.logprob_mean == 0.75 / 4
    assert found.logprob_rms == pytest.approx(math.sqrt((0.0625 + 0.25) / 4))
    # (3, 4, 0) against (3, 4, 5): error 5, norms 5 and sqrt(50), inner product 25
    assert found.gradient_relative_error == pytest.approx(5 / math.sqrt(50))
    assert found.gradient_cosine == pytest.approx(25 / (5 * math.sqrt(50)))
    assert (found.gradient_entries, found.worst_parameter, found.gradient_note) == (3, "w", "")


def test_equal_outputs_are_no_distance_apart(tmp_path: Path) -> None:
    same = {"logprobs_0": [-1.0, -math.inf], "gradients_w": [1e-20, 2e-20]}
    found = compare(tmp_path, same, same)
    assert found.logprob_max == found.logprob_mean == found.gradient_relative_error == 0.0
    assert found.gradient_cosine == pytest.approx(1.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_infinitely_far(tmp_path: Path, bad: float) -> None:
    found = compare(
        tmp_path,
        {"logprobs_0": [bad, -1.0], "gradients_w": [bad, 1.0]},
        {"logprobs_0": [-1.0, -1.0], "gradients_w": [1.0, 1.0]},
    )
    assert found.logprob_max == math.inf and found.gradient_relative_error == math.inf
    assert found.gradient_cosine is None


def test_inputs_without_a_counterpart_are_counted(tmp_path: Path) -> None:
    found = compare(
        tmp_path, {"logprobs_1": [-1.0], "logprobs_2": [-9.0]}, {"logprobs_0": [-3.0], "logprobs_1": [-1.0]}
    )
    assert (found.inputs, found.left_out, found.logprob_max) == (1, 2, 0.0)
    nothing = compare(tmp_path, {"logprobs_1": [-1.0]}, {"logprobs_0": [-3.0]})
    assert nothing.inputs == 0 and nothing.logprob_max is None and nothing.worst_input is None


def test_gradients_that_cannot_be_compared_say_why(tmp_path: Path) -> None:
    more = {"logprobs_0": [-1.0], "gradients_w": [1.0], "gradients_x.y": [1.0]}
    found = compare(tmp_path, more, {"logprobs_0": [-1.0], "gradients_w": [1.0]})
    assert found.gradient_relative_error is None and "such as x.y" in found.gradient_note
    note = compare_outputs(tmp_path / "a", tmp_path / "b", gradients_missing="other inputs").gradient_note
    assert note == "other inputs"
    without = compare(tmp_path, {"logprobs_0": [-1.0]}, {"logprobs_0": [-1.0]})
    assert without.gradient_relative_error is None and without.gradient_note == ""


def test_zero_gradients(tmp_path: Path) -> None:
    zero = compare(tmp_path, {"gradients_w": [0.0]}, {"gradients_w": [0.0]})
    assert zero.gradient_relative_error is None and "zero in both cells" in zero.gradient_note
    one = compare(tmp_path, {"gradients_w": [1.0]}, {"gradients_w": [0.0]})
    assert one.gradient_relative_error == math.inf


def test_other_inputs_and_damaged_files(tmp_path: Path) -> None:
    with raises(RecordingError, "wrong-shape: logprobs/0"):
        compare(tmp_path, {"logprobs_0": [-1.0]}, {"logprobs_0": [-1.0, -2.0]})
    (tmp_path / "b").write_bytes(b"\x08\0\0\0\0\0\0\0{broken}")
    with raises(RecordingError, "cannot-read: b"):
        compare_outputs(tmp_path / "a", tmp_path / "b")
    with raises(RecordingError, "cannot-read: none"):
        compare_outputs(tmp_path / "a", tmp_path / "none")
    with raises(RecordingError, "wrong-field: logprobs/x"):
        compare(tmp_path, {"logprobs_x": [-1.0]}, {"logprobs_x": [-1.0]})
