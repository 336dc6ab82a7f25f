"""Starts that are refused: what is told together, before weights are read, and what is left."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import pytest
from raising import problems, raises

from lockstep import loops
from lockstep.cli.main import main
from lockstep.config.load import load_run
from lockstep.config.rollout import RewardConfig
from lockstep.data.held_out import load_train_and_held_out
from lockstep.errors import ConfigError, LockstepError, RewardError
from lockstep.loop.preflight import preflight
from lockstep.protocols.reward import RewardInput
from lockstep.rollout.rewards import RewardSet


@pytest.mark.parametrize(
    ("rows", "wanted", "batch", "held_out"),
    [
        # by hand: eval.num_prompts if that is at most half of the rows, else a fifth, and a batch must remain
        (600, 256, 8, 256),
        (512, 256, 8, 256),
        (511, 256, 8, 102),
        (60, 256, 1, 12),
        (60, 20, 8, 20),
        (10, 256, 9, 1),
        (5, 256, 2, 1),
        (2, 256, 1, 1),
    ],
)
def test_a_small_set_is_never_held_out_whole(rows, wanted, batch, held_out, tmp_path):
    settings = {"eval.num_prompts": wanted, "rollout.prompts_per_step": batch}
    run = load_run(kind="grpo", overrides=own_rows(tmp_path, rows) | settings)
    train, evaluation = load_train_and_held_out(run, tokenizer=Bytes())
    assert (len(train), len(evaluation)) == (rows - held_out, held_out)
    preflight(run, resume=None, checkpoint=None)


@pytest.mark.parametrize(
    ("rows", "settings", "fix"),
    [
        (8, {"rollout.prompts_per_step": 8}, "lower rollout.prompts_per_step to 7"),
        (10, {"rollout.prompts_per_step": 8, "eval.num_prompts": 3}, "lower eval.num_prompts to 2"),
        (10, {"data.size": 10}, "lower data.size, set eval_data.source"),
    ],
)
def test_too_few_rows_are_refused_with_a_fix_that_works(rows, settings, fix, tmp_path):
    settings = own_rows(tmp_path, rows) | {"rollout.prompts_per_step": 2} | settings
    with raises(ConfigError, "not-enough", rows=rows) as caught:
        preflight(load_run(kind="grpo", overrides=settings), resume=None, checkpoint=None)
    assert fix in str(caught.value)


def test_all_faults_of_a_start_are_told_together(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def rewerd(*, prompt, completion, row): return 1.0\n")
    rewards = [{"name": name} for name in ("mth", "no_such_module:f", "mine:reward", "math")]
    settings = own_rows(tmp_path, 4) | {
        "model.name": "./nowhere",
        "data.prompt_column": "qestion",
        "data.answer_column": "anwser",
        "data.prompt_template": "{prompt} {solutoin}",
        "rollout.prompts_per_step": 8,
        "rewards": rewards,
    }
    with pytest.raises(LockstepError) as caught:
        preflight(load_run(kind="grpo", overrides=settings), resume=None, checkpoint=None)
    found, text = [each["code"] for each in problems(caught.value)], str(caught.value)
    for code, name in (
        ("wrong-kind-of-file", "model.name"),
        ("unknown-name", "'mth'"),
        ("missing-package", "'no_such_module'"),
        ("wrong-part", "has no 'reward'"),
        ("missing-column", "qestion"),
        ("missing-column", "anwser"),
        ("unknown-name", "solutoin"),
        ("not-enough", "rollout.prompts_per_step"),
    ):
        assert code in found and name in text, name
    assert "did you mean 'rewerd'?" in str(caught.value) and "did you mean 'math'?" in str(caught.value)


def own_rows(folder: Path, count: int) -> dict[str, object]:
    """Settings of a run on a file of the user's own."""
    rows = [{"question": f"What is {i} + 1?", "solution": str(i + 1)} for i in range(count)]
    file = folder / "own.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "data.source": str(file),
        "data.prompt_column": "question",
        "data.chat_template": "none",
        "rewards": [{"name": "length", "kwargs": {"target": 4}}],
    }


class Bytes:
    """A tokenizer: a token per byte."""

    bos_token_id = None
    chat_template = None

    def __call__(self, text: str | list[str], **_: object) -> dict[str, list[object]]:
        texts = [text] if isinstance(text, str) else text
        ids = [list(each.encode()) for each in texts]
        return {"input_ids": list[object](ids[0] if isinstance(text, str) else ids)}


