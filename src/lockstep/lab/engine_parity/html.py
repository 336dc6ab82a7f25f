"""A comparison of engines as one page: no script, no style sheet and no image from elsewhere.

Completions are text that a model wrote: everything passes through `escaped` on its way into the page, and the
page's policy lets nothing be loaded or run.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.lab.engine_parity.compare import BAR_NAMES
from lockstep.lab.engine_parity.phase import PhaseReport
from lockstep.lab.engine_parity.result import EngineResult, EnginesResult
from lockstep.lab.engine_parity.text import (
    COLUMNS,
    DIVERGENCE_HEADS,
    EXAMPLE_HEADS,
    NOTHING,
    PARTS,
    cell,
    divergences,
    example_cells,
    explanation,
    lines_of,
    problems,
    versions_of,
)
from lockstep.lab.suite.html import document, escaped

_STYLE = """
.bars { display: flex; align-items: flex-end; gap: 3px; height: 7rem; margin: .5rem 0 1.6rem; }
.bars div { flex: 1; max-width: 4.5rem; display: flex; flex-direction: column; justify-content: flex-end;
  height: 100%; text-align: center; font-size: .72rem; color: var(--dim); }
.bars i { display: block; background: var(--bar); border-radius: 2px 2px 0 0; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(22rem, 1fr)); gap: 0 2rem; }
.figures h3 { font-size: .9rem; margin: .6rem 0 0; }
td.answer { white-space: pre-wrap; overflow-wrap: anywhere; min-width: 16rem; }
td.ids { white-space: normal; min-width: 12rem; font-family: ui-monospace, monospace; font-size: .8rem; }
"""


def page(result: EnginesResult) -> str:
    """Build the whole page."""
    title = f"Engines: {result.settings.get('model', '')}"
    tone = "good" if result.ok else "bad"
    facts = [*result.settings.items(), *result.machine.items(), *versions_of(result)]
    notes = "".join(f'<p class="dim">{escaped(note)}</p>' for note in (*result.notes, explanation(result)))
    body = f"""<p class="verdict {tone}">{escaped(result.verdict)}</p>
{"".join(_figures(result, part) for part in PARTS)}
{_problems(result)}
{_histograms(result)}
{_divergences(result)}
{_examples(result)}
{notes}
<h2>Made with</h2>
<dl>{"".join(f"<dt>{escaped(name)}</dt><dd>{escaped(value)}</dd>" for name, value in facts)}</dl>
<pre>{escaped(result.command)}</pre>"""
    return document(title, body, _STYLE)


def _figures(result: EnginesResult, part: str) -> str:
    part_columns = [column for column in COLUMNS if column.part == part]
    heads = ("engine", "verdict", "phase", *(column.head for column in part_columns))
    rows = []
    for engine, phase in lines_of(result):
        phase_name = NOTHING if phase is None else phase.phase
        figures = "".join(
            f'<td class="n">{escaped(cell(column, engine, phase))}</td>' for column in part_columns
        )
        rows.append(
            _row(
                engine,
                f'<td class="{_tone(engine)}">{escaped(engine.verdict)}</td>'
                f"<td>{escaped(phase_name)}</td>{figures}",
            )
        )
    return _table(heads, rows, text_columns=3) + "<p></p>"


def _row(engine: EngineResult, cells: str) -> str:
    broken = "" if engine.ok else " class=broken"
    return f'<tr{broken}><td class="name">{escaped(engine.name)}</td>{cells}</tr>'


def _tone(engine: EngineResult) -> str:
    return "good" if engine.ok else "bad" if engine.status == "ok" else "warn"


def _table(heads: Sequence[str], rows: Sequence[str], *, text_columns: int) -> str:
    """The first `text_columns` columns hold text, the others numbers."""
    cells = "".join(
        f"<th{' class=n' if index >= text_columns else ''}>{escaped(head)}</th>"
        for index, head in enumerate(heads)
    )
    body = "\n".join(rows)
    return f"""<div class="scroll"><table>
<thead><tr>{cells}</tr></thead>
<tbody>
{body}
</tbody></table></div>"""


def _problems(result: EnginesResult) -> str:
    blocks = "".join(
        f'<div class="problem"><p><strong>{escaped(name)}</strong></p><p>{escaped(why)}</p></div>'
        for name, why in problems(result)
    )
    return f"<h2>What did not pass</h2>{blocks}" if blocks else ""


def _histograms(result: EnginesResult) -> str:
    figures = "".join(
        f"<div><h3>{escaped(engine.name)}, {escaped(phase.phase)}</h3>{_bars(phase)}</div>"
        for engine, phase in lines_of(result)
        if phase is not None and phase.gap is not None
    )
    if not figures:
        return ""
    return (
        "<h2>Sizes of the logprob gaps: tokens with a gap from so many nats on</h2>"
        f'<div class="figures">{figures}</div>'
    )


def _bars(phase: PhaseReport) -> str:
    assert phase.gap is not None
    most = max(phase.gap.histogram) or 1
    return '<div class="bars">{}</div>'.format(
        "".join(
            f'<div title="{count} tokens">{count or ""}<i style="height:{4.5 * count / most:.2f}rem"></i>'
            f"{escaped(name)}</div>"
            for name, count in zip(BAR_NAMES, phase.gap.histogram, strict=True)
        )
    )


def _divergences(result: EnginesResult) -> str:
    table = divergences(result)
    if not table:
        return ""
    rows = [
        "<tr>"
        + "".join(
            f"<td{' class=n' if index > 1 else ''}>{escaped(text)}</td>" for index, text in enumerate(row)
        )
        + "</tr>"
        for row in table
    ]
    return "<h2>Where greedy completions part</h2>" + _table(DIVERGENCE_HEADS, rows, text_columns=2)


def _examples(result: EnginesResult) -> str:
    rows = []
    for engine, phase in lines_of(result):
        for example in () if phase is None else phase.examples:
            assert phase is not None
            _, when, prompt, read_ids, completion_ids, finish = example_cells(engine, phase, example)
            text = NOTHING if example.text is None else example.text
            rows.append(
                _row(
                    engine,
                    f"<td>{escaped(when)}</td><td>{escaped(prompt)}</td>"
                    f'<td class="ids">{escaped(read_ids)}</td><td class="ids">{escaped(completion_ids)}</td>'
                    f'<td>{escaped(finish)}</td><td class="answer">{escaped(text)}</td>',
                )
            )
    if not rows:
        return ""
    heads = (*EXAMPLE_HEADS, "text")
    table = _table(heads, rows, text_columns=len(heads))
    return f"<details><summary>Ids and texts of greedy completions</summary>{table}</details>"
