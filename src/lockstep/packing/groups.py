"""Which samples share a pack where documents share rows: groups of one prompt stay together."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import accumulate, pairwise

from lockstep.packing.balance import balance
from lockstep.packing.shared import count_rows, prompt_of, same_prompt
from lockstep.schema.batch import TrainSample

Units = list[list[int]]


def prompt_groups(samples: Sequence[TrainSample]) -> Units:
    """Return indices of consecutive samples with the same prompt: what is before the first trained slot. One
    that trains nothing joins a group whose prompt it begins with."""
    groups: Units = []
    for index, sample in enumerate(samples):
        if groups and same_prompt(samples[groups[-1][0]], sample):
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
        members = [samples[i] for i in unit]
        prompts = [prompt_of(s.token_ids.numpy(), s.loss_mask.numpy()) for s in members] if shared else [()]
        prompt = min(map(len, prompts))
        slots.append((prompt, sum(map(len, members)) - (len(unit) - 1) * prompt))
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
