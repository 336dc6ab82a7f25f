"""Allocation of KV cache rows to samples: contiguous blocks, first fit."""

from __future__ import annotations

import bisect
from dataclasses import dataclass


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
