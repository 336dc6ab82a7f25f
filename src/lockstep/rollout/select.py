"""Rejection sampling and best-of-n: select scored samples as training documents. Also selects preference
pairs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.data.rows import place
from lockstep.errors import ConfigError, DataError
from lockstep.observe.chat_template import row_columns

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Which samples to keep: first unusable samples and those below `min_reward` are dropped, then the best
    of each prompt are kept."""

    top_k: int | None = None
    """Number of best samples per prompt; 1 is best-of-n. None: all remaining samples."""
    min_reward: float | None = None
    """Drop samples below it (rejection sampling)."""
    finished: bool = False
    """Drop samples that max_tokens or the context length cut off."""
    unique: bool = False
    """Keep only the first of equal completions of a prompt."""

    def __post_init__(self) -> None:
        if self.top_k is None and self.min_reward is None:
            raise ConfigError(
                "missing-setting: nothing to select by; pass --best-of-n, --top-k K or --min-reward X"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"out-of-range: --top-k {self.top_k} must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The selected samples, by prompt index."""

    rows: tuple[dict[str, Any], ...]
    """Checked samples, best first within a prompt; or pairs, see `lockstep.rollout.select.pair_row`."""
    prompts: int
    """Number of prompts in the scored file."""
    chosen_prompts: int
    """Number of prompts with a selected sample."""
    left_out: Mapping[str, int]
    """Number of dropped samples by their first reason: failed (no reward), empty, cut_off; below_min_reward,
    duplicate, not_best; for pairs no_number, duplicate, unpaired."""


def select(rows: Iterable[Row], choice: Choice, *, source: str) -> Selection:
    """Select among scored rows. Equal rewards are ordered by sample number.

    Raises:
        DataError: a row has no `reward`, `index`, `sample` or text.

    Example:
        >>> rows = [dict(index=0, sample=i, prompt="1+1?", completion=str(i), reward=float(i == 2))
        ...         for i in range(4)]
        >>> [row["completion"] for row in select(rows, Choice(top_k=1), source="rows").rows]
        ['2']
    """

    def check(row: Row, where: str) -> dict[str, Any]:
        return checked_sample(
            row, where, index=row.get("index"), reward=row.get("reward"), use="SFT trains on"
        )

    groups, left_out = by_prompt(rows, source, check=check, unusable=lambda row, _: _unusable(row, choice))
    kept: list[dict[str, Any]] = []
    chosen = 0
    for index in sorted(groups):
        best = sorted(groups[index], key=lambda row: (-row["reward"], row["sample"]))
        if choice.unique:
            first_of: dict[str, dict[str, Any]] = {}
            for row in best:
                first_of.setdefault(row["completion"], row)
            left_out["duplicate"] += len(best) - len(first_of)
            best = list(first_of.values())
        left_out["not_best"] += len(best) - len(best[: choice.top_k])
        kept += best[: choice.top_k]
        chosen += bool(best)
    return Selection(rows=tuple(kept), prompts=len(groups), chosen_prompts=chosen, left_out=counted(left_out))


def _unusable(row: Row, choice: Choice) -> str | None:
    reason = no_answer(row, finished=choice.finished)
    if reason is None and choice.min_reward is not None and row["reward"] < choice.min_reward:
        return "below_min_reward"
    return reason


def by_prompt(
    rows: Iterable[Row],
    source: str,
    *,
    check: Callable[[Row, str], dict[str, Any]],
    unusable: Callable[[Row, Sequence[Row]], str | None],
) -> tuple[dict[int, list[dict[str, Any]]], Counter[str]]:
    """Group samples by the index of their prompt.

    Args:
        check: maps a row and its location to its `checked_sample`.
        unusable: maps a sample and the earlier samples of its prompt to the reason to drop it, or None.

    Returns:
        The samples of each prompt, and the numbers of those left out, by reason.
    """
    left_out: Counter[str] = Counter()
    groups: dict[int, list[dict[str, Any]]] = {}
    for position, row in enumerate(rows):
        sample = check(row, place(row, source, position))
        group = groups.setdefault(sample["index"], [])
        if (reason := unusable(sample, group)) is not None:
            left_out[reason] += 1
        else:
            group.append(sample)
    return groups, left_out


def counted(left_out: Counter[str]) -> dict[str, int]:
    """Return the reasons that occurred, sorted by name."""
    return {reason: count for reason, count in sorted(left_out.items()) if count}


def no_answer(sample: Row, *, finished: bool) -> str | None:
    """Return why a sample is unusable, whatever its reward. None if it is usable."""
    if sample["reward"] is None:
        return "failed"
    if not sample["completion"].strip():
        return "empty"
    return "cut_off" if finished and sample["finish_reason"] == "length" else None


def checked_sample(row: Row, where: str, *, index: Any, reward: Any, use: str) -> dict[str, Any]:
    """Return index, sample, reward, prompt, completion and finish_reason of a scored row, and its arguments
    for the chat template (`tools`, ...).

    Args:
        index, reward: the values to use for this row.
        use: what trains on it, for the message.

    Raises:
        DataError: one of them is missing, or is not what it must be.
    """
    if "reward" not in row:
        raise DataError(f"missing-column: {where} has no column 'reward'; run `lockstep score` first")
    if type(index) is not int or type(row.get("sample")) is not int:
        raise DataError(f"wrong-row: {where}: index and sample must be integers; run `lockstep score` first")
    if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
        raise DataError(f"wrong-row: {where}: reward = {reward!r} is not a number")
    if not isinstance(row.get("completion"), str) or not row.get("prompt"):
        raise DataError(
            f"missing-column: {where} has no text, as in samples from a model without a tokenizer, but "
            f"{use} prompt and completion"
        )
    kept = {name: row.get(name) for name in ("sample", "prompt", "completion", "finish_reason")}
    return {"index": index, "reward": reward, **kept, **row_columns(row)}


def sft_row(row: Row) -> dict[str, Any]:
    """Return the row for `lockstep train sft`: `prompt` and `completion`, lists of messages where a chat
    template was applied to messages, else texts; and its origin. (As one conversation, answers within the
    prompt would be trained on.)"""
    origin = {name: row[name] for name in ("index", "sample", "reward")} | row_columns(row)
    if isinstance(row["prompt"], str):
        return {"prompt": row["prompt"], "completion": row["completion"], **origin}
    answer = {"role": "assistant", "content": row["completion"]}
    return {"prompt": row["prompt"], "completion": [answer], **origin}


# Preference pairs from scored samples: a better and a worse answer to one prompt.


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
    """Drop samples that max_tokens or the context length cut off."""

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
        unusable=lambda sample, group: _unusable_for_pairs(sample, group, choice),
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


def _unusable_for_pairs(sample: Row, group: Sequence[Row], choice: PairChoice) -> str | None:
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
                f"missing-column: {where} has no reward {choice.reward!r}; known: {known}. Correct --by"
            )
        reward = rewards[choice.reward]
    index = row.get("index", row.get("prompt_index"))
    return checked_sample(row, where, index=index, reward=reward, use="pairs are made of")
