import json
from pathlib import Path

import pytest

from lockstep.cli import bench as command
from lockstep.cli.main import main
from lockstep.errors import ConfigError
from lockstep.lab import bench as lab
from lockstep.lab.bench import BenchOptions

FAKE = Path(__file__).parents[1] / "lab" / "fake_bench_worker.py"


def options(*argv: str) -> BenchOptions:
    return command.make_options(command.parser().parse_args([*argv, "--device", "cpu"]))


def test_defaults() -> None:
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


def test_lists_cells_and_settings() -> None:
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
        (["--cells", "eager", "--engine", "hf"], "--cells and --engine exclude each other"),
        (["--cells", "fast"], "unknown word 'fast'"),
        (["--backend", "fsdp"], "--backend: unknown value 'fsdp'"),
        (["--longest", "16", "--prompt-tokens", "16"], "no room behind a prompt of 16"),
        (["--longest", "512", "--token-budget", "256"], "--token-budget 256 is below --longest 512"),
        (["--prompts", "100000"], "more than 65536 samples"),
        (["--set", "train.lr"], "write NAME=VALUE"),
    ],
)
def test_flags_that_cannot_be_right(argv: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        options(*argv)


def test_wrong_settings_end_with_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "out"), "--device", "cpu"]
    assert main(["bench", "steps"]) == 2
    assert "unknown command of lockstep bench 'steps'; did you mean 'step'" in capsys.readouterr().err
    assert main(["bench", "step", "--set", "train.lrr=1", *out]) == 2
    assert "lrr" in capsys.readouterr().err
    assert main(["bench", "step", "--json", str(tmp_path / "no" / "file.json"), *out]) == 2
    assert "there is no folder" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "step", "--repeats", "0"])
    assert main(["bench"]) == 2 and main(["bench", "--help"]) == 0


def test_table_files_and_the_last_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
