"""Policy-gradient losses, importance weights and loss weights: per token, packed `[T]`, pure.

Losses are to be minimised. Their sum over tokens, weighted by `loss_weights`, is the loss of a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lockstep.ops.masks import bounded, document_ids, document_means, document_sums, masked

Aggregation = Literal["sequence_mean", "sequence_sum", "token_mean", "constant"]
Correction = Literal["none", "tis", "mask", "icepop"]


def importance_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """[T] log(policy / old) of each token, PPO's (arXiv 1707.06347, section 3); 0 where mask is False."""
    return masked(logprobs, mask) - masked(old_logprobs, mask)


def sequence_log_ratio(log_ratio: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """GSPO's length-normalised log ratio (arXiv 2507.18071, eq. 7): a document's mean, at its tokens.

    Args:
        log_ratio: [T], nats. mask: [T] bool, the tokens that count. cu_seqlens: [D + 1].

    Returns:
        [T]; gradients reach every token of the document.
    """
    means = document_means(log_ratio, mask, cu_seqlens)
    return means[document_ids(cu_seqlens, log_ratio.shape[0])]


def sequence_token_log_ratio(log_ratio: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """GSPO-token's log ratio (arXiv 2507.18071, eq. 14): the value of `sequence_log_ratio`, with the gradient
    of the token's own. Of equal advantages within a document the gradient under `sequence_mean` is GSPO's.

    Args and Returns: as `sequence_log_ratio`; gradients reach the token alone.
    """
    value = sequence_log_ratio(log_ratio.detach(), mask, cu_seqlens)
    own = bounded(masked(log_ratio, mask))  # inf - inf is NaN
    # own - own is exactly 0: the value keeps its bits, and the gradient is the token's own.
    return value + (own - own.detach())


def sequence_sum(x: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T]: the sum of x [T] over a document's slots with mask True, at its slots; they all get gradients.

    Of log ratios it is the log ratio of the whole document, as in TRL's RLOOTrainer.
    """
    sums = document_sums(masked(x, mask), cu_seqlens)
    return sums[document_ids(cu_seqlens, x.shape[0])]


def ppo_clip(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """-min(w A, clip(w, 1 - clip_low, 1 + clip_high) A), elementwise (arXiv 1707.06347, eq. 7; two bounds as
    in DAPO, arXiv 2503.14476, eq. 8).

    With dual_clip = c > 1 it is, where A < 0, -max(min(w A, clip(w, ...) A), c A): the loss of a token is at
    most c |A|, and a token with w > c has no gradient (dual-clip PPO, arXiv 1912.09729, eq. 5).
    """
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)


def cispo(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """-sg(clip(w, 1 - clip_low, 1 + clip_high)) A log p, elementwise (arXiv 2506.13585, eqs. 4 and 5): a
    clipped ratio bounds a token's weight, and no token loses its gradient."""
    weight = ratio.detach().clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight * advantages * logprobs


def sapo(ratio: Tensor, advantages: Tensor, *, tau_pos: float, tau_neg: float) -> Tensor:
    """-sigmoid(tau (w - 1)) 4 / tau A, elementwise, with tau_pos where A > 0, else tau_neg (arXiv 2511.20347,
    eqs. 5 and 6).

    Its slope by w is that of -w A at w = 1, and falls off smoothly to both sides, the sooner the higher tau.
    """
    tau = torch.where(advantages > 0, tau_pos, tau_neg).to(ratio.dtype)
    return -torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau) * advantages


def rollout_is_weight(log_gap: Tensor, *, kind: Correction, low: float, high: float) -> Tensor:
    """Return the weight of a token's loss that corrects for another program having sampled it; detached.

    With w = exp(log_gap), elementwise:

        none     1
        tis      min(w, high)                              truncated importance sampling
        mask     w where w <= high, else 0                 masked importance sampling
        icepop   w where low <= w <= high, else 0          (IcePop, two-sided mask)

    Args:
        log_gap: log(old / rollout), nats, of a token, or summed over the document (`sequence_sum`).
    """
    if kind == "none":
        return torch.ones_like(log_gap)
    weight = log_gap.detach().exp()
    if kind == "tis":
        return weight.clamp(max=high)
    keep = weight <= high
    if kind == "icepop":
        keep = keep & (weight >= low)
    return torch.where(keep, weight, 0.0)


def geometric_mask(mean_gap: Tensor, *, low: float, high: float) -> Tensor:
    """Return 1 where low <= exp(mean_gap) <= high, else 0, elementwise: the geometric mean of old / rollout
    of a document, which does not grow with its length as the product does (verl's seq_mean_k1).

    Args:
        mean_gap: log(old / rollout), nats, mean over the document (`sequence_log_ratio`); no gradient.
    """
    # Logarithms are compared, which cannot overflow as exp(mean_gap) can.
    return ((mean_gap >= math.log(low)) & (mean_gap <= math.log(high))).to(mean_gap.dtype)


def off_policy_mask(mean_drift: Tensor, advantages: Tensor, *, threshold: float) -> Tensor:
    """Return 0 where A < 0 and the mean drift exceeds the threshold, else 1, elementwise (DeepSeek-V3.2,
    arXiv 2512.02556, eq. 9): what the policy has long moved away from is not pushed down further.

    Args:
        mean_drift: log(rollout / policy), nats, mean over the document (`sequence_log_ratio`); no gradient.
        threshold: nats.
    """
    return ((advantages >= 0) | (mean_drift <= threshold)).to(mean_drift.dtype)


def overlong_penalty(lengths: Tensor, *, max_tokens: int, buffer_tokens: int, penalty: float) -> Tensor:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), in units of reward, never positive.

        0                                                        length <= max_tokens - buffer_tokens
        penalty (max_tokens - buffer_tokens - length) / buffer   beyond it, reaching -penalty at max_tokens

    Args:
        lengths: completion tokens, any shape, integer.

    Raises:
        ValueError: when the buffer is longer than max_tokens.
    """
    if buffer_tokens > max_tokens:
        raise ValueError(
            f"overlong.buffer_tokens = {buffer_tokens} exceeds max_tokens = {max_tokens}, so every "
            "completion would be penalised; lower buffer_tokens"
        )
    over = (lengths - (max_tokens - buffer_tokens)).clamp(min=0, max=buffer_tokens)
    return -penalty * over.to(torch.float32) / buffer_tokens


def loss_weights(
    masks: Sequence[Tensor],
    *,
    aggregation: Aggregation,
    max_tokens: int | None = None,
    sequences: Sequence[slice] | None = None,
) -> list[Tensor]:
    """Return each token's weight in the loss of an optimizer step, so that the loss is one plain weighted
    sum.

        sequence_mean   1 / (S n_i)         mean over each sequence's n_i tokens, then over the S sequences
        sequence_sum    1 / S               sum over each sequence's tokens, then mean over the S sequences
        token_mean      1 / sum_i n_i       mean over all tokens of the step
        constant        1 / (S max_tokens)  Dr. GRPO (arXiv 2503.20783, section 3.2)

    A sequence without a trained token (an empty completion) counts in S.

    Args:
        masks: [L_i] bool, one per document of the *whole* step, whatever micro-batch or rank it goes to.
        max_tokens: the constant; only `constant` reads it.
        sequences: the documents of each sequence; None: each is one.

    Returns:
        [L_i] float32 each, 0 where the mask is False.
    """
    if not masks:
        return []
    lengths = torch.tensor([len(mask) for mask in masks])
    flat = torch.cat(list(masks))
    trained = torch.cat([flat.new_zeros(1, dtype=torch.int64), flat.cumsum(0)])  # before each token
    counts = trained[torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])].diff().tolist()
    size = len(masks) if sequences is None else len(sequences)
    if aggregation == "token_mean":
        shares = [1.0 / max(sum(counts), 1)] * len(masks)
    elif aggregation == "sequence_mean":
        if sequences is not None:
            counts = [sum(counts[part]) for part in sequences for _ in counts[part]]
        shares = [1.0 / (size * max(count, 1)) for count in counts]
    elif aggregation == "sequence_sum":
        shares = [1.0 / size] * len(masks)
    else:
        if max_tokens is None:
            raise ValueError("aggregation = 'constant' divides by max_tokens, which is None; pass it")
        shares = [1.0 / (size * max_tokens)] * len(masks)
    weights = flat * torch.tensor(shares, dtype=torch.float32).repeat_interleave(lengths)
    return list(weights.split(lengths.tolist()))


# Losses of preference pairs, elementwise over pairs [P].
#
# A *score* of an answer is its log-probability under the policy, less that under the reference where the
# loss has one, in nats: summed over the answer's trained tokens, or averaged over them
# (`algorithm.average`).


_LARGEST_MEAN_LOGPROB = -1e-6
"""Nats. The odds of a probability of 1 are infinite; beyond this an answer's odds rise no more."""


