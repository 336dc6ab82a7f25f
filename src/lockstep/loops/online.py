"""The deprecated API for custom loops: the parts as one record, and a trainer with four methods. It will be
removed in 0.2; `examples/own_loop.py` shows its replacement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from lockstep.config.algorithm import GRPOConfig
from lockstep.config.run import GRPORun
from lockstep.data.prompts import PromptSet
from lockstep.environments.tool_environment import ToolEnvironment
from lockstep.errors import ConfigError
from lockstep.loop.build import Builder
from lockstep.loop.determinism import BatchInvariance
from lockstep.loop.evaluate import Evaluation, evaluate
from lockstep.loop.gap_check import BitwiseCheck
from lockstep.loop.metrics import remote_role_metrics, rollout_metrics
from lockstep.loop.policy import LoadedPolicy, Policy, Reference, estimate
from lockstep.loop.remote_roles import RemoteCritic
from lockstep.loop.resolve import Resolved
from lockstep.loop.roles import Critic, Roles
from lockstep.loop.rollouts import LoopHooks, RolloutEngine, Rollouts
from lockstep.models.load import LoadedModel
from lockstep.observe.metrics import Spans
from lockstep.packing import Planner
from lockstep.protocols import (
    Algorithm,
    InferenceEngine,
    Saved,
    Scorer,
    TrainBackend,
    ValueAlgorithm,
    WeightTransfer,
)
from lockstep.ranks.context import RankContext
from lockstep.recording.recorder import Recorder
from lockstep.rollout.environment import SingleTurn
from lockstep.rollout.reward_models import RewardModels
from lockstep.rollout.rewards import RewardSet
from lockstep.rollout.sampler import OnProgress, SampledStep
from lockstep.schema.batch import rollout_samples
from lockstep.schema.rollout import RolloutGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineParts:
    """Everything an RL loop is made of. Replace a part by `dataclasses.replace` before making a trainer."""

    build: Builder
    connected: RolloutEngine
    """`engine`, as it takes weights and sleeps."""
    resolved: Resolved[GRPORun]
    model: LoadedModel
    backend: TrainBackend
    """The policy's backend."""
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
    environment: ToolEnvironment | None = None
    """Turns with the class that the run names; None: each prompt has one turn."""
    batch_invariance: BatchInvariance | None = None
    """The parts that were made batch-invariant; None: none was asked for."""
    bitwise_check: BitwiseCheck | None = None
    """Set where trainer and engine have the same kernel contract; None: their logprobs are close, not
    equal."""
    value: Critic | RemoteCritic | None = None
    """The value model; None: the algorithm has none."""
    recorder: Recorder | None = None
    on_progress: OnProgress | None = None
    ranks: RankContext = field(default_factory=RankContext.alone)

    @property
    def run(self) -> GRPORun:
        """The settings, without an "auto"."""
        return self.resolved.run

    @property
    def roles(self) -> Saved:
        """The models of a checkpoint: the policy, and the value model if there is one."""
        if self.value is None:
            return self.backend
        others, algorithm = {"value": self.value.backend}, cast(ValueAlgorithm, self.algorithm)
        return Roles(policy=self.backend, others=others, algorithm=algorithm, ranks=self.ranks)

    def close(self) -> None:
        """Close all parts."""
        self.build.close()


