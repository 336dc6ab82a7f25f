"""Columns that settings name: in every kind of set, with the row that lacks one."""

from __future__ import annotations

import json
from functools import partial

import pytest
from raising import raises
from transformers import AutoTokenizer

from lockstep.config.data import DataConfig
from lockstep.data.preferences import load_preferences, load_scored_pairs, load_unpaired
from lockstep.data.prompts import load_prompts
from lockstep.data.sft import load_sft
from lockstep.errors import DataError

TALK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
PAIR = {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}
LOADERS = {
    "sft": load_sft,
    "dpo": load_preferences,
    "rm": partial(load_scored_pairs, pad_id=0),
    "kto": load_unpaired,
    "prompts": load_prompts,
}
# (kind, rows, settings, where the error stands: the source, or the line that lacks it)
MISNAMED = [
    ("rm", [PAIR | {"margin_of": 1.0}], {"margin_column": "margin_off"}, "rows.jsonl"),
    ("rm", [PAIR | {"margin": 1.0}, PAIR], {}, "line 2"),
    ("rm", [PAIR | {"m": 1.0}, PAIR | {"m": None}], {"margin_column": "m"}, "line 2"),
    ("dpo", [PAIR], {"margin_column": "margn"}, "rows.jsonl"),
    ("dpo", [PAIR | {"better": "2"}], {"chosen_column": "beter"}, "rows.jsonl"),
    ("kto", [PAIR], {"label_column": "good"}, "rows.jsonl"),
    ("sft", [{"messages": TALK, "text": "t"}], {"messages_column": "turns"}, "rows.jsonl"),
    ("sft", [{"text": "t", "body": "b"}, {"text": "t"}], {"text_column": "body"}, "line 2"),
    ("prompts", [{"messages": TALK[:1]}], {"prompt_column": "question"}, "rows.jsonl"),
    ("prompts", [{"q": "a"}, {"messages": TALK[:1]}], {"prompt_column": "q"}, "line 2"),
    ("prompts", [{"turns": TALK[:1]}, {"prompt": "a"}], {"messages_column": "turns"}, "line 2"),
    ("prompts", [{"prompt": "a", "result": 1}, {"prompt": "a"}], {"answer_column": "result"}, "line 2"),
]


@pytest.mark.parametrize(("kind", "rows", "settings", "where"), MISNAMED)
def test_a_column_that_a_setting_names_is_there(tiny_folder, tmp_path, kind, rows, settings, where):
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = DataConfig(source=str(tmp_path / "rows.jsonl"), **settings)
    with raises(DataError, f"missing-column: {where}"):
        LOADERS[kind](config, tokenizer=AutoTokenizer.from_pretrained(tiny_folder))


# (row, settings, the prompt that is taken); beside a form that a setting names the other counts for nothing
PROMPTS = [
    ({"prompt": "p", "messages": TALK[:1]}, {}, "p"),
    ({"prompt": None, "messages": TALK[:1]}, {}, "q"),  # as Parquet has a row that had no prompt
    ({"prompt": "p", "turns": TALK[:1]}, {"messages_column": "turns"}, "q"),
    ({"p": "r", "prompt": "p", "messages": TALK[:1]}, {"prompt_column": "p"}, "r"),
]


@pytest.mark.parametrize(("row", "settings", "prompt"), PROMPTS)
def test_prompts_are_of_the_form_that_a_setting_names(tiny_folder, tmp_path, row, settings, prompt):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    config = DataConfig(source=str(tmp_path / "rows.jsonl"), **settings)
    found = load_prompts(config, tokenizer=AutoTokenizer.from_pretrained(tiny_folder))
    assert found[0].text == f"<|user|>{prompt}<|end|><|assistant|>"


def test_a_named_form_counts_before_others(tiny_folder, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    row = {"messages": TALK, "prompt": "q", "response": "r"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    config = DataConfig(source=str(tmp_path / "rows.jsonl"), completion_column="response")
    text = tokenizer.decode(load_sft(config, tokenizer=tokenizer)[0].token_ids)
    assert text == "<|user|>q<|end|><|assistant|>r<|end|>"
