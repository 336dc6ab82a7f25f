from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from raising import raises

from lockstep.config.data import DataConfig
from lockstep.data.prompts import FixedPrompts, PromptStream, load_prompts, text_hash
from lockstep.errors import ConfigError, DataError

HEADER = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
SUMS = {"max_terms": 2, "min_digits": 2, "max_digits": 2}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_a_text_prompt_is_rendered_by_the_models_template(tokenizer: Any, tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [{"prompt": "1 + 1?", "answer": "2"}])
    prompts = load_prompts(
        DataConfig(source=source, prompt_template="{prompt} Just the number."), tokenizer=tokenizer
    )
    assert prompts[0].text == HEADER.format("1 + 1? Just the number.")
    assert tokenizer.decode(prompts[0].token_ids) == prompts[0].text
    assert list(prompts[0].token_ids) == tokenizer(prompts[0].text)["input_ids"]
    assert prompts[0].row["answer"] == "2"


def test_several_turns_and_a_system_prompt(tokenizer: Any, tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yo"},
        {"role": "user", "content": "1 + 1?"},
    ]
    source = write(tmp_path / "a.jsonl", [{"messages": turns}])
    config = DataConfig(source=source, system_prompt="Be brief.", prompt_template="{prompt}!")
    assert load_prompts(config, tokenizer=tokenizer)[0].text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nYo<|im_end|>\n"
        "<|im_start|>user\n1 + 1?!<|im_end|>\n<|im_start|>assistant\n"
    )
    source = write(tmp_path / "b.jsonl", [{"messages": turns[:2]}])
    with raises(DataError, "wrong-row: line 1"):
        load_prompts(DataConfig(source=source), tokenizer=tokenizer)


def test_a_missing_prompt_column_names_the_nearest(tokenizer: Any, tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [{"promt": "x", "answer": "y"}])
    with raises(DataError, "missing-column: data.prompt_column, prompt"):
        load_prompts(DataConfig(source=source), tokenizer=tokenizer)


def test_overlong_prompts(tokenizer: Any, tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [{"prompt": "one two three four five six"}, {"prompt": "one two"}])
    settings: dict[str, Any] = {"source": source, "chat_template": "none", "max_prompt_tokens": 3}
    with raises(DataError, "too-long: line 1", tokens=6):
        load_prompts(DataConfig(**settings), tokenizer=tokenizer)
    dropped = load_prompts(DataConfig(**settings, overlong_prompts="drop"), tokenizer=tokenizer)
    assert [(p.index, p.text) for p in dropped] == [(1, "one two")]
    assert dropped.report == {"prompts": 1, "excluded": 0, "dropped_overlong": 1, "truncated": 0}
    cut = load_prompts(DataConfig(**settings, overlong_prompts="truncate_left"), tokenizer=tokenizer)
    assert [p.text for p in cut] == [" four five six", "one two"]
    assert cut.report == {"prompts": 2, "excluded": 0, "dropped_overlong": 0, "truncated": 1}


def test_truncation_keeps_the_bos(bos_tokenizer: Any, tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [{"prompt": "a b c"}])
    config = DataConfig(source=source, max_prompt_tokens=3, overlong_prompts="truncate_left")
    assert load_prompts(config, tokenizer=bos_tokenizer)[0].token_ids == (1, 4, 5)


def test_excluded_texts_are_left_out(tokenizer: Any, tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [{"prompt": f"question {i}"} for i in range(4)])
    other = write(tmp_path / "b.jsonl", [{"prompt": "question  2"}])
    left = load_prompts(
        DataConfig(source=source, exclude=other),
        tokenizer=tokenizer,
        exclude=[text_hash(HEADER.format("question 0"))],
    )
    assert [p.index for p in left] == [1, 3]
    assert left.report["excluded"] == 2
    with raises(DataError, "nothing-left"):
        excluded = [text_hash(f"question {i}") for i in range(4)]
        load_prompts(DataConfig(source=source), tokenizer=tokenizer, exclude=excluded)


def test_generated_rows_carry_their_verifier(tokenizer: Any) -> None:
    row = load_prompts(DataConfig(task=SUMS, size=1), tokenizer=tokenizer)[0].row
    assert row["verifier"] == "reasoning_gym:chain_sum" and row["verifier_settings"] == SUMS
    assert str(eval(row["metadata"]["expression"])) == row["answer"]
    assert row["problem"] == row["question"]


