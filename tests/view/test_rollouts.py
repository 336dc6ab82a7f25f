"""Rows of rollouts/ as records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from raising import raises

from lockstep.errors import ConfigError
from lockstep.view.rollouts import RolloutQuery, Token, rollout

ROW: dict[str, Any] = {
    "step": 3,
    "prompt_index": 24,
    "sample": 1,
    "prompt": "question",
    "completion": "the answer",
    "prompt_token_ids": [1, 2],
    "token_ids": [7, 8, 9, 10],
    "rollout_logprobs": [-0.5, -1.25, -2.0],
    "policy_logprobs": [-0.5, -1.0, -2.5],
    "entropies": [0.1, 0.2, 0.3],
    "advantages": [1.0, 1.0, 2.5],
    "spans": [["policy", 2], ["tool", 1], ["policy", 1]],
    "finish_reason": "length",
    "reward": 0.75,
    "rewards": {"ids": 0.75, "shape": "NaN"},
    "seed": 11,
    "policy_version": 3,
}


def spell(ids: Sequence[int]) -> list[str]:
    return [f"<{id}>" for id in ids]


def test_a_trajectory_that_goes_on_in_another_context() -> None:
    one = rollout({**ROW, "spans": [["policy", 2], ["prompt", 30], ["tool", 1], ["policy", 1]]}, pieces=spell)
    assert [(span.author, span.token_ids) for span in one.spans[1:]] == [
        *(("policy", (7, 8)), ("prompt", ()), ("tool", (9,)), ("policy", (10,)))
    ]
    assert one.spans[2].text == "[another context of 30 tokens]"


def test_turns_tokens_and_token_details() -> None:
    one = rollout(ROW, pieces=spell)
    assert one.id == "3/24/1" and (one.length, one.finish_reason, one.version) == (4, "length", 3)
    spans = [(span.author, span.text, span.token_ids) for span in one.spans]
    assert spans == [
        ("prompt", "question", (1, 2)),
        ("policy", "<7><8>", (7, 8)),
        ("tool", "<9>", (9,)),
        ("policy", "the answer", (10,)),
    ]
    assert (one.gap, one.advantage, one.gaps) == (0.5, 1.5, (0.0, 0.25, -0.5))
    expected = Token(id=10, text="<10>", logprob=-2.0, gap=-0.5, entropy=0.3, advantage=2.5)
    assert one.tokens(2) == [expected] and one.tokens(1, 1)[0].id == 8 and len(one.tokens()) == 3


def test_a_plain_row_has_no_details() -> None:
    names = ("policy_logprobs", "entropies", "advantages", "spans")
    one = rollout({name: value for name, value in ROW.items() if name not in names})
    assert (one.gap, one.advantage) == (None, None)
    assert one.tokens(0, 1) == [Token(id=7, text=None, logprob=-0.5, gap=None, entropy=None, advantage=None)]
    assert [token.logprob for token in one.tokens()] == [-0.5, -1.25, -2.0, None]  # one is missing


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("step", True, "step is True, not an integer"),
        ("sample", None, "sample is None"),
        ("token_ids", [1, "2"], "token_ids is not a list of integers"),
        ("rollout_logprobs", "text", "rollout_logprobs is not a list"),
        ("policy_logprobs", [-0.5], "policy_logprobs has 1 numbers, rollout_logprobs 3"),
        ("reward", "high", "reward is 'high', not a number"),
        ("rewards", [1], "rewards is not an object"),
        ("completion", 5, "completion is int, not text"),
        ("spans", [["policy", 3]], "spans covers 3 of 4 tokens"),
        ("spans", [["policy", 4], ["tool", -4], ["policy", 4]], "spans has -4 tokens"),
    ],
)
def test_a_row_that_no_run_writes_is_refused(field: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        rollout({**ROW, field: value})


def test_a_page_has_limits() -> None:
    with raises(ConfigError, "out-of-range: offset 0, limit 101"):
        RolloutQuery(limit=101)
    with raises(ConfigError, "out-of-range"):
        RolloutQuery(offset=-1)
