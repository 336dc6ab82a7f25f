"""Resolve every "auto" of a run: once, before its model is loaded, shown to the user and written to the
manifest."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch

from lockstep.config.load import override
from lockstep.config.ppo import POLICY
from lockstep.config.run import RunConfig, on_ranks
from lockstep.config.support import (
    check_backend,
    check_device_support,
    shares_prompts,
    support_entry,
)
from lockstep.config.train import DEFAULT_TOKEN_BUDGET, Layout, token_slots
from lockstep.errors import ConfigError
from lockstep.loop.machine import Machine, check_free
from lockstep.loop.planner import (
    Place,
    Planner,
    open_settings,
    rests_on,
    setting,
    with_settings,
    without_plan,
)
from lockstep.loop.preflight import own_support
from lockstep.models.dtypes import resolve_dtype
from lockstep.models.memory import ModelShape, planned_shape
from lockstep.observe.memory_plans import FIRST, REPLANS
from lockstep.observe.text import printable

Run = TypeVar("Run", bound=RunConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved(Generic[Run]):
    """A run without an "auto", and why it became what it is."""

    run: Run
    """The settings to compute with. On another rank, `train.device` and the GPUs of the engine differ."""
    given: Run
    """The settings as they were written: those of config.toml, which pass every check of the config again."""
    support: str
    """supported: a parity test covers this combination; untested; or, in a plan only, unsupported."""
    support_note: str
    """The support table's note about it; may be empty."""
    auto_execution: str = ""
    """Why train.execution = "auto" became what it is; empty: it was not "auto", or there was no choice."""
    auto_token_budget: str = ""
    """The same of train.token_budget where there is no memory plan."""
    memory: Mapping[str, Any] = field(default_factory=dict)
    """The memory plan: "settings" that were "auto", by dotted path; "line", which tells it; "peak_bytes",
    "allocated_bytes", "allocated_by_phase", "total_bytes" and "ranks"; "why" it was chosen; "then": the plans
    to go on with where memory runs out all the same; "unequal": of the Machine; "refusal", for a plan only:
    why the run would be refused. Empty: none was made."""

    @property
    def device(self) -> str:
        """cpu, cuda or cuda:N."""
        return self.run.train.device

    @property
    def dtype(self) -> str:
        """The dtype of the computation, such as "bfloat16"."""
        return self.run.model.dtype

    @property
    def attention(self) -> str:
        """The kernel."""
        return self.run.train.attention

    @property
    def execution(self) -> str:
        """The execution mode."""
        return self.run.train.execution

    @property
    def layout(self) -> Layout:
        """The layout of packs."""
        return self.run.train.layout

    @property
    def token_budget(self) -> int:
        """Token slots of a micro-batch."""
        return token_slots(self.run.train.token_budget)

    @property
    def static_capacity(self) -> bool:
        """Whether packs are filled up to one of a few sizes."""
        return bool(self.run.train.static_capacity)

    @property
    def batch_invariant(self) -> bool:
        """Whether a row of a batch does not depend on the others."""
        return bool(self.run.train.batch_invariant)

    @property
    def engine(self) -> str | None:
        """The inference engine; None: the run samples nothing."""
        return self.run.engine_name

    @property
    def reasons(self) -> list[str]:
        """Lines for the user: what "auto" became, where there was a choice, and why."""
        chosen = {
            "execution": (self.execution, self.auto_execution),
            "token_budget": (self.token_budget, self.auto_token_budget),
        }
        lines = [f"train.{name} auto -> {value}: {why}" for name, (value, why) in chosen.items() if why]
        if self.memory and "refusal" not in self.memory:
            lines += [f"memory plan: {self.memory['line']}", self.memory["unequal"]]
        return [line for line in lines if line]

    @property
    def axes(self) -> dict[str, Any]:
        """The choices as stored in the manifest and sent to remote roles; see `from_axes`."""
        return {
            "device": self.device,
            "backend": self.run.train.backend,
            "engine": self.engine,
            "attention": self.attention,
            "execution": self.execution,
            "layout": self.layout,
            "dtype": self.dtype,
            "static_capacity": self.static_capacity,
            "batch_invariant": self.batch_invariant,
            "deterministic": self.run.train.deterministic,
            "support": self.support,
            "support_note": self.support_note,
            "token_budget": self.token_budget,
            "auto_execution": self.auto_execution,
            "auto_token_budget": self.auto_token_budget,
            "memory": dict(self.memory),
        }

    @classmethod
    def from_axes(cls, given: Run, axes: Mapping[str, Any]) -> Resolved[Run]:
        """Return the record of a run whose choices are known: the inverse of `axes`, but for the engine's
        GPUs."""
        chosen = ("device", "attention", "execution", "layout", "static_capacity", "batch_invariant")
        memory = axes.get("memory") or {}
        run = without_plan(with_settings(given, memory.get("settings", {})))
        run = _with_train(run, **{name: axes[name] for name in (*chosen, "token_budget")})
        run = run.model_copy(update={"model": run.model.model_copy(update={"dtype": axes["dtype"]})})
        why = ("support", "support_note", "auto_execution", "auto_token_budget")
        return Resolved(
            run=run.with_engine(name=axes["engine"]),
            given=given,
            memory=memory,
            **{name: axes[name] for name in why},
        )

    def without_batch_invariance(self) -> Resolved[Run]:
        """Return the record of the run after its model refused to be made batch-invariant. It is the one
        choice that only the loaded model can settle, where nothing but its default asked for it."""
        return dataclasses.replace(self, run=_with_train(self.run, batch_invariant=False))


