import json
import os
from pathlib import Path

import pytest
from raising import raises

from lockstep.cli.main import main
from lockstep.config.load import to_values
from lockstep.errors import ConfigError
from lockstep_lab.cli import bench as command
from lockstep_lab.step_bench import run as lab
from lockstep_lab.step_bench.cells import AXIS_OF, BenchCell
from lockstep_lab.step_bench.run import BenchOptions

FAKE = Path(__file__).parents[1] / "lab" / "fake_bench_worker.py"


def options(*argv: str) -> BenchOptions:
    return command.make_options(command.parser().parse_args([*argv, "--device", "cpu"]))


def test_defaults():
    given = options()
    assert [cell.name for cell in given.cells] == ["eager+hf"]
    assert (given.ranks, given.repeats, given.warmup, given.timeout) == (2, 5, 2, 600.0)
    assert (given.work.prompts, given.work.group, given.work.longest) == (8, 4, 512)
    run = given.run
    assert (run.model.name, run.train.attention, run.train.token_budget) == (
        "shape:tiny-llama",
        "auto",
        sum(given.work.lengths()),
    )
    assert run.rollout.sampling.max_tokens + run.data.max_prompt_tokens == 512
    assert given.notes == [] and not given.overrides and not given.fresh_cache
    assert given.out.parent == Path("runs") and given.out.name.startswith("bench-")


def test_lists_cells_and_settings():
    given = options("--execution", "eager,compile", "--engine", "hf,native", "--longest", "8192")
    assert len(given.cells) == 4 and given.run.train.token_budget == 8192
    given = options("--cells", "compile+native,compile+native+invariant", "--set", "engine.max_batch=64")
    assert [cell.name for cell in given.cells] == ["compile+native", "compile+native+invariant"]
    assert given.run.train.attention == "varlen", "the same kernel in both"
    assert given.notes == ["attention auto -> varlen in all cells, because one of them is invariant"]
    assert given.overrides == {"engine.max_batch": 64}
    assert options("--group", "1").run.algorithm.name == "reinforce++", "groups of one have no advantages"


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--cells", "eager", "--engine", "hf"], "contradiction: --cells"),
        (["--cells", "fast"], "unknown-name: --cells, fast"),
        (["--backend", "fsdp"], "unknown-name: --backend, fsdp"),
        (["--longest", "16", "--prompt-tokens", "16"], "wrong-format"),
        (["--longest", "512", "--token-budget", "256"], "contradiction: --token-budget"),
        (["--prompts", "100000"], "out-of-range: --prompts"),
        (["--set", "train.lr"], "wrong-format: --set"),
        (
            ["--set", "engine.name=hf"],
            "contradiction: --set, engine.name",
        ),
        (["--set", "train.backend=fsdp2"], "contradiction: --set, train.backend"),
        (["--set", "train.execution=compile"], "contradiction: --set, train.execution"),
        (["--set", "train.batch_invariant=true"], "contradiction: --set, train.batch_invariant"),
        (["--set", "train.token_budget=64"], "contradiction: --set, train.token_budget"),
        (["--set", "rollout.group_size=2"], "contradiction: --set, rollout.group_size"),
        (["--set", "data.max_prompt_tokens=2"], "contradiction: --set, data.max_prompt_tokens"),
        (["--set", "steps=2"], "contradiction: --set, steps"),
        (["--set", "engine={name = 'native'}"], "contradiction: --set, engine"),
        (["--set", "rollout.sampling={top_p = 0.5}"], "contradiction: --set, rollout.sampling"),
        (["--ranks", "2"], "no-effect: --ranks"),
        (["--cells", "eager,compile", "--ranks", "3"], "no-effect: --ranks"),
    ],
)
def test_flags_that_cannot_be_right(argv, problem):
    with raises(ConfigError, problem):
        options(*argv)


def test_every_setting_with_a_flag_is_refused_and_the_others_are_not():
    assert set(AXIS_OF) == set(BenchCell().settings()) <= set(command.FLAG_OF)
    values = to_values(options("--num-layers", "1").run)
    for setting in set(command.FLAG_OF) - set(AXIS_OF):
        table = values
        for section in setting.split("."):
            table = table[section]  # KeyError: no such setting
        with raises(ConfigError, f"contradiction: --set, {setting}"):
            options("--set", f"{setting}=1")
    given = options("--set", "rollout.sampling.top_p=0.5", "--set", "engine.max_batch=2")
    assert given.overrides == {"rollout.sampling.top_p": 0.5, "engine.max_batch": 2}


