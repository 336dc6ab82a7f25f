"""The matrix as one page: no script, no style sheet, no image from elsewhere; logs by relative links.

Everything that comes from a model, a recording or an error is text that somebody else wrote: it passes
through `_text` on its way into the page, and the page's policy lets nothing be loaded or run.
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
from lockstep.observe.files import write_atomic
from lockstep.observe.text import printable_lines

STYLE = """
:root { color-scheme: light dark; --bg: #fff; --fg: #1b1f24; --dim: #59636e; --line: #d8dee4; --head: #f4f6f8;
  --good: #116329; --bad: #b42318; --warn: #8a5a00; --bar: #b6d4f0; --bad-bg: #fdf0ee; --code: #f4f6f8; }
@media (prefers-color-scheme: dark) { :root { --bg: #12161b; --fg: #e6e9ec; --dim: #9aa4af; --line: #313942;
  --head: #1b2128; --good: #6cc686; --bad: #ff8a7d; --warn: #e0b050; --bar: #1f4d78; --bad-bg: #2c1a19;
  --code: #1b2128; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 96rem; background: var(--bg); color: var(--fg);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.35rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p { margin: .4rem 0; max-width: 60rem; overflow-wrap: anywhere; }
.verdict { font-weight: 600; } .good { color: var(--good); } .bad { color: var(--bad); }
.warn { color: var(--warn); } .dim { color: var(--dim); }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .87rem; width: 100%; }
th, td { padding: .35rem .6rem; border-bottom: 1px solid var(--line); text-align: left; white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
thead th { background: var(--head); font-weight: 600; vertical-align: bottom; }
td.n, th.n { text-align: right; }
td.name { position: sticky; left: 0; background: var(--bg); font-weight: 500; }
thead th:first-child { position: sticky; left: 0; }
tr.broken td { background: var(--bad-bg); }
.bar { display: inline-block; width: 5rem; height: .6rem; margin-left: .5rem; vertical-align: baseline; }
.bar i { display: block; height: 100%; background: var(--bar); border-radius: 2px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: .5rem 0; }
dt { color: var(--dim); } dd { margin: 0; overflow-wrap: anywhere; }
code, pre { font: .85em/1.5 ui-monospace, monospace; background: var(--code); border-radius: 4px; }
code { padding: .1em .3em; overflow-wrap: anywhere; }
pre { padding: .7rem; margin: .4rem 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.problem { border-left: 3px solid var(--bad); padding-left: .8rem; margin: 1rem 0; }
.problem.warned { border-color: var(--warn); }
a { color: inherit; }
summary { margin: 2rem 0 .5rem; font-size: 1.05rem; font-weight: 600; cursor: pointer; }
@media (max-width: 40rem) { body { padding: 1rem .6rem 2rem; } td.name, thead th:first-child
  { white-space: normal; min-width: 8rem; } dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin-bottom: .4rem; } }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def write_html(result: MatrixResult, path: Path) -> None:
    """Write the page."""
    write_atomic(path, page(result))


def page(result: MatrixResult) -> str:
    """The whole document."""
    title = f"Compatibility matrix: {_text(result.recording.get('path', ''))}"
    tone = "good" if result.ok else "bad" if result.complete else "warn"
    unfinished = "" if result.complete else '<p class="warn">Not complete: cells are still to be run.</p>'
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{title}</h1>
<p class="verdict {tone}">{_text(result.verdict)}</p>
{unfinished}
<h2>Does it work, and how fast?</h2>
{_table(result, "speed")}
<h2>Does it compute the same?</h2>
{_table(result, "numbers")}
{_notes(result)}
{_problems(result)}
<h2>Made with</h2>
<dl>{"".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in conditions(result))}</dl>
<details><summary>Each cell as a command</summary>
{"".join(f"<p>{_text(c.name)}</p><pre>{_text(c.command)}</pre>" for c in result.cells)}
</details>
</body>
</html>
"""


def _table(result: MatrixResult, part: str) -> str:
    shown = [column for column in columns() if column.part == part]
    heads = ["<th>cell</th>", f"<th>{'works' if part == 'speed' else 'agrees'}</th>"]
    heads += [f'<th class="n">{_text(column.head)}</th>' for column in shown]
    rows = "\n".join(_row(result, cell, part) for cell in result.cells)
    return f"""<div class="scroll"><table>
<thead><tr>{"".join(heads)}<th>log</th></tr></thead>
<tbody>
{rows}
</tbody></table></div>"""


def _row(result: MatrixResult, cell: CellResult, part: str) -> str:
    word = cell.status if part == "speed" else agreement(cell)
    cells = [f'<td class="name">{_text(cell.name)}</td>', f'<td class="{_tone(cell)}">{_text(word)}</td>']
    for column in (column for column in columns() if column.part == part):
        shown = column.text(result, cell)
        bar = _bar(result, cell) if column.head == "tokens/s" and shown != NOTHING else ""
        cells.append(f'<td class="n">{_text(shown)}{bar}</td>')
    cells.append(f"<td>{_log(cell)}</td>")
    return f"<tr{' class=broken' if cell.fails else ''}>{''.join(cells)}</tr>"


def _bar(result: MatrixResult, cell: CellResult) -> str:
    return f'<span class="bar"><i style="width:{100 * bar_share(result, cell):.0f}%"></i></span>'


def _notes(result: MatrixResult) -> str:
    lines = [f"{mark} {text}" if mark != "-" else text for mark, text in footnotes(result)]
    lines.append(limits_text(result))
    return "".join(f'<p class="dim">{_text(line)}</p>' for line in lines)


def _problems(result: MatrixResult) -> str:
    blocks = []
    for cell, why in problems(result):
        log = f"<p>{_log(cell)}</p>" if cell.log else ""
        warned = "" if cell.fails else " warned"
        blocks.append(
            f'<div class="problem{warned}"><p><strong>{_text(cell.name)}</strong></p><p>{_text(why)}</p>'
            f"<pre>{_text(cell.command)}</pre>{log}</div>"
        )
    return f"<h2>What to look at</h2>{''.join(blocks)}" if blocks else ""


def _tone(cell: CellResult) -> str:
    if cell.fails:
        return "bad"
    return "good" if cell.works else "warn"


def _log(cell: CellResult) -> str:
    return f'<a href="{escape(quote(cell.log), quote=True)}">log</a>' if cell.log else ""


def _text(value: object) -> str:
    return escape(printable_lines(str(value)), quote=True)
