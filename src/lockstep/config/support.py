"""The support table: which settings may be combined. Validation, `lockstep support`, the parity tests and the
docs read it.

An entry covers every cell (backend, engine, attention, execution, layout, device, dtype) that all its
fields match. The first entry that matches a cell decides; a cell that nothing matches is unsupported.

    supported     a parity test covers it; `tested` says where it ran: `ci-cpu:TEST`, or `gpu:RESULT_FILE`
    untested      it may be used, no parity test has run with it, and start-up says so
    unsupported   refused, with `reason` and with what to set instead
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from lockstep.config.base import is_module_path
from lockstep.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from lockstep.config.engine import EngineConfig
    from lockstep.config.train import TrainConfig

Status = Literal["supported", "untested", "unsupported"]

AXES: dict[str, tuple[str, ...]] = {
    "backend": ("local", "fsdp2", "deepspeed"),
    "engine": ("hf", "native", "vllm", "sglang"),
    "attention": ("sdpa", "varlen", "flex", "hf:NAME", "module:function"),
    "execution": ("eager", "compile", "joint", "deepcompile"),
    "layout": ("packed", "padded"),
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
"""Where a user sets each axis."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
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
    """Of a GPU test: date, machine and versions, as in its result file."""

    def matches(self, cell: dict[str, str]) -> bool:
        """Return whether the entry covers `cell`; an axis that is missing in the cell is matched only by an
        empty tuple."""
        return all(_one_of(cell.get(axis), getattr(self, axis)) for axis in AXES)


_PARITY = "ci-cpu:tests/parity/test_documents.py"
_COMPILED = "ci-cpu:tests/parity/test_compiled.py"
_JOINT = "ci-cpu:tests/execution/test_joint_backend.py"
_LOCKSTEP = "ci-cpu:tests/parity/test_lockstep.py"
_BACKENDS = "ci-cpu:tests/parity/test_train_backends.py"
_VLLM = "ci-cpu:tests/vllm/test_inprocess_conformance.py"
_ENGINES_ON_H200 = "gpu:benchmarks/results/parity-engines-h200/cells.json"
_ON_H200 = "gpu:benchmarks/results/parity-h200.json"
_NATIVE_ON_H100 = "gpu:benchmarks/results/native-equal-h100.json"
_H200 = "NVIDIA H200, torch 2.11.0+cu130, transformers 5.17.0"
_H100 = "NVIDIA H100 80GB HBM3, torch 2.11.0+cu130, transformers 5.17.0"
_IN_LOCKSTEP = (
    ("local", "eager", ("packed", "padded"), ("float32", "bfloat16")),
    ("local", "compile", ("packed",), ("float32", "bfloat16")),
    ("local", "joint", ("packed",), ("float32",)),
    ("fsdp2", "compile", ("packed",), ("float32",)),
    ("fsdp2", "joint", ("packed",), ("float32",)),
    ("deepspeed", "eager", ("packed",), ("float32",)),
    ("deepspeed", "joint", ("packed",), ("bfloat16",)),
)
_SPANNING = (
    (("fsdp2",), "compile", ("float32",), "without ring attention"),
    (("fsdp2", "deepspeed"), "joint", ("float32", "bfloat16"), "without ring attention and not at ZeRO 3"),
)

