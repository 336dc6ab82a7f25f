"""The support table: which settings may be combined. Validation, `lockstep support`, the parity tests and the
docs read it.

The rows stand in files beside the implementations that they are about: see config/declarations.py. A row
covers every cell (backend, engine, attention, execution, layout, device, dtype) that all its fields match.
The first row that matches a cell decides, and the last matches every cell. Unsupported rows come first, then
supported, then untested ones; rows of one status in the order of whose file they are in: an engine's, an
execution mode's, a backend's, nobody's, a kernel's.

    supported     a parity test covers it; `tested` says where it ran: `gpu:RESULT_FILE`, or `ci-cpu:TEST`, of
                  which `make test` runs the quick cells and `make test-all` every one
    untested      it may be used, no parity test has run with it, and start-up says so
    unsupported   refused, with `reason` and with what to set instead
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.common_errors import no_effect, unknown
from lockstep.config.base import is_module_path
from lockstep.config.declarations import (
    Entry,
    Refusal,
    backends,
    by_status,
    declarations,
    names,
    rows_in_order,
)
from lockstep.config.rules import refuse
from lockstep.config.train import WITHOUT_PLAN
from lockstep.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from lockstep.config.train import TrainConfig

AXES: dict[str, tuple[str, ...]] = {
    "backend": names("backend"),
    "engine": names("engine"),
    "attention": names("attention"),
    "execution": names("execution"),
    "layout": ("packed", "padded", "shared"),
    "device": ("cpu", "cuda"),
    "dtype": ("float32", "bfloat16", "float16"),
}
"""Every axis and its known values. `hf:NAME` stands for any implementation that transformers knows,
`module:function` for a kernel of the user's; an engine may also be a `module:Class`."""

_HF_KERNEL = re.compile(r"hf:\w+", re.ASCII)
"""No slash: transformers would load hf:OWNER/NAME as code from the hub."""

SETTINGS = {
    "backend": "train.backend",
    "engine": "engine.name",
    "attention": "train.attention",
    "execution": "train.execution",
    "layout": "train.layout",
    "device": "train.device",
    "dtype": "model.dtype",
}
"""The setting of each axis."""

TABLE: tuple[Entry, ...] = (
    *rows_in_order(declarations(), "support", axes=("engine", "execution", "backend", None, "attention")),
    Entry(status="untested", reason="no parity test covers this combination"),
)
"""Every row of the support table; the first that matches decides."""

BATCH_INVARIANT: tuple[Entry, ...] = tuple(
    rows_in_order(
        declarations(), "batch_invariant", axes=(None, "attention", "execution", "engine", "backend")
    )
)
"""Combinations that train.batch_invariant = true rules out. vllm and sglang have a mode of their own
(engine.batch_invariant): with them the gap is measured, but not promised to be 0."""


class RunAxes(Protocol):
    """The attributes of a run that check_support reads."""

    @property
    def train(self) -> TrainConfig: ...
    @property
    def model(self) -> HasDtype: ...
    @property
    def engine_name(self) -> str | None: ...


class HasDtype(Protocol):
    @property
    def dtype(self) -> str: ...


def lookup(cell: dict[str, str], *, own: Sequence[Entry] = ()) -> Entry:
    """Return the entry that decides about a cell. Where the cell lacks an axis, only entries without that
    axis match.

    Args:
        own: rows that implementations of the user's declare; they are tried before ours of the same status.
    """
    table = by_status([*own, *TABLE]) if own else TABLE
    return next(entry for entry in table if entry.matches(cell))  # the last matches every cell


def check_support(run: RunAxes) -> None:
    """Refuse, when a run is constructed, what cannot work on any machine.

    "auto" is not resolved yet: `check_device_support` checks again at start-up, when it is.

    Raises:
        ConfigError: unknown attention kernel or engine, or an unsupported combination.
    """
    named = _cell(run.train, dtype=run.model.dtype, engine=run.engine_name)
    cell = {axis: value for axis, value in named.items() if value != "auto"}
    _check_names(cell)
    for entry in TABLE:
        if entry.status == "unsupported" and entry.matches(cell):
            raise ConfigError(_refusal(entry, cell), code="unsupported-combination")
    if run.train.batch_invariant:
        _check_batch_invariant(run, cell)


def check_device_support(
    run: RunAxes,
    *,
    attention: str,
    device: str,
    dtype: str,
    batch_invariant: bool = False,
    own: Sequence[Entry] = (),
) -> Entry:
    """Check a run once every "auto" is resolved.

    Args:
        attention, device, dtype, batch_invariant: what "auto" and None resolved to, such as "varlen",
            "cuda:0", "bfloat16", True.
        own: rows that parts of the user's declare.

    Returns:
        The deciding entry, supported or untested, so that start-up can say which.

    Raises:
        ConfigError: an unsupported combination.
    """
    cell = _resolved_cell(run, attention=attention, device=device, dtype=dtype)
    _check_names(cell)
    entry = lookup(cell, own=own)
    if entry.status == "unsupported":
        raise ConfigError(_refusal(entry, cell), code="unsupported-combination")
    if batch_invariant:
        _check_batch_invariant(run, cell)
    return entry


