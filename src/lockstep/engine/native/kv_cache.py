"""The KV cache: keys and values of all running samples, one pair of tensors per layer."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.engine.native.peers import Op, Peers
from lockstep.models.memory import available_bytes, total_bytes

SCRATCH = 0
"""The cache row that rows without a sample write to: they fill a batch up to a static size."""
_FRACTION = {"cuda": 0.45, "cpu": 0.25}
"""Default of engine.memory_fraction: on a GPU the trainer's optimizer and activations need the rest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KVShape:
    """Shape, dtype and device of the keys and values of a token."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, keys and values of all layers."""
        return 2 * self.layers * self.heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """A copy of `count` rows, from `source` on to `target` on."""

    source: int
    target: int
    count: int


class KVCache:
    """keys[layer] and values[layer] are [P, K, H]; P - 1 tokens of samples and the scratch row.

    Args:
        peers: the ranks that hold the other heads, which are told of moves.
    """

    def __init__(self, shape: KVShape, capacity: int, *, peers: Peers | None = None) -> None:
        def rows() -> Tensor:  # a tensor each: views of one storage would be aliased inputs of a graph
            size = (capacity + 1, shape.heads, shape.head_dim)
            tensor = torch.zeros(size, dtype=shape.dtype, device=shape.device)
            torch._dynamo.mark_dynamic(tensor, 0)  # a larger cache is no reason to compile again
            return tensor

        self.capacity = capacity
        self.num_bytes = (capacity + 1) * shape.token_bytes
        self.keys = [rows() for _ in range(shape.layers)]
        self.values = [rows() for _ in range(shape.layers)]
        self._device, self._peers = shape.device, peers

    def move(self, moves: Sequence[Move]) -> None:
        """Do all moves at once: a source may overlap any target."""
        if not moves:
            return
        if self._peers is not None:
            self._peers.send(Op.MOVE, [n for move in moves for n in (move.source, move.target, move.count)])
        sources = [np.arange(move.source, move.source + move.count) for move in moves]
        targets = [np.arange(move.target, move.target + move.count) for move in moves]
        rows = np.concatenate([*sources, *targets])
        index = upload(rows, torch.empty(rows.size, dtype=torch.int64, device=self._device))
        source, target = index.chunk(2)
        for tensor in (*self.keys, *self.values):
            tensor.index_copy_(0, target, tensor.index_select(0, source))


def upload(array: npt.NDArray[Any], to: Tensor) -> Tensor:
    """Copy the entries, in order, over those of `to`, without waiting for a GPU."""
    entries = torch.from_numpy(array).view(-1)
    return to.copy_(entries.pin_memory() if to.is_cuda else entries, non_blocking=True)


def most_tokens(shape: KVShape, fraction: float | None, *, held: int = 0) -> int:
    """Tokens that fit into `fraction` of the device's memory, and into nine tenths of what is free there; on
    a CPU, of the host's memory within its cgroup.

    Args:
        held: bytes of the cache that the new one replaces.
    """
    share = _FRACTION[shape.device.type] if fraction is None else fraction
    if shape.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(shape.device)
        cached = torch.cuda.memory_reserved(shape.device) - torch.cuda.memory_allocated(shape.device)
        # What torch has reserved and not handed out is free for it, though not for the driver.
        free += cached
    else:
        free, total = available_bytes(shape.device)[0], total_bytes()
    return int(min(share * total, 0.9 * (free + held))) // shape.token_bytes - 1


# Allocation of KV cache rows to samples: contiguous blocks, first fit.


@dataclass(slots=True)
class KVBlock:
    """Rows start to start + size of the KV cache."""

    start: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.size


class KVBlockAllocator:
    """The free rows of a KV cache, as gaps in ascending order that do not touch."""

    def __init__(self, capacity: int, *, first: int = 0) -> None:
        self.capacity = capacity
        self.free = capacity
        self._first = first
        self._gaps = [KVBlock(first, capacity)] if capacity else []

    def allocate(self, size: int) -> KVBlock | None:
        """Allocate from the first gap that is large enough; None if there is none."""
        for index, gap in enumerate(self._gaps):
            if gap.size >= size:
                return self._take(index, size)
        return None

    def extend(self, block: KVBlock, size: int) -> bool:
        """Grow in place to `size` rows; False when the rows behind it are taken."""
        more = size - block.size
        index = self._behind(block.stop)
        if index == len(self._gaps) or self._gaps[index].start != block.stop:
            return False
        if self._gaps[index].size < more:
            return False
        self._take(index, more)
        block.size = size
        return True

    def release(self, block: KVBlock) -> None:
        """Free the rows of a block, and merge them with the gaps that they touch."""
        index = self._behind(block.start)
        gap = KVBlock(block.start, block.size)
        if index < len(self._gaps) and gap.stop == self._gaps[index].start:
            gap.size += self._gaps.pop(index).size
        if index and self._gaps[index - 1].stop == gap.start:
            self._gaps[index - 1].size += gap.size
        else:
            self._gaps.insert(index, gap)
        self.free += block.size

    def pack(self, held: list[KVBlock]) -> None:
        """Move `held`, all allocated blocks, to the beginning, in this order; the rest becomes one gap."""
        start = self._first
        for block in held:
            block.start = start
            start = block.stop
        self.free = self.capacity - (start - self._first)
        self._gaps = [KVBlock(start, self.free)] if self.free else []

    def _take(self, index: int, size: int) -> KVBlock:
        gap = self._gaps[index]
        taken = KVBlock(gap.start, size)
        gap.start += size
        gap.size -= size
        if not gap.size:
            del self._gaps[index]
        self.free -= size
        return taken

    def _behind(self, row: int) -> int:
        """Index of the first gap that starts at `row` or later."""
        return bisect.bisect_left(self._gaps, row, key=lambda gap: gap.start)
