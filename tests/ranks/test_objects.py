"""Objects between ranks come back as they were, or are refused by name."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import JsonValue
from raising import raises

from lockstep.protocols.engine import EngineStats
from lockstep.ranks import process_group
from lockstep.ranks.process_group import RankError, decode_object, encode_object
from lockstep.rollout.shares import SentShare, Share
from lockstep.schema.rollout import Completion, Prompt, Rollout, Trajectory

COMPLETION = Completion(
    prompt_token_ids=(1, 2),
    token_ids=(3, 2**31),
    logprobs=(-0.1, -math.inf),
    finish_reason="stop",
    stop_reason="\n\x1b",
    text="é\u2028\U0001f600",
    seed=2**63 - 1,
    engine="hf",
    policy_version=3,
)
STATS = EngineStats(
    policy_version=1,
    requests=2,
    prompt_tokens=3,
    cached_tokens=4,
    completion_tokens=5,
    generate_seconds=0.1 + 0.2,
    kv_cache_bytes=2**40,
)
LATER = replace(COMPLETION, prompt_token_ids=(1, 2, 3, 2**31, 6), token_ids=(), logprobs=())
TURNS = (
    Trajectory.of(COMPLETION),
    Trajectory.of(COMPLETION).continued((6,), LATER),
    Trajectory.of(COMPLETION).branched(replace(COMPLETION, prompt_token_ids=(1, 5))),
)
PROMPTS = [Prompt(index=7, token_ids=(9,), text=""), Prompt(index=8, token_ids=(1, 2), text="")]
SHARE = Share(
    numbers=(0, 1),
    rollouts=(None, tuple(Rollout(trajectory=t, reward=1 / 3, rewards={"math": 1.0}) for t in TURNS)),
    counts={"rewards/dropped": 2.0},
)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (SentShare.of(SHARE, PROMPTS), SentShare),
        ((STATS, STATS), tuple[EngineStats, EngineStats]),
        ([COMPLETION], list[Completion]),
        ({"a": 5e-324, "b": -0.0, "c": 1.7976931348623157e308}, dict[str, float]),
        ({3: (True, None)}, dict[int, tuple[bool, None]]),
        ((Path("a/b"), None), tuple[Path | None, str | None]),
        ({"a": [1, 2.5, None, True, {"b": "c"}], "big": 10**40}, JsonValue),
        (None, None),
    ],
)
def test_an_object_comes_back_as_it_was(value: Any, kind: Any) -> None:
    received = decode_object(encode_object(value, kind), kind, sender=1)
    assert received == value and repr(received) == repr(value)


def test_a_share_gets_its_tokens_and_prompts_back() -> None:
    sent = SentShare.of(SHARE, PROMPTS)
    assert [len(rollout.trajectory.token_ids) for rollout in sent.share.rollouts[1]] == [0, 0, 0]
    assert (
        len(sent.token_ids) == 4 * sum(len(t.added_token_ids) for t in TURNS) + 4 * 2
    )  # the branch's context
    assert repr(sent.received(PROMPTS)) == repr(SHARE)


def test_what_is_not_a_number_comes_back() -> None:
    received = decode_object(
        encode_object([math.nan, math.inf, -math.inf], list[float]), list[float], sender=1
    )
    assert math.isnan(received[0]) and received[1:] == [math.inf, -math.inf]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ((1, 2), JsonValue),
        ({1: 2}, JsonValue),
        ({"a": "0.5"}, dict[str, float]),
        (True, int),
        (1.0, int),
        ("\ud800", str),
        ((STATS,), tuple[EngineStats, EngineStats]),
        (COMPLETION, EngineStats),
        (
            Completion(**{name: getattr(COMPLETION, name) for name in COMPLETION.__slots__} | {"seed": "1"}),
            Completion,
        ),
    ],
)
def test_another_type_is_not_sent(value: Any, kind: Any) -> None:
    with raises(RankError, "wrong-type"):
        encode_object(value, kind)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", JsonValue),
        (b"{", JsonValue),
        (b'"\xff"', str),
        (b"[" * 100_000, JsonValue),
        (b'"1"', int),
        (b"1.0", int),
        (b"[1]", tuple[int, int]),
        (b'{"policy_version": 1}', EngineStats),
        (b'{"finish_reason": "later"}', Completion),
        (b"null", dict[str, float]),
    ],
)
def test_what_another_rank_sends_is_checked(data: bytes, kind: Any) -> None:
    with raises(RankError, "bad-reply", rank=2) as error:
        decode_object(data, kind, sender=2)
    assert len(str(error.value)) < 300 and "\n" not in str(error.value)


def test_sizes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "MAX_BYTES", 10)
    with raises(RankError, "too-large", bytes=12):
        encode_object("0123456789", str)
    for length in (11, -1):
        with raises(RankError, "too-large", rank=3):
            process_group._checked(length, 3)
