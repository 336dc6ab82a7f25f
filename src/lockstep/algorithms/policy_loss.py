"""The token loss of the GRPO family, and its metrics over the trained tokens of the whole step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.algorithms import OBJECTIVES
from lockstep.config.algorithm import GRPOConfig
from lockstep.errors import ConfigError, TrainError
from lockstep.ops.losses import (
    cispo,
    geometric_mask,
    importance_log_ratio,
    kl,
    kl_k3,
    off_policy_mask,
    ppo_clip,
    rollout_is_weight,
    sapo,
    sequence_log_ratio,
    sequence_sum,
    sequence_token_log_ratio,
)
from lockstep.ops.masks import MAX_LOG_RATIO, bounded, masked
from lockstep.protocols.train import LossOutput, StepStats
from lockstep.schema.batch import PackedBatch, PolicyBatch

Rows = Tensor | slice


class PolicyTerms(NamedTuple):
    """The terms of the loss, [R] each; finite where mask is False, even if the inputs are not."""

    mask: Tensor
    logprobs: Tensor
    """Logprobs of the policy, nats; 0 where mask is False."""
    advantages: Tensor
    token_log_ratio: Tensor
    """log(policy / old) per token."""
    log_ratio: Tensor
    """log(policy / old) at the level of the algorithm (token or sequence), unbounded."""
    ratio: Tensor
    """importance_ratio at the level of the algorithm: exp of log_ratio, clamped to 20 nats."""
    logprob_gap: Tensor
    """old - rollout per token, nats."""
    is_weight: Tensor
    """rollout_is_weight, after truncation or masking."""
    off_policy_mask: Tensor
    """0 where off_policy_mask_threshold drops the token, else 1."""


METRIC_TERMS = ("token_log_ratio", "log_ratio", "ratio", "logprob_gap", "is_weight")
"""Fields of PolicyTerms from which metrics are always computed."""

Objective = Callable[[PolicyTerms, GRPOConfig], Tensor]
"""See lockstep.algorithms.OBJECTIVES."""


def zero_without_advantages(objective: Objective) -> Objective:
    """Mark an objective in which a token with advantage 0 never has a gradient, so that groups without a
    signal can be skipped. Lockstep's own objectives are marked; an unmarked objective gets every group."""
    objective.zero_without_advantages = True  # type: ignore[attr-defined]
    return objective


@zero_without_advantages
def clipped_objective(terms: PolicyTerms, config: GRPOConfig) -> Tensor:
    """`ppo_clip`: see lockstep.ops.losses.ppo_clip."""
    assert config.clip_low is not None and config.clip_high is not None
    bounds = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    return ppo_clip(terms.ratio, terms.advantages, dual_clip=config.dual_clip, **bounds)


@zero_without_advantages
def cispo_objective(terms: PolicyTerms, config: GRPOConfig) -> Tensor:
    """`cispo`: see lockstep.ops.losses.cispo."""
    assert config.clip_low is not None and config.clip_high is not None
    bounds = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    return cispo(terms.logprobs, terms.ratio, terms.advantages, **bounds)


@zero_without_advantages
def sapo_objective(terms: PolicyTerms, config: GRPOConfig) -> Tensor:
    """`sapo`: see lockstep.ops.losses.sapo."""
    assert config.tau_pos is not None and config.tau_neg is not None
    return sapo(terms.ratio, terms.advantages, tau_pos=config.tau_pos, tau_neg=config.tau_neg)


