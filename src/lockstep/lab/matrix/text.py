"""The text that all reports of a matrix share: columns, footnotes, conditions. Plain; a report escapes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from lockstep.lab.matrix.result import (
    GRADIENT_LIMIT,
    HALF_GRADIENT_LIMIT,
    HALF_RMS_LIMIT,
    LOGPROB_LIMIT,
    ROUNDING_FACTOR,
    CellResult,
    MatrixResult,
    Measures,
)

GIB = 1024**3
NOTHING = "-"
MARKS = ("†", "‡", "§", "¶")


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One measured column."""

    head: str
    short: str
    """The head in the terminal."""
    part: Literal["speed", "numbers"]
    text: Callable[[MatrixResult, CellResult], str]


def columns() -> tuple[Column, ...]:
    """All columns, in the order in which reports show them."""
    return (
        Column(head="first ms", short="first ms", part="speed", text=_first),
        Column(head="forward ms", short="fwd ms", part="speed", text=_forward),
        Column(head="backward ms", short="bwd ms", part="speed", text=_backward),
        Column(head="tokens/s", short="tokens/s", part="speed", text=_speed),
        Column(head="x reference", short="x ref", part="speed", text=_ratio),
        Column(head="peak GiB", short="GiB", part="speed", text=_memory),
        Column(head="slots", short="slots", part="speed", text=_slots),
        Column(head="graphs", short="graphs", part="numbers", text=lambda r, c: _count(c, "graphs")),
        Column(head="recompiles", short="recomp", part="numbers", text=lambda r, c: _count(c, "recompiles")),
        Column(
            head="graph breaks", short="breaks", part="numbers", text=lambda r, c: _count(c, "graph_breaks")
        ),
        Column(head="max Δlogprob", short="max nats", part="numbers", text=_logprob("logprob_max")),
        Column(head="mean Δlogprob", short="mean", part="numbers", text=_logprob("logprob_mean")),
        Column(head="gradient error", short="grad err", part="numbers", text=_gradient),
        Column(head="cosine", short="cosine", part="numbers", text=_cosine),
    )


def result_text(cell: CellResult) -> str:
    """Say whether a cell works and agrees, or how it failed."""
    return f"works, {agreement(cell)}" if cell.works else cell.status


def agreement(cell: CellResult) -> str:
    """How a cell that works compares with its reference; else "-"."""
    if not cell.works:
        return NOTHING
    if cell.reference is None:
        return "reference"
    return {True: "agrees", False: "disagrees", None: "not compared"}[cell.agrees]


def problems(result: MatrixResult) -> list[tuple[CellResult, str]]:
    """Cells with a problem: why they do not work or do not agree, or why gradients were not compared."""
    rows = []
    for cell in result.cells:
        if cell.status == "not run":
            continue
        if not cell.works:
            rows.append((cell, f"{cell.status}: {cell.reason}" if cell.reason else cell.status))
        elif cell.disagreement:
            rows.append((cell, cell.disagreement))
        elif cell.comparison is not None and cell.comparison.gradient_note:
            rows.append((cell, cell.comparison.gradient_note))
    return rows


def footnotes(result: MatrixResult) -> list[tuple[str, str]]:
    """Marks in the table and what they mean."""
    notes = dict.fromkeys(cell.timing_note for cell in result.cells if cell.timing_note)
    lines = [(_mark(result, note), note) for note in notes]
    left_out = [c for c in result.cells if c.comparison is not None and c.comparison.left_out]
    for cell in left_out:
        assert cell.comparison is not None
        lines.append(("-", f"{cell.name}: {cell.comparison.left_out} inputs have no counterpart, left out"))
    weights = {c.measures.weights for c in result.cells if c.measures is not None and c.measures.weights}
    lines += [("-", text) for text in sorted(weights)]
    return lines


