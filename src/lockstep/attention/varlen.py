"""torch's own flash attention over packed documents (torch.nn.attention.varlen)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from lockstep.attention.cpu_reference import enable_cpu_reference
from lockstep.attention.shared import Keys

# torch 2.11 hands the head counts to the kernel unchecked and never splits the keys of packed documents; from
# 2.12 on the first must be announced, and the second ruled out: a row's bits would depend on its pack.
_OPTIONS: dict[str, Any] = {
    name: value
    for name, value in {"enable_gqa": True, "num_splits": 1}.items()
    if name in inspect.signature(varlen_attn).parameters
}
_varlen_attn: Callable[..., Any] = varlen_attn  # its types are those of one torch release


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
    keys: Keys | None = None,
) -> Tensor:
    """See lockstep.attention. float16 or bfloat16 on CUDA; on CPU the reference kernels, any float dtype."""
    if q.device.type == "cpu" and not torch.compiler.is_compiling():
        enable_cpu_reference()
    # A tuple: varlen_attn recognises causal by comparing with (-1, 0). The kernel's left window leaves the
    # query itself out.
    window_size = (-1, 0) if window is None else (window - 1, 0)
    out: Tensor = _varlen_attn(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens if keys is None else keys.cu_keys,
        max_seqlen,
        max_seqlen if keys is None else keys.max_keys,
        scale=scale,
        window_size=window_size,
        **_OPTIONS,
    )
    return out
