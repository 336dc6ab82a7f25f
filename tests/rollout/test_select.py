import pytest
from raising import raises

from lockstep.errors import ConfigError, DataError
from lockstep.rollout.select import Choice, select, sft_row


def row(index, sample, reward, completion=None, **more):
    text = f"{index}.{sample}" if completion is None else completion
    return {"index": index, "sample": sample, "prompt": "p", "completion": text, "reward": reward, **more}


ROWS = [
    row(1, 0, 0.5),
    row(0, 1, 1.0, "same"),
    row(0, 0, 1.0, "same"),
    row(0, 2, 2.0, finish_reason="length"),
    row(0, 3, None),
    row(1, 1, 0.25),
    row(1, 2, 0.5, "  "),
    row(2, 0, -1.0),
]


def chosen(**choice):
    found = select(ROWS, Choice(**choice), source="rows")
    return [(r["index"], r["sample"]) for r in found.rows], found


def test_selections_worked_by_hand():
    assert chosen(top_k=1)[0] == [(0, 2), (1, 0), (2, 0)]
    assert chosen(top_k=2)[0] == [(0, 2), (0, 0), (1, 0), (1, 1), (2, 0)]
    assert chosen(top_k=1, finished=True)[0] == [(0, 0), (1, 0), (2, 0)]
    assert chosen(top_k=3, unique=True)[0] == [(0, 2), (0, 0), (1, 0), (1, 1), (2, 0)]
    assert chosen(min_reward=0.5)[0] == [(0, 2), (0, 0), (0, 1), (1, 0)]
    assert chosen(min_reward=0.6, top_k=1, finished=True)[0] == [(0, 0)]


def test_what_is_left_out_is_counted_by_its_first_reason():
    found = chosen(min_reward=0.5, top_k=1, finished=True, unique=True)[1]
    assert dict(found.left_out) == {
        "below_min_reward": 2,
        "cut_off": 1,
        "duplicate": 1,
        "empty": 1,
        "failed": 1,
    }
    assert (found.prompts, found.chosen_prompts, len(found.rows)) == (3, 2, 2)
    assert dict(chosen(top_k=1)[1].left_out) == {"empty": 1, "failed": 1, "not_best": 3}


def test_rows_become_conversations_or_pairs():
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert sft_row(row(0, 1, 1.0, "a", prompt_text="x") | {"prompt": talk}) == {
        "prompt": talk,
        "completion": [{"role": "assistant", "content": "a"}],
        "index": 0,
        "sample": 1,
        "reward": 1.0,
    }
    assert sft_row(row(0, 1, 1.0, "a"))["prompt"] == "p" and sft_row(row(0, 1, 1.0, "a"))["completion"] == "a"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"index": 0, "sample": 0, "prompt": "p", "completion": "c"}, "missing-column: reward"),
        (row(0, 0, "1"), "wrong-row: reward"),
        (row(0, 0, True), "wrong-row: reward"),
        (row("0", 0, 1.0), "wrong-row: index"),
        (row(0, 0, 1.0) | {"completion": None}, "missing-column: prompt"),
    ],
)
def test_rows_that_cannot_be_judged_are_told(bad, message):
    with raises(DataError, f"{message}, row 2"):
        select([row(5, 0, 1.0), bad], Choice(top_k=1), source="rows")


def test_a_choice_says_something():
    with raises(ConfigError, "missing-setting"):
        Choice(finished=True)
    with raises(ConfigError, "out-of-range: --top-k"):
        Choice(top_k=0)