def resolve(
    run: Run,
    *,
    shape: Callable[..., ModelShape],
    machine: Machine,
    manifest: Mapping[str, Any],
    refuse: bool = True,
) -> Resolved[Run]:
    """Resolve the auto values of `run`, and look the result up in the support table.

    Args:
        shape: called with dtype=, returns the sizes of the model; called only if a choice depends on them.
        manifest: of the run's folder: a run that goes on keeps its bits. Empty: it begins.
        refuse: False: for a plan, which may be of another machine: what is not supported is no error, and
            where no memory plan fits, the smallest is taken.

    Raises:
        ConfigError: the combination is not supported on this machine, a setting of `run.engine` has no effect
            with the engine that "auto" became, or the manifest holds a value that a setting cannot have.
        ModelError: as `shape`.
    """
    given, device = run, torch.device(machine.device)
    if run.train.backend == "auto":
        run = given = on_ranks(run, machine.ranks)
    run = _as_started(run, manifest)
    shape = functools.cache(shape)
    native = is_native(run.model.dtype, device)
    if native and run.engine_name == "auto":
        native = shape(dtype=resolve_dtype(run.model.dtype, device)).native
    run = run.with_auto_engine(native=native or bool(run.train.batch_invariant))
    dtype = str(resolve_dtype(run.model.dtype, device)).removeprefix("torch.")
    where = {"device": machine.device, "dtype": dtype}
    attention = resolve_attention(run.train.attention, batch_invariant=run.train.batch_invariant, **where)
    chosen = attention == "varlen" and run.train.attention == "auto" and not run.train.batch_invariant
    if chosen and shape(dtype=resolve_dtype(run.model.dtype, device)).capped:
        attention = "flex"  # flash kernels have no caps
        run = _with_train(run, attention=attention)
    own = own_support(run, attention=attention)
    invariant = run.train.batch_invariant
    if invariant is None:
        invariant = run.engine_name == "native" and _keeps_batch_invariance(run, attention=attention, **where)
    planned = _with_train(run, batch_invariant=invariant)
    sized = _with_sizes(planned, shape=shape, machine=machine, manifest=manifest, refuse=refuse)
    run = _with_train(sized.run, batch_invariant=run.train.batch_invariant)
    layout = run.train.layout
    if layout == "auto":
        shares = run.has_groups and shares_prompts(run, attention=attention, own=own, **where)
        layout = "shared" if shares else "packed"
    run = _with_train(run, layout=layout)
    entry = support_entry(run, attention=attention, own=own, **where)
    if refuse:
        check_device_support(
            run, attention=attention, own=own, device=machine.device, dtype=dtype, batch_invariant=invariant
        )
    static = run.train.static_capacity
    axes = where | {
        "engine": run.engine_name,
        "attention": attention,
        "execution": run.train.execution,
        "layout": layout,
        "static_capacity": run.train.execution != "eager" if static is None else static,
        "batch_invariant": invariant,
        "token_budget": token_slots(run.train.token_budget),
        "support": entry.status,
        "support_note": entry.reason,
        "auto_execution": sized.execution or _reason(given.train.execution, manifest, "execution"),
        "auto_token_budget": sized.token_budget
        or _reason(given.train.token_budget, manifest, "token_budget"),
        "memory": {**sized.memory, "unequal": machine.unequal} if sized.memory else {},
    }
    if refuse and sized.memory and machine.free_bytes:
        check_free(sized.memory["allocated_bytes"], machine.free_bytes, device=device)
    found = Resolved.from_axes(given, axes)
    if not machine.engine_gpus or device.type != "cuda":
        return found
    return dataclasses.replace(found, run=found.run.with_engine(cuda_devices=machine.engine_gpus))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sized(Generic[Run]):
    """A run whose settings that depend on sizes are resolved, and why they are what they are."""

    run: Run
    execution: str = ""
    token_budget: str = ""
    memory: Mapping[str, Any] = field(default_factory=dict)


