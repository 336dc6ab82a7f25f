"""The parts of a run, built in one place: every "auto" is resolved here, every name looked up."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import platform
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import numpy as np
import torch

from lockstep.algorithms import ALGORITHMS
from lockstep.config.algorithm import GRPOConfig
from lockstep.config.engine import kind
from lockstep.config.run import GRPORun, Role, RunConfig
from lockstep.data.prompts import FixedPrompts, PromptSet, evaluates, load_train_and_held_out
from lockstep.engine.build import is_external, make_engine
from lockstep.errors import ConfigError, together
from lockstep.loop.determinism import (
    BatchInvariance,
    convert_copy,
    make_invariant,
    prepare_kernels,
)
from lockstep.loop.distributed import mesh_coordinates
from lockstep.loop.engines import external_engine_spec
from lockstep.loop.gap_check import BitwiseCheck, shared_contract
from lockstep.loop.memory_plan import start_offloading
from lockstep.loop.preflight import faults
from lockstep.loop.resolve import Resolved, find_machine, resolve
from lockstep.loop.roles import Roles, ValueRole, policy_steps
from lockstep.loop.world import World, check_devices
from lockstep.loop.world_roles import WorldValue, build_others
from lockstep.models.architectures import text_config
from lockstep.models.load import LoadedModel, OpenedModel, check_positions, load_model, open_model
from lockstep.models.memory import opened_shape
from lockstep.observe.lock import OwnedFolder
from lockstep.packing import Planner
from lockstep.protocols import (
    Algorithm,
    InferenceEngine,
    Saved,
    Scorer,
    SharesWeights,
    TrainBackend,
    ValueAlgorithm,
    WeightTransfer,
)
from lockstep.ranks.context import RankContext
from lockstep.recording.recorder import Recorder
from lockstep.registry import require_members
from lockstep.rollout.prompt_kinds import prompt_kinds
from lockstep.rollout.reward_models import RewardModels
from lockstep.rollout.rewards import RewardSet
from lockstep.schema.contract import KernelContract
from lockstep.schema.recording import RecordingHeader
from lockstep.train import BACKENDS
from lockstep.transfer import make_transfer
from lockstep.transfer.verify import Verifier
from lockstep.version import library_versions

Run = TypeVar("Run", bound=RunConfig)

OnProgress = Callable[[int, int], None]
"""Called with (samples finished, samples in all) during generation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineParts:
    """Everything an RL loop is made of. Replace any of them with `dataclasses.replace` and go on."""

    resolved: Resolved[GRPORun]
    model: LoadedModel
    backend: TrainBackend
    """Of the policy."""
    ref: Scorer | None
    """The frozen reference; None: the algorithm has no KL term."""
    engine: InferenceEngine
    transfer: WeightTransfer
    algorithm: Algorithm
    algorithm_options: GRPOConfig
    """run.algorithm with the published values filled in."""
    prompts: PromptSet
    eval_prompts: PromptSet
    rewards: RewardSet
    plan: Planner
    reward_models: RewardModels | None = None
    """Score each rollout beside `rewards`."""
    batch_invariance: BatchInvariance | None = None
    """The parts that were made batch-invariant; None: none was asked for."""
    bitwise_check: BitwiseCheck | None = None
    """Set where trainer and engine have the same kernel contract; None: their logprobs are close, not
    equal."""
    value: ValueRole | WorldValue | None = None
    """The value model; None: the algorithm has none."""
    worlds: tuple[World, ...] = ()
    """Of the roles that are not in this process."""
    verifier: Verifier | None = None
    """Checks after pushes that the engine holds the weights; None: not checked."""
    on_progress: OnProgress | None = None
    recorder: Recorder | None = None
    ranks: RankContext = field(default_factory=RankContext.alone)

    @property
    def run(self) -> GRPORun:
        """The settings, without an "auto"."""
        return self.resolved.run

    @property
    def roles(self) -> Saved:
        """What a checkpoint holds: the policy, and the value model if there is one."""
        if self.value is None:
            return self.backend
        others, algorithm = {"value": self.value.backend}, cast(ValueAlgorithm, self.algorithm)
        return Roles(policy=self.backend, others=others, algorithm=algorithm, ranks=self.ranks)

    def close(self) -> None:
        """Close all parts, the engine first, because it reads the backend's Parameters. One that fails to
        close does not stop the others."""
        with contextlib.ExitStack() as stack:
            for world in self.worlds:
                stack.callback(world.close)
            if self.value is not None:
                stack.callback(self.value.backend.close)
            for part in (self.backend, self.rewards, self.transfer, self.engine):
                stack.callback(part.close)


