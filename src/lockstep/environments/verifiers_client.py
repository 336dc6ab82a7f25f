"""The model client of verifiers' rollouts: messages in, a turn of the policy out, and its tokens in a ledger.

Imports verifiers; see verifiers_tasks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from verifiers.v1 import types as wire
from verifiers.v1.clients import Client
from verifiers.v1.clients.train import serialize_completion

from lockstep.environments.calls import Call
from lockstep.environments.checks import Checks
from lockstep.environments.delta import Branch, ConversationTokens, Ledger
from lockstep.environments.turns import PolicyTurn
from lockstep.observe.chat_template import Message
from lockstep.rollout.environment import OutOfRoom, Sampler
from lockstep.schema.rollout import Prompt

TokensOf = Callable[[str], ConversationTokens]
"""By the JSON of tools."""


class Course:
    """A trajectory on its way.

    Args:
        tokens_of: cached, as most rollouts have the same tools.
    """

    def __init__(self, task: Prompt, sample: Sampler, tokens_of: TokensOf) -> None:
        self.task, self.sample, self._tokens_of = task, sample, tokens_of
        self._ledgers: list[tuple[ConversationTokens, Ledger]] = []
        """The last one grows. A program that rewrites its conversation begins another one."""
        self._seen = 0
        """Messages before the last turn."""
        self._calls: dict[str, Call] = {}

    async def turn(self, pending: Any) -> tuple[PolicyTurn, Any]:
        """Return the policy's next turn and the trajectory with it.

        Args:
            pending: verifiers' PendingTurn: all messages, and how many of them its trace has.

        Raises:
            OutOfRoom: the limits leave no room for it.
        """
        sample = self.sample
        messages = [message_of(message, self._calls) for message in pending.prompt]
        if self._ledgers and pending.tail_start == self._seen + 1:
            tokens, ledger = self._ledgers[-1]
            reply = tokens.reply(ledger, messages[pending.tail_start :])
            turn = sample.branch(reply.ids) if isinstance(reply, Branch) else sample(reply.ids)
        else:
            tools = [_schema(tool) for tool in pending.tools or ()]
            tokens = self._tokens_of(json.dumps(tools))
            ledger = tokens.start(messages, where=self.task.where)
            same = sample.trajectory is None and ledger.ids == self.task.token_ids
            turn = sample() if same else sample.branch(ledger.ids)
            self._ledgers.append((tokens, ledger))
        self._seen = len(messages)
        trajectory = await turn
        return ledger.add_policy(trajectory.token_ids[len(ledger.ids) :]), trajectory

    def remember(self, call: Call) -> str:
        """Return the id by which the program knows a call."""
        name = call.id or f"call_{len(self._calls)}"
        self._calls[name] = call
        return name

    def checked(self) -> Checks:
        """Compare the tokens with renderings of the whole conversations."""
        checks = Checks()
        for tokens, ledger in self._ledgers:
            if ledger.number:
                checks.add(tokens.turns, ledger)
        return checks


class TurnClient(Client):  # type: ignore[misc]  # where verifiers is missing
    """Samples the turns of all rollouts; each is known by the id of its trace."""

    def __init__(self) -> None:
        self._courses: dict[str, Course] = {}

    def add(self, trace_id: str, course: Course) -> None:
        """Expect turns of a rollout."""
        self._courses[trace_id] = course

    def remove(self, course: Course) -> None:
        """Expect no more."""
        self._courses = {name: one for name, one in self._courses.items() if one is not course}

    async def get_response(
        self,
        dialect: Any,
        body: dict[str, Any],
        sampling: Any,
        session_id: str | None = None,
        turn: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """See verifiers. What is sampled how, the run says, not the request."""
        course = self._courses[session_id or ""]
        try:
            written, trajectory = await course.turn(turn)
        except OutOfRoom:  # an empty turn, which ends the chat loop, and rewards follow
            message, finish, tokens = wire.AssistantMessage(content=""), "length", None
        else:
            message, finish = _assistant(written, course), trajectory.finish_reason
            begin = len(trajectory.token_ids) - len(written.ids)
            tokens = wire.TurnTokens(
                prompt_ids=trajectory.token_ids[:begin],
                completion_ids=written.ids,
                completion_logprobs=trajectory.spans[-1].logprobs,
            )
        if message.tool_calls:
            finish = "tool_calls"
        answer = wire.Response(
            id="", created=0, model=body["model"], message=message, finish_reason=finish, tokens=tokens
        )
        answer.raw = serialize_completion(answer, body["model"])
        return answer


def message_of(message: Any, calls: Mapping[str, Call]) -> Message:
    """A message of verifiers as chat templates take it.

    Args:
        calls: by id; those that results answer.
    """
    text = wire.content_text(message.content)
    if message.role == "tool":
        call = calls.get(message.tool_call_id)
        return call.result(text) if call else {"role": "tool", "name": message.name or "", "content": text}
    made: Message = {"role": message.role, "content": text}
    if given := getattr(message, "tool_calls", None):
        made["tool_calls"] = [
            Call(name=one.name, arguments=json.loads(one.arguments), id=one.id).message() for one in given
        ]
    return made


def _assistant(written: PolicyTurn, course: Course) -> Any:
    """What the program reads of a turn. Calls that do not parse are text to it."""
    calls = [
        wire.ToolCall(id=course.remember(call), name=call.name, arguments=json.dumps(dict(call.arguments)))
        for call in written.made
    ]
    content = written.content if calls or not written.calls else written.body
    return wire.AssistantMessage(
        content=content, reasoning_content=written.reasoning, tool_calls=calls or None
    )


def _schema(tool: Any) -> dict[str, Any]:
    described = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": described}
