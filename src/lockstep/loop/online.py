"""The RL loop.

prompts ─► engine ─► rollouts, rewards ─► samples ─► reference logprobs ─► advantages ─► packs ─► old logprobs
   ▲                                                                                                  │
   └── weights transfer ◄── optimizer step ◄── loss + backward (per micro-batch) ◄────────────────────┘
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from lockstep.config.run import GRPORun
from lockstep.config.train import TrainConfig
from lockstep.data.prompts import evaluates, holds_out_rows
from lockstep.errors import ConfigError, EngineError, LockstepError, TrainError
from lockstep.loop.build import OnlineParts, build_online, holds_out, recording_header
from lockstep.loop.determinism import (
    batch_invariance_lines,
    batch_invariance_manifest,
    contract_change,
    deterministic,
    weights_hash,
)
from lockstep.loop.distributed import connect_ranks
from lockstep.loop.engines import engine_report, report_lines
from lockstep.loop.evaluate import Evaluation, evaluate
from lockstep.loop.metrics import (
    CompileMeter,
    combine,
    engine_metrics,
    rollout_metrics,
    shape_metrics,
    split_samples,
    world_metrics,
)
from lockstep.loop.preflight import preflight
from lockstep.loop.roles import ValueRole, describe_reward_models
from lockstep.loop.rollout_rows import rollout_rows
from lockstep.loop.session import Session
from lockstep.observe.metrics import Spans
from lockstep.protocols import TokenLoss, ValueAlgorithm
from lockstep.ranks.context import RankContext
from lockstep.rollout.sampler import GroupSampler, Resampling, SampledStep, SampleKey
from lockstep.schema.batch import (
    PackedBatch,
    PolicySample,
    RolloutSample,
    policy_samples,
    rollout_samples,
)
from lockstep.schema.rollout import RolloutGroup
from lockstep.transfer import buckets
from lockstep.transfer.buckets import serving


def train_online(
    run: GRPORun,
    *,
    resume: Path | None = None,
    checkpoint: int | None = None,
    restart: bool = False,
    rewards: Sequence[Callable[..., Any]] = (),
    ranks: RankContext | None = None,
) -> dict[str, Any]:
    """Train a policy with RL; returns the run's summary (see `Session.finish`).

    Args:
        resume: a run directory to go on from; `run` is its config.
        checkpoint: the step of the checkpoint to go on from; None is the last.
        restart: begin the run in `run.run_dir` again; what it has written is kept beside.
        rewards: Python callables that replace `run.rewards`, called as f(prompt=, completion=, row=).
        ranks: every one of them makes this call; None: those of the launcher that started this process, if
            one did.
    """
    own = bool(rewards)
    summary = preflight(run, resume=resume, checkpoint=checkpoint, restart=restart, own_rewards=own)
    if summary is not None:
        return summary
    with contextlib.ExitStack() as cleanup:
        cleanup.enter_context(deterministic(run.train))
        ranks = cleanup.enter_context(connect_ranks(run, ranks))
        session = cleanup.enter_context(
            Session(run, resume=resume, checkpoint=checkpoint, restart=restart, ranks=ranks)
        )
        hold_out = _holds_out(session)
        parts = build_online(
            run,
            rewards=rewards,
            on_progress=session.progress,
            ranks=ranks,
            work_dir=session.dir.path / "engine",
            manifest=session.dir.read_manifest(),
        )
        cleanup.callback(parts.close)
        prompts = parts.prompts
        session.describe(
            resolved=parts.resolved, model=parts.model, data=prompts.report, fingerprint=prompts.fingerprint
        )
        session.dir.update_manifest({"held_out": hold_out})
        _describe_engine(session, parts)
        _describe_rewards(session, parts)
        compiled = CompileMeter(parts.backend, ranks=ranks)
        first_step = session.restore(parts.roles)
        parts = _recorded(parts, session, first_step)
        roles = parts.roles
        trainer = OnlineTrainer(parts, spans=session.spans, cancelled=session.is_cancelled)
        pushed = trainer.push(policy_version=first_step)
        with session.interruptible(parts.engine.abort):
            for done in range(first_step, run.steps + 1):
                with session.keeping(done, roles):
                    fresh = not session.stopping() and _evaluate(session, trainer, done)
                if session.stopping():
                    return session.interrupted(done, roles)
                # A resumed run has just loaded the checkpoint of `first_step`; only an evaluation adds to it.
                if session.is_due(run.checkpoint.every, done) and (fresh or done > first_step):
                    session.save(done, roles)
                if done == run.steps:
                    break
                session.begin_step(done)
                with session.keeping(done, roles):
                    sampled = _sample(session, trainer, done)
                if sampled is None:  # generation was cut short: this step never happened
                    return session.interrupted(done, roles)
                begin = partial(session.begin_rollouts, done, save=run.rollout.save)
                result = trainer.update(sampled.groups, step=done, on_groups=begin)
                metrics = result.metrics | sampled.counts | pushed
                pushed = trainer.push(policy_version=done + 1)
                session.log_rollouts(done, sampled.asked, result.groups)
                # In the first step of each process that trains the policy: every start has a new engine.
                if done == max(first_step, trainer.warmup_batches):
                    metrics |= session.check_gap(metrics, temperature=run.rollout.sampling.temperature)
                weights = weights_hash(parts.backend) if run.train.deterministic else None
                session.log_step(done, metrics | compiled.metrics(), weights_hash=weights)
                session.copy(done + 1, roles)
            return session.finish(run.steps, roles)


def _sample(session: Session, trainer: OnlineTrainer, step: int) -> SampledStep | None:
    """Sample a step; None: the run is to stop here. Raises EngineError: another abort."""
    sampled = trainer.sample(step)
    if session.stopping():
        return None
    if sampled.aborted:
        raise _aborted(step, trainer.parts.run.engine.name)
    return sampled


def _small_set_notes(parts: OnlineParts) -> list[str]:
    """A note where fewer prompts are held out than eval.num_prompts: its first rows would be most of them."""
    run, held_out = parts.run, len(parts.eval_prompts)
    if not held_out or not holds_out_rows(run) or held_out >= run.eval.num_prompts:
        return []
    return [
        f"eval.num_prompts = {run.eval.num_prompts} would be more than half of data.source: {held_out} rows "
        "are held out (set eval_data.source or eval.num_prompts for others)"
    ]


def _aborted(step: int, engine: str) -> EngineError:
    return EngineError(
        f"unrequested-abort: step {step}: engine {engine!r} ended samples by abort, which this run has not "
        "asked for; does another client use the server? Give the run an engine of its own, and resume it"
    )


def _holds_out(session: Session) -> bool:
    """See `holds_out`.

    Raises:
        ConfigError: an evaluation is asked for, and the run has trained on all prompts.
    """
    run, then = cast(GRPORun, session.run), session.dir.read_manifest()
    held_out = holds_out(run, then)
    if evaluates(run) and not held_out:
        raise ConfigError(
            f"contradiction: eval.before = {run.eval.before}, eval.every = {run.eval.every}, eval.after = "
            f"{run.eval.after}, but {str(session.dir.path)!r} was started without an evaluation, so no "
            "prompts are held out of its training; turn them off, or start a new run"
        )
    return held_out


def _describe_engine(session: Session, parts: OnlineParts) -> None:
    """Write the engine's report, its kernel contract and where roles of other worlds are to the manifest and
    the display."""
    report = engine_report(parts.engine, parts.transfer)
    contract = None if parts.bitwise_check is None else parts.bitwise_check.contract
    changed = contract_change(session.dir.read_manifest().get("contract"), contract)
    session.dir.update_manifest(
        {"engine": report} | batch_invariance_manifest(parts.batch_invariance, contract)
    )
    for line in [*report_lines(report), *batch_invariance_lines(parts.batch_invariance, contract), *changed]:
        session.display.note(line)
    worlds = {world.name: world.describe() for world in parts.worlds}
    session.dir.update_manifest({"worlds": list(worlds.values())})
    for name, world in worlds.items():
        session.display.note(f"{name}: in processes of its own, log {world['log']}")


def _describe_rewards(session: Session, parts: OnlineParts) -> None:
    """Write the reward models to the manifest, and the notes on prompts and rewards to the display."""
    of_models = describe_reward_models(
        parts.reward_models, session, policy_tokenizer=parts.model.tokenizer, ranks=parts.ranks
    )
    prompts, held_out = parts.prompts.notes, parts.eval_prompts.notes
    session.display.notes(prompts, held_out, parts.rewards.notes(), of_models, _small_set_notes(parts))


def _recorded(parts: OnlineParts, session: Session, first_step: int) -> OnlineParts:
    """Return the parts with the backend's inputs going through the run's recorder, if it has one."""
    run = parts.run
    header = recording_header(
        parts.resolved,
        model=parts.model,
        plan=parts.plan,
        temperature=run.rollout.sampling.temperature,
        contract=parts.backend.contract,
    )
    if isinstance(value := parts.value, ValueRole):
        recorder = session.recorder(
            value.recording_header(header),
            first_step=first_step,
            model=value.model,
            backend=value.backend,
            updates_per_step=value.minibatches * value.epochs,
        )
        if recorder is not None:
            value = dataclasses.replace(value, backend=recorder.around(value.backend), recorder=recorder)
            parts = dataclasses.replace(parts, value=value)
    recorder = session.recorder(
        header,
        first_step=first_step,
        model=parts.model,
        backend=parts.backend,
        updates_per_step=run.train.minibatches * run.train.epochs_per_batch,
    )
    if recorder is None:
        return parts
    return dataclasses.replace(parts, backend=recorder.around(parts.backend), recorder=recorder)


def _evaluate(session: Session, trainer: OnlineTrainer, done: int) -> bool:
    """Run the evaluation that is due after `done` steps; False when there is none, or when it was cut
    short."""
    run = trainer.parts.run
    name, factor = "during", 1
    if done == 0:
        name, factor = "before", run.eval.before_max_tokens_factor
    elif done == run.steps:
        name = "after"
    due = {"before": run.eval.before, "during": session.is_due(run.eval.every, done), "after": run.eval.after}
    if not due[name] or session.evaluated(name, done):
        return False
    evaluation = trainer.evaluate(max_tokens_factor=factor)
    if evaluation is None:
        return False
    skip = run.rollout.sampling.skip_special_tokens
    rows = rollout_rows(done, evaluation.groups, skip_special_tokens=skip)
    session.log_evaluation(name, done, evaluation.as_dict(), rows, budget_factor=factor)
    return True


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """The result of the update on one rollout batch."""

    metrics: dict[str, float]
    groups: list[RolloutGroup]
    """The groups with what the algorithm added to their rewards."""


class OnlineTrainer:
    """The verbs of the RL loop over one set of parts: sample, update, push, evaluate. Write your own loop
    with them."""

    def __init__(
        self,
        parts: OnlineParts,
        *,
        spans: Spans | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> None:
        self.parts = parts
        self.spans = spans or Spans()
        self._asleep = False
        self._sampler = GroupSampler(
            engine=parts.engine,
            rewards=parts.rewards,
            on_progress=parts.on_progress,
            spans=self.spans,
            cancelled=cancelled,
            ranks=parts.ranks,
            around=serving(parts.transfer, parts.ranks),
            reward_models=parts.reward_models,
        )

    @property
    def warmup_batches(self) -> int:
        """Rollout batches at the start of the run in which the policy is not trained."""
        return 0 if self.parts.value is None else self.parts.value.config.warmup_batches

    def sample(self, step: int) -> SampledStep:
        """Sample the rollouts of `step` and their rewards: a pure function of (run, step, weights)."""
        parts, run = self.parts, self.parts.run
        options = parts.algorithm_options
        resampling = None
        if options.dynamic_sampling:
            resampling = Resampling(keep=parts.algorithm.keep, max_rounds=options.max_resample_rounds)
        key = SampleKey(run_seed=run.seed, step=step)
        before = parts.engine.stats()
        with self.spans("generate"), explain_out_of_memory("engine", parts):
            sampled = self._sampler.step(parts.prompts, key, rollout=run.rollout, resampling=resampling)
        if sampled.aborted:
            return sampled
        rates = engine_metrics(before, parts.engine, ranks=parts.ranks)
        return dataclasses.replace(sampled, counts=sampled.counts | rates)

    def update(
        self,
        groups: Sequence[RolloutGroup],
        *,
        step: int,
        on_groups: Callable[[Sequence[RolloutGroup]], None] | None = None,
    ) -> StepResult:
        """Do every optimizer step of the rollout batch of `step`. With engine.offload the engine sleeps from
        here to the next `push`.

        Args:
            on_groups: called with the groups of the result before forward and backward.
        """
        if self.parts.run.engine.offload and not self._asleep:
            with self.spans("sleep"), self.parts.ranks.together("putting the engine to sleep"):
                self.parts.engine.sleep()
            self._asleep = True
        with explain_out_of_memory("trainer", self.parts):
            return self._update(groups, step, on_groups)

    def _update(
        self,
        groups: Sequence[RolloutGroup],
        step: int,
        on_groups: Callable[[Sequence[RolloutGroup]], None] | None,
    ) -> StepResult:
        parts, train, algorithm = self.parts, self.parts.run.train, self.parts.algorithm
        rollouts = rollout_samples(rollout.trajectory for group in groups for rollout in group.rollouts)
        if parts.value is not None:
            parts.value.begin_score(rollouts)
        ref_logprobs = self._ref_logprobs(rollouts) if algorithm.needs_ref else None
        groups, advantages, value_metrics = self._advantages(groups, rollouts, ref_logprobs)
        if parts.recorder is not None:
            parts.recorder.see(groups)
        # The rollout batches in which the value model learns alone leave the policy as it is.
        epochs = train.epochs_per_batch if step >= self.warmup_batches else 0
        check, loss = parts.bitwise_check if epochs else None, algorithm.loss()
        if check is not None:
            check.begin(step, groups)
        samples = policy_samples(rollouts, advantages, ref_logprobs=ref_logprobs)
        with self.spans("pack"):
            minibatches = self._packs(samples, self._scored(groups, samples, step=step, loss=loss))
        if on_groups is not None:
            on_groups(groups)
        if len(minibatches) * epochs > 1:  # the policy moves: remember where it was
            minibatches = self._with_old_logprobs(minibatches)
        updates: list[dict[str, float]] = []
        for _ in range(epochs):
            for batches in minibatches:
                with self.spans("forward_backward"):
                    stats = parts.backend.forward_backward(batches, loss)
                if check is not None and not updates:  # the weights are still those of the rollouts
                    check.check(batches, stats.logprobs)
                with self.spans("optimizer"):
                    update = parts.backend.optimizer_step()
                updates.append({"loss": float(sum(stats.losses))} | update | loss.metrics(batches, stats))
        shapes = shape_metrics([batch for batches in minibatches for batch in batches])
        metrics = rollout_metrics(groups) | shapes | combine(updates) | value_metrics()
        metrics |= scored_metrics(samples, trained_tokens=shapes["input/trained_tokens"])
        if check is not None:
            metrics |= check.metrics(sum(sample.num_trained for sample in samples))
        metrics |= world_metrics(parts.worlds, ranks=parts.ranks)
        return StepResult(metrics=metrics, groups=groups)

    def _scored(
        self,
        groups: Sequence[RolloutGroup],
        samples: Sequence[PolicySample],
        *,
        step: int,
        loss: TokenLoss,
    ) -> frozenset[int] | None:
        """The sample_ids that go through forward and backward; None: all."""
        parts = self.parts
        everything = scores_all(
            parts.run.train,
            step,
            loss=loss,
            recorded=parts.recorder is not None,
            static_capacity=parts.plan.static_capacity,
        )
        # The policy's first step is what engine and trainer are compared by.
        first = step == self.warmup_batches
        return None if everything or first else with_signal(groups, samples)

    def _packs(
        self, samples: Sequence[PolicySample], scored: frozenset[int] | None
    ) -> list[list[PackedBatch]]:
        """The micro-batches of each optimizer step, whose normaliser counts all of its samples."""
        minibatches = []
        for part in split_samples(samples, self.parts.run.train.minibatches):
            weights = self.parts.algorithm.loss_weights(part)
            if scored is None:
                minibatches.append(self.parts.plan(part, weights))
                continue
            kept = scored_indices(part, scored)
            packs = self.parts.plan([part[i] for i in kept], [weights[i] for i in kept], whole=part)
            minibatches.append(packs)
        return minibatches

    def _advantages(
        self,
        groups: Sequence[RolloutGroup],
        rollouts: Sequence[RolloutSample],
        ref_logprobs: Sequence[Tensor] | None,
    ) -> tuple[list[RolloutGroup], list[Tensor], Callable[[], dict[str, float]]]:
        """The groups with the algorithm's own rewards, [L] advantages per sample, and a call that returns
        the metrics of the value model, whose update begins here, if there is one: on a GPU of its own it
        goes on while the policy is trained, and the call waits for its end."""
        algorithm, value = self.parts.algorithm, self.parts.value
        if value is None:
            return *algorithm.advantages(groups, rollouts, ref_logprobs=ref_logprobs), dict
        with self.spans("values"):
            values = value.score(rollouts)
        estimates = cast(ValueAlgorithm, algorithm).estimates(
            groups, rollouts, values=values, ref_logprobs=ref_logprobs
        )
        if value.recorder is not None:
            value.recorder.see(estimates.groups)
        updated = value.begin_update(rollouts, values=values, returns=estimates.returns, spans=self.spans)
        return estimates.groups, estimates.advantages, lambda: {**estimates.metrics, **updated()}

    def push(self, *, policy_version: int) -> dict[str, float]:
        """Send the trainer's current weights to the engine, which samples from them from here on.

        Returns:
            engine/verify_gap, if it was verified that the engine holds them; else nothing.
        """
        parts = self.parts
        with explain_out_of_memory("engine", parts):
            if self._asleep:
                with self.spans("sleep"), parts.ranks.together("waking the engine"):
                    parts.engine.wake()
                self._asleep = False
            # Every rank goes through all weights, whatever becomes of its own engine.
            with self.spans("weights"), parts.ranks.together("the weight update"):
                parts.transfer.push(parts.backend, parts.engine, policy_version=policy_version)
            if parts.verifier is None:
                return {}
            with self.spans("verify"):
                return parts.verifier()

    def evaluate(self, *, max_tokens_factor: int = 1) -> Evaluation | None:
        """Return held-out accuracy and mean reward; None when generation was aborted."""
        with self.spans("evaluate"):
            return evaluate(self.parts, max_tokens_factor=max_tokens_factor)

    def _ref_logprobs(self, samples: Sequence[RolloutSample]) -> list[Tensor]:
        """[L] float32 per sample, on the host: the logprobs of the reference. It gets the packs that the
        policy is trained on, so that a policy which has not moved has exactly the same."""
        ref, by_sample = self.parts.ref, dict[int, Tensor]()
        if ref is None:
            raise ConfigError(
                "missing-argument: the algorithm has a KL term, but parts.ref is None; give it a Scorer"
            )
        with self.spans("logprobs"):
            for part in split_samples(samples, self.parts.run.train.minibatches):
                batches = self.parts.plan(part, [sample.loss_mask.float() for sample in part])
                for batch, logprobs in zip(batches, ref.logprobs(batches), strict=True):
                    by_sample.update(zip(batch.sample_ids, batch.split(logprobs.cpu()), strict=True))
        return [by_sample[sample.sample_id] for sample in samples]

    def _with_old_logprobs(self, minibatches: list[list[PackedBatch]]) -> list[list[PackedBatch]]:
        """Add old_logprobs: from a forward over all samples, or the rollouts' own, where trainer and engine
        are bitwise equal."""
        score = self.parts.backend.logprobs
        with self.spans("logprobs"):
            if self.parts.bitwise_check is not None:
                return self.parts.bitwise_check.old_logprobs(minibatches, score)
            return [
                [
                    dataclasses.replace(batch, old_logprobs=logprobs)  # type: ignore[call-arg]
                    for batch, logprobs in zip(batches, score(batches), strict=True)
                ]
                for batches in minibatches
            ]


@contextlib.contextmanager
def explain_out_of_memory(side: Literal["engine", "trainer"], parts: OnlineParts) -> Iterator[None]:
    """Add to an out-of-memory error whose it was and what engine and trainer held around the last weight
    update; for an engine that shares a GPU with the trainer."""
    transfer = parts.transfer
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        others = isinstance(error, LockstepError) and not isinstance(error, EngineError | TrainError)
        if others or transfer.transport == "shared" or not buckets.ran_out_of_memory(error):
            raise
        text = buckets.explain(
            side,
            before=transfer.before,
            after=transfer.after,
            now=buckets.take_memory_report(parts.engine, device=torch.device(parts.resolved.device)),
        )
        kind = EngineError if side == "engine" or isinstance(error, EngineError) else TrainError
        raise kind(f"out-of-memory: {error}\n{text}") from error


# Which samples of a step go through forward and backward. A group whose advantages are all zero has no
# gradient where the loss has nothing else to go by, so it is left out; the normaliser of the step counts it.


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
    found: set[int] = set()
    rest = iter(samples)
    for group in groups:
        members = [next(rest) for _ in group.rollouts]
        if any(bool(member.advantages.any()) for member in members):
            found.update(member.sample_id for member in members)
    return frozenset(found)


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
