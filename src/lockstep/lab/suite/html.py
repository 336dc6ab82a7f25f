"""The page that every suite writes: no script, no style sheet and no image from elsewhere.

What comes from a model, a recording or an error is text that somebody else wrote: it passes through
`escaped` on its way into a page, and the page's policy lets nothing be loaded or run.
"""

from __future__ import annotations

from html import escape

from lockstep.observe.text import printable_lines

_STYLE = """
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


def document(title: str, body: str, style: str = "") -> str:
    """The whole page.

    Args:
        title: plain text, for the title and the heading.
        body: HTML below the heading.
        style: CSS beside that of all pages.
    """
    heading = escaped(title)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{heading}</title>
<style>{_STYLE}{style}</style>
</head>
<body>
<h1>{heading}</h1>
{body}
</body>
</html>
"""


def escaped(value: object) -> str:
    """Any text as HTML that shows it: no markup, no control characters."""
    return escape(printable_lines(str(value)), quote=True)
