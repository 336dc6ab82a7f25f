"""A loss: Simple Policy Optimization (arXiv 2401.16025), which pulls the ratio back instead of clipping it.

lockstep train grpo --recipe tiny --algorithm.objective simple_policy:loss --train.epochs-per-batch 2
"""

from torch import Tensor

from lockstep.algorithms.policy_loss import PolicyTerms, zero_without_advantages
from lockstep.config.algorithm import GRPOConfig


@zero_without_advantages
def loss(terms: PolicyTerms, config: GRPOConfig) -> Tensor:
    """[R]: -(w A - |A| / (2 eps) (w - 1)^2) of each token, with eps = algorithm.clip_high."""
    assert config.clip_high is not None
    pull = terms.advantages.abs() / (2 * config.clip_high) * (terms.ratio - 1).square()
    return pull - terms.ratio * terms.advantages
