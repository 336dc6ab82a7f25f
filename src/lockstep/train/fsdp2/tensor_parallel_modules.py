"""The sums over ranks that tensor parallel inserts into a transformers module, forward or backward.

Names of Parameters stay as they are. Inside a compiled layer the collectives are one opaque op, so a layer
stays one graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import distributed_c10d


@torch.library.custom_op("lockstep::tp_all_reduce", mutates_args=())
def tp_all_reduce(x: Tensor, group_name: str) -> Tensor:
    """The sum of x over the ranks of the group; backward: identity, since every rank uses the same sum."""
    # A custom op may neither change its input nor return it.
    total = x.clone(memory_format=torch.contiguous_format)
    # The group travels by name because arguments of a custom op are tensors, numbers and strings. Private, in
    # torch 2.11 to 2.13; torch's own functional collectives look groups up by it.
    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    dist.all_reduce(total, group=resolve(group_name))
    return total


@tp_all_reduce.register_fake
def _(x: Tensor, group_name: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _identity_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return gradient, None


tp_all_reduce.register_autograd(_identity_backward)


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


class RowParallelLinear(nn.Linear):
    """A linear of which each rank has some input columns: the products are added up, then the bias once.

    Takes over the Parameters of `whole`, whose weight is cut already.
    """

    def __init__(self, whole: nn.Linear, group_name: str) -> None:
        # Not Linear's own, which would allocate and fill a weight that is replaced at once.
        nn.Module.__init__(self)
        self.in_features, self.out_features = whole.weight.shape[1], whole.weight.shape[0]
        self.weight = whole.weight
        self.register_parameter("bias", whole.bias)
        self.group_name = group_name
        self.training = whole.training

    def forward(self, input: Tensor) -> Tensor:
        """[..., this rank's part of the inputs] -> [..., all outputs], the same on all ranks."""
        total: Tensor = torch.ops.lockstep.tp_all_reduce(F.linear(input, self.weight), self.group_name)
        return total if self.bias is None else total + self.bias


class VocabLookup:
    """The forward of an embedding of which each rank has the rows start:stop: rows of ids that are elsewhere
    count as 0, and the ranks' results are added up, which is exact."""

    def __init__(self, embedding: nn.Embedding, *, start: int, stop: int, group_name: str) -> None:
        self._lookup: Callable[[Tensor], Tensor] = embedding.forward
        self._start, self._stop, self._group_name = start, stop, group_name
        pad = embedding.padding_idx
        # The row that gets no gradient, here or on another rank.
        embedding.padding_idx = pad - start if pad is not None and start <= pad < stop else None
        embedding.num_embeddings = stop - start

    def __call__(self, input_ids: Tensor) -> Tensor:
        """ids [...] -> [..., C], the same on all ranks."""
        here = (input_ids >= self._start) & (input_ids < self._stop)
        # Row 0 stands in for ids of other ranks. It may hold anything, so it is selected away below, not
        # multiplied by 0.
        rows = self._lookup(torch.where(here, input_ids - self._start, 0))
        total: Tensor = torch.ops.lockstep.tp_all_reduce(
            torch.where(here[..., None], rows, 0.0), self._group_name
        )
        return total


def share_input(block: nn.Module, group_name: str) -> None:
    """Add up the gradient of the input of `block` (attention or MLP) over the ranks: once, however many of
    its projections read it."""

    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            # transformers passes the hidden states to an MLP by position, to attention by keyword.
            return (sum_in_backward(args[0], group_name), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": sum_in_backward(kwargs["hidden_states"], group_name)}

    block.register_forward_pre_hook(hook, with_kwargs=True)
