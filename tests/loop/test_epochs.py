import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from raising import raises

from lockstep.cli.main import main
from lockstep.config.load import dump_toml, load_run, override, parse_toml
from lockstep.errors import ConfigError
from lockstep.loop.epochs import with_steps
from lockstep.rollout.environment import Environment


def rows(path: Path, count: int, **row: Any) -> str:
    path.write_text("".join(json.dumps({"prompt": f"p{i}", **row}) + "\n" for i in range(count)))
    return str(path)


MATH = [{"name": "math"}]
PAIR = {"chosen": "yes", "rejected": "no"}


@pytest.mark.parametrize(
    ("kind", "row", "overrides", "steps"),
    [
        ("sft", {"completion": "a"}, {"batch_size": 4, "epochs": 3}, 8),  # 30 / 4, rounded up
        ("sft", {"completion": "a"}, {"batch_size": 4, "epochs": 0.4}, 1),
        (
            "sft",
            {"completion": "a"},
            {"batch_size": 1, "epochs": 1.1},
            11,
        ),  # 11.000000000000002
        ("sft", {"completion": "a"}, {"batch_size": 2, "epochs": 2, "data.skip": 1, "data.size": 5}, 5),
        ("dpo", PAIR, {"batch_size": 5, "epochs": 2}, 4),
        ("rm", PAIR, {"batch_size": 10, "epochs": 1}, 1),
        ("dpo", PAIR, {"algorithm.name": "kto", "batch_size": 5, "epochs": 1}, 4),  # two answers of a row
        # of 10 rows, no more than half are held out: 2
        (
            "grpo",
            {"answer": "1"},
            {"rollout.prompts_per_step": 2, "epochs": 1, "rewards": MATH},
            4,
        ),
        (
            "grpo",
            {"answer": "1"},
            {
                "rollout.prompts_per_step": 2,
                "epochs": 1,
                "rewards": MATH,
                "eval.before": False,
                "eval.after": False,
            },
            5,
        ),
    ],
)
def test_epochs_are_the_steps_of_as_many_passes(
    kind: str, row: dict[str, Any], overrides: dict[str, Any], steps: int, tmp_path: Path
) -> None:
    run = load_run(kind=kind, overrides={"data.source": rows(tmp_path / "d.jsonl", 10, **row), **overrides})
    resolved = with_steps(run)
    assert (resolved.steps, resolved.epochs) == (steps, None)
    assert with_steps(resolved) is resolved


def test_a_generated_set_needs_a_size() -> None:
    sized = load_run(kind="grpo", overrides={"epochs": 2, "data.size": 100, "rollout.prompts_per_step": 8})
    assert with_steps(sized).steps == 25
    with raises(ConfigError, "missing-setting: data.size", setting="steps"):
        with_steps(override(sized, {"data.size": None}))
    streamed = override(sized, {"data.source": "x.jsonl", "data.streaming": True, "rewards": MATH})
    with raises(ConfigError, "missing-setting: is streamed", setting="steps"):
        with_steps(streamed)


def test_the_last_word_about_the_length_counts() -> None:
    epochs = load_run(kind="sft", overrides={"epochs": 2})
    assert "steps" not in parse_toml(dump_toml(epochs).encode(), origin="dump")
    assert override(epochs, {"train.lr": 1e-4}).epochs == 2
    steps = override(epochs, {"steps": 7})
    assert (steps.steps, steps.epochs) == (7, None)
    assert override(steps, {"epochs": 0.5}).epochs == 0.5
    with raises(ConfigError, "contradiction: steps = 7 and epochs = 2", setting="epochs"):
        load_run(kind="sft", overrides={"steps": 7, "epochs": 2})
    with raises(ConfigError, "missing-setting: environment", setting="steps"):
        from lockstep.loops import train_online

        train_online(load_run("tiny", overrides={"epochs": 1}), environment=Environment())


def test_a_run_of_epochs_says_its_steps(
    tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run = rows(tmp_path / "d.jsonl", 6, completion="one two"), tmp_path / "run"
    words = ["--model.name", str(tiny_folder), "--data.source", data, "--run-dir", str(run)]
    words += ["--batch-size", "3", "--data.max-length", "64"]
    assert main(["train", "sft", *words, "--epochs", "1.5"]) == 0
    shown = capsys.readouterr().out
    assert "epochs 1.5 -> steps 3: 6 documents, batch_size = 3" in shown
    assert "train: finished, 3 steps" in shown
    saved = tomllib.loads((run / "config.toml").read_text())
    assert saved["steps"] == 3 and "epochs" not in saved
    assert main(["train", "--resume", str(run), "--epochs", "2"]) == 0
    assert "train: finished, 4 steps" in capsys.readouterr().out
