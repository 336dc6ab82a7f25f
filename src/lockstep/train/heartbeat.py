"""Which micro-batch a rank is at, in its flight record."""

from __future__ import annotations

from lockstep.observe import flight
from lockstep.schema.batch import PackedBatch

_MOST = 32
"""Lengths that are noted."""


def note_micro_batch(index: int | None, batch: PackedBatch) -> None:
    """Note that a rank begins with a micro-batch of the step; index None: an empty one, which it runs because
    others have more."""
    flight.note(micro_batch=-1 if index is None else index, inputs=list(batch.lengths[:_MOST]))
