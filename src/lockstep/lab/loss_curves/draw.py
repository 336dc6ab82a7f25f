"""Overlaid curves as an inline SVG, and as a PNG by matplotlib or, where that is missing, by Pillow.

Names come from file names and logs that somebody else wrote: the SVG escapes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError
from lockstep.observe.text import printable_lines

COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
"""Okabe and Ito's, which colour-blind people can tell apart; the first is the reference's."""
_WIDTH, _HEIGHT = 720, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 12, 26, 30
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Axes:
    """The mapping of values to pixels."""

    x: tuple[float, float]
    y: tuple[float, float]
    log: bool
    width: int = _WIDTH
    height: int = _HEIGHT

    def at(self, step: float, value: float) -> tuple[float, float]:
        """(right, down), pixels."""
        return self.right(step), self.down(value)

    def right(self, step: float) -> float:
        return _LEFT + (step - self.x[0]) / (self.x[1] - self.x[0]) * (self.width - _LEFT - _RIGHT)

    def down(self, value: float) -> float:
        share = (_scaled(value, self.log) - self.y[0]) / (self.y[1] - self.y[0])
        return self.height - _BOTTOM - share * (self.height - _TOP - _BOTTOM)

    def ticks(self) -> list[tuple[float, str]]:
        """(value, label) on the y axis."""
        if not self.log:
            return [(value, f"{value:g}") for value in nice_ticks(*self.y)]
        first, last = math.ceil(self.y[0]), math.floor(self.y[1])
        step = max(1, (last - first + 4) // 5)
        return [(10.0**power, f"1e{power}") for power in range(first, last + 1, step)]


def nice_ticks(low: float, high: float, *, most: int = 6) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten within [low, high], at most `most`.

    Example:
        >>> nice_ticks(0.0, 10.0)
        [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(f * power for f in (1, 2, 5, 10, 20) if (high - low) / (f * power) <= most - 0.5)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def svg(panel: Panel) -> str:
    """One panel as an <svg> element, legend included; nothing in it is loaded or run."""
    axes = _axes(panel)
    parts = [f'<text x="{_LEFT}" y="16" class="title">{_text(panel.title)}</text>']
    for value, label in axes.ticks():
        y = axes.down(value)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_text(label)}</text>')
    for value in nice_ticks(*axes.x):
        x = axes.right(value)
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 10}" text-anchor="middle">{value:g}</text>')
    for curve in panel.curves:
        dash = ' stroke-dasharray="6 4"' if curve.dashed else ""
        for points in _pieces(curve, axes):
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f'<polyline points="{line}" stroke="{_text(curve.colour)}"{dash}/>')
    legend = "".join(
        f'<span><i style="background:{_text(curve.colour)}"></i>{_text(curve.name)}</span>'
        for curve in panel.curves
    )
    return (
        f'<figure class="curves"><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{_text(panel.title)}">{"".join(parts)}</svg><figcaption>{legend}</figcaption></figure>'
    )


SVG_STYLE = """
.curves { margin: .5rem 0 1rem; max-width: 60rem; }
.curves svg { width: 100%; height: auto; font: 11px system-ui, sans-serif; fill: currentColor; }
.curves .title { font-weight: 600; font-size: 12px; }
.curves .grid { stroke: currentColor; stroke-opacity: .15; }
.curves polyline { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.curves polyline[stroke="#000000"] { stroke: currentColor; }
.curves figcaption { display: flex; flex-wrap: wrap; gap: .2rem 1rem; font-size: .85rem; }
.curves i { display: inline-block; width: 1.2rem; height: .25rem; margin-right: .4rem;
  vertical-align: middle; }
"""
"""The style of the figures, for the page that contains them."""


def write_png(panels: Sequence[Panel], path: Path, *, title: str = "") -> str:
    """Draw the panels under each other; returns the name of the package that did it.

    Raises:
        ConfigError: neither matplotlib nor Pillow is installed, or the file cannot be written.
    """
    try:
        for name, paint in _PAINTERS.items():
            if _installed(name):
                paint(panels, path, title)
                return name
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); name another file") from error
    raise ConfigError(f"{path}: drawing needs matplotlib or Pillow; pip install matplotlib")


def _installed(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None


def _with_matplotlib(panels: Sequence[Panel], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(8, 2.9 * len(panels)), squeeze=False, constrained_layout=True
    )
    for axis, panel in zip(axes[:, 0], panels, strict=True):
        for curve in panel.curves:
            values = [_drawn(value, panel.log) for value in curve.values]
            axis.plot(
                list(curve.steps),
                values,
                color=curve.colour,
                linestyle="--" if curve.dashed else "-",
                linewidth=1.5,
                marker="." if len(values) == 1 else None,
                label=_plain(curve.name),
            )
        if panel.log:
            axis.set_yscale("log")
        axis.set_title(_plain(panel.title), fontsize=10, loc="left")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.2)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].legend(frameon=False, fontsize=8)
    axes[-1, 0].set_xlabel("step", fontsize=9)
    if title:
        figure.suptitle(_plain(title), fontsize=11)
    figure.savefig(path, dpi=110, format="png")
    pyplot.close(figure)


def _with_pillow(panels: Sequence[Panel], path: Path, title: str) -> None:
    from PIL import Image, ImageDraw

    head = 20 if title else 4
    legend = 18 * max((len(panel.curves) for panel in panels), default=0)
    image = Image.new("RGB", (_WIDTH, head + _HEIGHT * len(panels) + legend), "white")
    pen: Any = ImageDraw.Draw(image)
    if title:
        pen.text((_LEFT, 4), _ascii(title), fill="black")
    for number, panel in enumerate(panels):
        axes, below = _axes(panel), head + number * _HEIGHT
        pen.text((_LEFT, below + 6), _ascii(panel.title), fill="black")
        for value, label in axes.ticks():
            y = below + axes.down(value)
            pen.line([(_LEFT, y), (_WIDTH - _RIGHT, y)], fill="#dddddd")
            pen.text((4, y - 6), label, fill="black")
        for value in nice_ticks(*axes.x):
            pen.text((axes.right(value) - 6, below + _HEIGHT - 22), f"{value:g}", fill="black")
        for curve in panel.curves:
            for points in _pieces(curve, axes):
                pen.line([(x, below + y) for x, y in points], fill=curve.colour, width=2)
    longest: Panel = max(panels, key=lambda panel: len(panel.curves))
    for number, curve in enumerate(longest.curves):
        y = head + _HEIGHT * len(panels) + 18 * number
        pen.line([(_LEFT, y + 6), (_LEFT + 24, y + 6)], fill=curve.colour, width=3)
        pen.text((_LEFT + 32, y), _ascii(curve.name), fill="black")
    image.save(path, format="PNG")


_PAINTERS: dict[str, Callable[[Sequence[Panel], Path, str], None]] = {
    "matplotlib": _with_matplotlib,
    "PIL": _with_pillow,
}


def _axes(panel: Panel) -> _Axes:
    steps = [step for curve in panel.curves for step in curve.steps]
    values = [
        _scaled(value, panel.log) for curve in panel.curves for value in curve.values if math.isfinite(value)
    ]
    return _Axes(x=_range(steps, margin=0.0), y=_range(values, margin=0.05), log=panel.log)


def _range(values: Sequence[float], *, margin: float) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = (high - low) * margin or (0.0 if high > low else 0.5 * max(1e-6, abs(high)))
    return low - room, high + room


def _pieces(curve: Curve, axes: _Axes) -> Iterator[list[tuple[float, float]]]:
    """Points between gaps; a lone one is a short dash."""
    points: list[tuple[float, float]] = []
    for step, value in [*zip(curve.steps, curve.values, strict=True), (0.0, math.nan)]:
        if math.isfinite(value):
            points.append(axes.at(step, value))
        elif points:
            if len(points) == 1:
                points.append((points[0][0] + 3, points[0][1]))
            yield points
            points = []


def _scaled(value: float, log: bool) -> float:
    return math.log10(max(value, _LOG_FLOOR)) if log else value


def _drawn(value: float, log: bool) -> float:
    return max(value, _LOG_FLOOR) if log and math.isfinite(value) else value


def _text(value: str) -> str:
    return escape(printable_lines(value).replace("\n", " "), quote=True)


def _plain(text: str) -> str:
    """Escape dollars: matplotlib reads text between them as mathematics."""
    return printable_lines(text).replace("\n", " ").replace("$", r"\$")


def _ascii(text: str) -> str:
    """Keep only the letters that Pillow's own font has."""
    return printable_lines(text).replace("\n", " ").encode("ascii", "replace").decode()
