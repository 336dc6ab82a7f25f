"""Turn the tasks of an environment into scored groups of rollouts, in task order. Rewards are computed in a
separate thread while other groups are still being sampled."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from lockstep.config.rollout import RolloutConfig, SamplingConfig
from lockstep.data.prompts import FixedPrompts
from lockstep.errors import DataError, RewardError
from lockstep.observe.metrics import Spans
from lockstep.protocols.engine import InferenceEngine, runs_on_ranks
from lockstep.ranks.context import RankContext, RankError
from lockstep.ranks.shared_queue import SharedQueue
from lockstep.rollout.environment import Environment, SingleTurn, Trajectories, TrajectoryRules
from lockstep.rollout.episodes import run_episodes
from lockstep.rollout.rewards import Scored, check_total
from lockstep.rollout.score_stream import ScoreStream
from lockstep.rollout.shares import SentShare, Share
from lockstep.schema.rollout import (
    Prompt,
    Rollout,
    RolloutGroup,
    SampleRecord,
    SamplingParams,
    Trajectory,
)

OnProgress = Callable[[int, int], None]
"""Called with (finished samples, all samples)."""
Keep = Callable[[RolloutGroup], bool]
_ROUND_PROMPTS = -1
"""Used in place of the prompt index to seed the prompt order of a resampling round."""


def sample_seed(run_seed: int, step: int, prompt_index: int, sample_index: int) -> int:
    """Return the 63-bit seed of one sample: the first 8 bytes of BLAKE2b over the four numbers, without the
    top bit.

    Args:
        run_seed: RunConfig.seed.
        step: rollout step; negative numbers are free for evaluations.
        prompt_index: Prompt.index, so that the seed does not depend on the position in the batch.
        sample_index: 0 to group_size - 1; resampling rounds continue the count.
    """
    text = f"lockstep sample {run_seed} {step} {prompt_index} {sample_index}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledStep:
    """The groups and counts of one step."""

    groups: tuple[RolloutGroup, ...]
    """Groups in prompt order; empty if generation was aborted."""
    requested: tuple[SampleRecord, ...] = ()
    """Every requested sample, in prompt order, including those that are in no group."""
    counts: dict[str, float]
    """Counts by name. rollout/dropped_rollouts, rollout/dropped_groups: dropped by a reward's on_error =
    "drop". rollout/cached_tokens: prompt tokens that were shared. With dynamic sampling,
    rollout/resample_rounds and rollout/rejected_groups (groups without a signal). Also the counts of
    RewardSet."""
    aborted: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleKey:
    """The key from which seeds of samples are derived, together with prompt and sample index."""

    run_seed: int
    step: int
    sampling_round: int = 0
    """Rounds after the first belong to dynamic sampling."""

    def seeds(self, prompt_index: int, group_size: int) -> tuple[int, ...]:
        """Return the seeds of one group; a later round continues the sample index of the earlier one."""
        first = self.sampling_round * group_size
        return tuple(
            sample_seed(self.run_seed, self.step, prompt_index, first + i) for i in range(group_size)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Resampling:
    """Dynamic sampling (DAPO, arXiv 2503.14476): groups without a signal are replaced by groups of other
    prompts."""

    keep: Keep
    max_rounds: int
    """Most rounds, including the first."""


@dataclass(slots=True)
class _Source:
    """Where a rank gets the numbers of its prompts: its own ones, all at once, or those of a queue of all
    ranks, as it has room."""

    own: range
    """Without a queue: the rank's prompts. With one: as many as its part."""
    queue: SharedQueue | None = None
    room: int = 0
    """Samples that the rank works on at once, under a queue."""
    taken: list[int] = field(default_factory=list)
    stopped: bool = False
    """Nothing more is taken: there was an abort or an error."""
    empty: bool = False
    """The queue had nothing left."""

    def take(self, running: int, group_size: int) -> list[int]:
        """Return the numbers of the prompts to begin. running: samples that have not ended."""
        first = len(self.taken)
        if self.queue is None:
            self.taken += self.own[first:] if not self.stopped else ()
        while self.queue is not None and not (self.stopped or self.empty) and running < self.room:
            number = self.queue.take()
            if number is None:
                self.empty = True
                break
            self.taken.append(number)
            running += group_size
        return self.taken[first:]

    def close(self) -> None:
        """Leave nothing for other ranks to take: the step has failed, or is aborted."""
        if self.queue is not None:
            with contextlib.suppress(RankError):  # what has failed is told by gather_results
                self.queue.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSampler:
    """Samples the tasks of an environment with `engine`.

    With several ranks, all of which make the same calls, each samples and scores a share of the tasks, and
    every rank gets all groups; where several ranks run one engine together, the first of them does. A
    sample's seed does not depend on the rank. The share is a function of the tasks; with a batch-invariant
    engine, ranks take groups from one queue as they have room.
    """

    engine: InferenceEngine
    environment: Environment
    on_progress: OnProgress | None = None
    spans: Spans | None = None
    """Times the rewards under the name "reward", and the tasks of a step under "data"."""
    cancelled: Callable[[], bool] | None = None
    """Called before every generation: True counts as aborted. An engine's `abort` ends only what is running,
    so it alone would have no effect while rewards are computed between the rounds of dynamic sampling."""
    ranks: RankContext = field(default_factory=RankContext.alone)
    max_prompt_tokens: int | None = None
    """Of each task; None: not checked."""
    room: int | None = None
    """Samples that the engine runs at once; None: ranks share no queue."""
    around: Callable[[Callable[[], Any]], Any] | None = None
    """Makes each rank's call that samples its share, and has collectives around it
    (BucketTransfer.serve)."""

    def groups(
        self,
        prompts: Sequence[Prompt],
        key: SampleKey,
        *,
        sampling: SamplingConfig | TrajectoryRules,
        group_size: int,
    ) -> SampledStep:
        """Sample `group_size` trajectories of every prompt and score them. Aborted when one of the ranks was.

        Args:
            sampling: of each turn, with max_tokens for all turns and replies together; or other limits.

        Raises:
            EngineError: from the engine, or when it returns other samples than requested.
            RewardError: from a reward, or when no group is left.
        """
        rules = self.rules(sampling, prompts)
        source = self._source(len(prompts), group_size)
        share = partial(self._share, prompts, source, key, rules=rules, group_size=group_size)
        return self.gathered(share, prompts)

    def rules(self, sampling: SamplingConfig | TrajectoryRules, prompts: Sequence[Prompt]) -> TrajectoryRules:
        """Return the rules with the longest context of these prompts. Raises DataError: one is too long."""
        rules = sampling
        if isinstance(rules, SamplingConfig):
            rules = TrajectoryRules.of(sampling_params(rules))
        if self.max_prompt_tokens is None:
            return rules
        for task in prompts:
            if len(task.token_ids) > self.max_prompt_tokens:
                raise DataError(
                    f"too-long: {task.where or f'task {task.index}'} has a prompt of {len(task.token_ids)} "
                    f"tokens, which exceeds data.max_prompt_tokens = {self.max_prompt_tokens}; raise the "
                    "setting, or shorten the prompt"
                )
        return replace(rules, max_context=self.max_prompt_tokens + rules.max_tokens)

    def gathered(self, own: Callable[[], Share], prompts: Sequence[Prompt]) -> SampledStep:
        """Return the groups of all ranks, each of which samples and scores what `own` returns. Aborted when
        one of the ranks was. Collective.

        Raises:
            RewardError: no group is left. And what `own` raises.
        """

        def own_share() -> Share:
            if not runs_on_ranks(self.engine):
                return own()
            with self.engine.leading():
                return own()

        call = own_share if self.around is None else partial(self.around, own_share)
        if runs_on_ranks(self.engine) and self.ranks.rank % self.engine.ranks:
            # Outside of gather_results: the engine's first rank waits for this one in a collective, so an
            # error here must end this rank, and with it the others, instead of waiting to be gathered.
            self.engine.follow()
            call = Share
        if self.ranks.world_size == 1:
            shares = [call()]
        else:
            sent = self.ranks.gather_results(
                lambda: SentShare.of(call(), prompts), SentShare, what="sampling"
            )
            shares = [share.received(prompts) for share in sent]
        if any(share.aborted for share in shares):
            return SampledStep(groups=(), counts={}, aborted=True)
        found = {n: r for share in shares for n, r in zip(share.numbers, share.rollouts, strict=True)}
        pairs = ((prompt, found[number]) for number, prompt in enumerate(prompts))
        groups = tuple(RolloutGroup(prompt=p, rollouts=r) for p, r in pairs if r is not None)
        if not groups and any(share.why_dropped for share in shares):
            why = next(filter(None, (share.why_dropped for share in shares)))
            raise RewardError(
                f"reward-failed: in all {len(prompts)} groups, samples were dropped because the environment "
                f"failed; correct it. The first failure: {why}"
            )
        if not groups:
            raise RewardError(
                f"reward-failed: in all {len(prompts)} groups, rollouts were dropped because their rewards "
                "failed (rewards.on_error = 'drop'); set rewards.on_error = 'fail' to see the first failure"
            )
        counts: dict[str, float] = {}
        for share in shares:
            for name, value in share.counts.items():
                counts[name] = counts.get(name, 0.0) + value
        place = {prompt.index: i for i, prompt in enumerate(prompts)}
        requested = sorted(
            (record for share in shares for record in share.requested),
            key=lambda record: (place[record.prompt_index], record.sample),
        )
        return SampledStep(groups=groups, counts=counts, requested=tuple(requested))

    def own(self, count: int) -> tuple[range, int]:
        """Return which of `count` prompts are this rank's, and the number of engines that share them. Of the
        ranks that run one engine together, those of the first."""
        together = self.engine.ranks if runs_on_ranks(self.engine) else 1
        engines = self.ranks.world_size // together
        stop = 0 if self.ranks.rank % together else count
        return range(self.ranks.rank // together, stop, engines), engines

    def _source(self, count: int, group_size: int) -> _Source:
        """What this rank takes the numbers of its prompts from.

        Timing may decide which rank samples what only where a sample does not depend on those beside it: the
        engine is batch-invariant. Elsewhere it is a function of the prompts.
        """
        own, engines = self.own(count)
        anywhere = getattr(self.engine, "contract", None) is not None and not self.environment.scores_together
        if engines == 1 or self.room is None or not anywhere:
            return _Source(own)
        # At the beginning no rank takes more than its part, however many samples its engine can run at once.
        part = -(-count // engines) * group_size
        queue = SharedQueue(ranks=self.ranks, name=f"prompts/{next(self.ranks.calls)}", length=count)
        return _Source(own, queue=queue, room=min(self.room, part))

    def _share(
        self,
        prompts: Sequence[Prompt],
        source: _Source,
        key: SampleKey,
        *,
        rules: TrajectoryRules,
        group_size: int,
    ) -> Share:
        """This rank's share of `groups`; it may have no task."""
        if self.is_cancelled():
            source.close()
            return Share(aborted=True)
        scores = ScoreStream(self.environment.score, on_failure=self.engine.abort)
        done = itertools.count(1)
        tasks: list[Prompt] = []
        ended: list[dict[int, Trajectory]] = []

        def take(running: int) -> list[tuple[Prompt, tuple[int, ...]]]:
            if source.queue is not None and not source.empty:  # else nothing is left that could be stopped
                source.stopped = source.stopped or scores.failed or self.is_cancelled()
            taken = [prompts[number] for number in source.take(running, group_size)]
            tasks.extend(taken)
            ended.extend({} for _ in taken)
            return [(task, key.seeds(task.index, group_size)) for task in taken]

        def score(number: int, index: int, trajectory: Trajectory) -> None:
            if self.on_progress is not None:
                self.on_progress(next(done), max(len(source.own), len(tasks)) * group_size)
            group = ended[number]
            group[index] = trajectory
            source.stopped = source.stopped or trajectory.finish_reason == "abort"
            if len(group) == group_size and all(one.finish_reason != "abort" for one in group.values()):
                scores.add(number, (tasks[number], [group[i] for i in range(group_size)]))

        try:
            trajectories = run_episodes(
                self.engine,
                self.environment,
                take,
                rules=rules,
                on_end=score,
                stop=lambda: scores.failed or self.is_cancelled(),
            )
        except BaseException:
            scores.stop()
            source.close()
            raise
        if source.stopped:
            source.close()
            if not scores.failed:
                scores.stop()
                return Share(aborted=True)
        if not tasks:
            scores.stop()
            return Share()
        groups = list(zip(tasks, trajectories, strict=True))
        return replace(self.scored(groups, scores, key=key), numbers=tuple(source.taken))

    def scored(self, groups: Sequence[Trajectories], scores: ScoreStream, *, key: SampleKey) -> Share:
        """Wait for the scores of the groups, which were added under their place here, and return the groups
        with their rewards; a share without `numbers`."""
        with self.span("reward"):
            by_group = scores.results()
            named = [[_named(score) for score in by_group[i]] for i in range(len(groups))]
            scored = self.environment.score_together(groups, named)
        why = self.environment.why_dropped()
        share = _scored(groups, scored, key=key, counts=self.environment.pop_counts())
        return replace(share, why_dropped=why)

    def is_cancelled(self) -> bool:
        """Whether the caller asks for an end; see `cancelled`."""
        return self.cancelled is not None and self.cancelled()

    def tasks(self, n: int, key: SampleKey, tried: set[tuple[int, ...]]) -> list[Prompt]:
        """Return the tasks of a round: the step's own in round 0; later ones in another order, those not yet
        tried first. The rows of a large set are read by rank 0 alone, which sends the prompts to the
        others, unless a row holds what JSON does not (times, bytes): then each rank reads them."""

        def made() -> list[Prompt]:
            return _round_tasks(self.environment, n, key, tried)

        prompts: list[Prompt] = []

        def sendable() -> list[Prompt] | None:
            prompts[:] = made()
            return prompts if all(_is_json(prompt.row) for prompt in prompts) else None

        with self.span("data"):
            if self.ranks.world_size == 1 or not _reads_rows(self.environment):
                return made()
            what = "the prompts of the step"
            sent = self.ranks.on_rank_zero(sendable, list[Prompt] | None, what=what)
            return sent or prompts or made()  # rank 0 has read them

    def span(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Time what is done inside under this name."""
        return contextlib.nullcontext() if self.spans is None else self.spans(name)

    def step(
        self,
        key: SampleKey,
        *,
        rollout: RolloutConfig,
        resampling: Resampling | None = None,
    ) -> SampledStep:
        """Sample the rollouts of a training step: a pure function of its arguments and the engine's weights.

        Args:
            resampling: sample until `rollout.prompts_per_step` groups are kept. None: one round, all are
                kept.

        Raises:
            RewardError: after `resampling.max_rounds` rounds there are still too few groups. And what
                `groups` raises.
        """
        num_groups = rollout.prompts_per_step
        kept: list[RolloutGroup] = []
        requested: list[SampleRecord] = []
        counts: dict[str, float] = {}
        tried: set[tuple[int, ...]] = set()
        rejected = 0
        for sampling_round in range(1 if resampling is None else resampling.max_rounds):
            key = replace(key, sampling_round=sampling_round)
            batch = self.tasks(num_groups, key, tried)[: num_groups - len(kept)]
            tried.update(prompt.token_ids for prompt in batch)
            rules = trajectory_rules(rollout)
            sampled = self.groups(batch, key, sampling=rules, group_size=rollout.group_size)
            if sampled.aborted or resampling is None:
                return sampled
            for name, value in sampled.counts.items():
                counts[name] = counts.get(name, 0.0) + value
            good = [group for group in sampled.groups if resampling.keep(group)]
            rejected += len(sampled.groups) - len(good)
            kept += good
            prompts_of = {group.prompt.index for group in good}
            requested += [
                record
                if record.dropped or record.prompt_index in prompts_of
                else replace(record, dropped="no-signal")
                for record in sampled.requested
            ]
            if len(kept) >= num_groups:
                rounds = {
                    "rollout/resample_rounds": float(sampling_round),
                    "rollout/rejected_groups": float(rejected),
                }
                return SampledStep(groups=tuple(kept), counts=counts | rounds, requested=tuple(requested))
        raise RewardError(
            f"equal-rewards: step {key.step}: after algorithm.max_resample_rounds = "
            f"{key.sampling_round + 1} rounds only {len(kept)} of {num_groups} groups have differing "
            f"rewards (in {rejected} groups all rewards were equal); the task is too easy or too hard for "
            "the policy: change data.task, raise rollout.group_size or max_resample_rounds, or set "
            "algorithm.dynamic_sampling = false"
        )


def sampling_params(config: SamplingConfig) -> SamplingParams:
    """Convert a sampling config, field by field, to the engine's form."""
    return SamplingParams(**config.model_dump())


def trajectory_rules(config: RolloutConfig) -> TrajectoryRules:
    """Return how trajectories are sampled in training."""
    return TrajectoryRules(
        sampling=sampling_params(config.sampling),
        max_tokens=config.trajectory_tokens,
        max_turns=config.max_turns,
        wait_seconds=config.wait_seconds,
    )


def _round_tasks(
    environment: Environment, n: int, key: SampleKey, tried: set[tuple[int, ...]]
) -> list[Prompt]:
    """The step's own tasks in round 0; later batches in another order, tasks not yet tried first."""
    if key.sampling_round == 0:
        return list(environment.tasks(key.step, n, key.run_seed))
    order = sample_seed(key.run_seed, key.step, _ROUND_PROMPTS, key.sampling_round)
    # The first batch of an order of its own needs none before it, so it is the same after a resume, and costs
    # the same in every step. Rows that are not shuffled have one order only.
    batch = environment.tasks(key.step if _keeps_order(environment) else 0, n, order)
    return sorted(batch, key=lambda prompt: prompt.token_ids in tried)


def _keeps_order(environment: Environment) -> bool:
    """Whether the tasks are rows that are not shuffled."""
    prompts = environment.prompts if isinstance(environment, SingleTurn) else None
    return isinstance(prompts, FixedPrompts) and not prompts.items.config.shuffle


def _reads_rows(environment: Environment) -> bool:
    """Whether the tasks are made of rows of a source when they come near."""
    prompts = environment.prompts if isinstance(environment, SingleTurn) else None
    return isinstance(prompts, FixedPrompts) and not prompts.items.whole


def _is_json(row: Mapping[str, Any]) -> bool:
    """Whether a row that is sent as JSON arrives as it is."""
    try:
        return bool(json.loads(json.dumps(row, allow_nan=False)) == row)
    except (TypeError, ValueError):
        return False


def _named(score: Scored | float | None) -> Scored | None:
    """A number as the reward of that name."""
    if score is None or isinstance(score, Scored):
        return score
    by_name = {"environment": float(score)}
    check_total(float(score), by_name)
    return Scored(total=float(score), by_name=by_name)


def _scored(
    groups: Sequence[Trajectories],
    scores: Sequence[Sequence[Scored | None]],
    *,
    key: SampleKey,
    counts: Mapping[str, float],
) -> Share:
    """Rollouts with rewards. A group left with one rollout has nothing to compare, and is dropped too."""
    kept: list[tuple[Rollout, ...] | None] = []
    requested: list[SampleRecord] = []
    dropped_rollouts = dropped_groups = cached = 0
    for (task, trajectories), of_group in zip(groups, scores, strict=True):
        first = key.sampling_round * len(trajectories)
        rollouts = tuple(
            Rollout(
                trajectory=trajectory,
                reward=score.total,
                rewards=score.by_name,
                weights=score.weights,
                sample=first + i,
            )
            for i, (trajectory, score) in enumerate(zip(trajectories, of_group, strict=True))
            if score is not None
        )
        cached += sum(trajectory.cached_tokens for trajectory in trajectories)
        dropped_rollouts += len(trajectories) - len(rollouts)
        whole = len(rollouts) >= min(2, len(trajectories))
        dropped_groups += not whole
        kept.append(rollouts if whole else None)
        requested += [
            SampleRecord(
                prompt_index=task.index,
                sample=first + i,
                seed=trajectory.seed,
                policy_versions=trajectory.policy_versions,
                attempt=trajectory.attempt,
                dropped="reward" if score is None else None if whole else "group",
            )
            for i, (trajectory, score) in enumerate(zip(trajectories, of_group, strict=True))
        ]
    dropped = {
        "rollout/dropped_rollouts": float(dropped_rollouts),
        "rollout/dropped_groups": float(dropped_groups),
        "rollout/cached_tokens": float(cached),
    }
    return Share(rollouts=tuple(kept), requested=tuple(requested), counts={**dropped, **counts})
