"""Rollouts that may take several steps of a run (rollout.max_lag = S > 0).

    step t     tasks of t     tasks of t + 1   ...   tasks of t + S
               to their end   as far as they come
                  |
                  v
               trained on in step t

Step t is trained on the tasks of step t, as without a lag, whatever their length: no rollout is dropped for
its age, and short ones are not preferred. But its samples begin earlier. Generation in a step samples the
tasks of S further steps as well, and is cut off when its own have ended. The next step goes on with what was
cut off, under its weights: the keys of what is there are computed again, and each span keeps the version that
wrote it. The tasks of a step are admitted at most S steps before it is trained, so no token is older than S
versions.

While the tail of one step's rollouts is decoded, those of the next steps fill the rows of the engine. An
engine in a process of its own also goes on while the trainer works (`Background`), until `cut` before the
next weights: generation no longer waits for the trainer, nor the trainer for what it does not train on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lockstep.config.rollout import RolloutConfig
from lockstep.errors import CheckpointError, EngineError
from lockstep.protocols.engine import cuts_at_borders
from lockstep.rollout.background import Background
from lockstep.rollout.environment import Environment
from lockstep.rollout.episode import Begun
from lockstep.rollout.episodes import at_once, run_episodes
from lockstep.rollout.sampler import GroupSampler, SampledStep, SampleKey, trajectory_rules
from lockstep.rollout.score_stream import ScoreStream
from lockstep.rollout.shares import SentShare, Share
from lockstep.schema.rollout import Border, Prompt, Rollout, Trajectory

Place = tuple[int, int]
"""The step that a group is trained in, and its number among the prompts of that step."""
_NO_TASK = Prompt(index=0, token_ids=(), text="")
"""Of rollouts that no step is trained on any more."""


@dataclass(slots=True)
class _Group:
    """A group of this rank that has not been trained on."""

    task: Prompt
    seeds: tuple[int, ...]
    samples: list[Trajectory | None]
    """As far as they have come; None: not begun."""

    def pending(self, environment: Environment) -> list[int]:
        """The samples that are not at their end, or whose end the environment does not know of."""

        def has_ended(one: Trajectory | None) -> bool:
            return one is not None and one.finish_reason != "abort" and environment.can_score(one)

        return [i for i, one in enumerate(self.samples) if not has_ended(one)]

    def task_of(self, samples: Sequence[int]) -> tuple[Prompt, Sequence[int], Sequence[Begun]]:
        """What `run_episodes` samples of these."""
        return self.task, [self.seeds[i] for i in samples], [self.samples[i] for i in samples]


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """When samples that are not of the step are cut off."""

    background: bool = False
    """The engine goes on while the trainer works; it must be in another process."""
    slots: int | None = None
    """Of logical time, under rollout.schedule = "fixed"; else None."""
    engine_waits: bool = False
    """See TrajectoryRules."""


class PartialRollouts:
    """Samples the steps of a run under a lag. Every rank makes the same calls, and has groups of its own: the
    same ones in each step.

    Args:
        steps: of the run; no task beyond them is begun.
        schedule: when samples are cut off.

    Raises:
        EngineError: the engine or the environment cannot go on with samples.
    """

    def __init__(
        self,
        sampler: GroupSampler,
        *,
        rollout: RolloutConfig,
        run_seed: int,
        steps: int,
        schedule: Schedule = Schedule(),
    ) -> None:
        engine = sampler.engine
        if not getattr(engine, "partial_rollouts", False):
            raise EngineError(
                f"unsupported-combination: rollout.max_lag = {rollout.max_lag} needs an engine that goes on "
                f"with samples of earlier weights, and {type(engine).__name__} does not; set engine.name = "
                "'native', or rollout.max_lag = 0",
                setting="rollout.max_lag",
            )
        if not sampler.environment.goes_on:
            raise EngineError(
                f"unsupported-combination: rollout.max_lag = {rollout.max_lag} with environment "
                f"{type(sampler.environment).__name__}, which does not say that a trajectory may be cut off "
                "and go on; let its `goes_on` be true (see lockstep.rollout.environment.Environment), or set "
                "rollout.max_lag = 0",
                setting="rollout.max_lag",
            )
        if schedule.slots is not None and not cuts_at_borders(engine):
            raise EngineError(
                "unsupported-combination: rollout.schedule = 'fixed' needs an engine that cuts samples off "
                f"where logical time says, and {type(engine).__name__} does not; set engine.name = 'native', "
                "or rollout.schedule = 'free'",
                setting="rollout.schedule",
            )
        self._sampler, self._rollout, self._run_seed, self._steps = sampler, rollout, run_seed, steps
        self._rules = replace(trajectory_rules(rollout), goes_on=True, engine_waits=schedule.engine_waits)
        self._tasks: dict[int, list[Prompt]] = {}
        self._open: dict[Place, _Group] = {}
        self._sampled: dict[Place, _Group] | None = None
        """What is open after the step that was sampled last, until `commit`."""
        self._restored: list[SentShare] = []
        self.background, self._slots = schedule.background, schedule.slots
        self._running: Background | None = None
        """What the engine samples while the trainer works."""

    def step(self, step: int) -> SampledStep:
        """Sample the rollouts of a step. What is sampled of the next ones counts after `commit`; a step that
        is sampled again begins where the last commit was.

        Raises:
            CheckpointError: what was restored is of other settings.
            EngineError, RewardError: as GroupSampler.groups.
        """
        self.cut()
        self._admit(step)
        tasks = self._tasks[step]
        working = {place: replace(group, samples=[*group.samples]) for place, group in self._open.items()}
        sampled = self._sampler.gathered(lambda: self._share(step, working), tasks)
        self._sampled = {place: group for place, group in working.items() if place[0] > step}
        if sampled.aborted:
            return sampled
        trajectories = [one.trajectory for group in sampled.groups for one in group.rollouts]
        lags = [step - trajectory.policy_version for trajectory in trajectories]
        versions = [len(trajectory.policy_versions) for trajectory in trajectories]
        counts = {
            "rollout/lag_mean": sum(lags) / len(lags),
            "rollout/lag_max": float(max(lags)),
            "rollout/versions_mean": sum(versions) / len(versions),
        }
        return replace(sampled, counts=sampled.counts | counts)

    def cut(self, *, at_once: bool = False) -> None:
        """Cut off what the engine samples while the trainer works, before its weights change or it is closed.

        Args:
            at_once: also before the border of a fixed schedule.

        Raises:
            EngineError: what went wrong there; or it does not stop.
        """
        if self._running is None:
            return
        try:
            self._running.end(at_once=at_once)
        finally:
            self._running = None  # not before: an `abort` meanwhile must know what goes on to its border

    def abort(self) -> None:
        """End what is sampled; but not what goes on to a border while the trainer works, because that step
        will end and be saved."""
        running = self._running
        if self._slots is None or running is None or not running.enough.is_set():
            self._sampler.engine.abort()

    def commit(self) -> None:
        """The step that was sampled last is trained on: its rollouts are no longer open."""
        assert self._sampled is not None, "step() comes first"
        self._open, self._sampled = self._sampled, None

    def _admit(self, step: int) -> None:
        """Let the tasks of the step and of the next ones be open; those of earlier ones are done."""
        size, last = self._rollout.group_size, min(step + self._rollout.max_lag, self._steps - 1)
        self._tasks = {at: tasks for at, tasks in self._tasks.items() if at >= step}
        for at in range(step, last + 1):
            if at not in self._tasks:
                key = SampleKey(run_seed=self._run_seed, step=at)
                tasks = self._tasks[at] = self._sampler.tasks(self._rollout.prompts_per_step, key, set())
                self._rules = self._sampler.rules(self._rules, tasks)
                for number in self._sampler.own(len(tasks))[0]:
                    seeds = key.seeds(tasks[number].index, size)
                    self._open[at, number] = _Group(tasks[number], seeds, [None] * size)
        self._fill()

    def _share(self, step: int, working: Mapping[Place, _Group]) -> Share:
        """This rank's groups of the step, sampled to their end and scored; those of `working` are changed."""
        engine, environment, sampler = self._sampler.engine, self._sampler.environment, self._sampler
        own = [place for place in sorted(working) if place[0] == step]
        if sampler.is_cancelled():
            return Share(aborted=True)
        scores = ScoreStream(environment.score, on_failure=engine.abort)
        # Asked once: the environment forgets what it has scored, and hears anew of what a resume had lost.
        pending = {place: working[place].pending(environment) for place in sorted(working)}
        running = [(place, (*samples,)) for place, samples in pending.items() if samples]
        left = sum(len(pending[place]) for place in own)
        total = sum(len(working[place].samples) for place in own)

        def score(place: Place) -> None:
            group = working[place]
            if not pending[place]:
                scores.add(own.index(place), (group.task, [one for one in group.samples if one is not None]))

        for place in own:
            score(place)

        def on_end(number: int, index: int, trajectory: Trajectory) -> None:
            nonlocal left
            place, samples = running[number]
            working[place].samples[samples[index]] = trajectory
            if place[0] != step or trajectory.finish_reason == "abort":
                return
            pending[place].remove(samples[index])
            left -= 1
            if sampler.on_progress is not None:
                sampler.on_progress(total - left, total)
            score(place)
            if left:
                return
            if background is None:
                engine.abort()  # the others go on in the next step
            else:
                background.enough.set()

        def ends() -> bool:
            cut = not left if background is None else background.is_ending()
            return cut or scores.failed or sampler.is_cancelled()

        def sample() -> None:
            if cuts_at_borders(engine) and self._slots is not None:
                engine.border = self._border(own, working, pending)
            tasks = [working[place].task_of(samples) for place, samples in running]
            run_episodes(
                engine,
                environment,
                at_once(tasks),
                rules=self._rules,
                on_end=on_end,
                stop=ends,
            )

        ahead = _tokens_after(step, working)
        background = None
        if self.background and running:
            background = Background(engine, sample, fixed=self._slots is not None)
        self._running = background
        try:
            if background is not None:
                background.begin(wait=left > 0)
            elif left:
                sample()
        except BaseException:
            scores.stop()
            raise
        if left and not scores.failed:
            scores.stop()
            return Share(aborted=True)
        if self._slots is None:  # else the trainer may be late, and what is there depends on time
            ahead = _tokens_after(step, working)
        share = self._scored(step, {place[1]: working[place] for place in own}, scores)
        return replace(share, counts={**share.counts, "rollout/tokens_ahead": float(ahead)})

    def _scored(self, step: int, groups: Mapping[int, _Group], scores: ScoreStream) -> Share:
        """The groups of a step, by number, with their rewards."""
        sampled = [
            (group.task, [replace(one, ends=()) for one in group.samples if one is not None])
            for group in groups.values()
        ]
        if not sampled:
            scores.stop()
            return Share()
        share = self._sampler.scored(sampled, scores, key=SampleKey(run_seed=self._run_seed, step=step))
        return replace(share, numbers=tuple(groups))

    def _border(
        self, own: Sequence[Place], working: Mapping[Place, _Group], pending: Mapping[Place, list[int]]
    ) -> Border:
        """Where the samples are cut off under rollout.schedule = "fixed"."""
        assert self._slots is not None
        ended = [
            one
            for place in own
            for i, one in enumerate(working[place].samples)
            if one is not None and i not in pending[place]
        ]
        return Border(
            seeds=frozenset(working[place].seeds[i] for place in own for i in pending[place]),
            tokens=sum(one.policy_tokens for one in ended),
            slots=self._slots,
        )

    # in a checkpoint

    def state(self) -> SentShare:
        """Return what this rank has sampled of the steps that are not trained on, as of the last commit. What
        was restored is a part of it from the beginning, also before the first step asks for its tasks."""
        if self._restored:
            ranks = self._sampler.ranks
            return SentShare.joined(self._restored[ranks.rank :: ranks.world_size])
        begun = {place: group for place, group in self._open.items() if any(group.samples)}
        rollouts = tuple(
            tuple(
                Rollout(trajectory=one, reward=0.0, rewards={}, sample=i)  # not scored yet
                for i, one in enumerate(group.samples)
                if one is not None
            )
            for group in begun.values()
        )
        numbers = tuple(self._number(place) for place in begun)
        share = Share(numbers=numbers, rollouts=rollouts)
        return SentShare.of(share, {n: group.task for n, group in zip(numbers, begun.values(), strict=True)})

    def restore(self, states: Iterable[SentShare]) -> None:
        """Go on from the states of all ranks; of each group the rank takes it whose it is now."""
        self._restored = list(states)

    def _number(self, place: Place) -> int:
        return place[0] * self._rollout.prompts_per_step + place[1]

    def _fill(self) -> None:
        """Put what was restored into the groups that are open."""
        groups = {self._number(place): group for place, group in self._open.items()}
        per_step = self._rollout.prompts_per_step
        tasks = {at * per_step + i: task for at, tasks in self._tasks.items() for i, task in enumerate(tasks)}
        for state in self._restored:
            beyond = [number for number in state.share.numbers if number // per_step >= self._steps]
            tasks |= dict.fromkeys(beyond, _NO_TASK)  # `steps` was lowered
            known = all(number in tasks for number in state.share.numbers)
            if not known:
                raise CheckpointError(
                    "not-resumable: the checkpoint has rollouts of steps that are not within "
                    f"rollout.max_lag = {self._rollout.max_lag} of this one; resume with the settings of the "
                    "run"
                )
            share = state.received(tasks)
            for number, rollouts in zip(share.numbers, share.rollouts, strict=True):
                for rollout in rollouts or ():
                    if number in groups:
                        groups[number].samples[rollout.sample] = rollout.trajectory
        self._restored = []


def _tokens_after(step: int, working: Mapping[Place, _Group]) -> int:
    """Tokens that were sampled for the steps after this one."""
    samples = (one for place, group in working.items() if place[0] > step for one in group.samples)
    return sum(one.policy_tokens for one in samples if one is not None)
