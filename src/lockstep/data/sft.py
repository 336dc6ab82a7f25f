"""SFT sets: conversations, prompt/completion pairs, plain text; tokenised, with a loss mask."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from lockstep.config.data import DataConfig
from lockstep.data.chat import ChatFormat, Message, check_text, clean_messages, fill_template
from lockstep.data.sources import batch_rows, missing_column, named_columns, rows_of
from lockstep.errors import ConfigError, DataError
from lockstep.observe.chat_template import PROBE, check_known, kept_at_end
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
        merged_borders (of a prompt and its answer, see lockstep.data.sft.conversation)."""
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
                    f"{config.max_length}; raise it, or set data.overlong_documents = 'truncate' or 'drop'"
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
                    "set data.untrained_documents = 'drop'"
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
        raise ConfigError(f"no-tokenizer: {kind} needs a model with a tokenizer; shape: models have none")
    if not tokenizer.is_fast:
        raise ConfigError(
            f"no-tokenizer: {kind} needs a fast tokenizer: its character offsets say which tokens to train on"
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


# The tokens of a conversation that the assistant wrote.


_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
_ANCHORS = ("\n", ".", "a", ",")


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A tokenised document."""

    ids: list[int]
    trained: list[bool]
    """Per token: whether the policy is to learn to write it. The loss mask is this, one slot earlier."""


def conversation(chat: ChatFormat, messages: list[Message], *, where: str, first: int = 0) -> Document:
    """Tokenise a rendered conversation, with the assistant's tokens marked from message `first` on, but for
    turns of `weight` 0.

    A template with {% generation %} marks the assistant's text itself. Otherwise the text is located by
    rendering the conversation turn by turn: what turn i adds to the header that opens it, up to and including
    the token that ends it (`ChatFormat.end_ids`). White space between that token and the next turn is not
    marked. The texts before, in and after a turn are encoded apart: the policy, which is given the ids
    before, could not write a token across the border. A conversation that does not end in an end token gets
    the tokenizer's eos.

    Raises:
        DataError: the template refuses the messages, or renders earlier turns so differently later on that
            their text cannot be located.
    """
    if chat.template is not None and _GENERATION.search(chat.template):
        document = _by_template(chat, messages, where, first)
    else:
        document = _by_rendering(chat, messages, where, first)
    return document if messages[-1]["role"] != "assistant" else _ended(chat, document)


def whole_conversation(chat: ChatFormat, messages: list[Message], *, where: str) -> Document:
    """Tokenise a rendered conversation, every token marked; ends as `conversation` does."""
    ids = chat.encode(chat.render(messages, generate=False, where=where))
    return _ended(chat, Document(ids=ids, trained=[True] * len(ids)))


def text_document(chat: ChatFormat, prompt: str, completion: str, *, where: str) -> Document:
    """Tokenise plain text, prompt and completion apart; the ids of the completion and the eos after it are
    marked."""
    spans = [(len(prompt), len(prompt) + len(completion))]
    return _ended(chat, _encode_spans(chat, prompt + completion, spans, where=where))


def _by_template(chat: ChatFormat, messages: list[Message], where: str, first: int) -> Document:
    rendered = chat.rendered(messages, generate=False, where=where)
    # By number: where a template rewrites earlier turns, their text is elsewhere without those that follow.
    before = chat.rendered(messages[:first], generate=False, where=where).spans if first else ()
    turns, spans = [i for i in _turns(messages) if i >= first], list(rendered.spans)[len(before) :]
    if len(spans) == len(turns):
        spans = [span for span, number in zip(spans, turns, strict=True) if _is_trained(messages[number])]
    elif not all(_is_trained(messages[number]) for number in turns):
        raise DataError(
            f"unsupported-chat-template: {where}: a turn has weight 0, and the template's {{% generation "
            f"%}} marks {len(spans)} texts for {len(turns)} turns of the assistant, so that its text is not "
            "known; leave the row out"
        )
    return _encode_spans(chat, rendered.text, spans, where=where)


def _by_rendering(chat: ChatFormat, messages: list[Message], where: str, first: int) -> Document:
    text = chat.render(messages, generate=False, where=where)
    turns = [i for i in _turns(messages) if i >= first and _is_trained(messages[i])]
    spans = [_turn_span(chat, messages, number, text=text, where=where) for number in turns]
    document = _encode_spans(chat, text, spans, where=where)
    return Document(ids=document.ids, trained=_end_at_mark(chat, document.ids, document.trained))


def _turns(messages: list[Message]) -> list[int]:
    return [number for number, message in enumerate(messages) if message["role"] == "assistant"]


def _is_trained(message: Message) -> bool:
    """As OpenAI's fine-tuning reads `weight`."""
    return message.get("weight") != 0


def _turn_span(
    chat: ChatFormat, messages: list[Message], number: int, *, text: str, where: str
) -> tuple[int, int]:
    """Characters [start, end) of `text` that assistant turn `number` added."""
    if number == 0:
        raise DataError(
            f"wrong-row: {where}: the conversation begins with the assistant; begin with a user turn"
        )
    before = chat.render(messages[:number], generate=False, where=where)
    header = chat.render(messages[:number], generate=True, where=where)
    # Phi-3's template writes an eos where no answer is asked for, so that `before` need not begin the text.
    opened = _common_length(before, header)
    start = _common_length(header, text)
    if start >= opened:
        through = chat.render(messages[: number + 1], generate=False, where=where)
        if text.startswith(through) and len(through) >= start:
            return start, len(through)
    # Templates such as Qwen3's render a turn otherwise once others follow (thinking is taken out).
    found = _by_probe(chat, messages, number, text=text, where=where)
    if found is not None:
        first, end = found
        if start < opened or start > first:
            tail = header[opened:]
            start = text.rfind(tail, 0, first + len(tail)) if tail else -1
            start = first if start < 0 else min(first, start + len(tail))
        return start, end
    raise DataError(
        f"unsupported-chat-template: {where}: message {number + 1} is not found in the rendered "
        "conversation, because the chat template rewrites earlier turns; use a template with {% generation "
        "%} around the assistant's text, or data.train_on = 'all'"
    )


def _by_probe(
    chat: ChatFormat, messages: list[Message], number: int, *, text: str, where: str
) -> tuple[int, int] | None:
    """Characters from the first that turn `number` decides to the end of the turn: its end token, else the
    last character it decides. None if the text does not depend on the turn.

    The same conversation is rendered with other texts in the turn, and compared.
    """
    message = messages[number]
    probe = {**message, **_probed({k: message[k] for k in message.keys() - {"role", "weight"}})}
    for changed in (probe, {**message, "content": PROBE}):  # the second for a turn without any text
        other = chat.render(
            [*messages[:number], changed, *messages[number + 1 :]], generate=False, where=where
        )
        if PROBE in other:
            break
    else:
        return None
    first = _common_length(text, other)
    last = len(text) - _common_length(text[first:][::-1], other[first:][::-1])
    marks = "|".join(map(re.escape, sorted(_end_texts(chat), key=len, reverse=True)))
    mark = re.compile(marks).search(text, last) if marks else None
    if mark is None:
        return first, last
    following = [m["content"] for m in messages[number + 1 :] if m["content"]]
    position = text.find(following[0].strip(), last) if following else -1
    return first, mark.end() if position < 0 or mark.start() <= position else last


def _probed(value: Any) -> Any:
    """The value with other texts; each ends in another character than it did."""
    if isinstance(value, str):
        if not value.strip():
            return value
        return PROBE if value.rstrip()[-1] != PROBE[-1] else PROBE + "x"
    if isinstance(value, dict):
        return {k: v if k == "type" else _probed(v) for k, v in value.items()}
    return [_probed(item) for item in value] if isinstance(value, list) else value


def _common_length(left: str, right: str) -> int:
    """Characters that two texts share at their beginning."""
    pairs = zip(left, right, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _end_texts(chat: ChatFormat) -> list[str]:
    added = chat.tokenizer.added_tokens_decoder
    return [added[i].content for i in chat.end_ids if i in added]


def _encode_spans(chat: ChatFormat, text: str, spans: list[tuple[int, int]], *, where: str) -> Document:
    """The ids of the text, encoded apart at every border of a span, and whether each lies within one of the
    spans of characters; `bos` in front as ChatFormat.encode puts it. A text that would have other ids if it
    were encoded whole joins `chat.merged_borders`."""
    check_text(text, where)
    borders = [0, *sorted({b for span in spans for b in span} - {0, len(text)}), len(text)]
    ids: list[int] = []
    trained: list[bool] = []
    for begin, end in pairwise(borders):
        piece = _ids(chat, text[begin:end]) if begin == 0 else _continued(chat, text[begin:end])
        if begin == 0 and piece[: len(chat.bos)] != chat.bos:
            piece = [*chat.bos, *piece]
        is_trained = any(low <= begin < end <= high for low, high in spans)
        ids += piece
        trained += [is_trained] * len(piece)
    if len(borders) > 2:
        whole = _ids(chat, text)
        if (whole if whole[: len(chat.bos)] == chat.bos else [*chat.bos, *whole]) != ids:
            chat.merged_borders.append(where)
    return Document(ids=ids, trained=trained)


def _ids(chat: ChatFormat, text: str) -> list[int]:
    ids: list[int] = chat.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _continued(chat: ChatFormat, text: str) -> list[int]:
    """The ids of a text that follows another one: without the space that SentencePiece's tokenizers (Llama 2)
    put in front of a text."""
    if not chat.begins_with_space:
        return _ids(chat, text)
    for anchor in _ANCHORS:
        alone, both = _ids(chat, anchor), _ids(chat, anchor + text)
        if both[: len(alone)] == alone:
            return both[len(alone) :]
    return _ids(chat, text)


def _end_at_mark(chat: ChatFormat, ids: list[int], trained: list[bool]) -> list[bool]:
    """`trained` without the white space between a turn's end token and the end of its span."""
    result = list(trained)
    end = len(ids)
    while end > 0:
        if not trained[end - 1]:
            end -= 1
            continue
        begin = end
        while begin > 0 and trained[begin - 1]:
            begin -= 1
        last = max((t for t in range(begin, end) if ids[t] in chat.end_ids), default=end - 1)
        if not chat.tokenizer.decode(ids[last + 1 : end]).strip():
            result[last + 1 : end] = [False] * (end - last - 1)
        end = begin
    return result


def _ended(chat: ChatFormat, document: Document) -> Document:
    """The document, with a trained eos behind its last trained token, unless an end token is its last."""
    last = max((t for t, mark in enumerate(document.trained) if mark), default=None)
    if last is None:
        return document
    tokenizer = chat.tokenizer
    end = max((t for t in range(last + 1) if document.ids[t] in chat.end_ids), default=None)
    if end is not None and not tokenizer.decode(document.ids[end + 1 : last + 1]).strip():
        return document
    if tokenizer.eos_token_id is None:
        raise DataError(
            "no-tokenizer: the tokenizer has no eos token, so no document could end; set tokenizer.eos_token"
        )
    # Untrained white space that a template puts behind the turn would stand between the text and its end.
    ids, trained = document.ids[: last + 1], document.trained[: last + 1]
    return Document(ids=[*ids, tokenizer.eos_token_id], trained=[*trained, True])
