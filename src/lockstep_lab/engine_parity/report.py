"""The columns, examples and problems that the reports of a comparison of engines show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lockstep_lab.engine_parity.result import EngineResult, EnginesResult, number
from lockstep_lab.engine_parity.stats import BAR_NAMES, CACHE_BLOCK, Example, PhaseReport, SeedMatch, Spread
from lockstep_lab.suite.report import (
    NOTHING,
    Bars,
    Column,
    Head,
    Line,
    Problem,
    Report,
    Row,
    Table,
    Tone,
    figures,
    progress,
)

PARTS = ("agreement", "samples", "speed")


def report(result: EnginesResult) -> Report:
    """Describe the comparison for its reports."""
    gaps = [
        (e, phase, phase.gap) for e, phase in lines_of(result) if phase is not None and phase.gap is not None
    ]
    return Report(
        title=f"Engines: {result.settings.get('model', '')}",
        verdict=result.verdict,
        tone="good" if result.ok else "bad",
        tables=[_part(result, part) for part in PARTS],
        problems=[Problem(name=name, why=why) for name, why in problems(result)],
        bars=(
            "Sizes of the logprob gaps: tokens with a gap from so many nats on",
            [
                Bars(title=f"{e.name}, {p.phase}", bars=list(zip(BAR_NAMES, gap.histogram, strict=True)))
                for e, p, gap in gaps
            ],
        ),
        details=[
            Table(
                title="Sizes of the gaps (tokens, nats from)",
                on=("terminal", "markdown"),
                heads=[Head("engine", kind="name"), Head("phase", kind=""), *map(Head, BAR_NAMES)],
                lines=[
                    Line([e.name, p.phase, *(str(n or "") for n in gap.histogram)], _tone(e))
                    for e, p, gap in gaps
                ],
                wraps=True,
            ),
            _divergences(result),
            *_examples(result),
        ],
        notes=[*result.notes, explanation(result)],
        settings=result.settings,
        facts={**result.machine, **dict(versions_of(result))},
        command=result.command,
    )


def _tone(engine: EngineResult) -> Tone:
    return "good" if engine.ok else "bad"


def _part(result: EnginesResult, part: str) -> Table:
    rows = (
        ([engine.name, engine.verdict, phase.phase if phase else NOTHING], (phase, engine), _tone(engine))
        for engine, phase in lines_of(result)
    )
    words = [
        Head("engine", kind="name"),
        Head("verdict", kind="tone", terminal=False),
        Head("phase", kind=""),
    ]
    columns = [column for column in COLUMNS if column.part == part]
    return figures(columns, rows, before=words, wraps=True)


def lines_of(result: EnginesResult) -> Iterator[tuple[EngineResult, PhaseReport | None]]:
    """One line for every engine and phase; an engine that did nothing has one too."""
    for engine in result.engines:
        if not engine.phases:
            yield engine, None
        for phase in engine.phases:
            yield engine, phase


def _divergences(result: EnginesResult) -> Table:
    """List where greedy completions part: both ids, and their margin by the trainer and by the engine."""
    rows = (
        ([engine.name, phase.phase], (divergence,), _tone(engine))
        for engine, phase in lines_of(result)
        if phase is not None and phase.greedy is not None
        for divergence in phase.greedy.divergences
    )
    words = [Head("engine", kind=""), Head("phase", kind="")]
    return figures(DIVERGENCES, rows, before=words, title="Where greedy completions part", wraps=True)


def _examples(result: EnginesResult) -> list[Table]:
    """List the ids of greedy completions: in the terminal the first's and the last's; texts only on the
    page."""
    every: list[Row] = []
    ends: list[Row] = []
    for engine, phase in lines_of(result):
        for example in () if phase is None else phase.examples:
            assert phase is not None
            row: Row = ([engine.name, phase.phase], (example,), _tone(engine))
            every.append(row)
            if example in (phase.examples[0], phase.examples[-1]):
                ends.append(row)
    words, title = (
        [Head("engine", kind="name"), Head("phase", kind="")],
        "Ids and texts of greedy completions",
    )
    ids = EXAMPLES[:-1]
    return [
        figures(ids, ends, before=words, on=("terminal",), wraps=True),
        figures(ids, every, before=words, on=("markdown",), title=title),
        figures(EXAMPLES, every, before=words, on=("page",), title=title, folded=True),
    ]


def number_signed(value: float) -> str:
    """Format nats with their sign."""
    return ("-" if value < 0 else "") + number(abs(value))


def problems(result: EnginesResult) -> list[tuple[str, str]]:
    """List (engine, why it does not pass)."""
    return [(engine.name, why) for engine in result.engines for why in engine.why]


def ends(pair: tuple[Sequence[int], Sequence[int]], length: int) -> str:
    """ "1 2 3 4 5 ... 8 9", from head and tail of a list of `length` ids."""
    first, last = pair
    if length <= len(first):
        return " ".join(map(str, first))
    rest = last[-min(len(last), length - len(first)) :]
    dots = " ... " if length > len(first) + len(rest) else " "
    return f"{' '.join(map(str, first))}{dots}{' '.join(map(str, rest))}"


def _finish(example: Example) -> str:
    return example.finish_reason + ("" if example.stop_reason is None else f" {example.stop_reason}")


def explanation(result: EnginesResult) -> str:
    """Explain what the figures mean."""
    return (
        "before and after: an update of the weights. A gap is |engine's logprob - trainer's| of a sampled "
        f"token, nats; long prompts have more than {CACHE_BLOCK} tokens, the largest cache block. Every "
        "engine is asked the same: greedy, with a stop id, n samples, the same again, some alone, some with "
        "other seeds. cached: share of prompt tokens that was not computed. tokens/s: of the samples asked "
        f"the second time; cold: the first. Let pass is a mean gap of {result.threshold:.2g} nats and "
        f"{10 * result.threshold:.2g} for one token, within which greedy completions may part, too"
    )


def versions_of(result: EnginesResult) -> list[tuple[str, str]]:
    """List (engine, what it reports about itself)."""
    return [
        (engine.name, "; ".join(f"{key}: {value}" for key, value in engine.outcome.engine.items()))
        for engine in result.engines
        if engine.outcome is not None and engine.outcome.engine
    ]


def progress_line(engine: EngineResult, done: int, total: int) -> str:
    """Format a line about an engine that has just ended."""
    gaps = [phase.gap for phase in engine.phases if phase.gap is not None]
    far = f"logprob gap mean {number(max(g.mean for g in gaps))}" if gaps else ""
    why = engine.why[0] if engine.why else ""
    return progress((done, total), engine.name, engine.verdict, far, f"{engine.seconds:.1f} s", why=why)


def _greedy(phase: PhaseReport, engine: EngineResult) -> str | None:
    if engine.is_reference:
        return "reference"
    return None if phase.greedy is None else f"{phase.greedy.equal}/{phase.greedy.prompts}"


def _equal(match: SeedMatch) -> str:
    return f"{match.equal}/{match.pairs}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{key} {value}" for key, value in sorted(counts.items())) or NOTHING


def _spread(spread: Spread) -> str:
    return f"{spread.min}/{spread.median:g}/{spread.p90}/{spread.max}"


def _start(_: PhaseReport, engine: EngineResult) -> float | None:
    return None if engine.outcome is None else engine.outcome.start_seconds


def _push(phase: PhaseReport, engine: EngineResult) -> float | None:
    """Seconds of the push that this phase began with."""
    pushes = () if engine.outcome is None else engine.outcome.push_seconds
    behind = len(engine.phases) - 1 - [p.phase for p in engine.phases].index(phase.phase)
    at = len(pushes) - 1 - behind
    return pushes[at] if 0 <= at < len(pushes) else None


COLUMNS = (
    Column("greedy equal", "agreement", _greedy, short="greedy"),
    Column("logprob gap: mean", "agreement", "gap.mean", number, "gap mean"),
    Column("p99", "agreement", "gap.p99", number),
    Column("max", "agreement", "gap.max", number),
    Column("k3", "agreement", "gap.k3", number),
    Column("mean, short prompts", "agreement", "gap_short.mean", number, "short"),
    Column("mean, long prompts", "agreement", "gap_long.mean", number, "long"),
    Column("same seeds: equal", "agreement", "again", _equal, "again"),
    Column("alone: equal", "agreement", "alone", _equal, "alone"),
    Column("other seeds: equal", "agreement", "other", _equal, "other"),
    Column("of n: equal", "agreement", "siblings", _equal, "of n"),
    Column("finish", "samples", "finish", _counts, kind=""),
    Column("ended by", "samples", "stops", _counts, kind=""),
    Column("special ids", "samples", "special", _counts, kind=""),
    Column("prompt tokens (min/median/p90/max)", "speed", "prompt_lengths", _spread, "prompt"),
    Column("completion tokens", "speed", "lengths", _spread, "completion"),
    Column("token matrix", "speed", "matrix", lambda m: f"{m.samples} x {m.longest}", "matrix"),
    Column("fill", "speed", "matrix.fill", ".0%"),
    Column("cached", "speed", "cache_hit_rate", ".0%"),
    Column("tokens/s", "speed", "tokens_per_second", ",.0f"),
    Column("tokens/s, cold", "speed", "cold_tokens_per_second", ",.0f", "cold"),
    Column("start s", "speed", _start, ".1f"),
    Column("push s", "speed", _push, ".2f"),
)
DIVERGENCES = (
    Column("prompt", "", "prompt"),
    Column("token", "", "position"),
    Column("reference", "", "reference_id"),
    Column("engine's", "", "engine_id"),
    Column("margin", "", "margin", number_signed),
    Column("own margin", "", "engine_margin", number_signed),
)
EXAMPLES = (
    Column("prompt", "", lambda e: f"{e.prompt}: {e.prompt_tokens}", kind=""),
    Column("ids read", "", lambda e: ends(e.read, e.prompt_tokens), kind="ids"),
    Column("ids answered", "", lambda e: f"{ends(e.answered, e.tokens)} ({e.tokens})", kind="ids"),
    Column("finish", "", _finish, kind=""),
    Column("text", "", "text", kind="answer"),
)
"""Of a greedy completion."""
