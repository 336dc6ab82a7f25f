"""Preference sets: a prompt, a chosen and a rejected answer; tokenised, with a loss mask on the answers."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lockstep.config.data import DataConfig
from lockstep.data.chat import ChatFormat
from lockstep.data.order import batch_rows
from lockstep.data.sft import document_format, document_sample, row_content, tokenise_row
from lockstep.data.sources import load_rows, missing_column
from lockstep.data.spans import Document
from lockstep.errors import DataError
from lockstep.schema.batch import PreferenceSample, ScoredSample, StateSample, TrainSample

Pair = tuple[TrainSample, TrainSample]


class PreferenceSet:
    """Tokenised pairs; batches are epoch shuffles, a pure function of (step, n, seed)."""

    def __init__(
        self,
        pairs: Sequence[Pair],
        *,
        shuffle: bool,
        report: Mapping[str, int],
        margins: Sequence[float] | None = None,
    ) -> None:
        self._pairs = tuple(pairs)
        self._margins = None if margins is None else tuple(margins)
        self._shuffle = shuffle
        self.report = dict(report)
        """Counts: pairs, tokens, dropped_overlong, dropped_untrained, dropped_equal, truncated."""

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> Pair:
        return self._pairs[index]

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(len(sample) for pair in self._pairs for sample in pair)

    @property
    def fingerprint(self) -> str:
        """Hash of all pairs, by which a resumed run recognises its data."""
        digest = hashlib.blake2b(digest_size=16)
        for pair in self._pairs:
            for sample in pair:
                for tensor in (sample.token_ids, sample.loss_mask):
                    digest.update(tensor.numpy().tobytes())
        if self._margins is not None:
            digest.update(repr(self._margins).encode())
        return digest.hexdigest()

    def batch(self, step: int, n: int, seed: int) -> list[PreferenceSample]:
        """Return the n pairs of optimizer step `step` (from 0) as 2n samples, chosen and rejected in turn.

        Raises:
            DataError: the set has fewer than n pairs.
        """
        rows = batch_rows(len(self), step=step, n=n, seed=seed, shuffle=self._shuffle)
        samples: list[PreferenceSample] = []
        for i, row in enumerate(rows):
            for which, each in enumerate(self._pairs[row]):
                ids, mask, sample_id = each.token_ids, each.loss_mask, 2 * i + which
                samples.append(
                    PreferenceSample(token_ids=ids, loss_mask=mask, sample_id=sample_id)
                    if self._margins is None
                    else ScoredSample(
                        token_ids=ids, loss_mask=mask, sample_id=sample_id, margin=self._margins[row]
                    )
                )
        return samples


def load_preferences(config: DataConfig, *, tokenizer: Any) -> PreferenceSet:
    """Load the preference set of a DataConfig.

    Rows have `chosen_column` and `rejected_column`: texts or lists of messages, after the prompt in
    `prompt_column`; or whole conversations that begin with a user's or system's message. Turns that both
    conversations share cancel out of the loss.

    Raises:
        DataError: missing or malformed data, a document that is too long under `error`, an answer without a
            token to train on under `error`, two equal answers under `error`, or nothing left.
        ConfigError: an impossible setting.
    """
    return _load(config, tokenizer=tokenizer, kind="DPO", pad_id=None, scored=False)


def load_scored_pairs(config: DataConfig, *, tokenizer: Any, pad_id: int | None) -> PreferenceSet:
    """Load the preference set of a reward model: as `load_preferences`, but a document is trained where
    transformers' classifiers read its score, at the last token that is not `pad_id` (None: at the last one).
    Rows may have a margin in `margin_column`.

    Raises:
        DataError, ConfigError: as `load_preferences`; and a margin that is no number >= 0.
    """
    return _load(config, tokenizer=tokenizer, kind="RM", pad_id=pad_id, scored=True)


def _load(
    config: DataConfig, *, tokenizer: Any, kind: str, pad_id: int | None, scored: bool
) -> PreferenceSet:
    chat = document_format(config, tokenizer, kind=kind)
    tokenise = _as_a_reward_reads_it if scored else tokenise_row
    margins: list[float] = []
    counts: Counter[str] = Counter(dropped_overlong=0, dropped_untrained=0, dropped_equal=0, truncated=0)
    pairs: list[Pair] = []
    for index, row in enumerate(load_rows(config), start=config.skip):
        where = f"{config.source}, row {index}"
        both = [
            document_sample(
                tokenise(as_sft(row, column, config, where), config, chat, f"{where}, {column}"),
                config,
                counts,
                f"{where}, {column}",
                keep_end=scored,
            )
            for column in (config.chosen_column, config.rejected_column)
        ]
        chosen, rejected = both
        if chosen is None or rejected is None:
            continue
        if chosen.token_ids.equal(rejected.token_ids):
            if config.equal_answers == "error":
                raise DataError(
                    f"{where}: {config.chosen_column} and {config.rejected_column} are the same "
                    f"{len(chosen)} tokens, so there is nothing to prefer; correct the row, or set "
                    "data.equal_answers = 'drop'",
                    code="wrong-pairs",
                    where=where,
                )
            counts["dropped_equal"] += 1
            continue
        if scored:
            margins.append(_margin(row, config, where))
            chosen, rejected = (_scored(sample, pad_id, where) for sample in (chosen, rejected))
        pairs.append((chosen, rejected))
    if not pairs:
        raise DataError(
            f"no preference pairs left of data.source = {config.source!r}: {dict(counts)}",
            code="nothing-left",
        )
    counts["pairs"] = len(pairs)
    counts["tokens"] = sum(len(sample) for pair in pairs for sample in pair)
    return PreferenceSet(pairs, shuffle=config.shuffle, report=counts, margins=margins if scored else None)


def _as_a_reward_reads_it(
    row: Mapping[str, Any], config: DataConfig, chat: ChatFormat, where: str
) -> Document:
    """The row's text as lockstep.models.reward tokenises it when it scores: no eos is added to it."""
    content = row_content(row, config, chat, where)
    text = (
        "".join(content) if isinstance(content, tuple) else chat.render(content, generate=False, where=where)
    )
    ids = chat.encode(text)
    return Document(ids=ids, trained=[True] * len(ids))


