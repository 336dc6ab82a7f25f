"""Environments: tasks, how a trajectory of one goes, and what it is worth.

    tasks ──► run(task, sample) ⇄ engine, turn by turn ──► trajectories ──► score ──► rewards

The default is `SingleTurn`: a prompt, one completion, and the rewards of the config. An environment of your
own is a subclass of `Environment`; pass it to `lockstep.train_online`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace

from lockstep.data.prompts import PromptSet
from lockstep.errors import EngineError
from lockstep.protocols.engine import Handle, InferenceEngine
from lockstep.protocols.reward import RewardInput
from lockstep.rollout.reward_models import RewardModels
from lockstep.rollout.rewards import RewardSet, Scored
from lockstep.schema.rollout import Completion, GenerationRequest, Prompt, SamplingParams, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What an environment awaits: the next turn of the policy."""

    reply: tuple[int, ...]
    """Token ids that the policy did not write, before its turn."""
    sampling: SamplingParams
    limited: bool = False
    """The environment has given the turn less than what is left of the budget."""

    def __await__(self) -> Generator[Turn, Trajectory, Trajectory]:
        return (yield self)


class Sampler:
    """Samples one trajectory of `task`, a turn at a time:

        trajectory = await sample()              # the prompt and the policy's first turn
        trajectory = await sample(reply_ids)     # the same, the reply, and the policy's next turn

    Args:
        sampling: of each turn. Its max_tokens is the budget of everything after the prompt: of all turns and
            all replies together.
        seed: of the trajectory; the noise of a turn depends on it and on the turn's position.
    """

    def __init__(self, task: Prompt, *, sampling: SamplingParams, seed: int) -> None:
        self.task, self.sampling, self.seed = task, sampling, seed
        self.trajectory: Trajectory | None = None
        """As far as it has come; None before the first turn."""

    @property
    def left(self) -> int:
        """Tokens of the budget that are left for replies and turns."""
        if self.trajectory is None:
            return self.sampling.max_tokens
        used = len(self.trajectory.token_ids) - len(self.trajectory.prompt_token_ids)
        return self.sampling.max_tokens - used

    def __call__(self, reply: Sequence[int] = (), *, max_tokens: int | None = None) -> Turn:
        """Return the next turn; awaiting it gives the whole trajectory so far.

        Args:
            reply: token ids of a tool or user after the last turn; none before the first one, whose prompt is
                the task's.
            max_tokens: that the policy may write in this turn; None: all that is left of the budget.

        Raises:
            EngineError: a reply before the first turn, or one that leaves no room for a turn.
        """
        if reply and self.trajectory is None:
            raise EngineError(
                f"wrong-state: {self.task.where or 'a task'}: the environment passed a reply of "
                f"{len(reply)} tokens before the first turn; await sample() without a reply first"
            )
        room = self.left - len(reply)
        if room < 1:
            raise EngineError(
                f"too-long: {self.task.where or 'a task'}: a reply of {len(reply)} tokens leaves no room "
                f"for a turn, because only {self.left} of rollout.sampling.max_tokens = "
                f"{self.sampling.max_tokens} are left; end the trajectory there (check `sample.left`), or "
                "raise the setting"
            )
        most = room if max_tokens is None else min(room, max_tokens)
        least = min(self.sampling.min_tokens, most)
        sampling = replace(self.sampling, max_tokens=most, min_tokens=least)
        return Turn(reply=tuple(reply), sampling=sampling, limited=most < room)

    def add(self, reply: tuple[int, ...], completion: Completion) -> Trajectory:
        """Append a finished turn, and return the trajectory."""
        if self.trajectory is None:
            self.trajectory = Trajectory.of(completion)
        else:
            self.trajectory = self.trajectory.continued(reply, completion)
        return self.trajectory


Trajectories = tuple[Prompt, Sequence[Trajectory]]
"""A task, and all its trajectories in sample order."""


