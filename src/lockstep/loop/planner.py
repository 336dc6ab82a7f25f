"""Choose the memory settings of a run: of the plans that fit its GPUs, the fastest.

A pure function of config, sizes of the model, kind of GPU, its total memory and the number of ranks, so that
every rank and every start decides alike. `lockstep.loop.memory_plan` counts the bytes of a plan; the seconds
of a step come from the small model below, which only has to put plans into the right order.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch

from lockstep.config.declarations import backends
from lockstep.config.run import GRPORun, RunConfig, on_ranks
from lockstep.config.support import shards_weights
from lockstep.config.train import DEFAULT_TOKEN_BUDGET, WITHOUT_PLAN, TrainConfig, token_slots
from lockstep.errors import ConfigError
from lockstep.loop.memory_plan import MemoryPlan, plan_memory
from lockstep.models.memory import GIB, ModelShape, gib
from lockstep.train.memory import Parallelism

SIZES = (2048, DEFAULT_TOKEN_BUDGET, 8192, 16384, 24576, 32768)
"""Token slots of a micro-batch that are tried. Beyond the largest nothing is gained that can be measured."""
MARGIN = 0.03
"""Share of the card that no plan uses."""
TRAIN_SETTINGS = ("activation_checkpointing", "reshard_after_forward", "reduce_gradients", "optimizer_device")
VALUE_SETTINGS = ("activation_checkpointing", "optimizer_device")

Run = TypeVar("Run", bound=RunConfig)


# Cards. Dense bfloat16 FLOP/s, bytes per second of memory, and of the link between GPUs of a machine.


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """The speed of a GPU."""

    flops: float
    memory: float
    link: float
    measured: bool = False
    """Whether the plans' times were compared with measurements on this card; else they go by data sheets."""


CARDS: Mapping[str, Card] = {
    "H100": Card(flops=989e12, memory=3.35e12, link=300e9, measured=True),
    "H200": Card(flops=989e12, memory=4.8e12, link=300e9),
    "B200": Card(flops=2250e12, memory=8.0e12, link=600e9),
    "A100": Card(flops=312e12, memory=2.0e12, link=200e9),
    "L40S": Card(flops=362e12, memory=0.86e12, link=20e9),
    "A10": Card(flops=125e12, memory=0.6e12, link=20e9),
    "RTX 4090": Card(flops=165e12, memory=1.0e12, link=20e9),
    "RTX 5090": Card(flops=210e12, memory=1.8e12, link=20e9),
}
"""Part of a device's name -> its speed."""
OTHER_CARD = Card(flops=150e12, memory=1.0e12, link=20e9)
HOST_LINK = 25e9
"""Bytes per second between a GPU and pinned host memory."""
HOST_UPDATE = 5e9
"""Bytes of optimizer state that the cores of a machine update per second, per rank."""


def card_of(name: str) -> Card:
    """The card of a device's name, such as "NVIDIA H100 80GB HBM3"."""
    return next((card for part, card in CARDS.items() if part in name), OTHER_CARD)


# The time of a step, as far as memory settings change it.

_EFFICIENCY = 0.45
"""Share of the peak that forward and backward reach; one H100, 1B and 8B shapes, compiled."""
_RECOMPUTED = 1.3
"""Forward and backward with activation checkpointing, over those without."""
_SATURATED = 600.0
"""Token slots whose time each micro-batch costs beside its own: launches, and padding up to a capacity. This
and _HIDDEN were fitted to three plans of 8B on four H100s (benchmarks/README.md, "Several GPUs")."""
_HIDDEN = 0.4
"""Share of the traffic of a micro-batch that computation hides."""
_RELEASE_SECONDS = 0.2
"""To allocate an engine's memory again and to capture its CUDA graphs."""


def _policy_seconds(run: RunConfig, shape: ModelShape, card: Card, width: Parallelism) -> float:
    return _trained_seconds(run, run.train, shape, card, width)


def _critic_seconds(run: RunConfig, shape: ModelShape, card: Card, width: Parallelism) -> float:
    if run.critic is None:
        return 0.0
    return _trained_seconds(run, run.critic.train(run.train), shape, card, width)


