"""Declarations of backends, engines, kernels and execution modes, beside their code, so that no central table
names one of them.

A declaration is a TOML file, `support.toml` in an implementation's package or `NAME_support.toml` beside its
module, in train/, engine/, attention/ or execution/. It says which axis and value it is of (`axis`, `name`,
and `place` among the axis's values) and holds rows of the support table: a row that does not restrict the
file's own axis is about the file's own value. `support.toml` beside this module has the rows that belong to
none. The fields of the classes below are the keys of a file.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from lockstep.config.base import Record
from lockstep.errors import ConfigError

Status = Literal["supported", "untested", "unsupported"]
AXIS_NAMES = ("backend", "engine", "attention", "execution", "layout", "device", "dtype")

_PACKAGES = ("train", "engine", "attention", "execution")
_SRC = Path(__file__).parents[1]


class Entry(Record):
    """One row of the table. An empty tuple matches every value of its axis."""

    status: Status
    backend: tuple[str, ...] = ()
    engine: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()
    execution: tuple[str, ...] = ()
    layout: tuple[str, ...] = ()
    device: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ()
    reason: str = ""
    """Why not, or what to know."""
    instead: str = ""
    """The nearest setting that works."""
    tested: str = ""
    """`ci-cpu:TEST` or `gpu:RESULT_FILE`; empty unless supported."""
    on: str = ""
    """Date, machine and versions of a GPU test, as in its result file."""

    @model_validator(mode="after")
    def _check(self) -> Entry:
        if self.status != "supported" and not self.reason:
            raise ValueError(f"a row with status {self.status} must give a reason")
        if self.status == "unsupported" and not self.instead:
            raise ValueError("a row with status unsupported must say what to set instead")
        if (self.status == "supported") != bool(self.tested):
            raise ValueError("a row must say where it was tested if its status is supported, and only then")
        return self

    def matches(self, cell: Mapping[str, str]) -> bool:
        """Return whether the entry covers `cell`; an axis that is missing in the cell is matched only by an
        empty tuple."""
        return all(_one_of(cell.get(axis), getattr(self, axis)) for axis in AXIS_NAMES)


class DoctorLine(Record):
    """A line of `lockstep doctor` about an implementation."""

    value: str = ""
    """The value that the line is about; empty: the file's own."""
    packages: tuple[str, ...] = ()
    """Distributions that it needs."""
    cpu_needs: tuple[Literal["cxx", "triton"], ...] = ()
    """Tools that it needs on a CPU: a C++ compiler, triton."""
    cuda_needs: tuple[Literal["cxx", "triton"], ...] = ()
    """On a GPU."""
    cpu: str = "built in"
    """The detail where it can be used, on a CPU; `{cxx}` and `{triton}` stand for what was found."""
    cuda: str = "built in"
    """On a GPU."""


class Declaration(Record):
    """One file."""

    axis: Literal["backend", "engine", "attention", "execution"] | None = None
    """None: of the rows that belong to no implementation."""
    name: str = ""
    """The value of the axis."""
    place: int = 0
    """Position of the value among those of its axis, in help texts and tables."""
    support: tuple[Entry, ...] = ()
    batch_invariant: tuple[Entry, ...] = ()
    """Combinations that train.batch_invariant = true rules out."""
    doctor: DoctorLine = DoctorLine()


class Refusal(Record):
    """Settings of a train backend that exclude each other."""

    when: dict[str, tuple[bool | int | str, ...]]
    """Setting of TrainConfig, or "lora" -> the values that are refused, all of them together."""
    error: str
    """The message: problem, reason, and what to set; `{NAME}` stands for the value of a setting."""

    def applies(self, values: Mapping[str, Any]) -> bool:
        """Return whether these settings are refused."""
        return all(values[name] in refused for name, refused in self.when.items())


