"""Calls are read in the form in which a template writes them, and what is no call is said to the policy."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chats import smollm2
from hypothesis import given, settings
from hypothesis import strategies as st
from shipped import ADD, conversation, names, table

from lockstep.environments.calls import Call, CallError, CallParser, call_parser, learned_form
from lockstep.observe.chat_template import ChatTemplate
from lockstep.observe.template_renderer import render_chat

ONE_PER_FORM = [
    *(
        "trl/qwen3",
        "trl/llama3_1",
        "trl/gptoss",
        "trl/glm4moe",
        "trl/qwen3_5_think",
        "trl/lfm2_v2",
        "trl/gemma4",
    ),
    "trl/muse_glimmer",
]
TWO_TOOLS = [ADD, {"type": "function", "function": {"name": "now", "description": "Now.", "parameters": {}}}]


def learned(calls: str) -> CallParser:
    """The parser for a template that writes the calls of a turn so, between <|im_start|> and <|im_end|>."""
    text = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}"
        + calls
        + "{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return call_parser(ChatTemplate(smollm2(), text), TWO_TOOLS)


HERMES = "{% for c in m.tool_calls %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
MISTRAL = (
    "[TOOL_CALLS][{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{{ ', ' if not loop.last }}{% endfor %}]"
)
DEEPSEEK = (
    "<calls>{% for c in m.tool_calls %}<call>function<sep>{{ c.function.name }}\n```json\n"
    "{{ c.function.arguments | tojson }}\n```</call>{% endfor %}</calls>"
)
KIMI = (
    "<calls>{% for c in m.tool_calls %}<call>functions.{{ c.function.name }}:{{ loop.index0 }}<args>"
    "{{ c.function.arguments | tojson }}</call>{% endfor %}</calls>"
)
LLAMA = (
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}"
)
ARGUMENTS = (
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}"
)
PYTHON = (
    "<|python|>[{% for c in m.tool_calls %}{{ c.function.name }}(" + ARGUMENTS + "{% endfor %})"
    "{{ ', ' if not loop.last }}{% endfor %}]<|/python|>"
)


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (HERMES, 'Hm.\n<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>', "Hm.\n",
         [("add", {"x": 1})]),
        (HERMES, '<tool_call>{"arguments":{"x":1},"name":"add"}</tool_call>\n<tool_call>{"name":"now"}',
         "", [("add", {"x": 1}), ("now", {})]),
        (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"x\\": 1}"}</tool_call>', "",
         [("add", {"x": 1})]),
        (HERMES, "x < 2 and {\"name\": 1}", 'x < 2 and {"name": 1}', []),
        (MISTRAL, '[TOOL_CALLS][{"name": "add", "arguments": {"x": 1}}, {"name": "now", "arguments": {}}]',
         "", [("add", {"x": 1}), ("now", {})]),
        (DEEPSEEK, '<calls><call>function<sep>add\n```json\n{"x": 1}\n```</call></calls>', "<calls>",
         [("add", {"x": 1})]),
        (KIMI, '<calls><call>functions.add:0<args>{"x": 1}</call><call>functions.now:1<args>{}</call>',
         "<calls>", [("add", {"x": 1}), ("now", {})]),
        (LLAMA, ' {"name": "add", "parameters": {"x": 1}}', " ", [("add", {"x": 1})]),
        (LLAMA, '{"x": 1}', '{"x": 1}', []),
        (PYTHON, "<|python|>[add(x=-1, s='a b'), now()]<|/python|>", "", [("add", {"x": -1, "s": "a b"}),
                                                                        ("now", {})]),
        (PYTHON, "<|python|>[add(x=[true, null])]<|/python|>", "", [("add", {"x": [True, None]})]),
    ],
)  # fmt: skip
def test_calls_are_read(form: str, text: str, content: str, calls: list[Any]) -> None:
    parsed = learned(form).parse(text, turn=7)
    assert not isinstance(parsed.calls, CallError), parsed
    assert (parsed.content, [(call.name, call.arguments) for call in parsed.calls]) == (content, calls)
    assert [call.id for call in parsed.calls] == ["000700000", "000700001"][: len(calls)]


@pytest.mark.parametrize(
    ("form", "text", "words"),
    [
        (HERMES, '<tool_call>\n{"name": "add", "arguments": {"x": 1}\n</tool_call>', "',' delimiter"),
        (HERMES, "<tool_call>add(1)</tool_call>", "at character 0 of the JSON, near 'add(1)</tool_call>'"),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>', 'a call must be {"name"'),
        (HERMES, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "must be an object, got [1]"),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"x": NaN}}</tool_call>', "NaN is not JSON"),
        (HERMES, '<tool_call>{"name": "add"} and so on</tool_call>', "expected '</tool_call>'"),
        (HERMES, "<tool_call>" + "[" * 100_000, "cannot be read"),
        (DEEPSEEK, "<call>function<sep>add\n```json\nx=1\n```</call>", "a name and a JSON object"),
        (LLAMA, '{"name": "add", "parameters": {"x": }}', "Expecting value at character 36"),
        (PYTHON, "<|python|>[add(1)]<|/python|>", "a list of Python calls, got '[add(1)]'"),
        (PYTHON, "<|python|>[add(x=open('f'))]<|/python|>", "a list of Python calls"),
        (PYTHON, "<|python|>[add(x={[]: 1})]<|/python|>", "a list of Python calls"),
    ],
)  # fmt: skip
def test_what_does_not_parse_is_said_to_the_policy(form: str, text: str, words: str) -> None:
    parsed = learned(form).parse(text)
    assert isinstance(parsed.calls, CallError)
    assert words in parsed.calls.message and len(parsed.calls.message) < 500
    assert parsed.content == text


def written(name: str, calls: list[Call]) -> str:
    """What a template writes for a turn with calls, up to the end of the conversation."""
    turns = conversation(name).turns
    user = {"role": "user", "content": "Hi"}
    turn = {"role": "assistant", "content": "", "tool_calls": [call.message() for call in calls]}
    (header,), (whole,) = (
        turns.render([(messages, generate)], where="a test")
        for messages, generate in (([user], True), ([user, turn], False))
    )
    return whole.text.removeprefix(header.text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
PLAIN = st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters="<>|'\"\\{}"), max_size=12)


@pytest.mark.parametrize("name", ONE_PER_FORM)
def test_what_a_template_writes_is_read_back(name: str) -> None:
    """Any JSON where arguments are JSON; where each has tags of its own, numbers and plain texts."""
    exact = name in ("trl/qwen3", "trl/llama3_1", "trl/gptoss")

    @settings(max_examples=15, deadline=None, database=None)
    @given(st.integers(), JSON if exact else PLAIN)
    def read_back(x: int, s: Any) -> None:
        calls = [Call(name="add", arguments={"x": x, "s": s}, id="000000000")]
        ends = conversation(name).turns.end_texts
        text = written(name, calls)
        for end in ends:
            text = text.rstrip().removesuffix(end)
        parsed = conversation(name).turns.parser.parse(text)
        assert not isinstance(parsed.calls, CallError), (text, parsed.calls)
        assert [(call.name, dict(call.arguments)) for call in parsed.calls] == [("add", {"x": x, "s": s})]

    read_back()


@pytest.mark.parametrize("name", ONE_PER_FORM)
def test_nothing_a_policy_writes_stops_the_parser(name: str) -> None:
    parser = conversation(name).turns.parser
    form: Any = parser.form
    pieces = st.sampled_from(
        [form.opening or "{", "add", "{", "}", '"', "(", ")", "[", "]", ":", "=", ",", "\n"]
    )

    @settings(max_examples=40, deadline=None, database=None)
    @given(st.lists(pieces | st.text(max_size=3), max_size=12).map("".join))
    def parse(text: str) -> None:
        parsed = parser.parse(text)
        assert isinstance(parsed.calls, CallError | tuple)

    parse()


def test_a_form_is_found_for_every_template_that_has_calls() -> None:
    assert set(ONE_PER_FORM) <= set(names(tools=True))
    assert table()["templates"]["trl/llama3"]["tools"] is False
    plain = ChatTemplate(smollm2(), "{% for m in messages %}{{ m.content }}{% endfor %}")
    assert learned_form(plain) is None and call_parser(plain).parse("<tool_call>{}").calls == ()


def test_a_tokenizer_with_a_response_template_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers documents it: the form of the chat template is not looked at."""
    chat = ChatTemplate(smollm2(), "{{ messages[0].content }}")
    response = {
        "start_anchor": "<|im_start|>assistant\n",
        "defaults": {"role": "assistant"},
        "fields": {
            "tool_calls": {
                "open": "<<", "close": ">>", "repeats": True, "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close_pattern": "$", "content": "text"},
        },
    }  # fmt: skip
    monkeypatch.setattr(smollm2(), "response_template", response, raising=False)
    parser = call_parser(chat, TWO_TOOLS)
    parsed = parser.parse("<<" + json.dumps({"name": "add", "arguments": {"x": 1}}) + ">>")
    assert not isinstance(parsed.calls, CallError)
    assert [(call.name, call.arguments) for call in parsed.calls] == [("add", {"x": 1})]
    assert isinstance(parser.parse("<<{>>").calls, CallError)


def test_the_rendering_of_a_result_names_its_call() -> None:
    call = Call(name="add", arguments={"x": 1}, id="000000000")
    result = call.result("2")
    assert result == {"role": "tool", "name": "add", "tool_call_id": "000000000", "content": "2"}
    job = ChatTemplate(smollm2(), "{{ messages | tojson }}").job([result], where="a test")
    assert "000000000" in render_chat(smollm2(), job).text
