"""Attention of the generation skeleton: whole prompts, or one query per running sample over a SampleCache.

Shapes as in lockstep.schema.batch (T, N, K, H); R running samples, P prompts in use, M samples per prompt at
most, G = N / K query heads per key/value head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.engine.hf.kv_cache import Decode, Prefill, SampleCache, additive_masks

IMPLEMENTATION = "lockstep_cached"
"""Name in transformers' AttentionInterface. It has no mask function, so transformers builds no masks for
it."""


def register() -> None:
    """Make IMPLEMENTATION known to transformers; idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, cached_attention)


def cached_attention(  # signature: transformers' AttentionInterface
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    sample_cache: SampleCache,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Called by the model's attention layers with query [1, N, T, H] and new keys and values [1, K, T, H].

    Returns:
        [1, T, N, H] and None (no attention weights).
    """
    plan = sample_cache.plan
    if isinstance(plan, Prefill):
        return _prefill(query, key, value, plan, scaling, sliding_window), None
    assert isinstance(plan, Decode)
    return _decode(query, module.layer_idx, sample_cache, plan, scaling, sliding_window), None  # type: ignore[arg-type]


def _prefill(
    query: Tensor, key: Tensor, value: Tensor, plan: Prefill, scaling: float | None, window: int | None
) -> Tensor:
    """Causal attention inside each document; [1, T, N, H]."""
    out = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
    start = 0
    for length in plan.lengths:
        span = slice(start, start + length)
        start += length
        mask = None
        if window is not None and length > window:
            index = torch.arange(length, device=query.device)
            distance = index[:, None] - index
            mask = (distance >= 0) & (distance < window)
        out[:, span] = F.scaled_dot_product_attention(
            query[:, :, span],
            key[:, :, span],
            value[:, :, span],
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        ).transpose(1, 2)
    return out


def _decode(
    query: Tensor, layer: int, cache: SampleCache, plan: Decode, scaling: float | None, window: int | None
) -> Tensor:
    """One query per row over its prompt and its completion; [1, R, N, H]."""
    if window not in plan.masks:
        plan.masks[window] = additive_masks(plan, window)
    prompt_mask, completion_mask = plan.masks[window]
    q_RNH = query[0].transpose(0, 1)
    rows, heads, dim = q_RNH.shape
    prompts = len(plan.prompt_lengths)

    keys, values = cache.prompt_store(layer)
    kv_heads = keys.shape[1]
    grouped = q_RNH if plan.identity else q_RNH.index_select(0, plan.gather)
    # the G query heads of a key/value head and the M samples of a prompt are queries of one matrix product
    grouped = grouped.view(prompts, -1, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)
    samples = grouped.shape[3]
    grouped = grouped.reshape(prompts, kv_heads, -1, dim)
    if prompt_mask is not None and prompt_mask.shape[2] > 1:
        prompt_mask = prompt_mask.repeat(1, 1, heads // kv_heads, 1)
    used = slice(plan.max_prompt)
    out_p, lse_p = attend(grouped, keys[:prompts, :, used], values[:prompts, :, used], prompt_mask, scaling)
    out_p = out_p.reshape(prompts, heads, samples, dim).transpose(1, 2).reshape(-1, heads, dim)
    lse_p = lse_p.reshape(prompts, heads, samples).transpose(1, 2).reshape(-1, heads)
    if not plan.identity:
        out_p, lse_p = out_p.index_select(0, plan.scatter), lse_p.index_select(0, plan.scatter)

    keys, values = cache.completion_store(layer)
    used = slice(plan.max_count + 1)
    own = q_RNH.reshape(rows, kv_heads, heads // kv_heads, dim)
    out_c, lse_c = attend(own, keys[:rows, :, used], values[:rows, :, used], completion_mask, scaling)
    out_c, lse_c = out_c.reshape(rows, heads, dim), lse_c.reshape(rows, heads)

    share = torch.sigmoid(lse_p - lse_c).unsqueeze(-1)
    return torch.lerp(out_c.float(), out_p.float(), share).to(query.dtype).unsqueeze(0)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None
) -> tuple[Tensor, Tensor]:
    """Attention and the log-sum-exp of its scores.

    Args:
        q: [B, K, Q, H]; k, v: [B, K, S, H]; mask: additive float32, broadcastable to [B, K, Q, S], or None.

    Returns:
        out [B, K, Q, H] in q's dtype, lse [B, K, Q] float32.
    """
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, attn_mask=mask, scale=scaling
        )
        return out, lse
    return attend_plainly(q, k, v, mask, scaling)


def attend_plainly(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None
) -> tuple[Tensor, Tensor]:
    """`attend` by matrix products: for devices without a fused kernel that returns the log-sum-exp."""
    scores = (q @ k.transpose(-1, -2)).float() * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if mask is not None:
        scores = scores + mask
    lse = torch.logsumexp(scores, -1)
    return (scores - lse.unsqueeze(-1)).exp_().to(q.dtype) @ v, lse
