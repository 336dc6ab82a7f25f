"""What engines sample and are made for in tests, with what most of them do not look at filled in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.engine.spec import EngineSpec
from lockstep.schema.rollout import Completion, Prompt, Rollout, RolloutGroup, Trajectory


def completion(prompt: Sequence[int], tokens: Sequence[int], logprobs: Any = -1.0, **more: Any) -> Completion:
    """A sample of `tokens`; logprobs: of each, or one of all. `more`: other fields."""
    each = [logprobs] * len(tokens) if isinstance(logprobs, float) else logprobs
    unseen = {"finish_reason": "stop", "stop_reason": None, "text": None, "seed": 0, "engine": "test"}
    fields: dict[str, Any] = {**unseen, "policy_version": 0, **more}
    return Completion(prompt_token_ids=tuple(prompt), token_ids=tuple(tokens), logprobs=tuple(each), **fields)


def rollout(sampled: Completion, reward: float = 0.0, rewards: Mapping[str, float] | None = None) -> Rollout:
    """The rollout of one turn."""
    return Rollout(trajectory=Trajectory.of(sampled), reward=reward, rewards=rewards or {})


def group(rollouts: Sequence[Rollout], index: int = 0, **prompt: Any) -> RolloutGroup:
    """The rollouts of a prompt, whose ids are those that the first one begins with."""
    ids = rollouts[0].trajectory.spans[0].token_ids
    fields: dict[str, Any] = {"text": ""} | prompt
    return RolloutGroup(prompt=Prompt(index=index, token_ids=ids, **fields), rollouts=tuple(rollouts))


def engine_spec(**changes: Any) -> EngineSpec:
    """What an engine must know of a model that nobody reads."""
    fields: dict[str, Any] = {
        "folder": Path("/models/m"),
        "weights": "pushed",
        "model_name": "m",
        "dtype": "float32",
        "vocab_size": 100,
        "max_model_len": 64,
        "eos_token_ids": (2,),
        "tokenizer": None,
        "device": "cpu",
        "shares_device": False,
        "temperatures": frozenset({1.0}),
        "work_dir": Path("/run/engine"),
    }
    return EngineSpec(**fields | changes)
