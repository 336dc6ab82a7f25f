"""The reference kernel: F.scaled_dot_product_attention, per document; with a mask in compiled code."""

from __future__ import annotations

from typing import TypedDict

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
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """See lockstep.attention. With `lengths` there is one call per document and never a [T, T] mask."""
    options: DenseOptions = {"scale": scale, "sinks": sinks, "softcap": softcap}
    if lengths is not None and mask is None:
        key_lengths = lengths if keys is None else keys.lengths
        assert key_lengths is not None, "known where the queries' are"
        return _per_document(q, k, v, lengths=(lengths, key_lengths), window=window, options=options)
    if mask is None:
        mask = build_mask(cu_seqlens, num_slots=q.shape[0], window=window, keys=keys, num_keys=k.shape[0])
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return dense(q, k, v, mask=mask, **options)[0].transpose(0, 1)


class DenseOptions(TypedDict):
    """Arguments of `dense` that all documents share; see lockstep.attention."""

    scale: float | None
    sinks: Tensor | None
    softcap: float | None


def dense(  # signature: options of every kernel
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    scale: float | None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """[B, N, S, H] attention under `mask`, broadcast to [B, 1, S, keys]; None: causal over the whole row."""
    if sinks is not None or softcap is not None:
        mask = band(torch.arange(q.shape[2], device=q.device), window=None) if mask is None else mask
        return _by_products(q, k, v, mask, scale, sinks, softcap)
    if mask is not None:
        # With a mask, enable_gqa would send CUDA to the math kernel, which materialises the scores.
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _by_products(  # signature: `dense`'s
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float | None,
    sinks: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """By matrix products: no fused kernel of torch has sinks or caps. It holds all scores."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = (q @ k.transpose(2, 3)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
    wide = torch.promote_types(q.dtype, torch.float32)
    probs = scores.softmax(-1, dtype=wide)[..., : k.shape[2]].to(q.dtype)
    return probs @ v


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
    window: int | None,
    options: DenseOptions,
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
        outputs.append(dense(*rows, mask=mask, **options)[0].transpose(0, 1))
    return torch.cat(outputs).to(dtype)