class Environment:
    """Base of environments. `tasks` and `score` are yours to write; the rest has a default.

    With several ranks each has an environment of its own, and runs and scores a share of the tasks.
    """

    @property
    def scores_together(self) -> bool:
        """Whether the reward of a trajectory may depend on those of other tasks on its rank: `score_together`
        is not the default. Then timing does not decide which rank samples what."""
        return type(self).score_together is not Environment.score_together

    report: Mapping[str, int] = {}
    """Counts of rows that were left out or cut, for the start of a run."""
    fingerprint: str | None = None
    """Hash of all tasks, by which a resumed run recognises its data; None: they are not compared."""

    def tasks(self, step: int, n: int, seed: int) -> Sequence[Prompt]:
        """Return the n tasks of a step: a pure function of the arguments, no index twice.

        Args:
            step: counts from 0.
            seed: of their order.
        """
        raise NotImplementedError

    def held_out(self, n: int) -> Sequence[Prompt]:
        """Return at most n tasks for evaluations, always the same ones."""
        return ()

    async def run(self, task: Prompt, sample: Sampler) -> Trajectory:
        """Return one trajectory of the task. The default is a single turn.

        It may await `sample` alone. Sampling of a step stops when one call raises.
        """
        return await sample()

    def score(self, groups: Sequence[Trajectories]) -> Sequence[Sequence[Scored | float | None]]:
        """Return the rewards of each trajectory, one list per group: a number, or a `Scored` that names its
        parts; None: the trajectory is dropped. Called in a thread of its own while other groups are still
        sampled, with all groups that have come since the last call."""
        raise NotImplementedError

    def score_together(
        self, groups: Sequence[Trajectories], scores: Sequence[Sequence[Scored | None]]
    ) -> list[list[Scored | None]]:
        """Return the rewards with what is scored once all groups of a step are there. The default adds
        nothing."""
        return [list(group) for group in scores]

    def is_correct(self, task: Prompt, text: str) -> bool | None:
        """Return whether a completion solves the task; None for tasks without an answer."""
        return None

    def pop_counts(self) -> dict[str, float]:
        """Return counts since the last call, by metric name, and reset them."""
        return {}

    def notes(self) -> Sequence[str]:
        """Return what to show at the start of a run, a sentence each."""
        return ()

    def close(self) -> None:
        """Free what the environment holds."""


class SingleTurn(Environment):
    """A prompt, one completion, and the rewards of the config: the environment of every run that names no
    other.

    Args:
        prompts: of training; None where only held-out ones are sampled or rows are scored.
        held_out: prompts of evaluations.
        rewards: functions and verifiers; they score groups as soon as these are complete.
        reward_models: score all samples of a step together, so that a score does not depend on which of them
            ended first.
    """

    def __init__(
        self,
        rewards: RewardSet,
        *,
        prompts: PromptSet | None = None,
        held_out: PromptSet | None = None,
        reward_models: RewardModels | None = None,
    ) -> None:
        self.rewards, self.prompts, self.reward_models = rewards, prompts, reward_models
        self.held_out_prompts = held_out
        if prompts is not None:
            self.report, self.fingerprint = prompts.report, prompts.fingerprint

    @property
    def scores_together(self) -> bool:
        """With reward models, whose batches they share."""
        own = type(self).score_together is not SingleTurn.score_together
        return own or self.reward_models is not None

    def tasks(self, step: int, n: int, seed: int) -> Sequence[Prompt]:
        """See Environment."""
        assert self.prompts is not None, "made without prompts: it only scores"
        return self.prompts.batch(step, n, seed)

    def held_out(self, n: int) -> Sequence[Prompt]:
        """The first n, in their order."""
        held_out = self.held_out_prompts
        return [] if held_out is None else [held_out[i] for i in range(min(n, len(held_out)))]

    def score(self, groups: Sequence[Trajectories]) -> list[list[Scored | None]]:
        """See Environment."""
        scores = iter(self.rewards.score([sample for group in groups for sample in reward_inputs(*group)]))
        return [[next(scores) for _ in trajectories] for _, trajectories in groups]

    def score_together(
        self, groups: Sequence[Trajectories], scores: Sequence[Sequence[Scored | None]]
    ) -> list[list[Scored | None]]:
        """Add the scores of the reward models. A rollout that another reward dropped is not scored again."""
        models = self.reward_models
        if models is None:
            return super().score_together(groups, scores)
        kept = [
            sample
            for group, of_group in zip(groups, scores, strict=True)
            for sample, score in zip(reward_inputs(*group), of_group, strict=True)
            if score is not None
        ]
        by_model = iter(models.score(kept))
        return [
            [None if score is None else models.added(score, next(by_model)) for score in of_group]
            for of_group in scores
        ]

    def is_correct(self, task: Prompt, text: str) -> bool | None:
        """Whether the task's verifier accepts the completion."""
        return self.rewards.strict(task.row, text)

    def pop_counts(self) -> dict[str, float]:
        """See Environment."""
        counts = dict(self.rewards.pop_counts())
        if self.reward_models is not None:
            counts |= self.reward_models.pop_counts()
        return {f"reward/{name}": float(count) for name, count in counts.items()}

    def notes(self) -> Sequence[str]:
        """See Environment."""
        sets = [prompts.notes for prompts in (self.prompts, self.held_out_prompts) if prompts is not None]
        return [note for notes in (*sets, self.rewards.notes()) for note in notes]

    def close(self) -> None:
        """End the processes of rewards."""
        self.rewards.close()


