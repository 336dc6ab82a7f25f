"""SFT sets: conversations, prompt/completion pairs, plain text; tokenised, with a loss mask."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.config.data import DataConfig
from lockstep.data.chat import ChatFormat, clean_messages, fill_template
from lockstep.data.documents import Content, Conversation, DocumentMaker, Request
from lockstep.data.rows import PlacedRow
from lockstep.data.sources import batch_rows, missing_column, named_columns, rows_of
from lockstep.errors import DataError
from lockstep.schema.batch import TrainSample


class SFTSet:
    """Tokenised documents; batches are epoch shuffles, a pure function of (step, n, seed)."""

    def __init__(
        self,
        samples: Sequence[TrainSample],
        *,
        shuffle: bool,
        report: Mapping[str, int],
        notes: Sequence[str] = (),
    ) -> None:
        self._samples = tuple(samples)
        self._shuffle = shuffle
        self.report = dict(report)
        """Counts: documents, tokens, trained_tokens, dropped_overlong, dropped_untrained, truncated,
        merged_borders (of a prompt and its answer, see lockstep.data.documents.tokenised)."""
        self.notes = tuple(notes)
        """What to say of the rows at the start, one sentence each."""

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> TrainSample:
        return self._samples[index]

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(map(len, self._samples))

    @property
    def fingerprint(self) -> str:
        """Hash of all documents, by which a resumed run recognises its data."""
        digest = hashlib.blake2b(digest_size=16)
        for sample in self._samples:
            for tensor in (sample.token_ids, sample.loss_mask):
                digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()

    def batch(self, step: int, n: int, seed: int) -> list[TrainSample]:
        """Return the n documents of optimizer step `step` (from 0), sample_id 0 to n - 1; all different.

        Raises:
            DataError: the set has fewer than n documents.
        """
        rows = batch_rows(len(self), step=step, n=n, seed=seed, shuffle=self._shuffle)
        return [dataclasses.replace(self._samples[row], sample_id=i) for i, row in enumerate(rows)]


def load_sft(config: DataConfig, *, tokenizer: Any, vocab_size: int | None = None) -> SFTSet:
    """Load the SFT set of a DataConfig.

    Rows with `messages_column` are conversations. Rows with `prompt_column` and `completion_column` are a
    conversation of two turns where a chat template applies (both may also be lists of messages; the prompt's
    are not trained on), else plain text, one after the other. Rows with `text_column` are plain text, every
    token trained on.

    Args:
        vocab_size: entries of the model's embedding; None: not compared with the token ids.

    Raises:
        DataError: missing or malformed data, a document that is too long under `error`, one without a token
            to train on under `error`, a token id beyond `vocab_size`, or nothing left.
        ConfigError: an impossible setting.
    """
    maker = DocumentMaker(config, tokenizer, kind="SFT", vocab_size=vocab_size)
    requests = (_request(row, maker) for row in rows_of(config))
    samples = [sample for _, sample in maker.samples(requests) if sample is not None]
    counts = maker.counts
    if not samples:
        raise DataError(f"nothing-left: no documents left of data.source = {config.source!r}: {dict(counts)}")
    counts["documents"] = len(samples)
    counts["tokens"] = sum(len(sample) for sample in samples)
    counts["trained_tokens"] = sum(sample.num_trained for sample in samples)
    counts["merged_borders"] = len(maker.chat.merged_borders)
    return SFTSet(samples, shuffle=config.shuffle, report=counts, notes=maker.chat.notes)


def _request(row: PlacedRow, maker: DocumentMaker) -> Request:
    chat = maker.chat.for_row(row, where=row.where)
    content = row_content(row, maker.config, chat, row.where)
    return Request(content=content, chat=chat, where=row.where, marked=maker.config.train_on)


def row_content(row: Mapping[str, Any], config: DataConfig, chat: ChatFormat, where: str) -> Content:
    """Return the content of a row, see `load_sft`. Where settings name columns, a row must have one of them,
    and others count for nothing."""
    forms = ("messages_column", "completion_column", "text_column")
    named = [form for form in forms if form in named_columns(config)]
    for form in named or forms:
        value = row.get(getattr(config, form))
        if value is None:
            continue
        if form == "messages_column":
            return Conversation(messages=chat.with_system(clean_messages(value, where=where)))
        if form == "completion_column":
            if config.prompt_column not in row:
                raise missing_column(config.prompt_column, row, setting="data.prompt_column", source=where)
            return answered(row[config.prompt_column], value, row, config=config, chat=chat, where=where)
        if isinstance(value, str):
            return "", value
    if named:
        setting = f"data.{named[0]}"
        raise missing_column(getattr(config, named[0]), row, setting=setting, source=where)
    pair = f"{config.prompt_column} + {config.completion_column}"
    setting = f"data.messages_column; {pair} or {config.text_column} would do too"
    raise missing_column(config.messages_column, row, setting=setting, source=where)


def answered(
    prompt: Any,
    completion: Any,
    row: Mapping[str, Any],
    *,
    config: DataConfig,
    chat: ChatFormat,
    where: str,
) -> Content:
    """Return the content of a prompt and its answer, texts or lists of messages; `row` fills the prompt's
    template."""
    if isinstance(prompt, str):
        text = fill_template(config.prompt_template, {**row, "prompt": prompt}, where=where)
        if isinstance(completion, str) and chat.template is None:
            return text, completion
        prompt = [{"role": "user", "content": text}]
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    answer = clean_messages(completion, where=where)
    messages = chat.with_system([*clean_messages(prompt, where=where), *answer])
    return Conversation(messages=messages, prompt=len(messages) - len(answer))
