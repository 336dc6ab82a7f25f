"""Smaller and reordered copies of a recorded batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from lockstep.schema.batch import IGNORE_LABEL, PackedBatch

AnyBatch = TypeVar("AnyBatch", bound=PackedBatch)


def take(batch: AnyBatch, parts: Sequence[tuple[int, int]]) -> AnyBatch:
    """Make an exact pack (no tail) of some documents of `batch`, in the order given.

    Args:
        parts: (index of a real document, how many of its *last* tokens): a completion is at a document's end,
            so a short cut still has something to train on.

    Raises:
        ValueError: no document, or one with no token or more than it has.
    """
    starts = [0, *accumulate(batch.lengths)]
    real = len(batch.sample_ids)
    bad = [(i, n) for i, n in parts if not (0 <= i < real and 1 <= n <= batch.lengths[i])]
    if bad or not parts:
        raise ValueError(f"cannot take {bad or 'no document'} of documents of lengths {batch.lengths[:real]}")
    lengths = [n for _, n in parts]
    slots = torch.cat([torch.arange(starts[i + 1] - n, starts[i + 1]) for i, n in parts])
    per_token: dict[str, Any] = {
        field.name: value[slots]
        for field in dataclasses.fields(batch)
        if isinstance(value := getattr(batch, field.name), Tensor) and value.shape == batch.token_ids.shape
    }
    ends = torch.tensor(list(accumulate(lengths)))
    per_token["positions"] = torch.cat([torch.arange(n) for n in lengths])
    per_token["labels"][ends - 1] = IGNORE_LABEL
    per_token["loss_mask"][ends - 1] = False
    per_token["loss_weights"] = torch.where(per_token["loss_mask"], per_token["loss_weights"], 0.0)
    names = {field.name for field in dataclasses.fields(batch)}
    if "policy_versions" in names:
        versions = getattr(batch, "policy_versions", ())
        per_token["policy_versions"] = tuple(versions[i] for i, _ in parts) if versions else ()
    return dataclasses.replace(
        batch,
        **per_token,
        cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        max_seqlen=max(lengths),
        lengths=tuple(lengths),
        sample_ids=tuple(batch.sample_ids[i] for i, _ in parts),
        shared=None,
    )


def reversed_order(batch: AnyBatch) -> AnyBatch:
    """Return the same documents, last one first, in an exact pack."""
    real = len(batch.sample_ids)
    return take(batch, [(i, batch.lengths[i]) for i in reversed(range(real))])


def exact(batch: AnyBatch) -> AnyBatch:
    """Return the same documents without a padded tail."""
    return take(batch, [(i, batch.lengths[i]) for i in range(len(batch.sample_ids))])
