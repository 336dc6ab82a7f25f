"""Ids of replies against ids put together by hand, and the checks for any message under any template."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises
from shipped import ADD, CHATML, END, START, USER, conversation, names, of, plain, table, tokenizer

from lockstep.environments.calls import Call, CallError
from lockstep.environments.checks import Checks
from lockstep.environments.delta import Branch, Reply
from lockstep.errors import EngineError
from lockstep.observe.special_text import special_text

Message = dict[str, Any]


def message(role: str, content: str) -> list[int]:
    return [START, *plain(f"{role}\n{content}"), END, *plain("\n")]


HEADER = [START, *plain("assistant\n")]


def test_a_ledger_grows_by_the_ids_of_each_reply() -> None:
    tokens = of()
    ledger = tokens.start([USER])
    assert list(ledger.ids) == [*message("user", "Hi"), *HEADER]
    sampled = [*plain("so"), *plain(" so"), END]
    ledger.add_policy(sampled)
    reply = tokens.reply(ledger, [{"role": "tool", "content": "42<|im_end|>"}])
    # The policy wrote the end of its turn; the line feed behind it is the template's.
    expected = [*plain("\n"), *message("tool", "42<|im_end|>"), *HEADER]
    assert isinstance(reply, Reply) and list(reply.ids) == expected
    assert list(ledger.ids) == [*message("user", "Hi"), *HEADER, *sampled, *expected]


def test_a_turn_that_was_cut_is_ended_by_the_reply() -> None:
    tokens = of()
    ledger = tokens.start([USER])
    turn = ledger.add_policy(plain("so"))
    assert turn.stop == ""
    reply = tokens.reply(ledger, [USER])
    assert list(reply.ids) == [END, *plain("\n"), *message("user", "Hi"), *HEADER]


def test_a_turn_that_another_token_ended_is_ended_by_the_reply() -> None:
    tokens = of()
    ledger = tokens.start([USER])
    ledger.add_policy([*plain("so"), 0])  # <|endoftext|>
    assert list(tokens.reply(ledger, [USER]).ids)[:1] == [END]


def test_calls_and_errors_have_replies() -> None:
    tokens = of(tools=[ADD])
    ledger = tokens.start([USER])
    turn = ledger.add_policy([*plain('<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'), END])
    assert turn.made == (Call(name="add", arguments={"x": 1}, id="000000000"),)
    assert isinstance(tokens.reply(ledger, [turn.made[0].result("2")]), Reply)
    turn = ledger.add_policy([*plain("<tool_call>{"), END])
    assert isinstance(turn.calls, CallError) and turn.made == ()
    reply = tokens.reply(ledger, [tokens.turns.error(turn.calls)])
    assert isinstance(reply, Reply) and "cannot be read" in reply.text


def test_reasoning_that_is_left_out_later_makes_a_branch() -> None:
    strips = CHATML.replace("m.content", "(m.content.split('</think>')[-1] if not loop.last else m.content)")
    tokens = of(strips)
    ledger = tokens.start([USER])
    ledger.add_policy([*plain("<think>why</think>ok"), END])
    branch = tokens.reply(ledger, [USER])
    assert isinstance(branch, Branch) and branch.cause == "thinking"
    assert list(branch.ids) == [
        *message("user", "Hi"), *message("assistant", "ok"), *message("user", "Hi"), *HEADER
    ]  # fmt: skip
    assert ledger.ids == branch.ids and len(ledger.parts) == 2
    ledger.add_policy([*plain("ok"), END])  # without reasoning nothing is left out
    assert isinstance(tokens.reply(ledger, [USER]), Reply)


def test_turns_and_replies_alternate() -> None:
    tokens = of()
    ledger = tokens.start([USER], where="row 3")
    with raises(EngineError, "wrong-state: row 3: a reply without a turn"):
        tokens.reply(ledger, [USER])
    ledger.add_policy([END])
    with raises(EngineError, "wrong-state: row 3: two turns"):
        ledger.add_policy([END])


# Any message under any template.

SYNTAX = [
    "{{ 7 * 7 }}",
    "{% raw %}",
    "</tool_response>",
    "<tool_call>",
    "</think>",
    "\n",
    "  ",
    "\t",
    "\u2028",
]


def texts() -> st.SearchStrategy[str]:
    marks = st.sampled_from([*SYNTAX, *table()["special_tokens"]])
    # SmolLM2's tokenizer lacks the bytes of control characters: they become <|endoftext|>, its unknown token.
    wide = st.text(st.characters(exclude_categories=["C"]), max_size=6)
    return st.lists(marks | wide, max_size=5).map("".join)


def specials(ids: Any) -> list[int]:
    return [i for i in ids if i in special_text(tokenizer()).ids]


@pytest.mark.parametrize("examples", [3, pytest.param(40, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", names())
def test_no_text_of_a_tool_or_user_is_a_special_token(name: str, examples: int) -> None:
    """The special tokens of prompt and replies are those of a conversation with plain words; and the checks
    find nothing."""

    @settings(max_examples=examples, deadline=None, database=None)
    @given(st.data())
    def any_conversation(data: st.DataObject) -> None:
        one_conversation(name, data)

    any_conversation()


def one_conversation(name: str, data: st.DataObject) -> None:
    tokens, tools = conversation(name), table()["templates"][name]["tools"]
    turn = [*plain("zq"), *tokenizer().convert_tokens_to_ids(list(tokens.turns.end_texts[:1]))]
    ledgers = []
    contents = [data.draw(texts()) for _ in range(3)]
    # Equal contents stay equal: Mistral's template looks for the last user message by comparing messages.
    for given_texts in (contents, ["abc"[contents.index(content)] for content in contents]):
        ledger = tokens.start([{"role": "user", "content": given_texts[0]}])
        for content in given_texts[1:]:
            ledger.add_policy(turn)
            role = "tool" if tools and not tokens.turns.needs_calls else "user"
            called = {"name": "add", "tool_call_id": "abcdefghi"} if role == "tool" else {}
            tokens.reply(ledger, [{"role": role, "content": content, **called}])
        ledgers.append(ledger)
    got, expected = ledgers
    assert specials(got.ids) == specials(expected.ids)
    checks = Checks()
    checks.add(tokens.turns, got)
    assert not checks.mismatches


@pytest.mark.parametrize(
    "result", ["", " ", "\n\n", "<|im_end|>", "{{ x }}", "</tool_response>", "\U0001f600"]
)
def test_a_result_stands_in_the_reply_as_it_is(result: str) -> None:
    tokens = of()
    ledger = tokens.start([USER])
    ledger.add_policy([*plain("so"), END])
    reply = tokens.reply(ledger, [{"role": "tool", "content": result}])
    assert list(reply.ids) == [*plain("\n"), *message("tool", result), *HEADER]
