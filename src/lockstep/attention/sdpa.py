"""The reference kernel: F.scaled_dot_product_attention, per document; with a mask in compiled code."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.attention.masks import band, dense_mask
from lockstep.ops.masks import document_ids


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
) -> Tensor:
    """See lockstep.attention. With `lengths` there is one call per document and never a [T, T] mask."""
    if lengths is not None and mask is None:
        return _per_document(q, k, v, lengths=lengths, scale=scale, window=window)
    if mask is None:
        mask = build_mask(cu_seqlens, num_slots=q.shape[0], window=window)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return dense(q, k, v, mask=mask, scale=scale)[0].transpose(0, 1)


def dense(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, scale: float | None) -> Tensor:
    """[B, N, S, H] attention under `mask` [B, 1, S, S]; None: causal over the whole row."""
    if mask is not None:
        # With a mask, enable_gqa would send CUDA to the math kernel, which materialises the scores.
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def build_mask(cu_seqlens: Tensor, *, num_slots: int, window: int | None) -> Tensor:
    """[1, 1, T, T] bool, block-diagonal and causal."""
    return dense_mask(document_ids(cu_seqlens, num_slots)[None], window=window)


def _per_document(
    q: Tensor, k: Tensor, v: Tensor, *, lengths: tuple[int, ...], scale: float | None, window: int | None
) -> Tensor:
    dtype = q.dtype
    if q.device.type == "cpu" and dtype in (torch.bfloat16, torch.float16):
        # torch's CPU kernel is slower in half precision than in float32, most of it in the backward.
        q, k, v = q.float(), k.float(), v.float()
    outputs = []
    for one_q, one_k, one_v in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        length = one_q.shape[0]
        mask = None
        if window is not None and window < length:
            mask = band(torch.arange(length, device=q.device), window=window)
        rows = (x.transpose(0, 1)[None] for x in (one_q, one_k, one_v))
        outputs.append(dense(*rows, mask=mask, scale=scale)[0].transpose(0, 1))
    return torch.cat(outputs).to(dtype)
