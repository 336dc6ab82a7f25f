"""An attention kernel: plain softmax over all slots, in float32, with the documents in its mask.

lockstep train grpo --recipe tiny --train.attention dense:attention
"""

import torch
from torch import Tensor


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
    mask: None = None,
) -> Tensor:
    """q [T, N, H], k and v [T, K, H] -> [T, N, H], causal within each document."""
    slots = torch.arange(q.shape[0], device=q.device)
    document = torch.searchsorted(cu_seqlens.to(slots.dtype), slots, right=True)
    seen = (document[:, None] == document) & (slots <= slots[:, None])
    if window is not None:
        seen &= slots > slots[:, None] - window
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qnh,knh->nqk", q.float(), k.float()) * (scale or q.shape[-1] ** -0.5)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("nqk,knh->qnh", weights, v.float()).to(q.dtype)
