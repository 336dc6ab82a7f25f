"""Rewards for rows of samples: functions and verifiers as in training, or a reward model.

Rows are scored a window at a time, in order. A window that a crash cut short is scored again as a whole, and
only missing rows are added: a reward model's rounding depends on the rest of the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeGuard, get_args

from lockstep.config.batch import ScoreConfig
from lockstep.data.sources import column_names, place
from lockstep.errors import ConfigError, DataError
from lockstep.models.reward import RewardModel
from lockstep.protocols.reward import RewardInput
from lockstep.rollout.batch import Hooks
from lockstep.rollout.reward_models import MODEL
from lockstep.rollout.rewards import RewardSet
from lockstep.rollout.row_values import decoded
from lockstep.rollout.rows import RowFile
from lockstep.rollout.sampler import sample_seed
from lockstep.schema.rollout import FinishReason

_KEY = ("index", "sample")


@dataclass(frozen=True, kw_only=True, slots=True)
class ToScore:
    """One sample, and the row that it is from."""

    row: Mapping[str, Any]
    """The row as it is written again, with a reward."""
    prompt: Any
    """Text or messages."""
    reward_input: RewardInput
    where: str


@dataclass(kw_only=True, slots=True)
class ScoreTotals:
    """Totals of the rows that this call added."""

    rows: int = 0
    failed: int = 0
    """Rows whose reward failed under on_error = "drop": their reward is null."""
    truncated: int = 0
    sum: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, kw_only=True, slots=True)
class Judges:
    """The sources of rewards; at least one of the two."""

    rewards: RewardSet | None
    model: RewardModel | None
    model_weight: float = 1.0

    def close(self) -> None:
        """End the verifiers' process."""
        if self.rewards is not None:
            self.rewards.close()


def samples(rows: Iterable[Mapping[str, Any]], source: str) -> Iterator[ToScore]:
    """Yield the samples of rows of `lockstep generate` or any other: they need `prompt` (text or messages)
    and `completion`. Rows without `index` and `sample` are numbered by their prompts, in order.

    Raises:
        DataError: a column is missing or of the wrong kind, or a sample is there twice.
    """
    numbers: dict[str, int] = {}
    counts: Counter[int] = Counter()
    seen: set[tuple[int, int]] = set()
    for position, row in enumerate(rows):
        where = place(row, source, position)
        prompt, completion = _texts(row, where)
        index, sample = row.get("index"), row.get("sample")
        if index is None:
            index = numbers.setdefault(repr(prompt), len(numbers))
        if sample is None and type(index) is int:
            sample = counts[index]
            counts[index] += 1
        if not _is_number(index) or not _is_number(sample) or (index, sample) in seen:
            raise DataError(
                f"wrong-row: {where}: index = {index!r} and sample = {sample!r} must be whole numbers that "
                "no other row has; correct them, or leave both columns out",
                name="index",
                where=where,
            )
        seen.add((index, sample))
        data = decoded(row["row"], where) if isinstance(row.get("row"), dict) else row
        yield ToScore(
            row={"index": index, "sample": sample, **{k: v for k, v in row.items() if k not in _KEY}},
            prompt=prompt,
            where=where,
            reward_input=RewardInput(
                prompt=str(row.get("prompt_text") or (prompt if isinstance(prompt, str) else "")),
                completion=completion,
                row=data,
                prompt_token_ids=_ids(row, "prompt_token_ids", where),
                completion_token_ids=_ids(row, "token_ids", where),
                finish_reason=_finish_reason(row, where),
                index=index,
                where=where,
                seed=row["seed"] if _is_number(row.get("seed")) else sample_seed(0, 0, index, sample),
            ),
        )


