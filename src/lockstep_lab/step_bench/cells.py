"""The ways of taking an RL step that `lockstep bench step` compares.

--cells eager+hf,compile+native+invariant          by name: words joined by +, in any order
--execution eager,compile --engine hf,native       or every combination of these lists

Nothing here loads torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.config.declarations import backends, engines
from lockstep.errors import ConfigError, unknown_name

AXES: Mapping[str, tuple[str, ...]] = {
    "backend": tuple(backends()),
    "execution": ("eager", "compile", "joint"),
    "engine": tuple(name for name, engine in engines().items() if not engine.external),
    "invariant": ("off", "on"),
}
"""Axis -> values; the first is the default."""
AXIS_OF: Mapping[str, str] = {
    "train.backend": "backend",
    "train.execution": "execution",
    "train.batch_invariant": "invariant",
    "engine.name": "engine",
}
"""Dotted setting of a GRPO run -> the axis that decides it."""
INVARIANT = "invariant"
"""The word of a cell's name for invariant = on."""
MAX_CELLS = 32
"""The most cells: all of them are processes at the same time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchCell:
    """One way to take an RL step."""

    backend: str = "local"
    execution: str = "eager"
    engine: str = "hf"
    invariant: bool = False

    @property
    def name(self) -> str:
        """Such as `fsdp2+compile+native+invariant`; the backend is left out where it is local."""
        parts = [] if self.backend == "local" else [self.backend]
        return "+".join([*parts, self.execution, self.engine, *([INVARIANT] if self.invariant else [])])

    @property
    def slug(self) -> str:
        """The name of the cell's folder."""
        return self.name.replace("+", "-")

    def settings(self) -> dict[str, Any]:
        """Dotted setting of a GRPO run -> value."""
        return {setting: getattr(self, axis) for setting, axis in AXIS_OF.items()}


def parse_cell(text: str) -> BenchCell:
    """Parse a cell's name.

    Raises:
        ConfigError: an unknown word, or two words of one axis.

    Example:
        >>> parse_cell("native+compile").name
        'compile+native'
    """
    choices: dict[str, Any] = {}
    for word in text.strip().split("+"):
        axis = next((axis for axis, values in AXES.items() if word in values and axis != INVARIANT), None)
        if word == INVARIANT:
            axis = INVARIANT
        if axis is None:
            known = [*itertools.chain(*(v for axis, v in AXES.items() if axis != INVARIANT)), INVARIANT]
            raise ConfigError(
                f"unknown-name: cell {text!r}: {unknown_name('word', word, known)}", setting="--cells"
            )
        if axis in choices:
            raise ConfigError(
                f"duplicate: cell {text!r} names its {axis} twice; name it once", setting="--cells"
            )
        choices[axis] = True if axis == INVARIANT else word
    return BenchCell(**choices)


def parse_cells(text: str) -> list[BenchCell]:
    """Parse cells joined by commas, each once, in the order given. Raises ConfigError."""
    cells = [parse_cell(word) for word in text.split(",") if word.strip()]
    if not cells:
        raise ConfigError(f"empty: --cells {text!r} names no cell; give some like eager+hf,compile+native")
    return _checked(cells)


def product(lists: Mapping[str, str | None]) -> list[BenchCell]:
    """Every combination of the axes' values.

    Args:
        lists: axis -> values joined by commas; None: the first of `AXES`.

    Raises:
        ConfigError: an unknown value, or one that is named twice.
    """
    values = {axis: _values(axis, lists.get(axis)) for axis in AXES}
    cells = []
    for backend, execution, engine, invariant in itertools.product(*(values[axis] for axis in AXES)):
        cells.append(
            BenchCell(backend=backend, execution=execution, engine=engine, invariant=invariant == "on")
        )
    return _checked(cells)


def _values(axis: str, text: str | None) -> list[str]:
    if text is None:
        return [AXES[axis][0]]
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in AXES[axis]:
            raise ConfigError(f"unknown-name: --{axis}: {unknown_name('value', word, AXES[axis])}")
    if not words:
        raise ConfigError(f"empty: --{axis} {text!r} names nothing; choose from {', '.join(AXES[axis])}")
    return words


def _checked(cells: Sequence[BenchCell]) -> list[BenchCell]:
    names = [cell.name for cell in cells]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"duplicate: {', '.join(twice)} would be measured twice; name each cell once", setting="--cells"
        )
    if len(cells) > MAX_CELLS:
        raise ConfigError(
            f"too-large: {len(cells)} cells are more than {MAX_CELLS}; give fewer values, or use --cells"
        )
    return list(cells)
