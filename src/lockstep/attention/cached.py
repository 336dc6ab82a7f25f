"""Attention over a KV cache: one op that stores the new keys and values and attends to all.

    k_cache     [P, K, H]: the keys of all documents, as v_cache the values; a document's are consecutive rows
    slots       [T] int64: the cache row of every new token
    cu_q        [D + 1] int32: document d's new tokens are rows cu_q[d] to cu_q[d + 1]; its last ones
    starts      [D + 1] int32: document d's first row in the cache; in any order; the last entry is not read
    used        [D] int32: how many keys the document has, the new ones included; 0: its rows get zeros
    max_q       no document has more new tokens
    max_k       no document has more keys
    decode      every document has exactly one new token

The kernel is torch's flash attention, as in `varlen`, and a row's bits are those it has in a packed training
forward. For that the keys must be summed in the same order, and three things in the CUDA kernel would change
it: for one query a document it swaps query heads into rows by itself *and* then splits the keys (so max_q is
never 1 with grouped heads), it splits where `num_splits` does not forbid it (torch >= 2.12), and its key
blocks are counted from the document's first key (so the window is left to the kernel).

In decode the query heads of one kv head are made rows of a document, which then needs no causal mask; so the
cache is read once per kv head and not once per query head. Where it applies, `lockstep.attention.cached` has
the same bits in less time.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.attention.sinks import NO_SPLITS, with_sinks
from lockstep.attention.varlen import enable_cpu_reference
from lockstep.observe.text import printable

_flash = torch.ops.aten._flash_attention_forward


# One op for both, because the decode kernel does both at once. It is opaque to a compiler, which could not
# trace the reference kernels of a CPU.
@torch.library.custom_op("lockstep::store_and_attend", mutates_args=("k_cache", "v_cache"))
def store_and_attend(  # signature: an op takes tensors and numbers, no records
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    cu_q: Tensor,
    starts: Tensor,
    used: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    window: int | None,
    decode: bool,
    sinks: Tensor | None = None,
) -> Tensor:
    """Write k and v [T, K, H] to `slots` of the cache, then attend with q [T, N, H] -> [T, N, H].

    `window` counts the query itself (transformers' sliding_window); `sinks` [N] as in lockstep.attention.
    See the module for the rest.
    """
    if decode and sinks is None:
        kernel = decode_kernel(q, k_cache, scale=scale, window=window, reference=_FlashDecode(scale))
        if kernel is not None:
            return kernel(q, k, v, k_cache, v_cache, slots, starts, used)
    store(k_cache, v_cache, k, v, slots)
    return cached_attention(
        q,
        k_cache,
        v_cache,
        cu_q=cu_q,
        starts=starts,
        used=used,
        max_q=max_q,
        max_k=max_k,
        scale=scale,
        window=window,
        decode=decode,
        sinks=sinks,
    )


@dataclass(frozen=True)
class _FlashDecode:
    """What the decode kernel must equal: a decode.Reference."""

    scale: float

    def __call__(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, starts: Tensor, used: Tensor, max_k: int
    ) -> Tensor:
        cu_q = torch.arange(len(used) + 1, dtype=torch.int32, device=q.device)
        return cached_attention(
            q,
            k_cache,
            v_cache,
            cu_q=cu_q,
            starts=starts,
            used=used,
            max_q=1,
            max_k=max_k,
            scale=self.scale,
            window=None,
            decode=True,
        )


@store_and_attend.register_fake
def _fake(q: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def store(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write k and v [T, K, H] to rows `slots` [T] of the cache."""
    k_cache.index_copy_(0, slots, k)
    v_cache.index_copy_(0, slots, v)


def cached_attention(  # signature: the op's
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cu_q: Tensor,
    starts: Tensor,
    used: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    window: int | None,
    decode: bool,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [T, N, H] -> [T, N, H], over keys that are in the cache already; see the module."""
    if q.device.type == "cpu":
        enable_cpu_reference()
    documents, kv_heads = used.shape[0], k_cache.shape[1]
    group = q.shape[1] // kv_heads
    as_rows = decode and window is None and _rows_keep_blocks(q.device)
    if as_rows:
        # All query heads of a kv head see the same keys, and a decoded token sees all of them: so they may be
        # rows without a causal mask.
        rows = q.unflatten(1, (kv_heads, group)).transpose(1, 2).reshape(-1, kv_heads, q.shape[2])
        q, cu_q, max_q = rows, cu_q * group, group
    elif decode:
        max_q = 2  # with 1 the kernel would swap heads for rows, and split the keys
    # The aten op, not torch.nn.attention.varlen: torch 2.11's varlen_attn has no seqused_k, without which a
    # document would be taken to end where the next one begins.
    out: Tensor
    out, lse, *_ = _flash(
        q,
        k_cache,
        v_cache,
        cu_q,
        starts,
        max_q,
        max_k,
        0.0,
        not as_rows,
        False,
        scale=scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
        seqused_k=used,
        **NO_SPLITS,
    )
    if as_rows:
        out = out.unflatten(0, (documents, group)).transpose(1, 2).flatten(1, 2)
        lse = lse.unflatten(1, (documents, group)).transpose(1, 2).flatten(0, 1)
    return (
        out if sinks is None else with_sinks(out, lse, sinks)
    ).contiguous()  # the kernel's is laid out as q


@functools.cache
def _rows_keep_blocks(device: torch.device) -> bool:
    """Return whether the kernel has the same key blocks with and without a causal mask.

    Not on compute capability 8.6 and 8.9, where some head dimensions have other tiles for causal attention
    (flash_fwd_launch_template.h, is_sm8x). The CPU kernel counts tiles from the document's first token only
    where a row is a token.
    """
    if device.type == "cpu":
        return False
    major, minor = torch.cuda.get_device_capability(device)
    return (major, minor) not in ((8, 6), (8, 7), (8, 9))


# Attention of one new token per document, faster than torch's flash attention and bit for bit the same.
#
# `decode.cu` says how. It is compiled when an engine takes its first step, in about a second, by NVRTC,
# which comes with torch, and with headers of a CUDA toolkit, which do not: without them the engine goes on
# with flash attention, and a warning says so. Whether its bits are those of the flash attention that this
# torch was built with is then tried on this device, and a kernel that differs anywhere is not used.


log = logging.getLogger(__name__)

KEY_BLOCKS = {64: 128, 128: 64}
"""Dimensions of a head -> keys of a block of flash attention. Others run as flash attention does."""
# As in decode.cu: the query heads of a kv head are the rows of one mma tile; four warps multiply, a fifth
# adds up.
_ROWS, _THREADS = 8, 160
_TYPES = {
    torch.bfloat16: ("__nv_bfloat16", "bf16", "__float2bfloat16_rn"),
    torch.float16: ("__half", "f16", "__float2half_rn"),
}
_DOCUMENTS, _KEYS = 2000, 3000
"""Of the comparison: two million values or more. The smallest other rounding tried, of the running sum,
changes 3 in a million."""

Attention = Callable[..., Tensor]
"""q, k, v, k_cache, v_cache, slots, starts, used as in `lockstep.attention.cached` -> [D, N, H]."""
Reference = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int], Tensor]
"""q, k_cache, v_cache, starts, used and the most keys of a document -> [D, N, H], by flash attention."""


def decode_kernel(
    q: Tensor, k_cache: Tensor, *, scale: float, window: int | None, reference: Reference
) -> Attention | None:
    """Return the kernel for tensors like these, or None where it does not apply: other dimensions of a head
    than those of KEY_BLOCKS, more than 8 query heads per kv head, a sliding window, no CUDA, a GPU on which
    flash attention has other key blocks; and, which is logged, where it cannot be compiled or flash attention
    rounds otherwise.

    Args:
        q: [D, N, H].
        k_cache: [P, K, H].
        reference: what it must equal, tried once for each device and each set of sizes.
    """
    heads, kv_heads, head_dim = q.shape[1], k_cache.shape[1], q.shape[2]
    if not q.is_cuda or torch.version.hip is not None or window is not None or q.dtype not in _TYPES:
        return None
    if head_dim not in KEY_BLOCKS or heads > _ROWS * kv_heads or scale <= 0:
        return None
    # The first: other key blocks, see cached._rows_keep_blocks. The second: documents are the grid's second
    # dimension, of which CUDA has 65,535.
    if torch.cuda.get_device_capability(q.device) in ((8, 6), (8, 7), (8, 9)) or q.shape[0] >= 2**16:
        return None
    return _checked(q.device, q.dtype, (heads, kv_heads, head_dim), scale, reference)


@functools.cache
def _checked(
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    scale: float,
    reference: Reference,
) -> Attention | None:
    heads, kv_heads, head_dim = sizes
    try:
        kernel = _compiled(dtype, heads, kv_heads, head_dim, scale)
    except _UNAVAILABLE as error:
        log.warning(
            "the decode kernel of engine native cannot be compiled: %s; the engine goes on with flash "
            "attention, which gives the same bits and is slower (the kernel needs the headers of a CUDA "
            "toolkit: install one, or set CUDA_HOME)",
            printable(str(error)),
        )
        return None
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    k_cache, v_cache = normal(_KEYS, kv_heads, head_dim), normal(_KEYS, kv_heads, head_dim)
    q = normal(_DOCUMENTS, heads, head_dim) * 2
    # Documents overlap in the cache; each "new" token is there already, so that all see the same keys.
    ends = torch.randint(1, _KEYS + 1, (_DOCUMENTS,), device=device, generator=generator)
    starts = (ends * torch.rand(_DOCUMENTS, device=device, generator=generator)).long()
    starts[: len(_EDGES)] = (ends[: len(_EDGES)] - torch.tensor(_EDGES, device=device)).clamp(min=0)
    used, slots = (ends - starts).int(), ends - 1
    # Flash attention takes one start more than there are documents, and never reads the last one.
    starts = torch.cat([starts, starts[:1]]).int()
    expected = reference(q, k_cache, v_cache, starts, used, _KEYS)
    out = kernel(q, k_cache[slots], v_cache[slots], k_cache, v_cache, slots, starts, used)
    differ = int((out != expected).sum())
    if differ:
        log.warning(
            "the decode kernel of engine native differs from the flash attention of torch %s on %s in %d of "
            "%d values; the engine goes on with flash attention, which is slower",
            torch.__version__,
            torch.cuda.get_device_name(device),
            differ,
            out.numel(),
        )
        return None
    return kernel


_EDGES = (1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257)
"""Keys of the first documents of the comparison."""


def _compiled(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, scale: float) -> Attention:
    element, mma, rounded = _TYPES[dtype]
    keys = KEY_BLOCKS[head_dim]
    # As flash attention makes it: a float32 scale, times log2(e) in float64, rounded to float32.
    scale_log2 = float(np.float32(float(np.float32(scale)) * math.log2(math.e)))
    defined = {
        "ELEMENT": element,
        "MMA": f'"{mma}"',
        "ROUND": rounded,
        "H": head_dim,
        "N": keys,
        "GROUP": heads // kv_heads,
        "K": kv_heads,
        "SCALE_LOG2": f"{scale_log2!r}f",
    }
    source = "".join(f"#define {name} {value}\n" for name, value in defined.items()) + _source()
    # Private, in torch 2.11 to 2.13. torch's public way to a kernel of one's own (torch.utils.cpp_extension)
    # needs nvcc and a C++ compiler on the machine.
    kernel: Any = torch.cuda._compile_kernel(source, "attend_one")
    bytes_of_blocks = 4 * keys * head_dim * dtype.itemsize  # keys and values, two blocks of each
    # besides: probabilities, rounded and exact, in rows that are padded by 8; four warps' maxima; sums
    shared = bytes_of_blocks + _ROWS * (keys + 8) * (dtype.itemsize + 4) + 5 * _ROWS * 4
    # Above 48 KiB a kernel must ask for its shared memory, or the launch fails.
    kernel.set_shared_memory_config(shared)

    def attend(  # signature: the kernel's
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
        starts: Tensor,
        used: Tensor,
    ) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        tensors = [q.contiguous(), k.contiguous(), v.contiguous(), k_cache, v_cache, slots, starts, used, out]
        grid = (kv_heads, q.shape[0], 1)
        kernel(grid=grid, block=(_THREADS, 1, 1), args=tensors, shared_mem=shared)
        return out

    return attend


_UNAVAILABLE = (OSError, RuntimeError, AttributeError)
"""What torch raises: OSError where no CUDA toolkit is found, RuntimeError where NVRTC fails or so much shared
memory is refused, AttributeError in a version without torch.cuda._compile_kernel, which is not public."""


def _source() -> str:
    return Path(__file__).with_name("decode.cu").read_text(encoding="utf-8")
