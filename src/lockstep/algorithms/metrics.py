"""Metrics of a policy-gradient step: means and extremes over the trained tokens of the whole step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.algorithms.policy_loss import PolicyLoss, PolicyTerms
from lockstep.ops.kl import kl, kl_k3
from lockstep.ops.masks import MAX_LOG_RATIO
from lockstep.protocols.train import StepStats
from lockstep.schema.batch import PackedBatch, PolicyBatch


def policy_metrics(loss: PolicyLoss, batches: Sequence[PackedBatch], stats: StepStats) -> dict[str, float]:
    """Return the metrics of a step over all trained tokens of `batches`; empty when there is none.

    entropy, logprob_gap_* and kl_* are in nats; clip_fraction_*, *_clamped and rollout_masked_share are
    shares of tokens.
    logprob_gap_mean, _p99 and _max are of |old - rollout|; _k1 and _k3 estimate KL(rollout || old).
    """
    batches = [b.to(x.device) for b, x in zip(batches, stats.logprobs, strict=True)]
    per_batch = [
        loss.terms(logprobs, batch, slice(None))
        for batch, logprobs in zip(batches, stats.logprobs, strict=True)
    ]
    masks = [terms.mask for terms in per_batch]
    terms = PolicyTerms(*(_trained(column, masks) for column in zip(*per_batch, strict=True)))
    if terms.mask.numel() == 0:
        return {}
    metrics = {
        "entropy": _trained(stats.entropy, masks).mean(),
        **_ratio_metrics(loss, terms),
        **_gap_metrics(terms.logprob_gap),
    }
    if loss.config.rollout_correction.kind != "none":
        metrics["rollout_is_weight_mean"] = terms.is_weight.mean()
        metrics["rollout_is_weight_max"] = terms.is_weight.amax()
        metrics["rollout_masked_share"] = (terms.is_weight == 0).float().mean()
    refs = [batch.ref_logprobs for batch in batches if isinstance(batch, PolicyBatch)]
    known = [ref for ref in refs if ref is not None]
    if known:
        policy, ref = _trained(stats.logprobs, masks), _trained(known, masks)
        metrics |= _ref_metrics(loss, policy, ref)
    values = torch.stack([value.float() for value in metrics.values()]).tolist()  # one copy from the device
    return dict(zip(metrics, values, strict=True))


def _trained(per_batch: Sequence[Tensor], masks: Sequence[Tensor]) -> Tensor:
    """The trained entries of all micro-batches, end to end."""
    return torch.cat([x[mask] for x, mask in zip(per_batch, masks, strict=True)])


def _ratio_metrics(loss: PolicyLoss, terms: PolicyTerms) -> dict[str, Tensor]:
    """A token counts as clipped where the objective's minimum takes the constant side; under cispo, where its
    weight is bounded."""
    below, above = terms.ratio < 1.0 - loss.clip_low, terms.ratio > 1.0 + loss.clip_high
    if loss.config.objective == "ppo_clip":
        below, above = below & (terms.advantages < 0), above & (terms.advantages > 0)
    dual = loss.config.dual_clip
    clipped = {} if dual is None else {"clip_fraction_dual": (terms.ratio > dual) & (terms.advantages < 0)}
    return {
        "clip_fraction_low": below.float().mean(),
        "clip_fraction_high": above.float().mean(),
        **{name: share.float().mean() for name, share in clipped.items()},
        "importance_ratio_clamped": (terms.log_ratio.abs() > MAX_LOG_RATIO).float().mean(),
        "importance_ratio_mean": terms.ratio.mean(),
        "importance_ratio_max": terms.ratio.amax(),
        "kl_old": kl_k3(-terms.token_log_ratio, torch.zeros_like(terms.token_log_ratio)).mean(),
    }


def _ref_metrics(loss: PolicyLoss, policy: Tensor, ref: Tensor) -> dict[str, Tensor]:
    """KL to the reference as in the loss: k3 of a token counts at most max_nats."""
    config = loss.config.kl
    assert config.estimator is not None
    estimate = kl(policy, ref, estimator=config.estimator, max_nats=config.max_nats)
    if config.estimator != "k3":
        return {"kl_ref": estimate.mean()}
    clamped = (estimate >= config.max_nats) | ((ref - policy).abs() > MAX_LOG_RATIO)
    return {"kl_ref": estimate.mean(), "kl_clamped": clamped.float().mean()}


def _gap_metrics(gap: Tensor) -> dict[str, Tensor]:
    size = gap.abs()
    rank = -(-99 * size.numel() // 100)
    return {
        "logprob_gap_mean": size.mean(),
        "logprob_gap_p99": size.kthvalue(rank).values,
        "logprob_gap_max": size.amax(),
        "logprob_gap_k1": -gap.mean(),
        "logprob_gap_k3": kl_k3(-gap, torch.zeros_like(gap)).mean(),
    }