def _offload_seconds(run: RunConfig, shape: ModelShape, card: Card, width: Parallelism) -> float:
    """Return the seconds of the copies to and from host memory."""
    state = _state_bytes(run.train)
    moved = {"policy": state, "value": 2 + state, "ref": 2, "reward_model": 2}
    there = {"policy": shape.trained}
    moving = sum(moved[role] * there.get(role, shape.parameters) for role in run.offloaded)
    return 2 * moving / (width.shards * width.tp) / HOST_LINK


def _trained_seconds(
    run: RunConfig, train: TrainConfig, shape: ModelShape, card: Card, width: Parallelism
) -> float:
    """Return the seconds of forward, backward and update of one model."""
    tokens = run.tokens_per_step * train.epochs_per_batch / width.dp
    updates = train.epochs_per_batch * train.minibatches if run.online else 1
    budget = min(token_slots(train.token_budget), tokens / updates)
    turns = max(updates, math.ceil(tokens / budget))
    work = 6 * shape.active_parameters * tokens / (width.tp * width.ring) / (card.flops * _EFFICIENCY)
    work *= 1 + _SATURATED * width.ring / budget
    if train.activation_checkpointing:
        work *= _RECOMPUTED
    seconds = work
    if shards_weights(train):
        gathered = 2 * shape.parameters / width.tp / card.link
        reduced = 4 * shape.trained / width.tp / card.link
        seconds += (2 * turns if train.reshard_after_forward else updates) * gathered * (1 - _HIDDEN)
        each = train.reduce_gradients == "per_micro_batch"
        seconds += (turns if each else updates) * reduced * (1 - _HIDDEN)
    share = shape.trained / (width.tp * (width.shards if shards_weights(train) else 1))
    state = (8 + _state_bytes(train)) * share * updates
    on_host = train.optimizer_device == "cpu"
    return seconds + (
        state / HOST_UPDATE + 6 * share * updates / HOST_LINK if on_host else state / card.memory
    )


def _generation_seconds(run: RunConfig, shape: ModelShape, card: Card, width: Parallelism) -> float:
    """Return the seconds of the part of sampling that memory settings change."""
    engine = getattr(run, "engine", None)
    if engine is None or run.sampling is None:
        return 0.0
    seconds = 0.0
    if engine.offloads:
        seconds += _RELEASE_SECONDS
        if shards_weights(run.train):
            seconds += 2 * shape.parameters / width.tp / card.link
    if engine.kv_cache_limit is not None:
        # Samples that do not fit wait, so that the batch is decoded in several rounds.
        rounds = max(1.0, kv_tokens(run, width) / engine.kv_cache_limit)
        step = 1.5 * 2 * shape.parameters / width.tp / card.memory
        seconds += (rounds - 1) * run.sampling.max_tokens * step
    return seconds


_TRAIN_PATHS = ("train.token_budget", *(f"train.{name}" for name in TRAIN_SETTINGS))
_TIMES: Mapping[Callable[[RunConfig, ModelShape, Card, Parallelism], float], tuple[str, ...]] = {
    _policy_seconds: _TRAIN_PATHS,
    _critic_seconds: (*_TRAIN_PATHS, *(f"value.{name}" for name in VALUE_SETTINGS)),
    _generation_seconds: ("engine.offload", "engine.kv_cache_tokens"),
    _offload_seconds: ("offload",),
}
"""The parts of a step's time, and the memory settings that each depends on."""


def _state_bytes(train: TrainConfig) -> int:
    return {"adamw": 8, "adamw8bit": 2, "sgd": 0}[train.optimizer]


def kv_tokens(run: RunConfig, width: Parallelism) -> int:
    """Tokens of KV cache with which all samples that a rank can decode together fit at full length, and all
    trajectories of several turns, whose keys are kept while they wait."""
    grpo = cast(GRPORun, run)
    together = width.tp if run.engine_name == "native" else 1  # the ranks of a group share one engine
    own = math.ceil(grpo.rollout.prompts_per_step * together / width.ranks) * grpo.rollout.group_size
    kept = own if grpo.rollout.max_trajectory_tokens else min(grpo.engine.max_batch, own)
    return kept * run.longest_unit


# Candidates: every combination of the settings that are "auto".


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The GPUs that a run is planned for."""

    gpu: str
    """Name of the device."""
    total_bytes: int
    """Memory of the device, or a rank's share of it if ranks share it; the least of all ranks."""
    ranks: int

    @property
    def card(self) -> Card:
        """Its speed."""
        return card_of(self.gpu)

    @property
    def usable_bytes(self) -> int:
        """The memory that a plan may use."""
        return int(self.total_bytes * (1 - MARGIN))