TABLE: tuple[Entry, ...] = (
    Entry(
        status="unsupported",
        engine=("native",),
        device=("cuda",),
        dtype=("float32",),
        reason="the engine's attention is varlen, and CUDA flash kernels have no float32",
        instead="model.dtype = 'bfloat16', or engine.name = 'hf'",
    ),
    Entry(
        status="unsupported",
        attention=("flex",),
        execution=("joint",),
        reason="a block mask cannot be an input of the exported graph",
        instead="train.attention = 'varlen' or 'sdpa', or train.execution = 'compile'",
    ),
    Entry(
        status="unsupported",
        backend=("local", "fsdp2"),
        execution=("deepcompile",),
        reason="DeepCompile is DeepSpeed's",
        instead="train.execution = 'compile'",
    ),
    Entry(
        status="unsupported",
        backend=("deepspeed",),
        execution=("deepcompile",),
        device=("cpu",),
        reason="DeepCompile builds a CUDA extension",
        instead="train.execution = 'compile'",
    ),
    Entry(
        status="unsupported",
        dtype=("float16",),
        reason="gradients below 6e-8 become 0 in float16, and no train backend scales the loss",
        instead="model.dtype = 'bfloat16' or 'float32'",
    ),
    Entry(
        status="unsupported",
        attention=("flex",),
        device=("cpu",),
        reason="flex_attention has no backward on a CPU (only its forward is tested there)",
        instead="train.attention = 'sdpa' or 'varlen'",
    ),
    Entry(
        status="unsupported",
        attention=("varlen",),
        device=("cuda",),
        dtype=("float32",),
        reason="CUDA flash kernels have no float32",
        instead="model.dtype = 'bfloat16', or train.attention = 'sdpa'",
    ),
    Entry(
        status="unsupported",
        attention=("hf:flash_attention_2", "hf:flash_attention_3", "hf:flash_attention_4"),
        device=("cpu",),
        reason="flash-attn's kernels need a GPU",
        instead="train.attention = 'varlen' (reference kernels) or 'sdpa'",
    ),
    Entry(
        status="unsupported",
        attention=("hf:flash_attention_2", "hf:flash_attention_3", "hf:flash_attention_4"),
        dtype=("float32",),
        reason="flash-attn's kernels have no float32",
        instead="model.dtype = 'bfloat16'",
    ),
    Entry(
        status="supported",
        backend=("local",),
        engine=("hf",),
        attention=("sdpa",),
        execution=("eager",),
        layout=("packed", "padded"),
        device=("cpu",),
        dtype=("float32", "bfloat16"),
        tested=_PARITY,
    ),
    Entry(
        status="supported",
        backend=("local",),
        engine=("hf",),
        attention=("varlen",),
        execution=("eager",),
        layout=("packed", "padded"),
        device=("cpu",),
        dtype=("float32", "bfloat16"),
        reason="reference kernels: timings are not comparable",
        tested=_PARITY,
    ),
    Entry(
        status="supported",
        backend=("local",),
        engine=("hf",),
        attention=("hf:sdpa", "hf:eager"),
        execution=("eager",),
        layout=("packed", "padded"),
        device=("cpu",),
        dtype=("float32",),
        tested=_PARITY,
    ),
    Entry(
        status="supported",
        backend=("local",),
        engine=("hf",),
        attention=("sdpa", "varlen"),
        execution=("compile",),
        layout=("packed", "padded"),
        device=("cpu",),
        dtype=("float32",),
        reason="packs come in static capacities: one graph per bucket and kind of layer",
        tested=_COMPILED,
    ),
    Entry(
        status="supported",
        backend=("local",),
        engine=("hf",),
        attention=("sdpa", "varlen"),
        execution=("joint",),
        layout=("packed", "padded"),
        device=("cpu",),
        dtype=("float32",),
        reason="packs come in static capacities: one graph of forward and backward per bucket",
        tested=_JOINT,
    ),
    *(
        Entry(
            status="supported",
            backend=(backend,),
            engine=("native",),
            attention=("varlen",),
            execution=(execution,),
            layout=layouts,
            device=("cpu",),
            dtype=dtypes,
            reason="with train.batch_invariant = true: logprob_gap is exactly 0",
            tested=_LOCKSTEP,
        )
        for backend, execution, layouts, dtypes in _IN_LOCKSTEP
    ),
    Entry(
        status="supported",
        backend=("fsdp2", "deepspeed"),
        engine=("hf",),
        attention=("sdpa",),
        execution=("eager",),
        layout=("packed", "padded"),
        device=("cpu",),
        dtype=("float32", "bfloat16"),
        reason="train.ring > 1 needs train.layout = 'packed'",
        tested=_BACKENDS,
    ),
    *(
        Entry(
            status="supported",
            backend=backend,
            engine=("hf",),
            attention=("sdpa",),
            execution=(execution,),
            layout=("packed",),
            device=("cpu",),
            dtype=dtypes,
            reason=reason,
            tested=_BACKENDS,
        )
        for backend, execution, dtypes, reason in _SPANNING
    ),
    Entry(
        status="supported",
        backend=("local",),
        engine=("vllm",),
        attention=("sdpa",),
        execution=("eager",),
        layout=("packed",),
        device=("cpu",),
        dtype=("float32",),
        reason="vLLM 0.32 built for CPUs, in process and as a server",
        tested=_VLLM,
    ),
    Entry(
        status="unsupported",
        attention=("flex",),
        execution=("compile",),
        layout=("padded",),
        device=("cuda",),
        reason="inductor of torch 2.11 finds no flex_attention kernel for dense batches",
        instead="train.layout = 'packed'",
    ),
    Entry(
        status="supported",
        backend=("local",),
        engine=("hf",),
        attention=("sdpa", "flex"),
        execution=("eager", "compile"),
        layout=("packed", "padded"),
        device=("cuda",),
        dtype=("float32", "bfloat16"),
        tested=_ON_H200,
        on=f"2026-11-22, {_H200}",
    ),
    Entry(
        status="supported",
        backend=("local",),
        engine=("hf",),
        attention=("varlen",),
        execution=("eager", "compile"),
        layout=("packed", "padded"),
        device=("cuda",),
        dtype=("bfloat16",),
        tested=_ON_H200,
        on=f"2026-11-22, {_H200}",
    ),
    Entry(
        status="supported",
        backend=("local",),
        engine=("vllm", "sglang"),
        attention=("varlen",),
        execution=("eager",),
        layout=("packed",),
        device=("cuda",),
        dtype=("bfloat16",),
        reason="vLLM 0.26.0 in process, SGLang 0.5.16 as its own server",
        tested=_ENGINES_ON_H200,
        on=f"2026-11-21, {_H200}",
    ),
    Entry(
        status="supported",
        backend=("local",),
        engine=("native",),
        attention=("varlen",),
        execution=("eager", "compile"),
        layout=("packed",),
        device=("cuda",),
        dtype=("bfloat16",),
        reason="with train.batch_invariant, on by itself here: logprob_gap is exactly 0",
        tested=_NATIVE_ON_H100,
        on=f"2026-11-22, {_H100}",
    ),
    Entry(
        status="untested",
        engine=("sglang",),
        reason="there is no build of SGLang for CPUs: requests and weights are tested against what its "
        "package declares, and against a server that imitates it",
    ),
    Entry(
        status="untested",
        attention=("hf:NAME",),
        reason="an implementation of transformers, used as it is; no parity test has run with it",
    ),
    Entry(status="untested", reason="no parity test has run with this combination"),
)

