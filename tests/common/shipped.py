"""Chat templates that installed packages ship, and a tokenizer with the special tokens of all of them."""

from __future__ import annotations

import functools
import gzip
import importlib
import json
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from chats import smollm2

from lockstep.environments.delta import ConversationTokens
from lockstep.observe.chat_template import ChatTemplate

TABLE = Path(__file__).parents[1] / "environments" / "shipped_templates.json"
"""The packages with version and licence, the special tokens, and per template whether a branch is due."""
VLLM_VERSION = "0.32.0"
VLLM = TABLE.with_name("vllm_templates.json.gz")
"""The templates of vLLM: its wheel has only those below vllm/, its source package also those for tools, in
examples/. The tests of tests/vllm compare the wheel's with these."""

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {
                "x": {"type": "integer", "description": "One."},
                "s": {"type": "string", "description": "Two."},
            },
            "required": ["x"],
        },
    },
}


def table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(TABLE.read_text())
    return found


def template_text(name: str) -> str:
    """Return a template; skips the test where its package has another version than the table's."""
    package, _, stem = name.partition("/")
    if package == "vllm":
        return vllm_templates()[stem]
    wanted = table()["packages"][package]["version"]
    if (version := metadata.version(package)) != wanted:
        pytest.skip(f"the table is of {package} {wanted}, and {version} is installed")
    if package == "trl":
        folder = Path(metadata.distribution("trl").locate_file("trl/chat_templates"))
        return (folder / f"{stem}.jinja").read_text(encoding="utf-8")
    module, _, attribute = stem.rpartition(".")
    return str(getattr(importlib.import_module(f"transformers.models.{module}"), attribute))


@functools.cache
def vllm_templates() -> dict[str, str]:
    """The templates by their path in the source package, without .jinja."""
    found: dict[str, str] = json.loads(gzip.decompress(VLLM.read_bytes()))
    return found


@functools.cache
def tokenizer() -> Any:
    return smollm2(*table()["special_tokens"])


@functools.cache
def conversation(name: str) -> ConversationTokens:
    """The tokens of conversations under a template, with the tool `add` where it has a place for tools."""
    text = template_text(name)
    tools = [ADD] if table()["templates"][name]["tools"] else []
    return ConversationTokens(ChatTemplate(tokenizer(), text), tools=tools)


def names(*, tools: bool | None = None) -> Iterator[str]:
    rows: Mapping[str, Any] = table()["templates"]
    return (name for name, row in rows.items() if tools is None or row["tools"] is tools)


# A template of our own, with SmolLM2's tokenizer.

START, END = 1, 2  # of SmolLM2: <|im_start|>, <|im_end|>
CALLS = "{% for c in m.tool_calls %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
CHATML = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}" + CALLS + "{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER: dict[str, Any] = {"role": "user", "content": "Hi"}


def plain(text: str) -> list[int]:
    """Ids of a text without any special token."""
    ids: list[int] = smollm2()(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return ids


def of(template: str = CHATML, **more: Any) -> ConversationTokens:
    return ConversationTokens(ChatTemplate(smollm2(), template), **more)
