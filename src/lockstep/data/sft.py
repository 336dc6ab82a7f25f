"""SFT sets: conversations, prompt/completion pairs, plain text; tokenised, with a loss mask."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.config.data import DataConfig
from lockstep.data.chat import ChatFormat, Message, clean_messages, fill_template
from lockstep.data.order import batch_rows
from lockstep.data.sources import missing_column, named_columns, rows_of
from lockstep.data.spans import Document, conversation, text_document, whole_conversation
from lockstep.errors import ConfigError, DataError
from lockstep.observe.token_ids import check_known, kept_at_end
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
        merged_borders (of a prompt and its answer, see lockstep.data.spans.conversation)."""
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
    samples = []
    for row in rows_of(config):
        chat = maker.chat.for_row(row, where=row.where)
        content = row_content(row, config, chat, row.where)
        sample = maker.sample(tokenise(content, config, chat, row.where), row.where)
        if sample is not None:
            samples.append(sample)
    counts = maker.counts
    if not samples:
        raise DataError(f"nothing-left: no documents left of data.source = {config.source!r}: {dict(counts)}")
    counts["documents"] = len(samples)
    counts["tokens"] = sum(len(sample) for sample in samples)
    counts["trained_tokens"] = sum(sample.num_trained for sample in samples)
    counts["merged_borders"] = len(maker.chat.merged_borders)
    return SFTSet(samples, shuffle=config.shuffle, report=counts, notes=maker.chat.notes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """A prompt and what answers it."""

    messages: list[Message]
    prompt: int = 0
    """Messages that come before the answer: nothing of them is trained on. 0: every assistant turn is an
    answer."""


Content = tuple[str, str] | Conversation
"""Prompt and completion of plain text, or a conversation."""


class DocumentMaker:
    """Turns documents into TrainSamples according to one DataConfig, and counts those that it left out.

    Args:
        kind: the run's, for messages.
        vocab_size: entries of the model's embedding; None: not compared with the token ids.

    Raises:
        ConfigError: nothing turns the source's rows into documents.
    """

    def __init__(self, config: DataConfig, tokenizer: Any, *, kind: str, vocab_size: int | None) -> None:
        self.config = config
        self.chat = document_format(config, tokenizer, kind=kind)
        self.vocab_size = vocab_size
        self.counts: Counter[str] = Counter(dropped_overlong=0, dropped_untrained=0, truncated=0)

    def sample(self, document: Document, where: str, *, keep_end: bool = False) -> TrainSample | None:
        """Return the document as a TrainSample: mask[t] is about predicting token t + 1. None: dropped, and
        counted.

        Args:
            keep_end: truncate at the beginning, behind the beginning-of-sequence token.

        Raises:
            DataError: see `load_sft`.
        """
        config, ids = self.config, document.ids
        trained = [True] * len(ids) if config.train_on == "all" else document.trained
        if len(ids) > config.max_length:
            if config.overlong_documents == "error":
                raise DataError(
                    f"too-long: {where}: the document has {len(ids)} tokens, data.max_length = "
                    f"{config.max_length}; raise it, or set data.overlong_documents = 'truncate' or 'drop'",
                    where=where,
                    tokens=len(ids),
                )
            self.counts["truncated" if config.overlong_documents == "truncate" else "dropped_overlong"] += 1
            if config.overlong_documents == "drop":
                return None
            ids, trained = self._cut(ids, trained, keep_end=keep_end)
        mask = [*trained[1:], False]
        if not any(mask):
            if config.untrained_documents == "error":
                raise DataError(
                    f"nothing-left: {where}: no token of the document is trained on (no assistant turn, an "
                    f"empty one, or one beyond data.max_length = {config.max_length}); correct the row, or "
                    "set data.untrained_documents = 'drop'",
                    where=where,
                )
            self.counts["dropped_untrained"] += 1
            return None
        if self.vocab_size is not None:
            tokenizer = self.chat.tokenizer
            check_known(ids, self.vocab_size, tokenizer=tokenizer, model="the model", where=where)
        return TrainSample(
            token_ids=torch.tensor(ids, dtype=torch.int64), loss_mask=torch.tensor(mask, dtype=torch.bool)
        )

    def _cut(self, ids: list[int], trained: list[bool], *, keep_end: bool) -> tuple[list[int], list[bool]]:
        limit = self.config.max_length
        if not keep_end:
            return ids[:limit], trained[:limit]
        first, rest = kept_at_end(ids, limit, tokenizer=self.chat.tokenizer, template=self.chat.template)
        return ids[:first] + ids[rest:], trained[:first] + trained[rest:]


def document_format(config: DataConfig, tokenizer: Any, *, kind: str) -> ChatFormat:
    """Return the format that turns documents into ids. Raises ConfigError if there is none; `kind` names the
    run."""
    if config.generated:
        raise ConfigError(
            f"unsupported-combination: data.source = {config.source!r} has prompts only; {kind} needs a "
            "file, a folder or a hub set"
        )
    if tokenizer is None:
        raise ConfigError(
            f"no-tokenizer: {kind} needs a model with a tokenizer; shape: models have none", name="tokenizer"
        )
    if not tokenizer.is_fast:
        raise ConfigError(
            f"no-tokenizer: {kind} needs a fast tokenizer: its character offsets say which tokens to train "
            "on",
            name="fast tokenizer",
        )
    return ChatFormat(config, tokenizer)


def tokenise(content: Content, config: DataConfig, chat: ChatFormat, where: str) -> Document:
    """Tokenise the content of one row, see `load_sft`."""
    if isinstance(content, tuple):
        return text_document(chat, *content, where=where)
    if config.train_on == "all":
        return whole_conversation(chat, content.messages, where=where)
    first = content.prompt
    if config.train_on == "last":
        turns = [i for i, message in enumerate(content.messages) if message["role"] == "assistant"]
        first = max([first, *turns[-1:]])
    return conversation(chat, content.messages, where=where, first=first)


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
