import inspect
import json

import pytest
from raising import raises

from lockstep.config.batch import ScoreConfig
from lockstep.config.rollout import RewardConfig
from lockstep.errors import ConfigError, DataError, RewardError
from lockstep.rollout.rewards import RewardSet
from lockstep.rollout.rows import RowFile
from lockstep.rollout.scoring import Hooks, Judges, check_columns, samples, score_rows


def digits(*, prompt, completion, row):
    if completion == "bad":
        raise ValueError("no digits")
    return sum(c.isdigit() for c in completion) + 10 * (row["answer"] == (1, 2))


ROWS = [
    {
        "index": i,
        "sample": j,
        "prompt": "p",
        "completion": "7" * j,
        "row": {"answer": {"$tuple": [i, 2]}},
        "token_ids": [1] * j,
    }
    for i in range(3)
    for j in range(3)
]


def scored(path, rows=ROWS, *, window=4, rewards=None, expected=None):
    judges = Judges(rewards=rewards or RewardSet([], functions=[digits]), model=None)
    with RowFile(path, command="score", identity={}, expected=expected or len(rows)) as sink:
        totals = score_rows(samples(rows, "rows"), judges, window=window, sink=sink, hooks=Hooks())
        sink.finish()
    return totals, [json.loads(line) for line in path.read_text().splitlines()]


def test_every_row_gets_its_reward_and_stays_as_it_was(tmp_path):
    totals, rows = scored(tmp_path / "out.jsonl")
    assert [{k: v for k, v in r.items() if k not in ("reward", "rewards")} for r in rows] == ROWS
    assert [r["reward"] for r in rows] == [0, 1, 2, 10, 11, 12, 0, 1, 2]
    assert rows[4]["rewards"] == {"digits": 11.0}
    assert totals.rows == 9 and totals.sum == 39


def test_a_file_cut_anywhere_is_completed(tmp_path):
    path = tmp_path / "out.jsonl"
    scored(path)
    whole = path.read_bytes()
    meta = tmp_path / "out.jsonl.meta.json"
    for cut in range(1, len(whole), 97):
        path.write_bytes(whole[:cut])
        meta.write_text(json.dumps(json.loads(meta.read_text()) | {"complete": False}))
        assert scored(path)[0].rows == 9 - whole[:cut].count(b"\n")
        assert sorted(path.read_bytes().splitlines()) == sorted(whole.splitlines())


def test_a_failing_reward_stops_or_leaves_a_row_without_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_digits.py").write_text(inspect.getsource(digits))
    rows = [r | {"completion": "bad"} if r["index"] == 1 and r["sample"] == 2 else r for r in ROWS]
    with raises(RewardError, "reward-failed: digits, row 6, raised ValueError: no digits"):
        scored(tmp_path / "out.jsonl", rows)
    assert (tmp_path / "out.jsonl").read_bytes().count(b"\n") == 4  # the window before
    config = RewardConfig(name="own_digits:digits", on_error="drop")
    rewards = RewardSet([config], functions=[])
    totals, out = scored(tmp_path / "drop.jsonl", rows, rewards=rewards)
    assert totals.failed == 1 and [r["reward"] for r in out].count(None) == 1 and out[5]["rewards"] is None


def test_rows_of_other_files_are_numbered_by_their_prompts():
    rows = [{"prompt": p, "completion": c, "answer": 1} for p, c in (("a", "x"), ("b", "y"), ("a", "z"))]
    found = list(samples(rows, "rows"))
    assert [(s.row["index"], s.row["sample"]) for s in found] == [(0, 0), (1, 0), (0, 1)]
    assert found[0].reward_input.row["answer"] == 1 and found[0].reward_input.prompt == "a"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt": "p"}, "missing-column: completion"),
        ({"prompt": 3, "completion": "c"}, "wrong-row: prompt"),
        ({"prompt": "p", "completion": None}, "wrong-row: prompt"),
        (ROWS[0], "wrong-row: index"),
        ({"prompt": "p", "completion": "c", "index": "x"}, "wrong-row: index"),
    ],
)
def test_rows_that_cannot_be_scored_are_told(bad, message):
    with raises(DataError, f"{message}, row 2"):
        list(samples([ROWS[0], bad], "rows"))


def test_a_reward_over_ids_needs_ids():
    (item,) = samples([{"prompt": "p", "completion": "c"}], "rows")
    config = ScoreConfig(rewards=(RewardConfig(name="ids"),))
    with raises(ConfigError, "missing-column: token_ids"):
        check_columns(config, item)
    with raises(ValueError, "missing-setting: rewards"):
        ScoreConfig()
