from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from raising import raises

from lockstep.config.data import DataConfig
from lockstep.data.preferences import UnpairedSet, load_unpaired
from lockstep.errors import DataError
from lockstep.schema.batch import TrainSample, UnpairedSample

GOOD = {"prompt": "1 + 1?", "completion": "It is 2", "label": True}
BAD = {"prompt": "1 + 1?", "completion": "It is 3", "label": False}
PAIR = {"prompt": "1 + 1?", "chosen": "It is 2", "rejected": "It is 3"}


def load(tmp_path: Path, tokenizer: Any, rows: list[dict[str, Any]], **settings: Any) -> UnpairedSet:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return load_unpaired(DataConfig(source=str(path), **settings), tokenizer=tokenizer)


def trained_text(sample: TrainSample, tokenizer: Any) -> str:
    return str(tokenizer.decode(sample.token_ids[sample.loss_mask.nonzero().flatten() + 1]))


def test_labels_and_pairs_are_the_same_answers(tokenizer: Any, tmp_path: Path) -> None:
    user = {"role": "user", "content": "1 + 1?"}
    messages = {k: [{"role": "assistant", "content": PAIR[k]}] for k in ("chosen", "rejected")}
    for rows in (
        [GOOD, BAD],
        [{**GOOD, "label": 1}, {**BAD, "label": 0}],
        [{"prompt": [user], "completion": messages["chosen"], "label": True}, BAD],
        [PAIR],
        [{k: [user, *answer] for k, answer in messages.items()}],
    ):
        answers = load(tmp_path, tokenizer, rows)
        assert len(answers) == 2 and answers.report["desirable"] == 1
        assert [trained_text(answers[i], tokenizer) for i in (0, 1)] == [
            "It is 2<|im_end|>",
            "It is 3<|im_end|>",
        ]
        batch = answers.batch(0, 2, seed=0)
        assert all(isinstance(sample, UnpairedSample) for sample in batch)
        assert {trained_text(s, tokenizer)[6]: s.desirable for s in batch} == {"2": True, "3": False}  # type: ignore[attr-defined]


def test_a_label_is_of_the_last_answer_alone(tokenizer: Any, tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "1 + 1?"},
    ]
    whole = {k: [*turns, {"role": "assistant", "content": PAIR[k]}] for k in ("chosen", "rejected")}
    for rows in ([{**GOOD, "prompt": turns}, BAD], [whole]):
        assert trained_text(load(tmp_path, tokenizer, rows)[0], tokenizer) == "It is 2<|im_end|>"


def test_the_fingerprint_covers_the_labels(tokenizer: Any, tmp_path: Path) -> None:
    flipped = [{**GOOD, "label": False}, {**BAD, "label": True}]
    one, other = load(tmp_path, tokenizer, [GOOD, BAD]), load(tmp_path, tokenizer, flipped)
    assert one.fingerprint != other.fingerprint


def test_what_is_no_label_is_named(tokenizer: Any, tmp_path: Path) -> None:
    for label in ("yes", 2, None, 0.5):
        with raises(DataError, "wrong-row: label, line 2"):
            load(tmp_path, tokenizer, [GOOD, {**BAD, "label": label}])
    with raises(DataError, "wrong-pairs", kind="desirable"):
        load(tmp_path, tokenizer, [GOOD, GOOD])
    with raises(DataError, "missing-column: data.label_column, label"):
        load(tmp_path, tokenizer, [{"prompt": "a", "completion": "b"}])
    with raises(DataError, "missing-column: data.completion_column, completion"):
        load(tmp_path, tokenizer, [{"prompt": "a", "label": True}])
    with raises(DataError, "missing-column: data.rejected_column, rejected"):
        load(tmp_path, tokenizer, [{"prompt": "a", "chosen": "b"}])
