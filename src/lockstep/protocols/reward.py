from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lockstep.schema.rollout import FinishReason


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardInput:
    """The input of a reward. A plain `module:function` gets the keyword arguments prompt, completion and row,
    or those of all samples of a prompt as lists; an instance of a class gets this record."""

    prompt: str
    completion: str
    row: Mapping[str, Any]
    prompt_token_ids: tuple[int, ...]
    completion_token_ids: tuple[int, ...]
    finish_reason: FinishReason
    index: int | None = None
    """Prompt.index."""
    where: str = ""
    """Prompt.where, which errors use to name the row."""
    conversation: str | Sequence[Mapping[str, Any]] | None = None
    """Prompt.conversation: the prompt before its chat template. None if the caller has none."""
    seed: int | None = None
    """A seed below 2**63 for this sample: the same in every run of the config, after a resume, and on any
    number of ranks. None if the caller has none."""


class RewardFunction(Protocol):
    """One finite float per completion; sync or async."""

    def __call__(self, sample: RewardInput, /) -> float | Awaitable[float]: ...
