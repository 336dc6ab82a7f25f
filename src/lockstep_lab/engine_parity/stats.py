"""The figures of one engine under one version of the weights: completions compared with those of another
engine, and with the trainer's logprobs. Numbers in, numbers out.

Every logprob is in nats. A *surprise* is a logprob with its sign turned: what it took to draw the token.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lockstep_lab.engine_parity.job import Kind, Outcome, Pass, Phase, Row

EDGES = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Edges of the histogram's bars, nats; bar i counts gaps in [EDGES[i - 1], EDGES[i])."""
BAR_NAMES = ("0", *(f"{edge:.0e}".replace("e-0", "e-").replace("1e+00", "1") for edge in EDGES))
"""Labels of the bars: where each begins."""
SHOWN = 5
"""Number of ids in a head and in a tail."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """|engine's logprob - trainer's| of sampled tokens."""

    tokens: int
    mean: float
    p99: float
    """99th percentile, nearest rank."""
    max: float
    k3: float
    """Estimator of KL(engine || trainer): mean of r - 1 - log r with r = trainer / engine."""
    histogram: tuple[int, ...]
    """len(EDGES) + 1 bars."""


def gap(pairs: Iterable[tuple[Sequence[float], Sequence[float]]]) -> Gap | None:
    """Measure the gap between (engine's, trainer's) logprobs of several completions; None: there are none. A
    logprob that is not finite makes every figure NaN."""
    differences = [t - e for engine, trainer in pairs for e, t in zip(engine, trainer, strict=True)]
    if not differences:
        return None
    if not all(math.isfinite(d) for d in differences):
        nan = math.nan
        return Gap(
            tokens=len(differences), mean=nan, p99=nan, max=nan, k3=nan, histogram=(0,) * (len(EDGES) + 1)
        )
    sizes = sorted(abs(d) for d in differences)
    bars = [0] * (len(EDGES) + 1)
    for size in sizes:
        bars[bisect_right(EDGES, size)] += 1
    return Gap(
        tokens=len(differences),
        mean=statistics.fmean(sizes),
        p99=sizes[math.ceil(0.99 * len(sizes)) - 1],
        max=sizes[-1],
        # beyond +-700 exp is no float any more; such a gap has failed long before
        k3=statistics.fmean(math.expm1(max(-700.0, min(d, 700.0))) - d for d in differences),
        histogram=tuple(bars),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """The first difference of a greedy completion from the reference's."""

    prompt: int
    position: int
    """Position in the completion, from 0."""
    reference_id: int | None
    """The reference's id there; None: its completion had ended."""
    engine_id: int | None
    margin: float | None
    """The trainer's logprob of the reference's id less that of the engine's, behind what both have in common:
    near 0 in a tie. None where one of them had ended, or could not be scored."""
    engine_margin: float | None
    """The same margin by the reference's and the engine's own logprobs."""

    def is_tie(self, limit: float) -> bool:
        """Whether the two tokens are so close that rounding may decide between them."""
        return self.margin is not None and abs(self.margin) <= limit


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Find the first position that differs, or the end of the shorter sequence; None: they are equal."""
    for position, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))


def divergence(reference: Row, own: Row) -> Divergence | None:
    """Compare two greedy completions of one prompt; None: they have the same tokens."""
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
    """How long pairs of samples of one prompt have equal tokens."""

    pairs: int
    equal: int
    """Pairs with the same tokens to the end."""
    first: int | None
    """The earliest position at which a pair diverges; None: none does."""
    shared_nats: float
    """Sum of -logprob over the tokens that pairs share before they diverge."""
    total_nats: float
    """Sum of -logprob over all tokens of the first of each pair."""

    @property
    def all_equal(self) -> bool:
        return self.equal == self.pairs

    @property
    def by_chance(self) -> bool:
        """Whether independent samples could plausibly share so many tokens.

        Two independent samples share tokens of x nats or more with probability at most exp(-x), so what n
        pairs share is at most a sum of n exponentials: mean n, standard deviation sqrt(n). Six deviations
        (and six nats, for few pairs) beyond that is not chance.
        """
        return self.shared_nats <= self.pairs + 6.0 * math.sqrt(self.pairs) + 6.0


def seed_match(pairs: Iterable[tuple[Row, Row]]) -> SeedMatch | None:
    """Compare the samples of each pair; None: there are no pairs."""
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
    """Summarise the lengths; None: there are none."""
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
    fill: float
    """Share of the rectangle that is not padding."""


def matrix(rows: Sequence[Row]) -> Matrix | None:
    """Measure the rectangle; None: there are no rows."""
    lengths = [len(row.prompt_ids) + len(row.token_ids) for row in rows]
    if not lengths or not max(lengths):
        return None
    size = len(lengths) * max(lengths)
    return Matrix(samples=len(lengths), longest=max(lengths), tokens=sum(lengths), fill=sum(lengths) / size)


def ends(ids: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first few ids, and the last few."""
    return tuple(ids[:SHOWN]), tuple(ids[-SHOWN:])