def dpo(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """[P]: DPO (arXiv 2305.18290, eq. 7); label smoothing as in conservative DPO: the labels are wrong with
    that probability.

        -(1 - e) log sigmoid(beta (chosen - rejected)) - e log sigmoid(-beta (chosen - rejected))

    Args:
        chosen, rejected: [P] log(policy / ref) of whole answers, nats.
    """
    margin = beta * (chosen - rejected)
    return -(1.0 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def robust_dpo(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """[P]: robust DPO (arXiv 2403.00409, eq. 12): its expectation over labels that are flipped with
    probability e is DPO's loss on the right labels.

        (-(1 - e) log sigmoid(m) + e log sigmoid(-m)) / (1 - 2 e),  m = beta (chosen - rejected)

    Args:
        chosen, rejected: [P] log(policy / ref) of whole answers, nats.
        label_smoothing: e, below 0.5.
    """
    margin = beta * (chosen - rejected)
    right, flipped = -logsigmoid(margin), -logsigmoid(-margin)
    return ((1.0 - label_smoothing) * right - label_smoothing * flipped) / (1.0 - 2.0 * label_smoothing)


def ipo(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """[P]: IPO (arXiv 2310.12036, eq. 17): the difference is pulled to 1 / (2 beta) instead of to infinity.

        (chosen - rejected - 1 / (2 beta))^2

    Args:
        chosen, rejected: [P] log(policy / ref), nats. The paper sums over an answer; TRL averages, as the
            paper's authors do, and so does `algorithm.name = "ipo"`; OpenRLHF sums.
    """
    return (chosen - rejected - 1.0 / (2.0 * beta)).square()


def simpo(chosen: Tensor, rejected: Tensor, *, beta: float, margin: float) -> Tensor:
    """[P]: SimPO (arXiv 2405.14734, eq. 6), which needs no reference.

        -log sigmoid(beta (chosen - rejected) - margin)

    Args:
        chosen, rejected: [P] log policy, averaged over the answer's tokens, nats.
        margin: gamma of the paper, by which the chosen answer's reward should be the larger one.
    """
    return -logsigmoid(beta * (chosen - rejected) - margin)


def orpo(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """[P]: ORPO (arXiv 2403.07691, eqs. 6 and 7), which needs no reference: the cross-entropy of the chosen
    answer, and beta (lambda of the paper) times a loss of the odds, odds = p / (1 - p).

        -chosen - beta log sigmoid(log odds(chosen) - log odds(rejected))

    Args:
        chosen, rejected: [P] log policy, averaged over the answer's tokens, nats; p = exp of it.
    """
    return -chosen - beta * logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def bradley_terry(chosen: Tensor, rejected: Tensor, *, margin: Tensor, center_coef: float = 0.0) -> Tensor:
    """[P]: minus the log-probability that the chosen answer wins, by the model of Bradley and Terry (1952),
    with a margin as in Llama 2 (arXiv 2307.09288, section 3.2.2).

        -log sigmoid(chosen - rejected - margin) + center_coef (chosen + rejected)^2

    Args:
        chosen, rejected: [P] scores by a reward model.
        margin: [P], >= 0, in units of the score.
        center_coef: the second term holds the mean of all scores at 0 (arXiv 2312.09244, appendix A).
    """
    return -logsigmoid(chosen - rejected - margin) + center_coef * (chosen + rejected).square()


def kto(
    scores: Tensor, desirable: Tensor, baseline: Tensor, *, beta: float, weights: tuple[float, float]
) -> Tensor:
    """[D]: KTO (arXiv 2402.01306, section 4.1) of single answers, without its constant term.

        w_d (1 - sigmoid(beta (score - z0)))   of a desirable answer
        w_u (1 - sigmoid(beta (z0 - score)))   of an undesirable one

    Args:
        scores: [D] log(policy / ref) of whole answers, nats.
        desirable: [D] bool.
        baseline: [D] z0, nats, without gradient: an estimate of KL(policy || ref), see
            lockstep.algorithms.offline.
        weights: (w_d, w_u), lambda of the paper.
    """
    margin = beta * torch.where(desirable, scores - baseline, baseline - scores)
    return torch.where(desirable, *weights) * torch.sigmoid(-margin)


def _log_odds(logprob: Tensor) -> Tensor:
    logprob = logprob.clamp(max=_LARGEST_MEAN_LOGPROB)
    return logprob - torch.log(-torch.expm1(logprob))


# Monte Carlo estimators of KL(p || q) from samples of p (J. Schulman, http://joschu.net/blog/kl-approx.html).
#
# With r = q(token) / p(token), per token and in nats:
#
#     k1 = -log r               unbiased, high variance, may be negative
#     k2 = (log r)^2 / 2        biased, low variance
#     k3 = (r - 1) - log r      unbiased, low variance, never negative
#
# All take logprobs under p and under q of the same tokens, of any equal shape.
#
# An unbiased value is not an unbiased gradient. p is the policy, and samples of it are differentiated in one
# of two ways: in the loss, mean of grad k; in the reward, mean of k grad log p. Their expectations are
#
#           in the loss       in the reward
#     k1    0                 grad KL(p || q)
#     k2    grad KL(p || q)   neither
#     k3    grad KL(q || p)   grad KL(p || q) - grad KL(q || p)
#
# so that k1 is a penalty in the reward only, k2 and k3 in the loss only; KLConfig refuses the others.


Estimator = Literal["k1", "k2", "k3"]


def kl_k1(p_logprobs: Tensor, q_logprobs: Tensor) -> Tensor:
    """-log r, elementwise, nats."""
    return p_logprobs - q_logprobs


def kl_k2(p_logprobs: Tensor, q_logprobs: Tensor) -> Tensor:
    """(log r)^2 / 2, elementwise, nats."""
    return 0.5 * (q_logprobs - p_logprobs).square()


def kl_k3(p_logprobs: Tensor, q_logprobs: Tensor, *, max_nats: float = math.inf) -> Tensor:
    """(r - 1) - log r, elementwise, nats; expm1 keeps small values from cancelling.

    log r is kept in [-20, 20] (`bounded`), the result below `max_nats`, and beyond either there is no
    gradient. verl does both, with 10 nats (trainer/ppo/core_algos.py, kl_penalty_forward); OpenRLHF bounds
    the result at 10 (models/utils.py, compute_approx_kl); TRL 1.16 bounds neither.
    """
    log_r = bounded(q_logprobs - p_logprobs)
    return (log_r.expm1() - log_r).clamp(max=max_nats)


def kl(p_logprobs: Tensor, q_logprobs: Tensor, *, estimator: Estimator, max_nats: float = math.inf) -> Tensor:
    """The named estimator of KL(p || q), elementwise, nats. k1 and k2 cannot overflow, so max_nats is for k3
    alone."""
    if estimator == "k3":
        return kl_k3(p_logprobs, q_logprobs, max_nats=max_nats)
    return {"k1": kl_k1, "k2": kl_k2}[estimator](p_logprobs, q_logprobs)
