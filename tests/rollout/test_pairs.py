from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from raising import raises

from lockstep.cli.select import main
from lockstep.errors import ConfigError, DataError
from lockstep.rollout.select import PairChoice, ends_in_number, select_pairs


def row(index: int, sample: int, reward: float | None, completion: str, **more: Any) -> dict[str, Any]:
    return {
        "index": index,
        "sample": sample,
        "prompt": "p",
        "completion": completion,
        "reward": reward,
        **more,
    }


ROWS = [
    row(0, 0, 1.0, "a long way to 12"),
    row(0, 1, 0.0, "13"),
    row(0, 2, 0.0, "a longer way to 9"),
    row(0, 3, 1.0, "12"),
    row(0, 4, 0.0, "nonsense"),
    row(1, 0, 1.0, "5"),
    row(1, 1, 1.0, "5."),
    row(2, 0, 0.25, "7", finish_reason="length"),
    row(2, 1, 0.0, "8"),
    row(2, 2, 0.0, "8"),
    row(2, 3, None, "9"),
    row(2, 4, 0.0, "  "),
]


def pairs(**choice: Any) -> list[tuple[str, str]]:
    found = select_pairs(ROWS, PairChoice(**choice), source="rows")
    return [(pair["chosen"], pair["rejected"]) for pair in found.rows]


def test_pairs_of_similar_length_worked_by_hand() -> None:
    assert pairs() == [("12", "13"), ("7", "8")]
    assert pairs(per_prompt=3) == [("12", "13"), ("a long way to 12", "a longer way to 9"), ("7", "8")]
    assert pairs(finished=True) == pairs(min_gap=0.5) == pairs(min_reward=0.5) == [("12", "13")]


def test_what_is_left_out_is_counted_by_its_first_reason() -> None:
    choice = PairChoice(per_prompt=2, ends_in_number=True, finished=True)
    found = select_pairs(ROWS, choice, source="rows")
    assert dict(found.left_out) == {
        "cut_off": 1,
        "duplicate": 1,
        "empty": 1,
        "failed": 1,
        "no_number": 1,
        "unpaired": 3,
    }
    assert (found.prompts, found.chosen_prompts, len(found.rows)) == (3, 1, 2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The answer is 42", True),
        ("1,234.50\n", True),
        ("**-3**.", True),
        ("$\\boxed{7}$", True),
        ("<answer>3/4</answer>", True),
        ("12%", True),
        ("x = 5)", True),
        ("1.2.3", False),
        ("1,23", False),
        ("B7", False),
        ("7 apples", False),
        ("", False),
        ("9" * 100_000, True),
        (") " * 100_000, False),
    ],
)
def test_a_number_at_the_end(text: str, expected: bool) -> None:
    assert ends_in_number(text) is expected


def test_one_reward_of_several_decides() -> None:
    rows = [
        row(0, 0, 0.5, "1", rewards={"verifier": 1.0, "length": -0.5}),
        row(0, 1, 0.9, "2", rewards={"verifier": 0.0, "length": 0.9}),
    ]
    found = select_pairs(rows, PairChoice(reward="verifier"), source="rows").rows
    assert [(p["chosen"], p["reward_chosen"], p["reward_rejected"]) for p in found] == [("1", 1.0, 0.0)]
    with raises(DataError, "missing-column: math, row 1"):
        select_pairs(rows, PairChoice(reward="math"), source="rows")


def test_rows_of_messages_become_messages() -> None:
    prompt = [{"role": "user", "content": "1 + 1?"}]
    rows = [{**row(0, i, float(i), str(i)), "prompt": prompt} for i in (0, 1)]
    (pair,) = select_pairs(rows, PairChoice(), source="rows").rows
    assert pair["prompt"] == prompt
    assert pair["chosen"] == [{"role": "assistant", "content": "1"}]
    assert pair["rejected"] == [{"role": "assistant", "content": "0"}]


@pytest.mark.parametrize(
    ("column", "what"),
    [
        ("reward", "missing-column: reward"),
        ("index", "wrong-row: index"),
        ("completion", "missing-column: prompt"),
        ("prompt", "missing-column: prompt"),
    ],
)
def test_rows_that_are_not_scored_samples_are_named(column: str, what: str) -> None:
    rows = [ROWS[0], {key: value for key, value in ROWS[1].items() if key != column}]
    with raises(DataError, f"{what}, row 2"):
        select_pairs(rows, PairChoice(), source="rows")


def test_the_rollouts_of_a_run_over_all_steps(tmp_path: Path) -> None:
    rollouts = tmp_path / "run" / "rollouts"
    rollouts.mkdir(parents=True)
    for step in (0, 1):
        lines = [
            {
                "step": step,
                "prompt_index": 3,
                "sample": i,
                "prompt": "p",
                "completion": f"{step}{i}",
                "reward": i,
            }
            for i in (0, 1)
        ]
        (rollouts / f"step-{step:06d}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (rollouts / "evaluation-after.jsonl").write_text("{}")
    out, result = tmp_path / "pairs.jsonl", tmp_path / "result.json"
    argv = ["--data", str(tmp_path / "run"), "--pairs", "4", "--ends-in-number", "--out", str(out)]
    assert main([*argv, "--json", str(result)]) == 0
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(p["chosen"], p["rejected"]) for p in written] == [("01", "00"), ("11", "10")]
    summary = json.loads(result.read_text())
    assert summary["pairs"] == 2 and summary["chosen_is_longer"] == 0.5
    assert (
        summary["train"].startswith("lockstep train dpo ") and "--data.chat-template none" in summary["train"]
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--pairs", "--unique"], "no-effect: --unique"),
        (["--top-k", "1", "--by", "verifier"], "no-effect: --by"),
        (["--top-k", "1", "--ends-in-number"], "no-effect: --ends-in-number"),
        (["--top-k", "1"], "wrong-kind-of-file: --data"),
    ],
)
def test_flags_without_effect_are_refused(more: list[str], message: str, tmp_path: Path) -> None:
    with raises(ConfigError, message):
        main(["--data", str(tmp_path), "--out", str(tmp_path / "o.jsonl"), *more])


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with raises(DataError, "wrong-kind-of-file: --data"):
        main(["--data", str(tmp_path), "--out", str(tmp_path / "o.jsonl"), "--pairs"])
