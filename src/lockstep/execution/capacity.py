"""Static capacities: pad a decoder's inputs to one of a few shapes, so that one graph serves many packs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.errors import ConfigError, TrainError


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Capacity:
    """The shape of the packs that one graph is made for."""

    tokens: int
    """T."""
    documents: int
    """D_cap: real documents and pad documents in the padded tail."""
    max_seqlen: int
    """Longest document, real or pad; part of the graph."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderCall:
    """The arguments of one call of the decoder."""

    input_ids: Tensor
    """[1, T] packed, [B, L] padded; int64."""
    position_ids: Tensor
    """The same shape, int64."""
    kwargs: dict[str, Any]
    """Arguments of attention: cu_seqlens [D_cap + 1] int32, max_seqlen, perhaps masks [1, 1, T, T]."""

    def arguments(self) -> tuple[Tensor, Tensor, dict[str, Any]]:
        return self.input_ids, self.position_ids, self.kwargs


def pad_call(call: DecoderCall, capacities: Sequence[Capacity]) -> DecoderCall:
    """Pad a call to the smallest capacity that holds it, with documents of zeros behind the pack; documents
    do not see each other, so the pack's own rows do not change.

    Raises:
        TrainError: no capacity holds it.
        ConfigError: the call is not of one row of documents.
    """
    cu_seqlens = call.kwargs.get("cu_seqlens")
    if cu_seqlens is None or call.input_ids.shape[0] != 1 or call.kwargs.get("dense"):
        raise ConfigError(
            "capacities are of packs, one row of documents with cu_seqlens; set train.layout = 'packed' and "
            "train.attention = 'varlen' or 'sdpa', or give no capacities",
            code="unsupported-combination",
            setting="train.layout",
        )
    num_slots, documents = call.input_ids.shape[1], cu_seqlens.shape[0] - 1
    longest = int(call.kwargs["max_seqlen"])
    capacity = _smallest(Capacity(tokens=num_slots, documents=documents, max_seqlen=longest), capacities)
    tail = capacity.tokens - num_slots
    full, rest = divmod(tail, capacity.max_seqlen)
    pads = [capacity.max_seqlen] * full + ([rest] if rest else [])
    # The tail is documents too: flash kernels leave rows that no document covers uninitialised.
    bounds = num_slots + torch.tensor(pads, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    bounds = F.pad(bounds, (0, capacity.documents - documents - len(pads)), value=capacity.tokens)
    positions = torch.cat([torch.arange(n) for n in pads]) if pads else torch.arange(0)
    device = cu_seqlens.device
    kwargs = dict(call.kwargs)
    kwargs["cu_seqlens"] = torch.cat([cu_seqlens, bounds.to(device)])
    kwargs["max_seqlen"] = capacity.max_seqlen
    if "masks" in kwargs:
        kwargs["masks"] = {window: _pad_mask(mask, tail) for window, mask in kwargs["masks"].items()}
    return dataclasses.replace(
        call,
        input_ids=F.pad(call.input_ids, (0, tail)),
        position_ids=torch.cat([call.position_ids, positions.to(device)[None]], 1),
        kwargs=kwargs,
    )


def _smallest(needed: Capacity, capacities: Sequence[Capacity]) -> Capacity:
    for capacity in sorted(capacities):
        pads = -(-(capacity.tokens - needed.tokens) // capacity.max_seqlen)
        if (
            capacity.tokens >= needed.tokens
            and capacity.documents >= needed.documents + pads
            and capacity.max_seqlen >= needed.max_seqlen
        ):
            return capacity
    listed = "; ".join(
        f"{c.tokens} slots, {c.documents} documents of at most {c.max_seqlen}" for c in sorted(capacities)
    )
    raise TrainError(
        f"a pack of {needed.tokens} slots, {needed.documents} documents of at most {needed.max_seqlen} "
        f"exceeds every capacity of the joint graph ({listed}); lower train.token_budget, or give a larger "
        "capacity",
        code="too-long",
        setting="train.token_budget",
        tokens=needed.tokens,
        documents=needed.documents,
    )


def _pad_mask(mask: Tensor | None, tail: int) -> Tensor | None:
    """[1, 1, T, T] bool with `tail` more rows, each of which sees itself: a row that sees nothing is NaN."""
    if mask is None or tail == 0:
        return mask
    padded = F.pad(mask, (0, tail, 0, tail))
    index = torch.arange(mask.shape[-1], padded.shape[-1], device=mask.device)
    padded[..., index, index] = True
    return padded
