"""Packs of documents, with static capacities if one graph must serve many packs."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from lockstep.config.train import Layout
from lockstep.errors import DataError
from lockstep.ops.masks import cu_seqlens
from lockstep.packing.balance import balance
from lockstep.packing.shared import (
    count_all,
    count_rows,
    prompt_length,
    same_prompt,
    share,
    share_in_few_shapes,
)
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
)

Samples = TypeVar("Samples", bound=TrainSample)

# Each is a graph to compile, and more of them would save little padding.
MAX_BUCKETS = 4
_ALIGNMENT = 64
_FLOATS = (
    *("rollout_logprobs", "advantages", "old_logprobs", "ref_logprobs", "returns", "old_values"),
    *("margins", "desirability", "kl_baseline"),
)
"""Optional per-token floats of batches."""


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
        for size in _sizes(token_budget, max_seqlen)
    )


def _sizes(token_budget: int, max_seqlen: int) -> list[int]:
    sizes = {
        min(token_budget, _round_up(-(-token_budget * step // MAX_BUCKETS), _ALIGNMENT))
        for step in range(1, MAX_BUCKETS + 1)
    }
    return sorted(size for size in sizes if size >= max_seqlen or size == token_budget)


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
    kinds = {type(sample) for sample in samples}
    if len(kinds) != 1 or len(samples) != len(loss_weights):
        raise DataError(
            "wrong-batch: a pack needs at least one sample, all of one type, and one loss_weights per "
            f"sample; got {len(samples)} samples of {sorted(k.__name__ for k in kinds)} and "
            f"{len(loss_weights)} loss_weights"
        )
    lengths = [len(sample) for sample in samples]
    if 0 in lengths:
        raise DataError(f"empty: sample {samples[lengths.index(0)].sample_id} is empty; drop it first")
    if bucket is None:
        bucket = Bucket(tokens=sum(lengths), documents=len(samples), max_seqlen=max(lengths))
    else:
        lengths += _tail(lengths, bucket)
    capacity = bucket.tokens
    masks, no_label = [sample.loss_mask for sample in samples], torch.tensor([IGNORE_LABEL])
    weights = [torch.where(mask, weight, 0.0) for mask, weight in zip(masks, loss_weights, strict=True)]
    fields: dict[str, Any] = {
        "token_ids": _fill([sample.token_ids for sample in samples], capacity, 0),
        "positions": torch.cat([torch.arange(length) for length in lengths]),
        "cu_seqlens": cu_seqlens(lengths, bucket.documents),
        "max_seqlen": bucket.max_seqlen,
        "labels": _fill(
            [torch.cat([sample.token_ids[1:], no_label]) for sample in samples], capacity, IGNORE_LABEL
        ),
        "loss_mask": _fill(masks, capacity, False),
        "loss_weights": _fill(weights, capacity, 0.0),
        "lengths": tuple(lengths),
        "sample_ids": tuple(sample.sample_id for sample in samples),
    }
    kind = kinds.pop()
    if issubclass(kind, ScoredSample):
        margins = [
            margin * mask.float() for margin, mask in zip(_column(samples, "margin"), masks, strict=True)
        ]
        fields["margins"] = _fill(margins, capacity, 0.0)
    if issubclass(kind, PreferenceSample):
        return PreferenceBatch(**fields)
    if issubclass(kind, ValueSample):
        for name in ("returns", "old_values"):
            fields[name] = _fill(_column(samples, name), capacity, 0.0)
        return ValueBatch(**fields)
    if issubclass(kind, UnpairedSample):
        good = _column(samples, "desirable")
        signs = [mask * (1.0 if label else -1.0) for mask, label in zip(masks, good, strict=True)]
        return UnpairedBatch(**fields, desirability=_fill(signs, capacity, 0.0))
    if not issubclass(kind, PolicySample):
        return PackedBatch(**fields)
    for name in ("rollout_logprobs", "advantages"):
        fields[name] = _fill(_column(samples, name), capacity, 0.0)
    fields["policy_versions"] = tuple(_column(samples, "policy_version"))
    refs = [values for values in _column(samples, "ref_logprobs") if values is not None]
    if len(refs) not in (0, len(samples)):
        raise DataError(
            f"missing-values: {len(refs)} of {len(samples)} samples have ref_logprobs; give them to all "
            "samples or to none"
        )
    fields["ref_logprobs"] = _fill(refs, capacity, 0.0) if refs else None
    return PolicyBatch(**fields)


def repack(batch: PackedBatch, bucket: Bucket | None) -> PackedBatch:
    """Return the same documents with different padding, in a batch of the same type.

    Args:
        batch: with tensors on the host.
        bucket: the capacity to pad to. None: no padding.

    Raises:
        DataError: more than the bucket holds.
    """
    used, documents = batch.num_tokens, len(batch.sample_ids)
    lengths = list(batch.lengths[:documents])
    if bucket is None:
        bucket = Bucket(tokens=used, documents=documents, max_seqlen=max(lengths))
    tail = _tail(lengths, bucket)
    tails = [torch.arange(length) for length in tail]
    fields: dict[str, Any] = {
        "token_ids": _fill([batch.token_ids[:used]], bucket.tokens, 0),
        "positions": torch.cat([batch.positions[:used], *tails]),
        "cu_seqlens": cu_seqlens(lengths + tail, bucket.documents),
        "max_seqlen": bucket.max_seqlen,
        "labels": _fill([batch.labels[:used]], bucket.tokens, IGNORE_LABEL),
        "loss_mask": _fill([batch.loss_mask[:used]], bucket.tokens, False),
        "loss_weights": _fill([batch.loss_weights[:used]], bucket.tokens, 0.0),
        "lengths": tuple(lengths + tail),
        "shared": None,
    }
    for name in _FLOATS:
        values = getattr(batch, name, None)
        if values is not None:
            fields[name] = _fill([values[:used]], bucket.tokens, 0.0)
    return dataclasses.replace(batch, **fields)


def split_samples(samples: Sequence[Samples], minibatches: int) -> list[Sequence[Samples]]:
    """Return the samples of each optimizer step. Dropped rollouts may leave a number that does not divide:
    the schedule counts on every update."""
    bounds = [len(samples) * i // minibatches for i in range(minibatches + 1)]
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


@dataclass(frozen=True, kw_only=True, slots=True)
class PackLimits:
    """The limits of a run's micro-batches."""

    token_budget: int
    """Most slots of one micro-batch."""
    static_capacity: bool = False
    """Pad every pack to one of a few buckets (`buckets_for`). Otherwise packs have no padding."""
    layout: Literal["packed", "padded", "shared"] = "packed"
    """The budget limits rows x longest row under padded, where documents of similar length share a batch, and
    the computed rows under shared, where samples of one prompt are side by side in a batch."""
    max_seqlen: int | None = None
    """Longest document of the whole run. None: the longest of these samples, rounded up to a power of two
    under static_capacity; it may change from step to step, which needs a new graph."""
    max_documents: int | None = None
    """Most documents of one pack; None: as many as fit. Under static_capacity the packs' largest number of
    documents is rounded up to a power of four, because empty documents cost a flash kernel time."""
    min_packs: int = 1
    """Fewest micro-batches, such as one per rank."""


