"""The parts of a run, built in one place: every "auto" is resolved here, every name looked up."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch

from lockstep.algorithms import ALGORITHMS
from lockstep.config.engine import kind
from lockstep.config.environment import EnvironmentConfig
from lockstep.config.run import GRPORun, Role, RunConfig, on_ranks
from lockstep.data.chat import ChatFormat
from lockstep.data.held_out import (
    evaluates,
    holds_out,
    holds_out_rows,
)
from lockstep.data.prompts import FixedPrompts
from lockstep.data.row_tools import RowTools
from lockstep.engine.build import is_external, make_engine
from lockstep.environments.hosts import ToolHosts
from lockstep.environments.tool_environment import ToolEnvironment
from lockstep.errors import ConfigError
from lockstep.loop.determinism import (
    batch_invariance_lines,
    batch_invariance_manifest,
    contract_change,
    make_invariant,
    prepare_kernels,
)
from lockstep.loop.distributed import mesh_coordinates
from lockstep.loop.engines import (
    engine_model,
    engine_report,
    external_engine_spec,
    leads_engine,
    report_lines,
)
from lockstep.loop.environment import check_own_environment, load_prompts
from lockstep.loop.expert_checks import check_experts
from lockstep.loop.gap_check import BitwiseCheck, shared_contract
from lockstep.loop.machine import check_devices, find_machine
from lockstep.loop.memory_plan import start_offloading
from lockstep.loop.policy import LoadedPolicy, Policy, Reference, Trained
from lockstep.loop.remote_roles import RemoteCritic, build_others
from lockstep.loop.resolve import Resolved, resolve
from lockstep.loop.role_worker import RoleWorker
from lockstep.loop.roles import Critic, describe_reward_models
from lockstep.loop.rollouts import LoopHooks, RolloutEngine, Rollouts, journal_of
from lockstep.models.architectures import text_config
from lockstep.models.load import (
    LoadedModel,
    OpenedModel,
    load_model,
    open_model,
)
from lockstep.models.memory import opened_shape
from lockstep.observe.lock import OwnedFolder
from lockstep.observe.metrics import Spans
from lockstep.packing import Planner
from lockstep.protocols import Algorithm, InferenceEngine, SharesWeights, TrainBackend, WeightTransfer
from lockstep.ranks.context import RankContext
from lockstep.registry import require_members
from lockstep.rollout.environment import Environment, SingleTurn
from lockstep.rollout.reward_models import RewardModels
from lockstep.rollout.rewards import RewardSet
from lockstep.schema.contract import KernelContract
from lockstep.train import BACKENDS
from lockstep.transfer import make_transfer
from lockstep.transfer.buckets import Verifier

Run = TypeVar("Run", bound=RunConfig)

if TYPE_CHECKING:
    from lockstep.loop import run as running


class Builder:
    """Builds the parts of an RL run, each with one call, in this order: environment, algorithm, policy,
    roles, engine, rollouts. A context manager, which closes what was built.

    Args:
        ranks: the ranks of the run, every one of which makes the same calls; None: this process alone.
        work_dir: for logs and files of an engine of its own; None: the system's folder for temporary files.
        manifest: of the run's folder, see `resolve` and `holds_out`; None: the run begins.
        hooks: None: timers of its own, no display, no signals.
    """

    def __init__(
        self,
        config: GRPORun,
        *,
        ranks: RankContext | None = None,
        work_dir: Path | None = None,
        manifest: Mapping[str, Any] | None = None,
        hooks: LoopHooks | None = None,
    ) -> None:
        ranks = ranks or RankContext.alone()
        config = on_ranks(config, ranks.world_size)
        self.ranks, self.config, self.work_dir = ranks, config, work_dir
        self.manifest = manifest or {}
        self.hooks = hooks or LoopHooks()
        self.hold_out = holds_out(config, self.manifest)
        self.role_workers: tuple[RoleWorker, ...] = ()
        """Workers of the remote roles."""
        self.reward_models: RewardModels | None = None
        self.own_environment: str | None = None
        """The class of an environment of the user's; None: the config's."""
        self._machine = find_machine(config, self.ranks)
        self._opened: OpenedModel | None = None
        self._resolved: Resolved[GRPORun] | None = None
        """Set by `environment`."""
        self._trained: list[Trained] = []
        self._closing = contextlib.ExitStack()

    @classmethod
    def of(cls, run: running.Run) -> Builder:
        """Return the builder of a run's parts.

        Raises:
            ConfigError: an evaluation is asked for, and the run has trained on all prompts.
        """
        config, manifest = cast(GRPORun, run.config), run.dir.read_manifest()
        if evaluates(config) and not holds_out(config, manifest):
            raise ConfigError(
                f"contradiction: eval.before = {config.eval.before}, eval.every = {config.eval.every}, "
                f"eval.after = {config.eval.after}, but {str(run.dir.path)!r} was started without an "
                "evaluation, so no prompts are held out from its training; turn evaluations off, or start "
                "a new run"
            )
        return Builder(
            config,
            ranks=run.ranks,
            work_dir=run.dir.path / "engine",
            manifest=manifest,
            hooks=LoopHooks(
                spans=run.spans,
                on_progress=run.progress,
                stopping=run.stopping,
                cancelled=run.is_cancelled,
                closing=run.stop_deferring,
                journal=journal_of(run.dir, manifest, config=config, ranks=run.ranks),
            ),
        )

    def use(self, spans: Spans) -> None:
        """Let `spans` get the times of parts that were built before."""
        self.hooks.spans = spans
        for trained in self._trained:
            trained.spans = spans
            if trained.engine is not None:
                trained.engine.spans = spans

    def __enter__(self) -> Builder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all parts, the engine first, because it reads the policy's Parameters. One that fails to
        close does not stop the others."""
        self.hooks.closing()
        self._closing.close()

    def environment(
        self, own: Environment | None = None, *, rewards: Sequence[Callable[..., Any]] = ()
    ) -> Environment:
        """Return the environment, checked before any weights are read: `own`, or prompts and rewards as the
        config names them.

        Args:
            rewards: Python callables instead of `config.rewards`, each f(prompt=, completion=, row=).

        Raises:
            ConfigError, DataError, ModelError: all faults of the data and of the rewards together.
        """
        config = self.config
        if own is not None:
            self._closing.callback(own.close)
            self.own_environment = type(own).__qualname__
        then = self.manifest.get("environment", self.own_environment)
        if then != self.own_environment:
            names = [name or "of the config" for name in (then, self.own_environment)]
            fix = f"pass a {then} as environment" if then else "leave environment out"
            raise ConfigError(
                f"values-differ: the run was started with the environment {names[0]}, but is being resumed "
                f"with the environment {names[1]}; {fix}: train_online(run, resume=..., ...)"
            )
        with self.ranks.fail_together("loading model and data"):
            check_devices(config.cluster, self._machine.device, ranks=self.ranks)
            opened = self._opened = open_model(config.model)
            shape = partial(opened_shape, opened, config.model)
            self._resolved = resolve(config, shape=shape, machine=self._machine, manifest=self.manifest)
            self.config = self._resolved.run
            if own is None:
                of_config = RewardSet(config.rewards, functions=rewards)
                self._closing.callback(of_config.close)
            else:
                check_own_environment(own, config, rewards=rewards)
        if own is not None:
            return own
        return self._of_config(opened, of_config)

    def _of_config(self, opened: OpenedModel, rewards: RewardSet) -> Environment:
        config, section = self.config, self.config.environment
        hosts, tools = (None, None) if section is None else self._tool_hosts(section, rewards)
        with self.ranks.fail_together("loading model and data"):
            prompts, held_out = load_prompts(config, opened, rewards, hold_out=self.hold_out, tools=tools)
            if section is None or hosts is None:
                return SingleTurn(rewards, prompts=prompts, held_out=held_out)
            return ToolEnvironment(
                section,
                rewards,
                hosts=hosts,
                chat=ChatFormat(config.data, opened.tokenizer),
                prompts=prompts,
                held_out=held_out,
            )

    def _tool_hosts(
        self, section: EnvironmentConfig, rewards: RewardSet
    ) -> tuple[ToolHosts | None, RowTools | None]:
        """Start the classes' hosts, and return them with the tools that prompts show. Ranks that run one
        engine together need the tools, but only the first of them samples and has hosts."""
        assert self._resolved is not None, "environment() has set it"
        hosts = None
        with self.ranks.fail_together("starting the environment"):
            if leads_engine(self._resolved, self.ranks):
                hosts = ToolHosts(section, journal=self.hooks.journal)
                self._closing.callback(hosts.close)
                if not rewards and self.config.reward_model is None:
                    hosts.require_reward()
        own = None if hosts is None else hosts.tools
        return hosts, self.ranks.broadcast(own, RowTools | None, what="the environment's tools")

    def algorithm(self) -> Algorithm:
        """Return advantages and loss."""
        options = self.config.algorithm.resolved()
        make = ALGORITHMS.load(options.name)
        algorithm: Algorithm = make(options, max_tokens=self.config.rollout.trajectory_tokens)
        return algorithm

    def policy(self, algorithm: Algorithm) -> Policy:
        """Load the model that is trained, and build its train backend.

        Raises:
            ConfigError, ModelError: the run is not possible with this model on this machine.
        """
        assert self._resolved is not None, "environment() comes first"
        with self.ranks.fail_together("loading model and data"):
            loaded = load_policy(self._resolved, ranks=self.ranks, opened=self._opened)
        config = self.config = loaded.resolved.run
        backend = build_backend(
            loaded.resolved,
            loaded.model,
            total_steps=config.policy_steps * config.train.minibatches * config.train.epochs_per_batch,
            temperature=config.rollout.sampling.temperature,
            ref=algorithm.needs_ref and "ref" not in config.remote_roles,
        )
        self._closing.callback(backend.close)
        start_offloading(config, *_with_policy(config), backend=backend)
        policy = Policy(
            backend,
            loaded,
            plan=make_planner(loaded.resolved, self.ranks),
            spans=self.hooks.spans,
            warmup_steps=config.steps - config.policy_steps,
        )
        self._trained.append(policy)
        return policy

    def roles(
        self, policy: Policy, environment: Environment, algorithm: Algorithm
    ) -> tuple[Reference | None, Critic | RemoteCritic | None]:
        """Build the models beside the policy: a frozen reference and a value model, each None where the
        algorithm has none. Reward models join the environment.

        Raises:
            ConfigError, ModelError, TrainError: one of them cannot be loaded, or its process does not start.
        """
        others = build_others(policy, ranks=self.ranks, work_dir=self.work_dir)
        self._closing.callback(others.close)
        self.role_workers, critic = others.workers, others.value
        if critic is not None:
            self._closing.callback(critic.backend.close)
            self._trained.append(critic)
        self.reward_models = others.reward_models
        if self.own_environment is None and isinstance(environment, SingleTurn):
            environment.reward_models = others.reward_models
        reference = None
        if algorithm.needs_ref:
            scorer = policy.backend.ref if others.ref is None else others.ref
            assert scorer is not None, "the backend was asked for one"
            minibatches = self.config.train.minibatches
            reference = Reference(scorer, plan=policy.plan, minibatches=minibatches, spans=self.hooks.spans)
            self._trained.append(reference)
        return reference, critic

    def engine(self, policy: Policy) -> RolloutEngine:
        """Start the inference engine: last, so that what can be wrong with the run is known before a server
        is started.

        Raises:
            ConfigError, EngineError: it cannot serve the policy, or does not start.
        """
        config, resolved = self.config, policy.resolved
        engine, transfer = _connect_engine(
            resolved, policy.model, backend=policy.backend, ranks=self.ranks, work_dir=self.work_dir
        )
        self._closing.callback(transfer.close)
        self._closing.callback(engine.close)
        policy.check = _bitwise_check(resolved, backend=policy.backend, engine=engine, ranks=self.ranks)
        connected = RolloutEngine(
            engine,
            transfer,
            config=config.engine,
            device=resolved.device,
            ranks=self.ranks,
            spans=self.hooks.spans,
        )
        if is_external(config.engine):
            connected.verifier = _verifier(config, policy, engine, transfer, ranks=self.ranks)
        for trained in self._trained:
            trained.engine = connected
        return connected

    def rollouts(self, engine: RolloutEngine, environment: Environment, algorithm: Algorithm) -> Rollouts:
        """Return what samples the groups of each step."""
        rollouts = Rollouts(engine, environment, algorithm, config=self.config, hooks=self.hooks)
        self._closing.callback(rollouts.close)
        return rollouts


