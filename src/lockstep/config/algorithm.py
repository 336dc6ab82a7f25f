"""GRPO's family as explicit options under the published names.

An option left at None takes the published value of the chosen `name` (PUBLISHED below); `resolved()` fills
them in.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, PositiveFloat, field_validator

from lockstep.common_errors import no_effect
from lockstep.config.base import Config, OneOf, PositiveInt, check
from lockstep.config.rules import refuse
from lockstep.errors import ConfigError

ALGORITHM_NAMES = (
    *("grpo", "dr_grpo", "dapo", "rloo", "reinforce++", "reinforce++-baseline"),
    *("gspo", "gspo_token", "cispo", "sapo"),
)
PER_GROUP = ("group_mean_std", "group_mean", "group_mean_step_std", "leave_one_out")
"""Advantage estimators of rewards [G, n]: one advantage per rollout."""
PER_STEP = ("batch_mean_std", "group_mean_batch_std")
"""Those that whiten over the trained tokens of a step."""
OBJECTIVES = ("ppo_clip", "cispo", "sapo")
_NO_TAU = dict.fromkeys(("tau_pos", "tau_neg"), "has no temperature")
UNREAD: dict[str, dict[str, str]] = {
    "ppo_clip": _NO_TAU,
    "cispo": _NO_TAU | {"dual_clip": "bounds the ratio by clip_high, whatever the advantage is"},
    "sapo": dict.fromkeys(("clip_low", "clip_high", "dual_clip"), "has temperatures instead of bounds"),
}
"""objective -> option that has no effect under it -> why."""

PolicyAlgorithm = Annotated[str, AfterValidator(OneOf("algorithm", ALGORITHM_NAMES))]
Advantage = Annotated[str, AfterValidator(OneOf("advantage estimator", (*PER_GROUP, *PER_STEP)))]
Objective = Annotated[str, AfterValidator(OneOf("objective", OBJECTIVES))]
Aggregation = Literal["sequence_mean", "sequence_sum", "token_mean", "constant"]

NO_PENALTY = {
    ("reward", "k2"): "the gradient of k2 as a reward is not that of a KL divergence",
    (
        "reward",
        "k3",
    ): "the expected gradient of k3 as a reward is that of KL(policy || ref) - KL(ref || policy), "
    "which can raise the KL",
    ("loss", "k1"): "the expected gradient of k1 in the loss is 0",
}
"""(place, estimator) -> why it holds the policy to no reference. The gradients of all are in
lockstep.ops.losses."""


class KLConfig(Config):
    """KL penalty against the frozen reference. If coef is 0, no reference is loaded."""

    coef: float = Field(0.0, ge=0.0)
    """Factor by which the KL is multiplied before it is added to the loss or subtracted from the reward."""
    estimator: Literal["k1", "k2", "k3"] | None = None
    """k1 = -x, k2 = x^2 / 2, k3 = exp(x) - 1 - x, where x is the token's logprob under the reference minus
    that under the policy. If unset, k1 is used in the reward and k3 in the loss. In the loss, k1 is refused,
    and in the reward k2 and k3 are, because they do not penalise the KL there."""
    place: Literal["loss", "reward"] = "loss"
    """loss: the KL is added per token. reward: the KL of the whole completion is subtracted before advantages
    are computed."""
    max_nats: PositiveFloat = 10.0
    """Upper bound for k3 of a token; beyond it, k3 has no gradient. verl and OpenRLHF use 10. TRL has no such
    bound; 1e9 has the same effect here. x is clamped to 20 nats in both directions."""

    @check
    def _check(self) -> KLConfig:
        reason = NO_PENALTY.get((self.place, self.estimator or ""))
        if reason is not None:
            fix = "k1 (or place = 'loss')" if self.place == "reward" else "k3 or k2 (or place = 'reward')"
            raise ConfigError(
                f"unsupported-combination: estimator = {self.estimator!r} with place = {self.place!r} is "
                f"not a KL penalty: {reason}; set estimator = {fix}, or leave it out"
            )
        return self

    def resolved(self) -> Self:
        """Return the config with the estimator filled in."""
        if self.estimator is not None:
            return self
        return type(self).model_validate(
            self.model_dump() | {"estimator": "k1" if self.place == "reward" else "k3"}
        )


class RolloutCorrectionConfig(Config):
    """Correction for an engine whose logprobs differ from the trainer's. The importance weight is
    rollout_is_weight = exp(old - rollout), w below."""

    kind: Literal["none", "tis", "mask", "icepop"] = "none"
    """tis: weight by min(w, high). mask: mask tokens (or sequences) with w > high and weight the others by w.
    icepop: mask those with w outside [low, high] and weight the others by w."""
    level: Literal["token", "sequence"] = "token"
    """token: each token has its own weight. sequence: each token has the weight of its whole completion."""
    low: float = Field(0.5, ge=0.0)
    """Lower bound for icepop."""
    high: float = Field(2.0, gt=0.0)
    """Upper bound for tis, mask and icepop."""
    geometric_high: float | None = Field(None, gt=1.0)
    """With every kind: mask a completion if the geometric mean of old / rollout over its tokens is above
    this. The mean does not grow with the length of the completion; in verl it is rollout_rs = seq_mean_k1.
    Off if unset."""
    geometric_low: float | None = Field(None, gt=0.0, lt=1.0)
    """Also mask a completion if the geometric mean is below this. If unset, the bound is 1 /
    geometric_high."""

    @property
    def whole_sequences(self) -> bool:
        """Whether a token's weight needs the other tokens of its completion."""
        return (self.kind != "none" and self.level == "sequence") or self.geometric_high is not None

    @check
    def _check(self) -> RolloutCorrectionConfig:
        refuse(self, "algorithm.rollout_correction")
        return self