def plan_micro_batches(
    samples: Sequence[TrainSample],
    loss_weights: Sequence[Tensor],
    limits: PackLimits,
    *,
    whole: Sequence[TrainSample] = (),
) -> list[Any]:
    """Pack all samples of an optimizer step into micro-batches.

    Args:
        whole: all samples of the step, of which only `samples` are packed. Static capacities are then those
        of
            packs of all samples, so that fewer documents need no new graph.

    Raises:
        DataError: a sample is empty or longer than the budget or than max_seqlen.
    """
    if not samples:
        return []
    lengths = [len(sample) for sample in samples]
    longest = _longest(lengths, limits)
    groups = _groups(samples, limits, width=longest if limits.static_capacity else None)
    buckets: tuple[Bucket, ...] = ()
    everyone: list[list[int]] = []
    if limits.static_capacity:
        everyone = _groups(whole, limits, width=longest) if whole else []
        fullest = max(map(len, [*groups, *everyone]))
        most = min(limits.max_documents or len(whole or samples), _power_of_four(fullest))
        buckets = buckets_for(token_budget=limits.token_budget, max_seqlen=longest, max_documents=most)
        if limits.layout == "padded":
            buckets = buckets[-1:]
    batches = []
    for group in groups:
        used = sum(lengths[i] for i in group)
        bucket = None
        if buckets and limits.layout != "shared":
            bucket = next(b for b in buckets if used <= b.tokens)
        batches.append(pack([samples[i] for i in group], [loss_weights[i] for i in group], bucket=bucket))
    if limits.layout == "shared":
        if limits.static_capacity:
            sizes, counts = [b.tokens for b in buckets], [count_all([whole[i] for i in g]) for g in everyone]
            return share_in_few_shapes(batches, sizes=sizes, longest=longest, whole=counts)
        return [share(batch) for batch in batches]
    return batches


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
        )
        batches = plan_micro_batches(samples, loss_weights, limits, whole=whole)
        if len(batches) % self.parts and len(batches) < len(samples):
            multiple = -(-len(batches) // self.parts) * self.parts
            limits = dataclasses.replace(limits, min_packs=multiple)
            return plan_micro_batches(samples, loss_weights, limits, whole=whole)
        return batches


def _groups(samples: Sequence[TrainSample], limits: PackLimits, *, width: int | None) -> list[list[int]]:
    """Indices of the samples of each pack."""
    lengths, units = [len(sample) for sample in samples], _units(samples)
    if limits.layout == "padded":
        return _dense_groups(lengths, units, limits, width=width)
    budget, per_pack = limits.token_budget, limits.max_documents
    shared = limits.layout == "shared"
    if shared:
        balance(lengths, token_budget=budget, min_packs=len(lengths))  # refuses what cannot fit
        cuttable = len(units) == len(samples)
        units = prompt_groups(samples) if cuttable else units
        groups = balanced_groups(
            samples, units, token_budget=budget, min_packs=limits.min_packs, max_documents=per_pack
        )
    else:
        cuttable = False
        unit_groups = balance(
            [sum(lengths[i] for i in unit) for unit in units],
            token_budget=budget,
            min_packs=limits.min_packs,
            max_documents=None if per_pack is None else per_pack // len(units[0]),
        )
        groups = [[i for unit in group for i in units[unit]] for group in unit_groups]
    if width is None or limits.min_packs > 1:
        return groups
    # One process computes every slot of the static capacities, one pack after the other: full packs and a
    # small one have fewer than packs of equal length.
    sizes = _sizes(budget, width)
    of_units = unit_slots(samples, units, shared=shared and cuttable)
    fill = partial(full_groups, samples, units, of_units, token_budget=budget, max_documents=per_pack)
    candidates = [groups, *(fill(least_gain=gain) for gain in (1, 0))]

    def slots(groups: Sequence[Sequence[int]]) -> int:
        packs = [[samples[i] for i in group] for group in groups]
        used = [count_rows(pack) if shared else sum(map(len, pack)) for pack in packs]
        return sum(next((size for size in sizes if length <= size), length) for length in used)

    return min(candidates, key=slots)


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


def _units(samples: Sequence[TrainSample]) -> list[list[int]]:
    """Samples that must stay in one pack: the two answers of a preference pair, else a document.

    Raises:
        DataError: an answer without its other one.
    """
    if not isinstance(samples[0], PreferenceSample):
        return [[i] for i in range(len(samples))]
    ids = [sample.sample_id for sample in samples]
    units = [[i, i + 1] for i in range(0, len(ids), 2)]
    for unit in units:
        pair = [ids[i] for i in unit if i < len(ids)]
        if len(pair) < 2 or pair[0] % 2 or pair[1] != pair[0] + 1:
            raise DataError(
                f"wrong-pairs: sample_ids {pair} are not a preference pair: the chosen answer of pair p must "
                "be sample 2p, and the rejected one sample 2p + 1, right after it"
            )
    return units


def _dense_groups(
    lengths: Sequence[int], units: Sequence[Sequence[int]], limits: PackLimits, *, width: int | None
) -> list[list[int]]:
    """Group units by their longest document, longest first, cut where rows x width would exceed the
    budget."""
    balance(lengths, token_budget=limits.token_budget, min_packs=len(lengths))  # refuses what cannot fit
    rows = len(units[0])
    most = min((limits.max_documents or len(lengths)) // rows, -(-len(units) // limits.min_packs))
    widest = [max(lengths[i] for i in unit) for unit in units]
    groups: list[list[int]] = []
    for index in sorted(range(len(units)), key=lambda i: (-widest[i], i)):
        if groups:
            row = width or widest[groups[-1][0]]
            if len(groups[-1]) < most and (len(groups[-1]) + 1) * rows * row <= limits.token_budget:
                groups[-1].append(index)
                continue
        groups.append([index])
    return [[i for unit in sorted(group) for i in units[unit]] for group in groups]


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


def _fill(parts: Sequence[Tensor], capacity: int, value: float | int | bool) -> Tensor:
    return torch.cat([*parts, parts[0].new_full((capacity - sum(map(len, parts)),), value)])


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _power_of_four(number: int) -> int:
    return 1 << 2 * ((number - 1).bit_length() + 1 >> 1)


# Which samples share a pack where documents share rows: groups of one prompt stay together.


Units = list[list[int]]


def prompt_groups(samples: Sequence[TrainSample]) -> Units:
    """Return indices of consecutive samples with the same prompt: what is before the first trained slot. One
    that trains nothing joins a group whose prompt it begins with."""
    groups: Units = []
    for index, sample in enumerate(samples):
        if groups and same_prompt((samples[groups[-1][0]], sample)):
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def balanced_groups(
    samples: Sequence[TrainSample],
    units: Units,
    *,
    token_budget: int,
    min_packs: int = 1,
    max_documents: int | None = None,
) -> list[list[int]]:
    """Assign units to packs, balanced by the rows that they have.

    A unit of more rows than the budget is cut; so are all of them where few large ones would leave some ranks
    with much less work than others. A part has its prompt's rows again.

    Args:
        units: indices that belong together, such as `prompt_groups`.
        min_packs: fewest packs: with more than one, the time of a step is that of the heaviest.

    Returns:
        Indices by pack, ascending, as `balance` does.
    """
    best: tuple[int, list[list[int]]] | None = None
    pieces = 1
    while best is None or pieces < 2 * max(map(len, units)):
        parts = [part for unit in units for part in _cut(unit, pieces)]
        parts = [part for unit in parts for part in _fitting(samples, unit, token_budget)]
        rows = [count_rows([samples[i] for i in part]) for part in parts]
        most = None if max_documents is None else max(1, max_documents // max(map(len, parts)))
        packs = balance(rows, token_budget=token_budget, min_packs=min_packs, max_documents=most)
        rounds = -(-len(packs) // min_packs)
        cost = rounds * max(sum(rows[i] for i in pack) for pack in packs) if min_packs > 1 else sum(rows)
        if best is None or cost < best[0]:
            best = cost, [sorted(i for part in pack for i in parts[part]) for pack in packs]
        if min_packs == 1:
            break
        pieces *= 2
    return best[1]


def unit_slots(samples: Sequence[TrainSample], units: Units, *, shared: bool) -> list[tuple[int, int]]:
    """Return for each unit the slots of its prompt, which its members share, and the slots of all of it.

    Args:
        shared: whether documents share rows; else prompts are 0.
    """
    slots = []
    for unit in units:
        prompt = min(prompt_length(samples[i].loss_mask.numpy()) for i in unit) if shared else 0
        slots.append((prompt, sum(len(samples[i]) for i in unit) - (len(unit) - 1) * prompt))
    return slots


def full_groups(
    samples: Sequence[TrainSample],
    units: Units,
    slots: Sequence[tuple[int, int]],
    *,
    token_budget: int,
    max_documents: int | None,
    least_gain: int,
) -> list[list[int]]:
    """Assign units to packs that are as full as possible, but for the last ones.

    Units go into the first pack with room for them, those of most slots first. One that fits in none is cut
    to fill the newest pack, if that takes more slots than `least_gain` times those of its prompt, which is
    repeated.

    Args:
        units: indices that belong together.
        slots: of `unit_slots`. A unit without a prompt is cut only if it exceeds the budget.

    Returns:
        Indices by pack, ascending.
    """
    most = len(samples) if max_documents is None else max_documents
    packs: list[list[int]] = []
    room: list[int] = []
    todo = [(unit, *of_unit) for unit, of_unit in zip(units, slots, strict=True)]
    todo.sort(key=lambda entry: (-entry[2], entry[0][0]), reverse=True)
    while todo:
        unit, prompt, used = todo.pop()
        pack = next((p for p, r in enumerate(room) if used <= r and len(unit) <= most - len(packs[p])), None)
        if pack is None:
            pack, own = len(packs) - 1, [len(samples[i]) - prompt for i in unit]
            lead = _leading(own, room[-1] - prompt, most - len(packs[-1])) if packs and prompt else 0
            if sum(own[:lead]) <= least_gain * prompt:
                pack = len(packs)
                packs.append([])
                room.append(token_budget)
                lead = _leading(own, token_budget - prompt, most)
            if lead < len(unit):
                todo.append((unit[lead:], prompt, prompt + sum(own[lead:])))
                unit, used = unit[:lead], prompt + sum(own[:lead])
        packs[pack] += unit
        room[pack] -= used
    return [sorted(pack) for pack in packs]


def _leading(lengths: Sequence[int], room: int, most: int) -> int:
    """How many of the first lengths, `most` at most, fit together."""
    return bisect.bisect_right(list(accumulate(lengths[:most])), room)


def _cut(unit: Sequence[int], pieces: int) -> Units:
    pieces = min(pieces, len(unit))
    bounds = [len(unit) * i // pieces for i in range(pieces + 1)]
    return [list(unit[a:b]) for a, b in pairwise(bounds)]


def _fitting(samples: Sequence[TrainSample], unit: Sequence[int], budget: int) -> Units:
    """The unit in as few parts as have at most `budget` rows each; a part of one is not cut any more."""
    pieces = 1
    while True:
        parts = _cut(unit, pieces)
        if pieces >= len(unit) or all(count_rows([samples[i] for i in p]) <= budget for p in parts):
            return parts
        pieces += 1
