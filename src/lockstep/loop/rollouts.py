"""Rollouts: the tasks of an environment, sampled by the engine, step after step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from lockstep.config.engine import EngineConfig
from lockstep.config.run import GRPORun
from lockstep.environments.journal import Journal
from lockstep.errors import EngineError, LockstepError, TrainError
from lockstep.loop.metrics import engine_metrics
from lockstep.observe.metrics import Spans
from lockstep.observe.run_dir import RunDir
from lockstep.protocols import Algorithm, InferenceEngine, TrainBackend, WeightTransfer
from lockstep.protocols.engine import EngineStats
from lockstep.ranks.context import RankContext
from lockstep.rollout.environment import Environment
from lockstep.rollout.partial import PartialRollouts, Schedule
from lockstep.rollout.sampler import GroupSampler, OnProgress, Resampling, SampledStep, SampleKey
from lockstep.transfer import buckets
from lockstep.transfer.buckets import Verifier, serving


@dataclass(kw_only=True)
class LoopHooks:
    """A loop's connections: timers, display and signals."""

    spans: Spans = field(default_factory=Spans)
    """Get the times of the parts."""
    on_progress: OnProgress | None = None
    """Called with (samples finished, samples in all) during generation."""
    stopping: Callable[[], bool] = lambda: False
    """Whether the run stops at this point; collective."""
    cancelled: Callable[[], bool] | None = None
    """Whether this process was asked to stop."""
    closing: Callable[[], None] = lambda: None
    """Called before the parts are closed: from here on a signal no longer waits for a step's end."""
    journal: Journal | None = None
    """Keeps what tools answer."""


class HasBackend(Protocol):
    """A model on a train backend."""

    backend: TrainBackend


_COUNTED = (
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "generate_seconds",
    "recomputed_tokens",
)
"""Totals of EngineStats that `engine_metrics` counts."""


class RolloutEngine:
    """An engine that takes the policy's weights, and shares a GPU with the trainer.

    With engine.offload it sleeps from the trainer's first call of a step to the next `load`.

    """

    verifier: Verifier | None = None
    """Checks after loads that the engine holds the weights; None: they are not checked."""

    def __init__(
        self,
        engine: InferenceEngine,
        transfer: WeightTransfer,
        *,
        config: EngineConfig,
        device: str,
        ranks: RankContext,
        spans: Spans,
    ) -> None:
        self.engine, self.transfer = engine, transfer
        self.name = config.name
        self.spans = spans
        self.ranks = ranks
        self._config, self._device = config, device
        self._asleep = False
        self._verified: dict[str, float] = {}
        self.before_load: Callable[[], None] | None = None
        """Cuts off what this rank's engine samples while the trainer works, before its weights change."""

    def load(self, policy: HasBackend, *, version: int) -> dict[str, float]:
        """Send the policy's current weights to the engine, which samples from them from here on.

        Args:
            version: stamped on the completions.

        Returns:
            engine/verify_gap, if it was verified that the engine holds them; else nothing.

        Raises:
            EngineError: the engine refused them, or does not hold them afterwards.
        """
        with self.explaining_memory("engine"):
            if self.before_load is not None:
                with self.spans("weights"), self.ranks.fail_together("cutting off rollouts"):
                    self.before_load()
            if self._asleep:
                with self.spans("sleep"), self.ranks.fail_together("waking the engine"):
                    self.engine.wake()
                self._asleep = False
            # Every rank goes through all weights, whatever becomes of its own engine.
            with self.spans("weights"), self.ranks.fail_together("the weight update"):
                self.transfer.push(policy.backend, self.engine, policy_version=version)
            self._verified = {}
            if self.verifier is not None:
                with self.spans("verify"):
                    self._verified = self.verifier()
            return self._verified

    def sampler(self, environment: Environment, **how: object) -> GroupSampler:
        """Return a sampler of the environment's tasks. how: further fields of GroupSampler."""
        around = serving(self.transfer, self.ranks)
        return GroupSampler(
            engine=self.engine,
            environment=environment,
            ranks=self.ranks,
            around=around,
            room=self._config.max_batch,
            **how,  # type: ignore[arg-type]
        )

    def stats(self) -> EngineStats:
        """See SamplesTokens."""
        return self.engine.stats()

    def metrics(self, since: EngineStats) -> dict[str, float]:
        """Return engine/*: throughput and cache use since `since`, and what the last load has verified.
        Collective."""
        return engine_metrics(since, self.engine, ranks=self.ranks) | self._verified

    def abort(self) -> None:
        """End what is sampled."""
        self.engine.abort()

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """The trainer works inside: the engine sleeps from here on, if it does at all."""
        if self._config.offloads and not self._asleep:
            with self.spans("sleep"), self.ranks.fail_together("putting the engine to sleep"):
                self.engine.sleep()
            self._asleep = True
        with self.explaining_memory("trainer"):
            yield

    @contextlib.contextmanager
    def explaining_memory(self, side: str) -> Iterator[None]:
        """Add to an out-of-memory error whose it was and what engine and trainer held around the last weight
        update; for an engine that shares a GPU with the trainer.

        Args:
            side: engine or trainer.
        """
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            others = isinstance(error, LockstepError) and not isinstance(error, EngineError | TrainError)
            if others or self.transfer.transport == "shared" or not buckets.ran_out_of_memory(error):
                raise
            text = buckets.explain(
                side,
                before=self.transfer.before,
                after=self.transfer.after,
                now=buckets.take_memory_report(self.engine, device=torch.device(self._device)),
            )
            kind = EngineError if side == "engine" or isinstance(error, EngineError) else TrainError
            raise kind(f"out-of-memory: {error}\n{text}") from error


