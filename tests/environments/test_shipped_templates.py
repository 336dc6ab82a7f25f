"""The ledger under chat templates that trl, transformers and vLLM ship: branches where they are due only.

Whether one is due is found without the ledger: two renderings of whole conversations are compared, as others
keep them. `python tests/environments/test_shipped_templates.py` writes the table of it again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from chats import smollm2
from raising import raises
from shipped import (
    ADD,
    TABLE,
    VLLM_VERSION,
    conversation,
    names,
    table,
    template_text,
    tokenizer,
    vllm_templates,
)
from shipped_chats import KINDS, ROUNDS, Chat, Message, answers, canonical

from lockstep.environments.checks import Checks
from lockstep.environments.delta import Branch, ConversationTokens
from lockstep.errors import ConfigError, DataError
from lockstep.observe.chat_template import ChatTemplate

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
FAMILIES_OF_VLLM = [
    *("template_chatglm", "tool_chat_template_granite", "tool_chat_template_hermes"),
    *("tool_chat_template_hunyuan_a13b", "tool_chat_template_internlm2_tool"),
    *("tool_chat_template_llama4_json", "tool_chat_template_mistral"),
]
"""One template of each; the others are exhaustive."""
QUICK = [*(f"trl/{name}" for name in FAMILIES), *(f"vllm/examples/{name}" for name in FAMILIES_OF_VLLM)]


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
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.exhaustive) for name in names()],
)
def test_branches_come_where_they_are_due(name: str) -> None:
    tokens, row = conversation(name), table()["templates"][name]
    chat = Chat(tokens.turns.template, row["tools"], now=tokens.turns.now)
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
    assert len(rows) >= 80 and len(FAMILIES) >= 20
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
    r"</?(?:start_of_turn|end_of_turn|s|think|tool_calls?|tool_response|sop|arg_key|arg_value|end_of_utterance)>|"
    r"<(?:start|end)_function_call>|<escape>|\[/?(?:TOOL_CALLS|TOOL_RESULTS|AVAILABLE_TOOLS|SYSTEM_PROMPT|IMG)\]"
)


def _made() -> dict[str, Any]:
    folder = Path(str(metadata.distribution("trl").locate_file("trl/chat_templates")))
    found = [f"trl/{path.stem}" for path in sorted(folder.glob("*.jinja")) if "_training" not in path.stem]
    found.append("transformers/llama4.processing_llama4.chat_template")
    found += [f"vllm/{name}" for name in vllm_templates()]
    packages = {
        name: {"version": metadata.version(name), "licence": "Apache-2.0"} for name in ("transformers", "trl")
    }
    packages["vllm"] = {"version": VLLM_VERSION, "licence": "Apache-2.0"}
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
