"""Losses of preference pairs, elementwise over pairs [P].

A *score* of an answer is its log-probability under the policy, less that under the reference where the loss
has one, in nats: summed over the answer's trained tokens, or averaged over them (`algorithm.average`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

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
            lockstep.algorithms.preferences.
        weights: (w_d, w_u), lambda of the paper.
    """
    margin = beta * torch.where(desirable, scores - baseline, baseline - scores)
    return torch.where(desirable, *weights) * torch.sigmoid(-margin)


def _log_odds(logprob: Tensor) -> Tensor:
    logprob = logprob.clamp(max=_LARGEST_MEAN_LOGPROB)
    return logprob - torch.log(-torch.expm1(logprob))
