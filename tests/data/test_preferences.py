from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.data import DataConfig
from lockstep.data.preferences import PreferenceSet, load_preferences
from lockstep.errors import ConfigError, DataError
from lockstep.schema.batch import TrainSample

ROW = {"prompt": "1 + 1?", "chosen": "It is 2", "rejected": "It is 3"}


def load(tmp_path: Path, tokenizer: Any, rows: list[dict[str, Any]], **settings: Any) -> PreferenceSet:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return load_preferences(DataConfig(source=str(path), **settings), tokenizer=tokenizer)


def trained_text(sample: TrainSample, tokenizer: Any) -> str:
    """What stands under the mask: entry t is about token t + 1."""
    return str(tokenizer.decode(sample.token_ids[sample.loss_mask.nonzero().flatten() + 1]))


def test_answers_in_three_forms_are_the_same_pair(tokenizer: Any, tmp_path: Path) -> None:
    user = {"role": "user", "content": "1 + 1?"}
    answers = {k: [{"role": "assistant", "content": ROW[k]}] for k in ("chosen", "rejected")}
    whole = {k: [user, *messages] for k, messages in answers.items()}
    forms = [ROW, {"prompt": [user], **answers}, whole, {"prompt": "1 + 1?", **whole}]
    pairs = load(tmp_path, tokenizer, forms)
    assert len(pairs) == 4 and pairs.report["pairs"] == 4
    for chosen, rejected in (pairs[i] for i in range(4)):
        assert trained_text(chosen, tokenizer) == "It is 2<|im_end|>"
        assert trained_text(rejected, tokenizer) == "It is 3<|im_end|>"
        assert chosen.token_ids.equal(pairs[0][0].token_ids)
        assert rejected.token_ids.equal(pairs[0][1].token_ids)


def test_a_batch_is_pairs_in_turn_and_a_pure_function(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{**ROW, "chosen": f"{i}", "rejected": f"not {i}"} for i in range(6)]
    pairs = load(tmp_path, tokenizer, rows)
    batch = pairs.batch(1, 4, seed=5)
    assert [sample.sample_id for sample in batch] == list(range(8))
    texts = [trained_text(sample, tokenizer).removesuffix("<|im_end|>") for sample in batch]
    assert all(texts[i + 1] == f"not {texts[i]}" for i in range(0, 8, 2))
    again = pairs.batch(1, 4, seed=5)
    assert all(a.token_ids.equal(b.token_ids) for a, b in zip(batch, again, strict=True))


def test_an_overlong_answer_takes_its_other_one_with_it(tokenizer: Any, tmp_path: Path) -> None:
    rows = [ROW, {**ROW, "rejected": "no " * 300}, {**ROW, "rejected": ROW["chosen"]}]
    pairs = load(tmp_path, tokenizer, rows, max_length=128, overlong_documents="drop")
    assert len(pairs) == 1
    assert pairs.report["dropped_overlong"] == 1 and pairs.report["dropped_equal"] == 1


def test_what_is_missing_is_named(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="rejected"):
        load(tmp_path, tokenizer, [{"prompt": "a", "chosen": "b"}])
    with pytest.raises(DataError, match="prompt"):
        load(tmp_path, tokenizer, [{"chosen": "b", "rejected": "c"}])
    with pytest.raises(DataError, match="no preference pairs left"):
        load(tmp_path, tokenizer, [{**ROW, "rejected": ROW["chosen"]}])
    with pytest.raises(ConfigError, match="DPO needs a model with a tokenizer"):
        load(tmp_path, None, [ROW])
