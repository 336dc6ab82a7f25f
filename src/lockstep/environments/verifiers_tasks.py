"""Task sets of verifiers 0.4 as an environment: the extra `verifiers`.

    environment = VerifiersTasks("my_tasks", tokenizer)        # a task set that is installed
    train_online(load_run("run.toml"), environment=environment)

    task ──► verifiers' environment ──► harness `null`, a process ──► interception server ──► TurnClient
                                                                            trajectory ◄── sample(...)

The chat loop, its tools and the rewards are verifiers'; tokens are a ledger of ours.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, Literal

from lockstep.common_errors import missing_package
from lockstep.environments.checks import Checks
from lockstep.environments.delta import ConversationTokens
from lockstep.environments.held import Held
from lockstep.errors import ConfigError, RewardError
from lockstep.observe.chat_template import ChatTemplate
from lockstep.rollout.environment import Environment, Sampler, Trajectories
from lockstep.rollout.rewards import Scored
from lockstep.rollout.tool_loop import tool_loop
from lockstep.schema.rollout import Prompt, Trajectory

_missing: ImportError | None = None
try:
    from verifiers.v1.clients import ModelContext, TrainClientConfig
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.configs.env import EnvConfig
    from verifiers.v1.utils.generic import concrete_type
    from verifiers.v1.utils.loaders import environment_class

    from lockstep.environments.verifiers_client import Course, TurnClient, message_of
except ImportError as error:
    _missing = error

_CLOSE_SECONDS = 30.0


class VerifiersTasks(Environment):
    """A task set under its own environment, or verifiers' single-agent one, with one agent.

    Args:
        taskset: its id: a module that exports it.
        tokenizer: the policy's.
        chat_template: None: the tokenizer's.
        settings: of the task set's config.
        most_tasks: how many are loaded.
        on_error: what an episode with an error leads to: "raise", or "drop" for the sample.

    Raises:
        ConfigError: verifiers is missing; there are no tasks, or several agents.
    """

    def __init__(
        self,
        taskset: str,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        settings: Mapping[str, Any] | None = None,
        most_tasks: int = 1000,
        on_error: Literal["raise", "drop"] = "raise",
    ) -> None:
        if _missing is not None:
            raise missing_package("VerifiersTasks", "verifiers", extra="verifiers", cause=_missing)
        self._name, self._on_error = taskset, on_error
        self._env = _environment(taskset, settings or {})
        self._tasks = list(self._env.taskset.take(most_tasks))
        if not self._tasks:
            raise ConfigError(f"not-enough: the task set {taskset!r} of verifiers has no tasks")
        self._template = ChatTemplate(tokenizer, chat_template or tokenizer.chat_template)
        self._tokens = cache(lambda tools: ConversationTokens(self._template, tools=json.loads(tools)))
        self._client = TurnClient()
        self._held = Held(self._serving)
        self._outcomes: dict[int, Scored | None] = {}
        """By the seed of the trajectory, until it is scored."""
        self._checks, self._failed = Checks(), 0
        self._why: str | None = None
        """Why the first episode failed."""

    def tasks(self, step: int, n: int, seed: int) -> Sequence[Prompt]:
        """See Environment: each epoch in an order of its own."""
        return [self._prompt(place, seed) for place in range(step * n, (step + 1) * n)]

    def _prompt(self, place: int, seed: int) -> Prompt:
        epoch, at = divmod(place, len(self._tasks))
        number = random.Random(f"{seed} {epoch}").sample(range(len(self._tasks)), len(self._tasks))[at]
        data, where = self._tasks[number].data, f"task {number} of {self._name}"
        system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        given = [{"role": "user", "content": data.prompt}] if isinstance(data.prompt, str) else data.prompt
        messages = [*system, *(m if isinstance(m, dict) else message_of(m, {}) for m in given or [])]
        part = self._tokens("[]").start(messages, where=where).part  # its tools come with the first turn
        row = {"task": number}
        return Prompt(
            index=place, token_ids=part.ids, text=part.text, row=row, conversation=messages, where=where
        )

    async def run(self, task: Prompt, sample: Sampler) -> Trajectory:
        """See Environment."""
        context, course = await self._held.get(), Course(task, sample, self._tokens)
        try:
            episode = await self._env.run_episode(
                self._tasks[task.row["task"]],
                context,
                on_trace=lambda trace: self._client.add(trace.id, course),
            )
        finally:
            self._client.remove(course)
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if sample.trajectory is None or not episode.ok:
            text = "; ".join(f"{error.type}: {error.message}" for error in errors) or "it sampled no turn"
            why = f"{task.where}: the episode failed: {text}"
            if self._on_error == "raise":
                raise RewardError(f"reward-failed: {why}; correct the task set, or set on_error = 'drop'")
            self._why = self._why or why
            self._outcomes[sample.seed], self._failed = None, self._failed + 1
            return sample.trajectory or await sample(max_tokens=1)
        self._checks.update(await asyncio.to_thread(course.checked))
        rewards = {name: one for name, one in episode.traces[0].rewards.items() if one is not None}
        self._outcomes[sample.seed] = Scored(
            total=sum(one.value for one in rewards.values()),
            by_name={name: one.score for name, one in rewards.items()},
            weights={name: one.weight for name, one in rewards.items()},
        )
        return sample.trajectory

    def score(self, groups: Sequence[Trajectories]) -> list[list[Scored | None]]:
        """See Environment: the rewards of the task set."""
        return [[self._outcomes.pop(one.seed, None) for one in of_task] for _, of_task in groups]

    def why_dropped(self) -> str | None:
        """See Environment."""
        return self._why

    def pop_counts(self) -> dict[str, float]:
        """See Environment. rollout/template_mismatches; rollout/failed_episodes."""
        checks, failed = self._checks, self._failed
        self._checks, self._failed, self._why = Checks(), 0, None
        mismatches = float(sum(checks.mismatches.values()))
        return {"rollout/template_mismatches": mismatches, "rollout/failed_episodes": float(failed)}

    def close(self) -> None:
        """End verifiers' servers."""
        tool_loop().run(self._held.close(), seconds=_CLOSE_SECONDS)

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[Any]:
        # The kind of client that is asked for whole turns, not for a stream; ours takes its place.
        config = TrainClientConfig(base_url="http://127.0.0.1:9", api_key_var="LOCKSTEP_NO_KEY")
        async with self._env.serving():
            self._env._interception.clients[config.model_dump_json()] = self._client
            yield ModelContext(model="policy", client=config)


def _environment(taskset: str, settings: Mapping[str, Any]) -> Any:
    """verifiers' environment, whose agent has the harness `null` in a process on this machine."""
    made = environment_class(taskset)
    config = concrete_type(made, EnvConfig) or EnvConfig
    agents = [name for name, field in config.model_fields.items() if isinstance(field.default, AgentConfig)]
    if len(agents) != 1:
        raise ConfigError(
            f"unsupported-combination: the task set {taskset!r} of verifiers has {len(agents)} agents "
            f"({', '.join(agents)}); one is supported"
        )
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    given = {"taskset": {"id": taskset, **settings}, agents[0]: agent, "interception": {"type": "server"}}
    return made(config.model_validate(given))