def reward_inputs(task: Prompt, trajectories: Sequence[Trajectory]) -> list[RewardInput]:
    """Return what rewards are given of each trajectory. Of several turns, `completion` is the text of the
    last and `completion_token_ids` is everything after the prompt."""
    return [
        RewardInput(
            prompt=task.text,
            completion=trajectory.text or "",
            row=task.row,
            prompt_token_ids=trajectory.prompt_token_ids,
            completion_token_ids=trajectory.token_ids[len(trajectory.prompt_token_ids) :],
            finish_reason=trajectory.finish_reason,
            index=task.index,
            where=task.where,
            conversation=task.conversation,
            seed=trajectory.seed,
        )
        for trajectory in trajectories
    ]


# Running the trajectories of many tasks in one engine.


class _Episode:
    """One trajectory on its way: a coroutine of the environment, and the turn that it waits for."""

    def __init__(self, environment: Environment, sampler: Sampler) -> None:
        self.sampler = sampler
        self.turn: Turn | None = None
        """None: the trajectory has ended."""
        self._coroutine = environment.run(sampler.task, sampler)
        if not inspect.iscoroutine(self._coroutine):
            raise EngineError(
                f"wrong-result: {self._name}: {type(environment).__name__}.run returned "
                f"{type(self._coroutine).__name__}; write it as `async def run(self, task, sample)`"
            )
        self._advance(None)

    def add(self, completion: Completion) -> None:
        """Append the turn that was waited for. One that was aborted ends the trajectory where it is."""
        turn = self.turn
        assert turn is not None, "nobody waits for a turn"
        trajectory = self.sampler.add(turn.reply, completion)
        if completion.finish_reason == "abort":
            self.close()
            return
        self._advance(trajectory)
        if self.turn is None and turn.limited and completion.finish_reason == "length":
            # The environment ended it there, with some of the budget left: that is no truncation.
            self.sampler.trajectory = replace(trajectory, finish_reason="stop")

    def cut(self) -> None:
        """End the trajectory where it is, as if its last turn had been aborted."""
        self.sampler.trajectory = replace(self.trajectory, finish_reason="abort")
        self.close()

    def close(self) -> None:
        """Let the environment's coroutine end."""
        self.turn = None
        self._coroutine.close()

    @property
    def trajectory(self) -> Trajectory:
        assert self.sampler.trajectory is not None, "begun"
        return self.sampler.trajectory

    def _advance(self, trajectory: Trajectory | None) -> None:
        try:
            awaited = self._coroutine.send(trajectory)
        except StopIteration as ended:
            self.turn = None
            if ended.value is None or ended.value is not self.sampler.trajectory:
                raise EngineError(
                    f"wrong-result: {self._name}: the environment's run returned "
                    f"{type(ended.value).__name__} instead of the trajectory of its last `await "
                    "sample(...)`; return that trajectory"
                ) from None
            return
        if not isinstance(awaited, Turn):
            raise EngineError(
                f"wrong-result: {self._name}: the environment's run awaited {type(awaited).__name__}, but "
                "it may only await sample(...); do other work in plain calls"
            )
        self.turn = awaited

    @property
    def _name(self) -> str:
        return self.sampler.task.where or f"task {self.sampler.task.index}"


Tasks = Sequence[tuple[Prompt, Sequence[int]]]
"""Tasks, each with the seeds of its trajectories."""


def at_once(tasks: Tasks) -> Callable[[int], Tasks]:
    """Return what `run_episodes` takes all of these tasks from at its beginning."""
    left = [tasks]
    return lambda running: left.pop() if left else ()


