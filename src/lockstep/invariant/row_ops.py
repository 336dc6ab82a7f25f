"""Ops on rows, each row's result a function of the row alone: norm, activation, mean, the figures of a token,
the mass of blocks of the vocabulary.

On the CPU they are compositions of ATen ops whose result for an element or a row does not depend on its
place. Not every ATen op is such: silu, sigmoid and gelu finish a tensor's last few elements with another exp
than its vectors, and a sum to one number is split over threads where a sum to two is not. On CUDA one Triton
program computes one row, whatever the number of rows.

They are opaque to torch.compile, which lays out a reduction by its number of rows. Shapes: C the last
dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.ops.logprobs import partial_stats

_SPLIT_SUM = 2**15
"""ATen splits a sum to a single number over threads from this many elements on."""


def row_sums(x: Tensor) -> Tensor:
    """[R, C] -> [R]; the sum of a row alone is bitwise that of the row among others."""
    if x.shape[0] == 1 and x.shape[1] >= _SPLIT_SUM:
        # Two rows are never split: so a row alone is added up as one among others.
        return x.expand(2, -1).contiguous().sum(-1)[:1]
    return x.sum(-1)


def as_rows(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return a dense x as [R, C] rows in memory order, and the permutation of its dimensions."""
    strides = x.stride()
    order = (*sorted(range(x.ndim - 1), key=lambda dim: -strides[dim]), x.ndim - 1)
    return x.permute(order).reshape(-1, x.shape[-1]), order


def from_rows(rows: Tensor, like: Tensor, order: tuple[int, ...]) -> Tensor:
    """The inverse of `as_rows`: the shape of `like`, and its strides where it is dense."""
    shape = [like.shape[dim] for dim in order[:-1]]
    back = [order.index(dim) for dim in range(like.ndim)]
    return rows.view(*shape, rows.shape[-1]).permute(back)


# --- rms_norm ---


@torch.library.custom_op("lockstep::rms_norm", mutates_args=(), device_types="cpu")
def rms_norm(x: Tensor, weight: Tensor, eps: float, unit_offset: bool, rounded_last: bool = False) -> Tensor:
    """transformers' RMSNorm over the last dimension, computed in float32.

    weight * normed.to(x.dtype), or (normed * weight).to(x.dtype) with `rounded_last`, or Gemma's
    (normed * (1 + weight)).to(x.dtype) with `unit_offset`.
    """
    rows, order = as_rows(x)
    wide = rows.float()
    mean = row_sums(wide * wide).div_(wide.shape[1])
    normed = wide * torch.rsqrt(mean + eps)[:, None]
    if unit_offset or rounded_last:
        normed = (normed * (weight.float() + float(unit_offset))).to(x.dtype)
    else:
        normed = weight * normed.to(x.dtype)
    return from_rows(normed, x, order)


@rms_norm.register_kernel("cuda")
def _rms_norm_cuda(
    x: Tensor, weight: Tensor, eps: float, unit_offset: bool, rounded_last: bool = False
) -> Tensor:
    from lockstep.invariant import triton_kernels

    rows, order = as_rows(x)
    out = triton_kernels.rms_norm(rows, weight, eps, unit_offset=unit_offset, rounded_last=rounded_last)
    return from_rows(out, x, order)


@rms_norm.register_fake
def _rms_norm_fake(
    x: Tensor, weight: Tensor, eps: float, unit_offset: bool, rounded_last: bool = False
) -> Tensor:
    rows, order = as_rows(x)
    return from_rows(torch.empty_like(rows), x, order)


def _rms_norm_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ctx.eps, ctx.unit_offset, ctx.rounded_last = inputs
    ctx.save_for_backward(x, weight)


def _rms_norm_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """With n = x r, r = rsqrt(mean(x^2) + eps), g = dy * scale: dx = r (g - n mean(g n)), dw = sum dy n."""
    x, weight = ctx.saved_tensors
    wide, grad = x.float(), dy.float()
    r = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + ctx.eps)
    normed = wide * r
    dx = dweight = None
    if ctx.needs_input_grad[0]:
        scaled = grad * (1.0 + weight.float() if ctx.unit_offset else weight.float())
        dx = (r * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))).to(x.dtype)
    if ctx.needs_input_grad[1]:
        # The factor of the weight in forward: without the offset that is the rounded value.
        rounded = normed if ctx.unit_offset or ctx.rounded_last else normed.to(x.dtype).float()
        dweight = (grad * rounded).flatten(0, -2).sum(0).to(weight.dtype)
    return dx, dweight, None, None, None


