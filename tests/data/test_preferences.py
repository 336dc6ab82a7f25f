from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from raising import raises

from lockstep.config.data import DataConfig
from lockstep.data.preferences import PreferenceSet, load_preferences, load_scored_pairs
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
    drop = {"overlong_documents": "drop", "equal_answers": "drop"}
    pairs = load(tmp_path, tokenizer, rows, max_length=128, **drop)
    assert len(pairs) == 1
    assert pairs.report["dropped_overlong"] == 1 and pairs.report["dropped_equal"] == 1


def test_what_is_missing_is_named(tokenizer: Any, tmp_path: Path) -> None:
    with raises(DataError, "missing-column: data.rejected_column, rejected"):
        load(tmp_path, tokenizer, [{"prompt": "a", "chosen": "b"}])
    with raises(DataError, "missing-column: data.prompt_column, prompt"):
        load(tmp_path, tokenizer, [{"chosen": "b", "rejected": "c"}])
    with raises(DataError, "nothing-left"):
        load(tmp_path, tokenizer, [{**ROW, "rejected": ROW["chosen"]}], equal_answers="drop")
    with raises(DataError, "wrong-pairs: line 2"):
        load(tmp_path, tokenizer, [ROW, {**ROW, "rejected": ROW["chosen"]}])
    with raises(ConfigError, "no-tokenizer: tokenizer"):
        load(tmp_path, None, [ROW])


def load_scored(tmp_path: Path, tokenizer: Any, rows: list[dict[str, Any]], **settings: Any) -> PreferenceSet:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    config = DataConfig(source=str(path), **settings)
    return load_scored_pairs(config, tokenizer=tokenizer, pad_id=tokenizer.eos_token_id)


def test_a_reward_models_document_is_scored_at_its_last_token_that_is_no_pad(
    tokenizer: Any, tmp_path: Path
) -> None:
    pairs = load_scored(tmp_path, tokenizer, [{**ROW, "margin": 0.5}, {**ROW, "margin": 0.0}])
    (sample, other, *_) = samples = pairs.batch(0, 2, seed=0)
    assert {(s.sample_id // 2, s.margin) for s in samples} in ({(0, 0.5), (1, 0.0)}, {(0, 0.0), (1, 0.5)})  # type: ignore[attr-defined]
    for each in (sample, other):
        slots = each.loss_mask.nonzero()[:, 0].tolist()
        last = max(t for t, token in enumerate(each.token_ids.tolist()) if token != tokenizer.eos_token_id)
        assert slots == [last]
    text = tokenizer.decode(sample.token_ids)
    assert text == tokenizer.apply_chat_template(
        [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "It is 2"}], tokenize=False
    )


def test_a_reward_models_document_keeps_its_end(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{**ROW, "prompt": "1 + 1? " * 100}]
    (whole, _) = load_scored(tmp_path, tokenizer, rows)[0]
    (cut, _) = load_scored(tmp_path, tokenizer, rows, max_length=40, overlong_documents="truncate")[0]
    assert len(cut) == 40 and cut.token_ids.equal(whole.token_ids[-40:])


@pytest.mark.parametrize("margin", [-0.5, True, "1", float("nan")])
def test_a_margin_is_a_number(tokenizer: Any, tmp_path: Path, margin: Any) -> None:
    with raises(DataError, "wrong-row: margin, line 1"):
        load_scored(tmp_path, tokenizer, [{**ROW, "margin": margin}])