def _scored(sample: TrainSample, pad_id: int | None, where: str) -> TrainSample:
    """The document, trained at the token at which it is scored."""
    read = torch.ones(len(sample), dtype=torch.bool) if pad_id is None else sample.token_ids != pad_id
    if not bool(read.any()):
        raise DataError(
            f"{where}: the document holds nothing but pad tokens (id {pad_id}); leave the row out",
            code="empty",
            where=where,
        )
    mask = torch.zeros(len(sample), dtype=torch.bool)
    mask[int(read.nonzero()[-1])] = True
    return StateSample(token_ids=sample.token_ids, loss_mask=mask)


def _margin(row: Mapping[str, Any], config: DataConfig, where: str) -> float:
    value = row.get(config.margin_column)
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise DataError(
            f"{where}, {config.margin_column}: {value!r} is not a margin; write a number >= 0, or rename the "
            "column (data.margin_column)",
            code="wrong-row",
            name=config.margin_column,
            where=where,
        )
    return float(value)


def as_sft(row: Mapping[str, Any], column: str, config: DataConfig, where: str) -> dict[str, Any]:
    """Return the row of an SFT set that holds the prompt and this answer of a pair. Raises DataError when
    there is none."""
    answer = row.get(column)
    if answer is None:
        setting = "data.chosen_column" if column == config.chosen_column else "data.rejected_column"
        raise missing_column(column, row, setting=setting, source=where)
    rest = {key: value for key, value in row.items() if key not in _read_by_sft(config)}
    if _is_conversation(answer):
        return {**rest, config.messages_column: answer}
    if config.prompt_column not in row:
        raise missing_column(config.prompt_column, row, setting="data.prompt_column", source=where)
    return {**rest, config.prompt_column: row[config.prompt_column], config.completion_column: answer}


def _is_conversation(answer: Any) -> bool:
    """Whether the answer is a whole conversation, with the prompt in it."""
    return bool(
        isinstance(answer, list)
        and answer
        and isinstance(answer[0], Mapping)
        and answer[0].get("role") in ("user", "system")
    )


def _read_by_sft(config: DataConfig) -> set[str]:
    return {config.prompt_column, config.messages_column, config.completion_column, config.text_column}
