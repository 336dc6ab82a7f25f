"""Triton kernels of a mixture of experts: the sum over a token's slots, SwiGLU, and their gradients.

See lockstep.invariant.triton_kernels, also for what keeps their rows invariant. PyTorch's own operations
would write float32 copies of every slot's rows, and take longer than the experts' products.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.invariant.triton_kernels import _aligned, _on

_BLOCK = 1024


@triton.jit
def _slot_sums_kernel(  # signature: pointers, sizes and constants of a Triton kernel
    rows_ptr,
    places_ptr,
    weights_ptr,
    out_ptr,
    width,
    SLOTS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some columns of one token."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for slot in tl.static_range(SLOTS):
        row = tl.load(places_ptr + token * SLOTS + slot)
        term = tl.load(rows_ptr + row * width + cols, mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            term = term * tl.load(weights_ptr + token * SLOTS + slot).to(tl.float32)
        total += term
    tl.store(out_ptr + token * width + cols, total.to(out_ptr.dtype.element_ty), mask=mask)


def slot_sums(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """[T, C]: for each token the sum of the rows [R, C] at places [T, k], times weights [T, k], added in the
    order of its slots in float32."""
    tokens, slots = places.shape
    out = rows.new_empty(tokens, rows.shape[1])
    if tokens == 0:
        return out
    rows = _aligned(rows)
    with _on(rows):
        _slot_sums_kernel[(tokens, triton.cdiv(rows.shape[1], _BLOCK))](
            rows,
            places.contiguous(),
            rows if weights is None else _aligned(weights),
            out,
            rows.shape[1],
            SLOTS=slots,
            WEIGHTED=weights is not None,
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return out


@triton.jit
def _combine_grad_kernel(  # signature: pointers, sizes and constants of a Triton kernel
    dy_ptr,
    rows_ptr,
    weights_ptr,
    order_ptr,
    drows_ptr,
    dweights_ptr,
    width,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: its gradient, and that of its weight."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(order_ptr + row)
    weight = tl.load(weights_ptr + slot).to(tl.float32)
    totals = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < width
        dy = tl.load(dy_ptr + (slot // SLOTS) * width + cols, mask=mask, other=0.0).to(tl.float32)
        totals += dy * tl.load(rows_ptr + row * width + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(drows_ptr + row * width + cols, (dy * weight).to(drows_ptr.dtype.element_ty), mask=mask)
    tl.store(dweights_ptr + slot, tl.sum(totals, 0).to(dweights_ptr.dtype.element_ty))


def combine_grad(dy: Tensor, rows: Tensor, weights: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of weighted `slot_sums` by rows [R, C] and by weights [T, k].

    Args:
        dy: [T, C].
        order: [R] int64, the slot of each row.
    """
    drows, dweights = torch.empty_like(rows), torch.empty_like(weights, memory_format=torch.contiguous_format)
    if rows.shape[0] == 0:
        return drows, dweights
    dy, rows, weights = _aligned(dy), _aligned(rows), _aligned(weights)
    with _on(rows):
        _combine_grad_kernel[(rows.shape[0],)](
            dy,
            rows,
            weights,
            order,
            drows,
            dweights,
            rows.shape[1],
            SLOTS=weights.shape[1],
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return drows, dweights


@triton.jit
def _swiglu_kernel(gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr):
    """Some columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    gate = tl.load(gate_up_ptr + row * 2 * width + cols, mask=mask, other=0.0)
    up = tl.load(gate_up_ptr + (row * 2 + 1) * width + cols, mask=mask, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    act = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + row * width + cols, (act * up).to(out_ptr.dtype.element_ty), mask=mask)


def swiglu(gate_up: Tensor) -> Tensor:
    """[R, N] of gate and up [R, 2 N]: silu(gate) * up, silu rounded before the product."""
    width = gate_up.shape[1] // 2
    out = gate_up.new_empty(gate_up.shape[0], width)
    if gate_up.shape[0] == 0:
        return out
    gate_up = _aligned(gate_up)
    with _on(gate_up):
        grid = (gate_up.shape[0], triton.cdiv(width, _BLOCK))
        _swiglu_kernel[grid](gate_up, out, width, BLOCK=_BLOCK, num_warps=4)
    return out


@triton.jit
def _swiglu_grad_kernel(dy_ptr, gate_up_ptr, dgate_up_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    dy = tl.load(dy_ptr + row * width + cols, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_up_ptr + row * 2 * width + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + (row * 2 + 1) * width + cols, mask=mask, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    dgate = dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    kind = dgate_up_ptr.dtype.element_ty
    tl.store(dgate_up_ptr + row * 2 * width + cols, dgate.to(kind), mask=mask)
    tl.store(dgate_up_ptr + (row * 2 + 1) * width + cols, (dy * gate * sigmoid).to(kind), mask=mask)


def swiglu_grad(dy: Tensor, gate_up: Tensor) -> Tensor:
    """[R, 2 N]: the gradient of `swiglu`; dy [R, N]."""
    dgate_up = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
    if gate_up.shape[0] == 0:
        return dgate_up
    dy, gate_up = _aligned(dy), _aligned(gate_up)
    with _on(gate_up):
        grid = (gate_up.shape[0], triton.cdiv(dy.shape[1], _BLOCK))
        _swiglu_grad_kernel[grid](dy, gate_up, dgate_up, dy.shape[1], BLOCK=_BLOCK, num_warps=4)
    return dgate_up
