"""The losses of the Tinker API, as sums over tokens that are not normalised.

With x = log p(target) of the policy, q the logprob given for it, w its weight and A its advantage:

    cross_entropy         -w x
    importance_sampling   -exp(x - q) A
    ppo                   -min(r A, clip(r, low, high) A)      r = exp(x - q)
    cispo                 -sg(clip(r, low, high)) A x
    gspo                  -min(s A, clip(s, low, high) A)      s = sg(exp(mean of x - q where m)) p / sg(p)
    dro                   -(A x - beta / 2 (x - q)^2)

(https://tinker-docs.thinkingmachines.ai/tinker/losses and its pages gspo and dro; GSPO-token is eq. 14 of
arXiv 2507.18071, and dro is of arXiv 2405.19107.) `low` and `high` are bounds of the ratio: 0.8 and 1.2 if
the request names none, and for gspo 1 - 3e-4 and 1 + 4e-4, the ones of its paper. m is the
sequence_ratio_mask of a datum. beta has no published default: a request names it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from lockstep.errors import DataError
from lockstep.ops.losses import cispo, ppo_clip
from lockstep.protocols.train import LossOutput, StepStats
from lockstep.schema.batch import PackedBatch, PolicyBatch

INPUTS: Mapping[str, tuple[str, ...]] = {
    "cross_entropy": ("target_tokens", "weights"),
    "importance_sampling": ("target_tokens", "logprobs", "advantages"),
    "ppo": ("target_tokens", "logprobs", "advantages"),
    "cispo": ("target_tokens", "logprobs", "advantages"),
    "gspo": ("target_tokens", "logprobs", "advantages", "sequence_ratio_mask"),
    "dro": ("target_tokens", "logprobs", "advantages"),
}
"""Loss -> the inputs that each datum must have, and may have."""
_BOUNDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_CONFIG: Mapping[str, Mapping[str, float | None]] = {
    "ppo": _BOUNDS,
    "cispo": _BOUNDS,
    "gspo": {"clip_low_threshold": 1.0 - 3e-4, "clip_high_threshold": 1.0 + 4e-4},
    "dro": {"beta": None},
}
"""Loss -> its settings and their values where a request names none; None: it must."""


@dataclass(slots=True)
class ServedLoss:
    """One of the losses above, with its thresholds; a TokenLoss."""

    name: str
    low: float = 0.8
    high: float = 1.2
    beta: float = 0.0

    separable: bool = True
    entropy_grad: bool = False
    terms: tuple[str, ...] = ()

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, batch: PackedBatch, rows: Tensor | slice
    ) -> LossOutput:
        """See protocols.TokenLoss. The sum of the tokens of a micro-batch, which is one datum."""
        if self.name == "cross_entropy":
            return LossOutput(-(batch.loss_weights[rows] * logprobs).sum())
        policy = PolicyBatch.of(batch)
        advantages = policy.advantages[rows]
        log_ratio = logprobs - policy.rollout_logprobs[rows]
        if self.name == "dro":
            return LossOutput(-(logprobs * advantages - 0.5 * self.beta * log_ratio**2).sum())
        if self.name == "gspo":
            mean = log_ratio.detach()[batch.loss_weights[rows] != 0].mean()
            log_ratio = mean + (logprobs - logprobs.detach())  # the value of the mean, the token's gradient
        ratio = log_ratio.exp()
        if self.name == "importance_sampling":
            return LossOutput(-(ratio * advantages).sum())
        bounds = {"clip_low": 1.0 - self.low, "clip_high": self.high - 1.0}
        if self.name in ("ppo", "gspo"):
            return LossOutput(ppo_clip(ratio, advantages, **bounds).sum())
        return LossOutput(cispo(logprobs, ratio, advantages, **bounds).sum())

    def metrics(self, batches: Sequence[PackedBatch], stats: StepStats) -> dict[str, float]:
        """Return the loss, as the client adds it up over the requests of a call."""
        return self.total([float(loss) for loss in stats.losses])

    def total(self, losses: Sequence[float]) -> dict[str, float]:
        """`metrics` of these losses; their order does not matter."""
        return {"loss:sum": math.fsum(losses)}


def make_loss(name: str, config: Mapping[str, float | str]) -> ServedLoss:
    """Return the loss `name` of a request.

    Raises:
        DataError: it is not served, or the config has a key or a value that it does not take.
    """
    if name not in INPUTS:
        raise DataError(
            f"refused: loss_fn = {name!r} is not served; use one of {', '.join(INPUTS)}, or "
            "forward_backward_custom, whose loss the client computes",
            loss_fn=name,
        )
    known = _CONFIG.get(name, {})
    for key, value in config.items():
        if key not in known:
            takes = ", ".join(known) or "no settings"
            raise DataError(f"unknown-name: loss_fn_config.{key}: {name} takes {takes}", setting=key)
        if not isinstance(value, float) or not math.isfinite(value) or value < 0:
            raise DataError(
                f"out-of-range: loss_fn_config.{key} = {value!r} must be a number of at least 0", setting=key
            )
    if missing := [key for key, default in known.items() if default is None and key not in config]:
        raise DataError(f"missing-field: loss_fn_config.{missing[0]}: {name} needs it", setting=missing[0])
    values = {key: float(value) for key, value in {**known, **config}.items() if value is not None}
    low, high = values.get("clip_low_threshold", 0.0), values.get("clip_high_threshold", math.inf)
    if low > high:
        raise DataError(
            f"contradiction: clip_low_threshold = {low} is above clip_high_threshold = {high}", low=low
        )
    return ServedLoss(name, low=low, high=high, beta=values.get("beta", 0.0), separable=name != "gspo")
