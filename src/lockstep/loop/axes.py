"""Resolve every "auto" for this machine: once, shown to the user and written to the manifest. The config is
not changed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
from torch import nn

from lockstep.config.declarations import engines
from lockstep.config.engine import has_own_weights, resolved
from lockstep.config.load import override
from lockstep.config.model import ModelConfig
from lockstep.config.ppo import POLICY, PPORun
from lockstep.config.run import GRPORun, OfflineRun, PairRun, RunConfig
from lockstep.config.support import (
    check_backend,
    check_device_support,
    check_support,
    shares_prompts,
    support_status,
)
from lockstep.config.train import DEFAULT_TOKEN_BUDGET, Layout, TrainConfig, token_slots
from lockstep.errors import ConfigError
from lockstep.loop.memory_plan import plan_memory
from lockstep.loop.preflight import own_support
from lockstep.models.dtypes import resolve_dtype
from lockstep.models.memory import ModelShape, gib, module_shape, planned_shape
from lockstep.ranks.context import RankContext, local_ranks

Run = TypeVar("Run", bound=RunConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """The choices of a run after resolution."""

    device: str
    backend: str
    engine: str | None
    attention: str
    execution: str
    layout: Layout
    dtype: str
    static_capacity: bool
    batch_invariant: bool
    deterministic: bool
    support: str
    """supported: a parity test covers this combination; or untested."""
    support_note: str
    """What the support table says about it; may be empty."""
    token_budget: int
    auto_execution: str = ""
    """Why train.execution = "auto" became `execution`; empty: it was not "auto", or there was no choice."""
    auto_token_budget: str = ""
    """The same of train.token_budget."""


def resolve_axes(
    run: RunConfig,
    *,
    engine: str | None,
    ranks: RankContext | None = None,
    module: nn.Module | None = None,
    total_bytes: int = 0,
) -> Axes:
    """Resolve the auto values of `run`, and look the result up in the support table.

    Args:
        ranks: with several ranks each has its own device: local rank r has cuda:r.
        module: of the model; None: it is not loaded yet, and until then train.execution and
            train.token_budget = "auto", which depend on its size, are what they are on a CPU.
        total_bytes: as `total_device_bytes` has it.

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
    known = (
        module is not None and device.startswith("cuda") and "auto" in (train.execution, train.token_budget)
    )
    sized = with_sizes(
        run,
        device=device if known else "cpu",
        ranks=1 if ranks is None else ranks.world_size,
        shape=module_shape(module) if known and module is not None else None,
        total_bytes=total_bytes,
    )
    layout = train.layout
    if layout == "auto":
        shares = _has_groups(run) and shares_prompts(
            sized.run, attention=attention, device=device, dtype=dtype, own=own
        )
        layout = "shared" if shares else "packed"
    entry = check_device_support(
        _with_train(sized.run, layout=layout),
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
        execution=sized.run.train.execution,
        layout=layout,
        dtype=dtype,
        static_capacity=sized.run.train.execution != "eager" if static is None else static,
        batch_invariant=invariant,
        deterministic=train.deterministic,
        support=entry.status,
        support_note=entry.reason,
        token_budget=token_slots(sized.run.train),
        auto_execution=sized.execution,
        auto_token_budget=sized.token_budget,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SizedRun:
    """A run whose "auto" values that depend on sizes are resolved."""

    run: RunConfig
    execution: str
    token_budget: str
    """Why they are what they are; empty: they were not "auto", or there was no choice."""


def with_sizes(
    run: RunConfig, *, device: str, ranks: int, shape: ModelShape | None, total_bytes: int
) -> SizedRun:
    """Resolve train.execution and then train.token_budget of a run whose engine is resolved.

    Args:
        device: "cpu", "cuda" or "cuda:N".
        ranks: that share a step.
        shape: of the model; a CPU needs none.
        total_bytes: of the device's memory, a rank's share where ranks share it.
    """
    mode, budget = Choice(value="eager", reason=""), Choice(value=0, reason="")
    if run.train.execution == "auto":
        if shape is not None:
            mode = resolve_execution(run, device=device, parameters=shape.parameters, ranks=ranks)
        run = _with_train(run, execution=mode.value)
    if run.train.token_budget == "auto":

        def peak(tokens: int) -> int:
            plan = plan_memory(
                _with_train(run, token_budget=tokens), device=torch.device(device), ranks=ranks, shape=shape
            )
            return plan.peak_bytes

        budget = choose_token_budget(run, device=device, total_bytes=total_bytes, ranks=ranks, peak=peak)
        run = _with_train(run, token_budget=budget.value)
    return SizedRun(run=run, execution=mode.reason, token_budget=budget.reason)


def planned_run(run: RunConfig, *, device: torch.device, ranks: int, total_bytes: int) -> SizedRun:
    """Return `run` as it will be on a device, before anything is loaded.

    Raises:
        ModelError: the model's config is not on this machine, or not supported.
    """
    if isinstance(run, GRPORun):
        run = with_engine(run, device)
    shape = planned_shape(run.model, dtype=resolve_dtype(run.model.dtype, device))
    return with_sizes(run, device=str(device), ranks=ranks, shape=shape, total_bytes=total_bytes)


def total_device_bytes(train: TrainConfig, ranks: RankContext | None = None) -> int:
    """Return the total memory of this rank's GPU, or its share where ranks share one; over all ranks the
    least. 0 on a CPU, and where train.token_budget does not ask for it. Collective."""
    device = torch.device(_device(train, ranks))
    if train.token_budget != "auto" or device.type != "cuda":
        return 0
    found = torch.cuda.get_device_properties(device).total_memory
    if ranks is None or ranks.world_size == 1:
        return found
    local = (local_ranks(os.environ) or ranks.world_size) / torch.cuda.device_count()
    return min(ranks.gather(int(found / max(1, math.ceil(local))), int, what="comparing the GPUs' memory"))


def resolve_execution(run: RunConfig, *, device: str, parameters: int, ranks: int) -> Choice[str]:
    """Return what train.execution = "auto" means for a run whose engine is resolved: compile where the
    support table has a parity test of it and `choose_execution` finds that it pays, else eager.

    Args:
        device: "cpu", "cuda" or "cuda:N".
        parameters: of the model.
        ranks: that share a step.
    """
    dtype = str(resolve_dtype(run.model.dtype, torch.device(device))).removeprefix("torch.")
    attention = resolve_attention(
        run.train.attention, device=device, dtype=dtype, batch_invariant=run.train.batch_invariant
    )
    compiled, own = _with_train(run, execution="compile"), own_support(run, attention=attention)
    status = support_status(compiled, attention=attention, device=device, dtype=dtype, own=own)
    return choose_execution(
        run,
        parameters=parameters,
        device=device,
        ranks=ranks,
        tested=status == "supported",
        value_parameters=_value_parameters(run, policy=parameters),
    )


def _value_parameters(run: RunConfig, *, policy: int) -> int:
    """Of PPO's value model, 0 without one. A model of the hub, which may not be on this machine yet, counts
    as large as the policy."""
    if not isinstance(run, PPORun):
        return 0
    name = run.value.name
    if name == POLICY or not (name.startswith(("shape:", "bundled:")) or Path(name).is_dir()):
        return policy
    return planned_shape(run.value.model(run.model), dtype=torch.bfloat16, head="scalar").parameters


def _with_train(run: Run, **settings: Any) -> Run:
    """Return `run` with other train settings, unchecked."""
    return run.model_copy(update={"train": run.train.model_copy(update=settings)})


def _has_groups(run: RunConfig) -> bool:
    """Return whether the run's documents come in groups of one prompt."""
    if isinstance(run, PairRun):
        return run.unit > 1
    return isinstance(run, GRPORun) and run.rollout.group_size > 1


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
    open_values = [name for name in ("execution", "token_budget") if getattr(run.train, name) == "auto"]
    kept = {f"train.{name}": axes[name] for name in open_values if name in axes}
    return cast(Run, override(run, kept, origin="manifest.json, field axes")) if kept else run


def _keep_layout(run: Run, manifest: Mapping[str, Any]) -> Run:
    """Return the run to resume, in layout packed if it was started in it: in earlier versions "auto" was
    never shared."""
    axes = manifest.get("axes")
    if run.train.layout != "auto" or not isinstance(axes, Mapping) or axes.get("layout") != "packed":
        return run
    return _with_train(run, layout="packed")


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
            f"wrong-format: train.device = {train.device!r} is not a device; set auto, cpu, cuda or cuda:N"
        ) from error
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(
            f"missing-device: train.device = {train.device!r}, but torch {torch.__version__} sees {count} "
            "CUDA devices; set train.device = 'cpu', or install a CUDA build of torch and a driver "
            "(`lockstep doctor` shows what it finds)"
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
            "token_budget": axes.token_budget,
            "static_capacity": axes.static_capacity,
            "batch_invariant": axes.batch_invariant,
        }
    )


