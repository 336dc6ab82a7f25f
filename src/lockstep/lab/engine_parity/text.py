"""The text that all reports of a comparison of engines share: columns, problems, and engines.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from lockstep.lab.engine_parity.compare import BAR_NAMES, Gap, SeedMatch, Spread
from lockstep.lab.engine_parity.phase import CACHE_BLOCK, Example, PhaseReport
from lockstep.lab.engine_parity.result import EngineResult, EnginesResult, number
from lockstep.observe.text import printable_lines

WIDTH = 110
NOTHING = "-"
Part = Literal["agreement", "samples", "speed"]
PARTS: tuple[Part, ...] = ("agreement", "samples", "speed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One figure of an engine in one phase."""

    head: str
    short: str
    """The head in the terminal."""
    part: Part
    text: Callable[[EngineResult, PhaseReport], str]


def _gap(name: str) -> Callable[[EngineResult, PhaseReport], str]:
    return lambda _, phase: NOTHING if phase.gap is None else number(getattr(phase.gap, name))


def _mean(name: str) -> Callable[[EngineResult, PhaseReport], str]:
    def text(_: EngineResult, phase: PhaseReport) -> str:
        figure: Gap | None = getattr(phase, name)
        return NOTHING if figure is None else number(figure.mean)

    return text


def _equal(name: str) -> Callable[[EngineResult, PhaseReport], str]:
    def text(_: EngineResult, phase: PhaseReport) -> str:
        match: SeedMatch | None = getattr(phase, name)
        return NOTHING if match is None else f"{match.equal}/{match.pairs}"

    return text


def _greedy(engine: EngineResult, phase: PhaseReport) -> str:
    if engine.is_reference:
        return "reference"
    return NOTHING if phase.greedy is None else f"{phase.greedy.equal}/{phase.greedy.prompts}"


def _counts(name: str) -> Callable[[EngineResult, PhaseReport], str]:
    def text(_: EngineResult, phase: PhaseReport) -> str:
        counts: dict[str, int] = getattr(phase, name)
        return ", ".join(f"{key} {value}" for key, value in sorted(counts.items())) or NOTHING

    return text


def _spread(spread: Spread | None) -> str:
    return NOTHING if spread is None else f"{spread.min}/{spread.median:g}/{spread.p90}/{spread.max}"


def _matrix(_: EngineResult, phase: PhaseReport) -> str:
    return NOTHING if phase.matrix is None else f"{phase.matrix.samples} x {phase.matrix.longest}"


def _fill(_: EngineResult, phase: PhaseReport) -> str:
    return NOTHING if phase.matrix is None else f"{phase.matrix.fill:.0%}"


def _speed(name: str) -> Callable[[EngineResult, PhaseReport], str]:
    def text(_: EngineResult, phase: PhaseReport) -> str:
        value: float | None = getattr(phase, name)
        return NOTHING if value is None else f"{value:,.0f}"

    return text


def _hits(_: EngineResult, phase: PhaseReport) -> str:
    return NOTHING if phase.cache_hit_rate is None else f"{phase.cache_hit_rate:.0%}"


def _start(engine: EngineResult, _: PhaseReport) -> str:
    value = None if engine.outcome is None else engine.outcome.start_seconds
    return NOTHING if value is None else f"{value:.1f}"


def _push(engine: EngineResult, phase: PhaseReport) -> str:
    """Seconds of the push that this phase began with."""
    pushes = () if engine.outcome is None else engine.outcome.push_seconds
    behind = len(engine.phases) - 1 - [p.phase for p in engine.phases].index(phase.phase)
    at = len(pushes) - 1 - behind
    return f"{pushes[at]:.2f}" if 0 <= at < len(pushes) else NOTHING


COLUMNS: tuple[Column, ...] = (
    Column(head="greedy equal", short="greedy", part="agreement", text=_greedy),
    Column(head="logprob gap: mean", short="gap mean", part="agreement", text=_gap("mean")),
    Column(head="p99", short="p99", part="agreement", text=_gap("p99")),
    Column(head="max", short="max", part="agreement", text=_gap("max")),
    Column(head="k3", short="k3", part="agreement", text=_gap("k3")),
    Column(head="mean, short prompts", short="short", part="agreement", text=_mean("gap_short")),
    Column(head="mean, long prompts", short="long", part="agreement", text=_mean("gap_long")),
    Column(head="same seeds: equal", short="again", part="agreement", text=_equal("again")),
    Column(head="alone: equal", short="alone", part="agreement", text=_equal("alone")),
    Column(head="other seeds: equal", short="other", part="agreement", text=_equal("other")),
    Column(head="of n: equal", short="of n", part="agreement", text=_equal("siblings")),
    Column(head="finish", short="finish", part="samples", text=_counts("finish")),
    Column(head="ended by", short="ended by", part="samples", text=_counts("stops")),
    Column(head="special ids", short="special ids", part="samples", text=_counts("special")),
    Column(
        head="prompt tokens (min/median/p90/max)",
        short="prompt",
        part="speed",
        text=lambda _, phase: _spread(phase.prompt_lengths),
    ),
    Column(
        head="completion tokens",
        short="completion",
        part="speed",
        text=lambda _, phase: _spread(phase.lengths),
    ),
    Column(head="token matrix", short="matrix", part="speed", text=_matrix),
    Column(head="fill", short="fill", part="speed", text=_fill),
    Column(head="cached", short="cached", part="speed", text=_hits),
    Column(head="tokens/s", short="tokens/s", part="speed", text=_speed("tokens_per_second")),
    Column(head="tokens/s, cold", short="cold", part="speed", text=_speed("cold_tokens_per_second")),
    Column(head="start s", short="start s", part="speed", text=_start),
    Column(head="push s", short="push s", part="speed", text=_push),
)


