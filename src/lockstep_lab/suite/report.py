"""The report of a suite, written three times from one description: for the terminal, as Markdown, as a page.

A suite says what its tables hold (`Report`); how a table, a problem or a command looks is said here and in
`report.html.j2`. Names, reasons and completions are text that somebody else wrote: each of the three escapes
it, and the page's policy lets nothing be loaded or run.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lockstep.observe.files import write_atomic, write_json
from lockstep.observe.text import printable_lines

if TYPE_CHECKING:
    from jinja2 import Environment
    from rich.console import Console

NOTHING = "-"
"""A figure that is not known."""
GIB = 1024**3
WIDTH = 110
"""Columns of the terminal's tables where the terminal does not say."""
Tone = Literal["", "good", "warn", "bad"]
Kind = Literal["n", "name", "tone", "", "ids", "answer"]
Place = Literal["terminal", "markdown", "page"]
EVERYWHERE: tuple[Place, ...] = ("terminal", "markdown", "page")
_LEAST_WIDTHS = {"name": 32, "tone": 9}
"""Columns of a terminal that a longer text gets at least."""
_COLOURS = {"good": None, "warn": "yellow", "bad": "red"}


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a column, and what the column holds."""

    text: str
    short: str = ""
    """In the terminal; empty: `text`."""
    kind: Kind = "n"
    """n: numbers. name: the first column. tone: a word in the colour of its row. ids, answer: long text."""
    terminal: bool = True
    """Whether the terminal has the column."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A text with something that only the page shows."""

    text: str
    bar: float | None = None
    """Length of a bar beside the text, 0 to 1."""
    link: str = ""
    """Relative path."""