def limits_text(result: MatrixResult) -> str:
    """Say within which limits a cell agrees."""
    set_limits = {name: value for name, value in result.limits.items() if value is not None}
    if len(set_limits) == len(result.limits):
        return (
            f"A cell agrees within {set_limits['logprob']:g} nats (largest) and "
            f"{set_limits['gradient']:g} (gradient)."
        )
    dtypes = {
        cell.flags[i + 1] for cell in result.cells for i, f in enumerate(cell.flags[:-1]) if f == "--dtype"
    }
    parts = []
    if "float32" in dtypes:
        parts.append(f"{LOGPROB_LIMIT:g} nats (largest) and {GRADIENT_LIMIT:g} (gradient) in float32")
    if dtypes - {"float32"}:
        parts.append(
            f"in 16 bits {ROUNDING_FACTOR:g} times the RMS logprob difference and gradient error of the "
            "reference's own kernels in that dtype, where they are a cell, "
            f"else {HALF_RMS_LIMIT:g} nats (RMS) and {HALF_GRADIENT_LIMIT:g}, times the square root of the "
            "number of layers"
        )
    parts += [f"{name} {value:g} as given" for name, value in set_limits.items()]
    return f"A cell agrees within {'; '.join(parts)}."


def conditions(result: MatrixResult) -> list[tuple[str, str]]:
    """The conditions that one needs to repeat the matrix, or to judge it."""
    references = dict.fromkeys(cell.reference or cell.name for cell in result.cells if cell.works)
    rows = [
        ("command", result.command),
        ("recording", f"{result.recording.get('path')}, {result.recording.get('inputs')} inputs"),
        ("model", str(result.recording.get("model"))),
        ("compared with", ", ".join(name for name in references if _is_reference(result, name))),
        *result.environment.items(),
        ("date", result.created),
    ]
    return [(name, value) for name, value in rows if value]


def bar_share(result: MatrixResult, cell: CellResult) -> float:
    """This cell's tokens per second as a share of the fastest's, 0 to 1."""
    speeds = [c.measures.tokens_per_second or 0.0 for c in result.cells if c.measures is not None]
    mine = cell.measures.tokens_per_second if cell.measures is not None else None
    top = max(speeds, default=0.0)
    return mine / top if mine and top else 0.0


def number(value: float | None, *, digits: int = 2) -> str:
    """Format a small difference: "0", "2.4e-07", "inf"."""
    if value is None:
        return NOTHING
    return "0" if value == 0 else f"{value:.{digits}g}"


def _is_reference(result: MatrixResult, name: str) -> bool:
    cell = result.cell(name)
    return cell is not None and cell.reference is None


def _measures(cell: CellResult) -> Measures:
    return cell.measures if cell.measures is not None else Measures()


def _mark(result: MatrixResult, note: str) -> str:
    notes = list(dict.fromkeys(cell.timing_note for cell in result.cells if cell.timing_note))
    return MARKS[notes.index(note) % len(MARKS)] if note in notes else ""


def _ms(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _first(result: MatrixResult, cell: CellResult) -> str:
    return _ms(_measures(cell).first_call_ms)


def _forward(result: MatrixResult, cell: CellResult) -> str:
    return _ms(_measures(cell).forward_ms)


def _backward(result: MatrixResult, cell: CellResult) -> str:
    return _ms(_measures(cell).backward_ms)


def _speed(result: MatrixResult, cell: CellResult) -> str:
    speed = _measures(cell).tokens_per_second
    return NOTHING if speed is None else f"{speed:,.0f}{_mark(result, cell.timing_note)}"


def _ratio(result: MatrixResult, cell: CellResult) -> str:
    ratio = result.speed_ratio(cell)
    return NOTHING if ratio is None else f"{ratio:.2f}"


def _memory(result: MatrixResult, cell: CellResult) -> str:
    memory = _measures(cell).peak_memory_bytes
    return NOTHING if memory is None else f"{memory / GIB:.2f}"


def _slots(result: MatrixResult, cell: CellResult) -> str:
    slots = _measures(cell).computed_slots
    return NOTHING if not slots else f"{slots:,}"


def _count(cell: CellResult, name: str) -> str:
    value = getattr(_measures(cell), name)
    return NOTHING if value is None else str(value)


def _logprob(name: str) -> Callable[[MatrixResult, CellResult], str]:
    def text(result: MatrixResult, cell: CellResult) -> str:
        return NOTHING if cell.comparison is None else number(getattr(cell.comparison, name))

    return text


def _gradient(result: MatrixResult, cell: CellResult) -> str:
    return NOTHING if cell.comparison is None else number(cell.comparison.gradient_relative_error)


def _cosine(result: MatrixResult, cell: CellResult) -> str:
    cosine = None if cell.comparison is None else cell.comparison.gradient_cosine
    # 1 - 3e-13 must not read as less than a rounded 1.
    return NOTHING if cosine is None else f"{cosine:.6f}"