def support_entry(
    run: RunAxes, *, attention: str, device: str, dtype: str, own: Sequence[Entry] = ()
) -> Entry:
    """Return the entry that decides about what `check_device_support` would check, and refuse nothing."""
    return lookup(_resolved_cell(run, attention=attention, device=device, dtype=dtype), own=own)


def _resolved_cell(run: RunAxes, *, attention: str, device: str, dtype: str) -> dict[str, str]:
    cell = _cell(run.train, dtype=dtype, engine=run.engine_name)
    cell |= {"attention": attention, "device": device.partition(":")[0]}
    for axis, usual in (
        ("backend", "local"),
        ("layout", "packed"),
        ("execution", "eager"),
    ):  # where nothing speaks for more
        if cell[axis] == "auto":
            cell[axis] = usual
    return {axis: value for axis, value in cell.items() if value != "auto"}


def _check_batch_invariant(run: RunAxes, cell: dict[str, str]) -> None:
    """Raises ConfigError."""
    if run.engine_name is None:
        cell = {axis: value for axis, value in cell.items() if axis != "engine"}
    for entry in BATCH_INVARIANT:
        if entry.matches(cell):
            raise ConfigError(
                "unsupported-combination: train.batch_invariant = true: " + _refusal(entry, cell)
            )


def shares_prompts(
    run: RunAxes, *, attention: str, device: str, dtype: str, own: Sequence[Entry] = ()
) -> bool:
    """Return whether train.layout = "auto" means shared, where a run has prompts to share: it has been tested
    with the run's other choices, and none of them excludes it.

    Args:
        attention, device, dtype: what "auto" resolved to.
        own: rows that parts of the user's declare.
    """
    chosen = {"attention": attention, "device": device.partition(":")[0], "layout": "shared"}
    cell = _cell(run.train, dtype=dtype, engine=run.engine_name)
    if lookup(cell | chosen, own=own).status != "supported":
        return False
    lora = getattr(run.model, "lora", None)
    return shared_refusal(run.train, lora_dropout=0.0 if lora is None else lora.dropout) is None


def support_rows(entries: Sequence[Entry] = TABLE) -> Iterator[dict[str, str]]:
    """Yield the rows of a table as text, for `lockstep support` and the docs: status, the axes ("any" where
    all match), notes."""
    for entry in entries:
        axes = {axis: ", ".join(getattr(entry, axis)) or "any" for axis in AXES}
        note = "; instead: ".join(filter(None, (entry.reason, entry.instead)))
        tested = " on ".join(filter(None, (entry.tested, entry.on)))
        yield {"status": entry.status, **axes, "note": note, "tested": tested}


def cells_tested_by(test: str) -> Iterator[dict[str, str]]:
    """Yield every cell that the test or result file `test` must cover; the parity tests are generated from
    them. The engine is named where it is not hf."""
    axes = ("backend", "attention", "execution", "layout", "device", "dtype")
    for entry in TABLE:
        if entry.tested == test:
            for engine, *values in itertools.product(
                entry.engine or ("hf",), *(getattr(entry, axis) for axis in axes)
            ):
                cell = dict(zip(axes, values, strict=True))
                if lookup(cell | {"engine": engine}) is entry:  # else an earlier entry decides
                    yield cell if engine == "hf" else cell | {"engine": engine}


def _cell(train: TrainConfig, *, dtype: str, engine: str | None) -> dict[str, str]:
    return {
        "backend": train.backend,
        "attention": train.attention,
        "execution": train.execution,
        "layout": train.layout,
        "device": train.device.partition(":")[0],
        "dtype": dtype,
        # A run without an engine is decided by its other axes; hf stands for "no constraint".
        "engine": engine or "hf",
    }


def _check_names(cell: dict[str, str]) -> None:
    attention = cell.get("attention", "sdpa")
    if not is_kernel(attention):
        raise unknown("attention kernel", attention, AXES["attention"], at="train.attention: ")
    engine = cell.get("engine", "hf")
    if engine not in AXES["engine"] and ":" not in engine:
        raise unknown("inference engine", engine, AXES["engine"], at="engine.name: ")


def is_kernel(name: str) -> bool:
    """Return whether `name` is an attention kernel of ours, `hf:NAME` or `module:function`."""
    if name.startswith("hf:"):
        return _HF_KERNEL.fullmatch(name) is not None
    return (name in AXES["attention"] and ":" not in name) or is_module_path(name)


def _named(entry: Entry, cell: dict[str, str]) -> dict[str, str]:
    """The settings that `entry` refuses, with their values."""
    named = [axis for axis in AXES if getattr(entry, axis)] or list(cell)
    return {SETTINGS[axis]: cell[axis] for axis in named if axis in cell}


def _refusal(entry: Entry, cell: dict[str, str]) -> str:
    chosen = ", ".join(f"{setting} = {value!r}" for setting, value in _named(entry, cell).items())
    instead = f"; set {entry.instead}" if entry.instead else ""
    return (
        f"{chosen} is not supported: {entry.reason}{instead} (`lockstep support` lists the supported "
        "combinations)"
    )


