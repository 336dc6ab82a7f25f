"""The token loss of the GRPO family."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from lockstep.algorithms import OBJECTIVES
from lockstep.config.algorithm import GRPOConfig
from lockstep.errors import ConfigError, TrainError
from lockstep.ops.kl import kl
from lockstep.ops.losses import (
    cispo,
    importance_log_ratio,
    ppo_clip,
    rollout_is_weight,
    sequence_log_ratio,
    sequence_sum,
)
from lockstep.ops.masks import bounded, masked
from lockstep.schema.batch import PackedBatch, PolicyBatch

Rows = Tensor | slice


class PolicyTerms(NamedTuple):
    """The terms of the loss, [R] each; finite where mask is False, whatever the inputs hold there."""

    mask: Tensor
    logprobs: Tensor
    """Of the policy, nats; 0 where mask is False."""
    advantages: Tensor
    token_log_ratio: Tensor
    """log(policy / old) of the token."""
    log_ratio: Tensor
    """The same at the level of the algorithm, not bounded."""
    ratio: Tensor
    """importance_ratio at the level of the algorithm: exp of log_ratio, kept within 20 nats."""
    logprob_gap: Tensor
    """old - rollout of the token, nats."""
    is_weight: Tensor
    """rollout_is_weight, after truncation or masking."""


Objective = Callable[[PolicyTerms, GRPOConfig], Tensor]
"""See lockstep.algorithms.OBJECTIVES."""


def clipped_objective(terms: PolicyTerms, config: GRPOConfig) -> Tensor:
    """`ppo_clip`: see lockstep.ops.losses.ppo_clip."""
    assert config.clip_low is not None and config.clip_high is not None
    bounds = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    return ppo_clip(terms.ratio, terms.advantages, dual_clip=config.dual_clip, **bounds)


def cispo_objective(terms: PolicyTerms, config: GRPOConfig) -> Tensor:
    """`cispo`: see lockstep.ops.losses.cispo."""
    assert config.clip_low is not None and config.clip_high is not None
    bounds = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    return cispo(terms.logprobs, terms.ratio, terms.advantages, **bounds)


class PolicyLoss:
    """A TokenLoss: clipped policy gradient x rollout_is_weight + KL to ref - entropy, times loss_weights.

    Per-token inputs are ignored where loss_mask is False, NaN and inf included.

    Args:
        config: resolved: no option of the algorithm is None.

    Raises:
        ConfigError: for a config that is not resolved.
        TrainError: from a call, when the batch lacks what the loss needs.
    """

    def __init__(self, config: GRPOConfig) -> None:
        if config.clip_low is None or config.clip_high is None or config.kl.estimator is None:
            raise ConfigError("PolicyLoss needs a resolved GRPOConfig; call config.resolved() first")
        assert config.objective is not None
        self.config = config
        self.objective: Objective = OBJECTIVES.load(config.objective)
        self.clip_low, self.clip_high = config.clip_low, config.clip_high
        correction = config.rollout_correction
        whole_sequences = correction.kind != "none" and correction.level == "sequence"
        self.entropy_grad = config.entropy_coef != 0
        self.separable = config.ratio == "token" and not whole_sequences

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: PackedBatch, rows: Rows) -> Tensor:
        """See protocols.TokenLoss."""
        config, batch = self.config, _policy_batch(batch)
        terms = self.terms(logprobs, batch, rows)
        loss = self.objective(terms, config)
        if loss.shape != terms.ratio.shape:
            raise TrainError(
                f"algorithm.objective = {config.objective!r} returned a loss of shape {list(loss.shape)} for "
                f"{terms.ratio.shape[0]} tokens; return one entry per token"
            )
        loss = loss * terms.is_weight
        if config.kl.coef > 0 and config.kl.place == "loss":
            loss = loss + config.kl.coef * self.kl(logprobs, batch, rows)
        if config.entropy_coef != 0:
            loss = loss - config.entropy_coef * masked(entropy, terms.mask)
        return (loss * masked(batch.loss_weights[rows], terms.mask)).sum()

    def kl(self, logprobs: Tensor, batch: PackedBatch, rows: Rows) -> Tensor:
        """[R]: the configured estimate of KL(policy || ref), nats; 0 where loss_mask is False."""
        batch, config = _policy_batch(batch), self.config.kl
        mask = batch.loss_mask[rows]
        assert config.estimator is not None
        policy, ref = masked(logprobs, mask), masked(ref_logprobs(batch)[rows], mask)
        return kl(policy, ref, estimator=config.estimator, max_nats=config.max_nats)

    def terms(self, logprobs: Tensor, batch: PackedBatch, rows: Rows) -> PolicyTerms:
        """Return the terms of the loss, which `metrics` reads too. logprobs: [R], of `batch.labels[rows]`."""
        batch, correction = _policy_batch(batch), self.config.rollout_correction
        mask = batch.loss_mask[rows]
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs[rows]
        token_log_ratio = importance_log_ratio(logprobs, old, mask)
        log_ratio = token_log_ratio
        if self.config.ratio == "sequence":
            log_ratio = _by_document(sequence_log_ratio, log_ratio, batch, rows)
        elif self.config.ratio == "sequence_product":
            log_ratio = _by_document(sequence_sum, log_ratio, batch, rows)
        gap = masked(old, mask) - masked(batch.rollout_logprobs[rows], mask)
        log_gap = gap
        if correction.kind != "none" and correction.level == "sequence":
            log_gap = _by_document(sequence_sum, log_gap, batch, rows)
        return PolicyTerms(
            mask=mask,
            logprobs=masked(logprobs, mask),
            advantages=masked(batch.advantages[rows], mask),
            token_log_ratio=token_log_ratio,
            log_ratio=log_ratio,
            ratio=bounded(log_ratio).exp(),
            logprob_gap=gap,
            is_weight=rollout_is_weight(
                log_gap, kind=correction.kind, low=correction.low, high=correction.high
            ),
        )


def ref_logprobs(batch: PolicyBatch) -> Tensor:
    """Return the batch's ref_logprobs, [T]. Raises TrainError where the reference did not run."""
    if batch.ref_logprobs is None:
        raise TrainError(
            "the loss has a KL term but the batch has no ref_logprobs; run backend.logprobs(model='ref') "
            "first, or set algorithm.kl.coef = 0"
        )
    return batch.ref_logprobs


def _policy_batch(batch: PackedBatch) -> PolicyBatch:
    if not isinstance(batch, PolicyBatch):
        raise TrainError(f"a policy loss needs a PolicyBatch, got {type(batch).__name__}; pack PolicySamples")
    return batch


def _by_document(
    function: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, batch: PolicyBatch, rows: Rows
) -> Tensor:
    """A per-document figure of x [R] at its rows; `rows` must hold every trained slot of the batch."""
    slots = x.new_zeros(batch.num_slots)
    slots[rows] = x
    return function(slots, batch.loss_mask, batch.cu_seqlens)[rows]