def test_ranks_that_are_used():
    assert options("--ranks", "3", "--cells", "eager+hf,fsdp2+eager+hf").ranks == 3
    assert options("--ranks", "1").ranks == 1, "which is what it does"


def test_where_json_cannot_go_is_known_before_anything_is_measured(capsys, tmp_path, monkeypatch):
    def run_bench(*_: object, **__: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(lab, "run_bench", run_bench)
    words = ["bench", "step", "--device", "cpu", "--out", str(tmp_path / "out"), "--json"]
    assert main([*words, str(tmp_path)]) == 2
    assert "is a folder; give the name of a file" in capsys.readouterr().err
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    assert main([*words, str(tmp_path / "bench.json")]) == 2
    assert "bench.json' cannot be written (permission denied)" in capsys.readouterr().err


def test_all_cells_refused_is_said_once_and_leaves_nothing(capsys, tmp_path):
    words = ["bench", "step", "--device", "cpu", "--out", str(tmp_path / "new" / "out")]
    assert main([*words, "--cells", "eager+hf,eager+native", "--set", "train.lrr=1"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("lrr") == 1
    stage_3 = ["--set", "train.zero_stage=3", "--ranks", "2"]
    assert main([*words, "--cells", "deepspeed+joint+hf", *stage_3]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("train.execution = 'joint'") == 1
    assert not list(tmp_path.iterdir())


def test_exit_status(tmp_path, monkeypatch):
    monkeypatch.setattr(lab, "WORKER", (str(FAKE),))
    refuse = {"eager+hf": {"how": "refuse"}}
    none_left = refuse | {"compile+hf": {"how": "refuse"}}
    for index, (cells, behaviour, status) in enumerate(
        [
            ("compile+hf,eager+hf", refuse, 0),
            ("compile+hf,compile+hf+invariant", {}, 0),
            ("eager+hf,compile+hf", refuse, 1),
            ("compile+hf+invariant,eager+hf", {}, 1),
            ("eager+hf,compile+hf", none_left, 1),
            ("compile+hf+invariant", {}, 2),
        ]
    ):
        (tmp_path / "behaviour.json").write_text(json.dumps(behaviour))
        words = ["bench", "step", "--cells", cells, "--repeats", "1", "--device", "cpu", "--quiet"]
        assert main([*words, "--out", str(tmp_path / str(index))]) == status, (cells, behaviour)


def test_wrong_settings_end_with_2(capsys, tmp_path):
    out = ["--out", str(tmp_path / "out"), "--device", "cpu"]
    assert main(["bench", "steps"]) == 2
    assert "unknown command of lockstep bench 'steps'; did you mean 'step'" in capsys.readouterr().err
    assert main(["bench", "step", "--set", "train.lrr=1", *out]) == 2
    assert "lrr" in capsys.readouterr().err
    assert main(["bench", "step", "--json", str(tmp_path / "no" / "file.json"), *out]) == 2
    assert "no such folder" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["bench", "step", "--repeats", "0"])
    assert ended.value.code == 2
    assert main(["bench"]) == 2 and main(["bench", "--help"]) == 0


def test_table_files_and_the_last_line(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(lab, "WORKER", (str(FAKE),))
    (tmp_path / "behaviour.json").write_text(json.dumps({"compile+hf": {"scale": 2.0}}))
    words = ["bench", "step", "--execution", "eager,compile", "--repeats", "1", "--device", "cpu"]
    words += ["--out", str(tmp_path / "out"), "--json", str(tmp_path / "again.json")]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "bench: 2 of 2 cells measured; fastest step eager+hf, 9.5 s"
    assert "eager+hf: warm after 3.0 s, 0.5 s of them compiling" in lines
    assert any(line.startswith("compile+hf") and "19,000 ±0%" in line for line in lines)
    assert json.loads((tmp_path / "again.json").read_text())["cells"][1]["ratios"]["step"] == 2.0
    assert (tmp_path / "out" / "bench.md").read_text().startswith("# One RL step: shape:tiny-llama")
    (tmp_path / "behaviour.json").write_text(json.dumps({"eager+hf": {"how": "oom"}}))
    assert main([*words[:-4], "--out", str(tmp_path / "other"), "--quiet"]) == 1
    assert capsys.readouterr().out == (
        "bench: 1 of 2 cells measured; fastest step compile+hf, 9.5 s; eager+hf oom\n"
    )
