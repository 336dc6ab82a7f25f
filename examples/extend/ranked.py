"""An advantage estimator: where a rollout ranks in its group, so that the size of rewards does not matter.

lockstep train grpo --recipe tiny --algorithm.advantage ranked:advantages
"""

from torch import Tensor


def advantages(rewards: Tensor, mask: Tensor) -> Tensor:
    """[G, n] from -1 (worst of its group) to 1 (best); a rollout with mask False does not count."""
    higher = (rewards[:, :, None] > rewards[:, None, :]) & mask[:, None, :]
    lower = (rewards[:, :, None] < rewards[:, None, :]) & mask[:, None, :]
    return (higher.sum(2) - lower.sum(2)) / (mask.sum(1, keepdim=True) - 1).clamp(min=1)
