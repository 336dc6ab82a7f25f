import io
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))
import matrix_results as made

from lockstep_lab.matrix.diff import diff_matrices, show_diff
from lockstep_lab.matrix.result import Measures


def test_nothing_changed() -> None:
    found = diff_matrices(made.result(), made.result())
    assert found.verdict == "matrix diff: 2 cells in both: nothing changed"
    assert found.regressions == () and found.environment == {}
    assert [cell.change for cell in found.cells] == ["same", "same"]


def test_a_cell_that_stopped_working_is_a_regression() -> None:
    crashed = made.cell(status="failed", reason="Fatal", comparison=None, agrees=None)
    found = diff_matrices(made.result(), made.result(made.reference(), crashed))
    (worse,) = found.regressions
    assert (worse.before, worse.after) == ("works, agrees", "failed: Fatal")
    assert found.verdict == "matrix diff: 2 cells in both: 1 worse"
    back = diff_matrices(made.result(made.reference(), crashed), made.result())
    assert back.regressions == () and "1 better" in back.verdict


def test_a_cell_that_no_longer_agrees_is_a_regression() -> None:
    apart = made.cell(agrees=False)
    assert len(diff_matrices(made.result(), made.result(made.reference(), apart)).regressions) == 1


def test_another_way_to_fail_is_none() -> None:
    pair = [made.cell(status=s, comparison=None, agrees=None) for s in ("failed", "oom")]
    found = diff_matrices(*(made.result(made.reference(), each) for each in pair))
    assert [cell.change for cell in found.cells] == ["same", "other"]


def test_speed_memory_and_differences() -> None:
    slower = made.cell(
        measures=Measures(tokens_per_second=1200.0, peak_memory_bytes=2.0**31),
        comparison=made.comparison(logprob_max=5e-6, gradient_relative_error=3.1e-7),
    )
    found = diff_matrices(made.result(), made.result(made.reference(), slower))
    cell = found.cells[1]
    assert (cell.speed, cell.memory, cell.speed_changed) == (0.8, 2.0, True)
    assert cell.logprob == (2e-6, 5e-6) and cell.grew == ("logprob",)
    assert found.verdict == "matrix diff: 2 cells in both: 1 slower, 0 faster, 1 farther from the reference"
    assert found.regressions == ()
    lenient = diff_matrices(
        made.result(), made.result(made.reference(), slower), speed_threshold=0.25, grew=3.0
    )
    assert "nothing changed" in lenient.verdict


def test_rounding_noise_has_not_grown() -> None:
    pair = [
        made.cell(comparison=made.comparison(logprob_max=x, gradient_relative_error=x)) for x in (1e-9, 9e-7)
    ]
    found = diff_matrices(*(made.result(made.reference(), each) for each in pair))
    assert found.cells[1].grew == ()


def test_times_that_are_not_comparable_are_not_compared() -> None:
    other = made.cell(timing_note="reference kernels", measures=Measures(tokens_per_second=1.0))
    assert diff_matrices(made.result(), made.result(made.reference(), other)).cells[1].speed is None


def test_cells_of_one_only_and_other_conditions(tmp_path: Path) -> None:
    extra = made.cell("new", log=None)
    newer = replace(made.result(made.reference(), extra), environment={"machine": "cpu", "torch": "2.13.0"})
    found = diff_matrices(made.result(), newer)
    assert [(cell.name, cell.change) for cell in found.cells] == [
        ("padded", "same"),
        ("packed", "only in A"),
        ("new", "only in B"),
    ]
    assert found.environment == {"torch": ("2.11.0", "2.13.0")}
    stream = io.StringIO()
    show_diff(found, Console(file=stream, width=100))
    assert "torch: 2.11.0 -> 2.13.0" in stream.getvalue() and "padded" not in stream.getvalue()
    assert found.as_dict()["environment"] == {"torch": ["2.11.0", "2.13.0"]}