class Stacks(Record):
    """A backend's names in `lockstep parity train`: see src/lockstep_lab/train_parity/stacks.py."""

    options: tuple[Literal["tp", "ring", "zero", "deepcompile"], ...] = ()
    """The options that not every backend has."""
    usual: tuple[str, ...] = ()
    """The backend's stacks in the usual suite, by their options; "": without one."""
    place: int = 0
    """Their position in it."""
    checked: tuple[str, ...] = ()
    """More stacks that `lockstep parity check` looks at."""
    plain: str = ""
    """An option that names of log files leave out."""
    skip: Literal["all", "plain"] = "all"
    """The stacks that the backend's name leaves out as a word of --skip: all, or the one without options."""


class BackendDeclaration(Declaration):
    """A train backend's file."""

    axis: Literal["backend"]
    object: str
    """`module:Class`."""
    spans_ranks: bool
    """False: it is one process on one device."""
    shards_weights: bool | dict[str, tuple[bool | int | str, ...]] = False
    """Whether no rank has whole weights between steps: always, never, or with these values of settings."""
    offloads: bool = False
    """It can offload its memory between calls (`offload` in the run file)."""
    reads: dict[str, str] = Field(default_factory=dict)
    """Setting of TrainConfig that not every backend reads -> why the others have no use for it."""
    refuses: tuple[Refusal, ...] = ()
    needs: dict[str, str] = Field(default_factory=dict)
    """Package that it cannot do without -> the command that installs it."""
    memory: str
    """`module:function` that counts the memory of one rank: see lockstep.train.memory."""
    stacks: Stacks = Stacks()
    replay: dict[str, int] | None = None
    """Fields of a replay cell that the axis `backend` of `lockstep matrix` sets; None: it cannot replay."""


class EngineDeclaration(Declaration):
    """An inference engine's file."""

    axis: Literal["engine"]
    object: str
    """`module:Class`, whose attribute `external` says the same as the one here."""
    external: bool
    """It has weights of its own, which are sent to it; not: it is embedded in the trainer's process."""
    keeps_bits: bool = False
    """Its logprobs can be the trainer's own, bit for bit."""
    keeps_cache: bool = False
    """Its KV cache, and its CUDA graphs, stay between rollouts."""
    settings: dict[str, tuple[str, ...]]
    """Where it may run ("embedded"; or "in process", "started", "at a url") -> settings of EngineConfig that
    have an effect there."""
    waiting_keys: dict[str, Literal["kept", "prefix cache", "recomputed"]]
    """Where it may run -> what becomes of the keys of a trajectory that waits for its environment. kept: they
    stay until others need their memory. prefix cache: the engine's own cache decides. recomputed: each turn
    computes its whole context."""
    pauses: tuple[str, ...] = ()
    """Where it can pause between two tokens."""
    partial_rollouts: tuple[str, ...] = ()
    """Where it can go on with samples that an earlier request began (rollout.max_lag)."""


class KernelDeclaration(Declaration):
    """An attention kernel's file."""

    axis: Literal["attention"]
    object: str = ""
    """`module:function`; empty for a name that stands for many."""
    mask: str = ""
    """`module:function` that makes the mask which layers share; empty: it needs none."""


@functools.cache
def declarations() -> tuple[Declaration, ...]:
    """Lockstep's own, read once. Raises ConfigError."""
    return read_declarations(_SRC)


def read_declarations(root: Path) -> tuple[Declaration, ...]:
    """Read every declaration below a folder that is laid out as src/lockstep is.

    Returns:
        The declarations, in the order of `place`.

    Raises:
        ConfigError: a file is wrong, two are of one value, or there is none: they are missing in this
            installation.
    """
    paths = [path for package in _PACKAGES for path in sorted(_files(root / package))]
    if not paths:
        raise ConfigError(
            f"no-such-file: {root} contains no support.toml, so this installation of lockstep lacks its "
            "data files; install it again"
        )
    of: dict[tuple[str | None, str], Path] = {}
    found = []
    for path in [*paths, root / "config" / "support.toml"]:
        declaration = _read(path)
        value = declaration.axis, declaration.name
        if value in of:
            raise ConfigError(
                f"duplicate: {of[value]} and {path} both describe {' '.join(map(str, value))}; keep one"
            )
        of[value] = path
        found.append(declaration)
    return tuple(sorted(found, key=lambda declaration: declaration.place))


