"""Conversations under shipped templates, and what a policy writes that writes as the template would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from shipped import ADD

from lockstep.errors import DataError
from lockstep.observe.chat_template import ChatTemplate
from lockstep.observe.template_program import common_length
from lockstep.observe.template_renderer import render_chat

Message = dict[str, Any]
ROUNDS = 3
THOUGHT = dict.fromkeys(("reasoning_content", "thinking", "reasoning"), "why")
KINDS: dict[str, tuple[bool, bool]] = {
    "user": (False, False),
    "user, thought": (False, True),
    "tool": (True, False),
    "tool, thought": (True, True),
}
"""Whether a tool's result or a user answers, and whether the turns have reasoning."""


@dataclass(frozen=True)
class Chat:
    """A template, and whether conversations under it have the tool `add`."""

    template: ChatTemplate
    tools: bool
    now: float = 0.0
    """For templates that write the time."""

    def text(self, messages: Sequence[Message], *, generate: bool) -> str:
        options = {"tools": [ADD]} if self.tools else {}
        job = self.template.job(messages, generate=generate, options=options, where="a test")
        return render_chat(self.template.tokenizer, replace(job, now=self.now)).text

    @cached_property
    def ends(self) -> list[str]:
        added = self.template.tokenizer.added_tokens_decoder
        return [added[i].content for i in sorted(self.template.end_ids) if i in added]


def calls(number: int) -> list[Message]:
    call = {"name": "add", "arguments": {"x": 3, "s": "a b"}}
    return [{"type": "function", "id": f"{number:04d}00000", "function": call}]


def answers(number: int, *, tool: bool) -> list[Message]:
    if not tool:
        return [{"role": "user", "content": f"more {number}"}]
    result = {"role": "tool", "name": "add", "tool_call_id": f"{number:04d}00000"}
    return [{**result, "content": f"RESULT {number}"}]


def canonical(
    chat: Chat, history: Sequence[Message], number: int, *, tool: bool, thought: bool
) -> tuple[Message, str]:
    """A turn as a message, and the text that a policy writes if it writes what the template would. Where the
    template writes what is before the turn otherwise once it is there: what it writes for a first turn."""
    message: Message = {"role": "assistant", "content": "" if tool else "ok", **(THOUGHT if thought else {})}
    message |= {"tool_calls": calls(number)} if tool else {}
    header = chat.text(history, generate=True)
    whole = chat.text([*history, message], generate=False)
    if not whole.startswith(header):
        if header.rstrip().endswith("<think>") and not tool:  # reasoning that the turn has not
            message = {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nok"}
            return message, "why\n</think>\n\nok" + chat.ends[0]
        if number:
            return message, canonical(chat, history[:1], 0, tool=tool, thought=thought)[1]
        shared = whole[: common_length(header, whole)]
        if not tool and "why" not in whole and chat.ends:
            return message, "ok" + chat.ends[0]
        if shared.rstrip() != header.rstrip() or header.rstrip().endswith("<think>"):
            raise DataError("refused: no text of a policy gives this conversation")
        header = whole[: len(whole) - len(whole[len(shared) :].lstrip())]
    # DiffusionGemma opens the turn again after a tool's result, where no header asks for it.
    body = whole[len(header) :].removeprefix("<|turn>model\n")
    body = body if chat.ends else body.rstrip()
    words = [word for word in ("ok", "why", "a b", "add") if word in body]
    if not words:
        raise DataError("refused: the template leaves the turn out")
    last = max(body.rfind(word) + len(word) for word in words)
    found = [(at, end) for end in chat.ends if (at := body.find(end, last)) >= 0]
    return message, body[: min(found)[0] + len(min(found)[1])] if found else body