# Which settings a train backend supports; others are refused when a run is constructed.
#
# What depends on the model's sizes, the device or the number of ranks is refused when those are known.


def shards_weights(train: TrainConfig) -> bool:
    """Return whether weights are sharded between steps, so that no rank has whole ones."""
    backend = backends().get(train.backend)
    if backend is None or isinstance(backend.shards_weights, bool):
        return backend is not None and bool(backend.shards_weights)
    return all(getattr(train, name) in values for name, values in backend.shards_weights.items())


def check_backend(train: TrainConfig, *, lora: bool, lora_dropout: float = 0.0) -> None:
    """Raise ConfigError unless `train.backend` supports the other settings. What a `module:Class` reads and
    refuses is its own matter: see check_own_settings.

    Args:
        lora: whether the policy has LoRA layers.
        lora_dropout: of theirs, in training.

    Raises:
        ConfigError: what, why, and what to set.
    """
    backend = backends().get(train.backend)
    if backend is not None:
        _check_reads(train, backend.reads)
    refuse(train, "train")
    refuse(train, "train (joint graphs)")
    refuse(train, "train (batch-invariant)")
    refusal = shared_refusal(train, lora_dropout=lora_dropout) if train.layout == "shared" else None
    if refusal is not None:
        raise ConfigError(f"unsupported-combination: train.layout = 'shared': {refusal}")
    refuse(train, "train (ring)")
    refuse(train, "train (experts)")
    # What "auto" becomes is checked when it is known: see on_ranks.
    if train.backend != "auto" and (backend is None or backend.spans_ranks):
        refuse(train, "train (backends of several ranks)")
    _check_refused(train, backend.refuses if backend is not None else (), lora=lora)


def check_own_settings(train: TrainConfig, *, lora: bool, reads: Any, refuses: Any) -> None:
    """Check the settings of a run whose backend is a class of the user's.

    Args:
        reads: its attribute `reads`: the settings, among those that not every backend reads, that it does.
        refuses: its attribute `refuses`: mappings with the keys of lockstep.config.declarations.Refusal.

    Raises:
        ConfigError: a setting that it does not read, or one that it refuses; or the attributes hold something
            else.
    """
    what = f"train.backend = {train.backend!r}: its attributes reads and refuses"
    values = _values(train, lora=lora)
    try:
        read = tuple(reads)
        rows = [Refusal.model_validate(row) for row in refuses]
        for row in rows:
            row.error.format_map(values)
    except (ValueError, TypeError, LookupError) as error:
        raise ConfigError(f"wrong-part: {what} are invalid: {error}") from error
    for name in (*read, *(name for row in rows for name in row.when)):
        if name not in values:
            raise ConfigError(f"unknown-setting: {what}: {unknown_name('setting', str(name), values)}")
    _check_reads(train, read)
    _check_refused(train, rows, lora=lora)


def _check_reads(train: TrainConfig, reads: Collection[str]) -> None:
    """Raises ConfigError: a setting that other backends read."""
    for name, field in type(train).model_fields.items():
        readers = [backend for backend in backends().values() if name in backend.reads]
        value, default = getattr(train, name), field.default
        if readers and value not in (default, WITHOUT_PLAN.get(name, default)) and name not in reads:
            names = " or ".join(repr(backend.name) for backend in readers)
            why = f"with train.backend = {train.backend!r}: {readers[0].reads[name]}"
            fix = f"set train.backend = {names}, or leave train.{name} at {default!r}"
            raise no_effect(f"train.{name}", value, why, fix=fix)


def _check_refused(train: TrainConfig, refuses: Iterable[Refusal], *, lora: bool) -> None:
    """Raises ConfigError: what the backend declares as refused."""
    values = _values(train, lora=lora)
    for refusal in refuses:
        if refusal.applies(values):
            raise ConfigError(refusal.error.format_map(values), code="unsupported-combination")


def _values(train: TrainConfig, *, lora: bool) -> dict[str, Any]:
    """Return the values that refusals refer to."""
    return {**dict(train), "lora": lora}


def shared_refusal(train: TrainConfig, *, lora_dropout: float) -> str | None:
    """Say which other setting train.layout = "shared" cannot be combined with, and why; None: there is none.
    The support table says the rest."""
    refused = (
        (train.ring > 1, f"train.ring = {train.ring} shards whole documents", "train.ring = 1"),
        (
            train.accumulate == "sample",
            "train.accumulate = 'sample' computes one sample at a time, so samples cannot share a prompt",
            "train.accumulate = 'pack'",
        ),
        (
            lora_dropout > 0,
            f"model.lora.dropout = {lora_dropout} would drop the same parts of a prompt for all completions "
            "of that prompt",
            "model.lora.dropout = 0",
        ),
    )
    for applies, why, instead in refused:
        if applies:
            return f"{why}; set {instead}, or train.layout = 'packed'"
    return None
