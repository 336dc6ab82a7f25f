"""Logits and token figures of a converted head, for lockstep.ops.logprobs and for engines."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lockstep.invariant.linear import tiled_product
from lockstep.invariant.modules import InvariantLinear
from lockstep.invariant.row_ops import token_stats
from lockstep.ops.logprobs import HeadKernels


def head_kernels(linear: nn.Linear) -> HeadKernels | None:
    """Return the kernels of a language-model head; None: it is not converted."""
    if not isinstance(linear, InvariantLinear):
        return None
    tiles, stock = linear.tiles, linear.stock

    def logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        if stock:
            if bias is None:
                return torch.mm(hidden, weight.t(), out=out)
            return torch.addmm(bias, hidden, weight.t(), out=out)
        if hidden.is_cuda:
            from lockstep.invariant import triton_kernels

            return triton_kernels.matmul(hidden, weight.t(), bias, out=out)
        return tiled_product(hidden, weight, bias, tiles=tiles, out=out)

    def stats(
        logits: Tensor, labels: Tensor, scale: float, cap: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        figures: tuple[Tensor, Tensor, Tensor] = token_stats(logits, labels, scale, cap)
        return figures

    return HeadKernels(logits=logits, stats=stats)
