"""Environments: tasks, how a trajectory of one goes, and what it is worth.

    tasks ──► run(task, sample) ⇄ engine, turn by turn ──► trajectories ──► score ──► rewards

The default is `SingleTurn`: a prompt, one completion, and the rewards of the config. An environment of your
own is a subclass of `Environment`; pass it to `lockstep.train_online`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from lockstep.data.prompts import PromptSet
from lockstep.errors import EngineError
from lockstep.protocols.reward import RewardInput
from lockstep.rollout.reward_models import RewardModels
from lockstep.rollout.rewards import RewardSet, Scored
from lockstep.schema.rollout import Completion, Prompt, SamplingParams, Trajectory, TurnEnd

_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryRules:
    """How the turns of a trajectory are sampled, and what bounds it."""

    sampling: SamplingParams
    """Of each turn; max_tokens bounds a turn."""
    max_tokens: int
    """After the prompt, of all turns and replies."""
    max_context: int | None = None
    """Of a part of it, from its first token on; None: the task's prompt and max_tokens."""
    max_turns: int | None = None
    """Of the policy; None: any number."""
    wait_seconds: float = 600.0
    """That an environment may take between two turns."""
    goes_on: bool = False
    """Whether one that is cut off goes on in another call (`Trajectory.ends`)."""
    engine_waits: bool = False
    """Whether the engine stands still while an environment is at work, so that which tokens are sampled
    beside which does not depend on the time that tools take."""

    @classmethod
    def of(cls, sampling: SamplingParams) -> TrajectoryRules:
        """Return the rules without limits of their own: sampling.max_tokens bounds all turns and replies
        together."""
        return cls(sampling=sampling, max_tokens=sampling.max_tokens)


class OutOfRoom(Exception):
    """A limit of the trajectory leaves no room for another turn. An environment may catch it, to look at
    what there is; where it does not, the trajectory ends there, with finish_reason "length".

    Attributes:
        limit: "turns" or "tokens".
    """

    def __init__(self, text: str, *, limit: Literal["turns", "tokens"]) -> None:
        super().__init__(text)
        self.limit = limit


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Turn:
    """What an environment awaits: the next turn of the policy."""

    reply: tuple[int, ...]
    """Token ids that the policy did not write, before its turn."""
    sampling: SamplingParams
    limited: bool = False
    """The environment has given the turn less than the limits do."""
    prefix: tuple[int, ...] | None = None
    """The context of the turn, in place of the trajectory so far."""
    ask: Callable[[Turn], Awaitable[Trajectory]]

    def __await__(self) -> Generator[Any, Any, Trajectory]:
        return self.ask(self).__await__()

    def prompt(self, task: Prompt, before: Trajectory | None) -> tuple[int, ...]:
        """Return the turn's context."""
        if self.prefix is not None:
            return self.prefix
        return task.token_ids if before is None else (*before.token_ids, *self.reply)


