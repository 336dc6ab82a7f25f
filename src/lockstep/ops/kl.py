"""Monte Carlo estimators of KL(p || q) from samples of p (J. Schulman, http://joschu.net/blog/kl-approx.html).

With r = q(token) / p(token), per token and in nats:

    k1 = -log r               unbiased, high variance, may be negative
    k2 = (log r)^2 / 2        biased, low variance
    k3 = (r - 1) - log r      unbiased, low variance, never negative

All take logprobs under p and under q of the same tokens, of any equal shape.

An unbiased value is not an unbiased gradient. p is the policy, and samples of it are differentiated in one of
two ways: in the loss, mean of grad k; in the reward, mean of k grad log p. Their expectations are

          in the loss       in the reward
    k1    0                 grad KL(p || q)
    k2    grad KL(p || q)   neither
    k3    grad KL(q || p)   grad KL(p || q) - grad KL(q || p)

so that k1 is a penalty in the reward only, k2 and k3 in the loss only; KLConfig refuses the others.
"""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

from lockstep.ops.masks import bounded

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
