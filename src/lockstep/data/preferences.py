"""Preference sets: a prompt, a chosen and a rejected answer; tokenised, with a loss mask on the answers."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from lockstep.config.data import DataConfig
from lockstep.data.chat import ChatFormat, Message, clean_messages
from lockstep.data.documents import Content, Conversation, DocumentMaker, Request
from lockstep.data.rows import PlacedRow
from lockstep.data.sft import SFTSet, answered
from lockstep.data.sources import batch_rows, missing_column, named_columns, rows_of
from lockstep.errors import DataError
from lockstep.schema.batch import (
    PreferenceSample,
    ScoredSample,
    StateSample,
    TrainSample,
    UnpairedSample,
    prompt_ids,
)

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
        notes: Sequence[str] = (),
    ) -> None:
        self._pairs = tuple(pairs)
        self._margins = None if margins is None else tuple(margins)
        self._shuffle = shuffle
        self.report = dict(report)
        """Counts: pairs, tokens, dropped_overlong, dropped_untrained, dropped_equal, truncated,
        merged_borders."""
        self.notes = tuple(notes)
        """What to say of the rows at the start, one sentence each."""

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


def load_preferences(config: DataConfig, *, tokenizer: Any, vocab_size: int | None = None) -> PreferenceSet:
    """Load the preference set of a DataConfig.

    Rows have `chosen_column` and `rejected_column`: texts or lists of messages, after the prompt in
    `prompt_column`; or whole conversations that begin with a user's or system's message, whose prompt is what
    they share. Only the assistant's turns after the prompt are trained on.

    Args:
        vocab_size: entries of the model's embedding; None: not compared with the token ids.

    Raises:
        DataError: missing or malformed data, answers to different prompts, a document that is too long under
            `error`, an answer without a token to train on under `error`, two equal answers under `error`, a
            token id beyond `vocab_size`, or nothing left.
        ConfigError: an impossible setting.
    """
    maker = DocumentMaker(config, tokenizer, kind="DPO", vocab_size=vocab_size)
    pairs = [pair for _, pair, _ in _pairs(maker)]
    return PreferenceSet(pairs, shuffle=config.shuffle, report=_counted(maker, pairs), notes=maker.chat.notes)


def load_scored_pairs(
    config: DataConfig, *, tokenizer: Any, pad_id: int | None, vocab_size: int | None = None
) -> PreferenceSet:
    """Load the preference set of a reward model: as `load_preferences`, but a document is trained where
    transformers' classifiers read its score, at the last token that is not `pad_id` (None: at the last one).
    Rows may have a margin in `margin_column`: all of them, or none.

    Raises:
        DataError, ConfigError: as `load_preferences`; and a margin that is no number >= 0.
    """
    maker = DocumentMaker(config, tokenizer, kind="RM", vocab_size=vocab_size)
    found = list(_pairs(maker, scored=True))
    pairs = [(_scored(a, pad_id, where), _scored(b, pad_id, where)) for where, (a, b), _ in found]
    margins = _margins([(row, where) for where, _, row in found], config)
    report = _counted(maker, pairs)
    return PreferenceSet(
        pairs, shuffle=config.shuffle, report=report, margins=margins, notes=maker.chat.notes
    )


def _pairs(maker: DocumentMaker, *, scored: bool = False) -> Iterator[tuple[str, Pair, Mapping[str, Any]]]:
    """Yield (where it stands, the pair, its row).

    Args:
        scored: as a reward model reads them.
    """
    config = maker.config
    columns = (config.chosen_column, config.rejected_column)

    def requests() -> Iterator[Request]:
        for row in rows_of(config):
            chat = maker.chat.for_row(row, where=row.where)
            contents = pair_contents(row, config, chat, row.where)
            for content, column in zip(contents, columns, strict=True):
                where = f"{row.where}, {column}"
                marked = "score" if scored else config.train_on
                yield Request(content=content, chat=chat, where=where, marked=marked, tag=row)

    samples = maker.samples(requests(), keep_end=scored)
    for (request, chosen), (_, rejected) in zip(samples, samples, strict=True):
        row: PlacedRow = request.tag
        where = row.where
        if chosen is None or rejected is None:
            continue
        if chosen.token_ids.equal(rejected.token_ids):
            if config.equal_answers == "error":
                raise DataError(
                    f"wrong-pairs: {where}: {config.chosen_column} and {config.rejected_column} are the "
                    f"same {len(chosen)} tokens, so there is nothing to prefer; correct the row, or set "
                    "data.equal_answers = 'drop'"
                )
            maker.counts["dropped_equal"] += 1
            continue
        yield where, (chosen, rejected), row


def _counted(maker: DocumentMaker, pairs: Sequence[Pair]) -> Mapping[str, int]:
    counts = maker.counts
    counts["dropped_equal"] += 0
    if not pairs:
        raise DataError(
            f"nothing-left: no preference pairs left of data.source = {maker.config.source!r}: {dict(counts)}"
        )
    counts["pairs"] = len(pairs)
    counts["tokens"] = sum(len(sample) for pair in pairs for sample in pair)
    counts["merged_borders"] = len(maker.chat.merged_borders)
    return counts


def _scored(sample: TrainSample, pad_id: int | None, where: str) -> TrainSample:
    """The document, trained at the token at which it is scored."""
    read = torch.ones(len(sample), dtype=torch.bool) if pad_id is None else sample.token_ids != pad_id
    if not bool(read.any()):
        raise DataError(
            f"empty: {where}: the document holds nothing but pad tokens (id {pad_id}); leave the row out"
        )
    mask = torch.zeros(len(sample), dtype=torch.bool)
    mask[int(read.nonzero()[-1])] = True
    return StateSample(token_ids=sample.token_ids, loss_mask=mask)


def _margins(rows: Sequence[tuple[Mapping[str, Any], str]], config: DataConfig) -> list[float]:
    """The margin of each row: of all of them, or 0 where none has one and no setting names a column."""
    column = config.margin_column
    if "margin_column" not in named_columns(config) and all(row.get(column) is None for row, _ in rows):
        return [0.0] * len(rows)
    return [_margin(row, column, where) for row, where in rows]


def _margin(row: Mapping[str, Any], column: str, where: str) -> float:
    value = row.get(column)
    if value is None:
        raise DataError(
            f"missing-column: {where} has no margin in column {column!r} (data.margin_column), as other "
            "rows do; write one, 0 for a pair that needs none"
        )
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise DataError(
            f"wrong-row: {where}, {column}: {value!r} is not a margin; write a number >= 0, or rename the "
            "column (data.margin_column)"
        )
    return float(value)


def pair_contents(
    row: Mapping[str, Any], config: DataConfig, chat: ChatFormat, where: str
) -> tuple[Content, Content]:
    """Return the contents of the chosen and of the rejected answer of a row.

    Raises:
        DataError: one of them is missing or malformed, or they answer different prompts.
    """
    chosen, rejected = (
        _content(row, column, config=config, chat=chat, where=where)
        for column in (config.chosen_column, config.rejected_column)
    )
    if isinstance(chosen, tuple) or isinstance(rejected, tuple):
        return chosen, rejected
    prompt = _shared_prompt(chosen, rejected, where)
    return dataclasses.replace(chosen, prompt=prompt), dataclasses.replace(rejected, prompt=prompt)


def _shared_prompt(chosen: Conversation, rejected: Conversation, where: str) -> int:
    """The number of messages before the answers. Raises DataError where they are not the same."""
    both = (chosen.messages, rejected.messages)
    shared = next((n for n, (a, b) in enumerate(zip(*both, strict=False)) if a != b), min(map(len, both)))
    following = [messages[shared]["role"] if len(messages) > shared else None for messages in both]
    prompt = 0
    if given := max(chosen.prompt, rejected.prompt):
        prompt = given
    elif following == ["assistant", "assistant"]:
        prompt = shared
    elif following == [None, None]:  # equal
        prompt = _last_turn(chosen.messages) or shared
    elif "tool" in following or (None in following and chosen.messages[shared - 1]["role"] == "assistant"):
        # A tool answered the same call otherwise, or one conversation goes on where the other ends.
        prompt = _last_turn(chosen.messages[:shared])
    if not 0 < prompt <= shared:
        first, other = _apart(*(messages[shared] if len(messages) > shared else None for messages in both))
        raise DataError(
            f"wrong-pairs: {where}: the answers belong to different prompts: message {shared + 1} is "
            f"{first} in one and {other} in the other; correct the row, or leave it out"
        )
    return prompt


def _apart(one: Message | None, other: Message | None) -> tuple[str, str]:
    """Two messages of which one may be missing, as texts that show where they differ."""
    start, more = 0, ""
    if one is not None and other is not None and one["role"] == other["role"]:
        texts = one["content"], other["content"]
        if texts[0] == texts[1]:
            more = next(key for key in (one | other) if one.get(key) != other.get(key))
        else:
            same = (n for n, (a, b) in enumerate(zip(*texts, strict=False)) if a != b)
            start = max(next(same, min(map(len, texts))) - 20, 0)

    def told(message: Message | None) -> str:
        if message is None:
            return "missing"
        text = f"{message['role']}: {'...' * bool(start)}{message['content'][start : start + 60]!r}"
        return f"{text} with {more} = {repr(message.get(more))[:60]}" if more else text

    return told(one), told(other)


def _last_turn(messages: Sequence[Message]) -> int:
    """The number of messages before the last assistant turn; 0 without one."""
    return max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=0)


def _content(
    row: Mapping[str, Any], column: str, *, config: DataConfig, chat: ChatFormat, where: str
) -> Content:
    """The prompt with the answer in this column."""
    answer, prompt, place = row.get(column), row.get(config.prompt_column), f"{where}, {column}"
    if answer is None:
        setting = "data.chosen_column" if column == config.chosen_column else "data.rejected_column"
        raise missing_column(column, row, setting=setting, source=where)
    if _is_conversation(answer):
        if not isinstance(prompt, list):
            messages = clean_messages(answer, where=place)
            _check_copy(prompt, messages, place)
            return Conversation(messages=chat.with_system(messages))
        prompt, answer = _split(prompt, answer, place)
    if prompt is None:
        raise missing_column(config.prompt_column, row, setting="data.prompt_column", source=where)
    return answered(prompt, answer, row, config=config, chat=chat, where=place)


def _check_copy(prompt: Any, messages: Sequence[Message], where: str) -> None:
    """Refuse a text beside a conversation that is a copy of none of its messages."""
    if not isinstance(prompt, str) or not prompt.strip():
        return
    texts = [text.strip() for message in messages if isinstance(text := message.get("content"), str)]
    if not any(text and (text in prompt or prompt.strip() in text) for text in texts):
        raise DataError(
            f"wrong-pairs: {where}: the row's prompt {prompt[:60]!r} is in no message of the "
            "conversation; correct the row, or leave the prompt's column out"
        )


def _is_conversation(answer: Any) -> bool:
    """Whether the answer is a whole conversation, with the prompt in it."""
    return bool(
        isinstance(answer, list)
        and answer
        and isinstance(answer[0], Mapping)
        and answer[0].get("role") in ("user", "system", "developer")
    )


def _split(prompt: Any, answer: Any, where: str) -> tuple[list[Message], list[Message]]:
    """(prompt, what follows it) of a whole conversation whose row has the prompt apart, too."""
    before, whole = clean_messages(prompt, where=where), clean_messages(answer, where=where)
    if whole[0]["role"] == "system" != before[0]["role"]:
        before = [whole[0], *before]
    if before != whole[: len(before)] or len(before) == len(whole):
        raise DataError(
            f"wrong-pairs: {where}: the conversation does not begin with the {len(before)} messages of the "
            "row's prompt, or ends with them; correct the row, or leave the prompt's column out"
        )
    return before, whole[len(before) :]


# Sets of single answers that each have a label, for KTO.


class UnpairedSet(SFTSet):
    """Tokenised answers with labels; samples are UnpairedSamples."""

    def check_prompts(self, *, steps: int, n: int, seed: int) -> None:
        """Check that no batch of n answers is to one prompt alone: KTO's baseline combines each prompt
        with the answer to another prompt.

        Raises:
            DataError: the step, and what to change.
        """
        prompts = [_prompt_hash(self[i]) for i in range(len(self))]
        most = max(Counter(prompts).values())
        if most == len(self):
            raise DataError(
                f"wrong-pairs: all {most} answers are to one prompt, and KTO's baseline combines each "
                "prompt with the answer to another prompt; add answers to other prompts"
            )
        for step in range(steps if most >= n else 0):
            rows = batch_rows(len(self), step=step, n=n, seed=seed, shuffle=self._shuffle)
            if len({prompts[row] for row in rows}) == 1:
                or_shuffle = "" if self._shuffle else ", or set data.shuffle = true"
                raise DataError(
                    f"wrong-pairs: the {n} answers of step {step + 1} are all to one prompt, and KTO's "
                    "baseline combines each prompt with the answer to another prompt; raise batch_size above "
                    f"{most}, the largest number of answers to one prompt{or_shuffle}"
                )

    @property
    def fingerprint(self) -> str:
        """Hash of all answers and their labels, by which a resumed run recognises its data."""
        samples = [self[i] for i in range(len(self))]
        labels = bytes(isinstance(s, UnpairedSample) and s.desirable for s in samples)
        return hashlib.blake2b(super().fingerprint.encode() + labels, digest_size=16).hexdigest()


def load_unpaired(config: DataConfig, *, tokenizer: Any, vocab_size: int | None = None) -> UnpairedSet:
    """Load the answers of a DataConfig.

    Rows have `prompt_column`, `completion_column` and `label_column`, TRL's unpaired form; or they are the
    pairs of `load_preferences`, each of which is a desirable and an undesirable answer. Only what follows the
    prompt is trained on.

    Args:
        vocab_size: entries of the model's embedding; None: not compared with the token ids.

    Raises:
        DataError: missing or malformed data, a label that is neither true nor false, all labels equal, a
            document that is too long or has nothing to train on under `error`, a token id beyond
            `vocab_size`, or nothing left.
        ConfigError: an impossible setting.
    """
    maker = DocumentMaker(config, tokenizer, kind="KTO", vocab_size=vocab_size)

    def requests() -> Iterator[Request]:
        for row in rows_of(config):
            chat = maker.chat.for_row(row, where=row.where)
            for content, desirable, place in _answers(row, config, chat):
                yield Request(content=content, chat=chat, where=place, marked=config.train_on, tag=desirable)

    samples: list[UnpairedSample] = []
    for request, sample in maker.samples(requests()):
        if sample is not None:
            fields = {f.name: getattr(sample, f.name) for f in dataclasses.fields(sample)}
            samples.append(UnpairedSample(**fields, desirable=request.tag))
    counts = maker.counts
    if not samples:
        raise DataError(f"nothing-left: no answers left of data.source = {config.source!r}: {dict(counts)}")
    counts["desirable"] = sum(sample.desirable for sample in samples)
    if counts["desirable"] in (0, len(samples)):
        kind = "desirable" if counts["desirable"] else "undesirable"
        raise DataError(
            f"wrong-pairs: all {len(samples)} answers of data.source = {config.source!r} are {kind}, and "
            "KTO learns from both kinds; add others, or train on these with `lockstep train sft`"
        )
    counts["documents"] = len(samples)
    counts["tokens"] = sum(len(sample) for sample in samples)
    counts["trained_tokens"] = sum(sample.num_trained for sample in samples)
    counts["merged_borders"] = len(maker.chat.merged_borders)
    return UnpairedSet(samples, shuffle=config.shuffle, report=counts, notes=maker.chat.notes)


def _answers(row: PlacedRow, config: DataConfig, chat: ChatFormat) -> Iterator[tuple[Content, bool, str]]:
    """Yield (content, whether it is desirable, where it stands) for each answer of a row."""
    where = row.where
    if config.label_column in row:
        label = row[config.label_column]
        if isinstance(label, str | float) or label not in (True, False):
            raise DataError(
                f"wrong-row: {where}: {config.label_column} = {str(label)[:40]!r} is not a valid label; "
                "use true for a desirable answer and false for an undesirable one"
            )
        for column, setting in (
            (config.prompt_column, "data.prompt_column"),
            (config.completion_column, "data.completion_column"),
        ):
            if row.get(column) is None:
                raise missing_column(column, row, setting=setting, source=where)
        prompt, answer = row[config.prompt_column], row[config.completion_column]
        yield answered(prompt, answer, row, config=config, chat=chat, where=where), bool(label), where
        return
    if config.chosen_column not in row and config.rejected_column not in row:
        raise missing_column(config.label_column, row, setting="data.label_column", source=where)
    chosen, rejected = pair_contents(row, config, chat, where)
    yield chosen, True, f"{where}, {config.chosen_column}"
    yield rejected, False, f"{where}, {config.rejected_column}"


def _prompt_hash(sample: TrainSample) -> bytes:
    """Tells prompts apart in 16 bytes: those of a large set, as ids, would take more memory than the set."""
    ids = prompt_ids(sample.token_ids, sample.loss_mask)
    return hashlib.blake2b(repr(ids).encode(), digest_size=16).digest()
