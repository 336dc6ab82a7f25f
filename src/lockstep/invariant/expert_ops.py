"""Ops of a mixture of experts: the router's softmax, rows sorted by expert, one product for each expert, and
the weighted sum of a token's experts.

A row's result is a function of the row alone, as in `row_ops`: on the CPU an expert's rows are products of
fixed tiles, on CUDA `grouped_mm` is row-invariant as it is. Sums over a token's experts are in the order of
its slots, in float32, in forward and backward.

Shapes: T tokens, k slots (experts of a token), R = T k rows sorted by expert, E experts, K in, N out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.invariant.row_ops import row_sums, silu_and_mul, silu_grad, tiled_product

# --- the router's softmax ---


@torch.library.custom_op("lockstep::router_softmax", mutates_args=(), device_types="cpu")
def router_softmax(logits: Tensor) -> Tensor:
    """[T, E] float32 (float64 of float64): softmax over the last dimension."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    powers = torch.exp(wide - wide.amax(-1, keepdim=True))
    return powers / row_sums(powers)[:, None]


@router_softmax.register_kernel("cuda")
def _router_softmax_cuda(logits: Tensor) -> Tensor:
    return torch.softmax(logits, -1, dtype=torch.float32)


@router_softmax.register_fake
def _router_softmax_fake(logits: Tensor) -> Tensor:
    return logits.new_empty(logits.shape, dtype=torch.promote_types(logits.dtype, torch.float32))


def _softmax_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.dtype = inputs[0].dtype
    ctx.save_for_backward(output)


def _softmax_backward(ctx: Any, dp: Tensor) -> Tensor:
    (p,) = ctx.saved_tensors
    return (p * (dp - (dp * p).sum(-1, keepdim=True))).to(ctx.dtype)  # type: ignore[no-any-return]


router_softmax.register_autograd(_softmax_backward, setup_context=_softmax_context)


# --- rows of tokens, sorted by expert, and back ---