def describe(
    run: running.Run, build: Builder, *, environment: Environment, policy: Policy, engine: RolloutEngine
) -> None:
    """Write what everything became to the manifest of a run, and show it.

    Raises:
        DataError, ModelError: a resumed run finds other data or reward models than it was started with.
    """
    run.describe(
        resolved=policy.resolved,
        model=policy.model,
        data=environment.report,
        fingerprint=environment.fingerprint,
    )
    if isinstance(environment, SingleTurn) and isinstance(environment.prompts, FixedPrompts):
        run.follow_rows(environment.prompts.items)
    report = engine_report(engine.engine, engine.transfer)
    contract = None if policy.check is None else policy.check.contract
    changed = contract_change(run.dir.read_manifest().get("contract"), contract)
    workers = {worker.name: worker.describe() for worker in build.role_workers}
    invariance = policy.batch_invariance
    run.dir.update_manifest(
        {
            "held_out": build.hold_out,
            "environment": build.own_environment,
            "engine": report,
            "remote_roles": list(workers.values()),
        }
        | batch_invariance_manifest(invariance, contract)
    )
    of_models = describe_reward_models(
        build.reward_models, run.dir, policy_tokenizer=policy.model.tokenizer, ranks=run.ranks
    )
    run.display.notes(
        [*report_lines(report), *batch_invariance_lines(invariance, contract), *changed],
        [f"{name}: log {worker['log']}" for name, worker in workers.items()],
        [
            *environment.notes(),
            *of_models,
            *(() if build.own_environment else _small_set_notes(build.config, environment)),
        ],
    )


