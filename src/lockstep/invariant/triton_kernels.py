"""Row-invariant Triton kernels for CUDA; Triton's interpreter runs them on a CPU (TRITON_INTERPRET=1).

A block shape never depends on the number of rows, nor does anything else that decides the order of a sum.
Triton makes an argument that is 1 a constant, and lays a row out over threads by the alignment of its
address: numbers of rows are therefore never specialised, and rows begin at multiples of 16 bytes or are
copied there.

Imported only where it is used: a CPU installation has no Triton.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Triton compiles another kernel for pointers that are not
# multiples of 16 bytes, and may add in another order.
_ALIGNMENT = 16
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""The interpreter's dot multiplies the bits of bfloat16 as if they were integers."""


@triton.jit(do_not_specialize=["num_rows", "programs"])
def _matmul_kernel(  # signature: pointers, sizes and strides of a Triton kernel
    a_ptr,
    b_ptr,
    bias_ptr,
    c_ptr,
    num_rows,
    num_cols,
    depth,
    stride_a,
    stride_b_depth,
    stride_b_col,
    stride_c,
    programs,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """c [M, N] = a [M, K] @ b [K, N] + bias [N]; a persistent program takes every `programs`-th block of c.

    Blocks that share columns of b follow each other: b, the weight, is the large one where it matters.
    """
    blocks_m = tl.cdiv(num_rows, BLOCK_M)
    blocks = blocks_m * tl.cdiv(num_cols, BLOCK_N)
    for block in range(tl.program_id(0), blocks, programs):
        rows = (block % blocks_m) * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = (block // blocks_m) * BLOCK_N + tl.arange(0, BLOCK_N)
        rows_64, cols_64 = rows.to(tl.int64), cols.to(tl.int64)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, depth, BLOCK_K):
            ks = start + tl.arange(0, BLOCK_K)
            a = tl.load(
                a_ptr + rows_64[:, None] * stride_a + ks[None, :],
                mask=(rows < num_rows)[:, None] & (ks < depth)[None, :],
                other=0.0,
            )
            b = tl.load(
                b_ptr + ks[:, None] * stride_b_depth + cols_64[None, :] * stride_b_col,
                mask=(ks < depth)[:, None] & (cols < num_cols)[None, :],
                other=0.0,
            )
            if WIDEN:
                a, b = a.to(tl.float32), b.to(tl.float32)
            total = tl.dot(a, b, total, input_precision=PRECISION)
        if HAS_BIAS:
            total += tl.load(bias_ptr + cols, mask=cols < num_cols, other=0.0).to(tl.float32)[None, :]
        tl.store(
            c_ptr + rows_64[:, None] * stride_c + cols_64[None, :],
            total.to(c_ptr.dtype.element_ty),
            mask=(rows < num_rows)[:, None] & (cols < num_cols)[None, :],
        )


def matmul(a: Tensor, b: Tensor, bias: Tensor | None, *, out: Tensor | None = None) -> Tensor:
    """a [M, K] @ b [K, N] + bias [N], in one order over K for any M; into `out` [M, N] if given."""
    num_rows, depth = a.shape
    num_cols = b.shape[1]
    out = a.new_empty(num_rows, num_cols) if out is None else out
    if num_rows == 0:
        return out
    a = _aligned(a)
    # By dtype alone, never by the number of rows: the order over K is that of the blocks.
    block_m, block_n, block_k = 64, 128, 32 if a.dtype == torch.float32 else 64
    programs = min(_num_processors(a.device), triton.cdiv(num_rows, block_m) * triton.cdiv(num_cols, block_n))
    with _on(a):
        _matmul_kernel[(programs,)](
            a,
            b,
            bias,
            out,
            num_rows,
            num_cols,
            depth,
            a.stride(0),
            b.stride(0),
            b.stride(1),
            out.stride(0),
            programs,
            HAS_BIAS=bias is not None,
            # Triton's default for float32 is TF32.
            PRECISION="ieee",
            WIDEN=_INTERPRETED,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            # Fixed: autotuning would choose the order of a sum by timing.
            num_warps=4,
            num_stages=3,
        )
    return out


_SLOTS = 3
"""Weights of one launch of `few_rows`, at most."""


class _Blocks(NamedTuple):
    """How a product of few rows is divided. None of it decides a bit: every output adds over K in one
    accumulator, k ascending, as tensor cores do it for any shape of a tile."""

    columns: int
    """Columns of the output, rows of weights, of a program."""
    rows: int
    depth: int
    weights_first: bool
    """Whether weights are the left operand: it has 64 rows at least where warpgroups multiply."""
    stages: int
    warps: int


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_kernel(  # signature: pointers and sizes of a Triton kernel
    x_ptr,
    weight_0,
    weight_1,
    weight_2,
    bias_0,
    bias_1,
    bias_2,
    out_0,
    out_1,
    out_2,
    residual_ptr,
    num_rows,
    width_0,
    width_1,
    width_2,
    depth,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAP: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Up to three products of the same rows: out_i [M, N_i] = x [M, K] @ weight_i [N_i, K].T + bias_i,
    rounded (+ residual, rounded again). All rows in one block; a program has a block of one weight."""
    program = tl.program_id(0)
    second = tl.cdiv(width_0, COLUMNS)
    third = second + tl.cdiv(width_1, COLUMNS)
    weight, bias, out, width, block = weight_0, bias_0, out_0, width_0, program
    if program >= third:
        weight, bias, out, width, block = weight_2, bias_2, out_2, width_2, program - third
    elif program >= second:
        weight, bias, out, width, block = weight_1, bias_1, out_1, width_1, program - second
    if OVERLAP:
        # The kernel after this one may be launched, and waits likewise for what this one writes.
        gdc_launch_dependents()
        gdc_wait()
    cols = block * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.arange(0, ROWS)
    ks = tl.arange(0, DEPTH)
    if WEIGHTS_FIRST:
        total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    else:
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    weights_at = weight + cols.to(tl.int64)[:, None] * depth + ks[None, :]
    x_at = x_ptr + rows[:, None] * depth + ks[None, :]
    for start in tl.range(0, depth, DEPTH, num_stages=STAGES):
        inside = (start + ks < depth)[None, :]
        w = tl.load(weights_at + start, mask=(cols < width)[:, None] & inside, other=0.0)
        x = tl.load(x_at + start, mask=(rows < num_rows)[:, None] & inside, other=0.0)
        if WIDEN:
            w, x = w.to(tl.float32), x.to(tl.float32)
        if WEIGHTS_FIRST:
            total = tl.dot(w, x.T, total, input_precision="ieee")
        else:
            total = tl.dot(x, w.T, total, input_precision="ieee")
    if HAS_BIAS:
        offset = tl.load(bias + cols, mask=cols < width, other=0.0).to(tl.float32)
        total += offset[:, None] if WEIGHTS_FIRST else offset[None, :]
    if WEIGHTS_FIRST:
        at = rows[None, :] * width + cols[:, None]
        stored = (rows < num_rows)[None, :] & (cols < width)[:, None]
    else:
        at = rows[:, None] * width + cols[None, :]
        stored = (rows < num_rows)[:, None] & (cols < width)[None, :]
    result = total.to(out.dtype.element_ty)
    if HAS_RESIDUAL:
        other = tl.load(residual_ptr + at, mask=stored, other=0.0)
        result = (result.to(tl.float32) + other.to(tl.float32)).to(result.dtype)
    tl.store(out + at, result, mask=stored)


def few_rows(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    residual: Tensor | None,
    *,
    outs: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """x [M, K] @ weight [N, K].T + bias [N] for up to three weights and 64 rows, at the speed of the
    weights' bytes; `residual` [M, N], beside one weight, is added to the rounded product. Adds over K
    in the order of any kernel of mma or wgmma that does not split K."""
    outs = [x.new_empty(x.shape[0], weight.shape[0]) for weight in weights] if outs is None else list(outs)
    if x.shape[0] == 0:
        return outs
    x, depth = _aligned(x), x.shape[1]
    residual = None if residual is None else _aligned(residual)
    widths = [weight.shape[0] for weight in weights]
    blocks = _few_rows_blocks(x.shape[0], sum(widths), _num_processors(x.device))
    spare = _SLOTS - len(widths)

    def padded(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [*tensors, *[tensors[0]] * spare] if tensors else [x] * _SLOTS

    with _on(x):
        _few_rows_kernel[(sum(triton.cdiv(width, blocks.columns) for width in widths),)](
            x,
            *padded([_aligned(weight) for weight in weights]),
            *padded(biases),
            *padded(outs),
            x if residual is None else residual,
            x.shape[0],
            *widths,
            *[0] * spare,
            depth,
            HAS_BIAS=bool(biases),
            HAS_RESIDUAL=residual is not None,
            WIDEN=_INTERPRETED,
            COLUMNS=blocks.columns,
            ROWS=blocks.rows,
            DEPTH=blocks.depth,
            WEIGHTS_FIRST=blocks.weights_first,
            STAGES=blocks.stages,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
            **_overlap(x),
        )
    return outs


def _few_rows_blocks(num_rows: int, num_cols: int, processors: int) -> _Blocks:
    """The fastest of 30 tried on an H100, over the shapes of 1B and 8B Llamas."""
    if num_rows <= 16:
        if num_cols <= 16 * processors:  # blocks of 64 columns would leave most processors idle
            return _Blocks(columns=16, rows=16, depth=512, weights_first=True, stages=5, warps=2)
        return _Blocks(columns=64, rows=16, depth=128, weights_first=True, stages=6, warps=4)
    if num_rows <= 32:
        return _Blocks(columns=64, rows=32, depth=128, weights_first=True, stages=6, warps=4)
    assert num_rows <= 64, num_rows
    if num_cols <= 32 * processors:
        return _Blocks(columns=32, rows=64, depth=256, weights_first=False, stages=4, warps=4)
    return _Blocks(columns=64, rows=64, depth=128, weights_first=True, stages=5, warps=4)


@triton.jit
def _norm_kernel(  # signature: pointers, sizes and constants of a Triton kernel
    x_ptr,
    weight_ptr,
    out_ptr,
    width,
    eps,
    CENTRED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    ROUNDED_LAST: tl.constexpr,
    OVERLAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: see rms_norm, and with CENTRED standardise, in lockstep.invariant.row_ops."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    # 64 bits: rows times width passes 2**31 in a long pack.
    first = tl.program_id(0).to(tl.int64) * width
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    x = tl.load(x_ptr + first + cols, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    if CENTRED:
        wide = tl.where(inside, wide - tl.sum(wide, 0) / width, 0.0)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    if CENTRED:
        out = normed
    elif UNIT_OFFSET:
        out = (normed * (1.0 + weight.to(tl.float32))).to(x.dtype)
    elif ROUNDED_LAST:
        out = (normed * weight.to(tl.float32)).to(x.dtype)
    else:
        out = (normed.to(x.dtype).to(tl.float32) * weight.to(tl.float32)).to(x.dtype)
    tl.store(out_ptr + first + cols, out, mask=inside)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool, rounded_last: bool = False
) -> Tensor:
    """x [R, C], contiguous; one program a row."""
    return _norm(x, weight, torch.empty_like(x), eps, UNIT_OFFSET=unit_offset, ROUNDED_LAST=rounded_last)


def standardise(x: Tensor, eps: float) -> Tensor:
    """x [R, C], contiguous -> float32; one program a row."""
    return _norm(x, x, torch.empty_like(x, dtype=torch.float32), eps, CENTRED=True)


def _norm(x: Tensor, weight: Tensor, out: Tensor, eps: float, **kind: bool) -> Tensor:
    if x.shape[0] == 0:
        return out
    x, width = _aligned(x), x.shape[1]
    block = triton.next_power_of_2(width)
    kinds = {"CENTRED": False, "UNIT_OFFSET": False, "ROUNDED_LAST": False} | kind
    sizes = {"BLOCK": block, "num_warps": _warps(block), **_overlap(x)}
    with _on(x):
        _norm_kernel[(x.shape[0],)](x, weight, out, width, eps, **kinds, **sizes)
    return out


@triton.jit
def _scaled(logits, scale, cap, HAS_CAP: tl.constexpr):
    x = logits.to(tl.float32) * scale
    if HAS_CAP:
        # tanh(z) = 1 - 2 / (exp(2 z) + 1), which saturates where exp overflows or vanishes.
        x = cap * (1.0 - 2.0 / (tl.exp(2.0 * (x / cap)) + 1.0))
    return x


@triton.jit
def _row_figures(first, width, scale, cap, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr):
    """Maximum m of a row x, and the sums of exp(x - m) and exp(x - m) (x - m). Twice over the vocabulary: the
    second time it is in the L2 cache."""
    peaks = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = _scaled(tl.load(first + cols, mask=cols < width, other=0.0), scale, cap, HAS_CAP)
        peaks = tl.maximum(peaks, tl.where(cols < width, x, float("-inf")))
    peak = tl.max(peaks, 0)
    totals = tl.zeros((BLOCK,), dtype=tl.float32)
    weighted = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = _scaled(tl.load(first + cols, mask=cols < width, other=0.0), scale, cap, HAS_CAP) - peak
        e = tl.where(cols < width, tl.exp(x), 0.0)
        totals += e
        weighted += e * x
    return peak, tl.sum(totals, 0), tl.sum(weighted, 0)


@triton.jit
def _token_stats_kernel(  # signature: pointers, sizes and constants of a Triton kernel
    logits_ptr,
    labels_ptr,
    logprob_ptr,
    entropy_ptr,
    lse_ptr,
    width,
    stride,
    scale,
    cap,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    first = logits_ptr + row * stride
    peak, total, weighted = _row_figures(first, width, scale, cap, HAS_CAP, BLOCK)
    log_total = tl.log(total)
    label = tl.load(labels_ptr + row)
    at_label = _scaled(tl.load(first + tl.maximum(label, 0)), scale, cap, HAS_CAP)
    lse = peak + log_total
    tl.store(logprob_ptr + row, tl.where(label >= 0, at_label - lse, 0.0))
    tl.store(entropy_ptr + row, tl.where(label >= 0, log_total - weighted / total, 0.0))
    tl.store(lse_ptr + row, lse)


@triton.jit(do_not_specialize=["num_rows", "first_id"])
def _partial_stats_kernel(  # signature: pointers, sizes and constants of a Triton kernel
    logits_ptr,
    labels_ptr,
    out_ptr,
    num_rows,
    first_id,
    width,
    stride,
    scale,
    cap,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: see lockstep.invariant.row_ops.partial_token_stats."""
    row = tl.program_id(0).to(tl.int64)
    first = logits_ptr + row * stride
    peak, total, weighted = _row_figures(first, width, scale, cap, HAS_CAP, BLOCK)
    local = tl.load(labels_ptr + row) - first_id
    here = (local >= 0) & (local < width)
    at_label = _scaled(tl.load(first + local, mask=here, other=0.0), scale, cap, HAS_CAP)
    tl.store(out_ptr + row, peak)
    tl.store(out_ptr + num_rows + row, total)
    tl.store(out_ptr + 2 * num_rows + row, weighted)
    tl.store(out_ptr + 3 * num_rows + row, tl.where(here, at_label, float("-inf")))


def token_stats(
    logits: Tensor, labels: Tensor, *, scale: float, cap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """See lockstep.invariant.row_ops.token_stats; one program a row."""
    rows = logits.shape[0]
    # three tensors, not views of one: outputs of a custom op may not alias each other
    logprob, entropy, lse = (logits.new_empty(rows, dtype=torch.float32) for _ in range(3))
    if rows == 0:
        return logprob, entropy, lse
    logits = _aligned(logits)
    with _on(logits):
        _token_stats_kernel[(rows,)](
            logits,
            labels,
            logprob,
            entropy,
            lse,
            logits.shape[1],
            logits.stride(0),
            scale,
            1.0 if cap is None else cap,
            HAS_CAP=cap is not None,
            # The fastest of six tried on an H100, from 1 to 256 rows of 128,256 logits.
            BLOCK=16384,
            num_warps=32,
        )
    return logprob, entropy, lse


def partial_token_stats(
    logits: Tensor, labels: Tensor, *, scale: float, cap: float | None, start: int
) -> Tensor:
    """See lockstep.invariant.row_ops.partial_token_stats; one program a row."""
    rows = logits.shape[0]
    out = logits.new_empty((4, rows), dtype=torch.float32)
    if rows == 0:
        return out
    logits = _aligned(logits)
    with _on(logits):
        _partial_stats_kernel[(rows,)](
            logits,
            labels,
            out,
            rows,
            start,
            logits.shape[1],
            logits.stride(0),
            scale,
            1.0 if cap is None else cap,
            HAS_CAP=cap is not None,
            BLOCK=4096,
            num_warps=8,
        )
    return out


@triton.jit
def _block_mass_kernel(  # signature: pointers, sizes and constants of a Triton kernel
    logits_ptr,
    out_ptr,
    width,
    blocks,
    stride,
    scale,
    cap,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """GROUP blocks of one row: see lockstep.invariant.row_ops.block_mass."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    cols = group[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(logits_ptr + row * stride + cols, mask=cols < width, other=0.0)
    x = tl.where(cols < width, _scaled(x, scale, cap, HAS_CAP), float("-inf"))
    peak = tl.maximum(tl.max(x, 1), -3.4028234663852886e38)  # a block may be all -inf
    mass = tl.log(tl.sum(tl.exp(x - peak[:, None]), 1)) + peak
    tl.store(out_ptr + row * blocks + group, mass, mask=group < blocks)


def block_mass(logits: Tensor, *, scale: float, cap: float | None, block: int) -> Tensor:
    """See lockstep.invariant.row_ops.block_mass; a program for each few blocks of a row."""
    rows, width = logits.shape
    blocks = triton.cdiv(width, block)
    out = logits.new_empty((rows, blocks), dtype=torch.float32)
    if rows == 0:
        return out
    logits, group = _aligned(logits), 8
    with _on(logits):
        _block_mass_kernel[(rows, triton.cdiv(blocks, group))](
            logits,
            out,
            width,
            blocks,
            logits.stride(0),
            scale,
            1.0 if cap is None else cap,
            HAS_CAP=cap is not None,
            BLOCK=block,
            GROUP=group,
            num_warps=4,
        )
    return out


@triton.jit
def _mean_kernel(x_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    totals = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        totals += tl.load(x_ptr + row * width + cols, mask=cols < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, (tl.sum(totals, 0) / width).to(out_ptr.dtype.element_ty))


def mean(x: Tensor) -> Tensor:
    """[R, C] -> [R]; one program a row."""
    out = x.new_empty(x.shape[0])
    if x.shape[0] == 0:
        return out
    x = _aligned(x)
    with _on(x):
        _mean_kernel[(x.shape[0],)](x, out, x.shape[1], BLOCK=1024, num_warps=4)
    return out


def _aligned(x: Tensor) -> Tensor:
    """Contiguous, and begun at a multiple of 16 bytes."""
    if x.data_ptr() % _ALIGNMENT == 0:
        return x.contiguous()
    return x.clone(memory_format=torch.contiguous_format)


def _warps(block: int) -> int:
    return 4 if block <= 2048 else 8 if block <= 8192 else 16


def _on(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def _overlap(x: Tensor) -> dict[str, Any]:
    """Arguments by which a kernel's launch overlaps with the end of the kernel before it: on compute
    capability 9.0 and later. Such a kernel waits before its first read, for all that was launched before."""
    if not x.is_cuda or torch.version.hip is not None or torch.cuda.get_device_capability(x.device) < (9, 0):
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}


@functools.cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 3  # under the interpreter: a few, so that programs do take several blocks
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