rms_norm.register_autograd(_rms_norm_backward, setup_context=_rms_norm_context)


# --- standardise ---


@torch.library.custom_op("lockstep::standardise", mutates_args=(), device_types="cpu")
def standardise(x: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) over the last dimension, float32: a layer norm without its weight."""
    rows, order = as_rows(x)
    wide = rows.float()
    centred = wide - row_sums(wide).div_(wide.shape[1])[:, None]
    variance = row_sums(centred * centred).div_(wide.shape[1])
    return from_rows(centred * torch.rsqrt(variance + eps)[:, None], x, order)


@standardise.register_kernel("cuda")
def _standardise_cuda(x: Tensor, eps: float) -> Tensor:
    from lockstep.invariant import triton_kernels

    rows, order = as_rows(x)
    return from_rows(triton_kernels.standardise(rows, eps), x, order)


@standardise.register_fake
def _standardise_fake(x: Tensor, eps: float) -> Tensor:
    rows, order = as_rows(x)
    return from_rows(torch.empty_like(rows, dtype=torch.float32), x, order)


def _standardise_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.eps = inputs
    ctx.save_for_backward(x, output)


def _standardise_backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    """With n the output and r = 1 / sqrt(var + eps): dx = r (dy - mean(dy) - n mean(dy n))."""
    x, normed = ctx.saved_tensors
    r = torch.rsqrt(x.float().var(-1, correction=0, keepdim=True) + ctx.eps)
    dx = dy - dy.mean(-1, keepdim=True) - normed * (dy * normed).mean(-1, keepdim=True)
    return (r * dx).to(x.dtype), None


standardise.register_autograd(_standardise_backward, setup_context=_standardise_context)


# --- activations ---

_SQRT_2_OVER_PI = 0.7978845608028654


def _silu(x: Tensor) -> Tensor:
    """float32; torch.exp is the same in vectors and tails, torch.sigmoid is not."""
    return x / torch.exp(-x).add_(1.0)


def _gelu(x: Tensor) -> Tensor:
    """The tanh form, float32."""
    inner = (x * x * x).mul_(0.044715).add_(x).mul_(_SQRT_2_OVER_PI)
    return (x * 0.5).mul_(inner.tanh_().add_(1.0))


@torch.library.custom_op("lockstep::silu_and_mul", mutates_args=())
def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up; silu in float32, rounded before the product, as torch does."""
    return _silu(gate.float()).to(gate.dtype) * up


@torch.library.custom_op("lockstep::gelu_and_mul", mutates_args=())
def gelu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up, the tanh form; in float32, rounded before the product."""
    return _gelu(gate.float()).to(gate.dtype) * up


def _gated_fake(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate)


def _gated_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _silu_backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
    return silu_grad(dy, *ctx.saved_tensors)


def silu_grad(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `silu_and_mul` by gate and up."""
    wide = gate.float()
    # Not row-invariant, unlike `_silu`: gradients do not claim to be.
    sigmoid = torch.sigmoid(wide)
    dact = dy.float() * up.float()
    dgate = dact * sigmoid * (1.0 + wide * (1.0 - sigmoid))
    return dgate.to(gate.dtype), (dy.float() * wide * sigmoid).to(up.dtype)


def _gelu_backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = ctx.saved_tensors
    x = gate.float()
    tanh = torch.tanh(_SQRT_2_OVER_PI * (x + 0.044715 * x * x * x))
    slope = _SQRT_2_OVER_PI * (1.0 + 3 * 0.044715 * x * x)
    derivative = 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * slope
    act = 0.5 * x * (1.0 + tanh)
    return (dy.float() * up.float() * derivative).to(gate.dtype), (dy.float() * act).to(up.dtype)


for _op, _backward in ((silu_and_mul, _silu_backward), (gelu_and_mul, _gelu_backward)):
    _op.register_fake(_gated_fake)
    _op.register_autograd(_backward, setup_context=_gated_context)


# --- mean ---


@torch.library.custom_op("lockstep::mean", mutates_args=(), device_types="cpu")
def mean(x: Tensor) -> Tensor:
    """Mean over the last dimension, summed in float32, in the dtype of x: [..., C] -> [...]."""
    rows = x.reshape(-1, x.shape[-1]).float()
    return row_sums(rows).div_(rows.shape[1]).to(x.dtype).view(x.shape[:-1])


@mean.register_kernel("cuda")
def _mean_cuda(x: Tensor) -> Tensor:
    from lockstep.invariant import triton_kernels

    return triton_kernels.mean(x.reshape(-1, x.shape[-1])).view(x.shape[:-1])


