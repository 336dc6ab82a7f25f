"""SFT sets: conversations, prompt/completion pairs, plain text; tokenised, with a loss mask."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lockstep.config.data import DataConfig
from lockstep.data.chat import ChatFormat, clean_messages, fill_template
from lockstep.data.documents import (
    Content,
    Conversation,
    DocumentMaker,
    DocumentSet,
    Request,
    hashed,
)
from lockstep.data.lazy import Outcome, attempted
from lockstep.data.rows import PlacedRow
from lockstep.data.sources import Source, missing_column
from lockstep.schema.batch import TrainSample


class SFTSet(DocumentSet[TrainSample]):
    """Documents."""

    def __getitem__(self, index: int) -> TrainSample:
        return self.items[index]

    def batch(self, step: int, n: int, seed: int) -> list[TrainSample]:
        """Return the n documents of optimizer step `step` (from 0), sample_id 0 to n - 1; all different.

        Raises:
            DataError: the set has fewer than n documents, or one of them is at fault.
        """
        samples = self.items.batch(step, n, seed)
        return [dataclasses.replace(sample, sample_id=i) for i, sample in enumerate(samples)]

    def _hashed(self, item: TrainSample) -> Iterator[bytes]:
        return hashed(item)


def load_sft(
    config: DataConfig, *, tokenizer: Any, vocab_size: int | None = None, positions: int | None = None
) -> SFTSet:
    """Open the SFT set of a DataConfig. Its first 1,000 rows are made at once.

    Rows with `messages_column` are conversations. Rows with `prompt_column` and `completion_column` are a
    conversation of two turns where a chat template applies (both may also be lists of messages; the prompt's
    are not trained on), else plain text, one after the other. Rows with `text_column` are plain text, every
    token trained on.

    Args:
        vocab_size: entries of the model's embedding; None: not compared with the token ids.
        positions: of the model; None: not compared with the length of a document.

    Raises:
        DataError: missing or malformed data, a document that is too long under `error`, one without a token
            to train on under `error`, a token id beyond `vocab_size`, or nothing left; of rows beyond the
            first 1,000 when they come near, by `SFTSet.batch`.
        ConfigError: an impossible setting.
    """
    maker = DocumentMaker(config, tokenizer, kind="SFT", vocab_size=vocab_size, positions=positions)
    source = Source(config)
    source.check_columns()

    def make(numbers: Sequence[int]) -> list[Outcome[TrainSample]]:
        return maker.outcomes([attempted(_request, row, maker) for row in source.read(numbers)])

    items = source.items(make, selective=maker.selective)
    return SFTSet(items, maker=maker, source=source)


def _request(row: PlacedRow, maker: DocumentMaker) -> Request:
    chat = maker.chat.for_row(row, where=row.where)
    content = row_content(row, maker.config, chat, row.where)
    return Request(content=content, chat=chat, where=row.where, marked=maker.config.train_on)


def row_content(row: Mapping[str, Any], config: DataConfig, chat: ChatFormat, where: str) -> Content:
    """Return the content of a row, see `load_sft`. Where settings name columns, a row must have one of them,
    and others count for nothing."""
    forms = ("messages_column", "completion_column", "text_column")
    named = [form for form in forms if form in chat.named_columns]
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