class PolicyLoss:
    """A TokenLoss: clipped policy gradient x rollout_is_weight + KL to ref - entropy, times loss_weights.

    Per-token inputs are ignored where loss_mask is False, even NaN and inf.

    Args:
        config: resolved: no option that the algorithm reads is None.

    Raises:
        ConfigError: for a config that is not resolved.
        TrainError: from a call, when the batch lacks what the loss needs.
    """

    def __init__(self, config: GRPOConfig) -> None:
        if config.objective is None or config.kl.estimator is None:
            raise ConfigError("missing-argument: PolicyLoss needs a resolved GRPOConfig; call resolved()")
        self.config = config
        self.objective: Objective = OBJECTIVES.load(config.objective)
        self.clip_low, self.clip_high = config.clip_low, config.clip_high
        self.entropy_grad = config.entropy_coef != 0
        self.separable = not config.whole_sequences
        self.zero_without_advantages = self._zero_without_advantages()
        self.names = METRIC_TERMS + (() if config.off_policy_mask_threshold is None else ("off_policy_mask",))
        self.terms = self.names + (("kl_ref", "kl_clamped") if config.kl.coef > 0 else ())

    def _zero_without_advantages(self) -> bool:
        """See protocols.TokenLoss. A subclass must declare it itself."""
        kl_in_loss = self.config.kl.coef > 0 and self.config.kl.place == "loss"
        declared = bool(getattr(self.objective, "zero_without_advantages", False))
        return type(self) is PolicyLoss and declared and not kl_in_loss and not self.entropy_grad

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: PackedBatch, rows: Rows) -> LossOutput:
        """See protocols.TokenLoss."""
        config, batch = self.config, PolicyBatch.of(batch)
        terms = self.policy_terms(logprobs, batch, rows)
        values = [getattr(terms, name) for name in self.names]
        loss = self.objective(terms, config)
        if not isinstance(loss, Tensor) or loss.shape != terms.ratio.shape:
            found = f"a loss of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise TrainError(
                f"wrong-result: algorithm.objective = {config.objective!r} returned {found} for "
                f"{terms.ratio.shape[0]} tokens; return a tensor with one entry per token"
            )
        loss = loss * terms.is_weight * terms.off_policy_mask
        if config.kl.coef > 0:
            estimate, clamped = self.kl(terms, batch, rows)
            values += [estimate, clamped.to(estimate.dtype)]
            if config.kl.place == "loss":
                loss = loss + config.kl.coef * estimate
        if config.entropy_coef != 0:
            loss = loss - config.entropy_coef * masked(entropy, terms.mask)
        weighted = loss * masked(batch.loss_weights[rows], terms.mask)
        # Detached: the terms are kept for the metrics, and would keep the graph with them.
        return LossOutput(weighted.sum(), torch.stack([value.detach() for value in values]))

    def kl(self, terms: PolicyTerms, batch: PackedBatch, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return the configured estimate of KL(policy || ref), [R] nats, 0 where loss_mask is False; and [R]
        bool, True where k3 was clamped (config.kl.max_nats, or log ratios beyond MAX_LOG_RATIO)."""
        config = self.config.kl
        assert config.estimator is not None
        batch = PolicyBatch.of(batch)
        if batch.ref_logprobs is None:
            raise TrainError(
                "missing-values: the loss has a KL term but the batch has no ref_logprobs; run "
                "backend.ref.logprobs(batches) first, or set algorithm.kl.coef = 0"
            )
        ref = masked(batch.ref_logprobs[rows], terms.mask)
        estimate = kl(terms.logprobs, ref, estimator=config.estimator, max_nats=config.max_nats)
        far = (ref - terms.logprobs.detach()).abs() > MAX_LOG_RATIO
        return estimate, (estimate.detach() >= config.max_nats) | far

    def metrics(self, batches: Sequence[PackedBatch], stats: StepStats) -> dict[str, float]:
        """Return the metrics of a step over all trained tokens of `batches`; empty without trained tokens.

        entropy, logprob_gap_* and kl_* are in nats; clip_fraction_*, *_clamped and *_masked_share are
        shares of tokens.
        logprob_gap_mean, _p99 and _max are of |old - rollout|; _k1 and _k3 estimate KL(rollout || old).
        Where earlier weights sampled some tokens, policy_drift_* is the same of these, logprob_gap_* is of
        the others alone, and logprob_gap_share is the share of the others.

        Raises:
            TrainError: the backend left out the terms that the loss returned.
        """
        if len(stats.terms) != len(batches):
            raise TrainError(
                f"missing-values: the train backend returned loss terms for only {len(stats.terms)} of "
                f"{len(batches)} micro-batches; append LossOutput.terms of every call to StepStats.terms, "
                "[K, T] each"
            )
        masks = [b.loss_mask.to(x.device) for b, x in zip(batches, stats.logprobs, strict=True)]
        rows = torch.cat([x[:, mask] for x, mask in zip(stats.terms, masks, strict=True)], 1)
        if rows.shape[1] == 0:
            return {}
        terms = dict(zip(self.terms, rows, strict=True))
        drift: dict[str, Tensor] = {}
        gap, currents = terms["logprob_gap"], [PolicyBatch.of(b).current for b in batches]
        if known := [c for c in currents if c is not None]:
            current = torch.cat([c.to(m.device)[m] for c, m in zip(known, masks, strict=True)])
            gap, drift = gap[current], _drift_metrics(gap[~current], current)
        size = gap.abs()
        given = [PolicyBatch.of(b).advantages.to(m.device) for b, m in zip(batches, masks, strict=True)]
        entropy, advantages = (
            torch.cat([x[mask] for x, mask in zip(column, masks, strict=True)])
            for column in (stats.entropy, given)
        )
        metrics = {
            "entropy": entropy.mean(),
            **self._ratio_metrics(terms, advantages),
            **drift,
        }
        if gap.numel():
            metrics |= {
                "logprob_gap_mean": size.mean(),
                # Not torch.quantile, which refuses more than 2^24 elements.
                "logprob_gap_p99": size.kthvalue(-(-99 * size.numel() // 100)).values,
                "logprob_gap_max": size.amax(),
                "logprob_gap_k1": -gap.mean(),
                "logprob_gap_k3": kl_k3(-gap, torch.zeros_like(gap)).mean(),
            }
        correction = self.config.rollout_correction
        if correction.kind != "none" or correction.geometric_high is not None:
            metrics["rollout_is_weight_mean"] = terms["is_weight"].mean()
            metrics["rollout_is_weight_max"] = terms["is_weight"].amax()
            metrics["rollout_masked_share"] = (terms["is_weight"] == 0).float().mean()
        if "off_policy_mask" in terms:
            metrics["off_policy_masked_share"] = (terms["off_policy_mask"] == 0).float().mean()
        if self.config.kl.coef > 0:
            metrics["kl_ref"] = terms["kl_ref"].mean()
            if self.config.kl.estimator == "k3":
                metrics["kl_clamped"] = terms["kl_clamped"].mean()
        values = torch.stack(
            [value.float() for value in metrics.values()]
        ).tolist()  # one copy from the device
        return dict(zip(metrics, values, strict=True))

    def _ratio_metrics(self, terms: Mapping[str, Tensor], advantages: Tensor) -> dict[str, Tensor]:
        """Count a token as clipped if the objective's minimum takes the constant side, or, under cispo, if
        its weight is bounded. sapo does not clip."""
        ratio, token_log_ratio, dual = terms["ratio"], terms["token_log_ratio"], self.config.dual_clip
        clipped: dict[str, Tensor] = {}
        if self.clip_low is not None and self.clip_high is not None:
            below, above = ratio < 1.0 - self.clip_low, ratio > 1.0 + self.clip_high
            if self.config.objective == "ppo_clip":
                below, above = below & (advantages < 0), above & (advantages > 0)
            clipped |= {"clip_fraction_low": below, "clip_fraction_high": above}
        if dual is not None:
            clipped["clip_fraction_dual"] = (ratio > dual) & (advantages < 0)
        return {
            **{name: share.float().mean() for name, share in clipped.items()},
            "importance_ratio_clamped": (terms["log_ratio"].abs() > MAX_LOG_RATIO).float().mean(),
            "importance_ratio_mean": ratio.mean(),
            "importance_ratio_max": ratio.amax(),
            "kl_old": kl_k3(-token_log_ratio, torch.zeros_like(token_log_ratio)).mean(),
        }

    def policy_terms(self, logprobs: Tensor, batch: PackedBatch, rows: Rows) -> PolicyTerms:
        """Return the inputs of the objective. logprobs: [R], of `batch.labels[rows]`."""
        batch, correction = PolicyBatch.of(batch), self.config.rollout_correction
        mask = batch.loss_mask[rows]
        # None: no update since sampling, so the policy itself is `old`: the ratio is 1 and has a gradient.
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs[rows]
        token_log_ratio = importance_log_ratio(logprobs, old, mask)
        log_ratio = token_log_ratio
        if self.config.ratio == "sequence":
            log_ratio = _by_document(sequence_log_ratio, log_ratio, batch, rows)
        elif self.config.ratio == "sequence_token":
            log_ratio = _by_document(sequence_token_log_ratio, log_ratio, batch, rows)
        elif self.config.ratio == "sequence_product":
            log_ratio = _by_document(sequence_sum, log_ratio, batch, rows)
        gap = masked(old, mask) - masked(batch.rollout_logprobs[rows], mask)
        log_gap = gap
        if correction.kind != "none" and correction.level == "sequence":
            log_gap = _by_document(sequence_sum, log_gap, batch, rows)
        weight = rollout_is_weight(log_gap, kind=correction.kind, low=correction.low, high=correction.high)
        if correction.geometric_high is not None:
            high, mean_gap = correction.geometric_high, _by_document(sequence_log_ratio, gap, batch, rows)
            weight = weight * geometric_mask(mean_gap, low=correction.geometric_low or 1 / high, high=high)
        advantages = masked(batch.advantages[rows], mask)
        off_policy = torch.ones_like(gap)
        threshold = self.config.off_policy_mask_threshold
        if threshold is not None:
            drift = importance_log_ratio(batch.rollout_logprobs[rows], logprobs.detach(), mask)
            mean_drift = _by_document(sequence_log_ratio, drift, batch, rows)
            off_policy = off_policy_mask(mean_drift, advantages, threshold=threshold)
        return PolicyTerms(
            mask=mask,
            logprobs=masked(logprobs, mask),
            advantages=advantages,
            token_log_ratio=token_log_ratio,
            log_ratio=log_ratio,
            ratio=bounded(log_ratio).exp(),
            logprob_gap=gap,
            is_weight=weight,
            off_policy_mask=off_policy,
        )


def _drift_metrics(drift: Tensor, current: Tensor) -> dict[str, Tensor]:
    """Of the tokens that earlier weights sampled. drift: old - rollout, nats; current: [tokens] bool."""
    metrics = {"logprob_gap_share": current.float().mean()}
    if drift.numel():
        metrics["policy_drift_mean"] = drift.abs().mean()
        metrics["policy_drift_max"] = drift.abs().amax()
        metrics["policy_drift_k3"] = kl_k3(-drift, torch.zeros_like(drift)).mean()
    return metrics


def _by_document(
    function: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, batch: PolicyBatch, rows: Rows
) -> Tensor:
    """Apply a per-document function to x [R], to the parts of a trajectory together; `rows` must contain
    every trained slot of the batch."""
    slots = x.new_zeros(batch.num_slots)
    slots[rows] = x
    return function(slots, batch.loss_mask, _sequences(batch))[rows]


def _sequences(batch: PolicyBatch) -> Tensor:
    """cu_seqlens [D_cap + 1] of trajectories: the parts of one are a single document, with empty ones before
    it."""
    if batch.trajectories is None:
        return batch.cu_seqlens
    starts = batch.cu_seqlens[:-1]
    numbers = batch.trajectories[starts.long().clamp(max=batch.num_slots - 1)]
    goes_on = (numbers == numbers.roll(1)) & (numbers > 0)
    goes_on[0] = False
    begins = torch.where(goes_on, 0, starts).cummax(0).values
    return torch.cat([begins, batch.cu_seqlens[-1:]])
