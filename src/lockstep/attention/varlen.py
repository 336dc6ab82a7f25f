"""torch's own flash attention over packed documents (torch.nn.attention.varlen)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from lockstep.attention.sinks import sink_attention
from lockstep.errors import ModelError
from lockstep.ops.masks import Keys

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
    sinks: Tensor | None = None,
) -> Tensor:
    """See lockstep.attention. float16 or bfloat16 on CUDA; on CPU the reference kernels, any float dtype."""
    if q.device.type == "cpu" and not torch.compiler.is_compiling():
        enable_cpu_reference()
    cu_keys, max_keys = (cu_seqlens, max_seqlen) if keys is None else (keys.cu_keys, keys.max_keys)
    if sinks is not None:
        out: Tensor = sink_attention(
            q, k, v, sinks, cu_seqlens, cu_keys, max_seqlen, max_keys, scale, window
        )[0]
        return out
    # A tuple: varlen_attn recognises causal by comparing with (-1, 0). The kernel's left window leaves the
    # query itself out.
    window_size = (-1, 0) if window is None else (window - 1, 0)
    out = _varlen_attn(
        q,
        k,
        v,
        cu_seqlens,
        cu_keys,
        max_seqlen,
        max_keys,
        scale=scale,
        window_size=window_size,
        **_OPTIONS,
    )
    return out


# Reference CPU kernels for torch's flash attention ops, so that `varlen` runs, and is tested, without a GPU.
#
# `enable_cpu_reference` registers them for aten::_flash_attention_forward and _backward under the CPU
# dispatch key, which torch 2.11 to 2.13 leave empty. Registration holds for the whole process and cannot be
# undone; it happens only when the kernel `varlen` is used on CPU tensors, and never replaces an existing
# kernel.
#
# The backward is the closed form of Dao et al., FlashAttention (arXiv 2205.14135), appendix B.2: inside a
# custom op autograd is switched off, so torch.autograd.grad is no option.


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
            f"{', '.join(taken)}, and Lockstep does not replace them; set train.attention = 'sdpa'"
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
            f"the CPU reference kernel supports only packed documents, not {arguments or 'this'}"
        )
    window = _window(is_causal, window_size_left, window_size_right)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    documents = _where(cu_q, cu_k, seqused_k, max_q, max_k)
    out, logsumexp = tiled_attention(q, k, v, documents=documents, scale=factor, window=window)
    if not q.is_contiguous():  # results are laid out as their inputs are, as torch's op says to compilers
        out = torch.empty_like(q).copy_(out)
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
    grads = [torch.empty_like(x) for x in (q, k, v)]
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


# Attention on a CPU in tiles of one fixed shape, so that no bit of a row depends on its batch.
#
# A matrix product may sum in another order when the number of its rows changes, and then a token attends
# differently alone, in a pack, and in a decode step. Here it cannot: query rows come in tiles of `ROWS`,
# keys in blocks of `KEYS`, both counted from the document's first token, and every product is one of a batch
# of [ROWS, H] x [H, KEYS] or of [ROWS, KEYS] x [KEYS, H]. Only how many there are differs between calls. A
# tile's rows are (position, query head of one kv head); what a call does not have of a tile, or a row may
# not see, adds exact zeros to sums and leaves the online softmax (Milakov and Gimelshein, arXiv 1805.02867)
# as it is: the correction factor is exp(0) = 1.
#
# So a row of the output is a function of its query, its document's keys and values up to where it may look,
# and its position; and packed = alone = a chunk of a prefill = one decoded token.


ROWS = 32
"""Rows of a query tile. Fewer waste less where one token is decoded, more make better matrix products."""
KEYS = 32
"""Keys of a block."""
_SCORES = 1 << 18
"""Scores held at a time: tiles run in batches of at most so many, which stay in the cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """Where each document's queries and keys are. The last query is aligned with the last key."""

    start_q: Tensor
    """[D] int64, rows of q."""
    len_q: Tensor
    start_k: Tensor
    """[D] int64, rows of k and v; in any order, with any gaps."""
    len_k: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tiles:
    """Query tiles, those with most key blocks first."""

    doc: Tensor
    """[n] int64."""
    first: Tensor
    """[n] int64: position of the tile's first row, a multiple of the positions in a tile."""
    first_block: Tensor
    """[n] int64: the first block of keys that a row of the tile may see."""
    num_blocks: Tensor
    """[n] int64, falling."""

    def slice(self, start: int, stop: int) -> _Tiles:
        return _Tiles(
            doc=self.doc[start:stop],
            first=self.first[start:stop],
            first_block=self.first_block[start:stop],
            num_blocks=self.num_blocks[start:stop],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Keys:
    """All keys and values, and where those of a document are."""

    k: Tensor
    """[S, K, H] without gaps, as v."""
    v: Tensor
    start: Tensor
    """[D] int64."""
    length: Tensor
    """[D] int64."""

    def block(self, doc: Tensor, key: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [c * K, KEYS, H] number `key` [c, KEYS] of documents `doc` [c].

        Behind a document's end its last one stands in: what lies there may be NaN, and no mask undoes that in
        a product.
        """
        row = torch.minimum(key, self.length[doc][:, None] - 1) + self.start[doc][:, None]
        heads = torch.arange(self.k.shape[1])[:, None]
        index = (row[:, None] * self.k.shape[1] + heads).flatten()
        k, v = (x.flatten(0, 1).index_select(0, index).to(dtype) for x in (self.k, self.v))
        return k.unflatten(0, (-1, KEYS)), v.unflatten(0, (-1, KEYS))


def tiled_attention(
    q: Tensor, k: Tensor, v: Tensor, *, documents: Documents, scale: float, window: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """q [T, N, H], k and v [S, K, H] -> out [T, N, H] in q's dtype, logsumexp [N, T].

    Computed in float32, in float64 for float64. Rows of no document are left uninitialised; a query without
    visible keys gets zeros and a logsumexp of -inf.

    Args:
        scale: of the scores.
        window: how many keys further left and right than its own position a query sees; -1: all.
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[1] // k.shape[1]
    positions = max(1, ROWS // group)
    # Uncovered rows stay uninitialised, as in the CUDA kernel: what reads them must fail here too.
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    logsumexp = torch.empty(q.shape[1], q.shape[0], dtype=dtype)
    tiles = _tiles(documents, positions, window)
    keys = _Keys(k=k.contiguous(), v=v.contiguous(), start=documents.start_k, length=documents.len_k)
    grouped = q.unflatten(1, (k.shape[1], group))
    step = max(1, _SCORES // (k.shape[1] * _rows(positions, group) * KEYS))
    for start in range(0, tiles.doc.shape[0], step):
        part = tiles.slice(start, start + step)
        row, real = _query_rows(part, documents, positions)
        queries = _gather_queries(grouped, row, real, scale, dtype)
        for rows, result in zip(
            (out.view_as(grouped), logsumexp.t().unflatten(1, grouped.shape[1:3])),
            _attend(queries, part, keys, group=group, window=window),
            strict=True,
        ):
            _scatter(result, rows, row, real)
    return out, logsumexp


def _rows(positions: int, group: int) -> int:
    """Rows of a tile: a multiple of 16, so that each starts on a cache line."""
    return -(-positions * group // 16) * 16


def _tiles(documents: Documents, positions: int, window: tuple[int, int]) -> _Tiles:
    offset = documents.len_k - documents.len_q  # the first query's position
    first_tile = torch.div(offset, positions, rounding_mode="floor")
    last_tile = torch.div(documents.len_k - 1, positions, rounding_mode="floor")
    count = torch.where(documents.len_q > 0, last_tile - first_tile + 1, 0)
    doc = torch.repeat_interleave(count)
    within = torch.arange(doc.shape[0]) - (count.cumsum(0) - count)[doc]
    first = (first_tile[doc] + within) * positions
    left, right = window
    first_key = torch.zeros_like(first) if left < 0 else (first - left).clamp(min=0)
    last_key = documents.len_k[doc] - 1
    if right >= 0:
        last_key = torch.minimum(last_key, first + positions - 1 + right)
    first_block = first_key // KEYS
    num_blocks = torch.where(last_key >= first_key, last_key // KEYS - first_block + 1, 0)
    # So that the tiles that have a block i are always the first ones: slices, where gaps would need copies.
    order = num_blocks.argsort(descending=True, stable=True)
    return _Tiles(
        doc=doc[order], first=first[order], first_block=first_block[order], num_blocks=num_blocks[order]
    )


def _query_rows(tiles: _Tiles, documents: Documents, positions: int) -> tuple[Tensor, Tensor]:
    """[n, positions]: which row of q is the tile's position, and whether the call has it."""
    offset = documents.len_k - documents.len_q
    query = (tiles.first - offset[tiles.doc])[:, None] + torch.arange(positions)
    real = (query >= 0) & (query < documents.len_q[tiles.doc][:, None])
    return torch.where(real, query + documents.start_q[tiles.doc][:, None], 0), real


def _gather_queries(q: Tensor, row: Tensor, real: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """q [T, K, G, H] -> [n, K, R, H], scaled, zeros in rows that the call does not have."""
    n, positions = row.shape
    _, kv_heads, group, head_dim = q.shape
    tiles = q.new_zeros((n, kv_heads, _rows(positions, group), head_dim), dtype=dtype)
    some = q.index_select(0, row.flatten()).to(dtype).mul_(scale)
    some.masked_fill_(~real.flatten()[:, None, None, None], 0.0)
    tiles[:, :, : positions * group].unflatten(2, (positions, group)).copy_(
        some.unflatten(0, (n, positions)).transpose(1, 2)
    )
    return tiles


def _scatter(tiles: Tensor, rows: Tensor, row: Tensor, real: Tensor) -> None:
    """The inverse: tiles [n, K, R, ...] into rows [T, K, G, ...]."""
    positions, group = row.shape[1], rows.shape[2]
    by_position = tiles[:, :, : positions * group].unflatten(2, (positions, group)).transpose(1, 2)
    rows[row[real]] = by_position[real].to(rows.dtype)


def _attend(
    q: Tensor, tiles: _Tiles, keys: _Keys, *, group: int, window: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """q [n, K, R, H] -> out [n, K, R, H], logsumexp [n, K, R]."""
    n, kv_heads, rows, head_dim = q.shape
    position = tiles.first[:, None] + (torch.arange(rows) // group)  # [n, R]
    lowest, highest = _visible(position, keys.length[tiles.doc], window)
    out = torch.zeros_like(q)
    total = q.new_zeros(n, kv_heads, rows, 1)
    top = q.new_full((n, kv_heads, rows, 1), float("-inf"))
    active = torch.bincount(tiles.num_blocks).flip(0).cumsum(0).flip(0)[1:].tolist()
    for i, c in enumerate(active):  # the first c tiles have a block i
        key = ((tiles.first_block[:c] + i) * KEYS)[:, None] + torch.arange(KEYS)
        k, v = keys.block(tiles.doc[:c], key, q.dtype)
        scores = torch.bmm(q[:c].flatten(0, 1), k.transpose(1, 2)).view(c, kv_heads, rows, KEYS)
        hidden = (key[:, None] < lowest[:c, :, None]) | (key[:, None] > highest[:c, :, None])
        scores.masked_fill_(hidden[:, None], float("-inf"))
        new_top = torch.maximum(top[:c], scores.amax(-1, keepdim=True))
        finite = new_top.masked_fill(new_top == float("-inf"), 0.0)  # a row that has seen no key yet
        probs = scores.sub_(finite).exp_()
        correction = (top[:c] - finite).exp_()
        total[:c].mul_(correction).add_(probs.sum(-1, keepdim=True))
        out[:c].mul_(correction).view(-1, rows, head_dim).baddbmm_(probs.flatten(0, 1), v)
        top[:c] = new_top
    # A row without visible keys gets zeros; 0 / 0 would be NaN, and spread.
    empty = total == 0
    return out / total.masked_fill(empty, 1.0), (top + total.log()).squeeze(-1)


def _visible(position: Tensor, len_k: Tensor, window: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """[n, R]: the first and the last key that a row at `position` [n, R] sees."""
    left, right = window
    last = (len_k - 1)[:, None].expand_as(position)
    lowest = torch.zeros_like(position) if left < 0 else position - left
    return lowest, last if right < 0 else torch.minimum(last, position + right)
