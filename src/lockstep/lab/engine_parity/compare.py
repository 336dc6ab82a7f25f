"""How completions of two engines, or of one engine and the trainer, compare: numbers in, numbers out.

Every logprob is in nats. A *surprise* is a logprob with its sign turned: what it took to draw the token.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lockstep.lab.engine_parity.job import Row

EDGES = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Of the histogram's bars, nats; bar i counts what lies from EDGES[i - 1] on and below EDGES[i]."""
BAR_NAMES = ("0", *(f"{edge:.0e}".replace("e-0", "e-").replace("1e+00", "1") for edge in EDGES))
"""Where each bar begins."""
SHOWN = 5
"""Ids of a head and of a tail."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """|engine's logprob - trainer's| of sampled tokens."""

    tokens: int
    mean: float
    p99: float
    """Nearest rank."""
    max: float
    k3: float
    """Estimator of KL(engine || trainer): mean of r - 1 - log r with r = trainer / engine."""
    histogram: tuple[int, ...]
    """len(EDGES) + 1 bars."""


def gap(pairs: Iterable[tuple[Sequence[float], Sequence[float]]]) -> Gap | None:
    """Of (engine's, trainer's) logprobs of several completions; None: there are none. A logprob that is not
    finite makes every figure NaN."""
    found = [t - e for engine, trainer in pairs for e, t in zip(engine, trainer, strict=True)]
    if not found:
        return None
    if not all(math.isfinite(d) for d in found):
        nan = math.nan
        return Gap(tokens=len(found), mean=nan, p99=nan, max=nan, k3=nan, histogram=(0,) * (len(EDGES) + 1))
    sizes = sorted(abs(d) for d in found)
    bars = [0] * (len(EDGES) + 1)
    for size in sizes:
        bars[bisect_right(EDGES, size)] += 1
    return Gap(
        tokens=len(found),
        mean=statistics.fmean(sizes),
        p99=sizes[math.ceil(0.99 * len(sizes)) - 1],
        max=sizes[-1],
        # beyond +-700 exp is no float any more; such a gap has failed long before
        k3=statistics.fmean(math.expm1(max(-700.0, min(d, 700.0))) - d for d in found),
        histogram=tuple(bars),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """Where a greedy completion first differs from the reference's."""

    prompt: int
    position: int
    """In the completion, from 0."""
    reference_id: int | None
    """None: the reference had ended."""
    engine_id: int | None
    margin: float | None
    """The trainer's logprob of the reference's id less that of the engine's, behind what both have in common:
    near 0 in a tie. None where one of them had ended, or could not be scored."""
    engine_margin: float | None
    """The same by what reference and engine say themselves."""

    def is_tie(self, limit: float) -> bool:
        """Rounding may decide between two tokens so close."""
        return self.margin is not None and abs(self.margin) <= limit


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Position of the first id that differs, or where the shorter one ends; None: they are equal."""
    for position, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))


def divergence(reference: Row, own: Row) -> Divergence | None:
    """Of two greedy completions of one prompt; None: they have the same tokens."""
    at = first_difference(reference.token_ids, own.token_ids)
    if at is None:
        return None
    return Divergence(
        prompt=own.prompt,
        position=at,
        reference_id=_at(reference.token_ids, at),
        engine_id=_at(own.token_ids, at),
        margin=_margin(reference.trainer, own.trainer, at),
        engine_margin=_margin(reference.logprobs, own.logprobs, at),
    )


def _at(ids: Sequence[int], position: int) -> int | None:
    return ids[position] if position < len(ids) else None


def _margin(reference: Sequence[float], own: Sequence[float], at: int) -> float | None:
    return reference[at] - own[at] if at < len(reference) and at < len(own) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedMatch:
    """How far pairs of samples of one prompt go together."""

    pairs: int
    equal: int
    """Pairs with the same tokens to the end."""
    first: int | None
    """The earliest position at which a pair parts; None: none does."""
    shared_nats: float
    """Surprise of the tokens that pairs have in common before they part, added up."""
    total_nats: float
    """Surprise of all tokens of the first of each pair."""

    @property
    def all_equal(self) -> bool:
        return self.equal == self.pairs

    @property
    def by_chance(self) -> bool:
        """Whether independent draws could go together so far.

        Two independent draws share tokens of x nats or more with probability at most exp(-x), so what n pairs
        share is at most a sum of n exponentials: mean n, standard deviation sqrt(n). Six deviations (and six
        nats, for few pairs) beyond that is not chance.
        """
        return self.shared_nats <= self.pairs + 6.0 * math.sqrt(self.pairs) + 6.0

    @property
    def says_nothing(self) -> bool:
        """The samples are so probable that any two draws would be equal."""
        return self.all_equal and self.by_chance


def seed_match(pairs: Iterable[tuple[Row, Row]]) -> SeedMatch | None:
    """None: there are no pairs."""
    count = equal = 0
    first: int | None = None
    shared = total = 0.0
    for left, right in pairs:
        count += 1
        at = first_difference(left.token_ids, right.token_ids)
        equal += at is None
        if at is not None:
            first = at if first is None else min(first, at)
        surprise = left.trainer or left.logprobs
        shared -= sum(surprise if at is None else surprise[:at])
        total -= sum(surprise)
    if not count:
        return None
    return SeedMatch(pairs=count, equal=equal, first=first, shared_nats=shared, total_nats=total)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Lengths in tokens."""

    min: int
    median: float
    mean: float
    p90: int
    max: int


def spread(lengths: Sequence[int]) -> Spread | None:
    """None: there are none."""
    if not lengths:
        return None
    ranked = sorted(lengths)
    return Spread(
        min=ranked[0],
        median=statistics.median(ranked),
        mean=statistics.fmean(ranked),
        p90=ranked[math.ceil(0.9 * len(ranked)) - 1],
        max=ranked[-1],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """The rectangle that padded samples would fill: [samples, longest], prompt and completion together."""

    samples: int
    longest: int
    tokens: int

    @property
    def fill(self) -> float:
        """Share that is no padding."""
        return self.tokens / (self.samples * self.longest)


def matrix(rows: Sequence[Row]) -> Matrix | None:
    """None: there are no rows."""
    lengths = [len(row.prompt_ids) + len(row.token_ids) for row in rows]
    if not lengths or not max(lengths):
        return None
    return Matrix(samples=len(lengths), longest=max(lengths), tokens=sum(lengths))


def head(ids: Sequence[int]) -> tuple[int, ...]:
    """The first few."""
    return tuple(ids[:SHOWN])


def tail(ids: Sequence[int]) -> tuple[int, ...]:
    """The last few."""
    return tuple(ids[-SHOWN:])