def open_settings(run: RunConfig) -> list[str]:
    """The memory settings of `run` that are "auto" and have an effect, as dotted paths."""
    sharded = run.train.backend == "fsdp2"
    return [path for path in _auto_settings(run) if sharded or path not in _OF_SHARDS]


_OF_SHARDS = ("train.reshard_after_forward", "train.reduce_gradients")


def _auto_settings(run: RunConfig) -> list[str]:
    # Those of the value model that are "auto" are the policy's, if that has one.
    follows = {f"value.{name}" for name in VALUE_SETTINGS if setting(run, f"train.{name}") != "auto"}
    return [name for name in _memory_settings(run) if setting(run, name) == "auto" and name not in follows]


def _memory_settings(run: RunConfig) -> list[str]:
    names = ["train.token_budget", *(f"train.{name}" for name in TRAIN_SETTINGS)]
    if run.online:
        names += ["engine.offload", "engine.kv_cache_tokens", "offload"]
    if run.critic is not None:
        names += [f"value.{name}" for name in VALUE_SETTINGS]
    return names


def rests_on(run: RunConfig) -> dict[str, Any]:
    """Return the settings that a plan depends on and that may change when a run is resumed."""
    names = ("backend", "tp", "ring", "zero_stage", "parameter_device")
    return {name: getattr(run.train, name) for name in names}


def setting(run: RunConfig, path: str) -> Any:
    """The value of a dotted path."""
    value: Any = run
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _shown(value: Any) -> str:
    """A value as it is written in TOML."""
    return json.dumps(value) if isinstance(value, (bool, tuple, list)) else repr(value)


def with_settings(run: Run, settings: Mapping[str, Any]) -> Run:
    """Return `run` with other settings, unchecked. Keys are dotted paths of one or two names; lists, as in a
    manifest, become tuples."""
    tables: dict[str, dict[str, Any]] = {}
    for path, value in settings.items():
        table, _, name = path.rpartition(".")
        tables.setdefault(table, {})[name] = tuple(value) if isinstance(value, list) else value
    own = tables.pop("", {})
    return run.model_copy(
        update=own | {table: getattr(run, table).model_copy(update=new) for table, new in tables.items()}
    )


def without_plan(run: Run) -> Run:
    """Return `run` with what its memory settings are where no plan is made."""
    settings: dict[str, Any] = {}
    for path in _auto_settings(run):
        name = path.rpartition(".")[2]
        settings[path] = WITHOUT_PLAN[name] if name in WITHOUT_PLAN else _UNPLANNED.get(path, "auto")
    return with_settings(run, settings | {"train.token_budget": run.train.token_budget})


_UNPLANNED: Mapping[str, Any] = {"engine.offload": False, "offload": ()}


