"""What is refused of the documents of a run before anything is trained, and how the messages name it."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from classifiers import save_classifier
from raising import raises
from transformers import AutoTokenizer

from lockstep import loops
from lockstep.cli.main import main
from lockstep.config.batch import RewardModelConfig
from lockstep.config.data import DataConfig
from lockstep.config.load import load_run
from lockstep.data.preferences import load_preferences, load_unpaired
from lockstep.data.prompts import load_prompts
from lockstep.data.sft import load_sft
from lockstep.errors import ConfigError, DataError
from lockstep.models.reward import RewardModel

GROWN = "<|extra|>"


@pytest.fixture
def grown(tiny_folder, tmp_path):
    """The tiny model, whose tokenizer got a token for which the embedding has no row, id 259 of 259; its
    template writes it for a message "!"."""
    folder = tmp_path / "grown"
    shutil.copytree(tiny_folder, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": [GROWN]})
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "m['content']", f"(m['content'] if m['content'] != '!' else '{GROWN}')"
    )
    tokenizer.save_pretrained(folder)
    return folder


GOOD = {"prompt": "a", "completion": "b", "chosen": "b", "rejected": "c", "label": True}
BAD = {"prompt": "b", "completion": f"b{GROWN}", "chosen": "b", "rejected": f"c{GROWN}", "label": False}


@pytest.mark.parametrize(
    ("run", "place"),
    [
        (["sft"], "line 2"),
        (["dpo"], "line 2, rejected"),
        (["dpo", "--algorithm.name", "kto"], "line 2"),
        (["rm"], "line 2, rejected"),
        (["{folder}/grpo.toml", "--eval.before", "false", "--eval.after", "false"], "line 2"),
    ],
)
def test_a_token_beyond_the_embedding_is_named(grown, tmp_path, capsys, run, place):
    rows = tmp_path / "rows.jsonl"
    online = "grpo" in run[0]
    rows.write_text("\n".join(map(json.dumps, [GOOD, {"prompt": "!"} if online else BAD])))
    (tmp_path / "grpo.toml").write_text('kind = "grpo"\nrewards = [{name = "length", kwargs = {target = 2}}]')
    sizes = ["--rollout.prompts-per-step", "1"] if online else ["--batch-size", "2"]
    words = [*(word.format(folder=tmp_path) for word in run), "--model.name", str(grown), *sizes]
    more = ["--data.source", str(rows), "--steps", "1", "--run-dir", str(tmp_path / "run")]
    assert main(["train", *words, *more]) == 2
    (told,) = [line for line in capsys.readouterr().err.splitlines() if "token id 259" in line]
    assert f"rows.jsonl, {place}: token id 259 ('{GROWN}') is outside the vocabulary of 259 entries" in told


def test_a_token_of_a_given_prompt_beyond_the_embedding_is_named(grown, capsys):
    assert main(["sample", str(grown), "--prompt", "!"]) == 2
    assert f"--prompt: token id 259 ('{GROWN}') is outside the vocabulary" in capsys.readouterr().err


def test_a_token_beyond_a_reward_models_embedding_is_named(grown, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(grown)
    folder = save_classifier(tmp_path / "judge", tokenizer, vocab_size=259)
    model = RewardModel(RewardModelConfig(name=str(folder), dtype="float32"), device=torch.device("cpu"))
    with raises(DataError, "outside-vocabulary: line 4", token=259):
        model.document("a", f"b{GROWN}", "rows.jsonl, line 4")


@pytest.mark.parametrize(
    ("size", "more", "told"),
    [
        (24, {}, None),  # 12 pairs are 24 answers
        (25, {}, "12 rows, i.e. 24 answers"),
        (24, {"data.size": 12}, None),
        (25, {"data.size": 12}, "data.size = 12, at most 24 answers, is less than batch_size = 25"),
        (24, {"data.max_length": 30, "data.overlong_documents": "drop"}, "only 18 answers of data.source"),
    ],
)
def test_a_batch_of_kto_is_of_answers(tiny_folder, tmp_path, size, more, told):
    rows = [{"prompt": f"q{i:02}", "chosen": "ab", "rejected": "c" * (1 + 9 * (i % 2))} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"data.source": str(tmp_path / "rows.jsonl"), "model.name": str(tiny_folder), "steps": 1}
    run = {"algorithm.name": "kto", "batch_size": size, "run_dir": str(tmp_path / "run")}
    if told is None:
        assert loops.train(load_run(kind="dpo", overrides=data | run | more))["outcome"] == "finished"
    else:
        with pytest.raises((ConfigError, DataError)) as caught:
            loops.train(load_run(kind="dpo", overrides=data | run | more))
        assert told in str(caught.value)


def test_a_row_has_one_name_in_every_message(tiny_folder, tmp_path):
    """The third row of files with a blank line before it: line 4 of .jsonl, row 3 of .json and .parquet."""
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 2 + [{"prompt": 1, "chosen": 2, "rejected": 3}]
    lines = list(map(json.dumps, rows))
    (tmp_path / "rows.jsonl").write_text("\n".join([*lines[:2], "", lines[2]]))
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    for name, place in (("rows.jsonl", "line 4"), ("rows.json", "row 3")):
        config = DataConfig(source=str(tmp_path / name))
        for load in (load_prompts, load_sft, load_preferences, load_unpaired):
            with pytest.raises(DataError) as caught:
                load(config.model_copy(update={"completion_column": "chosen"}), tokenizer=tokenizer)
            assert f"{name}, {place}" in str(caught.value), load


def test_the_setting_and_the_longest_document_are_told_apart(tiny_folder, tmp_path):
    rows = [{"text": "x" * length} for length in (3, 4100)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"data.source": str(tmp_path / "rows.jsonl"), "data.max_length": 4200, "batch_size": 2}
    run = {"model.name": str(tiny_folder), "run_dir": str(tmp_path / "run"), "train.token_budget": 8192}
    with raises(DataError, "too-long: rows.jsonl, line 2") as caught:
        loops.train(load_run(kind="sft", overrides=data | run))
    assert "data.max_length = 4200 lets the document have 4101 tokens" in str(caught.value)