def test_own_rows_without_rewards_are_refused_at_once(tmp_path, capsys):
    settings = own_rows(tmp_path, 60)
    argv = ["--data.source", str(settings["data.source"]), "--data.prompt-column", "question"]
    # A folder without weights: a run that looked for them would fail otherwise.
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    argv += ["--model.name", str(tmp_path / "model"), "--run-dir", str(tmp_path / "run")]
    assert main(["train", "grpo", *argv]) == 2
    assert "reward 'verifier', which is the default" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("reward", "row"),
    [
        ("verifier", {"question": "1 + 1?", "answer": "2"}),
        ("verifier", {"verifier": None}),
        ("math", {"question": "1 + 1?"}),
        ("math", {"answer": None}),
        ("math", {"answer": {"value": 2}}),
        ("math", {"answer": " "}),
        ("math", {"answer": [""]}),
    ],
)
@pytest.mark.parametrize("completion", ["", "no number", "It is 2."])
def test_a_row_that_cannot_be_scored_is_no_zero(reward, row, completion):
    sample = RewardInput(
        prompt="",
        completion=completion,
        row=row,
        prompt_token_ids=(),
        completion_token_ids=(),
        finish_reason="stop",
    )
    missing = f"missing-column: {'answer' if reward == 'math' else 'verifier'}"
    if "answer" in row and reward == "math":
        missing = "reward-failed"
    rewards = RewardSet([RewardConfig(name=reward, answer="last_number")])
    with contextlib.closing(rewards), raises((ConfigError, RewardError), missing):
        rewards.score([sample])


DPO = [{"prompt": f"q{i}", "chosen": "yes", "rejected": "no"} for i in range(8)]
STARTS = {
    # what is wrong                kind, settings, rows, changes of config.json; the error
    "rope type": ("sft", {}, [], {"rope_parameters": {"rope_type": "axial", "factor": 2.0}}, "rope_type"),
    "positions": ("grpo", {"data.max_prompt_tokens": 9000}, [], {}, "too-long"),
    "longer rows": ("sft", {"data.max_length": 9000}, [{"text": "x" * 5000}], {}, "too-long"),
    "equal answers": ("dpo", {}, [{"prompt": "q", "chosen": "yes", "rejected": "yes"}], {}, "wrong-pairs"),
    "missing side": ("dpo", {}, [{"prompt": "q", "chosen": "yes"}], {}, "missing-column"),
    "no label": (
        "dpo",
        {"algorithm.name": "kto"},
        [{"prompt": "q", "completion": "yes"}],
        {},
        "missing-column",
    ),
}


@pytest.mark.parametrize("what", STARTS)
def test_a_start_that_fails_reads_no_weights_and_leaves_no_folder(what, tiny_folder, tmp_path, monkeypatch):
    kind, settings, more, changes, said = STARTS[what]
    model = tmp_path / "model"
    shutil.copytree(tiny_folder, model)
    monkeypatch.setattr("lockstep.loop.build.load_model", None)  # whoever reads weights fails otherwise
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changes))
    good = {"sft": [{"text": "a b c"}] * 8, "dpo": DPO, "grpo": [{"prompt": f"q{i}"} for i in range(20)]}
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [*good[kind], *more]))
    if kind == "grpo":
        settings |= {"rewards": [{"name": "length", "kwargs": {"target": 4}}], "rollout.prompts_per_step": 2}
    else:
        settings |= {"batch_size": 2}
    settings |= {"model.name": str(model), "data.source": str(file), "run_dir": str(tmp_path / "a" / "run")}
    settings |= {"train.token_budget": 40000, "model.dtype": "float32"}
    run = load_run(kind=kind, overrides=settings)
    with pytest.raises(LockstepError) as caught:
        loops.train(run)
    assert said in str(caught.value.data) + str(caught.value) and caught.value.status == 2
    assert not (tmp_path / "a").exists()


def test_a_start_that_fails_leaves_what_was_there_before(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    run = load_run("tiny", overrides={"run_dir": str(tmp_path / "run"), "steps": 1})

    def broken(**_: object) -> float:
        raise ValueError("no luck")

    with raises(RewardError, "reward-failed"):
        loops.train(run, rewards=[broken])
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]


def test_a_run_that_fails_after_its_first_step_exits_with_1(tmp_path):
    calls = []

    def breaks(**_: object) -> float:
        calls.append(1)
        if len(calls) > 70:  # 64 rollouts of the first step
            raise ConfigError("too late", code="no-effect")
        return float(len(calls) % 2)

    settings = {"run_dir": str(tmp_path / "run"), "steps": 3, "eval.before": False}
    with pytest.raises(LockstepError) as caught:
        loops.train(load_run("tiny", overrides=settings), rewards=[breaks])
    assert caught.value.status == 1 and (tmp_path / "run").exists()