class Rollouts:
    """Samples the groups of each step: a pure function of (seed, step, weights), so a step's number is all
    that a checkpoint needs to hold. Under rollout.max_lag it needs `partial`, too.

    Args:
        algorithm: says which groups dynamic sampling keeps, if the config asks for it.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        environment: Environment,
        algorithm: Algorithm,
        *,
        config: GRPORun,
        hooks: LoopHooks,
    ) -> None:
        self.engine, self.environment, self.config = engine, environment, config
        self._hooks = hooks
        self._resampling = None
        options = config.algorithm.resolved()
        if options.dynamic_sampling:
            self._resampling = Resampling(keep=algorithm.keep, max_rounds=options.max_resample_rounds)
        self.partial: PartialRollouts | None = None
        """Set under rollout.max_lag: samples that were begun for later steps, which a checkpoint holds."""
        self._sampler = engine.sampler(
            environment,
            on_progress=hooks.on_progress,
            spans=hooks.spans,
            cancelled=hooks.cancelled,
            max_prompt_tokens=config.data.max_prompt_tokens,
        )
        self._since: EngineStats | None = None
        self._until: EngineStats | None = None
        """While the engine sampled beside the trainer: from the end of the last step to the next weights."""
        if config.rollout.max_lag:
            slots = config.rollout.slots or config.engine.max_batch
            self.partial = PartialRollouts(
                self._sampler,
                rollout=config.rollout,
                run_seed=config.seed,
                steps=config.steps,
                schedule=Schedule(
                    background=config.engine.process == "separate" and not config.engine.offloads,
                    slots=slots if config.rollout.schedule == "fixed" else None,
                    engine_waits=config.train.deterministic,
                ),
            )
            engine.before_load = self._cut

    def next(self, step: int) -> SampledStep | None:
        """Return the groups of a step with their rewards; None: the run was asked to stop meanwhile.

        Raises:
            EngineError: from the engine; or it was aborted by somebody else.
            RewardError: a reward failed, or dynamic sampling found too few groups.
        """
        sampled = self._sample(step)
        if self._hooks.stopping():
            return None
        if sampled.aborted:
            raise EngineError(
                f"unrequested-abort: step {step}: engine {self.engine.name!r} aborted samples although this "
                "run did not request it; does another client use the server? Resume the run with its own "
                "engine"
            )
        self._commit()
        return sampled

    def sample(self, step: int) -> SampledStep:
        """As `next`; an aborted step is returned as such."""
        sampled = self._sample(step)
        if not sampled.aborted:
            self._commit()
        return sampled

    def _commit(self) -> None:
        """The step that was sampled last is trained on."""
        if self.partial is not None:
            self.partial.commit()

    def _sample(self, step: int) -> SampledStep:
        before = self._beginning()
        self.environment.begin(f"step-{step:06d}")
        key = SampleKey(run_seed=self.config.seed, step=step)
        with self._hooks.spans("generate"), self.engine.explaining_memory("engine"):
            if self.partial is not None:
                sampled = self.partial.step(step)
            else:
                sampled = self._sampler.step(key, rollout=self.config.rollout, resampling=self._resampling)
        if sampled.aborted:
            return sampled
        counts = sampled.counts | self.engine.metrics(since=before)
        if self.partial is not None and self.partial.background:
            self._since, self._until = self.engine.stats(), None
        return dataclasses.replace(sampled, counts=counts)

    def _cut(self) -> None:
        """Cut off what is sampled beside the trainer."""
        assert self.partial is not None
        self.partial.cut()
        self._until = self.engine.stats()

    def _beginning(self) -> EngineStats:
        """The totals that a step is counted from: what was sampled beside the trainer counts to it, and an
        evaluation since then does not."""
        now, since, until = self.engine.stats(), self._since, self._until
        if since is None or until is None:
            return now
        earlier = {name: getattr(since, name) - getattr(until, name) for name in _COUNTED}
        return dataclasses.replace(now, **{name: getattr(now, name) + earlier[name] for name in _COUNTED})

    def abort(self) -> None:
        """End what is sampled."""
        (self.engine if self.partial is None else self.partial).abort()

    def close(self) -> None:
        """Cut off what the engine samples in the background; it can be closed then."""
        if self.partial is not None:
            with contextlib.suppress(EngineError):  # nobody trains on it, and what ended the run comes first
                self.partial.cut(at_once=True)


def journal_of(
    folder: RunDir, manifest: Mapping[str, Any], *, config: GRPORun, ranks: RankContext
) -> Journal:
    """Return the journal of a run."""
    return Journal(
        folder.path / "journal",
        run=str(manifest.get("started", "")),
        rank=ranks.rank,
        checkpoints=folder.checkpoints,
        keep=2 * config.checkpoint.every + 1,  # the last save may not have ended
        lag=config.rollout.max_lag,
    )