def test_a_sized_set_is_distinct_and_the_same_every_time(tokenizer: Any) -> None:
    def texts(seed: int) -> list[str]:
        config = DataConfig(task={"max_terms": 2, "max_digits": 1}, size=150, seed=seed)
        return [p.text for p in load_prompts(config, tokenizer=tokenizer)]

    first = texts(1)
    assert len(set(first)) == 150
    assert texts(1) == first
    assert texts(2) != first


def test_a_task_with_too_few_questions_says_how_many(tokenizer: Any) -> None:
    config = DataConfig(task={"max_terms": 2, "max_digits": 1}, size=201)
    with raises(DataError, "not-enough: data.size"):  # 10 * 10 operands, + and -
        load_prompts(config, tokenizer=tokenizer)


def test_a_stream_is_fresh_distinct_and_a_pure_function(tokenizer: Any) -> None:
    config = DataConfig(task={"max_terms": 4, "min_terms": 4, "min_digits": 3, "max_digits": 3})
    stream = load_prompts(config, tokenizer=tokenizer)
    assert isinstance(stream, PromptStream) and stream.size is None and stream
    seen = [p.text for step in range(100) for p in stream.batch(step, 16, 0)]
    assert len(set(seen)) == 1600
    again = load_prompts(config, tokenizer=tokenizer)
    assert [p.text for p in again.batch(77, 16, 0)] == seen[77 * 16 : 78 * 16]
    assert [p.index for p in again.batch(77, 16, 0)] == list(range(77 * 16, 78 * 16))
    assert not {p.text for p in again.batch(77, 16, 1)} & set(seen)
    with pytest.raises(TypeError, match=r"endless; set data\.size"):
        len(stream)


def test_a_batch_of_a_small_task_has_no_question_twice(tokenizer: Any) -> None:
    stream = load_prompts(DataConfig(task={"max_terms": 2, "max_digits": 1}), tokenizer=tokenizer)
    for step in range(10):
        assert len({p.text for p in stream.batch(step, 64, 0)}) == 64


def test_a_stream_without_anything_left_says_so(tokenizer: Any) -> None:
    task = {"max_terms": 2, "max_digits": 1}
    everything = load_prompts(DataConfig(task=task, size=200), tokenizer=tokenizer)
    assert isinstance(everything, FixedPrompts)
    stream = load_prompts(DataConfig(task=task), tokenizer=tokenizer, exclude=everything.texts)
    with raises(DataError, "not-enough"):
        stream.batch(0, 1, 0)


@pytest.mark.parametrize("task", ["gsm_symbolic", "list_functions", "word_ladder", "acre", "spell_backward"])
def test_tasks_that_prepare_their_items_stream_too(tokenizer: Any, task: str) -> None:
    stream = load_prompts(DataConfig(source=f"reasoning_gym:{task}"), tokenizer=tokenizer)
    assert [p.row["verifier"] for p in stream.batch(5000, 2, 0)] == [f"reasoning_gym:{task}"] * 2


def test_wrong_task_settings_are_named(tokenizer: Any) -> None:
    for config, text in (
        (DataConfig(source="reasoning_gym:chain_sums"), "unknown-name: chain_sums"),
        (DataConfig(task={"max_digit": 1}), "unknown-setting: max_digit"),
        (DataConfig(task={"size": 4}), "contradiction: data.task.size"),
        (DataConfig(task={"min_terms": 5, "max_terms": 2}), "refused: data.task"),
    ):
        with raises(ConfigError, text):
            load_prompts(config, tokenizer=tokenizer)


def test_id_prompts() -> None:
    config = DataConfig(source="ids", task={"min_tokens": 2, "max_tokens": 5})
    stream = load_prompts(config, tokenizer=None, vocab_size=10)
    batch = [p for step in range(50) for p in stream.batch(step, 4, 3)]
    assert {len(p.token_ids) for p in batch} == {2, 3, 4, 5}
    assert {i for p in batch for i in p.token_ids} == set(range(10))
    assert batch == [
        p for step in range(50) for p in load_prompts(config, tokenizer=None, vocab_size=10).batch(step, 4, 3)
    ]
    with raises(ConfigError, "out-of-range: data.task.vocab_size"):
        load_prompts(config, tokenizer=None)
    with raises(ConfigError, "no-tokenizer: data.source"):
        load_prompts(DataConfig(), tokenizer=None)
