"""The matrix as one page: no script, no style sheet, no image from elsewhere; logs by relative links.

Everything that comes from a model, a recording or an error is text that somebody else wrote: it passes
through `escaped` on its way into the page, and the page's policy lets nothing be loaded or run.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from urllib.parse import quote

from lockstep.lab.matrix.result import CellResult, MatrixResult
from lockstep.lab.matrix.text import (
    NOTHING,
    agreement,
    bar_share,
    columns,
    conditions,
    footnotes,
    limits_text,
    problems,
)
from lockstep.lab.suite.html import document, escaped
from lockstep.observe.files import write_atomic


def write_html(result: MatrixResult, path: Path) -> None:
    """Write the page."""
    write_atomic(path, page(result))


def page(result: MatrixResult) -> str:
    """Build the whole page."""
    title = f"Compatibility matrix: {result.recording.get('path', '')}"
    tone = "good" if result.ok else "bad" if result.complete else "warn"
    unfinished = "" if result.complete else '<p class="warn">Not complete: cells are still to be run.</p>'
    body = f"""<p class="verdict {tone}">{escaped(result.verdict)}</p>
{unfinished}
<h2>Does it work, and how fast?</h2>
{_table(result, "speed")}
<h2>Does it compute the same?</h2>
{_table(result, "numbers")}
{_notes(result)}
{_problems(result)}
<h2>Made with</h2>
<dl>{"".join(f"<dt>{escaped(name)}</dt><dd>{escaped(value)}</dd>" for name, value in conditions(result))}</dl>
<details><summary>Each cell as a command</summary>
{"".join(f"<p>{escaped(c.name)}</p><pre>{escaped(c.command)}</pre>" for c in result.cells)}
</details>"""
    return document(title, body)


def _table(result: MatrixResult, part: str) -> str:
    part_columns = [column for column in columns() if column.part == part]
    heads = ["<th>cell</th>", f"<th>{'works' if part == 'speed' else 'agrees'}</th>"]
    heads += [f'<th class="n">{escaped(column.head)}</th>' for column in part_columns]
    rows = "\n".join(_row(result, cell, part) for cell in result.cells)
    return f"""<div class="scroll"><table>
<thead><tr>{"".join(heads)}<th>log</th></tr></thead>
<tbody>
{rows}
</tbody></table></div>"""


def _row(result: MatrixResult, cell: CellResult, part: str) -> str:
    word = cell.status if part == "speed" else agreement(cell)
    cells = [f'<td class="name">{escaped(cell.name)}</td>', f'<td class="{_tone(cell)}">{escaped(word)}</td>']
    for column in (column for column in columns() if column.part == part):
        text = column.text(result, cell)
        bar = _bar(result, cell) if column.head == "tokens/s" and text != NOTHING else ""
        cells.append(f'<td class="n">{escaped(text)}{bar}</td>')
    cells.append(f"<td>{_log(cell)}</td>")
    return f"<tr{' class=broken' if cell.fails else ''}>{''.join(cells)}</tr>"


def _bar(result: MatrixResult, cell: CellResult) -> str:
    return f'<span class="bar"><i style="width:{100 * bar_share(result, cell):.0f}%"></i></span>'


def _notes(result: MatrixResult) -> str:
    lines = [f"{mark} {text}" if mark != "-" else text for mark, text in footnotes(result)]
    lines.append(limits_text(result))
    return "".join(f'<p class="dim">{escaped(line)}</p>' for line in lines)


def _problems(result: MatrixResult) -> str:
    blocks = []
    for cell, why in problems(result):
        log = f"<p>{_log(cell)}</p>" if cell.log else ""
        warned = "" if cell.fails else " warned"
        blocks.append(
            f'<div class="problem{warned}"><p><strong>{escaped(cell.name)}</strong></p><p>{escaped(why)}</p>'
            f"<pre>{escaped(cell.command)}</pre>{log}</div>"
        )
    return f"<h2>What to look at</h2>{''.join(blocks)}" if blocks else ""


def _tone(cell: CellResult) -> str:
    if cell.fails:
        return "bad"
    return "good" if cell.works else "warn"


def _log(cell: CellResult) -> str:
    return f'<a href="{escape(quote(cell.log), quote=True)}">log</a>' if cell.log else ""
