from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field

from lockstep.common_errors import no_effect
from lockstep.config.base import (
    Config,
    Name,
    NonNegativeInt,
    PositiveInt,
    Seconds,
    SecretPlace,
    Temperature,
    Variable,
    check,
)
from lockstep.config.rules import refuse
from lockstep.errors import ConfigError


class SamplingConfig(Config):
    """How completions are sampled. Every field is explicit; nothing is merged in from
    generation_config.json."""

    max_tokens: PositiveInt = 128
    """Longest completion, in tokens."""
    min_tokens: NonNegativeInt = 0
    """Until this many tokens, no stop id is sampled and no stop string ends a completion."""
    temperature: Temperature = 1.0
    """Sampling temperature; 0 is greedy. Logprobs and the loss use the same temperature."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Nucleus sampling: smallest set of tokens with at least this probability; 1: off."""
    top_k: int = Field(-1, ge=-1, lt=2**31)
    """Number of most likely tokens to sample from; -1: off."""
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    """Least probability relative to the most likely token; 0: off."""
    repetition_penalty: float = Field(1.0, gt=0.0)
    """Divides positive and multiplies negative logits of tokens in prompt or completion; 1: off."""
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    """Subtracted from the logit of every token that occurs in the completion; 0: off."""
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    """Subtracted from a token's logit for each occurrence in the completion; 0: off."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion."""
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    """Token ids that end a completion, besides end of sequence."""
    keep_stop: bool = True
    """Whether the text keeps the stop string. The token ids always keep it."""
    ignore_eos: bool = False
    """Continue after end of sequence."""
    skip_special_tokens: bool = False
    """Whether the text of a completion, which rewards, stop strings and files get, leaves out special tokens,
    such as <think> in many models. The end-of-sequence token is never in it."""

    @property
    def can_end(self) -> bool:
        """Whether a completion can end before max_tokens."""
        return bool(self.stop or self.stop_token_ids or not self.ignore_eos)

    @check
    def _check(self) -> SamplingConfig:
        refuse(self, "rollout.sampling")
        return self


class RolloutConfig(Config):
    """How much a step samples: prompts_per_step prompts with group_size samples each."""

    prompts_per_step: PositiveInt = 8
    """Prompts per rollout batch."""
    group_size: PositiveInt = 8
    """Samples per prompt."""
    sampling: SamplingConfig = SamplingConfig()
    save: bool = True
    """Keep every rollout as JSONL under rollouts/."""

    @property
    def samples(self) -> int:
        """Samples of a step."""
        return self.prompts_per_step * self.group_size


BUILTIN_REWARDS = ("format", "http", "ids", "length", "math", "verifier")
"""What `rewards.name` may be besides `module:attribute`."""


class RewardConfig(Config):
    """One reward. Several rewards are summed with their weights."""

    name: Name = "verifier"
    """verifier: the task's own, in [0, 1]. math: math-verify against the row's answer, 0 or 1. ids: share of
    even completion ids (for models without a tokenizer). length: -|tokens - target| / target, kwargs
    {target}. format: 1 where the regular expression kwargs {pattern} is found, else 0. http: a service at
    `url`. Or `module:attribute`: a function, sync or async, called with keyword arguments prompt, completion,
    row and kwargs; or a class, made with kwargs, whose instances take one RewardInput. The module may be in
    the working directory; it is imported in a separate process."""
    weight: float = 1.0
    """Weight of this reward in the total."""
    on_error: Literal["fail", "drop"] = "fail"
    """What happens if a reward raises, times out or returns anything but a finite number. fail: the run stops
    and names the row and the exception. drop: the rollout is dropped and counted. An answer that a verifier
    cannot parse does not count as an error: it scores 0 and is counted as junk."""
    timeout_seconds: Seconds = 60.0
    """Deadline of one call; http: of one attempt. A verifier that misses it is killed, and the answer scores
    0; the process of any other reward is killed, and on_error applies."""
    max_concurrency: PositiveInt = 64
    """Async functions, http: maximum number of concurrent calls."""
    url: Name | None = None
    """http: the address that samples are sent to, http://... or https://...; the protocol is in
    docs/how-to/own-reward.md."""
    token_env: Variable | None = None
    """http: the environment variable with the token that is sent as `Authorization: Bearer TOKEN`."""
    batch_size: PositiveInt = 64
    """http: maximum number of samples per request."""
    retries: int = Field(2, ge=0, le=20)
    """http: how often a request is retried after a timeout or a status such as 503."""
    answer: Literal["text", "first_number", "last_number", "last_line", "boxed", "tags"] = "text"
    """verifier, math: which part of the completion is the answer; tags is the last <answer>...</answer>. A
    completion without that part scores 0 and is counted."""
    allow_unsandboxed: tuple[Name, ...] = ()
    """verifier: reasoning_gym tasks, such as "countdown", that may evaluate completions on a machine whose
    kernel offers no sandbox (see `lockstep doctor`). On other machines they are still sandboxed."""
    kwargs: dict[str, float | int | str | bool] = Field(default_factory=dict)
    """Keyword arguments of length, format and `module:attribute`."""
    secrets: dict[str, SecretPlace] = Field(default_factory=dict)
    """`module:attribute`: additional keyword arguments, each with the location of its value: env:VARIABLE, or
    file:/absolute/path of a file of mode 0600. The values appear in no file, log or error."""

    @check
    def _check_secret_arguments(self) -> RewardConfig:
        refuse(self, "rewards")
        if both := self.secrets.keys() & self.kwargs.keys():
            raise ConfigError(
                f"duplicate: {min(both)!r} is in both kwargs and secrets; remove it from one of them",
                setting="secrets",
            )
        return self

    @check
    def _check_service(self) -> RewardConfig:
        if self.name != "http":
            for option in ("url", "token_env"):
                if getattr(self, option) is not None:
                    why = f"with name = {self.name!r}"
                    raise no_effect(
                        option, getattr(self, option), why, fix="set name = 'http', or leave it out"
                    )
            return self
        refuse(self, "rewards (http)")
        parts = urlsplit(self.url)
        try:
            usable = bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable or parts.username is not None or parts.fragment:
            raise ConfigError(
                "wrong-format: url is not of the form http://HOST:PORT/PATH (a user name and a # are not "
                "allowed); put a token into the variable that token_env names"
            )
        return self