# --- a phase ----------------------------------------------------------------------------------------------


CACHE_BLOCK = 128
"""Tokens of the largest cache block that an engine has by default (vLLM on a CPU). A prompt that is no longer
never comes from a prefix cache there."""
_TEXT = 300
"""Characters of a completion that are kept for people."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Greedy:
    """Greedy completions compared with the reference's."""

    prompts: int
    equal: int
    divergences: tuple[Divergence, ...]

    def beyond(self, limit: float) -> tuple[Divergence, ...]:
        """The divergences that rounding does not explain."""
        return tuple(d for d in self.divergences if not d.is_tie(limit))


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """The ends of the id lists of one greedy completion."""

    prompt: int
    asked: tuple[tuple[int, ...], tuple[int, ...]]
    """(head, tail) of the requested prompt's ids."""
    read: tuple[tuple[int, ...], tuple[int, ...]]
    """(head, tail) of the prompt's ids as the engine reports them."""
    answered: tuple[tuple[int, ...], tuple[int, ...]]
    """(head, tail) of the completion's ids."""
    prompt_tokens: int
    tokens: int
    finish_reason: str
    stop_reason: int | str | None
    text: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseReport:
    """All figures of a phase. Gaps are None where no completion could be scored."""

    phase: Phase
    completions: int
    gap: Gap | None
    """Completions of all passes."""
    gap_greedy: Gap | None
    gap_sampled: Gap | None
    gap_unscaled: Gap | None
    """Samples against the trainer's logprobs at temperature 1."""
    gap_short: Gap | None
    gap_long: Gap | None
    """The gap after prompts longer than a cache block."""
    greedy: Greedy | None
    """None for the reference."""
    again: SeedMatch | None
    alone: SeedMatch | None
    other: SeedMatch | None
    siblings: SeedMatch | None
    """Each sample of a prompt beside the first one."""
    finish: dict[str, int]
    """Completions by finish reason."""
    stops: dict[str, int]
    """Completions by the id or string that ended them."""
    special: dict[str, int]
    """Special ids in completions."""
    prompt_lengths: Spread | None
    lengths: Spread | None
    """Of the sampled completions."""
    matrix: Matrix | None
    """Of the sampled completions."""
    tokens_per_second: float | None
    """Speed of the pass "again": warm, with whatever the prefix cache holds."""
    cold_tokens_per_second: float | None
    """Speed of the pass "sampled"."""
    cache_hit_rate: float | None
    """Cached tokens / prompt tokens, as the engine counts them."""
    examples: tuple[Example, ...]


def of_kind(rows: Iterable[Row], *kinds: Kind) -> list[Row]:
    """Select the rows of these passes, in order."""
    return [row for row in rows if row.kind in kinds]


