"""Settings of the commands that work on files of samples: `lockstep generate` and `lockstep score`."""

from __future__ import annotations

from typing import ClassVar, Literal

from lockstep.config.base import Config, Name, NonNegativeInt, PositiveInt, Seed, check
from lockstep.config.data import DataConfig
from lockstep.config.engine import EngineConfig
from lockstep.config.model import Dtype, ModelConfig
from lockstep.config.rollout import RewardConfig, SamplingConfig
from lockstep.config.rules import refuse
from lockstep.errors import ConfigError

Column = Literal["prompt_token_ids", "token_ids", "logprobs"]


class GenerateConfig(Config):
    """Generate samples for many prompts and write them to a file."""

    section: ClassVar[str | None] = ""

    seed: Seed = 0
    """Seed for the samples, and for the order of the prompts if data.shuffle is on."""
    n: PositiveInt = 1
    """Number of samples per prompt: the n of best-of-n."""
    max_samples: PositiveInt | None = None
    """Maximum number of prompts to use, starting with the first. Data without an end needs this, iteration or
    data.size."""
    rollout_batch_size: PositiveInt = 64
    """Number of prompts that are in the engine at a time."""
    iteration: NonNegativeInt | None = None
    """Use only rollout batch number ITERATION, as iterated rejection sampling does between two updates of the
    model. Batches count from 0, and start over at the end of the data. If unset, all prompts are used."""
    columns: tuple[Column, ...] = ("token_ids",)
    """Columns of numbers to write in addition to the texts: prompt_token_ids, token_ids (of the completion)
    and logprobs."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig(shuffle=False)
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()

    @check
    def _check(self) -> GenerateConfig:
        refuse(self, "generate")
        return self


class RewardModelConfig(Config):
    """A sequence classifier with one label, whose logit is the reward."""

    name: Name
    """A hub name or a folder that AutoModelForSequenceClassification can read. Code that comes with a model
    is never executed."""
    revision: Name | None = None
    """Hub revision: branch, tag or commit."""
    dtype: Dtype | Literal["auto"] = "auto"
    """auto: bfloat16 if the device has fast bfloat16, else float32."""
    token_budget: PositiveInt = 8192
    """Maximum number of tokens in one forward pass, including padding."""
    max_length: PositiveInt | None = None
    """Maximum length of prompt plus completion, in tokens. If unset, the model's own limit applies."""
    overlong: Literal["error", "truncate_left"] = "error"
    """What to do with a conversation longer than max_length. Truncations are counted."""
    chat_template: Literal["auto", "none"] | str = "auto"
    """A jinja template, or one of these words: auto (the reward model's own template if it has one) or none
    (prompt and completion as plain text)."""
    weight: float = 1.0
    """Weight of the logit in the total reward."""


class RewardRoleConfig(RewardModelConfig):
    """One or more reward models of an RL run. They score every rollout, as `lockstep score` does, in addition
    to `rewards`; with `rewards = []` they are the only reward."""

    others: tuple[Name, ...] = ()
    """Folders or hub names of more models, which form an ensemble and have the same settings. Each model has
    its own tokenizer and chat template."""
    aggregation: Literal["mean", "min"] = "mean"
    """How the scores of an ensemble are combined; min is the more conservative choice (arXiv 2310.02743)."""

    @property
    def sources(self) -> list[tuple[str, str | None]]:
        """Name and revision of every model."""
        return [(self.name, self.revision), *((name, None) for name in self.others)]

    @check
    def _check_ensemble(self) -> RewardRoleConfig:
        names = [self.name, *self.others]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(
                f"duplicate: others: {twice!r} is named twice; an ensemble's models must differ"
            )
        refuse(self, "reward_model")
        return self


class ScoreConfig(Config):
    """Score the samples in a file."""

    rewards: tuple[RewardConfig, ...] = ()
    """Reward functions and verifiers, as in a training run."""
    reward_model: RewardModelConfig | None = None
    window: PositiveInt = 512
    """Number of rows that are scored and written together. Within a window, a reward model sorts them by
    length."""

    @check
    def _check(self) -> ScoreConfig:
        refuse(self, "score")
        return self
