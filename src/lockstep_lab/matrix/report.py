"""The columns, notes and problems that the reports of a matrix show."""

from __future__ import annotations

from pathlib import Path

from lockstep.observe.text import printable_lines
from lockstep_lab.matrix.result import (
    GRADIENT_LIMIT,
    HALF_GRADIENT_LIMIT,
    HALF_RMS_LIMIT,
    LOGPROB_LIMIT,
    ROUNDING_FACTOR,
    CellResult,
    MatrixResult,
)
from lockstep_lab.suite.report import (
    NOTHING,
    Column,
    Head,
    Problem,
    Report,
    Row,
    Table,
    Tone,
    figures,
    gib,
    write_report,
)

MARKS = ("†", "‡", "§", "¶")
_PARTS = {
    "speed": ("Does it work, and how fast?", "works"),
    "numbers": ("Does it compute the same?", "agrees"),
}


def write_reports(result: MatrixResult, out: Path) -> None:
    """Write matrix.json, matrix.md and matrix.html into `out`."""
    write_report(report(result), result.as_dict(), out, "matrix")


def report(result: MatrixResult) -> Report:
    """Describe the matrix for its reports."""
    notes = [] if result.complete else ["Not complete: cells are still to be run."]
    notes += [text if mark == "-" else f"{mark} {text}" for mark, text in footnotes(result)]
    return Report(
        title=f"Compatibility matrix: {result.recording.get('path', '')}",
        verdict=result.verdict,
        tone="good" if result.ok else "bad" if result.complete else "warn",
        tables=[*(_part(result, part) for part in _PARTS), _whole(result)],
        problems=[
            Problem(name=cell.name, why=why, command=cell.command, log=cell.log or "", tone=_tone(cell))
            for cell, why in problems(result)
        ],
        notes=[*notes, limits_text(result)],
        settings={},
        facts=dict(conditions(result)),
        command=result.command,
        commands=[(cell.name, cell.command) for cell in result.cells],
    )


def _tone(cell: CellResult) -> Tone:
    return "bad" if cell.fails else "good" if cell.works else "warn"


def _part(result: MatrixResult, part: str) -> Table:
    """The table of speed or of numbers, for people."""
    title, head = _PARTS[part]
    rows = (
        ([cell.name, cell.status if part == "speed" else agreement(cell)], (cell, result), _tone(cell))
        for cell in result.cells
    )
    columns = [column for column in COLUMNS if column.part in (part, "log")]
    words = [Head("cell", kind="name"), Head(head, kind="tone")]
    return figures(columns, rows, before=words, title=title, on=("terminal", "page"))


def _whole(result: MatrixResult) -> Table:
    """One table with a column per axis, to paste."""

    def names(cell: CellResult) -> list[str]:
        if cell.is_extra:
            return [f"({cell.name})", *("" for _ in list(result.axes)[1:])]
        return [cell.values.get(axis, "") for axis in result.axes]

    rows: list[Row] = [([*names(cell), result_text(cell)], (cell, result), "") for cell in result.cells]
    words = [Head(name, kind="") for name in (*result.axes, "result")]
    return figures(COLUMNS, rows, before=words, on=("markdown",))


def progress_line(cell: CellResult, done: int, total: int) -> str:
    """Format a line about a cell that has just ended."""
    seconds = "" if cell.seconds is None else f", {cell.seconds:.1f} s"
    why = f": {cell.reason}" if cell.reason else ""
    apart = cell.comparison.logprob_max if cell.comparison is not None else None
    far = "" if apart is None else f", {apart:.2g} nats from the reference"
    return printable_lines(f"[{done}/{total}] {cell.name}: {cell.status}{why}{far}{seconds}")


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
    """Cells with a problem: why they do not work or do not agree."""
    rows = []
    for cell in result.cells:
        if cell.status == "interrupted":
            continue
        if not cell.works:
            rows.append((cell, f"{cell.status}: {cell.reason}" if cell.reason else cell.status))
        elif cell.disagreement:
            rows.append((cell, cell.disagreement))
    return rows


def footnotes(result: MatrixResult) -> list[tuple[str, str]]:
    """Marks in the table and what they mean."""
    notes = dict.fromkeys(cell.timing_note for cell in result.cells if cell.timing_note)
    lines = [(_mark(result, note), note) for note in notes]
    left_out = [c for c in result.cells if c.comparison is not None and c.comparison.left_out]
    for cell in left_out:
        assert cell.comparison is not None
        lines.append(("-", f"{cell.name}: {cell.comparison.left_out} inputs have no counterpart, left out"))
    lines += [("-", text) for text in _gradient_notes(result)]
    lines += [("-", text) for text in result.notes]
    weights = {c.measures.weights for c in result.cells if c.measures is not None and c.measures.weights}
    lines += [("-", text) for text in sorted(weights)]
    return lines


def _gradient_notes(result: MatrixResult) -> list[str]:
    """Why gradients of cells that work were not compared."""
    cells: dict[str, list[str]] = {}
    for cell in result.cells:
        if cell.works and cell.comparison is not None and cell.comparison.gradient_note:
            cells.setdefault(cell.comparison.gradient_note, []).append(cell.name)
    return [f"{', '.join(names)}: gradients not compared: {note}" for note, names in cells.items()]


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


def _is_reference(result: MatrixResult, name: str) -> bool:
    cell = result.cell(name)
    return cell is not None and cell.reference is None


def _mark(result: MatrixResult, note: str) -> str:
    notes = list(dict.fromkeys(cell.timing_note for cell in result.cells if cell.timing_note))
    return MARKS[notes.index(note) % len(MARKS)] if note in notes else ""


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _speed(cell: CellResult, result: MatrixResult) -> str | None:
    speed = None if cell.measures is None else cell.measures.tokens_per_second
    return None if speed is None else f"{speed:,.0f}{_mark(result, cell.timing_note)}"


def _slots(cell: CellResult, _: MatrixResult) -> int | None:
    return None if cell.measures is None else cell.measures.computed_slots or None


COLUMNS = (
    Column("first ms", "speed", "measures.first_call_ms", _ms),
    Column("forward ms", "speed", "measures.forward_ms", _ms, "fwd ms"),
    Column("backward ms", "speed", "measures.backward_ms", _ms, "bwd ms"),
    Column("tokens/s", "speed", _speed, extra=lambda cell, result: {"bar": bar_share(result, cell)}),
    Column("x reference", "speed", lambda cell, result: result.speed_ratio(cell), ".2f", "x ref"),
    Column("peak GiB", "speed", "measures.peak_memory_bytes", gib, "GiB"),
    Column("slots", "speed", _slots, ","),
    Column("graphs", "numbers", "measures.graphs", "d"),
    Column("recompiles", "numbers", "measures.recompiles", "d", "recomp"),
    Column("graph breaks", "numbers", "measures.graph_breaks", "d", "breaks"),
    Column("max Δlogprob", "numbers", "comparison.logprob_max", ".2g", "max nats"),
    Column("mean Δlogprob", "numbers", "comparison.logprob_mean", ".2g", "mean"),
    Column("gradient error", "numbers", "comparison.gradient_relative_error", ".2g", "grad err"),
    # six digits: 1 - 3e-13 must not read as less than a rounded 1
    Column("cosine", "numbers", "comparison.gradient_cosine", ".6f"),
    Column(
        "log",
        "log",
        lambda cell, _: "log" if cell.log else "",
        kind="",
        terminal=False,
        extra=lambda cell, _: {"link": cell.log or ""},
    ),
)
"""All columns, in the order in which reports show them."""
