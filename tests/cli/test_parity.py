import json
from pathlib import Path
from typing import Any

import pytest
from raising import raises

from lockstep.cli.main import main
from lockstep.errors import ConfigError
from lockstep_lab.cli import parity as command
from lockstep_lab.train_parity import run as lab
from lockstep_lab.train_parity.result import ParityResult, StackResult
from lockstep_lab.train_parity.run import ParityOptions

VARIABLES = (*command.ENVIRONMENT, "TP_SIZE", "RING_SIZE", "SKIP_DEEPSPEED", "SKIP_RING", "SKIP_TP")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def options(*argv: str, **environ: str) -> ParityOptions:
    return command.make_options(command.parser().parse_args(list(argv)), environ)


def names(given: ParityOptions) -> list[str]:
    return [stack.name for stack in given.stacks]


def test_defaults():
    given = options("--device", "cpu")
    assert names(given) == ["deepspeed:zero2", "fsdp2", "fsdp2:tp2", "fsdp2:ring2", "fsdp2:tp2+ring2"]
    assert (given.reference.name, given.gpus, given.default_ranks) == ("local", None, 2)
    assert (given.model.name, given.model.dtype, given.train.lr) == ("bundled:smollm2-135m", "float32", 2e-5)
    assert (given.threshold, given.max_samples, given.steps, given.algorithm) == (0.05, 160, None, "sft")
    assert given.skip == [] and given.notes == [] and given.data is None
    assert given.out.parent == Path("runs") and given.out.name.startswith("parity-")
    assert options("--model", "shape:tiny-llama", "--device", "cpu").train.lr == 1e-3


def test_the_environment_of_document_002():
    environ = {
        "NUM_GPUS": "4",
        "MAX_SAMPLES": "500",
        "MODEL": "shape:tiny-llama",
        "DATASET": "Open-Orca/OpenOrca",
        "OUTPUT_DIR": "checkpoint/x",
        "LOG_DIR": "logs",
        "TP_SIZE": "4",
        "RING_SIZE": "1",
        "SKIP_DEEPSPEED": "1",
        "SKIP_RING": "0",
    }
    given = options("--device", "cpu", **environ)
    assert (given.gpus, given.max_samples, given.model.name) == (4, 500, "shape:tiny-llama")
    assert given.data is not None and given.data.source == "Open-Orca/OpenOrca"
    assert (given.out, given.log_dir) == (Path("checkpoint/x"), Path("logs"))
    assert names(given) == ["deepspeed:zero2", "fsdp2", "fsdp2:tp4"]
    assert given.skip == ["deepspeed"]
    (note,) = given.notes
    assert note.startswith("from the environment: NUM_GPUS=4, MAX_SAMPLES=500, ")
    assert "SKIP_DEEPSPEED=1" in note and "SKIP_RING" not in note


def test_flags_win_over_the_environment():
    environ = {"NUM_GPUS": "4", "TP_SIZE": "8", "SKIP_TP": "1", "MODEL": "x/y", "MAX_SAMPLES": ""}
    flags = ["--gpus", "2", "--stacks", "fsdp2:tp2", "--skip", "", "--model", "shape:tiny-llama"]
    given = options(*flags, "--device", "cpu", **environ)
    assert (given.gpus, names(given), given.skip, given.model.name) == (
        2,
        ["fsdp2:tp2"],
        [],
        "shape:tiny-llama",
    )
    assert given.notes == []


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("SKIP_TP", "tp"),
        ("SKIP_FSDP2_TP", "tp"),
        ("SKIP_AUTOTP", "tp"),
        ("SKIP_FSDP2", "fsdp2"),
        ("SKIP_FSDP2_TP_RING", "tp_ring"),
        ("SKIP_COMBINED", "tp_ring"),
    ],
)
def test_names_of_skip_variables(name, word):
    assert options("--device", "cpu", **{name: "true"}).skip == [word]


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({"NUM_GPUS": "many"}, "wrong-environment: NUM_GPUS"),
        ({"NUM_GPUS": "0"}, "wrong-environment: NUM_GPUS"),
        ({"MAX_SAMPLES": "-3"}, "wrong-environment: MAX_SAMPLES"),
        ({"TP_SIZE": "two"}, "wrong-environment: TP_SIZE"),
        ({"SKIP_RINGS": "1"}, "wrong-format: SKIP_RINGS"),
        ({"SKIP_RING": "maybe"}, "wrong-environment: SKIP_RING, maybe"),
        ({"SKIP_LOCAL": "1"}, "contradiction: --reference"),
    ],
)
def test_an_environment_that_cannot_be_right(environ, problem):
    with raises(ConfigError, problem):
        options("--device", "cpu", **environ)


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--stacks", "fsdp3"], "unknown train backend 'fsdp3'"),
        (["--stacks", "fsdp2:tpp2"], "unknown option 'tpp2'"),
        (["--skip", "everything"], "--skip: unknown word 'everything'"),
        (["--reference", "fsdp"], "unknown train backend"),
        (["--data", "max_length=5"], "needs --dataset"),
        (
            ["--dataset", "ids", "--data", "max_length=5"],
            "--data max_length=5 has no effect with --dataset ids",
        ),
        (
            ["--dataset", "reasoning_gym:gsm_symbolic", "--data", "size=5"],
            "--data size=5 has no effect.*--max-samples",
        ),
        (["--algorithm", "grpo", "--dataset", "x.jsonl"], "--dataset .* has no effect with --algorithm grpo"),
        (["--algorithm", "dpo", "--recording", "x"], "--recording x has no effect with --algorithm dpo"),
        (["--dataset", "x.jsonl", "--data", "prompt"], "write NAME=VALUE"),
        (["--dataset", "x.jsonl", "--data", "promt_column=q"], r"data\.promt_column"),
        (["--json", "nowhere/x.json"], "--json 'nowhere/x.json': no such folder"),
        (["--device", "cuda"], "this machine has no visible GPU"),
    ],
)
def test_flags_that_cannot_be_right(argv, problem, capsys, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["parity", "train", *argv]) == 2
    import re

    assert re.search(problem, capsys.readouterr().err)


