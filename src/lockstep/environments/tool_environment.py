"""The environment of runs with an `environment` section: turns with the tools of the user's class, or its
game.

    open, reset ──► prompt ──► the policy's turn ──► calls, in order ──► results ──► the policy's turn ── ...
                                      └── no call, or a limit ──► reward ──► close

The tokens of a trajectory are a `Ledger`: what the policy wrote is never rendered again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from lockstep.config.environment import EnvironmentConfig
from lockstep.data.chat import ChatFormat, Message
from lockstep.data.prompts import FixedPrompts, PromptSet
from lockstep.environments.calls import CallError
from lockstep.environments.checks import Checks
from lockstep.environments.delta import Branch, ConversationTokens, Ledger
from lockstep.environments.host import END_SECONDS, FORK_SECONDS
from lockstep.environments.hosts import ToolHosts
from lockstep.environments.recorded import LAST_SECONDS, RecordedInstance
from lockstep.environments.results import EnvironmentFailure, ToolResult
from lockstep.environments.turns import PolicyTurn
from lockstep.errors import ConfigError, DataError, RewardError
from lockstep.observe.text import printable
from lockstep.rollout.environment import OutOfRoom, Sampler, SingleTurn, Trajectories
from lockstep.rollout.rewards import RewardSet, Scored, check_total
from lockstep.rollout.tool_loop import tool_loop
from lockstep.schema.rollout import Prompt, Trajectory

log = logging.getLogger(__name__)

REWARD = "environment"
"""Name of the reward that the class gives; its parts are environment/NAME."""
_CHECKED_ROWS = 4
"""Rows for which an instance is made and reset before the first step."""


@dataclass(kw_only=True)
class _Counts:
    """Counts of a trajectory, or of those that a step has scored: see ToolEnvironment.pop_counts."""

    calls: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    dropped: str | None = None
    """Why the first sample was dropped."""
    seconds: float = 0.0
    checks: Checks = field(default_factory=Checks)
    check_seconds: float = 0.0

    def add(self, other: _Counts) -> None:
        """Count what the other has counted."""
        self.calls += other.calls
        self.errors.update(other.errors)
        self.dropped = self.dropped or other.dropped
        self.seconds += other.seconds
        self.checks.update(other.checks)
        self.check_seconds += other.check_seconds


@dataclass(kw_only=True, slots=True)
class _Outcome:
    """What became of a trajectory beside its tokens."""

    reward: float | Mapping[str, float] | None = None
    target: str = ""
    """The class."""
    failed: str | None = None
    """Why the sample is dropped."""
    counts: _Counts


@dataclass(kw_only=True, slots=True)
class _Course:
    """A trajectory on its way."""

    ledger: Ledger
    tokens: ConversationTokens
    instance: RecordedInstance
    counts: _Counts
    steps: float = 0.0
    """Rewards of a game's steps, added up."""
    stepped: bool = False
    encoding: list[asyncio.Future[None]] = field(default_factory=list)
    """Its turns, in threads."""


