"""Packs of documents, with static capacities if one graph must serve many packs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from lockstep.config.train import Layout
from lockstep.errors import DataError
from lockstep.ops.masks import cu_seqlens
from lockstep.packing.groups import PackLimits, pack_groups, pack_sizes
from lockstep.packing.shared import Prefixes, count, share_in_few_shapes, share_later
from lockstep.schema.batch import (
    IGNORE_LABEL,
    PackedBatch,
    PolicyBatch,
    PolicySample,
    PreferenceBatch,
    PreferenceSample,
    ScoredSample,
    TrainSample,
    UnpairedBatch,
    UnpairedSample,
    ValueBatch,
    ValueSample,
    trajectory_slices,
)

Samples = TypeVar("Samples", bound=TrainSample)

_PER_TOKEN = (
    *("token_ids", "positions", "labels", "loss_mask", "loss_weights"),
    *("rollout_logprobs", "advantages", "old_logprobs", "ref_logprobs", "returns", "old_values"),
    *("margins", "desirability", "kl_baseline", "current", "trajectories"),
)
"""Per-token fields of batches, of which each kind has some."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """A static capacity: packs of one bucket have equal shapes, so one compiled graph serves them all."""

    tokens: int
    """T of the pack."""
    documents: int
    """D_cap of the pack: real documents and pad documents in the padded tail."""
    max_seqlen: int
    """Longest document, including pad documents; part of the graph."""


def buckets_for(*, token_budget: int, max_seqlen: int, max_documents: int) -> tuple[Bucket, ...]:
    """Return the buckets of a run, smallest first: quarters of the token budget, rounded up to 64 slots.

    They make at most 4 graphs. Every bucket has room for `max_documents` real documents and for a tail of any
    size; `max_seqlen` is the same in all. Buckets below max_seqlen are left out.
    """
    return tuple(
        Bucket(tokens=size, documents=max_documents + -(-size // max_seqlen), max_seqlen=max_seqlen)
        for size in pack_sizes(token_budget, max_seqlen)
    )


def pack(
    samples: Sequence[TrainSample], loss_weights: Sequence[Tensor], *, bucket: Bucket | None = None
) -> PackedBatch:
    """Concatenate documents in the given order. The type of the batch follows that of the samples.

    Args:
        loss_weights: [L] float32 per sample, see PackedBatch.loss_weights; ignored where loss_mask is False.
        bucket: the capacity to pad to. None: no padding.

    Raises:
        DataError: no sample, an empty one, samples of several types, or more than the bucket holds.
    """
    return pack_all(samples, loss_weights, groups=[range(len(samples))], buckets=[bucket])[0]


def pack_all(
    samples: Sequence[TrainSample],
    loss_weights: Sequence[Tensor],
    *,
    groups: Sequence[Sequence[int]],
    buckets: Sequence[Bucket | None],
    step_tokens: int | None = None,
) -> list[PackedBatch]:
    """Return a pack of each group of samples, given by their indices, as `pack` does; the samples of all
    groups are of one type. Fields are made of all documents at once: there may be thousands in a step."""
    order = [index for group in groups for index in group]
    ordered, ends = [samples[i] for i in order], [0, *accumulate(map(len, groups))]
    columns, batch_type = _columns(ordered, [loss_weights[i] for i in order])
    lengths, start, batches = [len(sample) for sample in ordered], 0, []
    for (first, last), bucket in zip(pairwise(ends), buckets, strict=True):
        own = lengths[first:last]
        part, start = slice(start, start + sum(own)), start + sum(own)
        fields = _padded({name: values[part] for name, values in columns.items()}, own, bucket)
        fields["sample_ids"] = tuple(sample.sample_id for sample in ordered[first:last])
        fields["step_tokens"] = step_tokens
        if batch_type is PolicyBatch:
            fields["policy_versions"] = tuple(_column(ordered[first:last], "policy_version"))
        batches.append(batch_type(**fields))
    return batches


def _columns(
    samples: Sequence[Any], loss_weights: Sequence[Tensor]
) -> tuple[dict[str, Tensor], type[PackedBatch]]:
    """The per-token fields of a batch of all samples, without padding, and its type."""
    kinds = {type(sample) for sample in samples}
    if len(kinds) != 1 or len(samples) != len(loss_weights):
        raise DataError(
            "wrong-batch: a pack needs at least one sample, all of one type, and one loss_weights per "
            f"sample; got {len(samples)} samples of {sorted(k.__name__ for k in kinds)} and "
            f"{len(loss_weights)} loss_weights"
        )
    lengths = torch.tensor([len(sample) for sample in samples])
    if not bool(lengths.all()):
        raise DataError(f"empty: sample {samples[int(lengths.argmin())].sample_id} is empty; drop it first")
    ends, kind = lengths.cumsum(0), kinds.pop()
    token_ids, mask = (torch.cat(_column(samples, name)) for name in ("token_ids", "loss_mask"))
    labels = token_ids.roll(-1)
    labels[ends - 1] = IGNORE_LABEL
    columns = {
        "token_ids": token_ids,
        "positions": torch.arange(len(token_ids)) - (ends - lengths).repeat_interleave(lengths),
        "labels": labels,
        "loss_mask": mask,
        "loss_weights": torch.where(mask, torch.cat(list(loss_weights)), 0.0),
    }

    def trained(values: Sequence[float]) -> Tensor:
        """A number of each document, at its trained tokens."""
        return torch.tensor(values, dtype=torch.float32).repeat_interleave(lengths) * mask

    if issubclass(kind, ScoredSample):
        columns["margins"] = trained(_column(samples, "margin"))
    if issubclass(kind, PreferenceSample):
        return columns, PreferenceBatch
    if issubclass(kind, ValueSample):
        columns |= {name: torch.cat(_column(samples, name)) for name in ("returns", "old_values")}
        return columns, ValueBatch
    if issubclass(kind, UnpairedSample):
        signs = [1.0 if sample.desirable else -1.0 for sample in samples]
        return columns | {"desirability": trained(signs)}, UnpairedBatch
    if not issubclass(kind, PolicySample):
        return columns, PackedBatch
    columns |= {name: torch.cat(_column(samples, name)) for name in ("rollout_logprobs", "advantages")}
    refs = [values for values in _column(samples, "ref_logprobs") if values is not None]
    if len(refs) not in (0, len(samples)):
        raise DataError(
            f"missing-values: {len(refs)} of {len(samples)} samples have ref_logprobs; give them to all "
            "samples or to none"
        )
    if samples[0].current is not None:
        columns["current"] = torch.cat(_column(samples, "current"))
    if max(numbers := _column(samples, "trajectory")) >= 0:
        columns["trajectories"] = (torch.tensor(numbers) + 1).repeat_interleave(lengths)
    return columns | ({"ref_logprobs": torch.cat(refs)} if refs else {}), PolicyBatch


def _padded(columns: Mapping[str, Tensor], lengths: Sequence[int], bucket: Bucket | None) -> dict[str, Any]:
    """The fields of a batch of documents of these lengths; `columns` are its per-token fields without
    padding. Every field has memory of its own."""
    if bucket is None:
        bucket = Bucket(tokens=sum(lengths), documents=len(lengths), max_seqlen=max(lengths))
    tail = _tail(lengths, bucket)
    fields: dict[str, Any] = {
        "cu_seqlens": cu_seqlens([*lengths, *tail], bucket.documents),
        "max_seqlen": bucket.max_seqlen,
        "lengths": (*lengths, *tail),
    }
    for name, values in columns.items():
        pads = [values.new_full((sum(tail),), IGNORE_LABEL if name == "labels" else 0)]
        if name == "positions":
            pads = [torch.arange(length) for length in tail]
        fields[name] = torch.cat([values, *pads])
    return fields


def repack(batch: PackedBatch, bucket: Bucket | None) -> PackedBatch:
    """Return the same documents with different padding, in a batch of the same type.

    Args:
        batch: with tensors on the host.
        bucket: the capacity to pad to. None: no padding.

    Raises:
        DataError: more than the bucket holds.
    """
    columns = {name: getattr(batch, name, None) for name in _PER_TOKEN}
    used = {name: values[: batch.num_tokens] for name, values in columns.items() if values is not None}
    fields = _padded(used, batch.lengths[: len(batch.sample_ids)], bucket)
    return dataclasses.replace(batch, **fields, shared=None)


def split_samples(samples: Sequence[Samples], minibatches: int) -> list[Sequence[Samples]]:
    """Return the samples of each optimizer step; the parts of a trajectory stay together. Dropped rollouts
    may leave a number that does not divide: the schedule counts on every update."""
    starts = [parts.start for parts in trajectory_slices(samples)] + [len(samples)]
    count = len(starts) - 1
    bounds = [starts[count * i // minibatches] for i in range(minibatches + 1)]
    return [samples[start:stop] for start, stop in pairwise(bounds) if start < stop]


def empty_batch(batch: PackedBatch) -> PackedBatch:
    """Return the same batch with nothing to train on, for a rank without a micro-batch of its own that the
    others need in the collectives of forward and backward."""
    return dataclasses.replace(
        batch,
        labels=torch.full_like(batch.labels, IGNORE_LABEL),
        loss_mask=torch.zeros_like(batch.loss_mask),
        loss_weights=torch.zeros_like(batch.loss_weights),
    )


def plan_micro_batches(
    samples: Sequence[TrainSample],
    loss_weights: Sequence[Tensor],
    limits: PackLimits,
    *,
    whole: Sequence[TrainSample] = (),
    parts: int = 1,
) -> list[Any]:
    """Pack all samples of an optimizer step into micro-batches.

    Args:
        whole: all samples of the step, of which only `samples` are packed. Static capacities are then those
            of packs of all samples, so that fewer documents need no new graph.
        parts: the number of micro-batches is a multiple of it where there are enough documents.

    Raises:
        DataError: a sample is empty or longer than the budget or than max_seqlen.
    """
    if not samples:
        return []
    lengths = [len(sample) for sample in samples]
    longest = _longest(lengths, limits)
    width = longest if limits.static_capacity else None
    prefixes = Prefixes.of_samples(samples) if limits.layout == "shared" else None
    groups = pack_groups(samples, limits, width=width, prefixes=prefixes)
    if len(groups) % parts and len(groups) < len(samples):
        limits = dataclasses.replace(limits, min_packs=-(-len(groups) // parts) * parts)
        groups = pack_groups(samples, limits, width=width, prefixes=prefixes)
    buckets: tuple[Bucket, ...] = ()
    everyone: list[list[int]] = []
    all_prefixes: Prefixes | None = None
    if limits.static_capacity:
        if whole:
            all_prefixes = Prefixes.of_samples(whole) if prefixes else None
            everyone = pack_groups(whole, limits, width=width, prefixes=all_prefixes)
        fullest = max(map(len, [*groups, *everyone]))
        most = min(limits.max_documents or len(whole or samples), _power_of_four(fullest))
        buckets = buckets_for(token_budget=limits.token_budget, max_seqlen=longest, max_documents=most)
        if limits.layout == "padded":
            buckets = buckets[-1:]
    capacities: list[Bucket | None] = [None] * len(groups)
    if buckets and limits.layout != "shared":
        used = [sum(lengths[i] for i in group) for group in groups]
        capacities = [next(b for b in buckets if tokens <= b.tokens) for tokens in used]
    batches = pack_all(samples, loss_weights, groups=groups, buckets=capacities, step_tokens=sum(lengths))
    if prefixes is None:
        return batches
    segments = [prefixes.segments(group) for group in groups]
    if not limits.static_capacity:
        return [share_later(batch, own) for batch, own in zip(batches, segments, strict=True)]
    return share_in_few_shapes(
        batches,
        sizes=[bucket.tokens for bucket in buckets],
        longest=longest,
        whole=[count(all_prefixes.segments(group)) for group in everyone] if all_prefixes else (),
        segments=segments,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Planner:
    """Turns the train samples of one optimizer step into micro-batches, the same way all run long."""

    token_budget: int
    """Most slots of one micro-batch."""
    static_capacity: bool
    layout: Layout = "packed"
    """auto: packed."""
    max_seqlen: int
    """Longest document that the run can have, in tokens; compiled graphs are made for it."""
    max_documents: int
    """Most documents of one optimizer step."""
    parts: int = 1
    """Ranks that micro-batches are assigned to."""
    whole_trajectories: bool = False
    """See PackLimits."""

    def __call__(
        self,
        samples: Sequence[TrainSample],
        loss_weights: Sequence[Tensor],
        *,
        whole: Sequence[TrainSample] = (),
    ) -> list[PackedBatch]:
        """Return balanced packs under the token budget, at static capacity where graphs need it; the same
        number for every rank where there are enough documents. whole: see plan_micro_batches."""
        limits = PackLimits(
            token_budget=self.token_budget,
            static_capacity=self.static_capacity,
            layout="packed" if self.layout == "auto" else self.layout,
            max_seqlen=self.max_seqlen if self.static_capacity else None,
            max_documents=self.max_documents if self.static_capacity else None,
            min_packs=self.parts,
            whole_trajectories=self.whole_trajectories,
        )
        return plan_micro_batches(samples, loss_weights, limits, whole=whole, parts=self.parts)


def _longest(lengths: Sequence[int], limits: PackLimits) -> int:
    longest, most = max(lengths), limits.max_seqlen
    if most is None:
        if not limits.static_capacity:
            return longest
        return min(1 << (longest - 1).bit_length(), max(limits.token_budget, longest))
    if longest > most:
        raise DataError(
            f"too-long: sample {lengths.index(longest)} has {longest} tokens, more than the run's max_seqlen "
            f"= {most}; raise it or shorten the documents"
        )
    return min(most, max(limits.token_budget, longest))


def _tail(lengths: Sequence[int], bucket: Bucket) -> list[int]:
    """Lengths of the pad documents that fill the bucket; every slot must belong to a document."""
    used = sum(lengths)
    if max(lengths) > bucket.max_seqlen:
        raise DataError(f"too-long: a document of {max(lengths)} tokens exceeds max_seqlen of {bucket}")
    if used > bucket.tokens:
        raise DataError(f"too-long: {used} tokens exceed the capacity of {bucket}")
    full, rest = divmod(bucket.tokens - used, bucket.max_seqlen)
    tail = [bucket.max_seqlen] * full + ([rest] if rest else [])
    if len(lengths) + len(tail) > bucket.documents:
        raise DataError(
            f"too-long: {len(lengths)} documents and {len(tail)} pad documents exceed the capacity of "
            f"{bucket}"
        )
    return tail


def _column(samples: Sequence[TrainSample], name: str) -> list[Any]:
    """A field of every sample."""
    return [getattr(sample, name) for sample in samples]


def _power_of_four(number: int) -> int:
    return 1 << 2 * ((number - 1).bit_length() + 1 >> 1)
