"""Reference CPU kernels for torch's flash attention ops, so that `varlen` runs, and is tested, without a GPU.

`enable_cpu_reference` registers them for aten::_flash_attention_forward and _backward under the CPU dispatch
key, which torch 2.11 to 2.13 leave empty. Registration holds for the whole process and cannot be undone; it
happens only when the kernel `varlen` is used on CPU tensors, and never replaces an existing kernel.

The backward is the closed form of Dao et al., FlashAttention (arXiv 2205.14135), appendix B.2: inside a
custom op autograd is switched off, so torch.autograd.grad is no option.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from lockstep.attention.cpu_tiles import Documents, tiled_attention
from lockstep.errors import ModelError

_OPS = ("_flash_attention_forward", "_flash_attention_backward")
_library: torch.library.Library | None = None


def enable_cpu_reference() -> None:
    """Register the reference kernels; a second call does nothing.

    Raises:
        ModelError: torch has CPU kernels of its own for these ops.
    """
    global _library
    if _library is not None:
        return
    # Private, in torch 2.11 to 2.13: nothing public asks the dispatcher.
    taken = [op for op in _OPS if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", "CPU")]
    if taken:
        raise ModelError(
            f"unsupported-version: torch {torch.__version__} already has CPU kernels for "
            f"{', '.join(taken)}, and Lockstep does not replace them; set train.attention = 'sdpa'",
            setting="train.attention",
        )
    # Kernels under torch's own ops, so that without a GPU the very graph is traced, compiled and tested that
    # runs on one.
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", _forward, "CPU")
    library.impl("_flash_attention_backward", _backward, "CPU")
    _library = library


def _forward(  # signature: torch's flash op
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    num_splits: int | None = None,
    **unsupported: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q [T, N, H], k and v [T, K, H] -> out [T, N, H], logsumexp [N, T] float32, and three unused outputs."""
    arguments = sorted(name for name, value in unsupported.items() if value is not None)
    if arguments or dropout_p or cu_q is None or cu_k is None:
        raise NotImplementedError(
            f"the CPU reference kernel takes packed documents only, not {arguments or 'this'}"
        )
    window = _window(is_causal, window_size_left, window_size_right)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    documents = _where(cu_q, cu_k, seqused_k, max_q, max_k)
    out, logsumexp = tiled_attention(q, k, v, documents=documents, scale=factor, window=window)
    empty = q.new_empty(0)
    return out, logsumexp, torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64), empty


def _backward(  # signature: torch's flash op
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. With P = exp(S - logsumexp): dV = P'dO, dS = P * (dO V' - rowsum(dO * O))."""
    # Rows of no document stay uninitialised here too, as in the CUDA kernel.
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    window = _window(is_causal, window_size_left, window_size_right)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    dtype = _compute_dtype(q)
    for rows, keys in _documents(cu_q, cu_k, max_q, max_k):
        probs = _scores(q[rows], k[keys], scale, window)
        lse = logsumexp[:, rows].to(dtype).unflatten(0, (k.shape[1], -1))
        probs = (probs - lse[..., None]).exp()
        grad = _group(grad_out[rows], k.shape[1]).to(dtype)
        delta = (grad * _group(out[rows], k.shape[1]).to(dtype)).sum(-1).permute(1, 2, 0)
        grad_probs = torch.einsum("qkgh,skh->kgqs", grad, v[keys].to(dtype))
        grad_scores = probs * (grad_probs - delta[..., None]) * factor
        grads[0][rows] = _ungroup(torch.einsum("kgqs,skh->qkgh", grad_scores, k[keys].to(dtype)), q.dtype)
        grouped_q = _group(q[rows], k.shape[1]).to(dtype)
        grads[1][keys] = torch.einsum("kgqs,qkgh->skh", grad_scores, grouped_q).to(k.dtype)
        grads[2][keys] = torch.einsum("kgqs,qkgh->skh", probs, grad).to(v.dtype)
    return grads[0], grads[1], grads[2]


def _scores(q: Tensor, k: Tensor, scale: float | None, window: tuple[int, int]) -> Tensor:
    """[K, G, Lq, Lk] scaled scores, -inf where a key is not visible; the last query is aligned with the last
    key."""
    dtype = _compute_dtype(q)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("qkgh,skh->kgqs", _group(q, k.shape[1]).to(dtype), k.to(dtype)) * factor
    offset = k.shape[0] - q.shape[0]
    distance = torch.arange(q.shape[0])[:, None] + offset - torch.arange(k.shape[0])[None, :]
    left, right = window
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance > left
    if right >= 0:
        hidden |= distance < -right
    return scores.masked_fill(hidden, float("-inf"))


def _where(cu_q: Tensor, cu_k: Tensor, used: Tensor | None, max_q: int, max_k: int) -> Documents:
    """With `used` [D], document d's keys are rows cu_k[d] to cu_k[d] + used[d]."""
    ends_q, starts = cu_q.long(), cu_k.long()
    documents = Documents(
        start_q=ends_q[:-1],
        len_q=ends_q.diff(),
        start_k=starts[:-1],
        len_k=starts.diff() if used is None else used.long(),
    )
    longest = (int(documents.len_q.max()), int(documents.len_k.max())) if len(documents.len_q) else (0, 0)
    if longest[0] > max_q or longest[1] > max_k:
        _refuse_length(longest, max_q, max_k)
    return documents


def _refuse_length(longest: tuple[int, int], max_q: int, max_k: int) -> NoReturn:
    # The CUDA kernel would leave the rest of the document uncomputed.
    raise ValueError(
        f"a document of {max(longest)} tokens exceeds max_seqlen {max_q if longest[0] > max_q else max_k}"
    )


def _documents(cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> Iterator[tuple[slice, slice]]:
    ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    for start_q, end_q, start_k, end_k in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
        if end_q - start_q > max_q or end_k - start_k > max_k:
            _refuse_length((end_q - start_q, end_k - start_k), max_q, max_k)
        # Queries without keys get zeros, keys without queries zero gradients, as in the CUDA kernels.
        if end_q > start_q or end_k > start_k:
            yield slice(start_q, end_q), slice(start_k, end_k)


def _window(is_causal: bool, left: int | None, right: int | None) -> tuple[int, int]:
    return (-1 if left is None else left, 0 if is_causal else -1 if right is None else right)


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _group(x: Tensor, num_kv_heads: int) -> Tensor:
    """[L, N, H] -> [L, K, G, H]."""
    grouped: Tensor = x.unflatten(1, (num_kv_heads, -1))
    return grouped


def _ungroup(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[L, K, G, H] -> [L, N, H]."""
    return x.flatten(1, 2).to(dtype)
