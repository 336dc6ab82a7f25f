"""Overlaid curves by matplotlib: as an <svg> element for a page, and as a PNG."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.common_errors import missing_package
from lockstep.errors import ConfigError
from lockstep.observe.text import printable_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
"""Okabe and Ito's, which colour-blind people can tell apart; the first is the reference's."""
_LOG_FLOOR = 1e-9
"""The value at which a difference of 0 is drawn on a logarithmic scale."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One line."""

    name: str
    steps: Sequence[float]
    values: Sequence[float]
    """Not finite: a gap."""
    colour: str
    dashed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """Curves over one pair of axes."""

    title: str
    curves: Sequence[Curve]
    log: bool = False
    """Values below 1e-9 are drawn there."""


def svg(panels: Sequence[Panel]) -> str:
    """Draw the panels under each other as an <svg> element that loads nothing."""
    with _drawn(panels, "") as figure:
        stream = io.StringIO()
        # Text stays text, and ids are the same each time.
        figure.savefig(
            stream, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    # Within HTML an <svg> needs neither the XML declaration nor the names of its namespaces.
    return re.sub(r' xmlns(:xlink)?="[^"]*"', "", stream.getvalue()[stream.getvalue().index("<svg") :])


def write_png(panels: Sequence[Panel], path: Path, *, title: str = "") -> None:
    """Draw the panels under each other.

    Raises:
        ConfigError: the file cannot be written.
    """
    with _drawn(panels, title) as figure:
        try:
            figure.savefig(path, dpi=110, format="png")
        except OSError as error:
            raise ConfigError(
                f"cannot-write: {path} cannot be written ({error.strerror}); choose another file"
            ) from error


@contextmanager
def _drawn(panels: Sequence[Panel], title: str) -> Iterator[Figure]:
    try:
        from matplotlib import rc_context
    except ImportError as error:
        raise missing_package("drawing curves", "matplotlib", extra="plots", cause=error) from error
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    # parse_math: names are text that somebody else wrote, also where they hold a dollar.
    with rc_context({"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "lockstep"}):
        figure = Figure(figsize=(8, 2.9 * len(panels)), layout="constrained")
        rows = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        for axis, panel in zip(rows, panels, strict=True):
            for curve in panel.curves:
                axis.plot(
                    list(curve.steps),
                    [max(v, _LOG_FLOOR) if panel.log and math.isfinite(v) else v for v in curve.values],
                    color=curve.colour,
                    linestyle="--" if curve.dashed else "-",
                    linewidth=1.5,
                    marker="." if len(curve.values) == 1 else None,
                    label=_plain(curve.name),
                )
            if panel.log:
                axis.set_yscale("log")
            axis.set_title(_plain(panel.title), fontsize=10, loc="left")
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            axis.grid(alpha=0.2)
            axis.spines[["top", "right"]].set_visible(False)
            if panel.curves:
                axis.legend(frameon=False, fontsize=8)
        rows[-1].set_xlabel("step", fontsize=9)
        if title:
            figure.suptitle(_plain(title), fontsize=11)
        yield figure


def _plain(text: str) -> str:
    return printable_lines(text).replace("\n", " ")
