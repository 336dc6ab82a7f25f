import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from raising import raises

from lockstep.errors import ConfigError, RecordingError
from lockstep.loop.interrupt import Interrupted
from lockstep.recording import RecordingWriter
from lockstep_lab.matrix import run as matrix_module
from lockstep_lab.matrix.cells import parse_axes
from lockstep_lab.matrix.result import MatrixResult, read_matrix
from lockstep_lab.matrix.run import MatrixOptions, run_matrix

EIGHT = [
    f"{kernel} + {execution} + {layout}"
    for kernel in ("sdpa", "varlen")
    for execution in ("eager", "compile")
    for layout in ("padded", "packed")
]


@pytest.fixture(scope="session")
def on_disk(recording: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny recording of conftest.py as files."""
    path = tmp_path_factory.mktemp("matrix") / "recording"
    shutil.copytree(recording.path, path)
    with RecordingWriter(path, recording.header) as writer:
        for update in sorted({each.meta.update for each in recording.inputs}):
            writer.finish([each for each in recording.inputs if each.meta.update == update])
    return path


class Fake:
    """Cells are run by fake_replay.py instead of `python -m lockstep replay`."""

    def __init__(self, folder: Path) -> None:
        self._table = folder / "behaviour.json"
        os.environ["FAKE_REPLAY"] = str(self._table)
        self.does({})

    def does(self, table: dict[str, Any]) -> None:
        self._table.write_text(json.dumps({**table, "": {}}))

    @property
    def calls(self) -> list[dict[str, Any]]:
        file = Path(f"{self._table}.calls")
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    script = tmp_path / "python"
    # The words in front of those of the replay: -m lockstep replay.
    script.write_text(
        f'#!/bin/sh\nshift 3\nexec {sys.executable} {Path(__file__).parent}/fake_replay.py "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setattr(matrix_module.sys, "executable", str(script))
    monkeypatch.setenv("FAKE_REPLAY", "")
    return Fake(tmp_path)


@pytest.fixture
def run(on_disk: Path, tmp_path: Path) -> Callable[..., MatrixResult]:
    def start(**options: Any) -> MatrixResult:
        given = {"out": tmp_path / "out", "device": "cpu", "command": "lockstep matrix ..."} | options
        progress = given.pop("progress", None)
        return run_matrix(on_disk, MatrixOptions(**given), progress=progress)

    return start


def test_the_table_of_document_000(fake: Fake, run: Callable[..., MatrixResult], tmp_path: Path) -> None:
    fake.does({"varlen --compile --packing": {"shift": 2.0**-20, "scale": 1 + 2.0**-20, "speed": 3000.0}})
    news: list[tuple[str, int, int]] = []
    result = run(progress=lambda cell, done, total: news.append((cell.name, done, total)))
    assert [cell.name for cell in result.cells] == EIGHT
    assert all(cell.works for cell in result.cells) and result.ok and result.complete
    assert [n for _, n, _ in news] == list(range(1, 9)) and {total for *_, total in news} == {8}
    reference, last = result.cells[0], result.cells[-1]
    assert reference.reference is None and reference.comparison is None
    assert last.reference == "sdpa + eager + padded"
    assert last.values == {"flash": "on", "compile": "on", "packing": "on"}
    # 9.5e-7 is 2^-20 nats; the gradient (3, 4) was scaled by 1 + 2^-20.
    assert last.comparison is not None and last.comparison.inputs == 3 and last.comparison.tokens == 12
    assert last.comparison.logprob_max == last.comparison.logprob_mean == pytest.approx(2.0**-20, rel=0.3)
    assert last.comparison.gradient_relative_error == pytest.approx(2.0**-20, rel=1e-6)
    assert last.comparison.gradient_cosine == pytest.approx(1.0, abs=1e-12)
    assert last.measures is not None
    assert last.measures.first_call_ms == 52.0  # input 0: forward 50, backward 2
    assert last.measures.steady_ms == 4.5  # median of 2 + 2 and 3 + 2
    assert (last.measures.tokens, last.measures.computed_slots) == (60, 300)
    assert result.verdict == f"matrix: 8 cells, 8 work, largest difference 9.5e-07 nats ({EIGHT[-1]})"
    # The order of running: the reference first.
    assert "--no-packing" in fake.calls[0]["words"] and "sdpa" in fake.calls[0]["words"]
    assert read_matrix(tmp_path / "out") == result
    for name in ("matrix.html", "matrix.md", "matrix.json"):
        assert "varlen + compile + packed" in (tmp_path / "out" / name).read_text()
    # Outputs of the reference stay, those of the others do not.
    kept = sorted(path.parts[-3] for path in (tmp_path / "out").rglob("outputs.safetensors"))
    assert kept == ["sdpa-eager-padded"]
    log = (tmp_path / "out" / (last.log or "")).read_text()
    assert log.startswith("$ python -m lockstep replay ") and log.endswith("hello\n")
    assert (
        last.command.startswith("lockstep replay ")
        and "--attention varlen --compile --packing" in last.command
    )


REFUSED = "lockstep replay: error[unknown-name]: no such kernel; set another"


def test_every_way_to_end_is_a_result(fake: Fake, run: Callable[..., MatrixResult], tmp_path: Path) -> None:
    failed = ["failed", "RuntimeError", "CUDA error: an illegal memory access"]
    oom = ["oom", "OutOfMemoryError", "CUDA out of memory"]
    fake.does(
        {
            "sdpa --no-compile --packing": {"signal": "SIGSEGV"},
            "sdpa --compile --no-packing": {"sleep": 600, "say": "waiting"},
            "sdpa --compile --packing": {"exit": 2, "say": REFUSED},
            "varlen --no-compile --no-packing": {"fail": {"1": failed, "2": failed}},
            "varlen --no-compile --packing": {"fail": {"2": oom}},
            "varlen --compile --no-packing": {"silent": True},
            "varlen --compile --packing": {"exit": 1, "say": "Traceback\nValueError: shapes differ"},
        }
    )
    result = run(timeout=8.0)
    found = {cell.name: (cell.status, cell.reason) for cell in result.cells}
    assert found["sdpa + eager + padded"] == ("ok", "")
    assert found["sdpa + eager + packed"][0] == "failed"
    assert found["sdpa + eager + packed"][1].startswith(
        "it was killed by SIGSEGV: Fatal Python error: Segmentation fault, in main (fake_replay.py"
    )
    assert found["sdpa + compile + padded"][0] == "hung"
    assert "no end after 8 s (--timeout), in main (fake_replay.py:" in found["sdpa + compile + padded"][1]
    assert found["sdpa + compile + packed"] == ("refused", "no such kernel; set another")
    assert found["varlen + eager + padded"] == (
        "failed",
        "2 of 3 inputs; input 1: RuntimeError: CUDA error: an illegal memory access",
    )
    assert found["varlen + eager + packed"][0] == "oom"
    assert found["varlen + compile + padded"] == ("failed", "it exited with status 0: hello")
    assert found["varlen + compile + packed"] == ("failed", "ValueError: shapes differ")
    assert not result.ok
    assert result.verdict.startswith("matrix: 8 cells, 1 work, 1 refused, 6 do not: ")
    page = (tmp_path / "out" / "matrix.html").read_text()
    assert "killed by SIGSEGV" in page and "cells/sdpa-eager-packed/log.txt" in page


def test_failed_inputs_are_left_out_of_nothing_silently(fake: Fake, run: Callable[..., MatrixResult]) -> None:
    fake.does({"--packing": {"fail": {"0": ["failed", "E", "x"]}}})
    result = run(axes=parse_axes(["packing"]))
    packed = result.cell("packed")
    assert packed is not None and packed.status == "failed" and packed.measures is not None
    assert (packed.measures.inputs_ok, packed.measures.inputs_failed) == (2, 1)


def test_a_cell_that_disagrees_fails_the_matrix(fake: Fake, run: Callable[..., MatrixResult]) -> None:
    fake.does({"--packing": {"shift": 0.5}})
    result = run(axes=parse_axes(["packing"]))
    packed = result.cell("packed")
    assert packed is not None and packed.works and packed.agrees is False and not result.ok
    assert packed.disagreement == "largest logprob difference 0.5 nats, limit 0.0001 (input 0)"
    assert "1 disagree: packed" in result.verdict
    again = run(axes=parse_axes(["packing"]), resume=True, logprob_limit=1.0)
    assert again.ok and len(fake.calls) == 2


def test_a_refused_cell_starts_no_process_and_does_not_fail(
    fake: Fake, run: Callable[..., MatrixResult]
) -> None:
    result = run(axes=parse_axes([], axis_flags=["attention=sdpa,flex"]))
    refused = result.cell("flex")
    assert refused is not None and refused.status == "refused" and refused.log is None
    assert "flex_attention has no backward on a CPU" in refused.reason
    assert "train.attention = 'sdpa'" in refused.reason
    assert len(fake.calls) == 1 and result.ok
    assert "1 refused" in result.verdict


def test_half_precision_is_measured_by_the_references_own_kernels(
    fake: Fake, run: Callable[..., MatrixResult]
) -> None:
    fake.does(
        {
            "bfloat16 --no-packing": {"shift": 0.01, "scale": 1.02},
            "bfloat16 --packing varlen": {"shift": 0.0149, "scale": 1.029},
            "bfloat16 --packing sdpa": {"shift": 0.016, "scale": 1.0},
        }
    )
    axes = parse_axes([], axis_flags=["attention=sdpa,varlen", "packing=off,on"])
    result = run(axes=axes, base=(("dtype", "bfloat16"),))
    assert [cell.name for cell in result.cells if cell.is_extra] == ["reference (float32)"]
    assert {cell.reference for cell in result.table} == {"reference (float32)"}
    within, beyond = result.cell("varlen + packed"), result.cell("sdpa + packed")
    assert within is not None and within.agrees and beyond is not None and beyond.agrees is False
    assert beyond.disagreement == "RMS logprob difference 0.016 nats, limit 0.015"


def test_a_reference_per_number_of_layers(fake: Fake, run: Callable[..., MatrixResult]) -> None:
    result = run(axes=parse_axes(["packing"], axis_flags=["layers=1,all"]))
    assert [cell.name for cell in result.cells] == [
        "padded + 1 layer",
        "padded + all layers",
        "packed + 1 layer",
        "packed + all layers",
    ]
    assert [cell.reference for cell in result.cells[2:]] == ["padded + 1 layer", "padded + all layers"]
    assert result.ok


def test_a_reference_as_given(fake: Fake, run: Callable[..., MatrixResult]) -> None:
    result = run(axes=parse_axes(["packing"]), reference="attention=hf:eager packing=on")
    assert result.cells[0].name == "reference (float32)" and result.cells[0].is_extra
    assert "hf:eager" in fake.calls[0]["words"] and "--packing" in fake.calls[0]["words"]
    assert len(result.table) == 2 and len(fake.calls) == 3


def test_without_a_working_reference_nothing_is_compared(
    fake: Fake, run: Callable[..., MatrixResult]
) -> None:
    fake.does({"--no-packing": {"exit": 1, "say": "ValueError: broken"}})
    result = run(axes=parse_axes(["packing"]))
    packed = result.cell("packed")
    assert packed is not None and packed.works and packed.agrees is None
    assert packed.disagreement == "no comparison: the reference cell: failed" and not result.ok
    fake.does({})
    again = run(axes=parse_axes(["packing"]), resume=True, retry=True)
    assert again.ok and again.cell("packed").agrees  # type: ignore[union-attr]
    assert len(fake.calls) == 3  # the reference once more, the other cell not


def test_resume_runs_only_what_is_missing(
    fake: Fake, run: Callable[..., MatrixResult], tmp_path: Path
) -> None:
    first = run(axes=parse_axes(["packing"]))
    assert len(fake.calls) == 2
    with raises(ConfigError, "already-exists: --out, out"):
        run(axes=parse_axes(["packing"]))
    shutil.rmtree(tmp_path / "out" / "cells" / "packed")
    second = run(axes=parse_axes(["packing"]), resume=True)
    assert len(fake.calls) == 3 and second.ok
    assert second.cells[0] == first.cells[0]
    assert second.cells[1].comparison == first.cells[1].comparison
    with raises(ConfigError, "not-resumable: --resume, padded"):
        run(axes=parse_axes(["packing"]), resume=True, replay_flags=("--max-inputs", "1"))
    assert len(fake.calls) == 3


def test_a_resume_under_other_versions_is_refused(
    fake: Fake, run: Callable[..., MatrixResult], tmp_path: Path
) -> None:
    run(axes=parse_axes(["packing"]))
    file = tmp_path / "out" / "matrix.json"
    values = json.loads(file.read_text())
    values["environment"]["torch"] = "1.0.0"
    file.write_text(json.dumps(values))
    with raises(ConfigError, "not-resumable: --resume, torch"):
        run(axes=parse_axes(["packing"]), resume=True)


def test_folders_that_are_no_matrix(fake: Fake, run: Callable[..., MatrixResult], tmp_path: Path) -> None:
    with raises(ConfigError, "wrong-kind-of-file: --resume, out"):
        run(resume=True)
    (tmp_path / "file").write_text("")
    with raises(ConfigError, "not-a-file: --out, file"):
        run(out=tmp_path / "file")
    with raises(ConfigError, "wrong-kind-of-file: --out, test_folders_that_are_no_matri0"):
        run(out=tmp_path)
    with pytest.raises(RecordingError):
        run_matrix(tmp_path / "no-recording", MatrixOptions(out=tmp_path / "out"))
    assert fake.calls == []


def test_ctrl_c_kills_the_running_cell_and_keeps_what_is_done(
    fake: Fake, run: Callable[..., MatrixResult], tmp_path: Path
) -> None:
    fake.does({"--packing": {"sleep": 600}})

    def interrupt() -> None:
        while len(fake.calls) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Interrupted) as stop:
        run(axes=parse_axes(["packing"]))
    thread.join()
    assert stop.value.summary["cells"] == 1 and stop.value.summary["total"] == 2
    with pytest.raises(ProcessLookupError):
        os.kill(fake.calls[1]["pid"], 0)
    left = read_matrix(tmp_path / "out")
    assert [cell.status for cell in left.cells] == ["ok", "interrupted"] and not left.complete and not left.ok
    assert "Not complete" in (tmp_path / "out" / "matrix.html").read_text()
    fake.does({})
    assert run(axes=parse_axes(["packing"]), resume=True).ok
    assert len(fake.calls) == 3


def test_cells_side_by_side_have_no_comparable_times(fake: Fake, run: Callable[..., MatrixResult]) -> None:
    fake.does({"--packing": {"sleep": 0.2}})
    result = run(jobs=2)
    assert result.ok and len(fake.calls) == 8
    assert all("times are not comparable" in cell.timing_note for cell in result.cells)
    assert all(result.speed_ratio(cell) is None for cell in result.cells)


def test_keep_outputs(fake: Fake, run: Callable[..., MatrixResult], tmp_path: Path) -> None:
    run(axes=parse_axes(["packing"]), keep_outputs=True)
    assert len(list((tmp_path / "out").rglob("outputs.safetensors"))) == 2


@pytest.mark.slow
@pytest.mark.exhaustive
def test_eight_cells_of_a_real_replay_agree(run: Callable[..., MatrixResult]) -> None:
    # Documents of 5, 12, 30 in both inputs, and one shape to compile; the weights are those of two steps.
    result = run(replay_flags=("--inputs", "0,3", "--gradient-inputs", "2"), jobs=2)
    assert [cell.name for cell in result.cells] == EIGHT
    assert {cell.name: (cell.status, cell.reason) for cell in result.cells} == dict.fromkeys(
        EIGHT, ("ok", "")
    )
    reference, *others = result.cells
    assert reference.name == "sdpa + eager + padded" and reference.comparison is None
    for cell in others:
        found = cell.comparison
        assert found is not None and cell.agrees, cell.name
        assert found.inputs == 2 and found.left_out == 0 and found.tokens == 2 * (3 + 10 + 28), cell.name
        # docs/explanation/numerics.md claims 2e-6 nats and 1e-5 of tiny models
        assert found.logprob_max is not None and found.logprob_max < 5e-6, cell.name
        assert found.gradient_relative_error is not None and found.gradient_relative_error < 1e-5, cell.name
        assert found.gradient_entries > 100_000, cell.name
    # They are not one cell run eight times.
    errors = {cell.comparison.gradient_relative_error for cell in others if cell.comparison is not None}
    assert len(errors) > 3 and max(filter(None, errors)) > 0
    by_name = {cell.name: cell.measures for cell in result.cells}
    # Padded rows x longest against tokens: the padded cell really computes the pads.
    assert by_name["sdpa + eager + padded"].computed_slots == 2 * 3 * 30  # type: ignore[union-attr]
    assert by_name["sdpa + eager + packed"].computed_slots == 2 * 47  # type: ignore[union-attr]
    assert by_name["sdpa + eager + packed"].graphs == 0  # type: ignore[union-attr]
    assert by_name["varlen + compile + packed"].recompiles == 0  # type: ignore[union-attr]
    assert by_name["varlen + compile + packed"].graph_breaks == 0  # type: ignore[union-attr]
    assert all("reference kernels" in cell.timing_note for cell in result.cells[4:])