BATCH_INVARIANT: tuple[Entry, ...] = (
    Entry(
        status="unsupported",
        device=("cuda",),
        dtype=("float32",),
        reason="the only kernel in the claim is varlen, and CUDA flash kernels have no float32",
        instead="model.dtype = 'bfloat16'",
    ),
    Entry(
        status="unsupported",
        attention=("sdpa", "flex", "hf:NAME", "module:function"),
        reason="how it splits the keys of a query may depend on what else is in the batch",
        instead="train.attention = 'varlen'",
    ),
    Entry(
        status="unsupported",
        execution=("deepcompile",),
        reason="DeepSpeed's compiler chooses kernels of its own",
        instead="train.execution = 'compile'",
    ),
    Entry(
        status="unsupported",
        engine=("hf",),
        reason="it decodes through other kernels than the trainer's forward",
        instead="engine.name = 'native'",
    ),
)
"""What train.batch_invariant = true cannot be combined with. vllm and sglang have a mode of their own
(engine.batch_invariant): with them the gap is measured, and not promised."""


class RunAxes(Protocol):
    """What check_support reads of a run."""

    @property
    def train(self) -> TrainConfig: ...
    @property
    def model(self) -> HasDtype: ...


class HasDtype(Protocol):
    @property
    def dtype(self) -> str: ...


