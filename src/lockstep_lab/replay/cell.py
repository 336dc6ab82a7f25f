"""A cell: the kernel, execution mode, layout, dtype, device and backend that an input is replayed under."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from lockstep.config.load import check
from lockstep.config.model import ModelConfig
from lockstep.config.run import RunConfig
from lockstep.config.support import lookup
from lockstep.config.train import Execution, Layout, TrainConfig
from lockstep.errors import ConfigError
from lockstep.loop.machine import find_machine
from lockstep.loop.resolve import Resolved, resolve
from lockstep.models.memory import planned_shape
from lockstep.recording.reader import recorded_axes
from lockstep.schema.recording import RecordingHeader
from lockstep_lab.replay.losses import LossName
from lockstep_lab.replay.outputs import GRADIENT_ENTRIES


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One combination of everything that must not change what the policy computes."""

    attention: str
    """sdpa, varlen, flex, hf:NAME."""
    execution: Execution
    """eager, compile (every decoder layer), joint (the decoder as one graph), deepcompile (DeepSpeed's)."""
    layout: Layout
    padding_side: Literal["left", "right"] = "right"
    """For layout padded."""
    dtype: str
    """The dtype of parameters and activations."""
    device: str
    """cpu, cuda, cuda:N."""
    activation_checkpointing: bool = False
    batch_invariant: bool = False
    """The modules are converted by lockstep.invariant: a row's bits do not depend on other rows."""
    zero_stage: int | None = None
    """DeepSpeed's; None: lockstep's own backend."""
    num_layers: int | None = None
    """Only the first N layers: another model, which nothing recorded is comparable with."""
    model: str | None = None
    """A model to use instead of the recorded one."""
    ranks: int = 1

    @classmethod
    def of_recording(cls, header: RecordingHeader, *, device: str = "auto") -> Cell:
        """The recorded configuration, resolved for `device`. Raises RecordingError, ConfigError."""
        return resolve_cell(header, device=device)[0]

    @property
    def deepspeed(self) -> bool:
        """Whether DeepSpeed's engine runs the cell."""
        return self.zero_stage is not None or self.execution == "deepcompile"

    def label(self) -> str:
        """The cell's name, such as "varlen + compile + packed"."""
        parts = [self.attention, self.execution, self.layout]
        if self.layout == "padded" and self.padding_side == "left":
            parts[-1] = "padded left"
        if self.zero_stage is not None:
            parts.append(f"ZeRO {self.zero_stage}")
        if self.activation_checkpointing:
            parts.append("checkpointing")
        if self.batch_invariant:
            parts.append("batch-invariant")
        if self.num_layers is not None:
            parts.append(f"{self.num_layers} layer{'' if self.num_layers == 1 else 's'}")
        if self.ranks > 1:
            parts.append(f"{self.ranks} ranks")
        return " + ".join(parts)

    def flags(self) -> list[str]:
        """The flags of `lockstep replay` that give this cell, whatever the recording."""
        compiled = {"eager": "--no-compile"}
        checkpointing = "" if self.activation_checkpointing else "no-"
        invariant = "" if self.batch_invariant else "no-"
        flags = ["--attention", self.attention, compiled.get(self.execution, f"--{self.execution}")]
        packing = {"packed": ["--packing"], "padded": ["--no-packing"]}
        flags += packing.get(self.layout, ["--layout", self.layout])
        flags += ["--padding-side", self.padding_side, "--dtype", self.dtype, "--device", self.device]
        flags += [f"--{checkpointing}activation-checkpointing", f"--{invariant}batch-invariant"]
        for name, value in (
            ("zero-stage", self.zero_stage),
            ("num-layers", self.num_layers),
            ("model", self.model),
        ):
            flags += [] if value is None else [f"--{name}", str(value)]
        return flags + (["--ranks", str(self.ranks)] if self.ranks > 1 else [])

    def as_dict(self) -> dict[str, Any]:
        """The fields, label and flags, as JSON values."""
        return dataclasses.asdict(self) | {"label": self.label(), "flags": self.flags()}