def _choices(run: RunConfig, place: Place) -> dict[str, tuple[Any, ...]]:
    """The values to try for each open setting, the cheapest for a step's time first."""
    train, sharded = run.train, shards_weights(run.train)
    backend = backends().get(train.backend)
    ours = backend is not None and backend.name in ("local", "fsdp2", "deepspeed")
    on_host = ours and not (backend is not None and backend.name == "deepspeed" and train.zero_stage == 0)
    if train.cuda_graph or train.execution == "deepcompile" or train.optimizer == "adamw8bit":
        on_host = False
    values: dict[str, tuple[Any, ...]] = {
        "train.token_budget": _budgets(run, place.ranks),
        "train.activation_checkpointing": (False, True)
        if ours and train.execution != "deepcompile"
        else (False,),
        "train.reshard_after_forward": (False, True),
        "train.reduce_gradients": ("per_step", "per_micro_batch"),
        "train.optimizer_device": ("model", "cpu") if on_host else ("model",),
        "value.activation_checkpointing": (False, True),
        "value.optimizer_device": ("model", "cpu") if on_host else ("model",),
        "engine.offload": (False, True) if run.engine_name in ("native", "hf") else (False,),
    }
    if run.online:
        width = Parallelism(ranks=place.ranks, ring=train.ring, tp=train.tp)
        whole, least = kv_tokens(run, width), run.longest_context  # type: ignore[attr-defined]
        parts = [whole // n for n in (2, 4, 8) if whole // n >= least] if run.engine_name == "native" else []
        values["engine.kv_cache_tokens"] = ("auto", *parts)
        values["offload"] = tuple(_role_sets(run)) if backend is not None and backend.offloads else ((),)
    if sharded and train.execution == "joint":
        values["train.reshard_after_forward"] = (True,)
    return {path: values[path] for path in open_settings(run)}


def _role_sets(run: RunConfig) -> Iterator[tuple[str, ...]]:
    """Every set of roles that may be offloaded together."""
    able = [role for role in run.roles if role not in run.remote_roles]
    if run.train.cuda_graph:
        able = [role for role in able if role not in ("ref", "value")]
    if run.record.enabled:
        able = [role for role in able if role != "value"]
    for count in range(len(able) + 1):
        yield from itertools.combinations(able, count)


def _budgets(run: RunConfig, ranks: int) -> tuple[int, ...]:
    """Token budgets to try, the largest first."""
    longest = run.longest_unit
    if run.engine_has_own_memory:
        return (max(DEFAULT_TOKEN_BUDGET, longest),)
    parts = max(1, ranks // (run.train.tp * run.train.ring))
    needed = math.ceil(run.documents_per_update / parts) * longest
    sizes = [size for size in SIZES if size >= longest] or [longest]
    if longest > SIZES[0] and longest not in sizes:
        sizes.insert(0, longest)
    return tuple(reversed(sizes[: 1 + sum(size < needed for size in sizes)]))


# The choice.


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned(Generic[Run]):
    """A plan that fits, and the ones beside it."""

    run: Run
    """Without an open memory setting."""
    settings: Mapping[str, Any]
    """The values chosen for "auto", by dotted path."""
    plan: MemoryPlan
    seconds: float
    """Estimated time of a step."""
    place: Place
    fastest: Candidate
    """The fastest of all plans, whether it fits or not."""

    @property
    def record(self) -> dict[str, Any]:
        """The plan as the manifest keeps it."""
        return {
            "settings": {k: list(v) if isinstance(v, tuple) else v for k, v in self.settings.items()},
            "line": self.line,
            "peak_bytes": self.plan.peak_bytes,
            "allocated_bytes": self.plan.allocated_bytes,
            "allocated_by_phase": dict(self.plan.allocated_by_phase),
            "total_bytes": self.place.total_bytes,
            "ranks": self.place.ranks,
            "rests_on": rests_on(self.run),
        }

    @property
    def line(self) -> str:
        """The plan in a line."""
        total = f"{self.place.total_bytes / GIB:.0f} GiB"
        text = f"fits in {self.plan.peak_bytes / GIB:.0f} of {total}: {savings(self.run, self.settings)}"
        more = self.fastest.plan.peak_bytes - self.plan.peak_bytes
        if self.fastest.settings != self.settings and more > 0:
            ratio = self.seconds / self.fastest.seconds
            text += f"; {ratio:.2f}x the time of a plan with {more / GIB:.0f} GiB more"
        return text if self.place.card.measured else f"{text} (times estimated from data sheets)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A plan, whether it fits or not."""

    settings: Mapping[str, Any]
    seconds: float
    plan: MemoryPlan

    def line(self, run: RunConfig) -> str:
        """Describe the plan in a line. run: the run whose settings were open."""
        used = savings(with_settings(run, self.settings), self.settings)
        return f"{gib(self.plan.peak_bytes)}, {self.seconds:.2f} s a step: {used}"


def savings(run: RunConfig, settings: Mapping[str, Any]) -> str:
    """Describe how a plan saves memory; settings: those that were open."""
    words = {
        "train.reshard_after_forward": (True, "weights gathered again in backward"),
        "train.reduce_gradients": ("per_micro_batch", "gradients reduced in each micro-batch"),
        "engine.offload": (True, "engine released while training"),
        "train.activation_checkpointing": (True, "activation checkpointing"),
        "train.optimizer_device": ("cpu", "optimizer on the CPU"),
        "value.activation_checkpointing": (True, "activation checkpointing of the value model"),
        "value.optimizer_device": ("cpu", "value model's optimizer on the CPU"),
    }
    found = [f"micro-batches of {run.train.token_budget} tokens"] if "train.token_budget" in settings else []
    found += [text for path, (value, text) in words.items() if settings.get(path) == value]
    if settings.get("offload"):
        found.append(f"{' and '.join(settings['offload'])} offloaded")
    if settings.get("engine.kv_cache_tokens", "auto") != "auto":
        found.append(f"KV cache of {settings['engine.kv_cache_tokens']} tokens")
    return ", ".join(found) or "as set"


class Planner(Generic[Run]):
    """The plans of one run.

    Args:
        run: its engine and execution mode are resolved; its memory settings may be "auto".
        shape: of its model.
        value_shape: of PPO's value model; None: the run has none.
    """

    def __init__(
        self, run: Run, *, shape: ModelShape, place: Place, value_shape: ModelShape | None = None
    ) -> None:
        self.run, self.shape, self.place, self.value_shape = run, shape, place, value_shape
        self._peaks: dict[tuple[Any, ...], MemoryPlan] = {}
        self._times: dict[tuple[Any, ...], float] = {}
        choices = _choices(run, place)
        self._frugal = {path: values[-1] for path, values in choices.items()}
        every = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
        timed = [(self._seconds(settings), index, settings) for index, settings in enumerate(every)]
        self.ordered = [(seconds, settings) for seconds, _, settings in sorted(timed, key=lambda t: t[:2])]
        """Every candidate with its seconds, the fastest first; equally fast ones with the fewest savings."""

    def _seconds(self, settings: Mapping[str, Any]) -> float:
        """The estimated seconds of a step, as far as they depend on memory settings."""
        train, total = self.run.train, 0.0
        width = Parallelism(ranks=self.place.ranks, ring=train.ring, tp=train.tp)
        for part, paths in _TIMES.items():
            own = {path: settings[path] for path in paths if path in settings}
            key = (part, *own.values())
            if key not in self._times:
                run = with_settings(self.run, own)
                self._times[key] = part(run, self.shape, self.place.card, width)
            total += self._times[key]
        return total

    def plan(self, settings: Mapping[str, Any]) -> MemoryPlan:
        """The bytes of a candidate."""
        key = tuple(settings.values())
        if key not in self._peaks:
            self._peaks[key] = plan_memory(
                with_settings(self.run, settings),
                device=torch.device("cuda"),
                ranks=self.place.ranks,
                shape=self.shape,
                value_shape=self.value_shape,
            )
        return self._peaks[key]

    def candidates(self) -> Iterator[Candidate]:
        """Yield every plan, the fastest first."""
        for seconds, settings in self.ordered:
            yield Candidate(settings=settings, seconds=seconds, plan=self.plan(settings))

    def fitting(self, *, after: Sequence[Mapping[str, Any]] = ()) -> Candidate | None:
        """The fastest plan that fits; None: none does.

        Args:
            after: plans that ran out of memory all the same: the one to return needs less than each of them.
        """
        if self.smallest().plan.peak_bytes > self.place.usable_bytes:
            return None
        failed = [self.plan(settings) for settings in after]
        for candidate in self.candidates():
            peak = candidate.plan.peak_bytes
            if peak <= self.place.usable_bytes and all(peak < 0.97 * plan.peak_bytes for plan in failed):
                return candidate
        return None

    def smallest(self) -> Candidate:
        """The plan that needs least memory: with every saving, since none of them costs memory."""
        return Candidate(
            settings=self._frugal, seconds=self._seconds(self._frugal), plan=self.plan(self._frugal)
        )

    def choose(self) -> Planned[Run]:
        """Return the plan to train with.

        Raises:
            ConfigError: none fits; says what would.
        """
        found = self.fitting()
        if found is None:
            raise self._nothing_fits()
        return self.planned(found)

    def smaller(self, plan: Planned[Run]) -> Iterator[Planned[Run]]:
        """Yield the plans to go on with where memory runs out with `plan` all the same: each the fastest that
        needs less than those before it."""
        tried = [plan.settings]
        while (found := self.fitting(after=tried)) is not None:
            tried.append(found.settings)
            yield self.planned(found)

    def faster(self, plan: Candidate) -> Candidate | None:
        """Return the smallest of the plans that are faster; None: `plan` is the fastest."""
        found = [candidate for candidate in self.candidates() if candidate.seconds < plan.seconds]
        return min(found, key=lambda candidate: candidate.plan.peak_bytes, default=None)

    def planned(self, found: Candidate) -> Planned[Run]:
        """Return a candidate as a plan to train with."""
        return Planned(
            run=with_settings(self.run, found.settings),
            settings=found.settings,
            plan=found.plan,
            seconds=found.seconds,
            place=self.place,
            fastest=next(self.candidates()),
        )

    def _nothing_fits(self) -> ConfigError:
        least, place = self.smallest(), self.place
        part = max(
            (
                p
                for p in least.plan.by_place[least.plan.fullest]
                if p.phase in ("always", least.plan.peak_phase)
            ),
            key=lambda p: p.bytes,
        )
        ways = [*self._released(), *self._remedies()]
        fix = "; ".join(ways) if ways else "use a smaller model, or shorter documents"
        ranks = f" on each of {place.ranks} ranks" if place.ranks > 1 else ""
        return ConfigError(
            f"out-of-memory: the smallest plan needs {gib(least.plan.peak_bytes)}{ranks}, but "
            f"{gib(place.usable_bytes)} of {gib(place.total_bytes)} can be used ({place.gpu}); the largest "
            f"part is {part.name} ({gib(part.bytes)}). What would fit: {fix}",
            setting="train.token_budget",
        )

    def _released(self) -> Iterator[str]:
        """Settings of the user's without which the run fits: the first one that suffices, else as few as
        possible of them together."""
        given = {path: setting(self.run, path) for path in _memory_settings(self.run)}
        given = {path: value for path, value in given.items() if value != "auto"}
        together = list(given)
        for path in given:
            if self._fits(with_settings(self.run, {path: "auto"})) is not None:
                together = [path]
                break
        else:
            for path in given:
                fewer = [other for other in together if other != path]
                if self._fits(with_settings(self.run, dict.fromkeys(fewer, "auto"))) is not None:
                    together = fewer
        found = self._fits(with_settings(self.run, dict.fromkeys(together, "auto"))) if together else None
        if found is None:
            return
        changes = []
        for path in together:
            value, better = given[path], found.settings.get(path, "auto")
            or_auto = ", or 'auto'" if better != "auto" and len(together) == 1 else ""
            changes.append(f"{path} = {_shown(better)} instead of {_shown(value)}{or_auto}")
        yield " and ".join(changes)

    def _remedies(self) -> Iterator[str]:
        """Changes that would make the run fit: more GPUs, tensor parallelism, LoRA, 8-bit states."""
        run, ranks = self.run, self.place.ranks
        spans = run.train.backend in ("local", "fsdp2")
        for more in (2, 4, 8, 16, 32, 64):
            if spans and more > ranks and self._fits(run, ranks=more) is not None:
                yield f"{more} such GPUs (--ranks {more})"
                break
        for tp in (2, 4, 8):
            splits = spans and tp > run.train.tp and ranks % tp == 0 and self._heads_split(tp)
            if splits and self._fits(with_settings(run, {"train.tp": tp})) is not None:
                yield f"train.tp = {tp}"
                break
        if run.model.lora is None:
            adapters = dataclasses.replace(self.shape, trained=self.shape.parameters // 200, lora=True)
            if self._fits(run, shape=adapters) is not None:
                yield "LoRA ([model.lora])"
        alone = run.train.backend == "local" and run.train.optimizer == "adamw"
        if alone and self._fits(with_settings(run, {"train.optimizer": "adamw8bit"})) is not None:
            yield "8-bit optimizer states (train.optimizer = 'adamw8bit')"

    def _heads_split(self, tp: int) -> bool:
        return self.shape.heads % tp == 0 and self.shape.kv_heads % tp == 0

    def _fits(self, run: Run, *, ranks: int = 0, shape: ModelShape | None = None) -> Candidate | None:
        """The plan with which a changed run fits."""
        place = dataclasses.replace(self.place, ranks=ranks or self.place.ranks)
        if place.ranks > 1 and run.train.backend == "local":
            run = with_settings(run, {"train.backend": "fsdp2"})
        try:
            on_ranks(run, place.ranks)
            return Planner(
                run, shape=shape or self.shape, place=place, value_shape=self.value_shape
            ).fitting()
        except ConfigError:  # the change is not possible for another reason
            return None
