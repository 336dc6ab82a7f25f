"""Losses of the routers of a mixture of experts, and how evenly experts are loaded.

Shapes: L layers, T tokens, E experts, k experts of a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def expert_counts(chosen: Tensor, times: Tensor, num_experts: int) -> Tensor:
    """[E] float32: how often each expert was chosen.

    Args:
        chosen: [T, k] int64, different experts in each row.
        times: [T] float32, how often each row counts; 0: padding.

    Example:
        >>> expert_counts(torch.tensor([[0, 2], [2, 1]]), torch.tensor([1.0, 3.0]), 4)
        tensor([1., 3., 4., 0.])
    """
    # Not bincount or scatter_add, which wait for a GPU or add in any order.
    hot = times.new_zeros(chosen.shape[0], num_experts).scatter(1, chosen, 1.0)
    return (hot * times[:, None]).sum(0)


def load_balancing_loss(logits: Sequence[Tensor], chosen: Sequence[Tensor], times: Tensor) -> Tensor:
    """Scalar: E sum_e f_e p_e, with f_e the share of tokens that expert e got, over tokens and layers (they
    add up to k), and p_e the mean of its probability. k where all experts are loaded alike. Its gradient goes
    through p alone.

    Switch Transformer (arXiv 2101.03961), equations 4 to 6, for k experts and all layers together, as
    transformers' `load_balancing_loss_func` (models/mixtral/modeling_mixtral.py).

    Args:
        logits: [T, E] of each layer.
        chosen: [T, k] int64 of each layer.
        times: [T] float32, how often each row counts; 0: padding.
    """
    num_experts = logits[0].shape[1]
    counts = torch.stack([expert_counts(each, times, num_experts) for each in chosen]).sum(0)
    sums = torch.stack([(each.float().softmax(-1) * times[:, None]).sum(0) for each in logits]).sum(0)
    rows = times.sum() * len(logits)
    return num_experts * ((counts / rows) * (sums / rows)).sum()


def router_z_loss(logits: Sequence[Tensor], times: Tensor) -> Tensor:
    """Scalar: the mean of logsumexp(logits)^2 over tokens and layers, which keeps logits small.

    ST-MoE (arXiv 2202.08906), equation 5. Arguments as of `load_balancing_loss`.
    """
    squares = [(each.float().logsumexp(-1).square() * times).sum() for each in logits]
    return torch.stack(squares).sum() / (times.sum() * len(logits))


def load_metrics(counts: Tensor) -> dict[str, float]:
    """Return load_max, the load of the fullest expert of any layer as a multiple of the mean, and entropy,
    that of the loads divided by log E, a mean over layers: both are 1 where all experts are loaded alike.

    Args:
        counts: [L, E], how often each expert of each layer was chosen.

    Example:
        >>> load_metrics(torch.tensor([[2.0, 2.0], [4.0, 0.0]]))
        {'load_max': 2.0, 'entropy': 0.5}
    """
    shares = counts.double() / counts.double().sum(-1, keepdim=True)
    num_experts = counts.shape[1]
    entropies = torch.special.entr(shares).sum(-1) / math.log(num_experts)
    return {"load_max": float(shares.max() * num_experts), "entropy": float(entropies.mean())}