class ToolEnvironment(SingleTurn):
    """Conversations of many turns with the methods of a class.

    Args:
        hosts: run the classes.
        chat: the chat template in force, and the policy's tokenizer.
        rewards: functions and verifiers of the run, beside the rewards of the class; they get the text of the
            last turn.
        prompts, held_out: made with the tools of `hosts`.

    Raises:
        ConfigError: there is no chat template, or one without tools; the class fails for one of the first
            rows.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        rewards: RewardSet,
        *,
        hosts: ToolHosts,
        chat: ChatFormat,
        prompts: PromptSet | None = None,
        held_out: PromptSet | None = None,
    ) -> None:
        super().__init__(rewards, prompts=prompts, held_out=held_out)
        self.config, self.hosts = config, hosts
        self._chat = chat
        self._conversations: dict[str, ConversationTokens] = {}
        self._outcomes: dict[int, _Outcome] = {}
        """By the seed of the trajectory, until it is scored."""
        self._parked: dict[int, RecordedInstance] = {}
        """By seed: the instances of trajectories that go on in the next step."""
        self._counts, self._lock = _Counts(), threading.Lock()
        self._warned = False
        """Whether a dropped sample was told of since the last `pop_counts`."""
        if prompts is not None:
            self._check_first(prompts)

    def _check_first(self, prompts: PromptSet) -> None:
        """Make and reset an instance for the first rows."""
        some = prompts.first if isinstance(prompts, FixedPrompts) else prompts.batch(0, 1, 0)
        first = list(islice(some, _CHECKED_ROWS))
        for prompt in first:
            self._conversation(prompt)
        longest = FORK_SECONDS + 4 * max(host.tool_seconds for host in self.hosts)
        # In a loop of another thread: this one may have its own, as in a notebook.
        tool_loop().run(self.hosts.check(first), seconds=_CHECKED_ROWS * longest)

    def begin(self, what: str) -> None:
        """See Environment."""
        self.hosts.begin(what)

    async def run(self, task: Prompt, sample: Sampler) -> Trajectory:
        """See Environment."""
        host = self.hosts.of(task.row, task.where)
        instance, counts = self._parked.pop(sample.seed, None), _Counts()
        if instance is None:
            instance = RecordedInstance(host, task, sample, journal=self.hosts.journal)
        else:
            instance.repeat(sample)
        try:
            return await self._conversed(task, sample, instance, counts)
        except EnvironmentFailure as failure:
            return await self._failed(failure, sample, counts)
        finally:
            if sample.goes_on:
                self._parked[sample.seed] = instance.park()
            else:
                await instance.close()

    @property
    def goes_on(self) -> bool:
        """True: instances live on from step to step, and a resumed run has the journal."""
        return True

    def can_score(self, trajectory: Trajectory) -> bool:
        """Whether the class has told its reward to this process."""
        return trajectory.seed in self._outcomes

    async def _conversed(
        self, task: Prompt, sample: Sampler, instance: RecordedInstance, counts: _Counts
    ) -> Trajectory:
        tokens = self._conversation(task)
        messages = _with_observation(_messages(task), await instance.reset())
        ledger = tokens.start(messages, where=task.where or "a sample")
        sample.prompt_text = ledger.part.text
        course = _Course(ledger=ledger, tokens=tokens, instance=instance, counts=counts)
        turn = sample() if ledger.ids == task.token_ids else sample.branch(ledger.ids)
        try:
            while True:
                trajectory = await turn
                written = ledger.add_policy(trajectory.token_ids[len(ledger.ids) :])
                if trajectory.finish_reason != "stop":
                    break
                replies = await self._replies(course, written)
                if not replies:
                    break
                if sample.turns_left < 1:
                    sample(())  # raises OutOfRoom, which says why it ends
                try:
                    reply = tokens.reply(ledger, replies)
                except DataError as error:  # a template refuses what the policy made a tool say
                    self._drop(error, sample, counts)
                    return trajectory
                turn = sample.branch(reply.ids) if isinstance(reply, Branch) else sample(reply.ids)
                course.encoding.append(asyncio.get_running_loop().run_in_executor(None, self._encode, course))
        except OutOfRoom:
            await self._reward(course, sample)
            raise
        await self._reward(course, sample)
        return trajectory

    async def _replies(self, course: _Course, written: PolicyTurn) -> list[Message]:
        """What the tools or the game answer to a turn; nothing: the trajectory is over."""
        number = course.ledger.number - 1
        if course.instance.described["form"] == "gym":
            result = await course.instance.step(written.content, turn=number)
            self._count(result, course)
            course.steps, course.stepped = course.steps + (result.reward or 0.0), True
            return [] if result.done else [{"role": "user", "content": result.text}]
        if isinstance(written.calls, CallError):
            self._count(ToolResult(text="", error="not-parsed", seconds=0.0), course)
            return [course.tokens.turns.error(written.calls)]
        replies = []
        most = self.config.max_calls
        for place, call in enumerate(written.calls):
            if place < most:
                result = await course.instance.call(call.name, call.arguments, turn=number, call=place)
            else:
                text = f"error: not run, because it is call {place + 1} of a turn, and {most} are allowed"
                result = ToolResult(text=text, error="too-many", seconds=0.0)
            self._count(result, course)
            replies.append(call.result(result.text))
        return replies

    async def _reward(self, course: _Course, sample: Sampler) -> None:
        """Ask the class for its reward, and compare the tokens with the template's."""
        # In a thread, because milliseconds here would hold up the turns of all other trajectories.
        await asyncio.gather(*course.encoding, asyncio.to_thread(self._check_tokens, course))
        reward: float | Mapping[str, float] | None = None
        if course.instance.described["reward"] in ("get_reward", "_reward"):
            messages = course.tokens.history(course.ledger.part)
            reward = await course.instance.reward({"messages": messages, "turns": course.ledger.number})
        if reward is None and course.stepped:
            reward = course.steps
        target = course.instance.described["target"]
        self._outcomes[sample.seed] = _Outcome(reward=reward, target=target, counts=course.counts)

    def _drop(self, failure: EnvironmentFailure | DataError, sample: Sampler, counts: _Counts) -> None:
        counts.errors["dropped"] += 1
        counts.dropped = str(failure)
        self._outcomes[sample.seed] = _Outcome(failed=str(failure), counts=counts)
        with self._lock:
            first, self._warned = not self._warned, True
        if first:
            log.warning("a sample is dropped: %s", printable(str(failure)))

    def _encode(self, course: _Course) -> None:
        began = time.perf_counter()
        course.ledger.encode_turns()
        with self._lock:
            course.counts.check_seconds += time.perf_counter() - began

    def _check_tokens(self, course: _Course) -> None:
        began, checks = time.perf_counter(), Checks()
        checks.add(course.tokens.turns, course.ledger)
        with self._lock:
            course.counts.checks.update(checks)
            course.counts.check_seconds += time.perf_counter() - began

    async def _failed(self, failure: EnvironmentFailure, sample: Sampler, counts: _Counts) -> Trajectory:
        """The trajectory of a sample that is dropped, because its instance failed."""
        self._drop(failure, sample, counts)
        if sample.trajectory is None:
            await sample(max_tokens=1)
        assert sample.trajectory is not None, "a turn has ended"
        return sample.trajectory

    def score(self, groups: Sequence[Trajectories]) -> list[list[Scored | None]]:
        """See Environment: the rewards of the run and of the class, weighted and added up."""
        scores = super().score(groups)
        return [
            [self._with_own(score, one) for score, one in zip(of_group, trajectories, strict=True)]
            for of_group, (_, trajectories) in zip(scores, groups, strict=True)
        ]

    def _with_own(self, score: Scored | None, trajectory: Trajectory) -> Scored | None:
        outcome = self._outcomes.pop(trajectory.seed, None) or _Outcome(counts=_Counts())
        with self._lock:
            self._counts.add(outcome.counts)
        if score is None or outcome.failed is not None:
            return None
        if outcome.reward is None:
            if not self.rewards and self.reward_models is None:
                raise RewardError(
                    f"reward-failed: environment {outcome.target!r} returned no reward for a trajectory, "
                    "and the run has no other rewards; return a number from get_reward, or set rewards"
                )
            return score
        given = outcome.reward if isinstance(outcome.reward, Mapping) else {"": outcome.reward}
        own = {f"{REWARD}/{name}".rstrip("/"): float(value) for name, value in given.items()}
        by_name = {**score.by_name, **own}
        total = score.total + self.config.weight * sum(own.values())
        check_total(total, by_name)
        weights = {**score.weights, **dict.fromkeys(own, self.config.weight)}
        return Scored(total=total, by_name=by_name, weights=weights)

    def why_dropped(self) -> str | None:
        """See Environment."""
        return self._counts.dropped

    def pop_counts(self) -> dict[str, float]:
        """See Environment. rollout/tool_calls; rollout/tool_errors, and by kind; rollout/tool_seconds, added
        up; rollout/template_mismatches, and by cause; rollout/noncanonical_turns; time/token_checks."""
        with self._lock:
            counts, self._counts, self._warned = self._counts, _Counts(), False
        checks = counts.checks
        found: dict[str, float] = {
            "tool_calls": counts.calls,
            "tool_errors": sum(counts.errors.values()),
            "tool_seconds": counts.seconds,
            "template_mismatches": sum(checks.mismatches.values()),
            "noncanonical_turns": checks.noncanonical_turns,
        }
        found |= {f"tool_errors/{kind}": n for kind, n in counts.errors.items()}
        found |= {f"template_mismatches/{cause}": n for cause, n in checks.mismatches.items()}
        named = {f"rollout/{name}": float(value) for name, value in found.items()}
        return super().pop_counts() | named | {"time/token_checks": counts.check_seconds}

    def close(self) -> None:
        """End the processes of rewards and of the class."""
        super().close()
        parked, self._parked = list(self._parked.values()), {}
        if parked:

            async def end() -> None:
                await asyncio.gather(*(instance.end() for instance in parked))

            with contextlib.suppress(TimeoutError):  # the host kills what is left
                tool_loop().run(end(), seconds=LAST_SECONDS + END_SECONDS)
        self.hosts.close()

    def _count(self, result: ToolResult, course: _Course) -> None:
        course.counts.calls += 1
        course.counts.seconds += result.seconds
        if result.error is not None:
            course.counts.errors[result.error] += 1

    def _conversation(self, task: Prompt) -> ConversationTokens:
        """How the task's conversation becomes tokens: most rows share one."""
        host = self.hosts.of(task.row, task.where)
        tools = host.tools
        chat = self._chat.for_row({**task.row, **({"tools": tools} if tools else {})}, where=task.where)
        if chat.chat_template is None:
            raise ConfigError(
                f"no-chat-template: environment {host.target!r}: turns with tools need a chat "
                "template, and there is none; set data.chat_template to a jinja template with tools"
            )
        options = {name: value for name, value in chat.kwargs.items() if name != "tools"}
        key = json.dumps([host.target, chat.template, options], sort_keys=True, default=str)
        if key not in self._conversations:
            self._conversations[key] = ConversationTokens(chat.chat_template, tools=tools, options=options)
        return self._conversations[key]


def _messages(task: Prompt) -> list[Message]:
    talk = task.conversation
    if talk is None or isinstance(talk, str):
        return [{"role": "user", "content": talk or task.text}]
    return [dict(message) for message in talk]


def _with_observation(messages: list[Message], first: str | list[dict[str, str]] | None) -> list[Message]:
    """Add what `reset` returned: messages, or a text to the user's last message."""
    if not first:
        return messages
    if isinstance(first, list):
        return [*messages, *first]
    if messages and messages[-1]["role"] == "user":
        before = str(messages[-1]["content"])
        return [*messages[:-1], {**messages[-1], "content": f"{before}\n\n{first}" if before else first}]
    return [*messages, {"role": "user", "content": first}]
