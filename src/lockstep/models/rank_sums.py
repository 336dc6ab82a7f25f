"""The sums over ranks that tensor parallel inserts into a module, forward or backward.

Each is one opaque op, so a compiled layer stays one graph.
"""

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
    # Where several ranks share a GPU, gloo has no all-to-all.
    exchanges = not x.is_cuda or "nccl" in dist.get_backend_config(group)
    if group.size() > 2 and large and exchanges:
        return exchanged_sum(x, group)
    return gathered_sum(x, group)


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
    parts = x.new_empty(group.size(), *x.shape)
    _all_gather(parts.view(-1), x.contiguous().view(-1), group=group)
    return add_in_order(parts)


def exchanged_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The same bits from two collectives: every rank adds up a part of x, and the parts are gathered: the
    bytes of an all-reduce."""
    size, count = group.size(), x.numel()
    share = -(-count // size)
    flat = x.contiguous().view(-1)
    if share * size > count:
        flat = torch.cat([flat, flat.new_zeros(share * size - count)])
    parts = torch.empty_like(flat)
    dist.all_to_all_single(parts, flat, group=group)
    total = torch.empty_like(flat)
    _all_gather(total, add_in_order(parts.view(size, share)), group=group)
    return total[:count].view(x.shape)


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
