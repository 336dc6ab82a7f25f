"""The index of rollouts against the files themselves, which are the slow reference."""

from __future__ import annotations

import fcntl
import json
import os
import random
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lockstep.view import index as index_module
from lockstep.view import rollout_reader
from lockstep.view.index import RolloutIndex
from lockstep.view.rollout_files import list_files
from lockstep.view.rollout_reader import RolloutReader
from lockstep.view.rollouts import RolloutQuery

WORDS = ("the", "answer", "Größe", "x", '"quoted"', "ça va", "100%", "naïve\ttab", "終わり", "a_b")


def row(step: int, index: int, number: int, **values: Any) -> dict[str, Any]:
    return {
        "step": step,
        "prompt_index": index,
        "sample": number,
        "prompt": f"question {index}",
        "completion": f"answer {number}",
        "prompt_token_ids": [1, 2],
        "token_ids": [7, 8, 9],
        "rollout_logprobs": [-0.5, -1.25, -2.0],
        "finish_reason": "stop",
        "reward": 0.5,
        "rewards": {"ids": 0.5},
        "seed": 11,
        "policy_version": step,
        **values,
    }


def write(run: Path, step: int, rows: Sequence[dict[str, Any]], *, name: str = "") -> Path:
    path = run / "rollouts" / (name or f"step-{step:06d}.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


def some_row(step: int, prompt: int, sample: int, chance: random.Random) -> dict[str, Any]:
    ids = [chance.randrange(5) * 2 ** chance.randrange(0, 17, 8) for _ in range(chance.randrange(6))]
    logprobs = [-chance.random() for _ in ids]
    details = {"policy_logprobs": [p + chance.random() for p in logprobs]} if chance.random() < 0.5 else {}
    reward = chance.choice([None, 0.0, 0.25, 1.0, "NaN"])
    question, said = (" ".join(chance.choices(WORDS, k=n)) for n in (prompt % 3, 4))
    return row(
        step,
        prompt,
        sample,
        prompt=question,
        prompt_token_ids=[prompt, 3, 4],
        completion=chance.choice([None, said, said]),
        token_ids=ids,
        rollout_logprobs=logprobs,
        reward=reward,
        finish_reason=chance.choice(["stop", "length"]),
        **details,
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutReader]:
    """A reader of 4 steps of 24 random rollouts and an evaluation, with its index built."""
    run, chance = tmp_path_factory.mktemp("run"), random.Random(0)
    for step in range(4):
        write(run, step, [some_row(step, prompt, s, chance) for prompt in range(6) for s in range(4)])
    write(run, 0, [some_row(0, 50 + n, 0, chance) for n in range(9)], name="evaluation-before.jsonl")
    reader = RolloutReader(run, cache=tmp_path_factory.mktemp("cache"))
    assert reader.build(seconds=60) == 1.0
    yield reader
    reader.close()


QUERIES = [
    RolloutQuery(),
    RolloutQuery(descending=True, offset=5, limit=30),
    RolloutQuery(first_step=1, last_step=2),
    *(
        RolloutQuery(text=text)
        for text in ("the", "GRÖSSE", "größe", '"quoted" ', "ça", "x", "%", "終わり", "r t", "_")
    ),
    RolloutQuery(text="no such text"),
    RolloutQuery(text="nswer the answer"),
    *(RolloutQuery(ids=ids) for ids in ((3, 4), (4,), (0, 256), (1, 0), (65536,), (2**32,), (5, 3, 4))),
    RolloutQuery(ids=(3,), text="answer", order="length", descending=True),
    RolloutQuery(min_reward=0.25),
    RolloutQuery(max_reward=0.25, order="reward"),
    RolloutQuery(min_length=2, max_length=4, finish_reason="stop", order="length"),
    RolloutQuery(prompt_index=3, order="reward", descending=True),
    RolloutQuery(order="gap"),
    RolloutQuery(only="largest gap", limit=7),
    RolloutQuery(only="highest reward"),
    RolloutQuery(only="truncated", offset=200),
    RolloutQuery(evaluation="before"),
    RolloutQuery(evaluation="before", text="answer", order="reward"),
    RolloutQuery(evaluation="never"),
]


@pytest.mark.parametrize("query", QUERIES, ids=repr)
def test_the_index_finds_what_the_files_have(
    made: RolloutReader, query: RolloutQuery, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = made.page(query)
    monkeypatch.setattr(rollout_reader, "_SCAN_SECONDS", 1e9)
    monkeypatch.setattr(rollout_reader, "_COUNT_SECONDS", 1e9)
    files = list_files(made._run)
    expected = made._scan(query, files, 0.0, [])
    assert (found.indexed, found.scanned) == (1.0, ())
    assert found.total == expected.total
    assert repr(found.rollouts) == repr(expected.rollouts)  # NaN is no number that equals itself


def test_the_queries_find_something(made: RolloutReader) -> None:
    counts = [made.page(query).total for query in QUERIES]
    assert counts[0] == 96 and len(set(counts)) > 12


def reader_of(run: Path, tmp_path: Path) -> RolloutReader:
    reader = RolloutReader(run, cache=tmp_path / "cache")
    assert reader.build(seconds=60) == 1.0
    return reader


def test_a_text_does_not_match_over_the_end_of_a_row(tmp_path: Path) -> None:
    rows = [
        row(0, 0, 0, completion="abcde", token_ids=[1, 2]),
        row(0, 0, 1, completion="fghij", token_ids=[3]),
    ]
    write(tmp_path, 0, rows)
    reader = reader_of(tmp_path, tmp_path)
    assert reader.page(RolloutQuery(text="def")).total == 0
    assert reader.page(RolloutQuery(ids=(2, 3))).total == 0
    assert reader.page(RolloutQuery(text="cde")).total == 1
    assert reader.page(RolloutQuery(ids=(1, 2))).total == 2  # the prompt of both


def test_changed_new_and_removed_files_are_noticed_and_the_others_kept(tmp_path: Path) -> None:
    for step in range(3):
        write(tmp_path, step, [row(step, 0, 0, completion="old words")])
    reader = reader_of(tmp_path, tmp_path)
    database = sqlite3.connect(reader._index.path)
    before = dict(database.execute("SELECT name, id FROM files").fetchall())
    write(tmp_path, 1, [row(1, 0, 0, completion="new words"), row(1, 0, 1, completion="new words")])
    write(tmp_path, 3, [row(3, 0, 0, completion="new words")])
    (tmp_path / "rollouts" / "step-000002.jsonl").unlink()
    assert reader.page(RolloutQuery(text="old words")).total == 1  # not from an index that is out of date
    assert reader.build(seconds=60) == 1.0
    assert [one.step for one in reader.page(RolloutQuery(text="new words")).rollouts] == [1, 1, 3]
    assert [one.step for one in reader.page(RolloutQuery(text="old words")).rollouts] == [0]
    after = dict(database.execute("SELECT name, id FROM files").fetchall())
    assert sorted(after) == ["step-000000.jsonl", "step-000001.jsonl", "step-000003.jsonl"]
    assert after["step-000000.jsonl"] == before["step-000000.jsonl"]
    assert after["step-000001.jsonl"] > max(before.values())


def test_a_file_of_the_same_size_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path, 0, [row(0, 0, 0, completion="first")])
    reader = reader_of(tmp_path, tmp_path)
    status = path.stat()
    write(tmp_path, 0, [row(0, 0, 0, completion="other")])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert path.stat().st_size == status.st_size
    assert reader.page(RolloutQuery(text="other")).total == 1


def test_a_damaged_index_is_built_again(tmp_path: Path) -> None:
    write(tmp_path, 0, [row(0, 0, 0)])
    reader = reader_of(tmp_path, tmp_path)
    reader.close()
    path = reader._index.path
    path.write_bytes(b"no database" * 1000)
    again = RolloutReader(tmp_path, cache=tmp_path / "cache")
    first = again.page(RolloutQuery(text="answer 0"))
    assert first.total == 1 and "damaged and is built again" in first.problems[0]
    assert again.build(seconds=60) == 1.0
    found = again.page(RolloutQuery(text="answer 0"))
    assert (found.total, found.indexed, found.problems) == (1, 1.0, ())


@pytest.mark.parametrize("change", ["PRAGMA user_version = 99", "UPDATE about SET run = '/other'"])
def test_an_index_of_another_version_or_run_is_built_again(tmp_path: Path, change: str) -> None:
    write(tmp_path, 0, [row(0, 0, 0)])
    reader = reader_of(tmp_path, tmp_path)
    reader.close()
    database = sqlite3.connect(reader._index.path)
    database.execute("UPDATE files SET rows = zeroblob(0)")  # what the page would show if it were believed
    database.execute(change)
    database.commit()
    database.close()
    assert reader_of(tmp_path, tmp_path).page(RolloutQuery()).total == 1


def test_without_a_cache_folder_the_files_are_read_and_the_page_says_so(tmp_path: Path) -> None:
    write(tmp_path, 0, [row(0, 0, 0), row(0, 0, 1)])
    (tmp_path / "cache").write_text("a file")
    page = RolloutReader(tmp_path, cache=tmp_path / "cache").page(RolloutQuery(text="answer 1"))
    assert [one.id for one in page.rollouts] == ["0/0/1"] and page.scanned == (0,)
    assert page.problems and "without an index" in page.problems[0] and page.indexed == 0


def test_only_one_process_builds_an_index(tmp_path: Path) -> None:
    write(tmp_path, 0, [row(0, 0, 0)])
    index = RolloutIndex(tmp_path, folder=tmp_path / "cache")
    index.path.parent.mkdir()
    with index.path.with_suffix(".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert not index.update(list_files(tmp_path))
        assert index.holds(list_files(tmp_path)) == 0
    assert index.update(list_files(tmp_path))
    assert index.holds(list_files(tmp_path)) == 1


def test_a_build_that_is_stopped_leaves_no_half_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "_CHUNK", 1)
    monkeypatch.setattr(index_module, "_TRANSACTION", 1)
    for step in range(2):
        write(tmp_path, step, [row(step, 0, 0), row(step, 0, 1)])
    index, asked = RolloutIndex(tmp_path, folder=tmp_path / "cache"), iter([False, False, False, True])
    assert not index.update(list_files(tmp_path), stop=lambda: next(asked))
    assert index.holds(list_files(tmp_path)) == 1
    assert index.find(RolloutQuery()).total == 2
    assert index.update(list_files(tmp_path))
    assert index.find(RolloutQuery()).total == 4


def test_damaged_rows_are_named_with_and_without_the_index(tmp_path: Path) -> None:
    path = write(tmp_path, 0, [row(0, 0, 0), row(0, 0, 1, token_ids="text"), row(0, 0, 2)])
    with path.open("a") as file:
        file.write('{"step": \n{"step": 0, "sam')  # the last line is still being written
    reader = RolloutReader(tmp_path, cache=tmp_path / "cache")
    for _ in range(2):
        page = reader.page(RolloutQuery())
        assert [one.sample for one in page.rollouts] == [0, 2]
        wrong = [text for text in page.problems if "step-000000.jsonl" in text]
        assert len(wrong) == 2 and "line 2: token_ids is not a list of integers" in wrong[0]
        assert "line 4" in wrong[1]
        assert reader.build(seconds=60) == 1.0
    assert page.indexed == 1.0


def test_a_run_that_is_deleted_while_it_is_open_has_no_rollouts(tmp_path: Path) -> None:
    path = write(tmp_path / "run", 0, [row(0, 0, 0)])
    reader = reader_of(tmp_path / "run", tmp_path)
    path.unlink()
    path.parent.rmdir()
    assert (reader.steps(), reader.page(RolloutQuery()).rollouts, reader.group(0, 0)) == ([], (), [])


def test_indexes_that_nobody_opens_for_a_month_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    for name, days in (("old.sqlite", 31), ("recent.sqlite", 29), ("old.txt", 99)):
        (folder / name).write_text("")
        then = time.time() - days * 86400
        os.utime(folder / name, (then, then))
    write(tmp_path, 0, [row(0, 0, 0)])
    reader = reader_of(tmp_path, tmp_path)
    assert reader.page(RolloutQuery()).total == 1
    assert {path.name for path in folder.iterdir()} >= {"recent.sqlite", "old.txt", reader._index.path.name}
    assert not (folder / "old.sqlite").exists()


def test_an_index_that_another_process_built_anew_is_noticed(tmp_path: Path) -> None:
    for step in range(2):
        write(tmp_path, step, [row(step, 0, 0, completion=f"words {step}")])
    reader = reader_of(tmp_path, tmp_path)
    assert reader.page(RolloutQuery()).total == 2
    RolloutIndex(tmp_path, folder=tmp_path / "cache").forget()
    (tmp_path / "rollouts" / "step-000000.jsonl").unlink()
    write(tmp_path, 2, [row(2, 0, 0), row(2, 0, 1), row(2, 0, 2)])
    assert RolloutIndex(tmp_path, folder=tmp_path / "cache").update(list_files(tmp_path))
    page = reader.page(RolloutQuery())
    assert (page.indexed, [one.id for one in page.rollouts]) == (1.0, ["1/0/0", "2/0/0", "2/0/1", "2/0/2"])


def test_a_search_reads_one_state_of_the_index(tmp_path: Path) -> None:
    write(tmp_path, 0, [row(0, 0, 0)])
    index = RolloutIndex(tmp_path, folder=tmp_path / "cache")
    index.update(list_files(tmp_path))

    class DropsTheFile(dict[int, Any]):
        def keys(self) -> Any:  # after the names were read, before the rows are
            with sqlite3.connect(index.path, timeout=0.1) as other:
                other.execute("DELETE FROM files")
            other.close()
            return super().keys()

    assert index.holds(list_files(tmp_path)) == 1
    index._loaded = DropsTheFile()
    assert index.find(RolloutQuery()).total == 1
    assert index.find(RolloutQuery()).total == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": 10**30},
        {"reward": 10**400},
        {"advantages": [10**400]},
        {"rollout_logprobs": [10**400, -1.0, -1.0], "policy_logprobs": [-1.0, -1.0, -1.0]},
        {"token_ids": [7, 2**70, 9]},
    ],
)
def test_numbers_that_are_too_large_are_a_damaged_row(tmp_path: Path, wrong: dict[str, Any]) -> None:
    write(tmp_path, 0, [row(0, 0, 0), row(0, 0, 1) | wrong, row(0, 0, 2, finish_reason="\ud800")])
    reader = reader_of(tmp_path, tmp_path)
    page = reader.page(RolloutQuery())
    assert [one.sample for one in page.rollouts] == [0, 2] and "line 2" in page.problems[0]
    assert [one.sample for one in reader.group(0, 0)] == [0, 2]


def test_a_folder_whose_name_is_no_utf8_has_an_index(tmp_path: Path) -> None:
    run = Path(os.fsdecode(os.fsencode(tmp_path) + b"/run-\xff"))
    write(run, 0, [row(0, 0, 0)])
    (run / "rollouts" / "step-000001.jsonl").symlink_to("step-000001.jsonl")  # to itself
    assert reader_of(run, tmp_path).page(RolloutQuery()).total == 1
