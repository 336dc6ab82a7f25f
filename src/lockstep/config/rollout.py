from __future__ import annotations

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from lockstep.config.base import Config


class SamplingConfig(Config):
    """How completions are sampled. Every field is explicit; nothing is merged in from
    generation_config.json."""

    max_tokens: PositiveInt = 128
    min_tokens: NonNegativeInt = 0
    temperature: float = Field(1.0, ge=0.0)
    """0 is greedy. Logprobs and the loss use the same temperature."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(-1, ge=-1)
    """-1: off."""
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    repetition_penalty: float = Field(1.0, gt=0.0)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    keep_stop: bool = True
    ignore_eos: bool = False

    @model_validator(mode="after")
    def _check(self) -> SamplingConfig:
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens = {self.min_tokens} exceeds max_tokens = {self.max_tokens}; lower min_tokens"
            )
        if self.top_k == 0:
            raise ValueError("top_k = 0 would leave no token; set -1 to turn it off")
        return self


class RolloutConfig(Config):
    """What one step samples: prompts_per_step prompts, group_size samples of each."""

    prompts_per_step: PositiveInt = 8
    group_size: PositiveInt = 8
    sampling: SamplingConfig = SamplingConfig()
    save: bool = True
    """Keep every rollout as JSONL under rollouts/."""


class RewardConfig(Config):
    """One reward; several are added up with their weights."""

    name: str = "verifier"
    """verifier (the task's own), math (math-verify against the answer column), ids (dense id-level
    reward), `length`,
    or `module:function`."""
    weight: float = 1.0
    on_error: str = Field("fail", pattern="^(fail|drop)$")
    """fail: the run stops and names the row; drop: the rollout leaves the step and is counted."""
    timeout_seconds: float = Field(60.0, gt=0)
    """For async functions and verifiers that may loop."""
    answer: str = Field("text", pattern="^(text|first_number|last_number|last_line|boxed|tags)$")
    """verifier: which part of the completion is handed to the task's verifier."""
    kwargs: dict[str, float | int | str | bool] = Field(default_factory=dict)
    """Extra keyword arguments of a `module:function`."""
