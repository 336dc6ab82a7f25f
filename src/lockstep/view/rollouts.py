"""Rollouts as a page shows them, and queries for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lockstep.errors import ConfigError

Pieces = Callable[[Sequence[int]], list[str] | None]
"""Returns the text of each token; None if the run has no tokenizer that can be read."""
Order = Literal["step", "reward", "gap", "length"]
Only = Literal["largest gap", "highest reward", "truncated"]
LIMIT = 100
"""Most rollouts of a page."""


def no_pieces(ids: Sequence[int]) -> list[str] | None:
    """The Pieces of a run without a tokenizer."""
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Consecutive tokens of one author."""

    author: str
    """prompt, policy or tool."""
    text: str | None
    """None without a tokenizer."""
    token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """One token that the policy wrote."""

    id: int
    text: str | None
    """None without a tokenizer. Empty if the token ends in the middle of a character: the token that
    completes the character has it."""
    logprob: float | None
    """Nats, by the engine, at sampling."""
    gap: float | None
    """The trainer's logprob minus the engine's, in nats; None without log.token_details."""
    entropy: float | None
    """Nats; None without log.token_details."""
    advantage: float | None
    """None without log.token_details."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One row of rollouts/."""

    step: int
    evaluation: str | None
    """Name of the evaluation, such as "before"; None for a training step."""
    prompt_index: int
    sample: int
    spans: tuple[Span, ...]
    reward: float | None
    rewards: Mapping[str, float]
    """By name, before weights."""
    advantage: float | None
    """Mean over the policy's tokens; None without log.token_details."""
    gap: float | None
    """The largest abs(gap) of a token; None without log.token_details."""
    finish_reason: str
    length: int
    """Number of tokens after the prompt."""
    seed: int | None
    version: int | None
    """Of the policy that wrote it."""
    logprobs: tuple[float, ...] = ()
    """One per token of the policy, as are the next three; empty if the row has none."""
    gaps: tuple[float, ...] = ()
    entropies: tuple[float, ...] = ()
    advantages: tuple[float, ...] = ()
    _pieces: Pieces = field(repr=False, compare=False, default=no_pieces)

    @property
    def id(self) -> str:
        """STEP/PROMPT_INDEX/SAMPLE, as in ledger.jsonl."""
        return f"{self.step}/{self.prompt_index}/{self.sample}"

    def tokens(self, first: int = 0, count: int | None = None) -> list[Token]:
        """Return the policy's tokens from `first` on, at most `count`: a long rollout has many."""
        ids = [one for span in self.spans if span.author == "policy" for one in span.token_ids]
        stop = len(ids) if count is None else min(len(ids), first + count)
        pieces: Sequence[str | None] = self._pieces(ids[:stop]) or [None] * stop
        columns = (self.logprobs, self.gaps, self.entropies, self.advantages)
        rows = zip(
            ids[first:stop],
            pieces[first:],
            *(_filled(column[first:stop], stop - first) for column in columns),
            strict=True,
        )
        return [
            Token(id=id, text=text, logprob=logprob, gap=gap, entropy=entropy, advantage=advantage)
            for id, text, logprob, gap, entropy, advantage in rows
        ]