def names(axis: str) -> tuple[str, ...]:
    """The declared values of an axis, in the order of `place`."""
    return tuple(declaration.name for declaration in declarations() if declaration.axis == axis)


def doctor_lines(axis: str) -> dict[str, DoctorLine]:
    """The values of an axis that `lockstep doctor` reports on. A name that stands for many is none of them,
    unless its line names one."""
    of = {d.name: d.doctor for d in declarations() if d.axis == axis}
    return {line.value or name: line for name, line in of.items() if line.value or ":" not in name}


def backends() -> dict[str, BackendDeclaration]:
    """Lockstep's own train backends by name."""
    return {d.name: d for d in declarations() if isinstance(d, BackendDeclaration)}


def engines() -> dict[str, EngineDeclaration]:
    """Lockstep's own inference engines by name."""
    return {d.name: d for d in declarations() if isinstance(d, EngineDeclaration)}


def kernels() -> dict[str, KernelDeclaration]:
    """Lockstep's own attention kernels by name."""
    return {d.name: d for d in declarations() if isinstance(d, KernelDeclaration) and d.object}


def rows_in_order(
    found: Iterable[Declaration],
    kind: Literal["support", "batch_invariant"],
    *,
    axes: Sequence[str | None],
) -> list[Entry]:
    """The rows of declarations, in the order in which they are tried.

    First by status, unsupported before supported before untested; then by the axis of the file that has the
    row, in the order of `axes` (None: of no implementation); then by `place`. Rows that several files of one
    axis have, alike but for the value of that axis, become one.
    """
    rows: dict[tuple[str | None, Entry], Entry] = {}
    for declaration in sorted(found, key=lambda declaration: axes.index(declaration.axis)):
        axis = declaration.axis
        for row in getattr(declaration, kind):
            if axis is None or getattr(row, axis):
                rows[declaration.name, row] = row
                continue
            before = rows.get((axis, row))
            values = (*(getattr(before, axis) if before else ()), declaration.name)
            rows[axis, row] = row.model_copy(update={axis: values})
    return by_status(rows.values())


def by_status(rows: Iterable[Entry]) -> list[Entry]:
    """`rows`, unsupported before supported before untested, else in their order."""
    return sorted(rows, key=lambda row: ("unsupported", "supported", "untested").index(row.status))


def own_rows(rows: Any, *, axis: str, name: str) -> list[Entry]:
    """The rows that an implementation of the user's declares in its attribute `support`: mappings with the
    keys of a row in our files.

    Args:
        axis, name: whose value of which axis they are about.

    Raises:
        ConfigError: a row is wrong.
    """
    try:
        own = [Entry.model_validate(row) for row in rows]
    except (ValidationError, TypeError) as error:
        raise ConfigError(
            f"wrong-part: {name!r}: its attribute `support` is not a list of rows: {error}"
        ) from error
    return [row.model_copy(update={axis: (name,)}) for row in own]


_KINDS: Mapping[str, type[Declaration]] = {
    "backend": BackendDeclaration,
    "engine": EngineDeclaration,
    "attention": KernelDeclaration,
}


def _files(package: Path) -> Iterator[Path]:
    yield from package.glob("*support.toml")
    yield from package.glob("*/*support.toml")


def _read(path: Path) -> Declaration:
    """Raises ConfigError."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        return _KINDS.get(str(data.get("axis")), Declaration).model_validate(data)
    except (OSError, tomllib.TOMLDecodeError, ValidationError) as error:
        raise ConfigError(f"wrong-field: {path}: {error}") from error


def _one_of(value: str | None, allowed: tuple[str, ...]) -> bool:
    if not allowed:
        return True
    if value is None:
        return False
    stands_for = "hf:NAME" if value.startswith("hf:") else "module:function" if ":" in value else value
    return value in allowed or stands_for in allowed
