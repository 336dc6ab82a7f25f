"""Softmax over a vocabulary of which each rank of a group holds a part of the logits.

Every rank makes four figures per row of its own part (`partial_stats`), all ranks gather them (one collective
of 16 bytes per row and rank) and merge them in rank order, so that all have the same bits. With the logits x
of rank i, m_i = max x, s_i = sum exp(x - m_i), w_i = sum exp(x - m_i) (x - m_i) and m = max m_i:

    s = sum_i s_i exp(m_i - m)        w = sum_i exp(m_i - m) (w_i + (m_i - m) s_i)
    lse = m + log s                   entropy = log s - w / s
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabShard:
    """The rows of the head's weight on this rank; every rank of the group holds others.

    Raises:
        ValueError: an empty part, or one outside of the vocabulary.
    """

    group: dist.ProcessGroup
    start: int
    stop: int
    """Vocabulary ids start <= id < stop; parts may be unequal, and follow each other in rank order."""
    whole: int
    """V: ids of all ranks together."""

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop <= self.whole:
            raise ValueError(f"no part of a vocabulary of {self.whole}: {self.start}:{self.stop}")

    @property
    def common_width(self) -> int:
        """The mean number of ids per rank, rounded up; the same on all of them."""
        return -(-self.whole // self.group.size())


def partial_stats(x: Tensor, labels: Tensor, *, start: int) -> Tensor:
    """[4, r]: m, s, w and x at the label (-inf where the label is elsewhere) of x [r, part], in x's dtype.

    Overwrites x.

    Args:
        labels: [r] int64, ids of the whole vocabulary.
        start: id of x's first column.
    """
    local = labels - start
    here = (local >= 0) & (local < x.shape[1])
    at_label = x.gather(1, local.clamp(0, x.shape[1] - 1)[:, None])[:, 0]
    peak = x.amax(-1, keepdim=True)
    e = x.sub_(peak).exp()
    total = e.sum(-1)
    return torch.stack([peak[:, 0], total, e.mul_(x).sum(-1), torch.where(here, at_label, -torch.inf)])


def merged_stats(own: Tensor, labels: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """logprob, entropy and lse, [r] each, of the figures [4, r] of `partial_stats`; collective.

    Rows with a negative label have logprob 0 and entropy 0. A label that no rank holds has logprob -inf.
    """
    parts = own.new_empty(group.size(), *own.shape)
    dist.all_gather(list(parts.unbind()), own.contiguous(), group=group)
    peaks, totals, weighted, at_labels = parts.unbind(1)
    peak = peaks.amax(0)
    # At most 0, so that no exponential overflows.
    shift = peaks - peak
    factor = shift.exp()
    total = (totals * factor).sum(0)
    log_total = total.log()
    entropy = log_total - (factor * (weighted + shift * totals)).sum(0) / total
    lse = peak + log_total
    valid = labels >= 0
    return torch.where(valid, at_labels.amax(0) - lse, 0.0), torch.where(valid, entropy, 0.0), lse
