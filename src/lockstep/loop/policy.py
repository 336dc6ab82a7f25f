"""The policy of a run, and the models that score its samples: what a page of `lockstep.loops` calls.

Each brings the packing, the sharing of memory with the engine, and the checks of its part along, so that the
page is the algorithm alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, cast

from torch import Tensor

from lockstep.config.train import TrainConfig
from lockstep.loop.determinism import BatchInvariance
from lockstep.loop.gap_check import BitwiseCheck
from lockstep.loop.metrics import combine, shape_metrics
from lockstep.loop.resolve import Resolved, Run
from lockstep.loop.rollouts import RolloutEngine
from lockstep.loop.token_details import TokenDetails
from lockstep.models.load import LoadedModel
from lockstep.observe.metrics import Spans
from lockstep.packing import Planner, split_samples
from lockstep.protocols import Algorithm, Scorer, TokenLoss, TrainBackend, ValueAlgorithm
from lockstep.protocols.train import Estimates
from lockstep.recording.recorder import Recorder
from lockstep.schema.batch import PackedBatch, PolicySample, RolloutSample, policy_samples
from lockstep.schema.rollout import RolloutGroup


class Trained:
    """Base of the models on the trainer's side: their calls give the engine's memory to the trainer."""

    engine: RolloutEngine | None = None
    """The engine that shares the GPU; None: not created yet."""
    spans: Spans

    def _working(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.engine is None else self.engine.training()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatches:
    """The micro-batches of a step's optimizer steps, and the loss on them."""

    minibatches: list[list[PackedBatch]]
    """One list for each optimizer step of a pass."""
    passes: int
    """Passes over them; 0: the policy is not trained in this step."""
    loss: TokenLoss
    samples: list[PolicySample]
    """All samples of the step, including those without a gradient, which `minibatches` leaves out."""

    def __iter__(self) -> Iterator[list[PackedBatch]]:
        for _ in range(self.passes):
            yield from self.minibatches


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedPolicy(Generic[Run]):
    """A model that is loaded to be trained."""

    resolved: Resolved[Run]
    """As far as its model allows."""
    model: LoadedModel
    batch_invariance: BatchInvariance | None


