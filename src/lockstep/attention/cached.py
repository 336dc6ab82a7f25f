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
cache is read once per kv head and not once per query head. Where it applies, `lockstep.attention.decode` has
the same bits in less time.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.attention.cpu_reference import enable_cpu_reference
from lockstep.attention.decode import decode_kernel

_flash = torch.ops.aten._flash_attention_forward
# torch 2.11 has no such argument, and never splits the keys of packed documents.
_NO_SPLITS: dict[str, Any] = (
    {"num_splits": 1} if any(a.name == "num_splits" for a in _flash.default._schema.arguments) else {}
)


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
) -> Tensor:
    """Write k and v [T, K, H] to `slots` of the cache, then attend with q [T, N, H] -> [T, N, H].

    `window` counts the query itself (transformers' sliding_window). See the module for the rest.
    """
    if decode:
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
    out: Tensor = _flash(
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
        **_NO_SPLITS,
    )[0]
    if as_rows:
        out = out.unflatten(0, (documents, group)).transpose(1, 2).flatten(1, 2)
    return out


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