def lookup(cell: dict[str, str]) -> Entry:
    """Return the entry that decides about a cell. Where the cell lacks an axis, only entries without that
    axis match."""
    for entry in TABLE:
        if entry.matches(cell):
            return entry
    return Entry(status="unsupported", reason="no parity test has run with this combination")


def check_support(run: RunAxes) -> None:
    """Refuse, when a run is constructed, what cannot work on any machine.

    "auto" is not resolved yet: `check_device_support` checks again at start-up, when it is.

    Raises:
        ConfigError: unknown attention kernel or engine, or an unsupported combination.
    """
    cell = {axis: value for axis, value in _cell(run).items() if value != "auto"}
    _check_names(cell)
    for entry in TABLE:
        if entry.status == "unsupported" and entry.matches(cell):
            raise ConfigError(_refusal(entry, cell))
    if run.train.batch_invariant:
        _check_batch_invariant(run, cell)


def check_device_support(
    run: RunAxes, *, attention: str, device: str, dtype: str, batch_invariant: bool = False
) -> Entry:
    """Check a run once every "auto" is resolved.

    Args:
        attention, device, dtype, batch_invariant: what "auto" and None resolved to, such as "varlen",
            "cuda:0", "bfloat16", True.

    Returns:
        The deciding entry, supported or untested, so that start-up can say which.

    Raises:
        ConfigError: an unsupported combination.
    """
    resolved = {"attention": attention, "device": device.partition(":")[0], "dtype": dtype}
    cell = {axis: value for axis, value in {**_cell(run), **resolved}.items() if value != "auto"}
    _check_names(cell)
    entry = lookup(cell)
    if entry.status == "unsupported":
        raise ConfigError(_refusal(entry, cell))
    if batch_invariant:
        _check_batch_invariant(run, cell)
    return entry


def _check_batch_invariant(run: RunAxes, cell: dict[str, str]) -> None:
    """Raises ConfigError."""
    if getattr(run, "engine", None) is None:
        cell = {axis: value for axis, value in cell.items() if axis != "engine"}
    for entry in BATCH_INVARIANT:
        if entry.matches(cell):
            raise ConfigError("train.batch_invariant = true: " + _refusal(entry, cell))


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


def _cell(run: RunAxes) -> dict[str, str]:
    cell = {
        "backend": run.train.backend,
        "attention": run.train.attention,
        "execution": run.train.execution,
        "layout": run.train.layout,
        "device": run.train.device.partition(":")[0],
        "dtype": run.model.dtype,
    }
    engine: EngineConfig | None = getattr(run, "engine", None)
    # A run without an engine is decided by its other axes; hf stands for "no constraint".
    return {**cell, "engine": "hf" if engine is None else engine.name}


def _check_names(cell: dict[str, str]) -> None:
    attention = cell.get("attention", "sdpa")
    if not is_kernel(attention):
        raise ConfigError(
            f"train.attention: {unknown_name('attention kernel', attention, AXES['attention'])}"
        )
    engine = cell.get("engine", "hf")
    if engine not in AXES["engine"] and ":" not in engine:
        raise ConfigError(f"engine.name: {unknown_name('inference engine', engine, AXES['engine'])}")


def is_kernel(name: str) -> bool:
    """Return whether `name` is an attention kernel of ours, `hf:NAME` or `module:function`."""
    if name.startswith("hf:"):
        return _HF_KERNEL.fullmatch(name) is not None
    return (name in AXES["attention"] and ":" not in name) or is_module_path(name)


def _refusal(entry: Entry, cell: dict[str, str]) -> str:
    named = [axis for axis in AXES if getattr(entry, axis)] or list(cell)
    chosen = ", ".join(f"{SETTINGS[axis]} = {cell[axis]!r}" for axis in named if axis in cell)
    instead = f"; set {entry.instead}" if entry.instead else ""
    return f"{chosen} is not supported: {entry.reason}{instead} (`lockstep support` lists what is)"


def _one_of(value: str | None, allowed: tuple[str, ...]) -> bool:
    if not allowed:
        return True
    if value is None:
        return False
    stands_for = "hf:NAME" if value.startswith("hf:") else "module:function" if ":" in value else value
    return value in allowed or stands_for in allowed