def _filled(values: tuple[float, ...], count: int) -> list[float | None]:
    return [*values, *[None] * (count - len(values))]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutQuery:
    """Which rollouts of a run, and in which order. Ranges include both ends; None leaves an end open.

    Raises:
        ConfigError: the offset is below 0, or the limit is not in 1 to LIMIT.
    """

    first_step: int | None = None
    last_step: int | None = None
    text: str = ""
    """Part of the prompt or the completion; upper and lower case are the same."""
    ids: tuple[int, ...] = ()
    """Consecutive token ids of the prompt or the completion."""
    min_reward: float | None = None
    max_reward: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    finish_reason: str | None = None
    prompt_index: int | None = None
    order: Order = "step"
    descending: bool = False
    """Rollouts of a step, or of equal rank, keep the order of the file."""
    only: Only | None = None
    """A view: "largest gap" and "highest reward" set the order and leave out rollouts without the value;
    "truncated" selects those that reached the maximum length."""
    evaluation: str | None = None
    """Rollouts of this evaluation instead of those of training steps."""
    offset: int = 0
    limit: int = 50

    def __post_init__(self) -> None:
        if self.offset < 0 or not 1 <= self.limit <= LIMIT:
            raise ConfigError(
                f"out-of-range: a page has an offset of at least 0 and 1 to {LIMIT} rollouts, not "
                f"offset {self.offset} and limit {self.limit}"
            )

    @property
    def ranked(self) -> tuple[Order, bool]:
        """The order, and whether it is descending."""
        views: dict[Only | None, Order] = {"largest gap": "gap", "highest reward": "reward"}
        return (views[self.only], True) if self.only in views else (self.order, self.descending)

    @property
    def whole_steps(self) -> bool:
        """Whether every rollout of the steps is in the answer, in the order of the files."""
        filters = (self.min_reward, self.max_reward, self.min_length, self.max_length)
        selects = (*filters, self.finish_reason, self.prompt_index, self.only)
        return self.order == "step" and not self.text and not self.ids and all(x is None for x in selects)

    def takes_step(self, step: int, evaluation: str | None) -> bool:
        """Return whether rollouts of a step, or of an evaluation, can be in the answer."""
        return evaluation == self.evaluation and _within(step, self.first_step, self.last_step)

    def takes(self, one: Rollout) -> bool:
        """Return whether a rollout is in the answer."""
        order, _ = self.ranked
        return (
            self.takes_step(one.step, one.evaluation)
            and _within(one.reward, self.min_reward, self.max_reward)
            and _within(one.length, self.min_length, self.max_length)
            and self.finish_reason in (None, one.finish_reason)
            and self.prompt_index in (None, one.prompt_index)
            and (self.only != "truncated" or one.finish_reason == "length")
            and (self.only in (None, "truncated") or _is_number(getattr(one, order)))
            and self._has_text(one)
            and self._has_ids(one)
        )

    def _has_text(self, one: Rollout) -> bool:
        wanted = self.text.lower()
        return not wanted or any(wanted in (span.text or "").lower() for span in one.spans)

    def _has_ids(self, one: Rollout) -> bool:
        wanted, count = self.ids, len(self.ids)
        if not count:
            return True
        answer = tuple(id for span in one.spans[1:] for id in span.token_ids)
        return any(
            ids[at : at + count] == wanted
            for ids in (one.spans[0].token_ids, answer)
            for at in range(len(ids) - count + 1)
        )


def _is_number(value: float | None) -> bool:
    return value is not None and not math.isnan(value)