# train.execution = "auto": whether compiling pays for itself within a run.
#
# Compiling costs seconds once and saves some of every token that is trained and sampled, in proportion to
# the model. Everything here is a function of settings and sizes, so every rank and every start of a run
# decides alike.


SAVED_TRAINING = 2.4e-15
SAVED_SAMPLING = 1.5e-15
"""Seconds that compiled blocks save, per token and parameter. One H200, shape:llama-3.2-1b (1.24e9
parameters), bfloat16, engine native, 167,000 tokens a step: forward and backward 2.73 -> 2.24 s, generation
2.47 -> 2.16 s. What is saved is mostly traffic between kernels, so slower GPUs save more."""
COMPILE_SECONDS = 60.0
"""A first start, with nothing in the cache of compiled code, takes 30 to 60 s longer there; a later one about
15 s. Which one it will be is not looked up: the choice would depend on the machine's files."""


Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice(Generic[Value]):
    """What an "auto" became."""

    value: Value
    reason: str
    """For the user; empty: nothing to explain."""


def tokens_per_step(run: RunConfig) -> int:
    """Return the most tokens that one step can have: every document as long as settings allow."""
    if isinstance(run, GRPORun):
        samples = run.rollout.prompts_per_step * run.rollout.group_size
        return samples * (run.data.max_prompt_tokens + run.rollout.sampling.max_tokens)
    assert isinstance(run, OfflineRun)
    return run.documents_per_update * run.data.max_length


