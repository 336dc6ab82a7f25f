"""Assign documents to packs: as few packs as the budget allows, as equal as possible.

Balancing k packs is multiway number partitioning. Three heuristics are followed by a bounded search if they
leave a gap: Karmarkar and Karp's largest differencing method (1982), MULTIFIT (Coffman, Garey and Johnson
1978: a binary search over the capacity of first-fit decreasing), moves and swaps out of the heaviest pack.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Sequence

from lockstep.errors import DataError

Packs = list[list[int]]

# Bounds of the search: planning must stay far below the time of a step, whatever the lengths are.
_EXACT_DOCUMENTS = 16
_EXACT_NODES = 20_000
_GOOD_ENOUGH = 2e-4
"""Relative excess of the largest pack over the mean at which the search stops."""


def balance(
    lengths: Sequence[int], *, token_budget: int, min_packs: int = 1, max_documents: int | None = None
) -> Packs:
    """Split documents into packs of at most `token_budget` tokens and `max_documents` documents.

    The number of packs is the smallest that was found to fit (at least `min_packs`, such as the number of
    ranks; no pack is empty while there are documents for it); among those the largest pack is as small as was
    found.

    Returns:
        Indices into `lengths`, ascending within a pack; packs in the order of their first document. A pure
        function.

    Raises:
        DataError: a document is empty or longer than the budget.
    """
    for index, length in enumerate(lengths):
        if not 0 < length <= token_budget:
            raise DataError(
                f"too-long: document {index} has {length} tokens, but a micro-batch holds 1 to "
                f"train.token_budget = {token_budget}; raise train.token_budget or drop the document"
            )
    if not lengths:
        return []
    limit = len(lengths) if max_documents is None else max_documents
    if limit < 1:
        raise DataError(
            f"out-of-range: max_documents = {max_documents} leaves no room for a document; set at least 1"
        )
    fewest = max(-(-sum(lengths) // token_budget), -(-len(lengths) // limit))
    for num_packs in range(max(fewest, min(min_packs, len(lengths))), len(lengths) + 1):
        packs = _split(lengths, num_packs, token_budget, limit)
        if packs is not None:
            return sorted(sorted(pack) for pack in packs)
    raise AssertionError("one document per pack always fits")


def _split(lengths: Sequence[int], num_packs: int, budget: int, limit: int) -> Packs | None:
    """Return the best split into exactly `num_packs` packs. None if no split was found that fits."""
    if num_packs == len(lengths):
        return [[i] for i in range(len(lengths))]
    if num_packs == 1:  # `balance` begins with as many packs as tokens and documents need at least
        return [list(range(len(lengths)))]
    ideal = -(-sum(lengths) // num_packs)
    best: Packs | None = None
    for heuristic in (_largest_differencing, _multifit):
        packs = heuristic(lengths, num_packs, budget, limit)
        packs = None if packs is None else _improve(lengths, packs, limit)
        if packs is None or _heaviest(lengths, packs) > budget:
            continue
        if all(0 < len(pack) <= limit for pack in packs):
            best = packs if best is None else min(best, packs, key=lambda p: _heaviest(lengths, p))
        if best is not None and _heaviest(lengths, best) <= ideal * (1 + _GOOD_ENOUGH):
            return best
    if len(lengths) <= _EXACT_DOCUMENTS and (best is None or _heaviest(lengths, best) > ideal):
        bound = budget if best is None else _heaviest(lengths, best) - 1
        best = _search(lengths, num_packs, bound, limit) or best
    return best


def _heaviest(lengths: Sequence[int], packs: Packs) -> int:
    return max(sum(lengths[i] for i in pack) for pack in packs)


def _largest_differencing(lengths: Sequence[int], num_packs: int, budget: int, limit: int) -> Packs | None:
    """Merge the two partial splits with the largest spread, heavy parts onto light ones, until one
    remains."""
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for index, length in enumerate(lengths):
        parts: list[tuple[int, list[int]]] = [(0, []) for _ in range(num_packs - 1)]
        heap.append((-length, index, [*parts, (length, [index])]))
    heapq.heapify(heap)
    # The number breaks ties by age: the result is a pure function of the lengths, and parts are never
    # compared.
    serial = itertools.count(len(lengths))
    while len(heap) > 1:
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        merged = sorted(
            ((a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)), key=lambda p: p[0]
        )
        heapq.heappush(heap, (merged[0][0] - merged[-1][0], next(serial), merged))
    return [documents for _, documents in heap[0][2]]


def _multifit(lengths: Sequence[int], num_packs: int, budget: int, limit: int) -> Packs | None:
    """First-fit decreasing into the smallest capacity for which it needs at most `num_packs` packs."""
    best = _first_fit(lengths, num_packs, budget, limit)
    if best is None:
        return None
    low, high = max(max(lengths), -(-sum(lengths) // num_packs)), _heaviest(lengths, best)
    while low < high:
        middle = (low + high) // 2
        packs = _first_fit(lengths, num_packs, middle, limit)
        if packs is None:
            low = middle + 1
        else:
            best, high = packs, middle
    return best


def _first_fit(lengths: Sequence[int], num_packs: int, capacity: int, limit: int) -> Packs | None:
    packs: Packs = [[] for _ in range(num_packs)]
    room = [capacity] * num_packs
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = (p for p in range(num_packs) if lengths[index] <= room[p] and len(packs[p]) < limit)
        pack = next(fits, None)
        if pack is None:
            return None
        packs[pack].append(index)
        room[pack] -= lengths[index]
    return packs


def _improve(lengths: Sequence[int], packs: Packs, limit: int) -> Packs:
    """Move or swap documents out of the heaviest pack while this lowers the heavier of the two packs."""
    packs = [sorted(pack, key=lambda i: (lengths[i], i)) for pack in packs]
    weights = [sum(lengths[i] for i in pack) for pack in packs]
    # Bounded, because a step is good for the two packs that it touches, which does not prove that steps end.
    for _ in range(4 * len(lengths)):
        heavy = max(range(len(packs)), key=lambda p: (len(packs[p]) > limit, weights[p]))
        step = _best_step(lengths, packs, weights, heavy, limit)
        if step is None:
            return packs
        light, outgoing, incoming = step
        for source, target, index in ((heavy, light, outgoing), (light, heavy, incoming)):
            if index is not None:
                packs[source].remove(index)
                bisect.insort(packs[target], index, key=lambda i: (lengths[i], i))
                weights[source] -= lengths[index]
                weights[target] += lengths[index]
    return packs


def _best_step(
    lengths: Sequence[int], packs: Packs, weights: list[int], heavy: int, limit: int
) -> tuple[int, int, int | None] | None:
    """Return the (other pack, document to move there, document to take back or None) that lowers the maximum
    of the two packs most."""
    best: tuple[int, int, int, int | None] | None = None
    too_many = len(packs[heavy]) > limit
    for light in range(len(packs)):
        if light == heavy:
            continue
        gap = weights[heavy] - weights[light]
        sizes = [lengths[i] for i in packs[light]]
        for outgoing in packs[heavy]:
            options: list[int | None] = []
            if len(packs[light]) < limit and len(packs[heavy]) > 1:
                options.append(None)
            if not too_many:
                # The swap that evens the two out best takes back a document of length(given) - gap / 2.
                near = bisect.bisect_left(sizes, lengths[outgoing] - gap / 2)
                options += [packs[light][j] for j in (near - 1, near) if 0 <= j < len(sizes)]
            for incoming in options:
                moved = lengths[outgoing] - (lengths[incoming] if incoming is not None else 0)
                peak = max(weights[heavy] - moved, weights[light] + moved)
                if (peak < weights[heavy] or too_many) and (best is None or peak < best[0]):
                    best = (peak, light, outgoing, incoming)
    return None if best is None else best[1:]


def _search(lengths: Sequence[int], num_packs: int, bound: int, limit: int) -> Packs | None:
    """Depth-first over the documents, longest first, for the best split with a maximum of at most `bound`.

    Exact unless it runs out of nodes. Equal weights are tried once.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    ideal = -(-sum(lengths) // num_packs)
    packs: Packs = [[] for _ in range(num_packs)]
    weights = [0] * num_packs
    best: Packs | None = None
    nodes = 0

    def assign(depth: int) -> None:
        nonlocal best, bound, nodes
        nodes += 1
        if nodes > _EXACT_NODES or bound < ideal:
            return
        if depth == len(order):
            if all(packs):
                best, bound = [list(pack) for pack in packs], max(weights) - 1
            return
        seen = set()
        for p in sorted(range(num_packs), key=weights.__getitem__):
            after = weights[p] + lengths[order[depth]]
            if after > bound or len(packs[p]) >= limit or (weights[p], len(packs[p])) in seen:
                continue
            seen.add((weights[p], len(packs[p])))
            packs[p].append(order[depth])
            weights[p] = after
            assign(depth + 1)
            packs[p].pop()
            weights[p] -= lengths[order[depth]]

    assign(0)
    return best
