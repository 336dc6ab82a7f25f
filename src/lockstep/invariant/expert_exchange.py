"""Expert parallel: each rank has some of a layer's experts, and computes all ranks' rows of these.

    rows by expert ─► all_to_all ─► by own expert, then rank ─► products ─► all_to_all ─► rows by expert

Rows come back to where they were, so the sum over a token's experts is that of one rank, in its order. Of an
expert the rows of rank 0 come first, each rank's in the order of its tokens.

Source: GShard (arXiv:2006.16668), section 3.2, without a capacity: no token is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.invariant.expert_ops import by_expert, gather_slots
from lockstep.ops.rank_sums import exchange


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertExchange:
    """Sends rows to the ranks that have their experts, and back.

    Of E experts rank r of a group of N has r E / N up to (r + 1) E / N. Every call is collective over the
    group, in forward and in backward, also of a rank without rows.
    """

    group: dist.ProcessGroup

    def __call__(self, rows: Tensor, ends: Tensor, compute: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return compute's result for rows [R, C], which are sorted by expert and end at `ends` [E].

        Args:
            compute: (rows, ends) of this rank's experts -> their results.
        """
        # [N, E / N]: how many rows this rank sends to each expert of each rank, and gets for its own.
        sent = torch.diff(ends.long(), prepend=ends.new_zeros(1).long()).view(self.group.size(), -1)
        received = exchange(sent, self.group)
        # The one wait for the device in a layer: the host allots memory for what arrives.
        to, of = torch.stack([sent.sum(1), received.sum(1)]).tolist()
        arrived = exchange_rows(rows, to, of, self.group)
        local = sent.shape[1]
        experts = torch.arange(local, device=rows.device).repeat(len(to))
        expert_of_row = experts.repeat_interleave(received.flatten(), output_size=sum(of))
        order, inverse, own_ends = by_expert(expert_of_row[:, None], local)
        computed = compute(gather_slots(arrived, order, inverse, 1), own_ends)
        return exchange_rows(gather_slots(computed, inverse, order, 1), of, to, self.group)


def exchange_rows(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """[R, C] -> [sum(received), C]: `sent[r]` rows go to rank r, in order; `received[r]` come from it. Their
    gradients go the other way."""
    out: Tensor = _ExchangedRows.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return out


class _ExchangedRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    # As in rank_sums.exchange: gloo exchanges host memory only.
    staged = rows.is_cuda and "nccl" not in dist.get_backend_config(group)
    mine = rows.cpu() if staged else rows.contiguous()
    out = mine.new_empty(sum(received), *mine.shape[1:])
    dist.all_to_all_single(out, mine, received, sent, group=group)
    return out.to(rows.device)
