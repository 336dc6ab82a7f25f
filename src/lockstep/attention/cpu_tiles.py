"""Attention on a CPU in tiles of one fixed shape, so that no bit of a row depends on its batch.

A matrix product may sum in another order when the number of its rows changes, and then a token attends
differently alone, in a pack, and in a decode step. Here it cannot: query rows come in tiles of `ROWS`, keys
in blocks of `KEYS`, both counted from the document's first token, and every product is one of a batch of
[ROWS, H] x [H, KEYS] or of [ROWS, KEYS] x [KEYS, H]. Only how many there are differs between calls. A tile's
rows are (position, query head of one kv head); what a call does not have of a tile, or a row may not see,
adds exact zeros to sums and leaves the online softmax (Milakov and Gimelshein, arXiv 1805.02867) as it is:
the correction factor is exp(0) = 1.

So a row of the output is a function of its query, its document's keys and values up to where it may look,
and its position; and packed = alone = a chunk of a prefill = one decoded token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
