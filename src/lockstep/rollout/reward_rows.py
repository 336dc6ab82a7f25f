"""What the verifiers among the rewards need of a row. Imports nothing large: a start is refused by it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from lockstep.config.rollout import RewardConfig
from lockstep.errors import ConfigError
from lockstep.observe.text import printable


def check_row(config: RewardConfig, row: Mapping[str, Any]) -> None:
    """Check that a row has what the reward compares an answer with; only `verifier` and `math` need anything.

    Raises:
        ConfigError: the reward cannot score such rows, whatever the policy answers.
    """
    if config.name == "verifier" and not str(row.get("verifier", "")).startswith("reasoning_gym:"):
        raise ConfigError(
            "missing-column: reward 'verifier', which is the default, scores rows of data.source = "
            f"'reasoning_gym:TASK', and these are not such (columns: {_columns(row)}). Set rewards: 'math' "
            "compares with the column 'answer' (or data.answer_column), 'module:function' is a function of "
            "yours",
            setting="rewards",
            name="verifier",
        )
    if config.name == "math" and "answer" not in row:
        raise ConfigError(
            "missing-column: reward 'math' compares with the column 'answer', which is not among the "
            f"columns ({_columns(row)}); set data.answer_column to the column that has the answers",
            setting="data.answer_column",
            name="answer",
        )


def _columns(row: Mapping[str, Any]) -> str:
    return ", ".join(printable(name[:80]) for name in islice(row, 40))
