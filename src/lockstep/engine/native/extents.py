"""Which rows of the KV pool belong to whom: contiguous extents, first fit."""

from __future__ import annotations

import bisect
from dataclasses import dataclass


@dataclass(slots=True)
class Extent:
    """Rows start to start + size of the pool."""

    start: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.size


class Extents:
    """The free rows of a pool, as gaps in rising order that do not touch."""

    def __init__(self, capacity: int, *, first: int = 0) -> None:
        self.capacity = capacity
        self.free = capacity
        self._first = first
        self._gaps = [Extent(first, capacity)] if capacity else []

    def allocate(self, size: int) -> Extent | None:
        """The first gap that is large enough, or None."""
        for index, gap in enumerate(self._gaps):
            if gap.size >= size:
                return self._take(index, size)
        return None

    def extend(self, extent: Extent, size: int) -> bool:
        """Grow in place to `size` rows; False when the rows behind it are taken."""
        more = size - extent.size
        index = self._behind(extent.stop)
        if index == len(self._gaps) or self._gaps[index].start != extent.stop:
            return False
        if self._gaps[index].size < more:
            return False
        self._take(index, more)
        extent.size = size
        return True

    def release(self, extent: Extent) -> None:
        """Make its rows free; it touches no other gap afterwards."""
        index = self._behind(extent.start)
        gap = Extent(extent.start, extent.size)
        if index < len(self._gaps) and gap.stop == self._gaps[index].start:
            gap.size += self._gaps.pop(index).size
        if index and self._gaps[index - 1].stop == gap.start:
            self._gaps[index - 1].size += gap.size
        else:
            self._gaps.insert(index, gap)
        self.free += extent.size

    def pack(self, held: list[Extent]) -> None:
        """Move `held`, all that is taken, to the beginning, in this order; all the rest is one gap."""
        start = self._first
        for extent in held:
            extent.start = start
            start = extent.stop
        self.free = self.capacity - (start - self._first)
        self._gaps = [Extent(start, self.free)] if self.free else []

    def _take(self, index: int, size: int) -> Extent:
        gap = self._gaps[index]
        taken = Extent(gap.start, size)
        gap.start += size
        gap.size -= size
        if not gap.size:
            del self._gaps[index]
        self.free -= size
        return taken

    def _behind(self, row: int) -> int:
        """Index of the first gap that starts at `row` or later."""
        return bisect.bisect_left(self._gaps, row, key=lambda gap: gap.start)