ALL_OFF: Mapping[str, Any] = {
    "attention": "sdpa",
    "execution": "eager",
    "layout": "padded",
    "padding_side": "right",
    "activation_checkpointing": False,
    "batch_invariant": False,
}
"""`--preset all-off`, the most conservative choice: fields of Cell, for `resolve_cell`."""


def resolve_cell(
    header: RecordingHeader, *, device: str = "auto", overrides: Mapping[str, Any] | None = None
) -> tuple[Cell, tuple[str, ...]]:
    """Resolve the recorded configuration for `device`; `overrides` take precedence.

    A recording from another kind of device is replayed with choices that suit this one; the notes say what
    was resolved to what, and why.

    Args:
        overrides: fields of Cell, taken as they are.

    Raises:
        RecordingError: the header names what does not exist.
        ConfigError: this machine does not have `device`, or the combination is not supported.
    """
    overrides = dict(overrides or {})
    axes = recorded_axes(header, given={"attention"} & overrides.keys())
    kind = axes["device"].partition(":")[0]
    target = _device(device)
    notes = []
    if target.partition(":")[0] != kind:
        notes.append(f"device: recorded on {axes['device']!r}, replayed on {target!r}")
        resolved = {name: axes[name] for name in ("attention", "dtype")}
        if target == "cpu":
            if axes["attention"] in ("varlen", "flex") or axes["attention"].startswith("hf:flash"):
                resolved["attention"] = "sdpa"
                why = "its kernels need a GPU; on a CPU there are only slow reference kernels"
                notes.append(f"attention: {axes['attention']!r} -> 'sdpa' ({why})")
            resolved["dtype"] = "float32"
            if axes["dtype"] != "float32":
                notes.append(f"dtype: {axes['dtype']!r} -> 'float32' (exact, and as fast on a CPU)")
        elif axes["attention"] == "varlen" and axes["dtype"] == "float32":
            resolved["attention"] = "sdpa"
            notes.append("attention: 'varlen' -> 'sdpa' (CUDA flash kernels have no float32)")
        axes |= resolved
        notes = [note for note in notes if note.partition(":")[0] not in overrides]
    names = {field.name for field in dataclasses.fields(Cell)}
    values = {name: value for name, value in axes.items() if name in names} | overrides | {"device": target}
    cell = Cell(**values)
    if "layout" not in overrides:
        cell, why = _packed_where_shared_is_refused(cell)
        notes += [f"layout: 'shared' -> 'packed' ({why})"] if why else []
    if "batch_invariant" not in overrides:
        cell, why = drop_unsupported_batch_invariance(cell)
        notes += [f"batch_invariant: on -> off ({why})"] if why else []
    checked = check_cell(cell)
    if checked.support == "untested" and not cell.deepspeed:
        notes.append(f"support: untested combination ({checked.support_note})")
    elif checked.support_note:
        notes.append(f"support: {checked.support_note}")
    return cell, tuple(notes)


