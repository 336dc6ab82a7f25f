"""The assignment of a pack's slots to the ranks of a ring; `lockstep.packing.ring_shard` makes it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class RingStep:
    """The documents of one call of a varlen attention kernel: segment i of q sees segment i of k."""

    cu_q: Tensor
    """[S + 1] int32."""
    cu_k: Tensor
    """[S + 1] int32."""
    max_q: int
    """No segment of q is longer."""
    max_k: int
    """No segment of k is longer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RingShard:
    """One rank's share of a pack, and the keys that it attends to in each step of the ring.

    A document is either divided among all ranks or whole on one. Rows of a rank, in local order:

        divided documents, each as [its earlier chunk | its later chunk], then whole documents

    so each message round the ring is one slice, `[:divided[rank]]`.
    """

    rank: int
    size: int
    """Ranks of the ring, R."""
    index: Tensor
    """[t] int64: the pack's slot of every local row."""
    lengths: tuple[int, ...]
    """Rows of each document that has some here, in local order; they sum to t."""
    sizes: tuple[int, ...]
    """t of every rank."""
    divided: tuple[int, ...]
    """Rows of divided documents, by rank. All zero (nothing is sent) or all at least 2."""
    own: RingStep
    """Step 0: the rank's own keys, causal, over all t rows."""
    others: tuple[RingStep, ...]
    """Step i = 1 .. R - 1, at index i - 1: keys of rank (rank - i) mod R, not causal, over the divided rows
    of both. Empty where no document is divided."""

    @property
    def num_rows(self) -> int:
        """t."""
        return self.sizes[self.rank]

    def to(self, device: torch.device | str) -> RingShard:
        """Return the shard with every tensor on `device`: two copies, whatever the number of steps."""
        if self.index.device == torch.device(device):
            return self
        steps = (self.own, *self.others)
        tables = [table for step in steps for table in (step.cu_q, step.cu_k)]
        moved = torch.cat(tables).to(device, non_blocking=True).split([len(table) for table in tables])
        placed = [
            dataclasses.replace(step, cu_q=moved[2 * i], cu_k=moved[2 * i + 1])
            for i, step in enumerate(steps)
        ]
        index = self.index.to(device, non_blocking=True)
        return dataclasses.replace(self, index=index, own=placed[0], others=tuple(placed[1:]))
