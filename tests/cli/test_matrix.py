import json
import signal
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.main import main
from lockstep.loop.interrupt import Interrupted
from lockstep_lab.cli import matrix as command
from lockstep_lab.matrix import run as lab
from lockstep_lab.matrix.result import CellResult, MatrixResult


def result(**changes: Any) -> MatrixResult:
    packed = CellResult(
        name="packed",
        values={"packing": "on"},
        flags=("--dtype", "float32"),
        command="lockstep replay",
        status="ok",
        folder="cells/packed",
    )
    given: dict[str, Any] = {
        "command": "lockstep matrix",
        "created": "now",
        "recording": {"path": "x", "inputs": 1, "model": "m"},
        "environment": {"torch": "2.13.0"},
        "axes": {"packing": ["on"]},
        "shared": (),
        "limits": {"logprob": None, "gradient": None},
        "cells": (packed,),
        "complete": True,
    }
    return MatrixResult(**(given | changes))


class Ran:
    """Stands in for run_matrix, which tests/lab/test_matrix.py has."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.options: Any = None
        self.recording: Any = None

    def __call__(self, recording: Any, options: Any, *, progress: Any = None) -> MatrixResult:
        self.recording, self.options = recording, options
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    stand_in = Ran(result())
    monkeypatch.setattr(lab, "run_matrix", stand_in)
    return stand_in


def test_flags_become_options(ran: Ran, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["matrix", "runs/demo", "--axes", "compile,packing", "--axis", "attention=sdpa,varlen"]
    argv += [
        "--max-inputs",
        "4",
        "--loss",
        "logprob-sum",
        "--no-backward",
        "--num-layers",
        "2",
        "--dtype",
        "bfloat16",
    ]
    argv += ["--reference", "dtype=float32", "--timeout", "60", "--jobs", "2", "--tolerance-logprob", "0.1"]
    argv += ["--out", str(tmp_path / "m"), "--json", str(tmp_path / "m.json")]
    assert main(argv) == 0
    options = ran.options
    assert ran.recording == "runs/demo"
    assert [axis.name for axis in options.axes] == ["compile", "packing", "attention"]
    assert options.replay_flags == ("--max-inputs", "4", "--loss", "logprob-sum", "--no-backward")
    assert dict(options.base) == {"num_layers": 2, "dtype": "bfloat16"}
    assert (options.reference, options.timeout, options.jobs) == ("dtype=float32", 60.0, 2)
    assert (options.logprob_limit, options.gradient_limit) == (0.1, None)
    assert options.command.startswith("lockstep matrix runs/demo --axes compile,packing")
    assert json.loads((tmp_path / "m.json").read_text())["format"] == "lockstep-matrix"
    assert capsys.readouterr().out.splitlines()[-1] == result().verdict


def test_the_exit_status_reflects_failures(ran: Ran, capsys: pytest.CaptureFixture[str]) -> None:
    bad = CellResult(
        name="a", values={}, flags=(), command="c", status="failed", reason="r", folder="cells/a"
    )
    ran.answer = result(cells=(bad,))
    assert main(["matrix", "--quiet"]) == 1
    assert capsys.readouterr().out == f"{ran.answer.verdict}\n"
    assert ran.recording is None and ran.options.out.parts[0] == "runs"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_says_how_to_go_on(
    ran: Ran, number: int, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = {"cells": 3, "total": 8, "verdict": "matrix: partial", "signal": int(number)}
    ran.answer = Interrupted(summary)
    assert main(["matrix", "rec dir", "--out", "m"]) == status
    out = capsys.readouterr().out
    assert "interrupted after 3 of 8 cells" in out
    assert out.splitlines()[-1] == "resume with: lockstep matrix 'rec dir' --out m --resume"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--axes", "flsh"], "unknown axis 'flsh'; did you mean 'flash'"),
        (["--resume"], "give its folder with --out"),
        (["--retry", "--out", "x"], "it needs --resume"),
        (["--json", "/nowhere/x.json"], "no such folder: '/nowhere'"),
        (["diff", "nowhere", "nowhere"], "nowhere cannot be read (No such file"),
    ],
)
def test_wrong_flags(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["matrix", *argv]) in (1, 2)
    assert message in capsys.readouterr().err


def test_flags_of_replay_are_checked_before_any_cell(ran: Ran, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["matrix", "--max-inputs", "0"])
    assert stop.value.code == 2 and ran.options is None
    said = capsys.readouterr().err
    assert "lockstep matrix: error: argument --max-inputs: '0' is not a whole number of at least 1" in said


def test_the_list_of_axes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["matrix", "--axis", "list"]) == 0
    out = capsys.readouterr().out
    assert "activation-checkpointing  off,on" in out and "hf:NAME" in out


def test_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, status in (("a", "ok"), ("b", "failed")):
        cells = tuple(
            CellResult(
                name="packed", values={"packing": "on"}, flags=(), command="c", status=status, folder="x"
            )
            for _ in range(1)
        )
        (tmp_path / name).mkdir()
        command.write_json(tmp_path / name / "matrix.json", result(cells=cells).as_dict())
    argv = ["matrix", "diff", str(tmp_path / "a"), str(tmp_path / "b"), "--json", str(tmp_path / "d.json")]
    assert main(argv) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "matrix diff: 1 cell in both: 1 worse"
    assert json.loads((tmp_path / "d.json").read_text())["regressions"] == ["packed"]
    assert main(["matrix", "diff", str(tmp_path / "b"), str(tmp_path / "a")]) == 0
