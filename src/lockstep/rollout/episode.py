"""One trajectory on its way from its prompt to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from lockstep.errors import EngineError
from lockstep.protocols.engine import Finished
from lockstep.rollout.environment import Sampler, Turn
from lockstep.schema.rollout import Completion, Span, Trajectory

Begun = Trajectory | None
"""What an earlier call has sampled of a trajectory, which goes on after it; None: nothing."""


class Episode:
    """One trajectory on its way."""

    def __init__(self, sampler: Sampler, *, number: int, index: int) -> None:
        self.sampler, self.number, self.index = sampler, number, index
        self.before: Begun = None
        """What there is of it, until the turn that was cut off is asked for."""
        self.turn: Turn | None = None
        """The turn that the environment waits for."""
        self.answer: asyncio.Future[Trajectory] | None = None
        """Where it waits for it."""
        self.task: asyncio.Task[Trajectory] | None = None
        self.held: Finished | None = None
        """The last turn, from the engine."""
        self.over = False
        self.since = 0.0
        self.waited = 0.0
        """Seconds that the environment was waited for."""
        self.timer: asyncio.TimerHandle | None = None
        self.keeps = False
        """Whether another call may go on with it, and asks for its turns."""

    @property
    def name(self) -> str:
        task = self.sampler.task
        return task.where or f"task {task.index}"

    @property
    def trajectory(self) -> Trajectory:
        trajectory = self.sampler.trajectory
        if self.before is not None:  # cut off again before it had come that far
            trajectory = replace(self.before, finish_reason="abort", end="abort")
        if trajectory is None:  # stopped before its first turn
            prompt = Span(author="prompt", token_ids=self.sampler.task.token_ids)
            trajectory = Trajectory(
                spans=(prompt,),
                finish_reason="abort",
                stop_reason=None,
                text=None,
                seed=self.sampler.seed,
                engine="",
                turns=0,
            )
        if self.before is None and self.keeps:
            trajectory = replace(trajectory, ends=tuple(self.sampler.ends))
        return replace(trajectory, wait_seconds=self.waited)

    @property
    def tokens_left(self) -> int:
        """After the context of the turn that is asked for."""
        assert self.turn is not None
        return self.sampler.left - len(self.turn.reply)

    def take_begun(self) -> tuple[Span, ...]:
        """What there is of the turn that the engine is asked for."""
        before, self.before = self.before, None
        return () if before is None else before.begun

    def check(self, completion: Completion) -> None:
        """Check that the engine returned the sample that was asked for; a mix-up would train on the wrong
        tokens."""
        before, turn = self.sampler.trajectory, self.turn
        if turn is None or completion.seed != self.sampler.seed:
            raise EngineError(
                f"wrong-result: request {self.number}: the samples' seeds are not the requested ones"
            )
        check_completion(self.number, turn.prompt(self.sampler.task, before), completion)


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
