"""Split a micro-batch into one micro-batch per sample: run one at a time, they need the activations of one
sample."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from lockstep.packing import Bucket, repack
from lockstep.schema.batch import PackedBatch, PreferenceBatch

_STEPS = 4
_ALIGNMENT = 64


def single_samples(batch: PackedBatch, *, static: bool) -> list[PackedBatch]:
    """One batch per document, in order; per pair of documents for preference pairs, whose loss is of both.

    Losses and gradients of the parts add up to those of the batch: `loss_weights` hold the normaliser of the
    whole step, and no loss looks beyond a document or pair.

    Args:
        batch: on the host.
        static: pad each part to one of at most 4 capacities, quarters of the longest that a part may be
            (`batch.max_seqlen` a document), so that compiled code makes few graphs.
    """
    width = 2 if isinstance(batch, PreferenceBatch) else 1
    parts, start = [], 0
    for first in range(0, len(batch.sample_ids), width):
        documents = slice(first, first + width)
        length = sum(batch.lengths[documents])
        part = _slice(batch, documents, slice(start, start + length))
        parts.append(repack(part, _bucket(length, width, batch.max_seqlen)) if static else part)
        start += length
    return parts


def merge_samples(parts: list[Tensor], batch: PackedBatch) -> Tensor:
    """Merge per-token values [..., t] of the parts, padding included, into [..., T] of the batch; 0 in its
    padding."""
    whole = parts[0].new_zeros(*parts[0].shape[:-1], batch.num_slots)
    width = 2 if isinstance(batch, PreferenceBatch) else 1
    start = 0
    for index, values in enumerate(parts):
        length = sum(batch.lengths[index * width : (index + 1) * width])
        whole[..., start : start + length] = values[..., :length]
        start += length
    return whole


def _slice(batch: PackedBatch, documents: slice, slots: slice) -> PackedBatch:
    lengths = batch.lengths[documents]
    changes: dict[str, Any] = {
        field.name: value[slots]
        for field in dataclasses.fields(batch)
        if isinstance(value := getattr(batch, field.name), Tensor) and field.name != "cu_seqlens"
    }
    changes["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0).to(batch.cu_seqlens)
    changes |= {"lengths": lengths, "sample_ids": batch.sample_ids[documents], "max_seqlen": max(lengths)}
    changes["shared"] = None  # a sample shares nothing with itself
    if versions := getattr(batch, "policy_versions", ()):
        changes["policy_versions"] = versions[documents]
    return dataclasses.replace(batch, **changes)


def _bucket(length: int, width: int, max_seqlen: int) -> Bucket:
    most = width * max_seqlen
    quarters = [-(-most * step // (_STEPS * _ALIGNMENT)) * _ALIGNMENT for step in range(1, _STEPS + 1)]
    tokens = next(size for size in quarters if size >= length)
    return Bucket(tokens=tokens, documents=width + -(-tokens // max_seqlen), max_seqlen=max_seqlen)
