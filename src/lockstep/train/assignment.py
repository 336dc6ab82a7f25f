"""Assign the micro-batches of an optimizer step to ranks, and share every rank's results with all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import TrainError
from lockstep.packing import empty_batch
from lockstep.protocols.train import StepStats
from lockstep.schema.batch import PackedBatch
from lockstep.train.loss_module import MicroBatchOutput, step_stats


def assigned_indices(count: int, *, parts: int) -> list[list[int | None]]:
    """Assign micro-batch indices to parts, the same number to every part, because collectives inside forward
    and backward must match. None: the part runs an empty micro-batch (`lockstep.packing.empty_batch`).

    Example:
        >>> assigned_indices(5, parts=2)
        [[0, 2, 4], [1, 3, None]]
    """
    rounds = -(-count // parts)
    return [[i if i < count else None for i in range(part, rounds * parts, parts)] for part in range(parts)]


def assign_batches(
    batches: Sequence[PackedBatch], *, part: int, parts: int
) -> list[tuple[int | None, PackedBatch]]:
    """Return the micro-batches of a step that one part runs, with their indices. An index of None marks an
    empty micro-batch, made from the smallest one, which is the cheapest."""
    mine = assigned_indices(len(batches), parts=parts)[part]
    smallest = min(batches, key=lambda batch: batch.num_slots, default=None)
    assigned: list[tuple[int | None, PackedBatch]] = []
    for index in mine:
        assert smallest is not None, "a part that is assigned something has a smallest one"
        assigned.append((index, empty_batch(smallest) if index is None else batches[index]))
    return assigned


def require_same_batches(
    batches: Sequence[PackedBatch], *, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Refuse a call in which ranks got different micro-batches: their collectives would not match and would
    hang until the deadline. Costs one small collective, on the host if the group supports it.

    Raises:
        TrainError: on every rank; lists the micro-batches of each rank.
    """
    if group.size() == 1:
        return
    # Not hash(): Python salts string hashes in each process.
    digest = zlib.crc32(repr([(batch.lengths, batch.sample_ids) for batch in batches]).encode())
    own = torch.tensor([len(batches), sum(batch.num_slots for batch in batches), digest])
    # On a GPU the gather would queue behind earlier kernels, and reading the result would wait for them.
    gather_device = torch.device("cpu") if "gloo" in str(dist.get_backend_config(group)) else device
    gathered = [torch.empty_like(own, device=gather_device) for _ in range(group.size())]
    dist.all_gather(gathered, own.to(gather_device), group=group)
    summaries = [tuple(one.tolist()) for one in gathered]
    if len(set(summaries)) > 1:
        listed = ", ".join(f"rank {r}: {n} with {t} slots" for r, (n, t, _) in enumerate(summaries))
        raise TrainError(
            f"ranks-differ: the ranks did not get the same micro-batches ({listed}); every rank must get all "
            "of them in the same order: check that data, seed and config are the same everywhere"
        )


def share_stats(
    batches: Sequence[PackedBatch],
    outputs: Mapping[int, MicroBatchOutput],
    *,
    terms: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> StepStats:
    """Share the results of all ranks of `group` with every rank, in micro-batch order, in one all-reduce for
    the whole step.

    Args:
        outputs: this rank's results, by index into `batches`. Each slot of each micro-batch belongs to
            exactly one rank; the others have 0 there (x + 0 = x bitwise, NaN stays NaN).
        terms: number of terms of the loss.
    """
    rows, slots = 2 + terms, [batch.num_slots for batch in batches]
    flat = torch.zeros(len(batches) + rows * sum(slots), dtype=torch.float32, device=device)
    losses, *tokens = flat.split([len(batches), *(rows * size for size in slots)])
    shared = [
        MicroBatchOutput(loss=loss, tokens=part.view(rows, -1))
        for loss, part in zip(losses.unbind(), tokens, strict=True)
    ]
    for index, output in outputs.items():
        shared[index].loss.copy_(output.loss)
        shared[index].tokens.copy_(output.tokens)
    dist.all_reduce(flat, group=group)
    return step_stats(shared)


def share_logprobs(
    batches: Sequence[PackedBatch],
    logprobs: Mapping[int, Tensor],
    *,
    group: dist.ProcessGroup,
    device: torch.device,
) -> list[Tensor]:
    """Share logprobs, [T] float32 per micro-batch, with every rank: like `share_stats`, for logprobs only."""
    slots = [batch.num_slots for batch in batches]
    flat = torch.zeros(sum(slots), dtype=torch.float32, device=device)
    parts = list(flat.split(slots))
    for index, values in logprobs.items():
        parts[index].copy_(values)
    dist.all_reduce(flat, group=group)
    return parts
