"""The figures of one engine under one version of the weights: the rows of a phase, summarised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lockstep.lab.engine_parity.compare import (
    Divergence,
    Gap,
    Matrix,
    SeedMatch,
    Spread,
    divergence,
    gap,
    head,
    matrix,
    seed_match,
    spread,
    tail,
)
from lockstep.lab.engine_parity.job import Kind, Outcome, Pass, Phase, Row

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
        asked=(head(requested), tail(requested)),
        read=(head(row.prompt_ids), tail(row.prompt_ids)),
        answered=(head(row.token_ids), tail(row.token_ids)),
        prompt_tokens=len(row.prompt_ids),
        tokens=len(row.token_ids),
        finish_reason=row.finish_reason,
        stop_reason=row.stop_reason,
        text=None if row.text is None else row.text[:_TEXT],
    )
