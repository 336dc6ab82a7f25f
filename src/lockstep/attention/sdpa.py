"""The reference kernel: F.scaled_dot_product_attention, per document; with a mask in compiled code."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.ops.masks import Keys, aligned_mask, band, dense_mask, document_ids


def attention(  # signature: every kernel's, see lockstep.attention
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    lengths: tuple[int, ...] | None,
    scale: float | None,
    window: int | None,
    mask: Tensor | None = None,
    keys: Keys | None = None,
) -> Tensor:
    """See lockstep.attention. With `lengths` there is one call per document and never a [T, T] mask."""
    if lengths is not None and mask is None:
        key_lengths = lengths if keys is None else keys.lengths
        assert key_lengths is not None, "known where the queries' are"
        return _per_document(q, k, v, lengths=(lengths, key_lengths), scale=scale, window=window)
    if mask is None:
        mask = build_mask(cu_seqlens, num_slots=q.shape[0], window=window, keys=keys, num_keys=k.shape[0])
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return dense(q, k, v, mask=mask, scale=scale)[0].transpose(0, 1)


def dense(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, scale: float | None) -> Tensor:
    """[B, N, S, H] attention under `mask`, broadcast to [B, 1, S, keys]; None: causal over the whole row."""
    if mask is not None:
        # With a mask, enable_gqa would send CUDA to the math kernel, which materialises the scores.
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def build_mask(
    cu_seqlens: Tensor,
    *,
    num_slots: int,
    window: int | None,
    keys: Keys | None = None,
    num_keys: int | None = None,
) -> Tensor:
    """[1, 1, T, T] bool, block-diagonal and causal; with `keys` [1, 1, T, num_keys]."""
    if keys is None:
        return dense_mask(document_ids(cu_seqlens, num_slots)[None], window=window)
    assert num_keys is not None
    return aligned_mask(cu_seqlens, keys.cu_keys, num_slots=num_slots, num_keys=num_keys, window=window)


def _per_document(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    lengths: tuple[tuple[int, ...], tuple[int, ...]],
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Args: lengths: of the documents, in queries and in keys."""
    dtype = q.dtype
    if q.device.type == "cpu" and dtype in (torch.bfloat16, torch.float16):
        # torch's CPU kernel is slower in half precision than in float32, most of it in the backward.
        q, k, v = q.float(), k.float(), v.float()
    outputs = []
    parts = zip(q.split(lengths[0]), k.split(lengths[1]), v.split(lengths[1]), strict=True)
    for one_q, one_k, one_v in parts:
        if one_q.shape[0] == 0:
            continue
        length, num_keys, mask = one_q.shape[0], one_k.shape[0], None
        # The kernel's own causal mask aligns the first query with the first key, and knows no window.
        if length != num_keys or (window is not None and window < length):
            mask = band(torch.arange(num_keys, device=q.device), window=window)[num_keys - length :]
        rows = (x.transpose(0, 1)[None] for x in (one_q, one_k, one_v))
        outputs.append(dense(*rows, mask=mask, scale=scale)[0].transpose(0, 1))
    return torch.cat(outputs).to(dtype)