def test_data_settings_reach_the_loader():
    flags = ["--dataset", "x.jsonl", "--data", "prompt_column=question", "--data", "max_length=100"]
    data = options(*flags, "--device", "cpu").data
    assert data is not None and (data.prompt_column, data.max_length) == ("question", 100)


@pytest.mark.parametrize(("status", "expected"), [("ok", 0), ("failed", 1)])
def test_train_writes_shows_and_exits(status, expected, tmp_path, capsys, monkeypatch):
    seen: list[ParityOptions] = []

    def ran(given: ParityOptions, *, progress: Any) -> ParityResult:
        seen.append(given)
        given.out.mkdir()
        problems = () if status == "ok" else ("it broke",)
        row = StackResult(name="local", status=status, reason="", is_reference=True, problems=problems)
        progress(row, 1, 1)
        return ParityResult(
            stacks=(row,),
            reference="local",
            threshold=0.05,
            algorithm="sft",
            settings={"model": "m"},
            notes=given.notes,
            command=given.command,
        )

    monkeypatch.setattr(lab, "run_parity", ran)
    monkeypatch.setenv("MAX_SAMPLES", "7")
    out = tmp_path / "out"
    code = main(["parity", "train", "--out", str(out), "--json", str(tmp_path / "x.json"), "--device", "cpu"])
    assert code == expected
    text = capsys.readouterr().out.splitlines()
    assert text[0] == "from the environment: MAX_SAMPLES=7"
    assert text[-1].startswith("parity: 0 of 0 stacks agree with local")
    assert {p.name for p in out.iterdir()} == {"parity.json", "parity.md", "parity.html"}
    assert json.loads((tmp_path / "x.json").read_text())["ok"] is (status == "ok")
    assert seen[0].command.startswith("lockstep parity train --out ")


def test_compare_by_its_exit_status(tmp_path, capsys):
    a, b, c = (tmp_path / name for name in ("a.log", "b.log", "c.jsonl"))
    a.write_text("step 1 loss: 2.0\nstep 2 loss: 1.0\n")
    b.write_text("step 1 loss: 2.0\nstep 2 loss: 1.2\n")
    c.write_text('{"step": 1, "loss": 2.0}\n')
    plot, result = tmp_path / "x.png", tmp_path / "x.json"
    argv = ["parity", "compare", str(a), str(b), "--plot", str(plot), "--json", str(result)]
    assert main(argv) == 1
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == (
        "parity: 1 of 2 losses differ by more than 0.05 (largest relative difference 0.2 at step 2)"
    )
    assert plot.stat().st_size > 1000 and json.loads(result.read_text())["max"] == pytest.approx(0.2)
    assert main([*argv, "--threshold", "0.3", "--quiet"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert main(["parity", "compare", str(a), str(c)]) == 2
    assert "with --common" in capsys.readouterr().err
    assert main(["parity", "compare", str(a), str(c), "--common"]) == 0
    assert main(["parity", "compare", str(a), str(tmp_path / "none")]) == 2
    assert main(["parity", "compare", str(a), str(b), "--plot", "no/where/x.png"]) == 2


def test_check(tmp_path, capsys):
    result = tmp_path / "check.json"
    assert main(["parity", "check", "--model", "shape:tiny-llama", "--json", str(result)]) == 0
    text = capsys.readouterr().out
    assert "FSDP2Backend has the 9 methods of TrainBackend" in text
    assert text.splitlines()[-1].startswith("parity check: ") and json.loads(result.read_text())["ok"] is True
    argv = ["parity", "check", "--model", "shape:tiny-llama", "--stacks", "fsdp2,fsdp2:tp3", "--quiet"]
    assert main(argv) == 1
    assert capsys.readouterr().out == "parity check: 1 of 2 stacks could run here; fsdp2:tp3 cannot run\n"
    assert main(["parity", "check", "--model", "shape:none"]) == 1  # a row of the verdict
    assert main(["parity", "check", "--stacks", "x"]) == 2


def test_usage(capsys):
    assert main(["parity"]) == 2 and main(["parity", "--help"]) == 0
    assert "lockstep parity compare runs/a runs/b" in capsys.readouterr().out
    assert main(["parity", "trian"]) == 2
    assert "did you mean 'train'?" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["parity", "train", "--help"])
    assert ended.value.code == 0
    assert "RING_SIZE" in capsys.readouterr().out