def build_online(
    run: GRPORun,
    *,
    rewards: Sequence[Callable[..., Any]] = (),
    on_progress: OnProgress | None = None,
    ranks: RankContext | None = None,
    work_dir: Path | None = None,
    manifest: Mapping[str, Any] | None = None,
) -> OnlineParts:
    """Check, load and wire everything that `run` names.

    Args:
        rewards: Python callables instead of `run.rewards`, each f(prompt=, completion=, row=) -> float.
        ranks: the ranks of the run, every one of which makes this call; None: this process alone.
        work_dir: for logs and files of an engine of its own; None: the system's folder for temporary files.
        manifest: of the run's folder, see `resolve` and `holds_out`; None: the run begins.

    Raises:
        ConfigError, ModelError, DataError, EngineError: before anything is trained.
    """
    options, ranks = run.algorithm.resolved(), ranks or RankContext.alone()
    machine, reward_set = find_machine(run, ranks), RewardSet(run.rewards, functions=rewards)
    with ranks.together("loading model and data"):
        check_devices(run, ranks=ranks)
        opened = open_model(run.model)
        shape = partial(opened_shape, opened, run.model)
        resolved = resolve(run, shape=shape, machine=machine, manifest=manifest or {})
        hold_out = holds_out(run, manifest or {})
        prompts, eval_prompts = _load_prompts(run, opened, reward_set, hold_out=hold_out)
        policy = load_policy(resolved, ranks=ranks, opened=opened)
        resolved, model = policy.resolved, policy.model
        run = resolved.run
    algorithm = ALGORITHMS.load(options.name)(options, max_tokens=run.rollout.sampling.max_tokens)
    backend = build_backend(
        resolved,
        model,
        total_steps=policy_steps(run) * run.train.minibatches * run.train.epochs_per_batch,
        temperature=run.rollout.sampling.temperature,
        ref=algorithm.needs_ref and "ref" not in run.remote_roles,
    )
    start_offloading(run, *_with_policy(run), backend=backend)
    plan = make_planner(resolved, ranks)
    others = build_others(resolved, model, plan=plan, ranks=ranks, work_dir=work_dir)
    try:
        # Last: what can be wrong with the run is known before a server is started.
        engine, transfer = _connect_engine(resolved, model, backend=backend, ranks=ranks, work_dir=work_dir)
        check = _bitwise_check(resolved, backend=backend, engine=engine, ranks=ranks)
    except BaseException:
        others.close()
        raise
    parts = OnlineParts(
        resolved=resolved,
        model=model,
        backend=backend,
        ref=backend.ref if others.ref is None else others.ref,
        engine=engine,
        transfer=transfer,
        algorithm=algorithm,
        algorithm_options=options,
        prompts=prompts,
        eval_prompts=eval_prompts,
        rewards=reward_set,
        reward_models=others.reward_models,
        plan=plan,
        value=others.value,
        worlds=others.worlds,
        batch_invariance=policy.batch_invariance,
        bitwise_check=check,
        on_progress=on_progress,
        ranks=ranks,
    )
    return dataclasses.replace(parts, verifier=_verifier(parts)) if is_external(run.engine) else parts


def holds_out(run: GRPORun, manifest: Mapping[str, Any]) -> bool:
    """Return whether prompts are held out of training. This is decided when the run is started: evaluations
    may be turned on and off on resume, and the training data must stay the same."""
    # Runs of earlier versions always held prompts out; one that failed early has not decided.
    return bool(manifest.get("held_out", "axes" in manifest or evaluates(run)))


def _load_prompts(
    run: GRPORun, model: OpenedModel, rewards: RewardSet, *, hold_out: bool
) -> tuple[PromptSet, FixedPrompts]:
    """Load what there is to learn from; whatever of it, the config and the rewards do not fit each other is
    refused before weights are read. All such faults are reported together."""
    loaded: list[tuple[PromptSet, FixedPrompts]] = []

    def load() -> None:
        both = load_train_and_held_out(
            run,
            tokenizer=model.tokenizer,
            vocab_size=model.text.vocab_size,
            hold_out=hold_out,
        )
        for prompts in both:
            if isinstance(prompts, FixedPrompts) and len(prompts):
                rewards.check_row(prompts[0].row)
                rewards.check_rows(prompts)
        prompt_kinds(islice(both[1], run.eval.num_prompts), run.eval.kinds)  # while a search can be refused
        loaded.append(both)

    longest = run.data.max_prompt_tokens + run.rollout.sampling.max_tokens
    setting = "data.max_prompt_tokens + rollout.sampling.max_tokens"
    found = faults([load, partial(check_positions, model, longest, setting=setting)])
    if found:
        raise together(found)
    return loaded[0]