def build_online(
    run: GRPORun,
    *,
    rewards: Sequence[Callable[..., Any]] = (),
    on_progress: OnProgress | None = None,
    ranks: RankContext | None = None,
    work_dir: Path | None = None,
    hold_out: bool | None = None,
) -> OnlineParts:
    """Build all parts that `run` names; see `Builder`.

    Args:
        hold_out: whether to hold prompts out for evaluations; None: if the run has an evaluation.
    """
    hooks = LoopHooks(on_progress=on_progress)
    manifest = None if hold_out is None else {"held_out": "hash" if hold_out else None}
    build = Builder(run, ranks=ranks, work_dir=work_dir, manifest=manifest, hooks=hooks)
    try:
        environment = build.environment(rewards=rewards)
        assert isinstance(environment, SingleTurn) and environment.prompts is not None
        algorithm = build.algorithm()
        policy = build.policy(algorithm)
        reference, critic = build.roles(policy, environment, algorithm)
        engine = build.engine(policy)
    except BaseException:
        build.close()
        raise
    assert environment.held_out_prompts is not None
    return OnlineParts(
        build=build,
        connected=engine,
        resolved=policy.resolved,
        model=policy.model,
        backend=policy.backend,
        ref=None if reference is None else reference.scorer,
        engine=engine.engine,
        transfer=engine.transfer,
        algorithm=algorithm,
        algorithm_options=run.algorithm.resolved(),
        prompts=environment.prompts,
        eval_prompts=environment.held_out_prompts,
        rewards=environment.rewards,
        reward_models=environment.reward_models,
        environment=environment if isinstance(environment, ToolEnvironment) else None,
        plan=policy.plan,
        batch_invariance=policy.batch_invariance,
        bitwise_check=policy.check,
        value=critic,
        on_progress=on_progress,
        ranks=build.ranks,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """The result of the update on one rollout batch."""

    metrics: dict[str, float]
    groups: list[RolloutGroup]
    """The groups with what the algorithm added to their rewards."""


class OnlineTrainer:
    """The verbs of the RL loop over one set of parts: sample, update, push, evaluate."""

    def __init__(
        self,
        parts: OnlineParts,
        *,
        spans: Spans | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> None:
        if parts.run.rollout.max_lag:
            raise ConfigError(
                f"unsupported-combination: rollout.max_lag = {parts.run.rollout.max_lag} with OnlineTrainer, "
                "whose steps know nothing of one another; copy examples/own_loop.py instead",
                setting="rollout.max_lag",
            )
        if parts.engine is not parts.connected.engine or parts.transfer is not parts.connected.transfer:
            connected = RolloutEngine(
                parts.engine,
                parts.transfer,
                config=parts.run.engine,
                device=parts.resolved.device,
                ranks=parts.ranks,
                spans=parts.build.hooks.spans,
            )
            parts = replace(parts, connected=connected)
        if parts.value is not None:
            parts.value.engine = parts.connected
        self.parts = parts
        self.spans = spans or parts.build.hooks.spans
        self._cancelled = cancelled
        if spans is not None:
            parts.build.use(spans)

    @property
    def warmup_batches(self) -> int:
        """Rollout batches at the start of the run in which the policy is not trained."""
        return 0 if self.parts.value is None else self.parts.value.config.warmup_batches

    def sample(self, step: int) -> SampledStep:
        """Sample the rollouts of `step` and their rewards: a pure function of (run, step, weights)."""
        parts = self.parts
        hooks = LoopHooks(spans=self.spans, on_progress=parts.on_progress, cancelled=self._cancelled)
        environment, algorithm = self._environment(), parts.algorithm
        return Rollouts(parts.connected, environment, algorithm, config=parts.run, hooks=hooks).sample(step)

    def update(
        self,
        groups: Sequence[RolloutGroup],
        *,
        step: int,
        on_groups: Callable[[Sequence[RolloutGroup]], None] | None = None,
    ) -> StepResult:
        """Do every optimizer step of the rollout batch of `step`.

        Args:
            on_groups: called with the groups of the result before forward and backward.
        """
        parts, algorithm, critic = self.parts, self.parts.algorithm, self.parts.value
        samples = rollout_samples(rollout.trajectory for group in groups for rollout in group.rollouts)
        policy = self._policy()
        values = None if critic is None else critic.begin_score(samples)
        ref_logprobs = None
        if algorithm.needs_ref:
            if parts.ref is None:
                raise ConfigError(
                    "missing-argument: the algorithm has a KL term, but parts.ref is None; set it to a Scorer"
                )
            reference = Reference(
                parts.ref,
                plan=parts.plan,
                minibatches=parts.run.train.minibatches,
                spans=self.spans,
            )
            reference.engine = parts.connected
            ref_logprobs = reference.logprobs(samples)
        estimates = estimate(algorithm, groups, samples, values=values, ref_logprobs=ref_logprobs)
        update = dict if critic is None else critic.begin_update(samples, estimates)
        minibatches = policy.pack(step, samples, estimates, algorithm, ref_logprobs=ref_logprobs)
        if on_groups is not None:
            on_groups(estimates.groups)
        updates = [policy.update(batches, minibatches.loss) for batches in minibatches]
        metrics = rollout_metrics(estimates.groups) | policy.metrics(minibatches, updates)
        metrics |= {**estimates.metrics, **update()}
        metrics |= remote_role_metrics(parts.build.role_workers, ranks=parts.ranks)
        return StepResult(metrics=metrics, groups=estimates.groups)

    def push(self, *, policy_version: int) -> dict[str, float]:
        """Send the trainer's current weights to the engine, which samples from them from here on.

        Returns:
            engine/verify_gap, if it was verified that the engine holds them; else nothing.
        """
        return self.parts.connected.load(self._policy(), version=policy_version)

    def evaluate(self, *, max_tokens_factor: int = 1) -> Evaluation | None:
        """Return held-out accuracy and mean reward; None when generation was aborted."""
        parts = self.parts
        return evaluate(
            parts.connected,
            self._environment(),
            parts.run,
            hooks=LoopHooks(spans=self.spans, on_progress=parts.on_progress),
            max_tokens_factor=max_tokens_factor,
        )

    def _policy(self) -> Policy:
        parts = self.parts
        policy = Policy(
            parts.backend,
            LoadedPolicy(resolved=parts.resolved, model=parts.model, batch_invariance=parts.batch_invariance),
            plan=parts.plan,
            spans=self.spans,
            warmup_steps=self.warmup_batches,
        )
        policy.check, policy.recorder, policy.engine = parts.bitwise_check, parts.recorder, parts.connected
        return policy

    def _environment(self) -> SingleTurn:
        parts = self.parts
        if parts.environment is not None:
            return parts.environment
        return SingleTurn(
            parts.rewards,
            prompts=parts.prompts,
            held_out=parts.eval_prompts,
            reward_models=parts.reward_models,
        )
