"""Judge whether an engine may be used for training: every way in which it is wrong, by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from lockstep_lab.engine_parity.job import Outcome, Row
from lockstep_lab.engine_parity.stats import (
    CACHE_BLOCK,
    Gap,
    PhaseReport,
    SeedMatch,
    first_difference,
    of_kind,
)

Fault = Literal[
    "records", "ids", "stops", "version", "seeds", "n", "logprob kind", "gap", "stale", "update", "greedy"
]
"""Each fault has the name of what was compared, but for three. records: a completion contradicts itself.
update: the change of weights was too small to show anything. stale: the engine samples from earlier
weights."""

ROUNDING = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.02}
"""Mean gap that different kernels explain at temperature 1 and above, nats."""
_WORST = 10.0
"""The largest gap of one token, and the margin of a tie, in units of the mean's threshold."""
_CLEAR = 2.0
"""What the update must move the trainer's logprobs by, likewise: an engine that missed it has a mean gap of
that size."""
_SHOWN = 3
"""The most cases that are named for one fault."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One way in which an engine is wrong."""

    fault: Fault
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits within which an engine may deviate."""

    mean: float
    """Largest mean gap, nats."""
    strict: bool
    """Whether the same seed must give the same tokens; if not, rounding may make two samples diverge late."""
    temperature: float
    max_tokens: int
    ignore_eos: bool
    seeded: bool = True
    """False: engine.unseeded is set."""
    first_version: int = 1
    """Policy version before the update: 0 where the engine loaded a folder itself."""

    @property
    def worst(self) -> float:
        """Largest gap of one token, and the largest margin of a tie."""
        return _WORST * self.mean


def default_threshold(dtype: str, temperature: float) -> float:
    """The limits for rounding in `dtype`; a temperature below 1 magnifies it."""
    return ROUNDING[dtype] / min(temperature, 1.0)


def judge(
    phase: PhaseReport,
    rows: Sequence[Row],
    *,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    outcome: Outcome,
    earlier: tuple[PhaseReport, Sequence[Row]] | None = None,
) -> list[Problem]:
    """Find everything that is wrong in one phase.

    Args:
        rows: of this phase.
        earlier: the phase before the update and its rows; None: this is it.
    """
    problems = [
        *_faults("records", rows, partial(_record_faults, limits=limits, vocab_size=outcome.vocab_size)),
        *_ids(rows, prompts),
        *_version(rows, expected=limits.first_version + (earlier is not None)),
        *_faults("stops", rows, partial(_stop_faults, limits=limits, outcome=outcome)),
        *(_seeds(phase, limits) if limits.seeded else ()),
        *_gaps(phase, limits),
        *_greedy(phase, limits),
    ]
    if earlier is None:
        return problems
    return _after_update(problems, phase, rows, earlier=earlier, limits=limits, outcome=outcome)


# --- single completions -------------------------------------------------------------------------------------


def _faults(fault: Fault, rows: Sequence[Row], faults_of: Callable[[Row], Iterable[str]]) -> list[Problem]:
    """One problem for each text, with all completions that have it."""
    wrong: dict[str, list[Row]] = {}
    for row in rows:
        for text in faults_of(row):
            wrong.setdefault(text, []).append(row)
    return [Problem(fault=fault, text=f"{text}: {_where(own, rows)}") for text, own in wrong.items()]


def _record_faults(row: Row, *, limits: Limits, vocab_size: int) -> list[str]:
    count = len(row.token_ids)
    checks = [
        (count == 0, "a completion without a token"),
        (count > limits.max_tokens, f"more than max_tokens = {limits.max_tokens} tokens"),
        (len(row.logprobs) != count, "not one logprob per token"),
        (not all(math.isfinite(x) for x in row.logprobs), "logprobs that are not finite"),
        # Not 0: rounding may lift the logprob of a certain token just above it.
        (any(x > 1e-4 for x in row.logprobs), "logprobs above 0"),
        (any(not 0 <= i < vocab_size for i in row.token_ids), f"ids beyond the vocabulary of {vocab_size}"),
        (row.finish_reason not in ("stop", "length"), f"finish reason {row.finish_reason!r}"),
        (
            row.finish_reason == "length" and count < limits.max_tokens,
            f'finish reason "length" before max_tokens = {limits.max_tokens}',
        ),
        (row.told_seed != row.seed, "another seed on the completion than was asked for"),
    ]
    return [text for failed, text in checks if failed]


def _ids(rows: Sequence[Row], prompts: Sequence[Sequence[int]]) -> list[Problem]:
    wrong = [row for row in rows if tuple(prompts[row.prompt]) != row.prompt_ids]
    if not wrong:
        return []
    row = wrong[0]
    ids_in = tuple(prompts[row.prompt])
    at = first_difference(ids_in, row.prompt_ids) or 0
    return [
        Problem(
            fault="ids",
            text=f"ids in are not ids out: {_where(wrong, rows)}; prompt {row.prompt} was {len(ids_in)} ids, "
            f"{list(ids_in[at : at + 3])} from position {at}, and the engine read {len(row.prompt_ids)}, "
            f"{list(row.prompt_ids[at : at + 3])} there: it makes ids of its own, from text or with a token "
            "in front",
        )
    ]


def _version(rows: Sequence[Row], *, expected: int) -> list[Problem]:
    wrong = [row for row in rows if row.policy_version != expected]
    if not wrong:
        return []
    text = f"policy version {wrong[0].policy_version} instead of {expected} on {_where(wrong, rows)}"
    return [Problem(fault="version", text=text)]


def _stop_faults(row: Row, *, limits: Limits, outcome: Outcome) -> Iterator[str]:
    ends = set() if limits.ignore_eos else set(outcome.eos_token_ids)
    ends |= set() if row.stop_id is None else {row.stop_id}
    inside = [i for i in row.token_ids[:-1] if i in ends]
    last = row.token_ids[-1] if row.token_ids else None
    if inside:
        yield f"it went on behind the stop id {inside[0]}"
    elif row.finish_reason == "stop" and last not in ends:
        yield f"it stopped, and the stop id {row.stop_reason!r} is not the last of its ids"
    elif row.finish_reason == "stop" and row.stop_reason != last:
        yield f"it stopped at id {last} and says it was {row.stop_reason!r}"
    elif row.finish_reason == "length" and last in ends:
        yield f'it ended with the stop id {last} and says "length"'


def _where(wrong_rows: Sequence[Row], rows: Sequence[Row]) -> str:
    """ "3 of 40 completions (greedy prompt 0; sampled prompt 1 sample 2)"."""
    names = [
        f"{row.kind} prompt {row.prompt}" + (f" sample {row.sample}" if row.kind != "greedy" else "")
        for row in wrong_rows[:_SHOWN]
    ]
    more = ", ..." if len(wrong_rows) > _SHOWN else ""
    return f"{len(wrong_rows)} of {len(rows)} completions ({', '.join(names)}{more})"


# --- seeds --------------------------------------------------------------------------------------------------


def _seeds(phase: PhaseReport, limits: Limits) -> list[Problem]:
    problems = []
    for match, what, same in (
        (phase.again, "the same seeds twice", "the seeds do not decide the samples"),
        (phase.alone, "a sample alone and in a batch", "the seed does not decide it"),
    ):
        if match is not None and not match.all_equal and (limits.strict or match.by_chance):
            why = same if match.by_chance else "they part later than chance would let them"
            problems.append(Problem(fault="seeds", text=f"{what}: {_match(match)}; {why}"))
    if phase.other is not None and not phase.other.by_chance:
        text = f"other seeds give the same samples: {_match(phase.other)}"
        problems.append(Problem(fault="seeds", text=text))
    if phase.siblings is not None and not phase.siblings.by_chance:
        text = f"the n samples of a prompt are the same: {_match(phase.siblings)}"
        problems.append(Problem(fault="n", text=text))
    return problems


def _match(match: SeedMatch) -> str:
    first = "" if match.first is None else f", the first to part does so at token {match.first}"
    return (
        f"{match.equal} of {match.pairs} pairs equal{first} ({match.shared_nats:.1f} of "
        f"{match.total_nats:.1f} nats in common)"
    )


# --- logprobs and tokens ------------------------------------------------------------------------------------


def too_wide(gap: Gap | None, limits: Limits) -> bool:
    """Whether a gap is wider than rounding explains. NaN counts as wide."""
    return gap is not None and not (gap.mean <= limits.mean and gap.max <= limits.worst)


def _gaps(phase: PhaseReport, limits: Limits) -> list[Problem]:
    if not too_wide(phase.gap, limits):
        return []
    assert phase.gap is not None
    gap = f"{size(phase.gap)}, more than {limits.mean:.2g} (one token: {limits.worst:.2g})"
    unscaled = phase.gap_unscaled
    if unscaled is not None and not too_wide(unscaled, limits) and too_wide(phase.gap_sampled, limits):
        return [
            Problem(
                fault="logprob kind",
                text=f"its logprobs are those of temperature 1, not of logits / {limits.temperature:g}: "
                f"{size(unscaled)} from the former, {size(phase.gap_sampled)} from the latter",
            )
        ]
    parts = [
        f"{name} {size(part)}"
        for name, part in (
            ("greedy", phase.gap_greedy),
            ("samples", phase.gap_sampled),
            (f"prompts of up to {CACHE_BLOCK} tokens", phase.gap_short),
            ("longer ones", phase.gap_long),
        )
        if part is not None
    ]
    return [Problem(fault="gap", text=f"its logprobs are {gap} from the trainer's; {'; '.join(parts)}")]


def size(gap: Gap | None) -> str:
    """ "mean 0.1, max 0.5 nats"."""
    return "-" if gap is None else f"mean {gap.mean:.2g}, max {gap.max:.2g} nats"


def _greedy(phase: PhaseReport, limits: Limits) -> list[Problem]:
    if phase.greedy is None:
        return []
    wrong = phase.greedy.beyond(limits.worst)
    if not wrong:
        return []
    cases = []
    for d in wrong[:_SHOWN]:
        margin = "one had ended" if d.margin is None else f"margin {d.margin:.2g} nats"
        cases.append(f"prompt {d.prompt} at token {d.position}: {d.reference_id} / {d.engine_id}, {margin}")
    text = (
        f"{len(wrong)} of {phase.greedy.prompts} greedy completions leave the reference's where it is no tie "
        f"({'; '.join(cases)}{'; ...' if len(wrong) > _SHOWN else ''})"
    )
    return [Problem(fault="greedy", text=text)]


# --- the update ---------------------------------------------------------------------------------------------


def _after_update(
    problems: list[Problem],
    phase: PhaseReport,
    rows: Sequence[Row],
    *,
    earlier: tuple[PhaseReport, Sequence[Row]],
    limits: Limits,
    outcome: Outcome,
) -> list[Problem]:
    """The problems of the second phase; a gap that began with the update is named as stale weights."""
    before, rows_before = earlier
    effect = outcome.update_effect
    if effect is None or not effect > _CLEAR * limits.mean:
        text = (
            f"the update moved the trainer's own logprobs by {effect or 0.0:.2g} nats only: an engine that "
            f"missed it would not stand out against {limits.mean:.2g}; raise --update-scale"
        )
        return [*problems, Problem(fault="update", text=text)]
    if too_wide(before.gap, limits) or not too_wide(phase.gap, limits):
        return problems
    gaps = f"{size(phase.gap)} from the trainer's after the update, {size(before.gap)} before it"
    if _same_answers(rows_before, rows):
        text = f"it answers as before the update: the new weights did not reach it (logprobs {gaps})"
    elif not too_wide(phase.gap_short, limits) and too_wide(phase.gap_long, limits):
        text = (
            "it answers prompts longer than a cache block from what it kept of earlier weights: a stale "
            f"prefix cache (logprobs {gaps}; prompts of up to {CACHE_BLOCK} tokens {size(phase.gap_short)}, "
            f"longer ones {size(phase.gap_long)})"
        )
    else:
        text = f"it does not hold all of the new weights, or keeps a cache of the old ones (logprobs {gaps})"
    others = [problem for problem in problems if problem.fault not in ("gap", "logprob kind")]
    return [Problem(fault="stale", text=text), *others]


def _same_answers(before: Sequence[Row], after: Sequence[Row]) -> bool:
    """Whether greedy completions and their logprobs are the old ones, up to rounding."""
    old = {row.prompt: row for row in of_kind(before, "greedy")}
    new = [row for row in of_kind(after, "greedy") if row.prompt in old]
    return bool(new) and all(
        row.token_ids == old[row.prompt].token_ids
        and len(row.logprobs) == len(old[row.prompt].logprobs)
        and all(abs(a - b) <= 1e-3 for a, b in zip(row.logprobs, old[row.prompt].logprobs, strict=True))
        for row in new
    )
