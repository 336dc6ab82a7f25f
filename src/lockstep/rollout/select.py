"""Rejection sampling and best-of-n: select the scored samples that become training documents. And what
lockstep.rollout.pairs shares with it: checked samples, by prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.data.sources import place
from lockstep.errors import ConfigError, DataError
from lockstep.observe.chat_template import row_columns

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Which samples are kept: first `min_reward` and unusable ones are left out, then the best of each prompt
    are kept."""

    top_k: int | None = None
    """Samples of each prompt, the best ones; 1 is best-of-n. None: all that are left."""
    min_reward: float | None = None
    """Samples below it are left out (rejection sampling)."""
    finished: bool = False
    """Leave out samples that max_tokens or the context cut off."""
    unique: bool = False
    """Of samples of a prompt with the same completion, only the first."""

    def __post_init__(self) -> None:
        if self.top_k is None and self.min_reward is None:
            raise ConfigError(
                "missing-setting: nothing to select by: give --best-of-n, --top-k K or --min-reward X"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"out-of-range: --top-k {self.top_k} must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """What is chosen, prompts in order of their index."""

    rows: tuple[dict[str, Any], ...]
    """Checked samples, best first within a prompt; or pairs, see `lockstep.rollout.pairs.pair_row`."""
    prompts: int
    """Prompts of the scored file."""
    chosen_prompts: int
    """Prompts of which something is chosen."""
    left_out: Mapping[str, int]
    """Samples by the first reason: failed (no reward), empty, cut_off; below_min_reward, duplicate, not_best;
    of pairs no_number, duplicate, unpaired."""


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
        check: of a row and where it stands, to its `checked_sample`.
        unusable: of a sample and those of its prompt before it, to the reason to leave it out, or None.

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
    """The reasons that occurred, by name."""
    return {reason: count for reason, count in sorted(left_out.items()) if count}


def no_answer(sample: Row, *, finished: bool) -> str | None:
    """Why nothing can be made of a sample, whatever its reward; None: something can."""
    if sample["reward"] is None:
        return "failed"
    if not sample["completion"].strip():
        return "empty"
    return "cut_off" if finished and sample["finish_reason"] == "length" else None


def checked_sample(row: Row, where: str, *, index: Any, reward: Any, use: str) -> dict[str, Any]:
    """Return index, sample, reward, prompt, completion and finish_reason of a scored row, and what it has for
    its chat template (`tools`, ...).

    Args:
        index, reward: those of the row that count.
        use: what trains on it, for the message.

    Raises:
        DataError: one of them is missing, or is not what it must be.
    """
    if "reward" not in row:
        raise DataError(
            f"missing-column: {where} has no column 'reward'; run `lockstep score` first",
            name="reward",
            where=where,
        )
    if type(index) is not int or type(row.get("sample")) is not int:
        raise DataError(
            f"wrong-row: {where}: index and sample must be whole numbers; run `lockstep score` first",
            name="index",
            where=where,
        )
    if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
        raise DataError(
            f"wrong-row: {where}: reward = {reward!r} is not a number", name="reward", where=where
        )
    if not isinstance(row.get("completion"), str) or not row.get("prompt"):
        raise DataError(
            f"missing-column: {where} has no text: {use} prompt and completion, and samples of a model "
            "without a tokenizer have none",
            name="prompt",
            where=where,
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
