"""The ledger under chat templates that trl and transformers ship: branches where they are due, nowhere else.

Whether one is due is found without the ledger: two renderings of whole conversations are compared, as others
keep them. `python tests/environments/test_shipped_templates.py` writes the table of it again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from chats import smollm2
from raising import raises
from shipped import ADD, TABLE, conversation, names, table, template_text, tokenizer

from lockstep.environments.checks import Checks
from lockstep.environments.delta import Branch, ConversationTokens
from lockstep.errors import ConfigError, DataError
from lockstep.observe.chat_template import ChatTemplate
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
FAMILIES = [
    *(
        "cohere",
        "deepseek_r1_distill",
        "diffusion_gemma",
        "gemma3",
        "gemma4_v5",
        "glm4moe",
        "gptoss",
        "idefics3",
    ),
    *(
        "lfm2_v2",
        "lfm2_2_5_v2",
        "llama3_1",
        "llava_next",
        "muse_glimmer",
        "nemotron_3_nano",
        "phi3",
        "qwen2_5",
    ),
    *("qwen3", "qwen3_5_think", "qwen3_8", "qwen3_vl", "smolvlm"),
]
"""One template of each; the others are exhaustive."""


@dataclass(frozen=True)
class Chat:
    """A template, and whether conversations under it have the tool `add`."""

    template: ChatTemplate
    tools: bool

    def text(self, messages: Sequence[Message], *, generate: bool) -> str:
        options = {"tools": [ADD]} if self.tools else {}
        job = self.template.job(messages, generate=generate, options=options, where="a test")
        return render_chat(self.template.tokenizer, job).text

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
    """A turn as a message, and the text that a policy writes if it writes what the template would."""
    message: Message = {"role": "assistant", "content": "" if tool else "ok", **(THOUGHT if thought else {})}
    message |= {"tool_calls": calls(number)} if tool else {}
    header = chat.text(history, generate=True)
    whole = chat.text([*history, message], generate=False)
    if not whole.startswith(header):  # the header opens reasoning that the turn has not
        if tool:
            raise DataError("refused: no text of a policy gives this conversation")
        message = {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nok"}
        return message, "why\n</think>\n\nok" + chat.ends[0]
    # DiffusionGemma opens the turn again after a tool's result, where no header asks for it.
    body = whole[len(header) :].removeprefix("<|turn>model\n")
    last = max(body.rfind(word) + len(word) for word in ("ok", "why", "a b", "add") if word in body)
    found = [(at, end) for end in chat.ends if (at := body.find(end, last)) >= 0]
    return message, body[: min(found)[0] + len(min(found)[1])] if found else body


def due(chat: Chat, kind: str) -> str:
    """For each round "+" if the template extends what is there, "B" if a branch is due; "-": there is no such
    conversation."""
    tool, thought = KINDS[kind]
    if tool and not chat.tools:
        return "-"
    history: list[Message] = [{"role": "user", "content": "Hi"}]
    found = ""
    try:
        before = chat.text(history, generate=True)
        for number in range(ROUNDS):
            message, body = canonical(chat, history, number, tool=tool, thought=thought)
            history += [message, *answers(number, tool=tool)]
            after = chat.text(history, generate=True)
            found += "+" if after.startswith(before + body) else "B"
            before = after
    except DataError:
        return "-"
    return found


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name.split("/")[1] in FAMILIES else pytest.mark.exhaustive)
        for name in names()
    ],
)
def test_branches_come_where_they_are_due(name: str) -> None:
    tokens, row = conversation(name), table()["templates"][name]
    chat = Chat(tokens.turns.template, row["tools"])
    for kind, (tool, thought) in KINDS.items():
        assert due(chat, kind) == row[kind], kind
        if row[kind] == "-":
            continue
        history: list[Message] = [{"role": "user", "content": "Hi"}]
        ledger, branches = tokens.start(history), ""
        before = ledger.part.text
        for number in range(ROUNDS):
            message, body = canonical(chat, history, number, tool=tool, thought=thought)
            turn = ledger.add_policy(tokenizer()(body, add_special_tokens=False)["input_ids"])
            made = [("add", {"x": 3, "s": "a b"})] if tool else []
            assert [(call.name, call.arguments) for call in turn.made] == made
            replies = answers(number, tool=tool)
            reply = tokens.reply(ledger, replies)
            history += [message, *replies]
            before = reply.text if isinstance(reply, Branch) else before + body + reply.text
            assert before == chat.text(history, generate=True)
            branches += "B" if isinstance(reply, Branch) else "+"
        assert branches == row[kind], kind
        checks = Checks()
        checks.add(tokens.turns, ledger)
        assert not checks.mismatches, kind
        assert sum(checks.branches.values()) == branches.count("B")


def test_the_table_has_the_families_that_were_asked_for() -> None:
    rows = table()["templates"]
    assert len(rows) >= 40 and len(FAMILIES) >= 20
    families = [rows[f"trl/{name}"] for name in FAMILIES]
    loops = [row for row in families if "+++" in (row["tool"], row["tool, thought"])]
    assert len(loops) >= 12
    for package in table()["packages"].values():
        assert package.keys() == {"version", "licence"}


@pytest.mark.parametrize("name", ["trl/gemma3", "trl/phi3", "trl/lfm2"])
def test_a_template_without_a_place_for_tools_is_refused(name: str) -> None:
    with raises(ConfigError, "unsupported-chat-template: data.chat_template"):
        ConversationTokens(ChatTemplate(tokenizer(), template_text(name)), tools=[ADD])


# The table.

_MARKS = re.compile(
    r"<\|[^\s<>]{0,40}?\|?>|<\uff5c[^\s<>]{1,40}?\uff5c>|<[a-z_]+\|>|\[/?INST\]|\[gMASK\]|"
    r"</?(?:start_of_turn|end_of_turn|s|think|tool_call|tool_response|sop|arg_key|arg_value|end_of_utterance)>"
)


def _made() -> dict[str, Any]:
    folder = Path(str(metadata.distribution("trl").locate_file("trl/chat_templates")))
    found = [f"trl/{path.stem}" for path in sorted(folder.glob("*.jinja")) if "_training" not in path.stem]
    found.append("transformers/llama4.processing_llama4.chat_template")
    packages = {
        name: {"version": metadata.version(name), "licence": "Apache-2.0"} for name in ("transformers", "trl")
    }
    TABLE.write_text(json.dumps({"packages": packages, "special_tokens": [], "templates": {}}))
    texts = {name: template_text(name) for name in found}
    special = sorted({mark for text in texts.values() for mark in _MARKS.findall(text)})
    rows: dict[str, Mapping[str, Any]] = {}
    for name, text in texts.items():
        template = ChatTemplate(smollm2(*special), text)
        try:
            ConversationTokens(template, tools=[ADD])
            chat = Chat(template, True)
        except ConfigError:
            chat = Chat(template, False)
        rows[name] = {"tools": chat.tools, **{kind: due(chat, kind) for kind in KINDS}}
    return {"packages": packages, "special_tokens": special, "templates": rows}


if __name__ == "__main__":
    made = _made()
    lines = [f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in made.pop("templates").items()]
    head = json.dumps(made, ensure_ascii=False, indent=2)[:-2]
    TABLE.write_text(head + ',\n  "templates": {\n' + ",\n".join(lines) + "\n  }\n}\n")