def seconds_saved_per_step(
    run: RunConfig, *, parameters: int, ranks: int, value_parameters: int = 0
) -> float:
    """Return the estimated seconds by which compiled blocks shorten each step.

    Args:
        parameters: of the model.
        ranks: that share the step.
        value_parameters: of PPO's value model, which samples nothing.
    """
    per_token = SAVED_TRAINING * run.train.epochs_per_batch
    if isinstance(run, GRPORun) and run.engine.name == "native" and not run.engine.eager:
        per_token += SAVED_SAMPLING
    saved = per_token * parameters
    if isinstance(run, PPORun):
        saved += SAVED_TRAINING * run.value.train(run.train).epochs_per_batch * value_parameters
    return saved * tokens_per_step(run) / ranks


def steps_to_pay(seconds_saved: float) -> int:
    """Return the number of steps after which compiling has paid for itself.

    Args:
        seconds_saved: of each step, above 0.
    """
    return math.floor(COMPILE_SECONDS / seconds_saved) + 1


def choose_execution(
    run: RunConfig, *, parameters: int, device: str, ranks: int, tested: bool, value_parameters: int = 0
) -> Choice[str]:
    """Return what train.execution = "auto" means for `run`: "eager" or "compile".

    Args:
        parameters: of the model.
        device: "cpu", "cuda" or "cuda:N".
        ranks: that share a step.
        tested: the support table has the run, compiled, as supported.
        value_parameters: of PPO's value model.
    """
    if not device.startswith("cuda"):
        return Choice(value="eager", reason="")
    train = run.train.model_copy(update={"execution": "compile"})
    try:
        check_backend(train, lora=run.model.lora is not None)
    except ConfigError as error:
        return Choice(value="eager", reason=f"compiled is refused: {error}")
    if not tested:
        return Choice(value="eager", reason="no parity test has run with this combination compiled")
    if train.static_capacity is False:
        return Choice(value="eager", reason="without static capacities every new length would compile again")
    saved = seconds_saved_per_step(run, parameters=parameters, ranks=ranks, value_parameters=value_parameters)
    needed = steps_to_pay(saved)
    pays = run.steps >= needed
    return Choice(
        value="compile" if pays else "eager",
        reason=f"compiling takes about {COMPILE_SECONDS:.0f} s and saves at most {saved:.2g} s of a step, so "
        f"it pays from {needed:,} steps on, and the run has {run.steps:,}",
    )


# train.token_budget = "auto": the largest micro-batch of a few whose planned memory fits the device.
#
# A function of settings, sizes and the device's total memory, not of what is free: every start of a run on
# one kind of device decides alike.


SIZES = (DEFAULT_TOKEN_BUDGET, 8192, 16384, 24576, 32768)
"""Token slots. Beyond the largest a step gains nothing that can be measured."""
MARGIN = 1.5
"""What a process needs at most, as a multiple of its memory plan (tests/loop/test_memory_plan.py)."""


def choose_token_budget(
    run: RunConfig, *, device: str, total_bytes: int, ranks: int, peak: Callable[[int], int]
) -> Choice[int]:
    """Return what train.token_budget = "auto" means for a run whose engine and execution mode are resolved.

    Args:
        device: "cpu", "cuda" or "cuda:N".
        total_bytes: of the device's memory, a rank's share where ranks share it.
        ranks: that share a step.
        peak: the planned bytes of one rank at a token budget; a ConfigError says that there is no plan.
    """
    longest = run.longest_unit
    usual = max(DEFAULT_TOKEN_BUDGET, longest)
    if not device.startswith("cuda"):
        return Choice(value=usual, reason="" if usual == DEFAULT_TOKEN_BUDGET else "the longest document")
    if isinstance(run, GRPORun) and (run.engine.name not in engines() or has_own_weights(run.engine)):
        return Choice(value=usual, reason=f"engine {run.engine.name} takes memory of its own")
    parts = max(1, ranks // (run.train.tp * run.train.ring))
    needed = math.ceil(run.documents_per_update / parts) * longest
    sizes = [size for size in SIZES if size >= longest] or [longest]
    sizes = sizes[: 1 + sum(size < needed for size in sizes)]
    try:
        planned = {size: peak(size) for size in sizes}
    except ConfigError as error:
        return Choice(value=usual, reason=f"there is no memory plan: {error}")
    fitting = [size for size in sizes if planned[size] * MARGIN <= total_bytes]
    chosen = max(fitting, default=sizes[0])
    of = f"{gib(planned[chosen])} planned at the peak, of {gib(total_bytes)}"
    return Choice(value=chosen, reason=of if fitting else f"{of}: the smallest, and it may not fit")
