"""The cells of a matrix: axes, their values, and the fields of Cell that each value sets.

--axes flash,compile,packing                     axes by name, with their usual values
--axis attention=sdpa,varlen,hf:flash_attention_2    an axis with these values
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.config.declarations import backends
from lockstep.config.support import AXES as SUPPORT_AXES
from lockstep.config.support import is_kernel
from lockstep.errors import ConfigError, unknown_name
from lockstep_lab.replay.cell import Cell, check_cell

DEFAULT_AXES = ("flash", "compile", "packing")
"""The axes of a matrix by default: 8 cells."""
MAX_CELLS = 512
"""The most cells of a matrix: more are a mistake in the axes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisValue:
    """One value of one axis."""

    axis: str
    value: str
    """As the user writes it: "on", "varlen", "2"."""
    label: str
    """The value's part of a cell's name: "varlen", "packed", "2 layers"."""
    sets: Mapping[str, Any]
    """Field of Cell -> value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """An axis with the values that cells are made of."""

    name: str
    values: tuple[AxisValue, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixCell:
    """One cell of the matrix, or a reference cell."""

    name: str
    """ "varlen + compile + packed"; differs from cell to cell."""
    slug: str
    """The name of the cell's folder."""
    values: Mapping[str, str]
    """Axis -> value, as the user writes them; empty for a reference cell that no combination of values
    gives."""
    cell: Cell

    @property
    def flags(self) -> tuple[str, ...]:
        """The cell as flags of `lockstep replay`."""
        return tuple(self.cell.flags())


