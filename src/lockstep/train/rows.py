"""Which slots of a pack the head sees, and how their values are scattered back to the slots."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.schema.batch import IGNORE_LABEL, PackedBatch

Rows = Tensor | slice
"""[R] int64: slots of a pack; or all of them, as a slice."""


def head_rows(batch: PackedBatch, *, static: bool, device: torch.device) -> tuple[Rows, Tensor]:
    """The slots that the head sees, and their labels [R], both on `device`.

    Args:
        batch: on the host: the index is made where the mask is, so that a GPU is not waited for.
        static: every slot, masked ones labelled -100, so that shapes do not depend on the mask. Otherwise
            only the trained ones. Where documents share rows, the slots that the rows are of: every trained
            slot has a row of its own.
    """
    if static and batch.shared is not None:
        slots = batch.shared.slots
        labels = torch.where(batch.loss_mask, batch.labels, IGNORE_LABEL).index_select(0, slots)
        return slots.to(device, non_blocking=True), labels.to(device, non_blocking=True)
    if static:
        labels = torch.where(batch.loss_mask, batch.labels, IGNORE_LABEL)
        return slice(0, batch.num_slots), labels.to(device, non_blocking=True)
    rows = batch.loss_mask.nonzero()[:, 0]
    labels = batch.labels.index_select(0, rows)
    return rows.to(device, non_blocking=True), labels.to(device, non_blocking=True)


def ring_rows(
    batch: PackedBatch, index: Tensor, *, static: bool, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """`head_rows` for one rank of a ring, which has the slots `index` [t] of the pack, on the host.

    Returns:
        rows: [R] int64, the slots of the pack that are this rank's and that the head sees.
        labels: [R] int64.
        local: [R] int64, where they are among the rank's t.
    """
    mask = batch.loss_mask.index_select(0, index)
    local = torch.arange(len(index)) if static else mask.nonzero()[:, 0]
    rows = index.index_select(0, local)
    labels = batch.labels.index_select(0, rows)
    if static:
        labels = torch.where(mask, labels, IGNORE_LABEL)
    moved = [t.to(device, non_blocking=True) for t in (rows, labels, local)]
    return moved[0], moved[1], moved[2]


def part(rows: Rows, chunk: slice) -> Rows:
    """The slots of a chunk of the head's rows."""
    if isinstance(rows, slice):
        return slice(rows.start + chunk.start, rows.start + chunk.stop)
    return rows[chunk]


def scatter(values: Tensor, rows: Rows, num_slots: int) -> Tensor:
    """[..., R] into [..., T], 0 in the other slots."""
    if isinstance(rows, slice):
        return values
    return values.new_zeros(*values.shape[:-1], num_slots).index_copy_(-1, rows, values)
