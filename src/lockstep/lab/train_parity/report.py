"""A parity run as a table for the terminal, parity.md, parity.html and parity.png."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lockstep.lab.loss_curves.differences import ratio, relative
from lockstep.lab.loss_curves.draw import COLOURS, SVG_STYLE, Curve, Panel, svg, write_png
from lockstep.lab.suite.html import document, escaped
from lockstep.lab.train_parity.job import Role
from lockstep.lab.train_parity.result import ParityResult, StackResult, by_name, row_name
from lockstep.observe.files import write_atomic, write_json
from lockstep.observe.text import printable_lines

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 110
NOTHING = "-"
_GIB = 1024**3


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One figure of a row."""

    head: str
    short: str
    """The head in the terminal."""
    part: Literal["numbers", "speed"]
    text: Callable[[StackResult], str]


def _of_spread(name: str, part: str, show: Callable[[float], str]) -> Callable[[StackResult], str]:
    def text(stack: StackResult) -> str:
        spread = None if stack.comparison is None else getattr(stack.comparison, name)
        return NOTHING if spread is None else show(getattr(spread, part))

    return text


def _optional(value: float | None, form: Callable[[float], str]) -> str:
    return NOTHING if value is None else form(value)


def _gradients(stack: StackResult) -> str:
    errors = stack.comparison.gradients if stack.comparison is not None else {}
    return f"{max(errors.values()):.1e}" if errors else NOTHING


def columns(result: ParityResult) -> tuple[Column, ...]:
    """All columns, in the order in which reports show them."""

    def nats(value: float) -> str:
        return f"{value:.1e}"

    all_columns = [
        Column(head="ranks", short="ranks", part="speed", text=lambda s: str(s.ranks or NOTHING)),
        Column(head="steps", short="steps", part="speed", text=lambda s: str(len(s.rows) or NOTHING)),
        Column(head="loss", short="loss", part="numbers", text=_trend),
        *_spread_columns("loss", "Δloss", "dloss", ratio),
        *_spread_columns("grad_norm", "Δgrad norm", "dnorm", ratio),
        *_spread_columns("logprob", "Δlogprob (nats)", "nats", nats),
        Column(head="gradient error", short="grad err", part="numbers", text=_gradients),
        Column(head="ms/step", short="ms/step", part="speed", text=_ms),
        Column(head="tokens/s", short="tokens/s", part="speed", text=_speed),
        Column(head="peak GiB", short="peak GiB", part="speed", text=_memory),
        Column(head="seconds", short="seconds", part="speed", text=_seconds),
    ]
    if all(_gradients(stack) == NOTHING for stack in result.stacks):
        all_columns = [column for column in all_columns if column.head != "gradient error"]
    return tuple(all_columns)


def _spread_columns(name: str, head: str, short: str, show: Callable[[float], str]) -> list[Column]:
    """The columns of the largest and the mean difference."""
    return [
        Column(
            head=f"{part} {head}",
            short=f"max {short}" if part == "max" else "mean",
            part="numbers",
            text=_of_spread(name, part, show),
        )
        for part in ("max", "mean")
    ]


def _ms(stack: StackResult) -> str:
    return _optional(stack.step_seconds, lambda x: f"{1000 * x:,.0f}")


def _speed(stack: StackResult) -> str:
    return _optional(stack.tokens_per_second, lambda x: f"{x:,.0f}")


def _memory(stack: StackResult) -> str:
    return _optional(stack.peak_memory_bytes, lambda x: f"{x / _GIB:.2f}")


def _seconds(stack: StackResult) -> str:
    return f"{stack.seconds:.0f}" if stack.seconds else NOTHING


def _trend(stack: StackResult) -> str:
    if stack.falls is None:
        return NOTHING
    words = {"falls": "falls", "does not fall": "not falling", "not shown": "not shown"}
    return words[stack.learning] if stack.learning is not None else NOTHING


def write_reports(result: ParityResult, out: Path) -> None:
    """Write parity.json, parity.md, parity.html and parity.png into `out`."""
    write_json(out / "parity.json", result.as_dict())
    write_atomic(out / "parity.md", markdown(result))
    write_atomic(out / "parity.html", page(result))
    if any(stack.rows for stack in result.stacks):
        write_png(panels(result), out / "parity.png", title=f"{result.settings.get('model', '')}")


