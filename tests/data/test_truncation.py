"""What is left of a text that is too long: it begins as the model was trained on texts to begin."""

from __future__ import annotations

import json

import pytest
import torch
from classifiers import save_classifier
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from lockstep.config.batch import RewardModelConfig
from lockstep.config.data import DataConfig
from lockstep.data.preferences import load_scored_pairs
from lockstep.data.prompts import load_prompts
from lockstep.models.reward import RewardModel

OPENED = "{{ bos_token }}{% for m in messages %}{{ m.role[0] + ':' + m.content }}{% endfor %}"
ONCE = "{% for m in messages %}{{ m.role[0] + ':' + m.content }}{% endfor %}"
LONG = "abcdefgh" * 9


def with_bos(tiny_folder, *, template, plain):
    """The tiny tokenizer; plain: it puts bos in front of plain text itself, as Llama's and Gemma's do."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.chat_template = template
    if plain:
        first = [("<|begin|>", tokenizer.bos_token_id)]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|begin|> $A", special_tokens=first
        )
    return tokenizer


# (template, whether the tokenizer puts bos before plain text, whether the cut text begins with it, why)
TRUNCATED = [
    (OPENED, False, True),  # the template writes it
    (OPENED, True, True),
    (None, True, True),  # the tokenizer writes it
    (ONCE, True, False),  # nobody did
    (ONCE.replace("{{ m", "{{ '<|begin|>' + m"), False, False),  # it opens every turn, and no sequence
]


@pytest.mark.parametrize(("template", "plain", "kept"), TRUNCATED)
@pytest.mark.parametrize("what", ["prompt", "reward model", "scored document"])
def test_what_is_truncated_still_begins_with_bos(tiny_folder, tmp_path, what, template, plain, kept):
    tokenizer = with_bos(tiny_folder, template=template, plain=plain)
    talk = [
        {"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", LONG))
    ]
    row = {"prompt": LONG if template is None else talk, "chosen": LONG, "rejected": LONG + "!"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    config = DataConfig(
        source=str(tmp_path / "rows.jsonl"),
        max_prompt_tokens=9,
        overlong_prompts="truncate_left",
        max_length=9,
    )
    if what == "prompt":
        found = list(load_prompts(config, tokenizer=tokenizer)[0].token_ids)
    elif what == "reward model":
        found = load_scored_pairs(config, tokenizer=tokenizer, pad_id=0)[0][0].token_ids.tolist()
    else:
        folder = save_classifier(tmp_path / "model", tokenizer, num_labels=1)
        cut = {"overlong": "truncate_left", "max_length": 9}
        settings = RewardModelConfig(name=str(folder), dtype="float32", **cut)
        model = RewardModel(settings, device=torch.device("cpu"))
        found = list(model.document(row["prompt"], LONG, "a row").ids)
    answer = [] if what == "prompt" else [{"role": "assistant", "content": LONG}]
    if template is None:
        whole = tokenizer(LONG * (1 + len(answer)))["input_ids"]
    else:
        whole = tokenizer.apply_chat_template([*talk, *answer], tokenize=True, return_dict=False)
    assert found == ([tokenizer.bos_token_id, *whole[-8:]] if kept else whole[-9:])