def _is_number(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 2**63


def _ids(row: Mapping[str, Any], name: str, where: str) -> tuple[int, ...]:
    ids = row.get(name)
    if ids is None:
        return ()
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise DataError(
            f"wrong-row: {where}: {name} must be a list of token ids, got {str(ids)[:80]!r}",
            name=name,
            where=where,
        )
    return tuple(ids)


def _finish_reason(row: Mapping[str, Any], where: str) -> Any:
    reason = row.get("finish_reason") or "stop"
    if reason not in get_args(FinishReason):
        known = " or ".join(get_args(FinishReason))
        raise DataError(
            f"wrong-row: {where}: finish_reason must be {known}, got {str(reason)[:80]!r}",
            name="finish_reason",
            where=where,
        )
    return reason


def _texts(row: Mapping[str, Any], where: str) -> tuple[Any, str]:
    for name in ("prompt", "completion"):
        if name not in row:
            raise DataError(
                f"missing-column: {where} has no column {name!r}; columns: {column_names(row)}. Rows of "
                "`lockstep generate` have it; of other files, rename the column",
                name=name,
                where=where,
            )
    prompt, completion = row["prompt"], row["completion"]
    if completion is None and row.get("token_ids") is not None:
        completion = ""  # of a model without a tokenizer
    if not isinstance(completion, str) or not isinstance(prompt, str | list) or not prompt:
        raise DataError(
            f"wrong-row: {where}: prompt must be text or messages and completion text, got "
            f"{str(prompt)[:60]!r} and {str(completion)[:60]!r}",
            name="prompt",
            where=where,
        )
    return prompt, completion


def check_columns(config: ScoreConfig, first: ToScore) -> None:
    """Raise ConfigError if the rows lack a column that a reward needs."""
    for reward in config.rewards:
        if reward.name in ("ids", "length") and "token_ids" not in first.row:
            raise ConfigError(
                f"missing-column: reward {reward.name!r} looks at token ids, and the rows have no column "
                "token_ids; keep it when they are sampled (lockstep generate --columns token_ids)",
                name="token_ids",
            )
    if config.reward_model is not None and first.row["completion"] is None:
        raise ConfigError(
            "no-tokenizer: a reward model reads text, and the rows have none: they are of a model without a "
            "tokenizer; use --reward ids or length"
        )


def score_rows(
    items: Iterable[ToScore], judges: Judges, *, window: int, sink: RowFile, hooks: Hooks
) -> ScoreTotals:
    """Write every row that `sink` lacks, with `reward` and `rewards` added.

    Raises:
        RewardError: a reward failed under on_error = "fail". What was written before stays.
        DataError: a row cannot be scored or written.
    """
    totals = ScoreTotals()
    source = iter(items)
    while chunk := list(islice(source, window)):
        missing = {_key(item) for item in chunk} - sink.done
        if not missing or hooks.cancelled():
            continue
        rewards = judge(chunk, judges, totals)
        rows = []
        for item, (total, by_name) in zip(chunk, rewards, strict=True):
            if _key(item) in missing:
                rows.append({**item.row, "reward": total, "rewards": by_name})
                totals.rows += 1
                totals.failed += total is None
                totals.sum += total or 0.0
        sink.append(rows)
        sink.sync()
        hooks.on_row(len(sink.done), sink.expected)
    return totals


def judge(
    items: Sequence[ToScore], judges: Judges, totals: ScoreTotals
) -> list[tuple[float | None, Mapping[str, float] | None]]:
    """Return (total, by name) for each sample; None where a reward failed under on_error = "drop"."""
    scores: list[tuple[float | None, Mapping[str, float] | None]] = [(0.0, {})] * len(items)
    if judges.rewards is not None:
        scored = judges.rewards.score([item.reward_input for item in items])
        totals.counts.update(judges.rewards.take_counts())
        scores = [(None, None) if s is None else (s.total, s.by_name) for s in scored]
    if judges.model is not None:
        documents = [
            judges.model.document(i.prompt, i.reward_input.completion, i.where, row=i.row) for i in items
        ]
        totals.truncated += sum(document.truncated for document in documents)
        logits = judges.model.score(documents)
        scores = [
            (total, by_name)
            if total is None or by_name is None
            else (total + judges.model_weight * logit, {**by_name, MODEL: logit})
            for (total, by_name), logit in zip(scores, logits, strict=True)
        ]
    return scores


def _key(item: ToScore) -> tuple[int, int]:
    return item.row["index"], item.row["sample"]