def report(
    phase: Phase,
    rows: Sequence[Row],
    *,
    prompts: Sequence[Sequence[int]],
    passes: Sequence[Pass],
    outcome: Outcome | None,
    reference: Sequence[Row] | None,
) -> PhaseReport | None:
    """Summarise one phase; None: the engine did nothing in it.

    Args:
        rows: of all phases, and so are `passes`.
        prompts: the requested prompts' ids.
        reference: the reference engine's rows of all phases; None: this is the reference.
    """
    own = [row for row in rows if row.phase == phase]
    if not own:
        return None
    sampled = of_kind(own, "sampled")
    others = None if reference is None else [row for row in reference if row.phase == phase]
    timed = {p.kind: p for p in passes if p.phase == phase}
    prompt_tokens = sum(p.prompt_tokens for p in timed.values())
    special = set(outcome.special_ids) | set(outcome.eos_token_ids) if outcome is not None else set()
    return PhaseReport(
        phase=phase,
        completions=len(own),
        gap=_gap(own),
        gap_greedy=_gap(of_kind(own, "greedy", "stop")),
        gap_sampled=_gap(sampled),
        gap_unscaled=gap(
            (row.logprobs, row.unscaled) for row in sampled if len(row.logprobs) == len(row.unscaled) > 0
        ),
        gap_short=_gap([row for row in own if len(prompts[row.prompt]) <= CACHE_BLOCK]),
        gap_long=_gap([row for row in own if len(prompts[row.prompt]) > CACHE_BLOCK]),
        greedy=None if others is None else _greedy(of_kind(others, "greedy"), of_kind(own, "greedy")),
        again=seed_match(_same_place(sampled, of_kind(own, "again"))),
        alone=seed_match(_same_place(sampled, of_kind(own, "alone"))),
        other=seed_match(_same_place(sampled, of_kind(own, "other"))),
        siblings=seed_match(_siblings(sampled)),
        finish=dict(Counter(row.finish_reason for row in own)),
        stops=dict(Counter(str(row.stop_reason) for row in own if row.stop_reason is not None)),
        special=dict(Counter(str(i) for row in own for i in row.token_ids if i in special)),
        prompt_lengths=spread([len(ids) for ids in prompts]),
        lengths=spread([len(row.token_ids) for row in sampled]),
        matrix=matrix(sampled),
        tokens_per_second=_speed(timed.get("again")),
        cold_tokens_per_second=_speed(timed.get("sampled")),
        cache_hit_rate=sum(p.cached_tokens for p in timed.values()) / prompt_tokens
        if prompt_tokens
        else None,
        examples=tuple(_example(row, prompts[row.prompt]) for row in of_kind(own, "greedy")),
    )


def _gap(rows: Iterable[Row]) -> Gap | None:
    # another number of logprobs than tokens is a fault of its own
    return gap((row.logprobs, row.trainer) for row in rows if len(row.logprobs) == len(row.trainer) > 0)


def _greedy(reference: Sequence[Row], own: Sequence[Row]) -> Greedy | None:
    theirs = {row.prompt: row for row in reference}
    pairs = [(theirs[row.prompt], row) for row in own if row.prompt in theirs]
    if not pairs:
        return None
    divergences = [divergence(their, mine) for their, mine in pairs]
    divergent = tuple(d for d in divergences if d is not None)
    return Greedy(prompts=len(pairs), equal=len(pairs) - len(divergent), divergences=divergent)


def _same_place(left: Sequence[Row], right: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Rows of the same prompt and sample number."""
    first = {(row.prompt, row.sample): row for row in left}
    pairs = ((row, first.get((row.prompt, row.sample))) for row in right)
    return [(match, row) for row, match in pairs if match is not None]


def _siblings(sampled: Sequence[Row]) -> list[tuple[Row, Row]]:
    first = {row.prompt: row for row in sampled if row.sample == 0}
    return [(first[row.prompt], row) for row in sampled if row.sample > 0 and row.prompt in first]


def _speed(timed: Pass | None) -> float | None:
    return timed.tokens / timed.seconds if timed is not None and timed.seconds > 0 else None


def _example(row: Row, requested: Sequence[int]) -> Example:
    return Example(
        prompt=row.prompt,
        asked=ends(requested),
        read=ends(row.prompt_ids),
        answered=ends(row.token_ids),
        prompt_tokens=len(row.prompt_ids),
        tokens=len(row.token_ids),
        finish_reason=row.finish_reason,
        stop_reason=row.stop_reason,
        text=None if row.text is None else row.text[:_TEXT],
    )