_Parse = Callable[[str], tuple[str, dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class _Kind:
    """What an axis sets, and the values that it takes."""

    field: str
    """The field of Cell that two axes must not both set."""
    parse: _Parse
    """Value -> (label, fields of Cell). Raises ValueError, whose text says what is expected."""
    usual: tuple[str, ...]
    help: str


def _off_or_on(field: str, off: tuple[str, Any], on: tuple[str, Any]) -> _Parse:
    """Each of the two as (label, value of the field)."""

    def parse(value: str) -> tuple[str, dict[str, Any]]:
        label, sets = on if _switch(value) else off
        return label, {field: sets}

    return parse


def _attention(value: str) -> tuple[str, dict[str, Any]]:
    if not is_kernel(value):
        raise ValueError(unknown_name("attention kernel", value, SUPPORT_AXES["attention"]))
    return value, {"attention": value}


def _one_of(field: str, *known: str) -> _Parse:
    def parse(value: str) -> tuple[str, dict[str, Any]]:
        if value not in known:
            raise ValueError(unknown_name(field.replace("_", " "), value, known))
        return value, {field: value}

    return parse


def _packing(value: str) -> tuple[str, dict[str, Any]]:
    layout = "shared" if value == "shared" else "packed" if _switch(value) else "padded"
    return layout, {"layout": layout}


def _padding_side(value: str) -> tuple[str, dict[str, Any]]:
    label, sets = _one_of("padding_side", "left", "right")(value)
    return f"padded {label}", sets


_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def _dtype(value: str) -> tuple[str, dict[str, Any]]:
    return _one_of("dtype", *SUPPORT_AXES["dtype"])(_DTYPES.get(value, value))


def _device(value: str) -> tuple[str, dict[str, Any]]:
    if re.fullmatch(r"cpu|cuda(:\d+)?", value) is None:
        raise ValueError(f"{value!r} is not a device; give cpu, cuda or cuda:N")
    return value, {"device": value}


_REPLAYS = {name: backend.replay for name, backend in backends().items() if backend.replay is not None}
"""Backend that replays -> the fields of Cell that it sets."""


def _backend(value: str) -> tuple[str, dict[str, Any]]:
    if value not in _REPLAYS:
        raise ValueError(unknown_name("replay backend", value, _REPLAYS))
    return value, {"zero_stage": None, **_REPLAYS[value]}


def _zero_stage(value: str) -> tuple[str, dict[str, Any]]:
    if value == "none":
        return "local", {"zero_stage": None}
    return f"ZeRO {value}", {"zero_stage": _whole(value, least=0, most=3)}


def _layers(value: str) -> tuple[str, dict[str, Any]]:
    if value == "all":
        return "all layers", {"num_layers": None}
    count = _whole(value, least=1)
    return f"{count} layer{'s' if count > 1 else ''}", {"num_layers": count}


def _ranks(value: str) -> tuple[str, dict[str, Any]]:
    count = _whole(value, least=1)
    return f"{count} rank{'s' if count > 1 else ''}", {"ranks": count}


def _model(value: str) -> tuple[str, dict[str, Any]]:
    if not value:
        raise ValueError("expected a model name, as for --model")
    return value, {"model": value}


_OFF_ON = ("off", "on")
_BACKEND_HELP = "; ".join(
    name + "".join(f" ({field} {value})" for field, value in fields.items())
    for name, fields in _REPLAYS.items()
).replace("_", " ")
_FLASH = _off_or_on("attention", ("sdpa", "sdpa"), ("varlen", "varlen"))
_COMPILE = _off_or_on("execution", ("eager", "eager"), ("compile", "compile"))
_EXECUTIONS = ("eager", "compile", "joint", "deepcompile")
_CHECKPOINTING = _off_or_on("activation_checkpointing", ("no checkpointing", False), ("checkpointing", True))
_INVARIANT = _off_or_on("batch_invariant", ("ordinary", False), ("batch-invariant", True))
_PACKING_HELP = "off: padded rows; on: one packed row; shared: and common prefixes computed once"
KINDS: dict[str, _Kind] = {
    "flash": _Kind("attention", _FLASH, _OFF_ON, "off: sdpa; on: varlen (flash kernels)"),
    "attention": _Kind("attention", _attention, ("sdpa", "varlen", "flex"), "sdpa, varlen, flex, hf:NAME"),
    "compile": _Kind("execution", _COMPILE, _OFF_ON, "off: eager; on: compile"),
    "execution": _Kind(
        "execution", _one_of("execution", *_EXECUTIONS), _EXECUTIONS[:2], ", ".join(_EXECUTIONS)
    ),
    "packing": _Kind("layout", _packing, _OFF_ON, _PACKING_HELP),
    "padding-side": _Kind("padding_side", _padding_side, ("right", "left"), "right, left"),
    "dtype": _Kind("dtype", _dtype, ("float32", "bfloat16"), "float32 (fp32), bfloat16 (bf16)"),
    "device": _Kind("device", _device, ("cpu", "cuda"), "cpu, cuda, cuda:N"),
    "backend": _Kind("zero_stage", _backend, tuple(_REPLAYS), _BACKEND_HELP),
    "zero-stage": _Kind("zero_stage", _zero_stage, ("0", "1", "2", "3"), "0 to 3; none: no DeepSpeed"),
    "layers": _Kind("num_layers", _layers, ("2", "all"), "a number of layers; all"),
    "activation-checkpointing": _Kind("activation_checkpointing", _CHECKPOINTING, _OFF_ON, "off, on"),
    "batch-invariant": _Kind("batch_invariant", _INVARIANT, _OFF_ON, "off, on"),
    "ranks": _Kind("ranks", _ranks, ("1", "2"), "processes of one replay"),
    "model": _Kind("model", _model, (), "as --model takes it"),
}
"""Every axis by name."""


def parse_axes(names: Sequence[str], *, axis_flags: Sequence[str] = ()) -> tuple[Axis, ...]:
    """Parse the axes of a matrix, in the order in which they are named.

    Args:
        names: axes with their usual values ("compile").
        given: axes with values of their own ("attention=sdpa,varlen"); one that `names` has too is taken
            from here. Without either: DEFAULT_AXES.

    Raises:
        ConfigError: an unknown axis or value, two axes that set the same thing, or more than MAX_CELLS cells.
    """
    values: dict[str, tuple[str, ...] | None] = dict.fromkeys(names)
    for text in axis_flags:
        name, equals, rest = text.partition("=")
        if not equals or not rest:
            raise ConfigError(
                f"wrong-format: --axis {text!r}: expected NAME=VALUE[,VALUE...], such as --axis layers=2,8"
            )
        if values.get(name) is not None:
            raise ConfigError(
                f"duplicate: --axis {name} is given twice; put all values in one --axis, separated by commas"
            )
        values[name] = tuple(value.strip() for value in rest.split(","))
    axes = tuple(_axis(name, own) for name, own in (values or dict.fromkeys(DEFAULT_AXES)).items())
    for one, other in itertools.combinations(axes, 2):
        same = KINDS[one.name].field
        if same == KINDS[other.name].field:
            raise ConfigError(
                f"contradiction: the axes {one.name} and {other.name} both set {same.replace('_', ' ')}; "
                "keep one",
                setting="--axis",
            )
    total = math.prod(len(axis.values) for axis in axes)
    if total > MAX_CELLS:
        raise ConfigError(
            f"too-large: these axes make {total} cells, more than {MAX_CELLS}; leave some values out",
            setting="--axis",
        )
    return axes


def settings(text: str, *, origin: str) -> dict[str, Any]:
    """Parse fields of Cell from "attention=sdpa packing=off dtype=float32" (spaces or commas between).

    Raises:
        ConfigError: not AXIS=VALUE, an unknown axis or value, or the same thing set twice.
    """
    fields: dict[str, Any] = {}
    for word in text.replace(",", " ").split():
        name, equals, value = word.partition("=")
        if not equals or not value:
            raise ConfigError(f"wrong-format: {origin} {word!r}: expected AXIS=VALUE, such as dtype=float32")
        sets = _axis(name, (value,)).values[0].sets
        twice = set(sets) & set(fields)
        if twice:
            raise ConfigError(
                f"duplicate: {origin} {text!r} sets {twice.pop().replace('_', ' ')} twice; set it once"
            )
        fields |= sets
    return fields


def make_cells(base: Cell, axes: Sequence[Axis]) -> tuple[MatrixCell, ...]:
    """Every combination of the axes' values on top of `base`, the last axis changing fastest."""
    cells: list[MatrixCell] = []
    used_slugs: set[str] = set()
    for combination in itertools.product(*(axis.values for axis in axes)):
        fields: dict[str, Any] = {}
        for value in combination:
            fields |= value.sets
        name = " + ".join(value.label for value in combination)
        cells.append(
            MatrixCell(
                name=name,
                slug=_unique(name, used_slugs),
                values={value.axis: value.value for value in combination},
                cell=replace(base, **fields),
            )
        )
    return tuple(cells)


def reference_cells(
    cells: Sequence[MatrixCell], reference: Cell
) -> tuple[tuple[MatrixCell, ...], dict[str, str]]:
    """Find the cells to compare with: a reference cell per model and number of layers.

    Cells of another model or depth compute another function, so each of those has a reference of its own.

    Returns:
        The reference cells that are not among the cells, and for every cell's name its reference's name.
    """
    used_slugs = {cell.slug for cell in cells}
    names = {tuple(cell.flags): cell.name for cell in cells}
    extra: list[MatrixCell] = []
    reference_of: dict[str, str] = {}
    several = len({(c.cell.model, c.cell.num_layers) for c in cells}) > 1
    for cell in cells:
        target = replace(reference, model=cell.cell.model, num_layers=cell.cell.num_layers)
        key = tuple(target.flags())
        if key not in names:
            depth = "" if target.num_layers is None else f", {target.num_layers} layers"
            model = "" if target.model is None else f", {target.model}"
            name = f"reference ({target.dtype}{model + depth if several else ''})"
            names[key] = name
            extra.append(MatrixCell(name=name, slug=_unique(name, used_slugs), values={}, cell=target))
        reference_of[cell.name] = names[key]
    return tuple(extra), reference_of


def refusal(cell: Cell) -> str | None:
    """Why a cell is refused before any process is started, and what to use instead: the support table refuses
    it, or this machine lacks the device. None: the cell may run."""
    try:
        check_cell(cell)
    except ConfigError as error:
        # The cause is the table's own sentence; around it is advice about replay's flags, which are no help
        # to who asked for a table of all of them.
        return str(error.__cause__ or error)
    return None


def _axis(name: str, values: Sequence[str] | None) -> Axis:
    if name not in KINDS:
        raise ConfigError(unknown_name("axis", name, KINDS), code="unknown-name", setting="--axis")
    kind = KINDS[name]
    chosen = tuple(dict.fromkeys(kind.usual if values is None else values))
    if not chosen:
        raise ConfigError(
            f"missing-setting: the axis {name} has no usual values; give some: --axis {name}=VALUE,VALUE"
        )
    axis_values = []
    for value in chosen:
        try:
            label, sets = kind.parse(value)
        except ValueError as error:
            raise ConfigError(f"wrong-format: axis {name}: {error}", setting="--axis") from error
        axis_values.append(AxisValue(axis=name, value=value, label=label, sets=sets))
    if len({value.label for value in axis_values}) < len(axis_values):
        raise ConfigError(
            f"duplicate: axis {name}: {', '.join(chosen)} name the same value twice", setting="--axis"
        )
    return Axis(name=name, values=tuple(axis_values))


def _switch(value: str) -> bool:
    if value not in ("on", "off"):
        raise ValueError(f"{value!r}: expected on or off")
    return value == "on"


def _whole(value: str, *, least: int, most: int | None = None) -> int:
    number = int(value) if value.isdecimal() else -1
    if number < least or (most is not None and number > most):
        span = f"from {least}" + (f" to {most}" if most is not None else "")
        raise ValueError(f"{value!r}: expected a whole number {span}")
    return number


def _unique(name: str, used: set[str]) -> str:
    """Return an unused folder name, of letters that every file system and shell accepts."""
    plain = re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.").lower()[:80] or "cell"
    slug = next(s for n in itertools.count(1) if (s := plain if n == 1 else f"{plain}-{n}") not in used)
    used.add(slug)
    return slug
