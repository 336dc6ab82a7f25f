"""Monte Carlo estimators of KL(p || q) from samples of p (J. Schulman, http://joschu.net/blog/kl-approx.html).

With r = q(token) / p(token), per token and in nats:

    k1 = -log r               unbiased, high variance, may be negative
    k2 = (log r)^2 / 2        biased, low variance; its gradient by log p is that of KL(p || q)
    k3 = (r - 1) - log r      unbiased, low variance, never negative

All take logprobs under p and under q of the same tokens, of any equal shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]


def kl_k1(p_logprobs: Tensor, q_logprobs: Tensor) -> Tensor:
    """-log r, elementwise, nats."""
    return p_logprobs - q_logprobs


def kl_k2(p_logprobs: Tensor, q_logprobs: Tensor) -> Tensor:
    """(log r)^2 / 2, elementwise, nats."""
    return 0.5 * (q_logprobs - p_logprobs).square()


def kl_k3(p_logprobs: Tensor, q_logprobs: Tensor) -> Tensor:
    """(r - 1) - log r, elementwise, nats; expm1 keeps small values from cancelling."""
    log_r = q_logprobs - p_logprobs
    return log_r.expm1() - log_r


_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def kl(p_logprobs: Tensor, q_logprobs: Tensor, *, estimator: Estimator) -> Tensor:
    """The named estimator of KL(p || q), elementwise, nats."""
    return _ESTIMATORS[estimator](p_logprobs, q_logprobs)