def _device(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def _packed_where_shared_is_refused(cell: Cell) -> tuple[Cell, str]:
    """A recorded layout that the cell's other choices exclude; (cell, the reason, or "" if unchanged)."""
    if cell.layout != "shared":
        return cell, ""
    backend = "deepspeed" if cell.deepspeed else "local"
    axes = {"backend": backend, "engine": "hf", "attention": cell.attention, "execution": cell.execution}
    device = cell.device.partition(":")[0]
    entry = lookup(axes | {"layout": cell.layout, "device": device, "dtype": cell.dtype})
    if entry.status != "unsupported" or "shared" not in entry.layout:
        return cell, ""
    return dataclasses.replace(cell, layout="packed"), entry.reason


def drop_unsupported_batch_invariance(cell: Cell) -> tuple[Cell, str]:
    """Turn batch_invariant off where the cell does not support it; (cell, the reason, or "" if unchanged)."""
    if not cell.batch_invariant:
        return cell, ""
    try:
        check_cell(cell)
    except ConfigError as error:
        return dataclasses.replace(cell, batch_invariant=False), str(error.__cause__ or error)
    return cell, ""


def check_cell(cell: Cell) -> Resolved[RunConfig]:
    """Look the cell up in the support table. Raises ConfigError if the table refuses it."""
    if cell.zero_stage == 3 and cell.execution == "joint":
        raise ConfigError(
            "unsupported-combination: --joint cannot be used with --zero-stage 3: there DeepSpeed gathers "
            "weights in module hooks, which the joint graph does not call; use --zero-stage 0, 1 or 2, or "
            "leave one of the two out"
        )
    if cell.batch_invariant and cell.execution == "deepcompile":
        raise ConfigError(
            "unsupported-combination: --batch-invariant cannot be used with --deepcompile: DeepSpeed's "
            "compiler chooses its own kernels; use --compile, or --no-batch-invariant"
        )
    execution = "compile" if cell.execution == "deepcompile" else cell.execution
    train = train_config(cell, static_capacity=False).model_copy(update={"execution": execution})
    named = {"name": cell.model, "num_layers": cell.num_layers, "dtype": cell.dtype}
    settings = {name: value for name, value in named.items() if value is not None}
    model = check(settings, ModelConfig, origin="the model of the cell")
    run = RunConfig.model_construct(kind="replay", model=model, train=train)
    try:
        # Nothing is planned: a cell has every setting, and its inputs are what they are.
        machine = dataclasses.replace(find_machine(run), total_bytes=0)
        return resolve(run, shape=partial(planned_shape, model), machine=machine, manifest={})
    except ConfigError as error:
        raise error.with_message(
            f"{error}. Replay sets these with --attention, --compile, --packing, --device, --dtype and "
            "--batch-invariant"
        ) from error


def train_config(cell: Cell, *, static_capacity: bool, token_budget: int = 4096) -> TrainConfig:
    """The train settings of a backend that runs the cell. Raises ConfigError."""
    settings = {
        "backend": "local",
        "attention": cell.attention,
        "execution": cell.execution,
        "layout": cell.layout,
        "padding_side": cell.padding_side,
        "device": cell.device,
        "token_budget": token_budget,
        "static_capacity": static_capacity,
        "activation_checkpointing": cell.activation_checkpointing,
        "batch_invariant": cell.batch_invariant,
    }
    return check(settings, TrainConfig, origin=f"cell {cell.label()[:80]}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayOptions:
    """The inputs to replay, the cell, and how to replay."""

    cell: Cell
    loss: LossName = "recorded"
    backward: bool = True
    """False: forward only, without gradients."""
    optimizer_step: bool = False
    """An optimizer step after every input: the weights move, so only the first one is comparable."""
    max_inputs: int | None = None
    inputs: tuple[int, ...] | None = None
    """Indices; None: all."""
    steps: tuple[int | None, int | None] | None = None
    """First step, and one past the last; None: open."""
    shuffle: bool = False
    seed: int = 0
    """Seed of the shuffled order."""
    capacity: int | None = None
    """Static capacity of compiled packs, tokens; None: the recorded token budget."""
    warmup: int = 0
    """How many of the first inputs are run once, unmeasured, before the replay."""
    timeout: float | None = None
    """Seconds that one input may take before the process is ended."""
    keep_outputs: bool = False
    gradient_inputs: int = 8
    """With keep_outputs: the number of inputs whose gradients are added up."""
    gradient_entries: int = GRADIENT_ENTRIES
    max_memory: int | None = None
    """Bytes that one input may take, by estimate; None: all memory of the device."""
    trust_remote_code: bool = False
    """Run Python code that comes with a hub model, whatever the recording says."""
    simulate: bool = False
    """Run several ranks in this one process."""
    local_rank: int | None = None
    """The local rank that a launcher set."""
    notes: tuple[str, ...] = ()
    """What each setting was resolved to, and why."""
