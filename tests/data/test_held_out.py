from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from raising import raises

from lockstep.config.run import GRPORun
from lockstep.data.held_out import evaluates, held_out_config, holds_out, load_train_and_held_out
from lockstep.data.row_tools import RowTools
from lockstep.errors import DataError


def run(**data: Any) -> GRPORun:
    return GRPORun.model_validate({"data": data, "eval": {"num_prompts": 20}})


@pytest.mark.parametrize("size", [None, 600])
def test_no_held_out_question_occurs_in_training(tokenizer: Any, size: int | None) -> None:
    # Half of the questions are one of 200, so that chance alone would bring held-out ones into every batch.
    task = {"max_terms": 2, "max_digits": 2}
    given = GRPORun.model_validate({"data": {"task": task, "size": size}})
    train, held_out = load_train_and_held_out(given, tokenizer=tokenizer)
    problems = {str(p.row["question"]) for p in held_out}
    assert len(problems) == len(held_out) == 256
    trained = [str(p.row["question"]) for step in range(150) for p in train.batch(step, 16, 0)]
    assert not problems & set(trained)
    assert train.report["excluded"] > 50


def test_held_out_ids_are_left_out_too() -> None:
    given = run(source="ids", task={"min_tokens": 1, "max_tokens": 2, "vocab_size": 7})
    train, held_out = load_train_and_held_out(given, tokenizer=None)
    problems = {p.token_ids for p in held_out}
    assert len(problems) == 20
    assert not problems & {p.token_ids for step in range(50) for p in train.batch(step, 8, 0)}


def test_files_hold_out_the_rows_after_the_training_rows(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"prompt": f"question {i}"} for i in range(50)]
    rows[7] = rows[33]  # a training row that repeats a held-out one
    path.write_text("\n".join(map(json.dumps, rows)))
    train, held_out = load_train_and_held_out(run(source=str(path), size=30), tokenizer=tokenizer)
    assert [p.index for p in held_out] == list(range(30, 50))
    assert [train[i].index for i in range(len(train))] == [i for i in range(30) if i != 7]

    # Runs of earlier versions hold out the first ones.
    train, held_out = load_train_and_held_out(run(source=str(path)), tokenizer=tokenizer, hold_out="first")
    assert [p.index for p in held_out] == list(range(20))
    assert [train[i].index for i in range(len(train))] == [i for i in range(20, 50) if i != 33]

    with raises(DataError, "nothing-left: data.skip"):
        load_train_and_held_out(run(source=str(path), size=50), tokenizer=tokenizer)


def test_rows_are_held_out_by_their_content(tokenizer: Any, tmp_path: Path) -> None:
    """Of the first 20 rows for each, at least 1,000, those with the smallest hashes: in whatever order they
    stand, and whatever follows. A row at fault is none of them."""
    texts = [f"question {i}" for i in range(1200)]
    wanted = sorted(
        texts[:1000],
        key=lambda text: hashlib.blake2b(json.dumps({"prompt": text}).encode(), digest_size=16).digest(),
    )[:20]

    def held_out(name: str, rows: list[str], **more: Any) -> tuple[list[str], list[int]]:
        path = tmp_path / name
        path.write_text("".join(line + "\n" for line in rows))
        given = run(source=str(path), workers=0, **more)
        train, found = load_train_and_held_out(given, tokenizer=tokenizer)
        problems = {str(p.row["prompt"]) for step in range(40) for p in train.batch(step, 25, 0)}
        assert len(found) == 20 and not problems & set(wanted) and len(problems) > 900
        return [str(p.row["prompt"]) for p in found], [p.index for p in found]

    lines = [json.dumps({"prompt": text}) for text in texts]
    found, numbers = held_out("a.jsonl", lines)
    assert sorted(found) == sorted(wanted) and numbers == sorted(numbers)
    assert [texts[number] for number in numbers] == found
    assert held_out("a.jsonl", lines, streaming=True) == (found, numbers)
    turned = ["{}", *lines[:999][::-1], *lines[999:]]
    assert sorted(held_out("b.jsonl", turned, on_bad_row="skip")[0]) == sorted(wanted)


def test_a_run_keeps_the_way_in_which_it_holds_rows_out() -> None:
    never = GRPORun.model_validate({"eval": {"before": False, "after": False}})
    cases = [({}, "hash", None), ({"axes": {}}, "first", "first"), ({"held_out": "hash"}, "hash", "hash")]
    cases += [
        ({"held_out": True}, "first", "first"),
        *(({"held_out": no}, None, None) for no in (False, None)),
    ]
    for manifest, evaluated, not_evaluated in cases:
        assert (holds_out(run(), manifest), holds_out(never, manifest)) == (evaluated, not_evaluated)


def test_eval_data_rules(tokenizer: Any) -> None:
    given = GRPORun.model_validate({"eval_data": {"source": "reasoning_gym:gcd", "seed": 5}})
    config = held_out_config(given)
    assert (config.source, config.seed, config.size) == ("reasoning_gym:gcd", 5, 256)


def test_nothing_is_held_out_where_nothing_is_evaluated(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(30)))
    assert evaluates(run(source=str(path)))
    for which in ({"before": True}, {"after": True}, {"every": 5}, {}):
        values = {"before": False, "after": False, "every": 0, "num_prompts": 20} | which
        given = GRPORun.model_validate({"data": {"source": str(path)}, "eval": values})
        assert evaluates(given) == bool(which)
    train, held_out = load_train_and_held_out(given, tokenizer=tokenizer, hold_out=None)
    assert [train[i].index for i in range(len(train))] == list(range(30)) and len(held_out) == 0


def test_fewer_prompts_than_a_step_needs_are_refused_with_the_setting(tokenizer: Any, tmp_path: Path) -> None:
    """27 of 30 rows are too long, which only the tokenizer tells."""
    path = tmp_path / "a.jsonl"
    rows = [{"prompt": "word " * (400 if i % 10 else 1) + str(i)} for i in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"source": str(path), "max_prompt_tokens": 100, "overlong_prompts": "drop"}
    for needed in (3, 4):
        given = GRPORun.model_validate({"data": data, "rollout": {"prompts_per_step": needed}})
        if needed == 3:
            assert len(load_train_and_held_out(given, tokenizer=tokenizer, hold_out=None)[0]) == 3
            continue
        with raises(DataError, "not-enough: rollout.prompts_per_step"):
            load_train_and_held_out(given, tokenizer=tokenizer, hold_out=None)


def test_rows_of_an_environment_are_told_apart_by_what_it_gets(tokenizer: Any, tmp_path: Path) -> None:
    """Games and tools often have one prompt for all rows; only the columns that `reset` gets differ. A column
    that it does not get, such as a number of the row, hides no equal tasks."""
    path = tmp_path / "games.jsonl"
    rows = [{"prompt": "Play.", "number": i % 30, "row": i} for i in range(50)]
    path.write_text("\n".join(map(json.dumps, rows)))
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"prompt": "Play.", "number": 3}))
    given = run(source=str(path), size=40, exclude=str(other))

    def trained(reads: tuple[str, ...] | None) -> list[int]:
        tools = RowTools(schemas={"": []}, reads={"": reads})
        train, held_out = load_train_and_held_out(given, tokenizer=tokenizer, tools=tools)
        assert [p.index for p in held_out] == list(range(40, 50))
        return [train[i].index for i in range(len(train))]

    assert trained(("number",)) == [i for i in range(40) if i not in range(10, 20) and i % 30 != 3]
    assert trained(None) == list(range(40))
    with raises(DataError, "nothing-left: no prompts left"):
        trained(())
