"""Attention of one new token per document, faster than torch's flash attention and bit for bit the same.

`decode.cu` says how. It is compiled when an engine takes its first step, in about a second, by NVRTC, which
comes with torch, and with headers of a CUDA toolkit, which do not: without them the engine goes on with flash
attention, and a warning says so. Whether its bits are those of the flash attention that this torch was built
with is then tried on this device, and a kernel that differs anywhere is not used.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.observe.text import printable

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
