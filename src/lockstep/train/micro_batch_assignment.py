"""How the micro-batches of an optimizer step are dealt out to ranks, and how every rank gets to know what was
seen of all of them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import TrainError
from lockstep.packing import empty_batch
from lockstep.protocols.train import StepStats
from lockstep.schema.batch import PackedBatch


def deal(count: int, *, parts: int) -> list[list[int | None]]:
    """Indices of the micro-batches of each part, as many for one part as for the next: collectives inside of
    forward and backward must pair. None: the part runs an empty micro-batch (`lockstep.packing.empty_batch`).

    Example:
        >>> deal(5, parts=2)
        [[0, 2, 4], [1, 3, None]]
    """
    rounds = -(-count // parts)
    return [[i if i < count else None for i in range(part, rounds * parts, parts)] for part in range(parts)]


def dealt(batches: Sequence[PackedBatch], *, part: int, parts: int) -> list[tuple[int | None, PackedBatch]]:
    """What one part runs of a step's micro-batches: each with its index; None with an empty one, made of the
    smallest, which costs least."""
    mine = deal(len(batches), parts=parts)[part]
    smallest = min(batches, key=lambda batch: batch.num_slots, default=None)
    found: list[tuple[int | None, PackedBatch]] = []
    for index in mine:
        assert smallest is not None, "whoever is dealt something has a smallest one"
        found.append((index, empty_batch(smallest) if index is None else batches[index]))
    return found


def require_same_batches(
    batches: Sequence[PackedBatch], *, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Refuse a call in which ranks were given other micro-batches: their collectives would not pair, and wait
    for each other to the deadline. One small collective, on the host where the group can.

    Raises:
        TrainError: on every rank; says what each was given.
    """
    if group.size() == 1:
        return
    digest = zlib.crc32(repr([(batch.lengths, batch.sample_ids) for batch in batches]).encode())
    own = torch.tensor([len(batches), sum(batch.num_slots for batch in batches), digest])
    place = torch.device("cpu") if "gloo" in str(dist.get_backend_config(group)) else device
    found = [torch.empty_like(own, device=place) for _ in range(group.size())]
    dist.all_gather(found, own.to(place), group=group)
    given = [tuple(one.tolist()) for one in found]
    if len(set(given)) > 1:
        listed = ", ".join(f"rank {r}: {n} with {t} slots" for r, (n, t, _) in enumerate(given))
        raise TrainError(
            f"the ranks were not given the same micro-batches ({listed}); every rank must be given all of a "
            "step, in the same order: check that data, seed and config are the same everywhere"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What one rank saw of one micro-batch: detached, on its device."""

    loss: Tensor
    """Scalar: this rank's share."""
    logprobs: Tensor
    """[T] float32, 0 in slots that are not this rank's."""
    entropy: Tensor
    """[T] float32, likewise."""


def share_stats(
    batches: Sequence[PackedBatch],
    seen: Mapping[int, Seen],
    *,
    group: dist.ProcessGroup,
    device: torch.device,
) -> StepStats:
    """What all ranks of `group` saw, on every rank, in micro-batch order: one all-reduce for the whole step.

    Args:
        seen: this rank's, by index into `batches`. Each slot of each micro-batch is some rank's, and at most
            one's: the others have 0 there (x + 0 = x to the bit, NaN stays NaN).
    """
    slots = [batch.num_slots for batch in batches]
    flat = torch.zeros(len(batches) + 2 * sum(slots), dtype=torch.float32, device=device)
    losses, logprobs, entropy = flat.split([len(batches), sum(slots), sum(slots)])
    parts = list(zip(logprobs.split(slots), entropy.split(slots), strict=True))
    for index, found in seen.items():
        losses[index] = found.loss
        parts[index][0].copy_(found.logprobs)
        parts[index][1].copy_(found.entropy)
    dist.all_reduce(flat, group=group)
    return StepStats(
        losses=list(losses.unbind()), logprobs=[p for p, _ in parts], entropy=[e for _, e in parts]
    )


def share_logprobs(
    batches: Sequence[PackedBatch],
    seen: Mapping[int, Tensor],
    *,
    group: dist.ProcessGroup,
    device: torch.device,
) -> list[Tensor]:
    """[T] float32 per micro-batch on every rank, from what each has: as `share_stats`, of logprobs."""
    slots = [batch.num_slots for batch in batches]
    flat = torch.zeros(sum(slots), dtype=torch.float32, device=device)
    parts = list(flat.split(slots))
    for index, logprobs in seen.items():
        parts[index].copy_(logprobs)
    dist.all_reduce(flat, group=group)
    return parts