def _small_set_notes(config: GRPORun, environment: Environment) -> list[str]:
    """A note where fewer prompts are held out than eval.num_prompts, which would be most of the rows."""
    held_out = len(environment.held_out(config.eval.num_prompts))
    if not held_out or not holds_out_rows(config) or held_out >= config.eval.num_prompts:
        return []
    return [
        f"eval.num_prompts = {config.eval.num_prompts} would be more than half of data.source; rows held "
        f"out instead: {held_out} (to change that, set eval_data.source or eval.num_prompts)"
    ]


def _with_policy(run: GRPORun) -> tuple[Role, ...]:
    """Roles whose memory is the policy's backend's."""
    return ("policy",) if "ref" in run.remote_roles else ("policy", "ref")


def _verifier(
    run: GRPORun,
    policy: Policy,
    engine: InferenceEngine,
    transfer: WeightTransfer,
    *,
    ranks: RankContext,
) -> Verifier:
    return Verifier(
        when=run.engine.verify,
        backend=policy.backend,
        engine=engine,
        transfer=transfer,
        plan=policy.plan,
        vocab_size=text_config(policy.model.module).vocab_size,
        max_prompt_tokens=run.data.max_prompt_tokens,
        max_tokens=run.rollout.sampling.max_tokens,
        temperature=run.rollout.sampling.temperature,
        dtype=policy.resolved.dtype,
        ranks=ranks,
    )


