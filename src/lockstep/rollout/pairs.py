"""Preference pairs from scored samples: a better and a worse answer to one prompt."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.errors import ConfigError, DataError
from lockstep.observe.chat_template import row_columns
from lockstep.rollout.select import Row, Selection, by_prompt, checked_sample, counted, no_answer

_NUMBER_AT_END = re.compile(
    r"""(?<![\w.,])[-+]?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?(/\d+)?%?  # 42, -1,234.5, 3/4, 12%
    (</\w+>|[\s.*$)}\]"'])*$""",
    re.VERBOSE | re.ASCII,
)
_END = 200
"""Characters at the end of an answer that are looked at for its number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairChoice:
    """Which samples become pairs."""

    per_prompt: int = 1
    """Most pairs of a prompt; no sample is in two."""
    min_gap: float = 0.0
    """The chosen sample's reward exceeds the rejected one's by at least this, and by more than 0."""
    min_reward: float | None = None
    """Least reward of a chosen sample."""
    reward: str | None = None
    """The name of one reward to go by, among a row's `rewards`; None: the total."""
    ends_in_number: bool = False
    """Leave out answers that do not end in a number (`ends_in_number`)."""
    finished: bool = False
    """Leave out samples that max_tokens or the context cut off."""

    def __post_init__(self) -> None:
        if self.per_prompt < 1:
            raise ConfigError(f"out-of-range: --pairs {self.per_prompt} must be at least 1")
        if self.min_gap < 0:
            raise ConfigError(f"out-of-range: --min-gap {self.min_gap:g} must be at least 0")


def select_pairs(rows: Iterable[Row], choice: PairChoice, *, source: str) -> Selection:
    """Pair scored rows, of `lockstep score` or of a run's rollouts.

    Of all pairs of a prompt with enough difference in reward, those with the least difference in length (in
    characters) are taken: a length tells as little as it can which answer is the better one. Equal ones are
    ordered by sample. Answers to a prompt with the same text count once.

    Raises:
        DataError: a row has no reward, prompt or text.

    Example:
        >>> rows = [dict(index=0, sample=i, prompt="1+1?", completion=str(i), reward=float(i == 2))
        ...         for i in range(4)]
        >>> [(row["chosen"], row["rejected"]) for row in select_pairs(rows, PairChoice(), source="rows").rows]
        [('2', '0')]
    """
    groups, left_out = by_prompt(
        rows,
        source,
        check=lambda row, where: _checked(row, choice, where),
        unusable=lambda sample, group: _unusable(sample, group, choice),
    )
    pairs: list[dict[str, Any]] = []
    chosen_prompts = 0
    for index in sorted(groups):
        found = list(_pairs(groups[index], choice))
        left_out["unpaired"] += len(groups[index]) - 2 * len(found)
        chosen_prompts += bool(found)
        pairs += [pair_row(chosen, rejected) for chosen, rejected in found]
    return Selection(
        rows=tuple(pairs), prompts=len(groups), chosen_prompts=chosen_prompts, left_out=counted(left_out)
    )


def ends_in_number(text: str) -> bool:
    """Whether the text ends in one well-formed number; punctuation, markdown, quotes, brackets and closing
    tags may follow it.

    Example:
        >>> [ends_in_number(text) for text in ("It is 1,234.", "<answer>-7</answer>", "1.2.3", "4 apples")]
        [True, True, False, False]
    """
    return _NUMBER_AT_END.search(text[-_END:]) is not None


def pair_row(chosen: Row, rejected: Row) -> dict[str, Any]:
    """Return the row of a pair: `prompt`, `chosen` and `rejected`, texts or lists of messages as the prompt
    is; and its origin."""
    answers = {"chosen": chosen["completion"], "rejected": rejected["completion"]}
    if not isinstance(chosen["prompt"], str):
        answers = {key: [{"role": "assistant", "content": text}] for key, text in answers.items()}
    origin = {"index": chosen["index"], "samples": [chosen["sample"], rejected["sample"]]}
    rewards = {"reward_chosen": chosen["reward"], "reward_rejected": rejected["reward"]}
    return {"prompt": chosen["prompt"], **answers, **origin, **rewards, **row_columns(chosen)}


def _pairs(samples: Sequence[Row], choice: PairChoice) -> Iterator[tuple[Row, Row]]:
    candidates = [
        (abs(len(better["completion"]) - len(worse["completion"])), one, other)
        for one, better in enumerate(samples)
        for other, worse in enumerate(samples)
        if better["reward"] > worse["reward"]
        and better["reward"] - worse["reward"] >= choice.min_gap
        and (choice.min_reward is None or better["reward"] >= choice.min_reward)
    ]
    used: set[int] = set()
    for _, one, other in sorted(candidates):
        if len(used) == 2 * choice.per_prompt:
            return
        if one not in used and other not in used:
            used |= {one, other}
            yield samples[one], samples[other]


def _unusable(sample: Row, group: Sequence[Row], choice: PairChoice) -> str | None:
    if (reason := no_answer(sample, finished=choice.finished)) is not None:
        return reason
    text = sample["completion"]
    if choice.ends_in_number and not ends_in_number(text):
        return "no_number"
    return "duplicate" if any(text == other["completion"] for other in group) else None


def _checked(row: Row, choice: PairChoice, where: str) -> dict[str, Any]:
    """The sample of a row; a run's rollouts have a prompt_index in place of an index."""
    reward, rewards = row.get("reward"), row.get("rewards")
    if choice.reward is not None and reward is not None:
        if not isinstance(rewards, Mapping) or choice.reward not in rewards:
            known = ", ".join(map(str, rewards)) if isinstance(rewards, Mapping) else "none"
            raise DataError(
                f"missing-column: {where} has no reward {choice.reward!r}; it has: {known}. Correct --by",
                name=choice.reward,
                where=where,
            )
        reward = rewards[choice.reward]
    index = row.get("index", row.get("prompt_index"))
    return checked_sample(row, where, index=index, reward=reward, use="pairs are of")
