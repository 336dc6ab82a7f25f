"""Sums over ranks: those that tensor parallel inserts into a module, each one opaque op, so that a compiled
layer stays one graph; and what fixes the order of a sum."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

_SMALL_BYTES = 1 << 20
"""Up to here the time of a collective is its latency: one that sends more is faster than two."""
# torch 2.13 has it under a new name and warns of the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _group(name: str) -> dist.ProcessGroup:
    # The group travels by name because arguments of a custom op are tensors, numbers and strings. Private, in
    # torch 2.11 to 2.13; torch's own functional collectives look groups up by it.
    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    group: dist.ProcessGroup = resolve(name)
    return group


@torch.library.custom_op("lockstep::tp_all_reduce", mutates_args=())
def tp_all_reduce(x: Tensor, group_name: str) -> Tensor:
    """The sum of x over the ranks of the group; backward: identity, since every rank uses the same sum."""
    # A custom op may neither change its input nor return it.
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=_group(group_name))
    return total


@torch.library.custom_op("lockstep::tp_ordered_sum", mutates_args=())
def tp_ordered_sum(x: Tensor, group_name: str) -> Tensor:
    """Like `tp_all_reduce`, added up in rank order, in float32, and rounded once.

    So an element of the sum is a function of the ranks' elements alone, and a row does not depend on the
    other rows. NCCL's all-reduce picks an algorithm, and with it an order, by the size of x.
    """
    group = _group(group_name)
    large = x.numel() * x.element_size() > _SMALL_BYTES
    return (exchanged_sum if large and group.size() > 2 else gathered_sum)(x, group)


@tp_all_reduce.register_fake
@tp_ordered_sum.register_fake
def _(x: Tensor, group_name: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _identity_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return gradient, None


tp_all_reduce.register_autograd(_identity_backward)
tp_ordered_sum.register_autograd(_identity_backward)


def gathered_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The ordered sum, made whole by every rank: one collective, N - 1 times x comes in."""
    return add_in_order(gather_rows(x[None], group))


def exchanged_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The same bits from two collectives: every rank adds up a part of x, and the parts are gathered: the
    bytes of an all-reduce."""
    size, count = group.size(), x.numel()
    share = -(-count // size)
    flat = x.contiguous().view(-1)
    if share * size > count:
        flat = torch.cat([flat, flat.new_zeros(share * size - count)])
    total = torch.empty_like(flat)
    _all_gather(total, add_in_order(exchange(flat.view(size, share), group)), group=group)
    return total[:count].view(x.shape)


def gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[n, ...] of every rank -> [N * n, ...], in rank order."""
    rows = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    _all_gather(rows, x.contiguous(), group=group)
    return rows


def exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[N, ...] -> [N, ...]: part i goes to rank i; what came from rank i is part i."""
    # Where several ranks share a GPU they have gloo, which exchanges host memory only.
    staged = parts.is_cuda and "nccl" not in dist.get_backend_config(group)
    sent = parts.cpu() if staged else parts.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.to(parts.device)


def add_in_order(parts: Tensor) -> Tensor:
    """[N, ...] -> [...]: part 0, plus part 1, and so on, in float32 or what is wider; rounded once."""
    if len(parts) == 2:  # one kernel, which computes in float32 as well
        return parts[0] + parts[1]
    total = parts[0].to(torch.promote_types(parts.dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)


class _SumBackward(torch.autograd.Function):
    """Identity; backward: the gradient's sum over the ranks, each of which used x for a part of the work."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: str) -> Tensor:
        ctx.group_name = group_name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.ops.lockstep.tp_all_reduce(gradient, ctx.group_name), None


def sum_in_backward(x: Tensor, group_name: str) -> Tensor:
    """Return x; its gradient is added up over the group."""
    total: Tensor = _SumBackward.apply(x, group_name)  # type: ignore[no-untyped-call]
    return total