def by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the slots of `experts` [T, k] by expert, those of one expert in the order of tokens.

    Returns:
        order [R] int64, the slot t k + s of each row; inverse [R] int64, the row of each slot; ends [E]
        int32, where each expert's rows end.

    Example:
        >>> by_expert(torch.tensor([[2, 0], [0, 2]]), 3)
        (tensor([1, 2, 0, 3]), tensor([2, 0, 1, 3]), tensor([2, 2, 4], dtype=torch.int32))
    """
    chosen, order = experts.flatten().sort(stable=True)
    slots = torch.arange(order.shape[0], device=order.device)
    inverse = torch.empty_like(order).scatter(0, order, slots)
    every = torch.arange(num_experts, device=order.device)
    return order, inverse, torch.searchsorted(chosen, every, right=True).int()


@torch.library.custom_op("lockstep::gather_slots", mutates_args=())
def gather_slots(x: Tensor, order: Tensor, inverse: Tensor, slots: int) -> Tensor:
    """[R, C]: the token's row of x [T, C] for every row, sorted by expert; see `by_expert`."""
    return x.index_select(0, order // slots)


@gather_slots.register_fake
def _gather_fake(x: Tensor, order: Tensor, inverse: Tensor, slots: int) -> Tensor:
    return x.new_empty(order.shape[0], x.shape[1])


def _gather_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, inverse, ctx.slots = inputs
    ctx.save_for_backward(inverse)


def _gather_backward(ctx: Any, drows: Tensor) -> tuple[Tensor, None, None, None]:
    (inverse,) = ctx.saved_tensors
    return slot_sums(drows, inverse, ctx.slots), None, None, None


gather_slots.register_autograd(_gather_backward, setup_context=_gather_context)


@torch.library.custom_op("lockstep::combine_slots", mutates_args=())
def combine_slots(rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """[T, C]: for each token the sum over its slots of weight * row, in float32, rounded once.

    Args:
        rows: [R, C], sorted by expert.
        weights: [T, k].
    """
    return _slot_sums(rows, inverse, weights.shape[1], weights)


@torch.library.custom_op("lockstep::slot_sums", mutates_args=())
def slot_sums(rows: Tensor, inverse: Tensor, slots: int) -> Tensor:
    """[T, C]: the same without weights, the gradient of `gather_slots`."""
    return _slot_sums(rows, inverse, slots, None)


@slot_sums.register_fake
def _slot_sums_fake(rows: Tensor, inverse: Tensor, slots: int) -> Tensor:
    return rows.new_empty(inverse.shape[0] // slots, rows.shape[1])


def _slot_sums(rows: Tensor, inverse: Tensor, slots: int, weights: Tensor | None) -> Tensor:
    """The sum over each token's slots, added in their order: a reduction may choose another one."""
    places = inverse.view(-1, slots)
    if rows.is_cuda:
        from lockstep.invariant import expert_kernels

        return expert_kernels.slot_sums(rows, places, weights)
    total: Tensor | None = None
    for slot in range(slots):
        term = rows.index_select(0, places[:, slot]).to(torch.promote_types(rows.dtype, torch.float32))
        if weights is not None:
            term = term * weights[:, slot, None]
        total = term if total is None else total.add_(term)
    assert total is not None, "a token has at least one expert"
    return total.to(rows.dtype)


@combine_slots.register_fake
def _combine_fake(rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    return rows.new_empty(weights.shape[0], rows.shape[1])


def _combine_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _combine_backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
    return *combine_grad(dy, *ctx.saved_tensors), None, None


@torch.library.custom_op("lockstep::combine_grad", mutates_args=(), device_types="cpu")
def combine_grad(
    dy: Tensor, rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of `combine_slots` by its rows and weights; dy [T, C]."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    of_rows = dy.index_select(0, order // weights.shape[1]).to(wide)
    drows = of_rows * weights.flatten().index_select(0, order)[:, None]
    dweights = (of_rows * rows).sum(-1).index_select(0, inverse).view_as(weights)
    return drows.to(rows.dtype), dweights.to(weights.dtype)


@combine_grad.register_kernel("cuda")
def _combine_grad_cuda(
    dy: Tensor, rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    from lockstep.invariant import expert_kernels

    return expert_kernels.combine_grad(dy, rows, weights, order)


@combine_grad.register_fake
def _combine_grad_fake(
    dy: Tensor, rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), weights.new_empty(weights.shape)


combine_slots.register_autograd(_combine_backward, setup_context=_combine_context)


# --- one product for each expert ---
#
# weight is [E, N, K], or [E, K, N] with `inputs_first`. Opaque to torch.compile, as `row_ops.linear` is.


@torch.library.custom_op("lockstep::grouped_linear", mutates_args=(), device_types="cpu")
def grouped_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, inputs_first: bool, tiles: Sequence[int]
) -> Tensor:
    """[R, N]: each row of x [R, K] times the weight of its expert, plus bias [E, N].

    Args:
        ends: [E] int32, where each expert's rows end; the last is R.
        tiles: row counts of products on the CPU, as in `row_ops`; empty: one product for each expert.
    """
    matrices = weight.transpose(1, 2) if inputs_first else weight
    out = x.new_empty(x.shape[0], matrices.shape[1])
    for expert, rows in _spans(ends):
        own = None if bias is None else bias[expert]
        if tiles:
            tiled_product(x[rows], matrices[expert], own, tiles=tiles, out=out[rows])
        else:
            out[rows] = F.linear(x[rows], matrices[expert], own)
    return out


def _spans(ends: Tensor) -> list[tuple[int, slice]]:
    """The experts that have rows, and which these are."""
    stops = ends.tolist()
    return [(e, slice(a, b)) for e, (a, b) in enumerate(zip([0, *stops], stops, strict=False)) if b > a]


@grouped_linear.register_kernel("cuda")
def _grouped_linear_cuda(
    x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, inputs_first: bool, tiles: Sequence[int]
) -> Tensor:
    out = F.grouped_mm(x, weight if inputs_first else weight.transpose(1, 2), offs=ends)
    return out if bias is None else out + bias.index_select(0, _expert_of_row(ends, x.shape[0]))


def _expert_of_row(ends: Tensor, num_rows: int) -> Tensor:
    rows = torch.arange(num_rows, device=ends.device, dtype=ends.dtype)
    return torch.searchsorted(ends, rows, right=True)


@grouped_linear.register_fake
def _grouped_linear_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, inputs_first: bool, tiles: Sequence[int]
) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2 if inputs_first else 1])


@torch.library.custom_op("lockstep::grouped_input_grad", mutates_args=(), device_types="cpu")
def grouped_input_grad(dy: Tensor, weight: Tensor, ends: Tensor, inputs_first: bool) -> Tensor:
    """[R, K]: the gradient of `grouped_linear`'s x."""
    matrices = weight.transpose(1, 2) if inputs_first else weight
    dx = dy.new_empty(dy.shape[0], matrices.shape[2])
    for expert, rows in _spans(ends):
        dx[rows] = dy[rows] @ matrices[expert]
    return dx


@grouped_input_grad.register_kernel("cuda")
def _input_grad_cuda(dy: Tensor, weight: Tensor, ends: Tensor, inputs_first: bool) -> Tensor:
    matrices = weight.transpose(1, 2) if inputs_first else weight
    return F.grouped_mm(dy.contiguous(), matrices, offs=ends)


@grouped_input_grad.register_fake
def _input_grad_fake(dy: Tensor, weight: Tensor, ends: Tensor, inputs_first: bool) -> Tensor:
    return dy.new_empty(dy.shape[0], weight.shape[1 if inputs_first else 2])


@torch.library.custom_op("lockstep::grouped_weight_grad", mutates_args=(), device_types="cpu")
def grouped_weight_grad(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """[E, A, B]: left.T @ right over each expert's rows of left [R, A] and right [R, B]; 0 without rows."""
    out = left.new_zeros(ends.shape[0], left.shape[1], right.shape[1])
    for expert, rows in _spans(ends):
        torch.mm(left[rows].t(), right[rows], out=out[expert])
    return out


@grouped_weight_grad.register_kernel("cuda")
def _weight_grad_cuda(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(left.contiguous().t(), right.contiguous(), offs=ends)


@grouped_weight_grad.register_fake
def _weight_grad_fake(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


def _bias_grad(dy: Tensor, ends: Tensor) -> Tensor:
    """[E, N]: the sum of each expert's rows, in float32."""
    starts = F.pad(ends, (1, 0)).long()
    wide = dy.to(torch.promote_types(dy.dtype, torch.float32))
    sums = torch.segment_reduce(wide, "sum", offsets=starts, axis=0, initial=0.0)
    return sums.to(dy.dtype)


def _grouped_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, ends, ctx.inputs_first, _ = inputs
    # Beside frozen experts (LoRA on attention) nothing reads x again, so it is not kept.
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, ends)


def _grouped_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, ends = ctx.saved_tensors
    dx = dweight = dbias = None
    if ctx.needs_input_grad[0]:
        dx = grouped_input_grad(dy, weight, ends, ctx.inputs_first)
    if ctx.needs_input_grad[1]:
        dweight = grouped_weight_grad(*((x, dy) if ctx.inputs_first else (dy, x)), ends)
    if ctx.needs_input_grad[2]:
        dbias = _bias_grad(dy, ends)
    return dx, dweight, dbias, None, None, None


grouped_linear.register_autograd(_grouped_backward, setup_context=_grouped_context)


# --- SwiGLU ---


@torch.library.custom_op("lockstep::swiglu", mutates_args=(), device_types="cpu")
def swiglu(gate_up: Tensor) -> Tensor:
    """[R, N]: silu(gate) * up of columns gate, up [R, 2 N]; as `row_ops.silu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu_and_mul(gate, up)  # type: ignore[no-any-return]


@swiglu.register_kernel("cuda")
def _swiglu_cuda(gate_up: Tensor) -> Tensor:
    from lockstep.invariant import expert_kernels

    return expert_kernels.swiglu(gate_up)


@swiglu.register_fake
def _halves_fake(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@torch.library.custom_op("lockstep::swiglu_grad", mutates_args=(), device_types="cpu")
def swiglu_grad(dy: Tensor, gate_up: Tensor) -> Tensor:
    """[R, 2 N]: the gradient of `swiglu`; dy [R, N]."""
    return torch.cat(silu_grad(dy, *gate_up.chunk(2, dim=-1)), -1)


@swiglu_grad.register_kernel("cuda")
def _swiglu_grad_cuda(dy: Tensor, gate_up: Tensor) -> Tensor:
    from lockstep.invariant import expert_kernels

    return expert_kernels.swiglu_grad(dy, gate_up)


@swiglu_grad.register_fake
def _swiglu_grad_fake(dy: Tensor, gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape)


def _halves_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _halves_backward(ctx: Any, dy: Tensor) -> Tensor:
    return swiglu_grad(dy, *ctx.saved_tensors)  # type: ignore[no-any-return]


swiglu.register_autograd(_halves_backward, setup_context=_halves_context)


# --- GPT-OSS's gate ---


@torch.library.custom_op("lockstep::clamped_swiglu", mutates_args=())
def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """[R, N]: (up + 1) * gate * sigmoid(alpha * gate) of interleaved columns gate_up [R, 2 N], the gate at
    most `limit`, up within it; each operation rounded as in transformers' GptOssExperts."""
    gate, up = gate_up[:, ::2].clamp(max=limit), gate_up[:, 1::2].clamp(-limit, limit)
    return (up + 1) * (gate * _sigmoid(gate * alpha))


@clamped_swiglu.register_fake
def _swiglu_fake(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


def _swiglu_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate_up, ctx.alpha, ctx.limit = inputs
    ctx.save_for_backward(gate_up)


def _swiglu_backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
    (gate_up,) = ctx.saved_tensors
    wide = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32))
    raw_gate, raw_up = wide[:, ::2], wide[:, 1::2]
    gate, up = raw_gate.clamp(max=ctx.limit), raw_up.clamp(-ctx.limit, ctx.limit)
    sigmoid = torch.sigmoid(ctx.alpha * gate)
    slope = sigmoid * (1.0 + ctx.alpha * gate * (1.0 - sigmoid))
    dgate = torch.where(raw_gate <= ctx.limit, dy * (up + 1.0) * slope, 0.0)
    dup = torch.where(raw_up.abs() <= ctx.limit, dy * gate * sigmoid, 0.0)
    return torch.stack((dgate, dup), -1).flatten(1).to(gate_up.dtype), None, None


clamped_swiglu.register_autograd(_swiglu_backward, setup_context=_swiglu_context)


# --- a shared expert's gate ---


@torch.library.custom_op("lockstep::sigmoid_product", mutates_args=())
def sigmoid_product(gate: Tensor, x: Tensor) -> Tensor:
    """sigmoid(gate [T, 1]) * x [T, C], the sigmoid in float32 and rounded before the product."""
    return _sigmoid(gate) * x


def _sigmoid(x: Tensor) -> Tensor:
    """Of the dtype of x. torch.exp is the same in vectors and tails, torch.sigmoid is not."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.exp(-wide).add_(1.0).reciprocal_().to(x.dtype)


@sigmoid_product.register_fake
def _sigmoid_product_fake(gate: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _sigmoid_product_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _sigmoid_product_backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
    gate, x = ctx.saved_tensors
    wide = torch.promote_types(x.dtype, torch.float32)
    sigmoid = torch.sigmoid(gate.to(wide))
    dgate = (dy.to(wide) * x).sum(-1, keepdim=True) * sigmoid * (1.0 - sigmoid)
    return dgate.to(gate.dtype), (dy * sigmoid).to(x.dtype)


sigmoid_product.register_autograd(_sigmoid_product_backward, setup_context=_sigmoid_product_context)
