"""GRPO's family as explicit options under the published names.

An option left at None takes the published value of the chosen `name` (PUBLISHED below); `resolved()` fills
them in.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from lockstep.config.base import Config

PolicyAlgorithm = Literal[
    "grpo", "dr_grpo", "dapo", "rloo", "reinforce++", "reinforce++-baseline", "gspo", "cispo"
]
Advantage = Literal["group_mean_std", "group_mean", "leave_one_out", "batch_mean_std", "group_mean_batch_std"]
Aggregation = Literal["sequence_mean", "token_mean", "constant"]


class KLConfig(Config):
    """KL to the frozen reference. Coefficient 0: no reference is loaded."""

    coef: float = Field(0.0, ge=0.0)
    """Times KL, added to the loss or taken from the reward."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """k1 = -x, k2 = x^2 / 2, k3 = exp(x) - 1 - x, with x = ref - policy of the token."""
    place: Literal["loss", "reward"] = "loss"
    """reward: of the whole completion, before advantages."""


class RolloutCorrectionConfig(Config):
    """What corrects for an engine whose logprobs are not the trainer's: rollout_is_weight = exp(old -
    rollout)."""

    kind: Literal["none", "tis", "mask", "icepop"] = "none"
    """tis: truncated weight min(w, high). mask: tokens (sequences) with w > high are masked, else weighted by
    w. icepop: masked outside [low, high], else weighted by w."""
    level: Literal["token", "sequence"] = "token"
    """sequence: the weight of a whole completion, at each of its tokens."""
    low: float = Field(0.5, ge=0.0)
    """Lower bound of icepop."""
    high: float = Field(2.0, gt=0.0)
    """Upper bound of tis, mask and icepop."""

    @model_validator(mode="after")
    def _check(self) -> RolloutCorrectionConfig:
        if self.kind == "icepop" and self.low >= self.high:
            raise ValueError(f"low = {self.low} is not below high = {self.high}: every token would be masked")
        return self


class OverlongConfig(Config):
    """DAPO's soft overlong punishment: from max_tokens - buffer on, the reward falls linearly by penalty."""

    buffer_tokens: PositiveInt | None = None
    """None: a fifth of max_tokens, the published share (4,096 of 20,480)."""
    penalty: float = Field(1.0, ge=0.0)
    """What a completion of max_tokens loses."""


class GRPOConfig(Config):
    """A policy-gradient algorithm over groups of rollouts."""

    name: PolicyAlgorithm = "grpo"
    """Whose published values the options below take where they are left out."""
    advantage: Advantage | None = None
    """group_mean_std: (r - mean) / std of the group. group_mean: r - mean. leave_one_out: r - mean of the
    others. batch_mean_std: whitened over the trained tokens of the step. group_mean_batch_std: r - group
    mean, whitened likewise. Under these two, kl.place = 'reward' charges a token with its KL and what
    follows."""
    aggregation: Aggregation | None = None
    """sequence_mean: tokens are averaged per sequence, then sequences. token_mean: over all tokens of the
    step. constant: divided by sequences * max_tokens (Dr. GRPO)."""
    clip_low: float | None = Field(None, ge=0.0)
    """The ratio is clipped at 1 - clip_low."""
    clip_high: float | None = Field(None, ge=0.0)
    """The ratio is clipped at 1 + clip_high."""
    ratio: Literal["token", "sequence"] | None = None
    """Level of the importance_ratio; sequence is GSPO's length-normalised ratio."""
    objective: Literal["ppo_clip", "cispo"] | None = None
    """cispo: the clipped ratio is a detached weight, no token loses its gradient."""
    dynamic_sampling: bool | None = None
    """Groups whose rewards are all equal are replaced by newly sampled ones."""
    max_resample_rounds: PositiveInt = 10
    """dynamic_sampling: rounds of sampling before the run stops with an error."""
    overlong: OverlongConfig | None = None
    entropy_coef: float = 0.0
    """Times entropy, taken from the loss."""
    kl: KLConfig = KLConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()

    def resolved(self) -> GRPOConfig:
        """The same config with every option that was left at None set to the published value."""
        values: dict[str, Any] = self.model_dump()
        for key, value in PUBLISHED[self.name].items():
            if values[key] is None:
                values[key] = value
        return GRPOConfig.model_validate(values)


_GRPO: dict[str, Any] = {
    "advantage": "group_mean_std",
    "aggregation": "sequence_mean",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "ratio": "token",
    "objective": "ppo_clip",
    "dynamic_sampling": False,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "grpo": _GRPO,  # arXiv 2402.03300
    "dr_grpo": _GRPO | {"advantage": "group_mean", "aggregation": "constant"},  # arXiv 2503.20783
    "dapo": _GRPO
    | {  # arXiv 2503.14476
        "aggregation": "token_mean",
        "clip_high": 0.28,
        "dynamic_sampling": True,
        "overlong": {"penalty": 1.0},
    },
    "rloo": _GRPO | {"advantage": "leave_one_out"},  # arXiv 2402.14740
    "reinforce++": _GRPO | {"advantage": "batch_mean_std", "aggregation": "token_mean"},  # arXiv 2501.03262
    "reinforce++-baseline": _GRPO | {"advantage": "group_mean_batch_std", "aggregation": "token_mean"},
    "gspo": _GRPO | {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},  # arXiv 2507.18071
    "cispo": _GRPO
    | {  # arXiv 2506.13585: no lower clip, the upper bound is tuned
        "aggregation": "token_mean",
        "objective": "cispo",
        "clip_low": 1.0,
        "clip_high": 4.0,
    },
}


class SFTConfig(Config):
    """Supervised fine-tuning: cross-entropy of the labels, averaged over the step."""

    name: Literal["sft"] = "sft"
    """The only one."""
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """token_mean: over all trained tokens of the step. sequence_mean: per document, then over documents."""


class DPOConfig(Config):
    """Direct preference optimisation on pairs of answers."""

    name: Literal["dpo"] = "dpo"
    """The only one."""
    beta: PositiveFloat = 0.1
    """How much a nat of log(policy / ref) counts: a larger one keeps the policy nearer to the reference."""
    label_smoothing: float = Field(0.0, ge=0.0, lt=0.5)
    """Share of the pairs that are taken to be the wrong way round."""