def lines_of(result: EnginesResult) -> Iterator[tuple[EngineResult, PhaseReport | None]]:
    """One line for every engine and phase; an engine that did nothing has one too."""
    for engine in result.engines:
        if not engine.phases:
            yield engine, None
        for phase in engine.phases:
            yield engine, phase


def cell(column: Column, engine: EngineResult, phase: PhaseReport | None) -> str:
    """The text of one cell."""
    return NOTHING if phase is None else column.text(engine, phase)


def divergences(result: EnginesResult) -> list[tuple[str, ...]]:
    """engine, phase, prompt, position, reference's id, engine's id, margin by the trainer, by themselves."""
    return [
        (
            engine.name,
            phase.phase,
            str(d.prompt),
            str(d.position),
            str(d.reference_id),
            str(d.engine_id),
            number_signed(d.margin),
            number_signed(d.engine_margin),
        )
        for engine in result.engines
        for phase in engine.phases
        if phase.greedy is not None
        for d in phase.greedy.divergences
    ]


DIVERGENCE_HEADS = ("engine", "phase", "prompt", "token", "reference", "engine's", "margin", "own margin")


def number_signed(value: float | None) -> str:
    """Format nats with their sign."""
    return NOTHING if value is None else ("-" if value < 0 else "") + number(abs(value))


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


EXAMPLE_HEADS = ("engine", "phase", "prompt", "ids read", "ids answered", "finish")


def example_cells(engine: EngineResult, phase: PhaseReport, example: Example) -> tuple[str, ...]:
    """Format one greedy completion's id lists."""
    how = example.finish_reason
    if example.stop_reason is not None:
        how += f" {example.stop_reason}"
    return (
        engine.name,
        phase.phase,
        f"{example.prompt}: {example.prompt_tokens}",
        ends(example.read, example.prompt_tokens),
        f"{ends(example.answered, example.tokens)} ({example.tokens})",
        how,
    )


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


def markdown(result: EnginesResult) -> str:
    """Format engines.md: the tables and everything needed to repeat them."""
    heads = ["engine", "verdict", "phase"]
    lines = [
        f"# Engines: {plain(result.settings.get('model', ''))}",
        "",
        f"**{plain(result.verdict)}**",
        "",
    ]
    for part in PARTS:
        part_columns = [column for column in COLUMNS if column.part == part]
        rows = [
            [engine.name, engine.verdict, NOTHING if phase is None else phase.phase]
            + [cell(column, engine, phase) for column in part_columns]
            for engine, phase in lines_of(result)
        ]
        lines += _markdown_table([*heads, *(c.head for c in part_columns)], rows, text_columns=3)
    if problems(result):
        lines += ["## What did not pass", ""]
        lines += [f"- **{plain(name)}**: {plain(why)}" for name, why in problems(result)]
        lines.append("")
    lines += ["## Sizes of the gaps (tokens, nats from)", ""]
    lines += _markdown_table(
        ["engine", "phase", *BAR_NAMES],
        [
            [engine.name, phase.phase, *map(str, phase.gap.histogram)]
            for engine, phase in lines_of(result)
            if phase is not None and phase.gap is not None
        ],
        text_columns=2,
    )
    if divergences(result):
        lines += ["## Where greedy completions part", ""]
        lines += _markdown_table(list(DIVERGENCE_HEADS), divergences(result), text_columns=2)
    lines += ["## Ids of greedy completions", ""]
    lines += _markdown_table(
        list(EXAMPLE_HEADS),
        [
            example_cells(engine, phase, example)
            for engine, phase in lines_of(result)
            if phase is not None
            for example in phase.examples
        ],
        text_columns=len(EXAMPLE_HEADS),
    )
    lines += [plain(explanation(result)) + ".", "", *(f"- {plain(note)}" for note in result.notes)]
    lines += ["", "| | |", "|---|---|"]
    facts = [*result.settings.items(), *result.machine.items(), *versions_of(result)]
    lines += [f"| {plain(k)} | {plain(v)} |" for k, v in facts]
    command = printable_lines(result.command).replace("\n", " ").replace("```", "'''")
    return "\n".join([*lines, "", "```text", command, "```", ""])


def versions_of(result: EnginesResult) -> list[tuple[str, str]]:
    """List (engine, what it reports about itself)."""
    return [
        (engine.name, "; ".join(f"{key}: {value}" for key, value in engine.outcome.engine.items()))
        for engine in result.engines
        if engine.outcome is not None and engine.outcome.engine
    ]


def _markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int) -> list[str]:
    """The first `text_columns` columns hold text, the others numbers."""
    marks = "---|" * text_columns + "---:|" * (len(heads) - text_columns)
    lines = ["| " + " | ".join(map(plain, heads)) + " |", f"|{marks}"]
    return [*lines, *("| " + " | ".join(plain(text) for text in row) + " |" for row in rows), ""]


def plain(text: object) -> str:
    """Escape text so that Markdown shows it as it is: no markup, no HTML, no new cell or line."""
    line = printable_lines(str(text)).replace("\n", " ")
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~$!#])", r"\\\1", line)