class Sampler:
    """Samples one trajectory of `task`, a turn at a time:

        trajectory = await sample()              # the prompt and the policy's first turn
        trajectory = await sample(reply_ids)     # the same, the reply, and the policy's next turn

    Args:
        seed: of the trajectory; the noise of a turn depends on it and on the turn's position.
    """

    ask: Callable[[Turn], Awaitable[Trajectory]]
    """Set by who runs the trajectory."""
    clock: Callable[[bool], None]
    """Set likewise: lets the seconds of rollout.wait_seconds run, or stops them."""

    def __init__(self, task: Prompt, *, rules: TrajectoryRules, seed: int) -> None:
        self.task, self.rules, self.seed = task, rules, seed
        self.trajectory: Trajectory | None = None
        """As far as it has come; None before the first turn."""
        self.prompt_text: str | None = None
        """Of the first turn's context, where the environment has made another of it than the task's."""
        self.goes_on = False
        """Whether the trajectory was cut off, and `run` is called again to go on with it."""
        self.queued = False
        """Whether the environment waits for others to give room."""
        self.ends: list[TurnEnd] = []
        self._recorded: deque[Trajectory] = deque()
        self._over: Literal["turns", "tokens"] | None = None
        self._limited = False

    def go_on(self, before: Trajectory) -> None:
        """Give the turns that an earlier call of `run` was given again, before the engine is asked."""
        self._recorded.extend(before.whole_turns())

    @property
    def repeats(self) -> bool:
        """Whether the next turn is one that an earlier call was given."""
        return bool(self._recorded)

    def repeated(self, turn: Turn) -> Trajectory:
        """Return the trajectory after a turn that is there already.

        Raises:
            EngineError: `run` asks for another turn than the last time.
        """
        known = self._recorded.popleft()
        context = sum(len(span.token_ids) for span in known.spans[:-1])
        asked = turn.prompt(self.task, self.trajectory)
        if asked != known.token_ids[: len(asked)] or (
            turn.prefix is not None and asked != known.prompt_token_ids
        ):
            raise EngineError(
                f"wrong-result: {self.task.where or 'a task'}: environment.run was called again to go on, "
                f"and put {len(asked)} tokens before turn {known.turns} that are not those of the first time "
                f"({context}); let it be a function of its turns, or set rollout.max_lag = 0"
            )
        self._limited = turn.limited
        return self._taken(known)

    def _taken(self, trajectory: Trajectory) -> Trajectory:
        self.trajectory = trajectory
        if trajectory.finish_reason != "abort":
            end = TurnEnd(
                spans=sum(map(len, trajectory.parts)),
                finish_reason=trajectory.finish_reason,
                stop_reason=trajectory.stop_reason,
                text=trajectory.text,
                cached_tokens=trajectory.cached_tokens,
                attempt=trajectory.attempt,
            )
            self.ends.append(end)
        return trajectory

    @property
    def left(self) -> int:
        """Tokens that are left for replies and turns."""
        if self.trajectory is None:
            return self.rules.max_tokens
        return self.rules.max_tokens - self.trajectory.added_tokens

    @property
    def turns_left(self) -> float:
        """Turns that are left; infinity without a limit."""
        done = 0 if self.trajectory is None else self.trajectory.turns
        return math.inf if self.rules.max_turns is None else self.rules.max_turns - done

    def __call__(self, reply: Sequence[int] = (), *, max_tokens: int | None = None) -> Turn:
        """Return the next turn; awaiting it gives the whole trajectory so far.

        Args:
            reply: token ids of a tool or user after the last turn; none before the first one, whose prompt is
                the task's.
            max_tokens: that the policy may write in this turn; None: sampling.max_tokens, or all that is
                left.

        Raises:
            EngineError: a reply before the first turn.
            OutOfRoom: the limits leave no room for the reply and a turn.
        """
        if reply and self.trajectory is None:
            raise EngineError(
                f"wrong-state: {self.task.where or 'a task'}: the environment passed a reply of "
                f"{len(reply)} tokens before the first turn; await sample() without a reply first"
            )
        return self._turn(self.left - len(reply), max_tokens, reply=tuple(reply))

    def branch(self, prefix: Sequence[int], *, max_tokens: int | None = None) -> Turn:
        """Return the next turn in another context: `prefix` takes the place of the prompt and of everything
        that came after it, for example because a chat template renders earlier turns differently from now
        on. The trajectory gets another part. What the policy wrote in earlier parts is trained on there;
        copies of it in `prefix` are context.

        Args:
            prefix: token ids, also before the first turn.
            max_tokens: as in a call.

        Raises:
            OutOfRoom: the limits leave no room for a turn, in all or behind this prefix.
        """
        behind = self._max_context - len(prefix)
        return self._turn(min(self.left, behind), max_tokens, prefix=tuple(prefix))

    async def in_line(self, what: Awaitable[_Result]) -> _Result:
        """Await what other trajectories hold up, such as room for one more instance of something. It does not
        count as time that the environment takes, nor against rollout.wait_seconds."""
        self.clock(False)
        try:
            return await what
        finally:
            self.clock(True)

    def _turn(
        self,
        room: int,
        max_tokens: int | None,
        *,
        reply: tuple[int, ...] = (),
        prefix: tuple[int, ...] | None = None,
    ) -> Turn:
        rules, name = self.rules, self.task.where or "a task"
        if self.turns_left < 1:
            self._over = "turns"
            raise OutOfRoom(
                f"{name}: all {rules.max_turns} turns of rollout.max_turns are done", limit="turns"
            )
        if self.trajectory is not None and prefix is None:
            room = min(room, self._max_context - len(self.trajectory.token_ids) - len(reply))
        if room < 1:
            self._over = "tokens"
            raise OutOfRoom(
                f"{name}: a context of {len(prefix or reply)} more tokens leaves no room for a turn, because "
                f"only {self.left} of the trajectory's {rules.max_tokens} tokens are left",
                limit="tokens",
            )
        allowed = min(room, rules.sampling.max_tokens)
        most = allowed if max_tokens is None else min(allowed, max_tokens)
        least = min(rules.sampling.min_tokens, most)
        sampling = replace(rules.sampling, max_tokens=most, min_tokens=least)
        return Turn(reply=reply, prefix=prefix, sampling=sampling, limited=most < allowed, ask=self._asked)

    @property
    def _max_context(self) -> int:
        return self.rules.max_context or len(self.task.token_ids) + self.rules.max_tokens

    def _asked(self, turn: Turn) -> Awaitable[Trajectory]:
        return self.ask(turn)

    def add(self, turn: Turn, completion: Completion) -> Trajectory:
        """Append a finished turn, and return the trajectory."""
        if self.trajectory is None:
            trajectory = Trajectory.of(completion)
        elif turn.prefix is not None:
            trajectory = self.trajectory.branched(completion)
        else:
            trajectory = self.trajectory.continued(turn.reply, completion)
        self._limited = turn.limited
        return self._taken(trajectory)

    def close(self) -> Trajectory:
        """Return the trajectory, which the environment has ended, with what ended it."""
        trajectory = self.trajectory
        assert trajectory is not None, "a turn has ended"
        if self._over is not None:
            trajectory = replace(trajectory, finish_reason="length", end=self._over)
        elif self._limited and trajectory.finish_reason == "length":
            # The environment ended it there, with some of the budget left: that is no truncation.
            trajectory = replace(trajectory, finish_reason="stop", end="done")
        if self.prompt_text is not None:
            trajectory = replace(trajectory, prompt_text=self.prompt_text)
        self.trajectory = trajectory
        return trajectory


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

    @property
    def takes_one_turn(self) -> bool:
        """Whether every trajectory is a single turn: `run` is the default."""
        return type(self).run is Environment.run

    @property
    def goes_on(self) -> bool:
        """Whether a trajectory that is cut off may go on in a later step (rollout.max_lag). `run` is then
        cancelled, with `sample.goes_on`, and called again: it is given the turns that there are, must put the
        same tokens between them, and keeps what else it needs, such as the answers of its tools, by
        `sample.seed`."""
        return self.takes_one_turn

    def can_score(self, trajectory: Trajectory) -> bool:
        """Whether it has what it needs to score a trajectory that has ended; else `run` is called again, with
        all of its turns."""
        return True

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

    def begin(self, what: str) -> None:
        """Called before trajectories of a step (`step-000012`) or of an evaluation (`evaluation-NAME-000012`,
        after 12 steps) are run. A resumed run repeats it with the same text. The default does nothing."""

    async def run(self, task: Prompt, sample: Sampler) -> Trajectory:
        """Return one trajectory of the task: that of the last `await sample(...)`. The default is a single
        turn.

        It runs in an asyncio event loop, and may await anything besides; meanwhile the engine works on other
        trajectories. What blocks the loop stops them all: run it in a thread, or in a process.

        Sampling of a step stops when one call raises, `OutOfRoom` excepted: the others are cancelled.
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

    def why_dropped(self) -> str | None:
        """Return why the first trajectory since the last `pop_counts` was dropped, if that is known, for the
        error of a step in which all are."""
        return None

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
            prompt=task.text if trajectory.prompt_text is None else trajectory.prompt_text,
            completion=trajectory.text or "",
            row=task.row,
            prompt_token_ids=trajectory.parts[0][0].token_ids,
            completion_token_ids=trajectory.added_token_ids,
            finish_reason=trajectory.finish_reason,
            index=task.index,
            where=task.where,
            conversation=task.conversation,
            seed=trajectory.seed,
        )
        for trajectory in trajectories
    ]