class OverlongConfig(Config):
    """DAPO's soft overlong punishment: over the last buffer_tokens tokens before max_tokens, the reward falls
    linearly by penalty."""

    buffer_tokens: PositiveInt | None = None
    """Number of tokens before max_tokens over which the reward falls. If unset, a fifth of max_tokens is
    used, as published (4,096 of 20,480)."""
    penalty: float | None = Field(None, ge=0.0)
    """Amount by which the reward of a completion with max_tokens tokens is reduced; 0 turns the punishment
    off. If unset, the penalty is 1 with algorithm.name = "dapo" or if buffer_tokens is set, and 0
    otherwise."""


class GRPOConfig(Config):
    """A policy-gradient algorithm over groups of rollouts."""

    name: PolicyAlgorithm = "grpo"
    """Name of a published algorithm. Options that are not set take the published values of this algorithm. A
    `module:Class` takes the published values of grpo."""
    advantage: Advantage | None = None
    """How advantages are computed from the rewards r. group_mean_std: (r - mean of the group) / std of the
    group. group_mean: r - mean of the group. group_mean_step_std: (r - mean of the group) / std of all
    rewards of the step. leave_one_out: r - mean of the others in the group. batch_mean_std: r whitened over
    the trained tokens of the step. group_mean_batch_std: r - mean of the group, whitened in the same way.
    With batch_mean_std and group_mean_batch_std, kl.place = 'reward' charges each token with its own KL and
    that of later tokens. `module:function`: a function of rewards and mask, each [G, n], that returns
    advantages, [G, n]."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """How several rewards become advantages. sum_then_normalize: advantages are computed from the weighted
    sum of the rewards. normalize_then_sum (GDPO, arXiv 2601.05242): advantages are computed for each reward
    separately, added with the rewards' weights, and whitened over the rollouts of the step, so that no reward
    counts more because of its range. The setting has the same name and values in TRL."""
    aggregation: Aggregation | None = None
    """How the losses of tokens are averaged. sequence_mean: over the tokens of each sequence, then over
    sequences. sequence_sum: added up over the tokens of each sequence, then averaged over sequences.
    token_mean: over all tokens of the step. constant: added up and divided by sequences * max_tokens (Dr.
    GRPO)."""
    clip_low: float | None = Field(None, ge=0.0)
    """Lower clip: the ratio is clipped at 1 - clip_low."""
    clip_high: float | None = Field(None, ge=0.0)
    """Upper clip: the ratio is clipped at 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1.0)
    """Upper bound for the ratio where the advantage is negative (arXiv 1912.09729; verl's clip_ratio_c, 3
    there). If unset, the ratio has no such bound."""
    ratio: Literal["token", "sequence", "sequence_token", "sequence_product"] | None = None
    """Level of the importance_ratio. sequence: GSPO's length-normalised ratio. sequence_product: the ratio of
    the whole completion (TRL's RLOOTrainer). sequence_token: GSPO-token's ratio, which has the value of
    sequence but the gradient of the token alone, for advantages that differ within a completion."""
    objective: Objective | None = None
    """cispo: the clipped ratio is a detached weight, so no token loses its gradient. sapo: a sigmoid of
    the ratio replaces the clip. `module:function`: a function of lockstep.algorithms.policy_loss.PolicyTerms
    and these options that returns a loss per token, [R]."""
    tau_pos: PositiveFloat | None = None
    """sapo: temperature of tokens with a positive advantage. The higher it is, the sooner a token far from
    the old policy loses its gradient. If unset, the published value of 1 is used; in TRL it is
    sapo_temperature_pos."""
    tau_neg: PositiveFloat | None = None
    """sapo: temperature for tokens whose advantage is zero or negative. If unset, the published value of 1.05
    is used; in TRL it is sapo_temperature_neg."""
    dynamic_sampling: bool | None = None
    """Replace groups whose rewards are all equal by newly sampled groups."""
    max_resample_rounds: PositiveInt = 10
    """dynamic_sampling: number of sampling rounds after which the run stops with an error."""
    mask_truncated: bool = False
    """Do not train on completions that max_tokens cut off, as if they had no tokens. The rewards of these
    completions still count in the advantages of the others. DAPO calls this overlong filtering, and TRL
    mask_truncated_completions."""
    overlong: OverlongConfig = OverlongConfig()
    entropy_coef: float = 0.0
    """Entropy bonus: the entropy times this coefficient is subtracted from the loss."""
    kl: KLConfig = KLConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    off_policy_mask_threshold: PositiveFloat | None = None
    """Mask a completion with a negative advantage if its tokens are now less likely than when they were
    sampled, on average by more than this many nats (arXiv 2512.02556, eq. 9; the setting has the same name in
    TRL). Off if unset."""

    @property
    def whole_sequences(self) -> bool:
        """Whether the loss of a token needs the other tokens of its completion."""
        of_all = self.rollout_correction.whole_sequences or self.off_policy_mask_threshold is not None
        return of_all or self.ratio not in (None, "token")

    @property
    def compares_group(self) -> bool:
        """Whether an advantage compares the samples of a group, so that a sample alone has none."""
        return self.resolved().advantage in (*PER_GROUP, "group_mean_batch_std")

    @field_validator("overlong", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        """None is off."""
        return {"penalty": 0.0} if value is None else value

    @check
    def _check(self) -> GRPOConfig:
        objective = self.objective or published_values(self.name)["objective"]
        for option, why in UNREAD.get(objective, {}).items():
            value = getattr(self, option)
            if value is not None:
                raise no_effect(option, value, f"under objective = {objective!r}, which {why}")
        ratio = self.ratio or published_values(self.name)["ratio"]
        if ratio == "sequence_token" and objective == "cispo":
            why = "beyond that of 'sequence' under objective = 'cispo', whose ratio has no gradient"
            raise no_effect("ratio", ratio, why, fix="set ratio = 'sequence'")
        return self

    @check
    def _check_rewards_by_themselves(self) -> GRPOConfig:
        if self.multi_objective_aggregation == "sum_then_normalize":
            return self
        own, published = "multi_objective_aggregation = 'normalize_then_sum'", published_values(self.name)
        advantage = self.advantage or published["advantage"]
        if advantage in (*PER_STEP, "gae"):
            raise ConfigError(
                f"unsupported-combination: {own} with advantage = {advantage!r}, which does not normalise "
                f"rewards within a group; set advantage = {PER_GROUP[0]!r}, or leave "
                "multi_objective_aggregation out",
                setting="multi_objective_aggregation",
            )
        if self.kl.coef > 0 and self.kl.place == "reward":
            raise ConfigError(
                f"unsupported-combination: {own} with kl.place = 'reward': the KL would be normalised like "
                "a reward, so kl.coef would not control its weight; set kl.place = 'loss'",
                setting="multi_objective_aggregation",
            )
        penalty = self.overlong.penalty
        if penalty is None:
            penalty = published["overlong"].get(
                "penalty", 0.0 if self.overlong.buffer_tokens is None else 1.0
            )
        if penalty:
            raise ConfigError(
                f"unsupported-combination: {own} with overlong.penalty = {penalty}: the penalty would be "
                "normalised like a reward, so its size would not control its weight; set overlong.penalty "
                "= 0, or use a separate reward for the length",
                setting="multi_objective_aggregation",
            )
        return self

    def resolved(self) -> Self:
        """Return the config with every option that was left at None set to the published value."""
        values: dict[str, Any] = self.model_dump()
        published = self._published()
        for key, value in published.items():
            if values[key] is None:
                values[key] = value
        overlong = self.overlong
        if overlong.penalty is None:
            default_penalty = 0.0 if overlong.buffer_tokens is None else 1.0
            values["overlong"]["penalty"] = published["overlong"].get("penalty", default_penalty)
        return type(self).model_validate(values | {"kl": self.kl.resolved()})

    def _published(self) -> dict[str, Any]:
        """The published values of the name, with those of the objective where it has options of its own."""
        published = published_values(self.name)
        objective = self.objective or published["objective"]
        values = _CLIPS | SAPO | {key: value for key, value in published.items() if value is not None}
        return {key: value for key, value in values.items() if key not in UNREAD.get(objective, {})}


SAPO: dict[str, Any] = {"tau_pos": 1.0, "tau_neg": 1.05}
"""arXiv 2511.20347, section 5."""
_CLIPS: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2}
_GRPO: dict[str, Any] = {
    "advantage": "group_mean_std",
    "aggregation": "sequence_mean",
    **_CLIPS,
    "ratio": "token",
    "objective": "ppo_clip",
    "dynamic_sampling": False,
    "overlong": {},
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "grpo": _GRPO,  # arXiv 2402.03300, eq. 3
    "dr_grpo": _GRPO
    | {"advantage": "group_mean", "aggregation": "constant"},  # arXiv 2503.20783, section 3.2
    "dapo": _GRPO
    | {  # arXiv 2503.14476, eqs. 8, 12 and 13
        "aggregation": "token_mean",
        "clip_high": 0.28,
        "dynamic_sampling": True,
        "overlong": {"penalty": 1.0},
    },
    # arXiv 2402.14740, section 3: a completion is one action, so it has one ratio, and its gradient is the
    # sum over its tokens. Each of them has the completion's loss, and their mean is that loss.
    "rloo": _GRPO | {"advantage": "leave_one_out", "ratio": "sequence_product"},
    "reinforce++": _GRPO | {"advantage": "batch_mean_std", "aggregation": "token_mean"},  # arXiv 2501.03262
    "reinforce++-baseline": _GRPO | {"advantage": "group_mean_batch_std", "aggregation": "token_mean"},
    # arXiv 2507.18071, eqs. 5 and 7, section 5.1
    "gspo": _GRPO | {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
    # eqs. 13 and 14 there
    "gspo_token": _GRPO | {"ratio": "sequence_token", "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": _GRPO
    | {  # arXiv 2506.13585, eqs. 4 and 5: no lower clip; the upper bound is tuned, 5 in arXiv 2510.13786
        "aggregation": "token_mean",
        "objective": "cispo",
        "clip_low": 1.0,
        "clip_high": 4.0,
    },
    # arXiv 2511.20347, eqs. 5 and 6
    "sapo": _GRPO | {"objective": "sapo", "clip_low": None, "clip_high": None} | SAPO,
}


# arXiv 1707.06347, eq. 7, with the bounds and the mean over tokens of verl and OpenRLHF; other options are in
# lockstep.config.ppo. Not in PUBLISHED, which is of the algorithms without a value model.
PPO: dict[str, Any] = _GRPO | {"advantage": "gae", "aggregation": "token_mean"}


class SFTConfig(Config):
    """Supervised fine-tuning: cross-entropy of the labels, averaged over the step."""

    name: Literal["sft"] = "sft"
    """The only allowed value."""
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """token_mean: average over all trained tokens of the step. sequence_mean: average per document, then over
    documents."""


PreferenceName = Literal["dpo", "robust_dpo", "ipo", "simpo", "orpo", "kto"]


class DPOConfig(Config):
    """Direct preference optimisation on pairs of answers, and related losses."""

    name: PreferenceName = "dpo"
    """Name of a published loss. Options that are not set take the published values of this loss. simpo and
    orpo need no reference; kto trains on single answers with a label instead of pairs."""
    beta: PositiveFloat | None = None
    """dpo, robust_dpo, ipo, kto: weight of log(policy / ref), per nat; a larger weight keeps the policy
    closer to the reference. simpo: weight of the mean logprob, per nat. orpo: weight of the odds ratio
    relative to the cross-entropy of the chosen answer."""
    label_smoothing: float | None = Field(None, ge=0.0, lt=0.5)
    """dpo, robust_dpo: fraction of the pairs that are assumed to be labelled the wrong way round."""
    average: bool | None = None
    """Divide the logprob of an answer by its number of trained tokens, so that its length does not matter."""
    margin: float | None = Field(None, ge=0.0)
    """simpo: margin by which the reward of the chosen answer, beta times its mean logprob, should exceed that
    of the other answer."""
    desirable_weight: float | None = Field(None, ge=0.0)
    """kto: weight of the loss of a desirable answer."""
    undesirable_weight: float | None = Field(None, ge=0.0)
    """kto: weight of the loss of an undesirable answer. In the paper, desirable_weight times
    the number of desirable answers is 1 to 4/3 times the same product for undesirable answers."""

    @property
    def paired(self) -> bool:
        """Whether the loss is of pairs of answers."""
        return self.name != "kto"

    @property
    def needs_ref(self) -> bool:
        """Whether the loss compares with a reference."""
        return self.name not in ("simpo", "orpo")

    @check
    def _check(self) -> DPOConfig:
        for option in ("label_smoothing", "margin", "desirable_weight", "undesirable_weight"):
            value = getattr(self, option)
            given = value is not None and (value or option != "label_smoothing")  # 0 smooths nothing
            if given and option not in PREFERENCES[self.name]:
                raise no_effect(option, value, f"with name = {self.name!r}")
        refuse(self, "algorithm (dpo)")
        return self

    def resolved(self) -> Self:
        """Return the config with every option that was left at None set to the published value; None stays
        where the loss has no such option."""
        own = {key: value for key, value in self.model_dump().items() if value is not None}
        return type(self).model_validate(PREFERENCES[self.name] | own)


PREFERENCES: dict[str, dict[str, Any]] = {
    # arXiv 2305.18290, section 6 and appendix B
    "dpo": {"beta": 0.1, "label_smoothing": 0.0, "average": False},
    # arXiv 2403.00409, section 5.2
    "robust_dpo": {"beta": 0.1, "label_smoothing": 0.1, "average": False},
    # arXiv 2310.12036; beta (tau there) and the mean over tokens as TRL has them
    "ipo": {"beta": 0.1, "average": True},
    # arXiv 2405.14734, appendix B: beta 2 to 2.5, margin / beta about 0.5
    "simpo": {"beta": 2.0, "margin": 1.0, "average": True},
    # arXiv 2403.07691, section 5.1
    "orpo": {"beta": 0.1, "average": True},
    # arXiv 2402.01306, section 4
    "kto": {"beta": 0.1, "average": False, "desirable_weight": 1.0, "undesirable_weight": 1.0},
}


class RewardModelLossConfig(Config):
    """The loss of a reward model on pairs of answers."""

    name: Literal["bradley_terry"] = "bradley_terry"
    """The only allowed value."""
    center_coef: float = Field(0.0, ge=0.0)
    """Weight of the squared sum of both scores, a term that keeps their mean near 0 (arXiv 2312.09244, which
    uses 0.01). It is TRL's center_rewards_coefficient."""


def published_values(name: str) -> dict[str, Any]:
    """The published values of an algorithm; of somebody's `module:Class` those of grpo."""
    return PPO if name == "ppo" else PUBLISHED.get(name, _GRPO)
