"""Estimate the memory of one replayed input before anything of its size is allocated.

A recording states sizes that no byte of it stands behind: the padded tail, the documents that cu_seqlens
has room for, the width of padded rows, the rank of adapters. The estimate is that of `lockstep plan`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from lockstep.errors import RecordingError
from lockstep.lab.replay.cell import Cell, train_config
from lockstep.models.memory import gib, total_bytes
from lockstep.models.memory_shape import ModelShape, forward_sizes
from lockstep.recording.storage.format import MAX_DOCUMENT_SLOTS

_SLOT_BYTES = 64
"""Ids, positions, labels, masks and floats of one slot of a batch."""
_DOCUMENT_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLimit:
    """The memory that one input may take."""

    bytes: int
    shape: ModelShape
    cell: Cell
    backward: bool

    def check(self, *, slots: int, documents: int) -> None:
        """Refuse a batch that would take more.

        Args:
            slots: rows that every layer computes.
            documents: entries of cu_seqlens.

        Raises:
            RecordingError: names the estimate, the limit and the flag.
        """
        if documents > MAX_DOCUMENT_SLOTS:
            raise RecordingError(
                f"field 'capacity': the batch would have room for {documents:,} documents; at most "
                f"{MAX_DOCUMENT_SLOTS:,}",
                code="too-large",
                name="capacity",
                documents=documents,
            )
        need = self.estimate(slots=slots, documents=documents)
        if need > self.bytes:
            raise RecordingError(
                f"a batch of {slots:,} slots would take about {gib(need)}, more than the {gib(self.bytes)} "
                f"that an input may take; give more with --max-memory {need / 2**30 + 1:.0f}, fewer layers "
                "with --num-layers, or leave the input out with --inputs",
                code="out-of-memory",
                setting="--max-memory",
            )

    def estimate(self, *, slots: int, documents: int = 0) -> int:
        """Estimate bytes: parameters, gradients, what forward and backward keep, and the batch itself."""
        shape, kind = self.shape, torch.device(self.cell.device).type
        weights = shape.parameters * shape.dtype_bytes
        weights += shape.trained * shape.dtype_bytes * self.backward
        if not self.backward:  # nothing is kept from layer to layer
            shape = dataclasses.replace(shape, layers=1)
        train = train_config(self.cell, static_capacity=False)
        activations = sum(size for _, size, _, _ in forward_sizes(shape, train, tokens=slots, device=kind))
        return int(weights + activations + slots * _SLOT_BYTES + documents * _DOCUMENT_BYTES)


def memory_limit(cell: Cell, shape: ModelShape, *, backward: bool, max_bytes: int | None) -> MemoryLimit:
    """The limit set by `--max-memory`.

    Args:
        max_bytes: None: all memory of the device.

    Raises:
        RecordingError: the model alone is larger.
    """
    device = torch.device(cell.device)
    if max_bytes is None:
        max_bytes = (
            torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else total_bytes()
        )
    limit = MemoryLimit(bytes=max_bytes, shape=shape, cell=cell, backward=backward)
    limit.check(slots=1, documents=1)
    return limit
