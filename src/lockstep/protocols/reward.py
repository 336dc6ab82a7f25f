from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from lockstep.schema.rollout import FinishReason


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardInput:
    """What a reward may look at. `lockstep.rollout.rewards` calls it with keyword arguments prompt,
    completion, row for a plain `module:function`, and with this record for a class."""

    prompt: str
    completion: str
    row: Mapping[str, Any]
    prompt_token_ids: tuple[int, ...]
    completion_token_ids: tuple[int, ...]
    finish_reason: FinishReason
    index: int | None = None
    """Prompt.index: how an error names the row."""


class RewardFunction(Protocol):
    """One finite float per completion; sync or async."""

    def __call__(self, sample: RewardInput, /) -> float | Awaitable[float]: ...
