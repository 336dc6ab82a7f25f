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
    """How completions are sampled. Only these settings count; nothing is merged in from
    generation_config.json."""

    max_tokens: PositiveInt = 128
    """Maximum length of a completion, in tokens."""
    min_tokens: NonNegativeInt = 0
    """Minimum length of a completion, in tokens: before that, no stop id is sampled and no stop string ends
    the completion."""
    temperature: Temperature = 1.0
    """Sampling temperature; 0 is greedy. Logprobs and the loss use the same temperature."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Nucleus sampling: sample from the smallest set of most likely tokens with at least this total
    probability; 1 turns it off."""
    top_k: int = Field(-1, ge=-1, lt=2**31)
    """Sample only from this many most likely tokens; -1 turns it off."""
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    """Minimum probability of a token relative to the most likely token; 0 turns it off."""
    repetition_penalty: float = Field(1.0, gt=0.0)
    """For tokens that occur in the prompt or the completion, divide positive logits and multiply negative
    logits by this; 1 turns it off."""
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    """Amount subtracted from the logit of every token that occurs in the completion; 0 turns it off."""
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    """Amount subtracted from a token's logit for each time it occurs in the completion; 0 turns it off."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion."""
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    """Token ids that end a completion, in addition to end of sequence."""
    keep_stop: bool = True
    """Keep the stop string in the text; the token ids always include it."""
    ignore_eos: bool = False
    """Continue after the end-of-sequence token."""
    skip_special_tokens: bool = False
    """Leave special tokens, such as <think> in many models, out of the completion's text, which rewards, stop
    strings and files use. The end-of-sequence token is always left out."""

    @property
    def can_end(self) -> bool:
        """Whether a completion can end before max_tokens."""
        return bool(self.stop or self.stop_token_ids or not self.ignore_eos)

    @check
    def _check(self) -> SamplingConfig:
        refuse(self, "rollout.sampling")
        return self


class RolloutConfig(Config):
    """Samples per step: prompts_per_step prompts with group_size samples each."""

    prompts_per_step: PositiveInt = 8
    """Prompts per rollout batch."""
    group_size: PositiveInt = 8
    """Samples per prompt."""
    sampling: SamplingConfig = SamplingConfig()
    max_turns: PositiveInt = 8
    """Environments of several turns: maximum number of turns of the policy in a trajectory."""
    max_trajectory_tokens: PositiveInt | None = None
    """Environments of several turns: maximum length of a trajectory after its prompt, in tokens: all turns of
    the policy and all replies. sampling.max_tokens then limits each turn. If unset, sampling.max_tokens
    limits all turns and replies together."""
    wait_seconds: Seconds = 600.0
    """Environments of several turns: deadline in seconds for what an environment does between two turns."""
    max_lag: int = Field(0, ge=0, le=64)
    """Maximum number of steps between the weights that sampled a rollout's first token and those that are
    trained on it. Above 0, the prompts of the next max_lag steps are sampled along with those of the step:
    generation ends when the step's own rollouts have ended, and the others go on in the next step, with its
    weights. With engine.process = "separate" they are sampled while the trainer works, too
    (docs/explanation/async.md). 0: every step samples its rollouts from beginning to end."""
    schedule: Literal["free", "fixed"] = "free"
    """max_lag with engine.process = "separate": when the engine adopts new weights. free: as soon as they are
    there. fixed: at a moment that is counted in sampled tokens, for which engine and trainer wait, so that
    the same run twice has the same bits; needs train.batch_invariant."""
    slots: PositiveInt | None = None
    """schedule = "fixed": number of rollouts that count as sampled at the same time, on each engine; another
    number is another run. If unset, engine.max_batch."""
    save: bool = True
    """Keep every rollout as JSONL under rollouts/."""

    @property
    def trajectory_tokens(self) -> int:
        """Most tokens of a trajectory after its prompt."""
        return self.max_trajectory_tokens or self.sampling.max_tokens

    @property
    def length_setting(self) -> str:
        """Which setting decides that."""
        return "rollout." + ("max_trajectory_tokens" if self.max_trajectory_tokens else "sampling.max_tokens")

    @check
    def _check_lengths(self) -> RolloutConfig:
        refuse(self, "rollout")
        return self

    @property
    def samples(self) -> int:
        """Samples of a step."""
        return self.prompts_per_step * self.group_size


BUILTIN_REWARDS = ("format", "http", "ids", "length", "math", "verifier")
"""Values of `rewards.name` besides `module:attribute`."""


class RewardConfig(Config):
    """One reward. Several rewards are added up with their weights."""

    name: Name = "verifier"
    """verifier: the task's own verifier, in [0, 1]. math: math-verify with the row's answer, 0 or 1. ids:
    fraction of the completion's ids that are even (for models without a tokenizer). length: -|tokens -
    target| / target, with kwargs {target}. format: 1 if the regular expression in kwargs {pattern} is found,
    else 0. http: a service at `url`. `module:attribute`: a function, sync or async, that is called with the
    keyword arguments prompt, completion and row, and with kwargs; or one with a parameter `completions`,
    which as in TRL is called as f(prompts, completions, **columns), here with the samples of one prompt; or a
    class that is created with kwargs and whose instances are called with one RewardInput. The module may be
    in the working directory; it is imported in a separate process."""
    weight: float = 1.0
    """Weight of this reward in the total."""
    on_error: Literal["fail", "drop"] = "fail"
    """What to do if a reward raises, times out or returns anything but a finite number. fail: stop the run
    with an error that names the row and the exception. drop: drop the rollout and count it. An answer that a
    verifier cannot parse does not count as an error: it scores 0 and is counted as junk."""
    timeout_seconds: Seconds = 60.0
    """Deadline in seconds of one call (http: of one attempt). A verifier that misses the deadline is killed,
    and the answer scores 0. For any other reward, the process is killed and on_error applies."""
    max_concurrency: PositiveInt = 64
    """Async functions and http: maximum number of concurrent calls."""
    url: Name | None = None
    """http: address (http:// or https://) to which samples are sent; docs/how-to/own-reward.md describes the
    protocol."""
    token_env: Variable | None = None
    """http: name of the environment variable with the token that is sent as `Authorization: Bearer TOKEN`."""
    batch_size: PositiveInt = 64
    """http: maximum number of samples per request."""
    retries: int = Field(2, ge=0, le=20)
    """http: how often to retry a request after a timeout or a status such as 503."""
    answer: Literal["text", "first_number", "last_number", "last_line", "boxed", "tags"] = "text"
    """verifier and math: the part of the completion that is the answer; tags means the last
    <answer>...</answer>. Completions without such a part score 0 and are counted."""
    allow_unsandboxed: tuple[Name, ...] = ()
    """verifier: reasoning_gym tasks, such as "countdown", that may evaluate completions without a sandbox if
    the kernel of the machine offers none (see `lockstep doctor`). On other machines these tasks are still
    sandboxed."""
    kwargs: dict[str, float | int | str | bool] = Field(default_factory=dict)
    """length, format and `module:attribute`: keyword arguments of the reward."""
    secrets: dict[str, SecretPlace] = Field(default_factory=dict)
    """`module:attribute`: additional keyword arguments, each with the location of its value: env:VARIABLE, or
    file:/absolute/path of a file with mode 0600. The values never appear in files, logs or errors."""

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