def _with_policy(run: GRPORun) -> tuple[Role, ...]:
    """Roles whose memory is the policy's backend's."""
    return ("policy",) if "ref" in run.remote_roles else ("policy", "ref")


def _verifier(parts: OnlineParts) -> Verifier:
    run = parts.run
    return Verifier(
        when=run.engine.verify,
        backend=parts.backend,
        engine=parts.engine,
        transfer=parts.transfer,
        plan=parts.plan,
        vocab_size=text_config(parts.model.module).vocab_size,
        max_prompt_tokens=run.data.max_prompt_tokens,
        max_tokens=run.rollout.sampling.max_tokens,
        temperature=run.rollout.sampling.temperature,
        dtype=parts.resolved.dtype,
        ranks=parts.ranks,
    )


def make_planner(resolved: Resolved[GRPORun], ranks: RankContext) -> Planner:
    """Build what packs the samples of every role."""
    run = resolved.run
    return Planner(
        token_budget=resolved.token_budget,
        static_capacity=resolved.static_capacity,
        layout=resolved.layout,
        max_seqlen=run.data.max_prompt_tokens + run.rollout.sampling.max_tokens,
        max_documents=run.rollout.prompts_per_step * run.rollout.group_size,
        parts=data_parallel(run, ranks),
    )


def _connect_engine(
    resolved: Resolved[GRPORun],
    model: LoadedModel,
    *,
    backend: TrainBackend,
    ranks: RankContext,
    work_dir: Path | None,
) -> tuple[InferenceEngine, WeightTransfer]:
    """Of engines with weights of their own every rank has one; where that of one rank does not start, none is
    left running."""
    config, device = resolved.run.engine, resolved.device
    if not is_external(config):
        engine = make_engine(config, model=engine_model(resolved, model, backend))
        return engine, make_transfer(config, engine, device=device)
    work_dir = _rank_folder(work_dir or OwnedFolder("engine").path, ranks)
    started: InferenceEngine | None = None
    try:
        with ranks.together("starting the engine"):
            spec = external_engine_spec(resolved, model, work_dir=work_dir)
            started = make_engine(config, spec=spec)
            transfer = make_transfer(config, started, device=device, work_dir=work_dir)
    except BaseException:
        if started is not None:
            started.close()
        raise
    return started, transfer


def _rank_folder(work_dir: Path, ranks: RankContext) -> Path:
    """Every rank has an engine of its own."""
    return work_dir / f"rank-{ranks.rank}" if ranks.world_size > 1 else work_dir


def _bitwise_check(
    resolved: Resolved[GRPORun], *, backend: TrainBackend, engine: InferenceEngine, ranks: RankContext
) -> BitwiseCheck | None:
    """Return the check of equal kernel contracts; None: they need not be equal, or cannot be. With several
    ranks the error of one is the error of all. Closes the engine before it raises."""
    run = resolved.run
    external, reuse = is_external(run.engine), run.train.reuse_rollout_logprobs
    contract: KernelContract | None = None
    try:
        with ranks.together("comparing kernel contracts"):
            if resolved.batch_invariant and (not external or kind(run.engine) == "native, started"):
                contract = shared_contract(backend, cast(SharesWeights, engine), engine_name=run.engine.name)
            if contract is None and reuse:
                raise ConfigError(
                    "unsupported-combination: train.reuse_rollout_logprobs = true with engine.name = "
                    f"{run.engine.name!r} and batch-invariance "
                    f"{'on' if resolved.batch_invariant else 'off'}: nothing promises that the engine's "
                    "logprobs are the trainer's; leave it out, or set engine.name = 'native' and "
                    "train.batch_invariant = true"
                )
        ranks.require_same(
            {"contract": None if contract is None else contract.hash}, what="their kernel contracts"
        )
    except BaseException:
        engine.close()
        raise
    if contract is None:
        return None
    return BitwiseCheck(contract, reuse=reuse is not False, at_once=data_parallel(run, ranks))


def seed_generators(run: RunConfig, ranks: RankContext | None) -> None:
    """Seed the global generators: torch's differs between ranks that draw dropout of their own."""
    random.seed(run.seed)
    np.random.seed(run.seed % 2**32)
    torch.manual_seed(run.seed + (0 if ranks is None else mesh_coordinates(run, ranks).stream))


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy(Generic[Run]):
    """The result of `load_policy`."""

    resolved: Resolved[Run]
    """As far as its model allows."""
    model: LoadedModel
    batch_invariance: BatchInvariance | None