def make_planner(resolved: Resolved[GRPORun], ranks: RankContext) -> Planner:
    """Build what packs the samples of every role."""
    run = resolved.run
    return Planner(
        token_budget=resolved.token_budget,
        static_capacity=resolved.static_capacity,
        layout=resolved.layout,
        max_seqlen=run.longest_unit,
        max_documents=run.rollout.samples,
        parts=data_parallel(run, ranks),
        whole_trajectories=run.algorithm.resolved().whole_sequences,
    )


def _connect_engine(
    resolved: Resolved[GRPORun],
    model: LoadedModel,
    *,
    backend: TrainBackend,
    ranks: RankContext,
    work_dir: Path | None,
) -> tuple[InferenceEngine, WeightTransfer]:
    """Start the engine and the transfer of weights to it. With an external engine, every rank starts one; if
    one of them does not start, the others are closed."""
    config, device = resolved.run.engine, resolved.device
    if not is_external(config):
        engine = make_engine(config, model=engine_model(resolved, model, backend))
        return engine, make_transfer(config, engine, device=device)
    work_dir = _rank_folder(work_dir or OwnedFolder("engine").path, ranks)
    started: InferenceEngine | None = None
    try:
        with ranks.fail_together("starting the engine"):
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
        with ranks.fail_together("comparing kernel contracts"):
            if resolved.batch_invariant and (not external or kind(run.engine) == "native, started"):
                contract = shared_contract(backend, cast(SharesWeights, engine), engine_name=run.engine.name)
            if contract is None and reuse:
                raise ConfigError(
                    "unsupported-combination: train.reuse_rollout_logprobs = true with engine.name = "
                    f"{run.engine.name!r} and batch-invariance "
                    f"{'on' if resolved.batch_invariant else 'off'}: the engine's logprobs are not "
                    "guaranteed to equal the trainer's; leave it out, or set engine.name = 'native' and "
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
    reuses = reuse is not False and not run.rollout.max_lag  # earlier weights sampled a part of them
    return BitwiseCheck(contract, reuse=reuses, at_once=data_parallel(run, ranks))


def seed_generators(seed: int, *, stream: int) -> None:
    """Seed the global generators: torch's differs between ranks that draw dropout of their own."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed + stream)


def load_policy(
    resolved: Resolved[Run], *, ranks: RankContext | None = None, opened: OpenedModel | None = None
) -> LoadedPolicy[Run]:
    """Load the policy on its device: without weights, where the backend reads its own part of them; with
    batch-invariant modules, if the run has them. Also seeds the global generators that dropout and reward
    functions draw from.

    Raises:
        ConfigError, ModelError: the run is not possible with this model on this machine.
    """
    run, train = resolved.run, resolved.run.train
    check_experts(run, opened)
    seed_generators(
        run.seed, stream=0 if ranks is None else mesh_coordinates(ranks, tp=train.tp, ring=train.ring).stream
    )
    device = torch.device(resolved.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # kernels that are launched by hand look at the current device
    if train.num_threads is not None:
        torch.set_num_threads(train.num_threads)
    backend = BACKENDS.load(train.backend)
    restore_settings = prepare_kernels(
        resolved.device, deterministic=train.deterministic, batch_invariant=resolved.batch_invariant
    )

    def load() -> LoadedModel:
        whole = not backend.shards_weights
        return load_model(
            run.model, attention=resolved.attention, device=device, materialize=whole, opened=opened
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
    return LoadedPolicy(resolved=resolved, model=model, batch_invariance=batch_invariance)


def data_parallel(run: RunConfig, ranks: RankContext) -> int:
    """Return how many ranks get micro-batches of their own."""
    return mesh_coordinates(ranks, tp=run.train.tp, ring=run.train.ring).sizes["dp"]


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