def _with_sizes(
    run: Run,
    *,
    shape: Callable[..., ModelShape],
    machine: Machine,
    manifest: Mapping[str, Any],
    refuse: bool,
) -> _Sized[Run]:
    """Resolve train.execution and then the memory settings of a run whose engine is resolved; on a GPU both
    depend on the model's size.

    Raises:
        ConfigError: no plan fits, and `refuse`.
    """
    device, ranks = torch.device(machine.device), machine.ranks
    if device.type != "cuda":
        run = _with_train(run, execution="eager") if run.train.execution == "auto" else run
        if run.train.token_budget != "auto":
            return _Sized(run=without_plan(run))
        axes = _axes_of(manifest)
        if axes.get("memory") and "token_budget" in axes:
            run = _kept(run, {"train.token_budget": axes["token_budget"]})
            why = "of the memory plan that the run had on a GPU; a CPU has none"
            return _Sized(run=without_plan(run), token_budget=why)
        usual = max(DEFAULT_TOKEN_BUDGET, run.longest_unit)
        why = "" if usual == DEFAULT_TOKEN_BUDGET else "the longest document"
        return _Sized(run=without_plan(_with_train(run, token_budget=usual)), token_budget=why)
    if run.train.execution != "auto" and not (machine.total_bytes and open_settings(run)):
        return _Sized(run=without_plan(run))
    sizes, why = shape(dtype=resolve_dtype(run.model.dtype, device)), ""
    if run.train.execution == "auto":
        if sizes.compiles:
            mode = resolve_execution(run, device=machine.device, parameters=sizes.parameters, ranks=ranks)
        else:
            mode = Choice(value="eager", reason="no parity test covers its architecture compiled")
        run, why = _with_train(run, execution=mode.value), mode.reason
    place = Place(gpu=machine.gpu, total_bytes=machine.total_bytes, ranks=ranks)
    kept = _kept_plan(run, place, manifest)
    if kept:
        return _Sized(run=with_settings(run, kept["settings"]), execution=why, memory=kept)
    axes = _axes_of(manifest)
    on_gpu = str(axes.get("device")).startswith("cuda")
    older = on_gpu and "token_budget" in axes and not axes.get("memory")  # plans were not made then
    if older or not (machine.total_bytes and open_settings(run)):
        return _Sized(run=without_plan(run), execution=why)
    try:
        planner = planner_of(run, shape=sizes, place=place)
        found = planner.choose()
    except ConfigError as error:
        if error.code == "out-of-memory" and not refuse:
            least = planner.planned(planner.smallest())
            return _Sized(run=least.run, execution=why, memory={**least.record, "refusal": str(error)})
        if error.code != "wrong-part":  # a backend of the user's, of which no memory is known
            raise
        usual = max(DEFAULT_TOKEN_BUDGET, run.longest_unit)
        budget = usual if run.train.token_budget == "auto" else run.train.token_budget
        return _Sized(
            run=without_plan(_with_train(run, token_budget=budget)),
            execution=why,
            token_budget=f"there is no memory plan: {error}",
        )
    then = [plan.record for plan in itertools.islice(planner.smaller(found), REPLANS)]
    return _Sized(run=found.run, execution=why, memory={**found.record, "why": FIRST, "then": then})


def planner_of(run: Run, *, shape: ModelShape, place: Place) -> Planner[Run]:
    """Return the planner of a run whose engine and execution mode are resolved. shape: of its model.

    Raises:
        ConfigError: nothing is known about the memory of its backend, which is the user's.
    """
    value = None
    if run.critic is not None:
        dtype = resolve_dtype(run.model.dtype, torch.device("cuda"))
        value = planned_shape(run.critic.model(run.model), dtype=dtype, head="scalar")
    return Planner(run, shape=shape, place=place, value_shape=value)


