"""Runs as one HTML file: the pages of the server, with styles, script and data inside."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from lockstep.observe.files import check_writable, write_atomic
from lockstep.view.render import STATIC, Site, address, names_of, smoothing, template
from lockstep.view.rollouts import RolloutQuery
from lockstep.view.runs import RunReader

MOST_ROLLOUTS = 50
"""Of each run: the groups of the first of its last step that has rollouts."""
POINTS = 600
"""Of each metric."""
Pages = dict[str, Callable[[], str]]
"""Path of a page on the server -> what renders its section."""


def write(paths: Sequence[Path], file: Path) -> str:
    """Write the pages of the runs to `file`; return a line that says what it holds.

    Raises:
        ConfigError: `file` cannot be written.
        DataError: there is no run.
    """
    check_writable(file, flag="--export")
    pages: Pages = {}
    with contextlib.closing(Site(paths)) as site:
        readers = site.runs()
        if len(readers) > 1:
            pages[address()] = lambda: site.home(query={})
            pages[address("compare")] = lambda: site.compare(list(readers))
        held = sum(_add(pages, site, run, reader) for run, reader in readers.items())
        site.exported = frozenset(pages)
        sections = [show() for show in pages.values()]
        curves = {run: {x: _curves(reader, x) for x in ("step", "time")} for run, reader in readers.items()}
    write_atomic(file, _file(sections, {"curves": curves}))
    runs = "1 run" if len(readers) == 1 else f"{len(readers)} runs"
    return (
        f"view: {file}, {file.stat().st_size / 2**20:.1f} MiB: {runs}, {held} rollouts (the groups of "
        f"the first {MOST_ROLLOUTS} of each run's last step), curves of at most {POINTS} points"
    )


def _add(pages: Pages, site: Site, run: str, reader: RunReader) -> int:
    """Add the pages of a run; return how many rollouts they hold."""
    pages[address("run", run)] = lambda: site.curves(run, query={})
    pages[address("run", run, "step")] = lambda: site.step(run, query={})
    pages[address("run", run, "about")] = lambda: site.about(run, query={})
    last = max(reader.rollouts.steps(), default=-1)
    asked = {"first_step": str(last), "last_step": str(last), "limit": str(MOST_ROLLOUTS)}
    pages[address("run", run, "rollouts")] = lambda: site.rollouts(run, query=asked)
    shown = reader.rollouts.page(RolloutQuery(first_step=last, last_step=last, limit=MOST_ROLLOUTS)).rollouts
    groups = dict.fromkeys((one.step, one.prompt_index) for one in shown)
    for step, prompt in groups:
        path = address("run", run, "rollouts", step, prompt)
        pages[path] = lambda step=step, prompt=prompt: site.group(run, step, prompt, query={})  # type: ignore[misc]
    return sum(len(reader.rollouts.group(*each)) for each in groups)


def _curves(reader: RunReader, x: Any) -> dict[str, Any]:
    smooth = smoothing([reader])
    return reader.curves().json(names_of(reader), x=x, points=POINTS, smooth=smooth)


def _file(sections: Sequence[str], data: Any) -> str:
    """One page, which may load nothing: its policy names its own style and script by their hashes."""
    style, script = _static("uplot/uPlot.min.css", "view.css"), _static("uplot/uPlot.iife.min.js", "view.js")
    # Inside a script element, only "<" can begin what ends it.
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return template("export").render(
        policy=f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'",
        style=Markup(style),
        script=Markup(script),
        data=Markup(text),
        sections=Markup("\n".join(sections)),
        exported=True,
    )


def _static(*names: str) -> str:
    return "\n".join((STATIC / name).read_text(encoding="utf-8") for name in names)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