def _within(value: float | None, low: float | None, high: float | None) -> bool:
    if value is None:
        return low is None and high is None
    return (low is None or value >= low) and (high is None or value <= high)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutPage:
    """Rollouts that a query found."""

    rollouts: tuple[Rollout, ...]
    total: int | None
    """Number of rollouts that match; None if not all files were looked at, since the index is not built."""
    query: RolloutQuery
    indexed: float
    """Share of the run's files that the index holds, 0 to 1."""
    scanned: tuple[int, ...]
    """Steps whose files were read for the answer; empty if the index gave it."""
    problems: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether all rollouts that the query asks for were looked at."""
        return self.total is not None


def rollout(row: Mapping[str, Any], *, pieces: Pieces = no_pieces, evaluation: str | None = None) -> Rollout:
    """Return the rollout of a row.

    Raises:
        ValueError: the row is not one that a run writes; the text names the field.
    """
    ids, prompt_ids = _integers(row, "token_ids"), _integers(row, "prompt_token_ids")
    logprobs, trainer = _numbers(row, "rollout_logprobs"), _numbers(row, "policy_logprobs")
    if trainer and len(trainer) != len(logprobs):
        raise ValueError(f"policy_logprobs has {len(trainer)} numbers, rollout_logprobs {len(logprobs)}")
    gaps = tuple(round(policy - engine, 6) for policy, engine in zip(trainer, logprobs, strict=False))
    advantages = _numbers(row, "advantages")
    rewards = row.get("rewards") or {}
    if not isinstance(rewards, dict):
        raise ValueError("rewards is not an object")
    prompt = Span(author="prompt", text=_text(row, "prompt"), token_ids=prompt_ids)
    return Rollout(
        step=_integer(row, "step"),
        evaluation=evaluation,
        prompt_index=_integer(row, "prompt_index"),
        sample=_integer(row, "sample"),
        spans=(prompt, *_answer(row, ids, pieces)),
        reward=_number(row.get("reward"), "reward"),
        rewards={str(name): value for name, v in rewards.items() if (value := _number(v, name)) is not None},
        advantage=sum(advantages) / len(advantages) if advantages else None,
        gap=max(map(abs, gaps)) if gaps else None,
        finish_reason=str(row.get("finish_reason")),
        length=len(ids),
        seed=row["seed"] if isinstance(row.get("seed"), int) else None,
        version=row["policy_version"] if isinstance(row.get("policy_version"), int) else None,
        logprobs=logprobs,
        gaps=gaps,
        entropies=_numbers(row, "entropies"),
        advantages=advantages,
        _pieces=pieces,
    )


def _answer(row: Mapping[str, Any], ids: tuple[int, ...], pieces: Pieces) -> list[Span]:
    """The spans after the prompt. A row of several turns has the text of the last only."""
    text, turns = _text(row, "completion"), row.get("spans")
    if turns is None:
        return [Span(author="policy", text=text, token_ids=ids)]
    spans, at = [], 0
    for author, count in turns if isinstance(turns, list) else ():
        if not isinstance(count, int) or count < 0:  # it could repeat the tokens without end
            raise ValueError(f"spans has {count!r:.40} tokens")
        if author == "prompt":  # another part begins; the row does not repeat the ids of its context
            spans.append(Span(author=author, text=f"[another context of {count} tokens]", token_ids=()))
            continue
        part, at = ids[at : at + count], at + count
        spelled = pieces(part)
        spans.append(
            Span(author=str(author), text=None if spelled is None else "".join(spelled), token_ids=part)
        )
    if at != len(ids) or not spans:
        raise ValueError(f"spans covers {at} of {len(ids)} tokens")
    last = spans[-1]
    if last.author == "policy" and text is not None:
        spans[-1] = Span(author="policy", text=text, token_ids=last.token_ids)
    return spans


def _integer(row: Mapping[str, Any], name: str) -> int:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} is {value!r:.40}, not an integer of 64 bits")
    return value


def _number(value: Any, name: str) -> float | None:
    """A number; NaN and infinities are text in our JSON."""
    if value is None or value in ("NaN", "Infinity", "-Infinity"):
        return None if value is None else float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {value!r:.40}, not a number")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f"{name} is {value!r:.40}, which no float holds") from error


def _integers(row: Mapping[str, Any], name: str) -> tuple[int, ...]:
    values = row.get(name) or ()
    if not isinstance(values, list | tuple) or not set(map(type, values)) <= {int}:
        raise ValueError(f"{name} is not a list of integers")
    if values and not 0 <= min(values) <= max(values) < 2**32:
        raise ValueError(f"{name} has {min(values)!s:.40} to {max(values)!s:.40}, which are no token ids")
    return tuple(values)


def _numbers(row: Mapping[str, Any], name: str) -> tuple[float, ...]:
    values = row.get(name) or ()
    if not isinstance(values, list | tuple):
        raise ValueError(f"{name} is not a list")
    if set(map(type, values)) <= {float}:
        return tuple(values)
    return tuple(float("nan") if (number := _number(value, name)) is None else number for value in values)


def _text(row: Mapping[str, Any], name: str) -> str | None:
    value = row.get(name)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name} is {type(value).__name__}, not text")
    return value
