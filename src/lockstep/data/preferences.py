"""Preference sets: a prompt, a chosen and a rejected answer; tokenised, with a loss mask on the answers."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, cast

import torch

from lockstep.config.data import DataConfig
from lockstep.data.chat import ChatFormat, Message, clean_messages
from lockstep.data.documents import (
    Content,
    Conversation,
    DocumentMaker,
    DocumentSet,
    Request,
    hashed,
)
from lockstep.data.lazy import LazyItems, Outcome, State, attempted
from lockstep.data.rows import PlacedRow
from lockstep.data.sft import SFTSet, answered
from lockstep.data.sources import Source, missing_column, named_columns
from lockstep.errors import DataError, LockstepError
from lockstep.schema.batch import (
    PreferenceSample,
    ScoredSample,
    StateSample,
    TrainSample,
    UnpairedSample,
    prompt_ids,
)

Pair = tuple[TrainSample, TrainSample]
Preference = tuple[Pair, float | None]
"""A pair and its margin; None: not of a reward model."""


class PreferenceSet(DocumentSet[Preference]):
    """Pairs."""

    name = "pairs"

    @classmethod
    def of(
        cls, pairs: Sequence[Pair], *, shuffle: bool, margins: Sequence[float | None] | None = None
    ) -> PreferenceSet:
        """Return a set of pairs that are there."""
        items = list(zip(pairs, margins or [None] * len(pairs), strict=True))
        return cls(LazyItems.of(items, shuffle=shuffle))

    def __getitem__(self, index: int) -> Pair:
        return self.items[index][0]

    def batch(self, step: int, n: int, seed: int) -> list[PreferenceSample]:
        """Return the n pairs of optimizer step `step` (from 0) as 2n samples, chosen and rejected in turn.

        Raises:
            DataError: the set has fewer than n pairs, or one of them is at fault.
        """
        samples: list[PreferenceSample] = []
        for i, (pair, margin) in enumerate(self.items.batch(step, n, seed)):
            for which, each in enumerate(pair):
                ids, mask, sample_id = each.token_ids, each.loss_mask, 2 * i + which
                samples.append(
                    PreferenceSample(token_ids=ids, loss_mask=mask, sample_id=sample_id)
                    if margin is None
                    else ScoredSample(token_ids=ids, loss_mask=mask, sample_id=sample_id, margin=margin)
                )
        return samples

    @property
    def report(self) -> dict[str, int]:
        """See DocumentSet."""
        report = {"dropped_equal": 0} | super().report
        del report["trained_tokens"]
        return report

    def _hashed(self, item: Preference) -> Iterator[bytes]:
        pair, margin = item
        for sample in pair:
            yield from hashed(sample)
        if margin is not None:
            yield repr(margin).encode()


def load_preferences(
    config: DataConfig, *, tokenizer: Any, vocab_size: int | None = None, positions: int | None = None
) -> PreferenceSet:
    """Open the preference set of a DataConfig, see `load_sft`.

    Rows have `chosen_column` and `rejected_column`: texts or lists of messages, after the prompt in
    `prompt_column`; or whole conversations that begin with a user's or system's message, whose prompt is what
    they share. Only the assistant's turns after the prompt are trained on.

    Args:
        vocab_size: entries of the model's embedding; None: not compared with the token ids.
        positions: of the model; None: not compared with the length of a document.

    Raises:
        DataError: missing or malformed data, answers to different prompts, a document that is too long under
            `error`, an answer without a token to train on under `error`, two equal answers under `error`, a
            token id beyond `vocab_size`, or nothing left.
        ConfigError: an impossible setting.
    """
    maker = DocumentMaker(config, tokenizer, kind="DPO", vocab_size=vocab_size, positions=positions)
    return _preference_set(maker, Source(config))


def load_scored_pairs(
    config: DataConfig,
    *,
    tokenizer: Any,
    pad_id: int | None,
    vocab_size: int | None = None,
    positions: int | None = None,
) -> PreferenceSet:
    """Open the preference set of a reward model: as `load_preferences`, but a document is trained where
    transformers' classifiers read its score, at the last token that is not `pad_id` (None: at the last one).
    Rows may have a margin in `margin_column`: all of them, or none.

    Raises:
        DataError, ConfigError: as `load_preferences`; and a margin that is no number >= 0.
    """
    maker = DocumentMaker(config, tokenizer, kind="RM", vocab_size=vocab_size, positions=positions)
    maker.pad_id = pad_id
    source = Source(config)
    column = config.margin_column
    with_margins = "margin_column" in named_columns(config) or any(
        row.get(column) is not None for row in source.first_rows()
    )

    def scored(row: PlacedRow, pair: Pair) -> Preference:
        chosen, rejected = (_scored(sample, pad_id, row.where) for sample in pair)
        return (chosen, rejected), _margin(row, column, row.where, expected=with_margins)

    return _preference_set(maker, source, scored=scored)


def _preference_set(
    maker: DocumentMaker, source: Source, *, scored: Callable[[PlacedRow, Pair], Preference] | None = None
) -> PreferenceSet:
    """The pairs of a source; `scored` makes of them what a reward model is trained on."""
    config = maker.config
    columns = (config.chosen_column, config.rejected_column)
    source.check_columns()

    def requests(row: PlacedRow) -> list[Request]:
        chat = maker.chat.for_row(row, where=row.where)
        marked = config.train_on if scored is None else "score"
        return [
            Request(content=content, chat=chat, where=f"{row.where}, {column}", marked=marked)
            for content, column in zip(pair_contents(row, config, chat, row.where), columns, strict=True)
        ]

    def make(numbers: Sequence[int]) -> list[Outcome[Preference]]:
        rows = source.read(numbers)
        of_rows = [attempted(requests, row) for row in rows]
        flat = [each for of_row in of_rows if not isinstance(of_row, LockstepError) for each in of_row]
        outcomes = iter(maker.outcomes(flat, keep_end=scored is not None))
        return [
            Outcome(error=of_row)
            if isinstance(of_row, LockstepError)
            else _paired(row, next(outcomes), next(outcomes), config=config, scored=scored)
            for row, of_row in zip(rows, of_rows, strict=True)
        ]

    items = source.items(make, selective=maker.selective)
    return PreferenceSet(items, maker=maker, source=source)


def _paired(
    row: PlacedRow | DataError,
    chosen: Outcome[TrainSample],
    rejected: Outcome[TrainSample],
    *,
    config: DataConfig,
    scored: Callable[[PlacedRow, Pair], Preference] | None,
) -> Outcome[Preference]:
    """Return the outcome of a row, given those of its two answers."""
    assert isinstance(row, PlacedRow), "one at fault has no answers"
    for each in (chosen, rejected):
        if each.item is None:
            return Outcome(state=each.state, error=each.error)
    assert chosen.item is not None and rejected.item is not None
    if chosen.item.token_ids.equal(rejected.item.token_ids):
        if config.equal_answers == "drop":
            return Outcome(state="dropped_equal")
        return Outcome(
            error=DataError(
                f"wrong-pairs: {row.where}: {config.chosen_column} and {config.rejected_column} are the "
                f"same {len(chosen.item)} tokens, so there is nothing to prefer; correct the row, or set "
                "data.equal_answers = 'drop'"
            )
        )
    pair = chosen.item, rejected.item
    item = (pair, None) if scored is None else attempted(scored, row, pair)
    if isinstance(item, LockstepError):
        return Outcome(error=item)
    state = "truncated" if "truncated" in (chosen.state, rejected.state) else "kept"
    tokens, trained = chosen.tokens + rejected.tokens, chosen.trained + rejected.trained
    return Outcome(item=item, state=cast(State, state), tokens=tokens, trained=trained)


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


def _margin(row: Mapping[str, Any], column: str, where: str, *, expected: bool) -> float:
    """The margin of a row: 0 where neither it nor the first rows have one, and no setting names a column."""
    value = row.get(column)
    if value is None and expected:
        raise DataError(
            f"missing-column: {where} has no margin in column {column!r} (data.margin_column), as other "
            "rows do; write one, 0 for a pair that needs none"
        )
    if value is None:
        return 0.0
    if not expected:
        raise DataError(
            f"wrong-row: {where} has a margin in column {column!r} (data.margin_column), and none of the "
            "first rows has one; write one in every row, 0 for a pair that needs none"
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
    """Return whether the answer is a whole conversation, including the prompt."""
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
    """Answers with labels; samples are UnpairedSamples."""

    _checks_batches = False

    def check_prompts(self, *, steps: int, n: int, seed: int) -> None:
        """Check that no batch of n answers is to one prompt alone: KTO's baseline combines each prompt
        with the answer to another prompt. Of a set that is not known as a whole, `batch` checks each.

        Raises:
            DataError: the step, and what to change.
        """
        self._checks_batches = not self.items.whole
        if self._checks_batches:
            return
        prompts = {number: _prompt_hash(item) for number, item in self.items.made().items()}
        most = max(Counter(prompts.values()).values())
        if most == len(self):
            raise DataError(
                f"wrong-pairs: all {most} answers are to one prompt, and KTO's baseline combines each "
                "prompt with the answer to another prompt; add answers to other prompts"
            )
        for step in range(steps if most >= n else 0):
            numbers = self.items.numbers(step, n, seed)
            if len({prompts[int(number)] for number in numbers}) == 1:
                self._refuse(step, n, f"above {most}, the largest number of answers to one prompt")

    def _refuse(self, step: int, n: int, how: str) -> NoReturn:
        or_shuffle = "" if self.items.config.shuffle else ", or set data.shuffle = true"
        raise DataError(
            f"wrong-pairs: the {n} answers of step {step + 1} are all to one prompt, and KTO's "
            f"baseline combines each prompt with the answer to another prompt; raise batch_size "
            f"{how}{or_shuffle}"
        )

    def batch(self, step: int, n: int, seed: int) -> list[TrainSample]:
        """See SFTSet. Raises DataError: also if all answers are to one prompt."""
        samples = super().batch(step, n, seed)
        if self._checks_batches and len({_prompt_hash(sample) for sample in samples}) == 1:
            self._refuse(step, n, "to more than the largest number of answers to one prompt")
        return samples

    @property
    def report(self) -> dict[str, int]:
        """See DocumentSet; `desirable` are those of the first rows."""
        return super().report | {"desirable": sum(map(_is_desirable, self.items.sampled))}

    def _hashed(self, item: TrainSample) -> Iterator[bytes]:
        yield from hashed(item)
        yield bytes([_is_desirable(item)])


def load_unpaired(
    config: DataConfig, *, tokenizer: Any, vocab_size: int | None = None, positions: int | None = None
) -> UnpairedSet:
    """Open the answers of a DataConfig, see `load_sft`.

    Rows have `prompt_column`, `completion_column` and `label_column`, TRL's unpaired form; or they are the
    pairs of `load_preferences`, each of which is a desirable and an undesirable answer. Only what follows the
    prompt is trained on.

    Args:
        vocab_size: entries of the model's embedding; None: not compared with the token ids.
        positions: of the model; None: not compared with the length of a document.

    Raises:
        DataError: missing or malformed data, a label that is neither true nor false, all labels equal, a
            document that is too long or has nothing to train on under `error`, a token id beyond
            `vocab_size`, or nothing left.
        ConfigError: an impossible setting.
    """
    maker = DocumentMaker(config, tokenizer, kind="KTO", vocab_size=vocab_size, positions=positions)
    source = Source(config)
    source.check_columns()
    # Answers of a row; where some rows are pairs, the others lack a second one.
    of_row = 1 if all(config.label_column in row for row in source.first_rows()) else 2

    def answers(row: PlacedRow) -> list[tuple[Request, bool]]:
        chat = maker.chat.for_row(row, where=row.where)
        found = [
            (Request(content=content, chat=chat, where=place, marked=config.train_on), desirable)
            for content, desirable, place in _answers(row, config, chat)
        ]
        if len(found) > of_row:
            raise DataError(
                f"wrong-row: {row.where}: is a pair of answers, and the first rows are single answers with a "
                f"label ({config.label_column}); write all rows in one form"
            )
        return found

    def make(numbers: Sequence[int]) -> list[Outcome[TrainSample]]:
        rows = [*dict.fromkeys(number // of_row for number in numbers)]
        found = dict(zip(rows, (attempted(answers, row) for row in source.read(rows)), strict=True))
        skip = config.on_bad_row == "skip"
        drafts = [_answer(found[number // of_row], number % of_row, skip=skip) for number in numbers]
        made = iter(maker.outcomes([draft[0] for draft in drafts if isinstance(draft, tuple)]))
        return [_labelled(draft, next(made)) if isinstance(draft, tuple) else draft for draft in drafts]

    items = source.items(make, selective=maker.selective, of_row=of_row)
    loaded = UnpairedSet(items, maker=maker, source=source)
    desirable = loaded.report["desirable"]
    if items.whole and desirable in (0, len(items)):
        kind = "desirable" if desirable else "undesirable"
        raise DataError(
            f"wrong-pairs: all {len(items)} answers of data.source = {config.source!r} are {kind}, and "
            "KTO learns from both kinds; add others, or train on these with `lockstep train sft`"
        )
    return loaded


def _is_desirable(sample: TrainSample) -> bool:
    return isinstance(sample, UnpairedSample) and sample.desirable


_Answer = tuple[Request, bool]


def _answer(
    of_row: list[_Answer] | LockstepError, which: int, *, skip: bool
) -> _Answer | Outcome[TrainSample]:
    if isinstance(of_row, LockstepError):
        # Under skip, the row's fault is named once.
        return Outcome(state="absent") if skip and which else Outcome(error=of_row)
    return of_row[which] if which < len(of_row) else Outcome(state="absent")


def _labelled(answer: _Answer, outcome: Outcome[TrainSample]) -> Outcome[TrainSample]:
    if outcome.item is None:
        return outcome
    fields = {f.name: getattr(outcome.item, f.name) for f in dataclasses.fields(outcome.item)}
    return dataclasses.replace(outcome, item=UnpairedSample(**fields, desirable=answer[1]))


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
