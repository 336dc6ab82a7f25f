"""PPO: the policy-gradient run with a value model, and the settings of both."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from lockstep.config.algorithm import GRPOConfig, KLConfig
from lockstep.config.base import PositiveInt, check
from lockstep.config.rules import refuse
from lockstep.config.run import GRPORun, Role
from lockstep.config.support import check_backend
from lockstep.config.value import POLICY as POLICY
from lockstep.config.value import ValueConfig as ValueConfig
from lockstep.errors import ConfigError


class PPOKLConfig(KLConfig):
    """KL penalty against the frozen reference. If coef is 0, no reference is loaded."""

    place: Literal["loss", "reward"] = "reward"
    """reward: each token's own KL is subtracted from its reward, as in OpenRLHF and TRL. loss: as in GRPO;
    verl's use_kl_loss."""
    target: PositiveFloat | None = None
    """Target for the KL of a whole completion, in nats. After each rollout batch `coef` is adapted towards
    the target, starting from its set value. arXiv 1909.08593 uses 6. If unset, `coef` is not adapted."""
    horizon: PositiveInt = 10_000
    """Number of rollouts over which `target` is approached: per rollout batch, coef changes by at most a
    fraction of 0.2 * rollouts / horizon. arXiv 1909.08593, verl, OpenRLHF and TRL use 10,000."""

    @check
    def _check_target(self) -> PPOKLConfig:
        refuse(self, "algorithm.kl (ppo)")
        return self


class PPOConfig(GRPOConfig):
    """PPO: the options of the policy's loss, and how advantages are computed from rewards and values."""

    name: Literal["ppo"] = "ppo"
    """The only allowed value."""
    advantage: Literal["gae"] | None = None
    """gae: generalised advantage estimation over the tokens that the policy wrote."""
    gamma: float = Field(1.0, ge=0.0, le=1.0)
    """Discount per token of the policy. verl, OpenRLHF and TRL use 1."""
    lam: float = Field(1.0, ge=0.0, le=1.0)
    """Lambda of the advantages: 1 relies on the rewards, and lower values rely more on the value model. verl
    and OpenRLHF use 1, TRL uses 0.95."""
    lam_length_alpha: PositiveFloat | None = None
    """Replace `lam` by 1 - 1 / (alpha * n), at least 0, for a rollout with n tokens of the policy, where
    alpha is this setting. Lambda grows with n, so the reward of a long rollout reaches its early tokens, too.
    VAPO uses 0.05 (arXiv 2504.05118, section 4.2). If unset, `lam` is used."""
    lam_value: float | None = Field(None, ge=0.0, le=1.0)
    """Lambda of the returns that are the targets of the value model. VAPO uses 1. If unset, `lam` is used."""
    bootstrap_truncated: bool = False
    """If max_tokens cut off a rollout, use the value model's estimate for what would have followed its last
    token. If false, as in verl, OpenRLHF and TRL, the rollout counts as ended, with value 0."""
    normalize_rewards: bool = False
    """Shift and scale rewards by the mean and standard deviation of all rollouts of the run so far, which are
    saved in checkpoints. OpenRLHF uses statistics of the reward model's training set instead."""
    reward_clip: tuple[float, float] | None = None
    """Bounds for rewards, applied after normalize_rewards. OpenRLHF uses (-10, 10). If unset, rewards are not
    bounded."""
    missing_end_penalty: NonNegativeFloat = 0.0
    """Amount subtracted from the reward of a rollout that max_tokens cut off; TRL's missing_eos_penalty."""
    kl: PPOKLConfig = PPOKLConfig()
    whiten_advantages: bool = True
    """Shift and scale advantages to mean 0 and standard deviation 1 over the tokens of the rollout batch, as
    verl, OpenRLHF and TRL do."""

    @check
    def _check_estimates(self) -> PPOConfig:
        refuse(self, "algorithm (ppo)")
        return self


class PPORun(GRPORun):
    """PPO on prompts, with rewards and a value model."""

    kind: Literal["ppo"] = "ppo"  # type: ignore[assignment]
    algorithm: PPOConfig = PPOConfig()
    value: ValueConfig = ValueConfig()

    @property
    def roles(self) -> tuple[Role, ...]:
        """The models of the run that have memory of their own."""
        return (*super().roles, "value")

    @property
    def model_names(self) -> dict[str, str]:
        """See RunConfig."""
        own = {} if self.value.name == POLICY else {"value.name": self.value.name}
        return super().model_names | own

    @property
    def policy_steps(self) -> int:
        """See RunConfig: all but those of the value model's warm-up."""
        return self.steps - self.value.warmup_batches

    @property
    def schedules(self) -> frozenset[str]:
        """See RunConfig."""
        return super().schedules | {self.value.train(self.train).schedule}

    @property
    def critic(self) -> ValueConfig:
        """See RunConfig."""
        return self.value

    @check
    def _check_value(self) -> PPORun:
        samples = self.rollout.samples
        train = self.value.train(self.train)
        if samples % train.minibatches:
            raise ConfigError(
                f"not-divisible: value.minibatches = {train.minibatches} does not divide the {samples} "
                "rollouts of a step (rollout.prompts_per_step * rollout.group_size)"
            )
        refuse(self, "run (ppo)")
        lora = self.value.lora
        try:
            check_backend(train, lora=lora is not None, lora_dropout=0.0 if lora is None else lora.dropout)
        except ConfigError as error:
            raise error.with_message(f"value model: {error}") from error
        return self