@mean.register_fake
def _mean_fake(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-1])


def _mean_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.shape = inputs[0].shape


def _mean_backward(ctx: Any, dy: Tensor) -> Tensor:
    share: Tensor = dy[..., None] / ctx.shape[-1]
    return share.expand(ctx.shape)


mean.register_autograd(_mean_backward, setup_context=_mean_context)


# --- logprob and entropy of a sampled token ---

_TILE_ELEMENTS = 2**19
"""On the CPU: float32 elements worked on at a time, so that the passes over them stay in a core's cache."""


@torch.library.custom_op("lockstep::token_stats", mutates_args=(), device_types="cpu")
def token_stats(
    logits: Tensor, labels: Tensor, scale: float, cap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """logprob and entropy of the labels, and lse, [R] float32 each, of logits [R, V].

    The distribution is softmax(x), x = scale * logits or cap * tanh(scale * logits / cap), as in
    lockstep.ops.logprobs. A negative label has logprob 0 and entropy 0.
    """
    step = max(1, _TILE_ELEMENTS // logits.shape[1])
    parts = [
        _tile_stats(logits[at : at + step], labels[at : at + step], scale, cap)
        for at in range(0, max(1, logits.shape[0]), step)
    ]
    logprobs, entropy, lse = (torch.cat(column) for column in zip(*parts, strict=True))
    return logprobs, entropy, lse


def _scaled(logits: Tensor, scale: float, cap: float | None) -> Tensor:
    # copy: float32 logits would be the caller's own, and what follows works in place.
    x = logits.to(torch.float32, copy=True)
    if cap is not None:
        return x.mul_(scale / cap).tanh_().mul_(cap)
    return x if scale == 1.0 else x.mul_(scale)


def _tile_stats(
    logits: Tensor, labels: Tensor, scale: float, cap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    x = _scaled(logits, scale, cap)
    peak = x.amax(-1, keepdim=True)
    # A masked label reads entry 0, which `where` drops below: gather takes no negative index.
    at_label = x.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    e = x.sub_(peak).exp()
    total = row_sums(e)
    log_total = total.log()
    entropy = log_total - row_sums(e.mul_(x)) / total
    lse = peak[:, 0] + log_total
    valid = labels >= 0
    return torch.where(valid, at_label - lse, 0.0), torch.where(valid, entropy, 0.0), lse


@token_stats.register_kernel("cuda")
def _token_stats_cuda(
    logits: Tensor, labels: Tensor, scale: float, cap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    from lockstep.invariant import triton_kernels

    return triton_kernels.token_stats(logits, labels, scale=scale, cap=cap)


@token_stats.register_fake
def _token_stats_fake(
    logits: Tensor, labels: Tensor, scale: float, cap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    rows = labels.shape[0]
    return tuple(logits.new_empty(rows, dtype=torch.float32) for _ in range(3))  # type: ignore[return-value]


def _token_stats_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, labels, ctx.scale, ctx.cap = inputs
    ctx.save_for_backward(logits, labels, output[1], output[2])


def _token_stats_backward(
    ctx: Any, dlogprob: Tensor, dentropy: Tensor, dlse: Tensor
) -> tuple[Tensor, None, None, None]:
    """dx_v = a [v = label] + p_v (b (lse - entropy - x_v) + dlse - a), then through scale and cap."""
    logits, labels, entropy, lse = ctx.saved_tensors
    valid = labels >= 0
    a, b = torch.where(valid, dlogprob, 0.0)[:, None], torch.where(valid, dentropy, 0.0)[:, None]
    x = _scaled(logits, ctx.scale, ctx.cap)
    p = torch.exp(x - lse[:, None])
    dx = p * (b * ((lse - entropy)[:, None] - x) + dlse[:, None] - a)
    dx = dx.scatter_add(1, labels.clamp(min=0)[:, None], a)
    if ctx.cap is not None:
        dx = dx * (1.0 - (x / ctx.cap) ** 2)
    return (dx * ctx.scale).to(logits.dtype), None, None, None


token_stats.register_autograd(_token_stats_backward, setup_context=_token_stats_context)


# --- the same of a part of the vocabulary: what lockstep.ops.logprobs merges over the ranks that share it ---


@torch.library.custom_op("lockstep::partial_token_stats", mutates_args=(), device_types="cpu")
def partial_token_stats(
    logits: Tensor, labels: Tensor, scale: float, cap: float | None, start: int
) -> Tensor:
    """[4, R] float32: lockstep.ops.logprobs.partial_stats of logits [R, part], whose first column is id
    `start`. It makes no gradient."""
    step = max(1, _TILE_ELEMENTS // logits.shape[1])
    tiles = [slice(at, at + step) for at in range(0, max(1, logits.shape[0]), step)]
    return torch.cat(
        [
            partial_stats(_scaled(logits[t], scale, cap), labels[t], start=start, row_sums=row_sums)
            for t in tiles
        ],
        1,
    )


@partial_token_stats.register_kernel("cuda")
def _partial_token_stats_cuda(
    logits: Tensor, labels: Tensor, scale: float, cap: float | None, start: int
) -> Tensor:
    from lockstep.invariant import triton_kernels

    return triton_kernels.partial_token_stats(logits, labels, scale=scale, cap=cap, start=start)


@partial_token_stats.register_fake
def _partial_token_stats_fake(
    logits: Tensor, labels: Tensor, scale: float, cap: float | None, start: int
) -> Tensor:
    return logits.new_empty((4, labels.shape[0]), dtype=torch.float32)


# --- mass of vocabulary blocks, for sampling ---


def log_mass(x: Tensor, block: int) -> Tensor:
    """[R, M] float32: the logarithm of the sum of exp over each `block` entries of x [R, V], float32."""
    x = F.pad(x, (0, -x.shape[1] % block), value=float("-inf")).view(x.shape[0], -1, block)
    peak = x.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)  # a block may be all -inf
    return (x - peak).exp().sum(-1).log() + peak.squeeze(-1)


@torch.library.custom_op("lockstep::block_mass", mutates_args=(), device_types="cpu")
def block_mass(logits: Tensor, scale: float, cap: float | None, block: int) -> Tensor:
    """[R, M] float32: the logarithm of each block's mass under logits [R, V], before normalisation. Scale and
    cap as in `token_stats`; a block has `block` entries, a power of two, and the last one what is left."""
    return log_mass(_scaled(logits, scale, cap), block)


@block_mass.register_kernel("cuda")
def _block_mass_cuda(logits: Tensor, scale: float, cap: float | None, block: int) -> Tensor:
    from lockstep.invariant import triton_kernels

    return triton_kernels.block_mass(logits, scale=scale, cap=cap, block=block)


@block_mass.register_fake
def _block_mass_fake(logits: Tensor, scale: float, cap: float | None, block: int) -> Tensor:
    return logits.new_empty((logits.shape[0], -(-logits.shape[1] // block)), dtype=torch.float32)


# --- rotary tables ---


@torch.library.custom_op("lockstep::rotary", mutates_args=())
def rotary(
    positions: Tensor, inv_freq: Tensor, scaling: float, layout: str = "halves"
) -> tuple[Tensor, Tensor]:
    """transformers' rotary tables: cos and sin [..., 2 F] float32 of positions [...] times inv_freq [F].

    Args:
        layout: see lockstep.invariant.forms.Rotary; with "once" they are [..., F].
    """
    # float32 counts exactly up to 2^24, beyond any context.
    angles = positions[..., None].float() * inv_freq.float()
    if layout == "halves":
        angles = torch.cat((angles, angles), dim=-1)
    elif layout == "pairs":
        angles = angles.repeat_interleave(2, dim=-1)
    return angles.cos() * scaling, angles.sin() * scaling


@rotary.register_fake
def _rotary_fake(
    positions: Tensor, inv_freq: Tensor, scaling: float, layout: str = "halves"
) -> tuple[Tensor, Tensor]:
    shape = (*positions.shape, inv_freq.shape[0] * (1 if layout == "once" else 2))
    return (
        inv_freq.new_empty(shape, dtype=torch.float32),
        inv_freq.new_empty(shape, dtype=torch.float32),
    )


# Linear and bmm whose rows depend neither on the number of other rows nor on their position among them.
#
# A GEMM library picks its kernel by the number of rows M, and kernels differ in the order in which they add
# over K. So on the CPU every product here has one of a few fixed row counts, the tiles: T rows run as as
# many whole tiles as fit, large ones first, and the rest is padded to the smallest. `self_test` keeps, per
# weight shape, those tiles whose rows are bitwise equal. On CUDA the op is the Triton kernel of
# triton_kernels.py, for weight shapes where stock cuBLASLt fails the self-test.
#
#     lockstep::linear(x [..., K], weight [N, K], bias [N] | None, tiles, exact_backward) -> [..., N]
#     lockstep::bmm(x [B, M, K], y [B, K, N], tiles) -> [B, M, N]
#
# The backward is ordinary GEMMs, deterministic; with `exact_backward` the gradient of a row of x, too,
# depends on nothing but the row. The gradient of the weight sums over rows, so it cannot.


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
