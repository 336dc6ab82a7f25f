"""What an instance replies to a job."""

from __future__ import annotations

import math
from datetime import date
from typing import Any

import numpy as np
import pytest

from lockstep.environments.author import EnvironmentClass
from lockstep.environments.instance import Instance, as_text, call_seed, cut
from lockstep.environments.zygote import _plain


def cyclic() -> list[Any]:
    values: list[Any] = [1]
    values.append(values)
    return values


def nested(depth: int) -> list[Any]:
    values: list[Any] = []
    for _ in range(depth):
        values = [values]
    return values


@pytest.mark.parametrize(
    "value, text",
    [
        ("as it is\n", "as it is\n"),
        (6, "6"),
        (None, "null"),
        (True, "true"),
        (math.nan, "NaN"),
        ([math.inf, {"ü": "x"}], '[Infinity, {"ü": "x"}]'),
        (nested(30), "[" * 31 + "]" * 31),
        (np.float64(0.5), "0.5"),
        (np.arange(3), "[0, 1, 2]"),
        ({"when": date(2026, 1, 2)}, '{"when": "2026-01-02"}'),
        (date(2026, 1, 2), "2026-01-02"),
        ({"b", "a"}, '["a", "b"]'),
        ("half \ud800", "half ?"),
        (cyclic(), None),
        (nested(100_000), None),
        ({(1, 2): 3}, None),
    ],
)
def test_what_the_policy_reads_of_a_result(value: Any, text: str | None) -> None:
    assert as_text(value) == text


def test_a_long_text_is_cut_and_marked() -> None:
    assert cut("abc", 3) == ("abc", False)
    assert cut("abcd", 3) == ("abc\n[cut: 4 characters in all, the first 3 are shown]", True)


def test_seeds_depend_on_sample_turn_and_call() -> None:
    seeds = {call_seed(sample, turn, call) for sample in range(4) for turn in range(4) for call in range(4)}
    assert len(seeds) == 64 and all(0 <= seed < 2**63 for seed in seeds)
    assert call_seed(7, 1, 2) == 2042751021739928460  # wherever it runs: replays depend on it


class Game:
    def reset(self, start: int, bonus: int = 2) -> tuple[str, dict[str, int]]:
        self.at = start + bonus
        return f"at {self.at}", {"info": 1}

    def step(self, action: str) -> Any:
        return {"3": ("a", 1, False), "4": ("b", 0.5, True, {}), "5": ("c", 0.0, False, True, {})}.get(
            action, ("d", math.nan, False) if action == "nan" else "d"
        )


def instance(made: type, row: dict[str, Any]) -> Any:
    found = Instance(EnvironmentClass.of(made, "m:E"), limit=100)

    def reply(**job: Any) -> Any:
        answer = _plain(found.reply(job))
        assert answer.pop("seconds") >= 0
        return answer

    assert reply(op="make", row=row, seed=1) == {"value": None}
    return reply


def test_gym_and_gymnasium() -> None:
    reply = instance(Game, {"start": 3, "other": 1})
    assert reply(op="reset") == {"value": "at 5", "truncated": False}
    for action, text, reward, done in (("3", "a", 1.0, False), ("4", "b", 0.5, True), ("5", "c", 0.0, True)):
        expected = {"value": text, "truncated": False, "reward": reward, "done": done}
        assert reply(op="step", action=action) == expected
    assert reply(op="step", action="nan")["kind"] == "wrong-result"
    assert reply(op="step", action="?")["kind"] == "wrong-result"
    assert reply(op="reward", trajectory={}) == {"value": None}


def test_a_row_without_what_reset_takes() -> None:
    reply = instance(Game, {"other": 1})(op="reset")
    assert reply["kind"] == "wrong-result"
    assert reply["problem"] == "reset takes start, which the row lacks; its columns: other"


class Rewarded:
    def reset(self, content: Any, **row: Any) -> Any:
        return [{"role": "system", "content": content}]

    def act(self) -> str:
        """Act."""
        raise ValueError("no\x1b")

    def _reward(self, trajectory: Any) -> Any:
        return trajectory["gives"]


@pytest.mark.parametrize(
    "gives, value",
    [(1, 1.0), ({"a": 1, "b": 0.5}, {"a": 1.0, "b": 0.5}), (None, None), (math.nan, "x"), ({"a": "x"}, "x")],
)
def test_rewards(gives: Any, value: Any) -> None:
    answer = instance(Rewarded, {"content": ""})(op="reward", trajectory={"gives": gives})
    assert answer.get("kind") == "wrong-result" if value == "x" else answer == {"value": value}


def test_messages_of_reset() -> None:
    assert instance(Rewarded, {"content": "hi"})(op="reset") == {
        "value": [{"role": "system", "content": "hi"}],
        "truncated": False,
    }
    assert instance(Rewarded, {"content": 3})(op="reset")["kind"] == "wrong-result"


def test_an_exception_is_told() -> None:
    answer = instance(Rewarded, {"content": ""})(op="call", name="act", arguments={})
    assert (answer["kind"], answer["problem"]) == ("raised", "raised ValueError: no\\x1b")
    assert 'raise ValueError("no\\x1b")' in answer["traceback"]
    answer = instance(Rewarded, {"content": ""})(op="call", name="act", arguments={"a": 1})
    assert answer["kind"] == "wrong-arguments"


def test_content_blocks_are_read_as_text() -> None:
    class Blocks:
        def reset(self) -> Any:
            return [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

        def image(self) -> Any:
            """Return an image."""
            return [{"type": "text", "text": "a"}, {"type": "image", "image": b""}]

        def rows(self) -> Any:
            """Return rows that have a type, too."""
            return [{"type": "image", "size": 3}]

    reply = instance(Blocks, {})
    assert reply(op="reset")["value"] == "ab"
    assert reply(op="call", name="image", arguments={})["kind"] == "wrong-result"
    assert reply(op="call", name="rows", arguments={})["value"] == '[{"type": "image", "size": 3}]'