def load_policy(
    resolved: Resolved[Run], *, ranks: RankContext | None = None, opened: OpenedModel | None = None
) -> Policy[Run]:
    """Load the policy on its device: without weights, where the backend reads its own part of them; with
    batch-invariant modules, if the run has them. Also seeds the global generators that dropout and reward
    functions draw from.

    Raises:
        ConfigError, ModelError: the run is not possible with this model on this machine.
    """
    run = resolved.run
    seed_generators(run, ranks)
    device = torch.device(resolved.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # kernels that are launched by hand look at the current device
    if run.train.num_threads is not None:
        torch.set_num_threads(run.train.num_threads)
    backend = BACKENDS.load(run.train.backend)
    restore_settings = prepare_kernels(run.train)

    def load() -> LoadedModel:
        whole = not backend.shards_weights
        return load_model(
            run.model,
            attention=resolved.attention,
            device=device,
            materialize=whole,
            opened=opened,
        )

    model, batch_invariance = load(), None
    if resolved.batch_invariant:
        required = resolved.given.train.batch_invariant
        batch_invariance = make_invariant(model, device=device, required=required)
        if batch_invariance.refused is not None:
            restore_settings()
            del model  # it may be converted in part; two of them may not fit
            model = load()
            resolved = resolved.without_batch_invariance()
    model = dataclasses.replace(model, execution=resolved.execution)
    return Policy(resolved=resolved, model=model, batch_invariance=batch_invariance)


def engine_model(resolved: Resolved[GRPORun], model: LoadedModel, backend: TrainBackend) -> LoadedModel:
    """Return the model that the engine samples with: the trainer's own module where its Parameters are whole
    between calls, else a second one, into which every push copies."""
    if backend.weights(policy_version=0).shared_module is model.module:
        return model
    merged = resolved.run.model.model_copy(
        update={"lora": None}
    )  # a backend that sends weights sends them merged
    own = load_model(merged, attention=resolved.attention, device=torch.device(resolved.device))
    own = dataclasses.replace(own, execution=model.execution)
    return convert_copy(own) if resolved.batch_invariant else own


def data_parallel(run: RunConfig, ranks: RankContext) -> int:
    """Return how many ranks get micro-batches of their own."""
    return mesh_coordinates(run, ranks).sizes["dp"]


def build_backend(
    resolved: Resolved[Run], model: LoadedModel, *, total_steps: int, temperature: float, ref: bool
) -> TrainBackend:
    """Build the policy's train backend; its schedule spans `total_steps` optimizer steps."""
    train = resolved.run.train
    backend: TrainBackend = BACKENDS.load(train.backend)(
        train,
        model=model,
        total_steps=total_steps,
        temperature=temperature,
        ref=ref,
    )
    require_members(backend, ("contract", "ref"), what=f"train.backend = {train.backend!r}")
    return backend


def recording_header(
    resolved: Resolved[Run],
    *,
    model: LoadedModel,
    plan: Planner,
    temperature: float = 1.0,
    contract: KernelContract | None = None,
) -> RecordingHeader:
    """Build the header that all inputs of this run's recording share. contract: the train backend's, if it
    has one."""
    run = resolved.run
    folder, axes = Path(run.model.name), resolved.axes
    settings = {"name": str(folder.resolve())} if folder.is_dir() else {}
    cuda = resolved.device.startswith("cuda")
    return RecordingHeader(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        framework="lockstep",
        versions=library_versions(),
        model=run.model.model_copy(update=settings).model_dump(mode="json"),
        vocab_size=text_config(model.module).vocab_size,
        algorithm=run.algorithm_options.model_dump(mode="json"),
        temperature=temperature,
        max_tokens=None if run.sampling is None else run.sampling.max_tokens,
        axes={
            **{name: axes[name] for name in ("backend", "engine", "attention", "execution", "layout")},
            "padding_side": run.train.padding_side,
            **{name: axes[name] for name in ("device", "dtype", "static_capacity")},
            "activation_checkpointing": run.train.activation_checkpointing,
            "batch_invariant": resolved.batch_invariant,
        },
        contract=None if contract is None else contract.as_json(),
        capacity={
            "token_budget": resolved.token_budget,
            "max_seqlen": plan.max_seqlen,
            "max_documents": plan.max_documents,
        },
        device_name=torch.cuda.get_device_name(resolved.device) if cuda else platform.processor() or "cpu",
    )
