"""Linear and bmm whose rows depend neither on the number of other rows nor on their position among them.

A GEMM library picks its kernel by the number of rows M, and kernels differ in the order in which they add
over K. So on the CPU every product here has one of a few fixed row counts, the tiles: T rows run as as many
whole tiles as fit, large ones first, and the rest is padded to the smallest. `self_test` keeps, per weight
shape, those tiles whose rows are bitwise equal. On CUDA the op is the Triton kernel of
triton_kernels.py, for weight shapes where stock cuBLASLt fails the self-test.

    lockstep::linear(x [..., K], weight [N, K], bias [N] | None, tiles, exact_backward) -> [..., N]
    lockstep::bmm(x [B, M, K], y [B, K, N], tiles) -> [B, M, N]

The backward is ordinary GEMMs, deterministic; with `exact_backward` the gradient of a row of x, too, depends
on nothing but the row. The gradient of the weight sums over rows, so it cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

TILES = (128, 64, 32, 16, 8)
"""Row counts of CPU products, if the self-test finds them equal. 128 rows cost what F.linear costs; 8 is the
smallest that does not run as matrix-vector products, and costs F.linear of 8 rows."""


def spans(num_rows: int, tiles: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first row, tile) of the products that cover the rows; the last tile may reach beyond them.

    Example:
        >>> spans(150, (128, 16, 8))
        [(0, 128), (128, 16), (144, 8)]
    """
    products, start = [], 0
    for tile in sorted(tiles, reverse=True):
        while num_rows - start >= tile:
            products.append((start, tile))
            start += tile
    if start < num_rows:
        products.append((start, min(tiles)))
    return products


def tiled_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, tiles: Sequence[int], out: Tensor | None = None
) -> Tensor:
    """x [T, K] @ weight [N, K].T + bias in row tiles, into `out` [T, N] if given; no gradient."""
    num_rows = x.shape[0]
    out = x.new_empty(num_rows, weight.shape[0]) if out is None else out
    x, transposed = x.contiguous(), weight.t()
    for start, tile in spans(num_rows, tiles):
        rest = num_rows - start
        if rest >= tile:
            _product(x[start : start + tile], transposed, bias, out[start : start + tile])
        else:
            padded = x.new_zeros(tile, x.shape[1])
            padded[:rest] = x[start:]
            out[start:] = _product(padded, transposed, bias, out.new_empty(tile, out.shape[1]))[:rest]
    return out


def _product(x: Tensor, transposed: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    if bias is None:
        return torch.mm(x, transposed, out=out)
    return torch.addmm(bias, x, transposed, out=out)


# A custom op because inductor takes no notice of a kernel registered for aten::mm: it calls extern kernels by
# their out= form. An opaque op gives the same bits in eager, aot_eager and inductor.
@torch.library.custom_op("lockstep::linear", mutates_args=(), device_types="cpu")
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, tiles: Sequence[int], exact_backward: bool = False
) -> Tensor:
    """See the module's docstring."""
    rows = tiled_product(x.reshape(-1, x.shape[-1]), weight, bias, tiles=tiles)
    return rows.view(*x.shape[:-1], weight.shape[0])


@linear.register_kernel("cuda")
def _linear_cuda(
    x: Tensor, weight: Tensor, bias: Tensor | None, tiles: Sequence[int], exact_backward: bool = False
) -> Tensor:
    from lockstep.invariant import triton_kernels

    rows = triton_kernels.matmul(x.reshape(-1, x.shape[-1]), weight.t(), bias)
    return rows.view(*x.shape[:-1], weight.shape[0])


@linear.register_fake
def _linear_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, tiles: Sequence[int], exact_backward: bool = False
) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _linear_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, tiles, exact_backward = inputs
    # Beside a frozen weight (LoRA's base) nothing reads x again, so it is not kept.
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
    ctx.tiles, ctx.exact, ctx.has_bias = tiles, exact_backward, bias is not None


def _linear_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
    x, weight = ctx.saved_tensors
    rows = dy.reshape(-1, dy.shape[-1])
    dx = dweight = dbias = None
    if ctx.needs_input_grad[0]:
        exact = ctx.exact
        dx = linear(rows, weight.t().contiguous(), None, ctx.tiles) if exact else rows @ weight
        dx = dx.view(*dy.shape[:-1], weight.shape[1])
    if ctx.needs_input_grad[1]:
        dweight = rows.t() @ x.reshape(-1, x.shape[-1])
    if ctx.has_bias and ctx.needs_input_grad[2]:
        dbias = rows.sum(0)
    return dx, dweight, dbias, None, None


linear.register_autograd(_linear_backward, setup_context=_linear_context)


@torch.library.custom_op("lockstep::bmm", mutates_args=(), device_types="cpu")
def bmm(x: Tensor, y: Tensor, tiles: Sequence[int]) -> Tensor:
    """See the module's docstring."""
    out = x.new_empty(x.shape[0], x.shape[1], y.shape[2])
    for left, right, product in zip(x, y, out, strict=True):
        tiled_product(left, right.t(), None, tiles=tiles, out=product)
    return out


@bmm.register_kernel("cuda")
def _bmm_cuda(x: Tensor, y: Tensor, tiles: Sequence[int]) -> Tensor:
    from lockstep.invariant import triton_kernels

    return torch.stack([triton_kernels.matmul(left, right, None) for left, right in zip(x, y, strict=True)])


@bmm.register_fake
def _bmm_fake(x: Tensor, y: Tensor, tiles: Sequence[int]) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1], y.shape[2])


def _bmm_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])


def _bmm_backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, y = ctx.saved_tensors
    dx = dout @ y.transpose(1, 2) if ctx.needs_input_grad[0] else None
    dy = x.transpose(1, 2) @ dout if ctx.needs_input_grad[1] else None
    return dx, dy, None


bmm.register_autograd(_bmm_backward, setup_context=_bmm_context)
