"""Grouping of documents into micro-batches, which `lockstep.packing.packs` makes packs of."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Literal

from lockstep.errors import DataError
from lockstep.packing.balance import balance
from lockstep.packing.shared import Prefixes
from lockstep.schema.batch import PreferenceSample, TrainSample, trajectory_slices

# Each is a graph to compile, and more of them would save little padding.
MAX_BUCKETS = 4
_ALIGNMENT = 64


Units = list[list[int]]


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
    whole_trajectories: bool = False
    """Keep the parts of a trajectory in one pack: a loss of whole sequences needs all their tokens."""


def pack_groups(
    samples: Sequence[TrainSample], limits: PackLimits, *, width: int | None, prefixes: Prefixes | None
) -> list[list[int]]:
    """Return the indices of the samples of each pack.

    Args:
        prefixes: of the samples under layout shared, else None.
        width: the longest document that static capacities have to hold; None: packs have no padding.

    Raises:
        DataError: a sample is empty or longer than the budget, or an answer of a pair without its other one.
    """
    lengths, units = [len(sample) for sample in samples], _units(samples, limits)
    largest = max(map(len, units))
    if limits.whole_trajectories and largest > 1:
        prefixes = None  # groups of one prompt could be cut within a trajectory
    if limits.layout == "padded":
        return _dense_groups(lengths, units, limits, width=width)
    budget, per_pack = limits.token_budget, limits.max_documents
    cuttable = prefixes is not None and len(units) == len(samples)
    if prefixes is not None:
        balance(lengths, token_budget=budget, min_packs=len(lengths))  # refuses what cannot fit
        units = prompt_groups(prefixes) if cuttable else units
        groups = balanced_groups(
            prefixes, units, token_budget=budget, min_packs=limits.min_packs, max_documents=per_pack
        )
    else:
        unit_groups = balance(
            [sum(lengths[i] for i in unit) for unit in units],
            token_budget=budget,
            min_packs=limits.min_packs,
            max_documents=None if per_pack is None else per_pack // largest,
        )
        groups = [[i for unit in group for i in units[unit]] for group in unit_groups]
    if width is None or limits.min_packs > 1:
        return groups
    # One process computes every slot of the static capacities, one pack after the other: full packs and a
    # small one have fewer than packs of equal length.
    sizes = pack_sizes(budget, width)
    of_units = unit_slots(lengths, units, prefixes=prefixes if cuttable else None)
    fill = partial(full_groups, lengths, units, of_units, token_budget=budget, max_documents=per_pack)
    candidates = [groups, *(fill(least_gain=gain) for gain in (1, 0))]

    def slots(groups: Sequence[Sequence[int]]) -> int:
        used = [prefixes.rows(pack) if prefixes else sum(lengths[i] for i in pack) for pack in groups]
        return sum(next((size for size in sizes if length <= size), length) for length in used)

    return min(candidates, key=slots)


def pack_sizes(token_budget: int, max_seqlen: int) -> list[int]:
    """Return the slots that packs of static capacity may have, rising; see `packs.buckets_for`."""
    sizes = {
        min(token_budget, _round_up(-(-token_budget * step // MAX_BUCKETS), _ALIGNMENT))
        for step in range(1, MAX_BUCKETS + 1)
    }
    return sorted(size for size in sizes if size >= max_seqlen or size == token_budget)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _units(samples: Sequence[TrainSample], limits: PackLimits) -> list[list[int]]:
    """Samples that must stay in one pack: the two answers of a preference pair, the parts of a trajectory if
    the limits say so, else a document.

    Raises:
        DataError: an answer without its other one, or a trajectory that exceeds the budget.
    """
    if limits.whole_trajectories:
        return [_trajectory(samples, parts, limits) for parts in trajectory_slices(samples)]
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


def _trajectory(samples: Sequence[TrainSample], parts: slice, limits: PackLimits) -> list[int]:
    unit = list(range(len(samples)))[parts]
    tokens = sum(len(samples[i]) for i in unit)
    if len(unit) > 1 and tokens > limits.token_budget:
        raise DataError(
            f"too-long: the {len(unit)} parts of a trajectory have {tokens} tokens together, more than "
            f"train.token_budget = {limits.token_budget}, but the algorithm's ratio, correction or mask of a "
            "whole sequence needs all of them in one micro-batch; raise train.token_budget, or set "
            "algorithm.ratio = 'token'"
        )
    return unit


def _dense_groups(
    lengths: Sequence[int], units: Sequence[Sequence[int]], limits: PackLimits, *, width: int | None
) -> list[list[int]]:
    """Group units by their longest document, longest first, cut where rows x width would exceed the
    budget."""
    balance(lengths, token_budget=limits.token_budget, min_packs=len(lengths))  # refuses what cannot fit
    rows = max(map(len, units))
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


# Which samples share a pack where documents share rows: groups of one prompt stay together.


def prompt_groups(prefixes: Prefixes) -> Units:
    """Return indices of consecutive samples with the same prompt: what is before the first trained slot. One
    that trains nothing joins a group whose prompt it begins with."""
    groups: Units = []
    for index in range(len(prefixes.lengths)):
        if groups and prefixes.same_prompt(groups[-1][0], index):
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def balanced_groups(
    prefixes: Prefixes,
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
        parts = [part for unit in parts for part in _fitting(prefixes, unit, token_budget)]
        rows = [prefixes.rows(part) for part in parts]
        pieces *= 2
        if best is not None and sum(rows) >= best[0] * min_packs:
            continue  # no packs of these cost less
        most = None if max_documents is None else max(1, max_documents // max(map(len, parts)))
        packs = balance(rows, token_budget=token_budget, min_packs=min_packs, max_documents=most)
        rounds = -(-len(packs) // min_packs)
        cost = rounds * max(sum(rows[i] for i in pack) for pack in packs) if min_packs > 1 else sum(rows)
        if best is None or cost < best[0]:
            best = cost, [sorted(i for part in pack for i in parts[part]) for pack in packs]
        if min_packs == 1:
            break
    return best[1]


def unit_slots(lengths: Sequence[int], units: Units, *, prefixes: Prefixes | None) -> list[tuple[int, int]]:
    """Return for each unit the slots of its prompt, which its members share, and the slots of all of it.

    Args:
        prefixes: None: documents do not share rows, and prompts are 0.
    """
    slots = []
    for unit in units:
        prompt = min(prefixes.prompts[i] for i in unit) if prefixes else 0
        slots.append((prompt, sum(lengths[i] for i in unit) - (len(unit) - 1) * prompt))
    return slots


def full_groups(
    lengths: Sequence[int],
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
    most = len(lengths) if max_documents is None else max_documents
    packs: list[list[int]] = []
    room: list[int] = []
    todo = [(unit, *of_unit) for unit, of_unit in zip(units, slots, strict=True)]
    todo.sort(key=lambda entry: (-entry[2], entry[0][0]), reverse=True)
    while todo:
        unit, prompt, used = todo.pop()
        pack = next((p for p, r in enumerate(room) if used <= r and len(unit) <= most - len(packs[p])), None)
        if pack is None:
            pack, own = len(packs) - 1, [lengths[i] - prompt for i in unit]
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
    """Return how many of the first lengths, at most `most`, fit together."""
    return bisect.bisect_right(list(accumulate(lengths[:most])), room)


def _cut(unit: Sequence[int], pieces: int) -> Units:
    pieces = min(pieces, len(unit))
    bounds = [len(unit) * i // pieces for i in range(pieces + 1)]
    return [list(unit[a:b]) for a, b in pairwise(bounds)]


def _fitting(prefixes: Prefixes, unit: Sequence[int], budget: int) -> Units:
    """The unit in as few parts as have at most `budget` rows each; a part of one is not cut any more."""
    if sum(prefixes.lengths[i] for i in unit) <= budget:  # it has no more rows than tokens
        return [list(unit)]
    pieces = 1
    while True:
        parts = _cut(unit, pieces)
        if pieces >= len(unit) or all(prefixes.rows(p) <= budget for p in parts):
            return parts
        pieces += 1
