"""Advantages from rewards, of groups `[G, n]` (G prompts, n rollouts each) and of packed tokens `[T]`.

A group that lost a rollout has mask False there; such entries may hold anything and get advantage 0.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lockstep.ops.masks import document_ids, masked, masked_mean

EPS = 1e-4
"""Added to a standard deviation before dividing by it, in units of reward."""


def group_mean(rewards: Tensor, mask: Tensor | None = None) -> Tensor:
    """[G, n]: r - mean of the group (Dr. GRPO, arXiv 2503.20783, section 3.2); exactly 0 in a group of equal
    rewards, whatever their mean rounds to."""
    mask = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask
    kept = torch.where(mask, rewards, 0.0)
    mean = kept.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    least = torch.where(mask, rewards, torch.inf).amin(1, keepdim=True)
    most = torch.where(mask, rewards, -torch.inf).amax(1, keepdim=True)
    return torch.where(mask & (least < most), rewards - mean, 0.0)


def group_mean_std(rewards: Tensor, mask: Tensor | None = None, *, eps: float = EPS) -> Tensor:
    """[G, n]: (r - mean) / (std + eps) of the group (GRPO, arXiv 2402.03300, section 4.1.2).

    std has the n - 1 of torch.std, as in TRL. A group of one rollout, or of equal rewards, gets 0.
    """
    mask = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask
    centred = group_mean(rewards, mask)
    degrees = (mask.sum(1, keepdim=True) - 1).clamp(min=1)
    std = (centred.square().sum(1, keepdim=True) / degrees).sqrt()
    return centred / (std + eps)


def group_mean_step_std(rewards: Tensor, mask: Tensor | None = None, *, eps: float = EPS) -> Tensor:
    """[G, n]: (r - mean of the group) / (std + eps), with the std of all rewards of the step (TRL's
    scale_rewards = "batch", after arXiv 2508.08221).

    std is of the rewards themselves, with N - 1 for N of them. A group of one rollout, or of equal rewards,
    gets 0.
    """
    mask = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask
    count = mask.sum()
    mean = torch.where(mask, rewards, 0.0).sum() / count.clamp(min=1)
    off = torch.where(mask, rewards - mean, 0.0)
    std = (off.square().sum() / (count - 1).clamp(min=1)).sqrt()
    return group_mean(rewards, mask) / (std + eps)


def leave_one_out(rewards: Tensor, mask: Tensor | None = None) -> Tensor:
    """[G, n]: r - mean of the group's other rollouts (RLOO, arXiv 2402.14740, section 3.3).

    That is n / (n - 1) times `group_mean`. A group of one rollout has no others and gets 0.
    """
    mask = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask
    count = mask.sum(1, keepdim=True)
    return group_mean(rewards, mask) * count / (count - 1).clamp(min=1)


def batch_mean_std(values: Tensor, mask: Tensor | None = None, *, eps: float = EPS) -> Tensor:
    """(v - mean) / (std + eps) over every entry with mask True (REINFORCE++, arXiv 2501.03262, section 3).

    Of `group_mean` rewards it is REINFORCE++-baseline.

    Args:
        values: rewards [G, n], or the returns of all trained tokens of the step [T].
        mask: same shape, bool.
    """
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    count = mask.sum()
    mean = torch.where(mask, values, 0.0).sum() / count.clamp(min=1)
    centred = torch.where(mask, values - mean, 0.0)
    std = (centred.square().sum() / (count - 1).clamp(min=1)).sqrt()
    return centred / (std + eps)


def normalize_then_sum(advantages: Tensor, weights: Tensor, mask: Tensor, *, eps: float = EPS) -> Tensor:
    """[G, n]: the advantages of K rewards, each made by itself, added with their weights and whitened over
    the step (GDPO, arXiv 2601.05242; TRL's multi_objective_aggregation). A group in which no reward has an
    advantage gets exactly 0.

    Args:
        advantages: [K, G, n]. weights: [K]. mask: [G, n] bool, True where there is a rollout.
    """
    total = (weights[:, None, None] * torch.where(mask, advantages, 0.0)).sum(0)
    return torch.where(total.any(1, keepdim=True), batch_mean_std(total, mask, eps=eps), 0.0)


def reward_to_go(token_rewards: Tensor, cu_seqlens: Tensor, *, gamma: float = 1.0) -> Tensor:
    """[T]: sum over the rest of the document of gamma^(k - t) r_k, r_t included.

    Args:
        token_rewards: [T], 0 where a token earns nothing. cu_seqlens: [D + 1].
    """
    zeros = torch.zeros_like(token_rewards)
    return gae(token_rewards, zeros, cu_seqlens, gamma=gamma, lam=1.0)


def gae(
    token_rewards: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    *,
    gamma: float = 1.0,
    lam: float | Tensor = 1.0,
    final_values: Tensor | None = None,
) -> Tensor:
    """Generalised advantage estimation over packed documents (arXiv 1506.02438, eq. 16).

        delta_t = r_t + gamma V_{t+1} - V_t         A_t = delta_t + gamma lam A_{t+1}

    with V = `final_values` and A = 0 after a document's last slot. The scan doubles its reach instead of
    walking over tokens: log2(T) passes over [T].

    Args:
        token_rewards: [T], the reward of each action, 0 where a slot is no action.
        values: [T], the value before each action, 0 elsewhere; the next value is that of the next
            slot, so actions must lie side by side.
        cu_seqlens: [D + 1].
        lam: for all documents, or [D].
        final_values: [D], the value of the state after each document's last slot: 0 where it has ended, V
            where it was only cut off. None: all have ended.

    Returns:
        [T] advantages, in the dtype of token_rewards; returns are advantages + values.
    """
    num_slots = token_rewards.shape[0]
    ids = document_ids(cu_seqlens, num_slots)
    following = torch.cat([values[1:], values.new_zeros(1)])
    same = torch.cat([ids[1:] == ids[:-1], ids.new_zeros(1, dtype=torch.bool)])
    after: Tensor | float = 0.0 if final_values is None else final_values.to(values.dtype)[ids]
    total = token_rewards + gamma * torch.where(same, following, after) - values
    reach, decay = 1, gamma * (lam if isinstance(lam, float) else lam.to(values.dtype)[ids])
    while reach < num_slots:
        further = torch.cat([total[reach:], total.new_zeros(reach)])
        same = torch.cat([ids[reach:] == ids[:-reach], ids.new_zeros(reach, dtype=torch.bool)])
        total = total + decay**reach * torch.where(same, further, 0.0)
        reach *= 2
    return total


# Losses and figures of value models: per token, pure. Values, returns and errors are in units of reward.


ValueLossKind = Literal["squared", "huber"]


class TokenValueLoss(NamedTuple):
    """The loss of each token, and where the clipped value decided it."""

    loss: Tensor
    """[R]; its gradient is 0 where the clipped value decides and is at its bound."""
    clipped: Tensor
    """[R] bool."""


def value_loss(
    values: Tensor,
    returns: Tensor,
    old_values: Tensor,
    *,
    clip: float = 0.0,
    kind: ValueLossKind = "squared",
    huber_delta: float = 1.0,
) -> TokenValueLoss:
    """max(l(V - R), l(V_old + clamp(V - V_old, -clip, clip) - R)), elementwise: verl's compute_value_loss and
    OpenRLHF's ValueLoss, which both come with the factor 1/2 that l has here.

    Args:
        values: [R], of the model as it is. returns: [R], the targets. old_values: [R], before the update.
        clip: 0: l(V - R) alone.
        kind: squared: l(e) = e^2 / 2. huber: the same up to |e| = huber_delta, then
            huber_delta (|e| - huber_delta / 2).
    """
    free = _penalty(values - returns, kind=kind, huber_delta=huber_delta)
    if clip == 0.0:
        return TokenValueLoss(free, torch.zeros_like(free, dtype=torch.bool))
    # Not old + clamp(V - old): within the bounds this is exactly V, so rounding does not count as clipped.
    near = torch.clamp(values, old_values - clip, old_values + clip)
    bounded = _penalty(near - returns, kind=kind, huber_delta=huber_delta)
    return TokenValueLoss(torch.maximum(free, bounded), bounded.detach() > free.detach())


def _penalty(error: Tensor, *, kind: ValueLossKind, huber_delta: float) -> Tensor:
    square = 0.5 * error.square()
    if kind == "squared":
        return square
    return torch.where(error.abs() <= huber_delta, square, huber_delta * (error.abs() - 0.5 * huber_delta))


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor | None = None) -> Tensor:
    """Scalar: 1 - Var(R - V) / Var(R) over entries with mask True: 1 for perfect values, 0 for a constant,
    below 0 for worse than that; 0 where all returns are equal."""
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    total, left = _variance(returns, mask), _variance(returns - values, mask)
    return torch.where(total > 0, 1.0 - left / torch.where(total > 0, total, 1.0), 0.0)


def _variance(x: Tensor, mask: Tensor) -> Tensor:
    return masked_mean(masked(x - masked_mean(x, mask), mask).square(), mask)