def _kept_plan(run: RunConfig, place: Place, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The plan in the manifest of a run that goes on, if it is for such GPUs, or under train.plan_for_free
    fits what is free on them, and is for all that is open now.

    Raises:
        ConfigError: the manifest holds another value than a setting can have.
    """
    memory = _axes_of(manifest).get("memory") or {}
    needed = memory.get("allocated_bytes") if isinstance(memory, Mapping) else None
    if not isinstance(needed, int) or memory.get("ranks") != place.ranks:
        return {}
    free = run.train.plan_for_free and needed <= place.total_bytes
    if not free and memory.get("total_bytes") != place.total_bytes:
        return {}
    planned, still_open = memory.get("settings", {}), open_settings(run)
    settings = {path: planned.get(path) for path in still_open}
    changed = any(setting(run, path) != value for path, value in planned.items() if path not in still_open)
    if None in settings.values() or changed or memory.get("rests_on") != rests_on(run):
        return {}
    _kept(run, settings)
    return {
        "why": FIRST,
        "then": [],
        **memory,
        "settings": settings,
        "line": printable(str(memory.get("line", ""))),
    }


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
    entry = support_entry(compiled, attention=attention, device=device, dtype=dtype, own=own)
    return choose_execution(
        run,
        parameters=parameters,
        device=device,
        ranks=ranks,
        tested=entry.status == "supported",
        value_parameters=_value_parameters(run, policy=parameters),
    )


def _value_parameters(run: RunConfig, *, policy: int) -> int:
    """Return the parameters of PPO's value model; 0 without one. A model of the hub, which may not be on this
    machine yet, counts as large as the policy."""
    if run.critic is None:
        return 0
    name = run.critic.name
    if name == POLICY or not (name.startswith(("shape:", "bundled:")) or Path(name).is_dir()):
        return policy
    return planned_shape(run.critic.model(run.model), dtype=torch.bfloat16, head="scalar").parameters


def _with_train(run: Run, **settings: Any) -> Run:
    """Return `run` with other train settings, unchecked."""
    return run.model_copy(update={"train": run.train.model_copy(update=settings)})


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


def _as_started(run: Run, manifest: Mapping[str, Any]) -> Run:
    """Return `run` with what its "auto" values that depend on sizes became when it was started, and in layout
    packed if it was started in it: in earlier versions "auto" was never shared.

    Raises:
        ConfigError: the manifest holds another value than such a setting can have.
    """
    axes = _axes_of(manifest)
    if run.train.layout == "auto" and axes.get("layout") == "packed":
        run = _with_train(run, layout="packed")
    # A plan in the manifest is looked at where the machine is known.
    names = ("execution",) if axes.get("memory") else ("execution", "token_budget")
    open_values = [name for name in names if getattr(run.train, name) == "auto"]
    kept = {f"train.{name}": axes[name] for name in open_values if name in axes}
    return _kept(run, kept)


def _kept(run: Run, settings: Mapping[str, Any]) -> Run:
    """Return `run` with settings of its manifest.

    Raises:
        ConfigError: the manifest holds another value than such a setting can have.
    """
    return cast(Run, override(run, settings, origin="manifest.json, field axes")) if settings else run


def _reason(given: str | int, manifest: Mapping[str, Any], name: str) -> str:
    """Why train.NAME, if it is "auto", became what it is when the run was started."""
    reason = _axes_of(manifest).get(f"auto_{name}", "") if given == "auto" else ""
    return printable(str(reason))


def _axes_of(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    axes = manifest.get("axes", {})
    if not isinstance(axes, Mapping):
        raise ConfigError(
            f"wrong-type: manifest.json: axes is a {type(axes).__name__}, not a table of settings; restore "
            "the file from a copy of the run",
            setting="axes",
        )
    return axes


def is_native(dtype: str, device: torch.device) -> bool:
    """Return whether engine.name = "auto" resolves to native on this device with this model.dtype, where
    nothing else asks for it."""
    return device.type == "cuda" and resolve_dtype(dtype, device) != torch.float32


def _keeps_batch_invariance(run: RunConfig, *, attention: str, device: str, dtype: str) -> bool:
    """Return whether trainer and native engine are bitwise equal here without train.batch_invariant =
    true."""
    train = run.train
    return (
        device.startswith("cuda")
        and attention == "varlen"
        and dtype == "bfloat16"
        and train.execution != "deepcompile"
        and train.ring_comm != "p2p"
        and (train.tp == 1 or not run.engine_has_own_memory)
        and run.model.lora is None
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
    """The value chosen for an "auto"."""

    value: Value
    reason: str
    """The explanation for the user; may be empty."""


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
    if run.compiles_sampling:
        per_token += SAVED_SAMPLING
    saved = per_token * parameters
    if run.critic is not None:
        saved += SAVED_TRAINING * run.critic.train(run.train).epochs_per_batch * value_parameters
    return saved * run.tokens_per_step / ranks


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
        return Choice(value="eager", reason=f"compiled execution is refused: {error}")
    if not tested:
        return Choice(value="eager", reason="no parity test covers this combination with compiled execution")
    if train.static_capacity is False:
        return Choice(
            value="eager", reason="without static capacities every new length would need another compilation"
        )
    saved = seconds_saved_per_step(run, parameters=parameters, ranks=ranks, value_parameters=value_parameters)
    needed = steps_to_pay(saved)
    pays = run.steps >= needed
    return Choice(
        value="compile" if pays else "eager",
        reason=(
            f"compiling takes about {COMPILE_SECONDS:.0f} s and saves at most {saved:.2g} s of a step, so "
            f"it pays off from {needed:,} steps on, and the run has {run.steps:,}"
        ),
    )
