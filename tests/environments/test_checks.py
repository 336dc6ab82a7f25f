"""The checks find what a template does to a whole conversation and not to a part of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from shipped import CHATML, END, USER, of, plain

from lockstep.environments.checks import Checks
from lockstep.environments.delta import ConversationTokens, Ledger

RESULT = {"role": "tool", "content": "42"}


def played(tokens: ConversationTokens, turns: int = 4, text: str = "so", end: int = END) -> Ledger:
    ledger = tokens.start([USER])
    for _ in range(turns):
        ledger.add_policy([*plain(text), end])
        tokens.reply(ledger, [RESULT])
    return ledger


def checked(tokens: ConversationTokens, ledger: Ledger) -> Checks:
    checks = Checks()
    checks.add(tokens.turns, ledger)
    return checks


def test_a_faithful_template_has_no_mismatch() -> None:
    tokens = of()
    checks = checked(tokens, played(tokens))
    assert (dict(checks.mismatches), checks.turns, checks.noncanonical_turns) == ({}, 4, 0)
    assert checks.open_borders == 4  # the line feed before each turn


def test_a_lost_newline_is_found() -> None:
    lossy = CHATML.replace("{{ '<|im_end|>\n' }}", "{{ '<|im_end|>' + ('' if loop.index == 5 else '\n') }}")
    assert lossy != CHATML
    tokens = of(lossy)
    assert checked(tokens, played(tokens)).mismatches == {"text": 1}
    assert checked(tokens, played(tokens, 2)).mismatches == {}


def test_reasoning_stripped_when_a_conversation_is_long_is_found() -> None:
    content = "(m.content.split('</think>')[-1] if messages | length > 6 else m.content)"
    tokens = of(CHATML.replace("m.content", content))
    ledger = played(tokens, text="<think>why</think>so")
    assert not ledger.causes  # not seen turn by turn: no branch
    assert checked(tokens, ledger).mismatches == {"turn": 1}


def test_a_turn_left_out_is_found() -> None:
    tokens = of(CHATML.replace("for m in messages", "for m in messages[-6:]"))
    assert checked(tokens, played(tokens)).mismatches == {"header": 1}


def test_a_template_that_refuses_long_conversations_is_found() -> None:
    refuses = "{% if messages | length > 6 %}{{ raise_exception('too many') }}{% endif %}"
    tokens = of(refuses + CHATML)
    assert checked(tokens, played(tokens)).mismatches == {"refused": 1}


def test_other_ids_are_found() -> None:
    tokens = of()
    ledger = played(tokens)
    part, word = ledger.part, plain("user")
    at = part.ids.index(word[0])
    spelled = [token for letter in "user" for token in plain(letter)]
    part.ids = (*part.ids[:at], *spelled, *part.ids[at + len(word) :])
    assert checked(tokens, ledger).mismatches == {"tokens": 1}


def test_a_reply_whose_ids_are_not_its_text_is_found() -> None:
    tokens = of()
    ledger = played(tokens)
    ledger.part.replies[1] = replace(ledger.part.replies[1], ids=ledger.part.replies[1].ids[1:])
    assert checked(tokens, ledger).mismatches == {"decoded": 1}


@pytest.mark.parametrize(
    ("ids", "noncanonical"),
    [
        ([*plain("so"), END], 0),
        ([*plain("s"), *plain("o"), END], 1),  # the same text in other tokens
        ([*plain(" so"), END], 0),
        ([*plain("so"), 0], 1),  # ended by <|endoftext|>
    ],
)
def test_turns_that_a_template_would_write_otherwise_are_counted(ids: list[int], noncanonical: int) -> None:
    tokens = of()
    ledger = tokens.start([USER])
    ledger.add_policy(ids)
    tokens.reply(ledger, [RESULT])
    ledger.add_policy([*plain("so"), END])
    checks = checked(tokens, ledger)
    assert (checks.noncanonical_turns, dict(checks.mismatches)) == (noncanonical, {})