class Policy(Trained):
    """The model that is trained: its backend, and how a step's samples become its optimizer steps.

    Args:
        warmup_steps: steps at the start of the run in which the policy is not trained.
    """

    def __init__(
        self,
        backend: TrainBackend,
        loaded: LoadedPolicy[Any],
        *,
        plan: Planner,
        spans: Spans,
        warmup_steps: int = 0,
    ) -> None:
        self.backend, self.plan = backend, plan
        self.resolved, self.model = loaded.resolved, loaded.model
        self.batch_invariance = loaded.batch_invariance
        self.warmup_steps = warmup_steps
        self.check: BitwiseCheck | None = None
        """Set where trainer and engine have the same kernel contract; None: their logprobs are close, not
        equal."""
        self.recorder: Recorder | None = None
        self.details: TokenDetails | None = None
        """Set where the rows of rollouts/ get what each step computes for their tokens."""
        self._train: TrainConfig = loaded.resolved.run.train
        self.spans = spans
        self._checks_first = False
        online = loaded.resolved.run.online
        self._lags = bool(online and loaded.resolved.run.rollout.max_lag)

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps per step of the run."""
        if not self.resolved.run.online:
            return 1
        return self._train.minibatches * self._train.epochs_per_batch

    def pack(
        self,
        step: int,
        samples: Sequence[RolloutSample],
        estimates: Estimates,
        algorithm: Algorithm,
        *,
        ref_logprobs: Sequence[Tensor] | None = None,
    ) -> StepBatches:
        """Return what the optimizer steps of step `step` are on: packs with everything that the loss reads.

        Args:
            samples: the rollouts of all groups, in order.
            ref_logprobs: [L] float32 per sample, nats; if the algorithm needs them.
        """
        if self.recorder is not None:
            self.recorder.see(estimates.groups)
        # The rollout batches in which the value model learns alone leave the policy as it is.
        passes = self._train.epochs_per_batch if step >= self.warmup_steps else 0
        loss, self._checks_first = algorithm.loss(), False
        if self.check is not None and passes:
            self.check.begin(step, estimates.groups)
            self._checks_first = True
        version = step if self._lags else None  # see Rollouts: the weights of step t are version t
        trained = policy_samples(samples, estimates.advantages, ref_logprobs=ref_logprobs, version=version)
        if self.details is not None:
            self.details.begin(trained)
        with self._working():
            with self.spans("pack"):
                scored = self._with_gradient(step, estimates.groups, trained, loss)
                minibatches = self._minibatches(trained, scored, algorithm)
            if len(minibatches) * passes > 1:  # the policy moves: remember where it was
                minibatches = self._with_old_logprobs(minibatches)
        return StepBatches(minibatches=minibatches, passes=passes, loss=loss, samples=trained)

    def update(self, batches: Sequence[PackedBatch], loss: TokenLoss) -> dict[str, float]:
        """Do one optimizer step; returns its metrics."""
        with self._working():
            with self.spans("forward_backward"):
                stats = self.backend.forward_backward(batches, loss)
            if self._checks_first and self.check is not None:  # the weights are still those of the rollouts
                self.check.check(batches, stats.logprobs)
                self._checks_first = False
            if self.details is not None:
                self.details.add(batches, stats)
            with self.spans("optimizer"):
                update = self.backend.optimizer_step()
            return {"loss": float(sum(stats.losses))} | update | loss.metrics(batches, stats)

    def metrics(self, minibatches: StepBatches, updates: Sequence[dict[str, float]]) -> dict[str, float]:
        """Return the metrics of a step: the shapes of its inputs, and what its optimizer steps returned."""
        shapes = shape_metrics([batch for batches in minibatches.minibatches for batch in batches])
        metrics = shapes | combine(updates)
        metrics |= scored_metrics(minibatches.samples, trained_tokens=shapes["input/trained_tokens"])
        if self.check is not None and minibatches.passes:
            metrics |= self.check.metrics(sum(sample.num_trained for sample in minibatches.samples))
        return metrics

    def _with_gradient(
        self, step: int, groups: Sequence[RolloutGroup], samples: Sequence[PolicySample], loss: TokenLoss
    ) -> frozenset[int] | None:
        """The sample_ids that go through forward and backward; None: all."""
        everything = scores_all(
            self._train,
            step,
            loss=loss,
            recorded=self.recorder is not None,
            static_capacity=self.plan.static_capacity,
        )
        # The policy's first step is what engine and trainer are compared by.
        first = step == self.warmup_steps
        return None if everything or first else with_signal(groups, samples)

    def _minibatches(
        self, samples: Sequence[PolicySample], scored: frozenset[int] | None, algorithm: Algorithm
    ) -> list[list[PackedBatch]]:
        """The micro-batches of each optimizer step, whose normaliser counts all of its samples."""
        minibatches = []
        for part in split_samples(samples, self._train.minibatches):
            weights = algorithm.loss_weights(part)
            if scored is None:
                minibatches.append(self.plan(part, weights))
                continue
            kept = scored_indices(part, scored)
            packs = self.plan([part[i] for i in kept], [weights[i] for i in kept], whole=part)
            minibatches.append(packs)
        return minibatches

    def _with_old_logprobs(self, minibatches: list[list[PackedBatch]]) -> list[list[PackedBatch]]:
        """Add old_logprobs: from a forward over all samples, or the rollouts' own, where trainer and engine
        are bitwise equal."""
        score = self.backend.logprobs
        with self.spans("logprobs"):
            if self.check is not None:
                return self.check.old_logprobs(minibatches, score)
            return [
                [
                    dataclasses.replace(batch, old_logprobs=logprobs)  # type: ignore[call-arg]
                    for batch, logprobs in zip(batches, score(batches), strict=True)
                ]
                for batches in minibatches
            ]


class Reference(Trained):
    """The frozen policy that a KL term is to. It gets the packs that the policy is trained on, so that a
    policy which has not moved has exactly the same logprobs."""

    def __init__(self, scorer: Scorer, *, plan: Planner, minibatches: int, spans: Spans) -> None:
        self.scorer, self._plan, self._minibatches, self.spans = scorer, plan, minibatches, spans

    def logprobs(self, samples: Sequence[RolloutSample]) -> list[Tensor]:
        """Return [L] float32 per sample, nats, on the host."""
        by_sample: dict[int, Tensor] = {}
        with self._working(), self.spans("logprobs"):
            for part in split_samples(samples, self._minibatches):
                batches = self._plan(part, [sample.loss_mask.float() for sample in part])
                for batch, logprobs in zip(batches, self.scorer.logprobs(batches), strict=True):
                    by_sample.update(zip(batch.sample_ids, batch.split(logprobs.cpu()), strict=True))
        return [by_sample[sample.sample_id] for sample in samples]


def estimate(
    algorithm: Algorithm,
    groups: Sequence[RolloutGroup],
    samples: Sequence[RolloutSample],
    *,
    values: Callable[[], list[Tensor]] | None = None,
    ref_logprobs: Sequence[Tensor] | None = None,
) -> Estimates:
    """Return rewards, advantages and returns of a step.

    Args:
        samples: the rollouts of all groups, in order.
        values: gives those of a value model; the algorithm then is a ValueAlgorithm.
        ref_logprobs: [L] float32 per sample, nats; if the algorithm needs them.
    """
    if values is None:
        rewarded, advantages = algorithm.advantages(groups, samples, ref_logprobs=ref_logprobs)
        return Estimates(groups=rewarded, advantages=advantages)
    given = values()
    made = cast(ValueAlgorithm, algorithm).estimates(groups, samples, values=given, ref_logprobs=ref_logprobs)
    return dataclasses.replace(made, values=given)


# A group whose advantages are all zero has no gradient where the loss has nothing else to go by, so it is
# left out of forward and backward; the normaliser of the step counts it.


def scores_all(
    train: TrainConfig, step: int, *, loss: TokenLoss, recorded: bool, static_capacity: bool
) -> bool:
    """Return whether every sample of `step` is scored.

    Args:
        loss: one that does not say `zero_without_advantages` needs all samples.
        recorded: whether the run is recorded: a recording holds everything.
        static_capacity: whether packs have static capacities. Fewer samples may be the first to need a small
            one, whose graph counts as a recompile: under train.max_recompiles that could end the run.
    """
    bounded = static_capacity and train.max_recompiles is not None
    declared = bool(getattr(loss, "zero_without_advantages", False))
    return step % train.score_all_every == 0 or recorded or bounded or not declared


def with_signal(groups: Sequence[RolloutGroup], samples: Sequence[PolicySample]) -> frozenset[int]:
    """Return the sample_ids of the groups that have an advantage which is not zero.

    Args:
        samples: the rollouts of all groups, in order.
    """
    numbers = [
        number
        for number, group in enumerate(groups)
        for rollout in group.rollouts
        for _ in rollout.trajectory.parts
    ]
    trained = {
        number for number, sample in zip(numbers, samples, strict=True) if bool(sample.advantages.any())
    }
    return frozenset(
        sample.sample_id for number, sample in zip(numbers, samples, strict=True) if number in trained
    )


def scored_indices(samples: Sequence[PolicySample], scored: Collection[int]) -> list[int]:
    """Return the indices of the samples of one optimizer step that are scored.

    Where that is none, the shortest of those that train anything stands for all: its gradient is zero, so
    every rank and every kind of backend goes through the step as through any other.

    Args:
        scored: sample_ids.
    """
    kept = [index for index, sample in enumerate(samples) if sample.sample_id in scored]
    if any(samples[index].num_trained for index in kept):
        return kept
    trained = [index for index, sample in enumerate(samples) if sample.num_trained]
    return [min(trained, key=lambda index: len(samples[index]))] if trained else list(range(len(samples)))


def scored_metrics(samples: Sequence[PolicySample], *, trained_tokens: float) -> dict[str, float]:
    """Return scored_share, and rollout/tokens: prompt and completion tokens of the step, scored or not.

    Args:
        samples: of the whole step.
        trained_tokens: of those that were scored.
    """
    of_all = sum(sample.num_trained for sample in samples)
    return {
        "scored_share": trained_tokens / of_all if of_all else 1.0,
        "rollout/tokens": float(sum(map(len, samples))),
    }
