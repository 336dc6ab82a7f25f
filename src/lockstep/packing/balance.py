"""Assign documents to packs: as few packs as the budget allows, as equal as possible.

Balancing k packs is multiway number partitioning. Three heuristics are followed by a bounded search if they
leave a gap: Karmarkar and Karp's largest differencing method (1982), MULTIFIT (Coffman, Garey and Johnson
1978: a binary search over the capacity of first-fit decreasing), moves and swaps out of the heaviest pack.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from operator import itemgetter

import torch
from torch import Tensor

from lockstep.errors import DataError
from lockstep.ops.masks import cu_seqlens
from lockstep.schema.batch import RingKeys, RingShard, RingStep

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
                f"too-long: document {index} has {length} tokens, but a micro-batch takes 1 to "
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
    # A partial split has its parts in order of their weight. Empty ones, which come first, are left out: with
    # many packs nearly all parts are empty for most of the time.
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = [
        (-length, index, [(length, [index])]) for index, length in enumerate(lengths)
    ]
    heapq.heapify(heap)
    # The number breaks ties by age: the result is a pure function of the lengths, and parts are never
    # compared.
    serial = itertools.count(len(lengths))
    while len(heap) > 1:
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        other.reverse()
        both = max(0, len(one) + len(other) - num_packs)
        alone = len(other) - both
        merged = other[:alone]
        merged += [(a + b, x + y) for (a, x), (b, y) in zip(one[:both], other[alone:], strict=True)]
        merged += one[both:]
        merged.sort(key=itemgetter(0))
        lightest = merged[0][0] if len(merged) == num_packs else 0
        heapq.heappush(heap, (lightest - merged[-1][0], next(serial), merged))
    packs = [documents for _, documents in heap[0][2]]
    return [[] for _ in range(num_packs - len(packs))] + packs


def _multifit(lengths: Sequence[int], num_packs: int, budget: int, limit: int) -> Packs | None:
    """First-fit decreasing into the smallest capacity for which it needs at most `num_packs` packs."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    runs = [(length, list(run)) for length, run in itertools.groupby(order, lengths.__getitem__)]
    best = _first_fit(runs, num_packs, budget, limit)
    if best is None:
        return None
    low, high = max(max(lengths), -(-sum(lengths) // num_packs)), _heaviest(lengths, best)
    while low < high:
        middle = (low + high) // 2
        packs = _first_fit(runs, num_packs, middle, limit)
        if packs is None:
            low = middle + 1
        else:
            best, high = packs, middle
    return best


def _first_fit(
    runs: Sequence[tuple[int, list[int]]], num_packs: int, capacity: int, limit: int
) -> Packs | None:
    """Args: runs: lengths, each with the documents of that length."""
    packs: Packs = [[] for _ in range(num_packs)]
    room = [capacity] * num_packs
    for length, documents in runs:
        first = 0
        for p, pack in enumerate(packs):
            if room[p] < length:
                continue
            count = min(room[p] // length, limit - len(pack), len(documents) - first)
            pack += documents[first : first + count]
            room[p] -= count * length
            first += count
            if first == len(documents):
                break
        if first < len(documents):
            return None
    return packs


def _improve(lengths: Sequence[int], packs: Packs, limit: int) -> Packs:
    """Move or swap documents out of the heaviest pack while this lowers the heavier of the two packs."""
    packs = [sorted(pack, key=lambda i: (lengths[i], i)) for pack in packs]
    weights = [sum(lengths[i] for i in pack) for pack in packs]
    # Bounded, because a step is good for the two packs that it touches, which does not prove that steps end.
    for _ in range(4 * len(lengths)):
        crowded = [p for p, pack in enumerate(packs) if len(pack) > limit]
        heavy = max(crowded or range(len(packs)), key=weights.__getitem__)
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
    of the two packs most; of equal ones the first."""
    own, most = packs[heavy], weights[heavy]
    shortest, longest, too_many = lengths[own[0]], lengths[own[-1]], len(own) > limit
    bounds = []
    for light, pack in enumerate(packs):
        least = moved = swapped = most + weights[light]
        if len(pack) < limit and len(own) > 1:
            moved = weights[light] + shortest
        if pack and not too_many:
            swapped = most - longest + lengths[pack[0]]
        bound = max(-(-least // 2), min(moved, swapped))
        if light != heavy and (bound < most or too_many):
            bounds.append((bound, light))
    best: tuple[int, int, int, int | None] | None = None
    for bound, light in sorted(bounds):
        if best is not None and (bound, light) > best[:2]:
            break
        gap, enough = most - weights[light], bound - most
        step = _step_to(lengths, own, packs[light], gap=gap, limit=limit, enough=enough)
        if step is not None and (best is None or (most + step[0], light) < best[:2]):
            best = (most + step[0], light, *step[1:])
    return None if best is None else best[1:]


def _step_to(
    lengths: Sequence[int], heavy: Sequence[int], light: Sequence[int], *, gap: int, limit: int, enough: int
) -> tuple[int, int, int | None] | None:
    """Return (change of the maximum, document to move, document to take back or None) of the best step
    between two packs, whose documents are given by length; of equal ones the first.

    Args:
        gap: weight of `heavy` less that of `light`.
        enough: the least change that any step can have.
    """
    best: tuple[int, int, int | None] | None = None
    too_many, has_room = len(heavy) > limit, len(light) < limit and len(heavy) > 1
    sizes = [lengths[i] for i in light]
    given = None
    for outgoing in heavy:
        if lengths[outgoing] == given:
            continue  # of equal ones the first stands for all
        given = lengths[outgoing]
        options: list[int | None] = [None] if has_room else []
        if not too_many:
            # The swap that evens the two out best takes back a document of length(given) - gap / 2.
            near = bisect.bisect_left(sizes, given - gap / 2)
            options += light[max(near - 1, 0) : near + 1]
        for incoming in options:
            moved = given - (0 if incoming is None else lengths[incoming])
            change = max(-moved, moved - gap)
            if (change < 0 or too_many) and (best is None or change < best[0]):
                best = (change, outgoing, incoming)
        if best is not None and best[0] == enough:
            break
    return best


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


# Assign the slots of a pack to the ranks of a ring: whole documents where that is even, else zigzags.
#
# A document of L tokens that is divided is cut into 2R chunks, as equal as can be, and rank r owns chunks r
# and 2R - 1 - r. With R = 2 and L = 8:
#
#     token      0 1 | 2 3 | 4 5 | 6 7
#     chunk       0  |  1  |  2  |  3
#     rank        0  |  1  |  1  |  0
#
# Causal attention costs a chunk as many key chunks as there are before it, so an early chunk (cheap) and a
# late one (dear) together cost the same on every rank. Better, every *step* of the ring does: of a rank s < r
# all queries see the early chunk and nothing else, of a rank s > r only the queries of the late chunk see
# anything, and they see both. Each is two chunks times one chunk, for every r and s.
#
# Dividing is not free. On 4 H200s, 131,072 tokens in one document keep 0.96 of one GPU's throughput per GPU;
# in 16 documents of 8,192, all divided, 0.72, and 0.80 if nothing is sent: kernels on small pieces are
# slower. Assigned whole, four to a rank, the 16 need neither pieces nor messages. So only what must be
# divided is.


# A document below this part of a rank's share is never divided: one more of them stays within _SLACK.
_WHOLE_SHARE = 32
_SLACK = Fraction(1, 32)  # benchmarks/ring_attention.py sets -1, which nothing meets, to divide all it can
_PAD_ROWS = 128  # the rows that a flash kernel computes together: smaller pieces would cost the same


def ring_shard(
    lengths: Sequence[int], *, rank: int, size: int, num_documents: int | None = None, gather: bool = False
) -> RingShard:
    """Return the part of rank `rank` of a ring of `size` ranks. Pure host arithmetic, the same on every rank.

    Only the longest documents are divided: 0, 1, 2, 4, 8, ... of them, the first number with which the
    others, each whole on one rank, leave no rank more than 1 + 1/32 of the mean, be it of rows or of the cost
    of attention (the sum of n^2). They are assigned longest first, each to the rank whose larger share of the
    two ends up smallest. Short documents, of less than 2R tokens or 1/32 of a rank's share of the rows, are
    never divided.

    So either both bounds hold, or all but the short documents are divided. The short ones then go to the rank
    with the fewest rows, so that the ranks' rows differ by about one of them. If nothing is divided, nothing
    is sent.

    Args:
        lengths: of the documents in pack order, pads last (`PackedBatch.lengths`).
        num_documents: how many of them are real (`len(batch.sample_ids)`); None: all. The others are pads,
            which are not read and not counted in the bounds: their slots fill ranks that have too few rows,
                in
            pieces so small that their attention costs next to nothing. Results there differ from one process.
        gather: keys are gathered and do not go round: with `RingShard.keys`.

    Raises:
        ValueError: an empty document, or no such rank.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not in a ring of {size} ranks")
    if min(lengths, default=1) < 1:
        raise ValueError(f"document {list(lengths).index(min(lengths))} has {min(lengths)} tokens")
    documents = [range(first, last) for first, last in pairwise([0, *accumulate(lengths)])]
    real = len(lengths) if num_documents is None else num_documents
    divided: list[range] = []
    owned = [documents]
    if size > 1:
        divided, owned = _assign(documents[:real], size)
        _fill(owned, _pieces(documents[real:], size), _divided_rows(divided, size))
    chunks = [_chunks(document, size) for document in divided]
    rows = _divided_rows(divided, size)
    local = sorted(owned[rank], key=lambda part: part.start)
    slots = [part for c in chunks for part in (c[rank], c[-1 - rank])] + local
    lengths_here = [len(c[rank]) + len(c[-1 - rank]) for c in chunks] + [len(part) for part in local]
    return RingShard(
        rank=rank,
        size=size,
        index=_index(slots),
        lengths=tuple(lengths_here),
        sizes=tuple(rows[r] + sum(map(len, owned[r])) for r in range(size)),
        divided=tuple(rows),
        own=_step(lengths_here, lengths_here),
        others=tuple(_other(chunks, rank, (rank - i) % size) for i in range(1, size))
        if chunks and not gather
        else (),
        keys=_gathered(chunks, [len(part) for part in local], rank, rows) if gather and chunks else None,
    )


def _assign(documents: Sequence[range], size: int) -> tuple[list[range], list[list[range]]]:
    """The documents to divide, in pack order, and for each rank its whole documents."""
    least = max(2 * size, -(-sum(map(len, documents)) // (size * _WHOLE_SHARE)))
    longest = sorted(documents, key=lambda document: (-len(document), document.start))
    candidates = sum(len(document) >= least for document in longest)
    for count in _ring_counts(candidates):
        owned = _assign_evenly(longest[count:], longest[:count], size)
        if owned is not None:
            break
    else:
        count, owned = candidates, [[] for _ in range(size)]
        _fill(owned, longest[count:], _divided_rows(longest[:count], size))
    return sorted(longest[:count], key=lambda document: document.start), owned


def _ring_counts(most: int) -> Iterator[int]:
    """0, 1, 2, 4, ... and `most`: doubling, because each costs the host time."""
    count = 0
    while count < most:
        yield count
        count = max(1, 2 * count)
    yield most


def _assign_evenly(whole: Sequence[range], divided: Sequence[range], size: int) -> list[list[range]] | None:
    """The documents of `whole` by rank, longest first; None: a rank would exceed the slack.

    Shares of the mean are integers, so that no rounding differs between ranks: of rows, rows R / T, and of
    cost, (its n^2 R + all n^2 of the divided) / C, both times T C.
    """
    tokens = sum(map(len, whole)) + sum(map(len, divided))
    shared = sum(len(document) ** 2 for document in divided)
    cost = sum(len(document) ** 2 for document in whole) + shared
    most = int(tokens * cost * (1 + _SLACK))
    row_shares = [rows * size * cost for rows in _divided_rows(divided, size)]
    cost_shares = [shared * tokens] * size
    if max(*row_shares, *cost_shares) > most:
        return None
    owned: list[list[range]] = [[] for _ in range(size)]
    for document in whole:
        more_rows = len(document) * size * cost
        more_cost = len(document) ** 2 * size * tokens
        larger, r = min(
            (rows + more_rows if rows + more_rows > costs + more_cost else costs + more_cost, r)
            for r, (rows, costs) in enumerate(zip(row_shares, cost_shares, strict=True))
        )
        if larger > most:
            return None
        owned[r].append(document)
        row_shares[r] += more_rows
        cost_shares[r] += more_cost
    return owned


def _fill(owned: Sequence[list[range]], parts: Sequence[range], divided: Sequence[int]) -> None:
    """Add each part, longest first, to the rank that has the fewest rows, `divided` ones included."""
    loads = [
        (rows + sum(map(len, mine)), r) for r, (rows, mine) in enumerate(zip(divided, owned, strict=True))
    ]
    heapq.heapify(loads)
    for part in sorted(parts, key=lambda part: (-len(part), part.start)):
        rows, r = loads[0]
        owned[r].append(part)
        heapq.heapreplace(loads, (rows + len(part), r))


def _pieces(pads: Sequence[range], size: int) -> list[range]:
    """The slots of pads, which lie together, in pieces of at most _PAD_ROWS."""
    if not pads:
        return []
    slots = range(pads[0].start, pads[-1].stop)
    piece = min(_PAD_ROWS, -(-len(slots) // size))
    return [slots[first : first + piece] for first in range(0, len(slots), piece)]


def _divided_rows(divided: Sequence[range], size: int) -> list[int]:
    """Rows of divided documents, by rank."""
    rows = [0] * size
    for document in divided:
        base, extra = divmod(len(document), 2 * size)
        for r in range(size):
            rows[r] += 2 * base + (r < extra) + (2 * size - 1 - r < extra)
    return rows


def _chunks(document: range, size: int) -> list[range]:
    """Cut a document into 2R parts; the first len % 2R of them have one token more."""
    base, extra = divmod(len(document), 2 * size)
    ends = [0, *accumulate(base + (chunk < extra) for chunk in range(2 * size))]
    return [document[first:last] for first, last in pairwise(ends)]


def _other(chunks: Sequence[Sequence[range]], rank: int, source: int) -> RingStep:
    """The divided rows of `rank` against those of `source`: two segments per document, one of which has no
    queries (source before rank: no query here sees the late chunk) or no keys (source behind rank: the early
    queries see nothing). So both tensors are used in place, without a copy of halves."""
    q, k = [], []
    for document in chunks:
        early_q, late_q = len(document[rank]), len(document[-1 - rank])
        early_k, late_k = len(document[source]), len(document[-1 - source])
        if source < rank:
            q += [early_q + late_q, 0]
            k += [early_k, late_k]
        else:
            q += [early_q, late_q]
            k += [0, early_k + late_k]
    return _step(q, k)


def _gathered(
    chunks: Sequence[Sequence[range]], whole: Sequence[int], rank: int, divided: Sequence[int]
) -> RingKeys:
    """See RingKeys.

    Args:
        whole: lengths of this rank's whole documents.
        divided: rows of divided documents, by rank.
    """
    size, most = len(divided), max(divided)
    ends = [r * most for r in range(size)]  # of the documents before, among the gathered rows of each rank
    q: list[int] = []
    k: list[int] = []
    segments: list[range] = []  # of the keys' rows
    late: list[range] = []  # of positions among them
    count = 0
    for document in chunks:
        rows = [range(ends[r], ends[r] + len(document[r])) for r in range(size)]
        rows += [range(rows[r].stop, rows[r].stop + len(document[-1 - r])) for r in reversed(range(size))]
        for last in (rank, 2 * size - 1 - rank):
            seen = rows[: last + 1]
            q.append(len(document[last]))
            k.append(sum(map(len, seen)))
            segments += seen
            count += k[-1]
        late.append(range(count - k[-1], count))
        ends = [rows[-1 - r].stop for r in range(size)]
    segments.append(range(size * most, size * most + sum(whole)))
    late.append(range(count, count + sum(whole)))
    step = _step([*q, *whole], [*k, *whole])
    others = _index(late)
    early = torch.ones(count + sum(whole), dtype=torch.bool).index_fill_(0, others, False)
    return RingKeys(
        # With one query a segment the kernel would swap heads for rows, and add up keys in another order.
        step=dataclasses.replace(step, max_q=max(2, step.max_q)),
        index=_index(segments),
        early=early.nonzero()[:, 0],
        late=others,
    )


def _step(q: Sequence[int], k: Sequence[int]) -> RingStep:
    return RingStep(cu_q=cu_seqlens(q), cu_k=cu_seqlens(k), max_q=max(q, default=0), max_k=max(k, default=0))


def _index(parts: Sequence[range]) -> Tensor:
    if not parts:
        return torch.empty(0, dtype=torch.int64)
    return torch.cat([torch.arange(part.start, part.stop) for part in parts])