def panels(result: ParityResult) -> list[Panel]:
    """The curves to draw: all losses, and their differences from the reference's, by role."""
    ran = [stack for stack in result.stacks if stack.rows]
    roles = dict.fromkeys(stack.role for stack in ran)
    return [panel for role in roles for panel in _panels([s for s in ran if s.role == role], result, role)]


def _panels(stacks: Sequence[StackResult], result: ParityResult, role: Role) -> list[Panel]:
    colours = {stack.name: COLOURS[i % len(COLOURS)] for i, stack in enumerate(stacks)}
    of_role = "" if role == "policy" else f" of the {role} model"
    losses = [
        Curve(
            name=f"{stack.name} ({stack.ranks} rank{'s' if stack.ranks > 1 else ''})",
            steps=[row.step for row in stack.rows],
            values=[row.loss for row in stack.rows],
            colour=colours[stack.name],
            dashed=not stack.is_reference and len(stacks) > 1,
        )
        for stack in stacks
    ]
    charts = [Panel(title=f"loss{of_role}", curves=losses)]
    reference = by_name(stacks, row_name(result.reference, role))
    if reference is not None:
        far = [
            Curve(
                name=stack.name,
                steps=[row.step for row, _ in zip(stack.rows, reference.rows, strict=False)],
                values=_distances(stack, reference),
                colour=colours[stack.name],
            )
            for stack in stacks
            if not stack.is_reference
        ]
        if far:
            title = f"relative loss difference{of_role} to {result.reference} (0 is drawn at 1e-9)"
            charts.append(Panel(title=title, curves=far, log=True))
    return charts


def _distances(stack: StackResult, reference: StackResult) -> list[float]:
    floor = 0.0 if stack.comparison is None else stack.comparison.loss_floor
    return [relative(a.loss, b.loss, floor=floor) for a, b in zip(stack.rows, reference.rows, strict=False)]


# --- the terminal -------------------------------------------------------------------------------------------


def progress_line(stack: StackResult, done: int, total: int) -> str:
    """Format a line about a stack that has just ended."""
    reasons = [*(stack.problems or filter(None, [stack.reason])), *filter(None, [stack.learning_problem])]
    why = f": {'; '.join(reasons)}" if reasons else ""
    far = "" if stack.comparison is None else f", losses within {ratio(stack.comparison.loss.max)}"
    seconds = f", {stack.seconds:.1f} s" if stack.seconds else ""
    return printable_lines(f"[{done}/{total}] {stack.name}: {stack.verdict}{far}{seconds}{why}")