def run_episodes(
    engine: InferenceEngine,
    environment: Environment,
    take: Callable[[int], Tasks],
    *,
    sampling: SamplingParams,
    on_end: Callable[[int, int, Trajectory], None],
    stop: Callable[[], bool] = lambda: False,
) -> list[list[Trajectory]]:
    """Run every trajectory of the tasks to its end; one list per task, in order of its seeds. First turns of
    a task that are alike are one request, so that the engine computes their prompt once.

    Args:
        take: returns the tasks to begin. Called with the number of trajectories that have not ended, at the
            beginning and after each that ends.
        on_end: called with the number of the task, the index of the seed, and the trajectory when it has
            ended.
        stop: whether no further turn is to begin: the engine's `abort` may come when no turn is running.
            Trajectories that were not at their end then end with finish_reason "abort".

    Raises:
        EngineError: from the engine; or it returned other samples than were asked for. And what
            `environment.run` raises. Nothing of the call is left in the engine.
    """
    episodes: list[list[_Episode]] = []
    handles: dict[Handle, tuple[int, list[_Episode]]] = {}
    running = 0
    submitted = stopped = False

    def begin() -> None:
        nonlocal running, submitted
        asked: list[tuple[int, list[_Episode]]] = []
        requests: list[GenerationRequest] = []
        for task, seeds in take(running):
            episodes.append([])
            for seed in seeds:
                episodes[-1].append(_Episode(environment, Sampler(task, sampling=sampling, seed=seed)))
            running += len(seeds)
            for first, alike in _alike(episodes[-1]):
                asked.append((len(episodes) - 1, alike))
                requests.append(
                    GenerationRequest(
                        prompt_token_ids=task.token_ids,
                        sampling=first,
                        seeds=tuple(episode.sampler.seed for episode in alike),
                    )
                )
        submitted = submitted or bool(requests)
        handles.update(zip(_submit(engine, requests), asked, strict=True))

    try:
        begin()
        with contextlib.closing(engine.finished()) as stream:
            for done in stream:
                number, alike = handles[done.handle]
                episode = alike[done.sample]
                _check(number, episode, done.completion)
                episode.add(done.completion)
                if episode.turn is not None:
                    if not stopped and (done.completion.finish_reason == "abort" or stop()):
                        stopped = True
                        engine.abort()  # the one before may have come between two turns
                    if not stopped:
                        engine.continue_(done, episode.turn.reply, sampling=episode.turn.sampling)
                        continue
                    episode.cut()
                running -= 1
                on_end(number, episodes[number].index(episode), episode.trajectory)
                begin()
    except BaseException:
        _drop(engine, [one for group in episodes for one in group], submitted=submitted)
        raise
    if missing := sum(episode.turn is not None for group in episodes for episode in group):
        raise EngineError(f"wrong-result: the engine did not return {missing} of the requested samples")
    return [[episode.trajectory for episode in group] for group in episodes]


def _alike(group: Sequence[_Episode]) -> list[tuple[SamplingParams, list[_Episode]]]:
    """The episodes of a task by how their first turn is sampled, in order."""
    alike: dict[SamplingParams, list[_Episode]] = {}
    for episode in group:
        assert episode.turn is not None, "begun"
        alike.setdefault(episode.turn.sampling, []).append(episode)
    return list(alike.items())


def _drop(engine: InferenceEngine, episodes: Sequence[_Episode], *, submitted: bool) -> None:
    """Leave nothing of a call that failed, in the engine or in the environment."""
    if submitted:  # before the stream began, or it would have dropped them
        engine.abort()
        with contextlib.suppress(EngineError), contextlib.closing(engine.finished()) as stream:
            for _ in stream:
                pass
    for episode in episodes:
        with contextlib.suppress(RuntimeError):  # of a coroutine that awaits while it is closed
            episode.close()


def _submit(engine: InferenceEngine, requests: Sequence[GenerationRequest]) -> Sequence[Handle]:
    """Submit all of them: together where the engine spreads them over replicas."""
    together: Callable[[Sequence[GenerationRequest]], Sequence[Handle]] | None
    together = getattr(engine, "submit_all", None)
    return [engine.submit(request) for request in requests] if together is None else together(requests)


def _check(number: int, episode: _Episode, completion: Completion) -> None:
    """Check that the engine returned the sample that was asked for; a mix-up would train on the wrong
    tokens."""
    before, turn = episode.sampler.trajectory, episode.turn
    if turn is None or completion.seed != episode.sampler.seed:
        raise EngineError(f"wrong-result: request {number}: the samples' seeds are not the requested ones")
    prompt = episode.sampler.task.token_ids if before is None else (*before.token_ids, *turn.reply)
    check_completion(number, prompt, completion)


def check_completion(index: int, prompt_token_ids: Sequence[int], completion: Completion) -> None:
    """Raises EngineError: it is not of this prompt, that of request number `index`, or not as long as its
    logprobs."""
    if completion.prompt_token_ids != tuple(prompt_token_ids):
        raise EngineError(
            f"wrong-result: request {index}: the engine returned a completion for another prompt",
        )
    if len(completion.logprobs) != len(completion.token_ids):
        raise EngineError(
            f"wrong-result: request {index}: the engine returned {len(completion.token_ids)} tokens but "
            f"{len(completion.logprobs)} logprobs",
        )