@dataclass(frozen=True, slots=True)
class Line:
    """A row of a table."""

    cells: Sequence[str | Cell]
    """Those behind the last head are not shown."""
    tone: Tone = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table, in the places in which it is shown."""

    heads: Sequence[Head]
    lines: Sequence[Line]
    title: str = ""
    """Heading; the terminal shows none."""
    on: Sequence[Place] = EVERYWHERE
    wraps: bool = False
    """Whether the terminal may break figures over several lines."""
    folded: bool = False
    """Whether the page hides the table behind its title."""


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of each row of a suite."""

    head: str
    part: str
    """The table that the column belongs to."""
    value: str | Callable[..., Any]
    """A path of attributes of the row, such as "comparison.loss.max", or a function of what `text` is given.
    None: the figure is not known."""
    form: str | Callable[[Any], str] = ""
    """How a known figure is written: a format, or a function."""
    short: str = ""
    """The head in the terminal; empty: `head`."""
    kind: Kind = "n"
    terminal: bool = True
    """Whether the terminal has the column."""
    extra: Callable[..., dict[str, Any]] | None = None
    """What only the page shows beside a known figure: fields of Cell, of what `text` is given."""

    def cell(self, row: object, *more: object) -> str | Cell:
        """The figure of a row as a table has it."""
        text = self.text(row, *more)
        if self.extra is None or text == NOTHING:
            return text
        return Cell(text, **self.extra(row, *more))

    def text(self, row: object, *more: object) -> str:
        """Format the figure of a row; "-" where it is not known, or there is no row."""
        if row is None:
            return NOTHING
        value = self.value(row, *more) if callable(self.value) else at(row, self.value)
        if value is None:
            return NOTHING
        return self.form(value) if callable(self.form) else format(value, self.form)


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Something that did not pass."""

    name: str
    why: str
    command: str = ""
    log: str = ""
    """Relative path."""
    tone: Tone = "bad"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """A figure of the page: one group of upright bars."""

    title: str
    bars: Sequence[tuple[str, int]]
    """(label, count)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What the three reports of a suite show, in the order of the page."""

    title: str
    verdict: str
    tone: Tone
    tables: Sequence[Table] = ()
    problems: Sequence[Problem] = ()
    picture: tuple[Callable[[], str], str] | None = None
    """(makes an <svg> element, name of the PNG file beside it)."""
    bars: tuple[str, Sequence[Bars]] = ("", ())
    """(heading, figures)."""
    details: Sequence[Table] = ()
    """Tables behind the problems."""
    notes: Sequence[str] = ()
    settings: Mapping[str, Any]
    """What was compared: shown in the terminal, too."""
    facts: Mapping[str, Any]
    """Machine and versions."""
    command: str = ""
    commands: Sequence[tuple[str, str]] = ()
    """(row, how to repeat it alone)."""


Row = tuple[Sequence[str | Cell], tuple[Any, ...], Tone]
"""A row of a table of columns: what stands before the columns, what `Column.text` is given, tone."""


def at(row: Any, path: str) -> Any:
    """The attribute at the end of a path; None where the path ends before."""
    for name in path.split("."):
        row = None if row is None else getattr(row, name)
    return row


def heads(columns: Iterable[Column]) -> list[Head]:
    """The heads of columns."""
    return [Head(column.head, column.short, column.kind, column.terminal) for column in columns]


def figures(
    columns: Sequence[Column],
    rows: Iterable[Row],
    *,
    before: Sequence[Head],
    **more: Any,
) -> Table:
    """A table of columns.

    Args:
        before: the heads before the columns.
        more: fields of Table.
    """
    lines = [Line([*words, *(column.cell(*row) for column in columns)], tone) for words, row, tone in rows]
    return Table(heads=[*before, *heads(columns)], lines=lines, **more)


def progress(place: tuple[int, int], name: str, verdict: str, *facts: str, why: str = "") -> str:
    """Format a line about a row that is done: "[2/8] NAME: VERDICT, FACT, FACT: WHY"."""
    text = ", ".join([f"[{place[0]}/{place[1]}] {name}: {verdict}", *filter(None, facts)])
    return printable_lines(text + (f": {why}" if why else ""))


def milliseconds(seconds: float) -> str:
    """Format seconds as whole milliseconds."""
    return f"{1000 * seconds:,.0f}"


def gib(size: float) -> str:
    """Format bytes as GiB."""
    return f"{size / GIB:.2f}"


def write_report(report: Report, values: Mapping[str, Any], out: Path, stem: str) -> None:
    """Write STEM.json (`values`), STEM.md and STEM.html into `out`."""
    write_json(out / f"{stem}.json", dict(values))
    write_atomic(out / f"{stem}.md", markdown(report))
    write_atomic(out / f"{stem}.html", page(report))


# --- the terminal -------------------------------------------------------------------------------------------


def show(report: Report, console: Console) -> None:
    """Print tables, settings, notes and problems; the verdict is left to the caller."""
    for table in (*report.tables, *report.details):
        if "terminal" in table.on and table.lines:
            print_table(table, console)
    lines = [f"{name}: {value}" for name, value in report.settings.items()]
    lines += report.notes
    for problem in report.problems:
        lines += [f"{problem.name}: {problem.why}", *([f"    log: {problem.log}"] if problem.log else [])]
    for line in lines:
        print_line(line, console)


def print_line(text: str, console: Console) -> None:
    """Print a line without markup, as long as it is."""
    from rich.text import Text

    console.print(Text(printable_lines(text)), soft_wrap=True)


def print_table(table: Table, console: Console) -> None:
    """Print one table and an empty line."""
    from rich import box
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    shown = [index for index, head in enumerate(table.heads) if head.terminal]
    for index in shown:
        head = table.heads[index]
        width = _LEAST_WIDTHS.get(head.kind)
        if width is not None:
            width = min(width, max(len(_text(line.cells[index])) for line in table.lines))
        grid.add_column(
            head.short or head.text,
            justify="right" if head.kind == "n" else "left",
            overflow="fold",
            min_width=width,
            no_wrap=head.kind == "n" and not table.wraps,
        )
    for line in table.lines:
        cells = (Text(printable_lines(_text(line.cells[index]))) for index in shown)
        grid.add_row(*cells, style=_COLOURS.get(line.tone))
    console.print(grid)
    console.print()


def _text(cell: str | Cell) -> str:
    return cell if isinstance(cell, str) else cell.text


# --- Markdown -----------------------------------------------------------------------------------------------


def markdown(report: Report) -> str:
    """Format the report for an issue or a README, with everything that one needs to repeat it."""
    lines = [f"# {plain(report.title)}", "", f"**{plain(report.verdict)}**", ""]
    lines += _tables(report.tables)
    if report.problems:
        lines += ["## What did not pass", ""]
        for problem in report.problems:
            log = f" ([log]({_link(problem.log)}))" if problem.log else ""
            lines += [f"- **{plain(problem.name)}**: {plain(problem.why)}{log}"]
            lines += [f"  `{_code(problem.command)}`"] if problem.command else []
        lines.append("")
    lines += [f"![curves]({_link(report.picture[1])})", ""] if report.picture else []
    lines += _tables(report.details)
    lines += [f"- {plain(note)}" for note in report.notes]
    lines += ["", "| | |", "|---|---|"]
    lines += [f"| {plain(k)} | {plain(v)} |" for k, v in [*report.settings.items(), *report.facts.items()]]
    lines += ["", "Each row as a command:"] if report.commands else []
    commands = [command for _, command in report.commands] or [report.command]
    return "\n".join([*lines, "", "```text", *map(_code, commands), "```", ""])


def _tables(tables: Sequence[Table]) -> list[str]:
    lines: list[str] = []
    for table in tables:
        if "markdown" in table.on and table.lines:
            lines += [f"## {plain(table.title)}", ""] if table.title else []
            marks = ("---:" if head.kind == "n" else "---" for head in table.heads)
            rows = [[plain(head.text) for head in table.heads], list(marks)]
            rows += [
                [_markdown_cell(cell) for _, cell in zip(table.heads, line.cells, strict=False)]
                for line in table.lines
            ]
            lines += [*("| " + " | ".join(row) + " |" for row in rows), ""]
    return lines


def _markdown_cell(cell: str | Cell) -> str:
    text = plain(_text(cell))
    return f"[{text}]({_link(cell.link)})" if isinstance(cell, Cell) and cell.link else text


def plain(text: object) -> str:
    """Escape text so that Markdown shows it as it is: no markup, no HTML, no new cell or line."""
    line = printable_lines(str(text)).replace("\n", " ")
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~$!#])", r"\\\1", line)


def _code(text: str) -> str:
    return printable_lines(text).replace("\n", " ").replace("`", "'")


def _link(path: str) -> str:
    """Keep what our own relative paths are made of: letters, digits, dots, dashes and slashes."""
    return re.sub(r"[^A-Za-z0-9._/-]", "-", path)


# --- the page -----------------------------------------------------------------------------------------------


def page(report: Report) -> str:
    """Build the page: one file without script, style sheet or image from elsewhere."""
    return _environment().get_template("report.html.j2").render(report=report)


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def printable(value: object) -> object:
        # Runs on every expression, before jinja's own escaping of what is no Markup.
        return value if isinstance(value, Markup) else printable_lines(str(value))

    return Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=printable,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
