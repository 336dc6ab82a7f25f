"""Resolve every "auto" for this machine: once, shown to the user and written to the manifest. The config is
not changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch

from lockstep.config.engine import resolved
from lockstep.config.load import override
from lockstep.config.model import ModelConfig
from lockstep.config.run import GRPORun, RunConfig
from lockstep.config.support import check_device_support, check_support, support_status
from lockstep.config.train import Layout, TrainConfig
from lockstep.errors import ConfigError
from lockstep.loop.auto_execution import Choice, choose_execution
from lockstep.loop.own_parts import own_support
from lockstep.models.dtypes import resolve_dtype
from lockstep.ranks.context import RankContext

Run = TypeVar("Run", bound=RunConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """The choices of a run after resolution."""

    device: str
    backend: str
    engine: str | None
    attention: str
    execution: str
    layout: str
    dtype: str
    static_capacity: bool
    batch_invariant: bool
    deterministic: bool
    support: str
    """supported: a parity test covers this combination; or untested."""
    support_note: str
    """What the support table says about it; may be empty."""
    auto_execution: str = ""
    """Why train.execution = "auto" became `execution`; empty: it was not "auto", or there was no choice."""


def resolve_axes(
    run: RunConfig, *, engine: str | None, ranks: RankContext | None = None, parameters: int | None = None
) -> Axes:
    """Resolve the auto values of `run`, and look the result up in the support table.

    Args:
        ranks: with several ranks each has its own device: local rank r has cuda:r.
        parameters: of the model; None: it is not loaded yet, and until then train.execution = "auto", which
            depends on its size, is eager.

    Raises:
        ConfigError: train.device names a device that this machine does not have, or the combination is not
            supported on it.
    """
    train = run.train
    device = _device(train, ranks)
    dtype = str(resolve_dtype(run.model.dtype, torch.device(device))).removeprefix("torch.")
    attention = resolve_attention(
        train.attention, device=device, dtype=dtype, batch_invariant=train.batch_invariant
    )
    invariant = train.batch_invariant
    if invariant is None:
        invariant = engine == "native" and _keeps_batch_invariance(
            run, attention=attention, device=device, dtype=dtype
        )
    own = own_support(run, attention=attention)
    layout: Layout = "packed" if train.layout == "auto" else train.layout
    execution = Choice(value="eager" if train.execution == "auto" else train.execution, reason="")
    if train.execution == "auto" and parameters is not None:
        world = 1 if ranks is None else ranks.world_size
        execution = resolve_execution(run, device=device, dtype=dtype, parameters=parameters, ranks=world)
    run = with_execution(run, execution.value)
    entry = check_device_support(
        _with_layout(run, layout),
        attention=attention,
        device=device,
        dtype=dtype,
        batch_invariant=invariant,
        own=own,
    )
    static = train.static_capacity
    return Axes(
        device=device,
        backend=train.backend,
        engine=engine,
        attention=attention,
        execution=execution.value,
        layout=layout,
        dtype=dtype,
        static_capacity=execution.value != "eager" if static is None else static,
        batch_invariant=invariant,
        deterministic=train.deterministic,
        support=entry.status,
        support_note=entry.reason,
        auto_execution=execution.reason,
    )


def resolve_execution(run: RunConfig, *, device: str, dtype: str, parameters: int, ranks: int) -> Choice:
    """Return what train.execution = "auto" means for a run whose engine is resolved: compile where the
    support table has a parity test of it and `choose_execution` finds that it pays, else eager.

    Args:
        device: "cpu", "cuda" or "cuda:N".
        dtype: of the computation, as in "bfloat16".
        parameters: of the model.
        ranks: that share a step.
    """
    attention = resolve_attention(
        run.train.attention, device=device, dtype=dtype, batch_invariant=run.train.batch_invariant
    )
    compiled, own = with_execution(run, "compile"), own_support(run, attention=attention)
    status = support_status(compiled, attention=attention, device=device, dtype=dtype, own=own)
    return choose_execution(
        run, parameters=parameters, device=device, ranks=ranks, tested=status == "supported"
    )


def with_execution(run: Run, execution: str) -> Run:
    """Return `run` with another execution mode, unchecked."""
    return run.model_copy(update={"train": run.train.model_copy(update={"execution": execution})})


def resolve_attention(attention: str, *, device: str, dtype: str, batch_invariant: bool | None = None) -> str:
    """Return the attention kernel that train.attention means here.

    "auto" is varlen where a batch-invariant step is asked for, which needs it, and on a GPU below float32,
    which flash kernels do not have; sdpa elsewhere.

    Args:
        device: "cpu", "cuda" or "cuda:N".
        dtype: of the computation, as in "bfloat16".
    """
    if attention != "auto":
        return attention
    flash = device.startswith("cuda") and dtype != "float32"
    return "varlen" if flash or batch_invariant else "sdpa"


def resolve_engine(run: GRPORun, *, ranks: RankContext | None = None) -> GRPORun:
    """Return `run` with engine.name = "auto" resolved, checked as if the engine had been named: native on
    CUDA and where batch_invariant asks for it; hf on a CPU, where its loop is faster, and in float32 on CUDA,
    which native's attention does not have.

    Raises:
        ConfigError: a setting of `run.engine` has no effect with that engine.
    """
    return run if run.engine.name != "auto" else with_engine(run, torch.device(_device(run.train, ranks)))


def with_engine(run: GRPORun, device: torch.device) -> GRPORun:
    """As `resolve_engine`, on a device that this machine need not have."""
    if run.engine.name != "auto":
        return run
    native = bool(run.train.batch_invariant) or is_native(run.model, device)
    run = run.model_copy(update={"engine": resolved(run.engine, native=native)})
    check_support(run)
    return run


def as_started(run: Run, manifest: Mapping[str, Any]) -> Run:
    """Return `run` with what its "auto" values that depend on sizes became when it was started, so that a
    resumed run keeps its bits; a run that has not begun as it is.

    Args:
        manifest: of the run's folder.

    Raises:
        ConfigError: the manifest holds another value than such a setting can have.
    """
    run, axes = _keep_layout(run, manifest), manifest.get("axes", {})
    if run.train.execution != "auto" or "execution" not in axes:
        return run
    kept = {"train.execution": axes["execution"]}
    return cast(Run, override(run, kept, origin="manifest.json, field axes"))


def _keep_layout(run: Run, manifest: Mapping[str, Any]) -> Run:
    """Return the run to resume, in layout packed if it was started in it: in earlier versions "auto" was
    never shared."""
    axes = manifest.get("axes")
    if run.train.layout != "auto" or not isinstance(axes, Mapping) or axes.get("layout") != "packed":
        return run
    return _with_layout(run, "packed")


def _with_layout(run: Run, layout: Layout) -> Run:
    return run.model_copy(update={"train": run.train.model_copy(update={"layout": layout})})


def is_native(model: ModelConfig, device: torch.device) -> bool:
    """Return whether engine.name = "auto" resolves to native on this device, where nothing else asks for
    it."""
    return device.type == "cuda" and resolve_dtype(model.dtype, device) != torch.float32


def _keeps_batch_invariance(run: RunConfig, *, attention: str, device: str, dtype: str) -> bool:
    """Return whether trainer and native engine are bitwise equal here without train.batch_invariant =
    true."""
    train = run.train
    return (
        device.startswith("cuda")
        and attention == "varlen"
        and dtype == "bfloat16"
        and train.execution != "deepcompile"
        and train.tp == train.ring == 1
        and run.model.lora is None
    )


def _device(train: TrainConfig, ranks: RankContext | None) -> str:
    if ranks is not None and ranks.world_size > 1:
        return str(ranks.device)
    if train.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(train.device)
    except RuntimeError as error:
        raise ConfigError(
            f"train.device = {train.device!r} is no device; set auto, cpu, cuda or cuda:N"
        ) from error
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(
            f"train.device = {train.device!r}, but torch {torch.__version__} sees {count} CUDA devices; set "
            "train.device = 'cpu', or install a CUDA build of torch and a driver (`lockstep doctor` shows "
            "what it finds)"
        )
    return train.device


def resolved_train(train: TrainConfig, axes: Axes) -> TrainConfig:
    """Return `train` with every auto replaced, as the backend gets it."""
    return train.model_copy(
        update={
            "device": axes.device,
            "attention": axes.attention,
            "layout": axes.layout,
            "execution": axes.execution,
            "static_capacity": axes.static_capacity,
            "batch_invariant": axes.batch_invariant,
        }
    )