def show(result: ParityResult, console: Console) -> None:
    """Print the table, then the settings and what did not pass."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    for part in ("numbers", "speed"):
        part_columns = [column for column in columns(result) if column.part == part]
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
        table.add_column("stack", overflow="fold", min_width=min(24, max(len(s.name) for s in result.stacks)))
        table.add_column("verdict", no_wrap=True)
        for column in part_columns:
            table.add_column(column.short, justify="right", no_wrap=True)
        for stack in result.stacks:
            cells = [Text(printable_lines(column.text(stack))) for column in part_columns]
            style = "red" if stack.problems or (result.must_fall and stack.learning_problem) else None
            table.add_row(Text(stack.name), Text(stack.verdict), *cells, style=style)
        console.print(table)
        console.print()
    for name, value in result.settings.items():
        console.print(Text(printable_lines(f"{name}: {value}")), soft_wrap=True)
    for line in (*result.notes, explanation(result)):
        console.print(Text(printable_lines(line)), soft_wrap=True)
    for name, problem in problems(result):
        console.print(Text(printable_lines(f"{name}: {problem}")), soft_wrap=True)


def explanation(result: ParityResult) -> str:
    """Explain what the differences in the table mean."""
    relative_to = (
        "a loss difference is relative to the reference's loss of that step"
        if result.algorithm not in ("grpo", "ppo")
        else "a loss difference is relative to the reference's loss of that step, or to the mean of its "
        "absolute losses where that is larger; falling is measured from the loss at the starting weights"
    )
    return (
        f"{relative_to}; a loss falls when the mean of its last 5 steps (of fewer than 10: of the last half) "
        "is below that of the first by more than 3 standard errors; times are medians without the first step"
    )


def problems(result: ParityResult) -> list[tuple[str, str]]:
    """(stack, why it does not agree, or that its loss does not fall)."""
    return [
        (stack.name, problem)
        for stack in result.stacks
        for problem in (*stack.problems, *filter(None, [stack.learning_problem]))
    ]


# --- Markdown -----------------------------------------------------------------------------------------------


def markdown(result: ParityResult) -> str:
    """Format parity.md: the table and everything needed to repeat it."""
    figures = columns(result)
    heads = ["stack", "verdict", *(column.head for column in figures)]
    lines = [
        f"# Parity: {_plain(result.settings.get('model', ''))}, {_plain(result.algorithm)}",
        "",
        f"**{_plain(result.verdict)}**",
        "",
        "| " + " | ".join(heads) + " |",
        "|---|---|" + "---:|" * len(figures),
    ]
    for stack in result.stacks:
        cells = [_plain(column.text(stack)) for column in figures]
        lines.append("| " + " | ".join([_plain(stack.name), _plain(stack.verdict), *cells]) + " |")
    lines.append("")
    if problems(result):
        lines += ["## What did not pass", ""]
        lines += [f"- **{_plain(name)}**: {_plain(why)}" for name, why in problems(result)]
        lines.append("")
    lines += ["![losses](parity.png)", ""] if any(stack.rows for stack in result.stacks) else []
    lines += [_plain(explanation(result)) + ".", ""]
    lines += [f"- {_plain(note)}" for note in result.notes]
    lines += ["", "| | |", "|---|---|"]
    lines += [
        f"| {_plain(k)} | {_plain(v)} |" for k, v in [*result.settings.items(), *result.machine.items()]
    ]
    command = printable_lines(result.command).replace("\n", " ").replace("```", "'''")
    return "\n".join([*lines, "", "```text", command, "```", ""])


def _plain(text: object) -> str:
    """Escape text so that Markdown shows it as it is: no markup, no HTML, no new cell or line."""
    line = printable_lines(str(text)).replace("\n", " ")
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~$!#])", r"\\\1", line)


# --- HTML ---------------------------------------------------------------------------------------------------


def page(result: ParityResult) -> str:
    """Build the whole page."""
    title = f"Parity: {result.settings.get('model', '')}, {result.algorithm}"
    tone = "good" if result.ok else "bad"
    figures = "".join(svg(panel) for panel in panels(result)) if any(s.rows for s in result.stacks) else ""
    facts = [*result.settings.items(), *result.machine.items()]
    notes = "".join(f'<p class="dim">{escaped(note)}</p>' for note in (*result.notes, explanation(result)))
    body = f"""<p class="verdict {tone}">{escaped(result.verdict)}</p>
{_table(result)}
{_problems(result)}
{figures}
{notes}
<h2>Made with</h2>
<dl>{"".join(f"<dt>{escaped(name)}</dt><dd>{escaped(value)}</dd>" for name, value in facts)}</dl>
<pre>{escaped(result.command)}</pre>"""
    return document(title, body, SVG_STYLE)


def _table(result: ParityResult) -> str:
    figures = columns(result)
    heads = "".join(f'<th class="n">{escaped(column.head)}</th>' for column in figures)
    rows = "\n".join(_row(stack, figures) for stack in result.stacks)
    return f"""<div class="scroll"><table>
<thead><tr><th>stack</th><th>verdict</th>{heads}</tr></thead>
<tbody>
{rows}
</tbody></table></div>"""


def _row(stack: StackResult, figures: Sequence[Column]) -> str:
    tone = "bad" if stack.problems else "good" if stack.completed else "warn"
    cells = "".join(f'<td class="n">{escaped(column.text(stack))}</td>' for column in figures)
    broken = " class=broken" if stack.problems else ""
    return (
        f'<tr{broken}><td class="name">{escaped(stack.name)}</td>'
        f'<td class="{tone}">{escaped(stack.verdict)}</td>{cells}</tr>'
    )


def _problems(result: ParityResult) -> str:
    blocks = "".join(
        f'<div class="problem"><p><strong>{escaped(name)}</strong></p><p>{escaped(why)}</p></div>'
        for name, why in problems(result)
    )
    return f"<h2>What did not pass</h2>{blocks}" if blocks else ""
