"""Tokenise the contents of rows into documents, and mark the tokens that the policy learns to write.

    for request, document in zip(batch, tokenised(batch), strict=True): ...     # or the error of that one

A batch takes one exchange with the process that renders chat templates, and one call of the tokenizer.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from lockstep.config.data import DataConfig
from lockstep.data import verdicts
from lockstep.data.chat import ChatFormat, Message, check_text, token_ids
from lockstep.data.lazy import LazyItems, Outcome, State, attempted
from lockstep.data.sources import Source
from lockstep.errors import ConfigError, DataError, LockstepError
from lockstep.observe.chat_template import PROBE, check_known, kept_at_end
from lockstep.observe.special_text import Places, within
from lockstep.observe.template_program import common_length
from lockstep.observe.template_renderer import Rendered, RenderedTurn, RenderJob, checked, render_chats
from lockstep.schema.batch import TrainSample

T = TypeVar("T")
Marks = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """A prompt and what answers it."""

    messages: list[Message]
    prompt: int = 0
    """Messages before the answer, which are not trained on. 0: every assistant turn is an answer."""


Content = tuple[str, str] | Conversation
"""Prompt and completion of plain text, or a conversation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The content of a row, to be tokenised."""

    content: Content
    chat: ChatFormat
    where: str
    """File and row of the content, for error messages."""
    marked: Literal["assistant", "last", "all", "score"] = "assistant"
    """Tokens to mark, as in data.train_on. "score" marks all and adds no eos, as reward models read texts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A tokenised document."""

    ids: list[int]
    trained: list[tuple[int, int]]
    """Tokens [begin, end) that the policy is to learn to write. The loss mask is these, one slot earlier."""


class DocumentMaker:
    """Turns documents into TrainSamples according to one DataConfig. Several threads may use it at once.

    Args:
        kind: the run's, for messages.
        vocab_size: entries of the model's embedding; None: not compared with the token ids.
        positions: of the model; None: not compared with the length of a document.

    Raises:
        ConfigError: nothing turns the source's rows into documents.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Any,
        *,
        kind: str,
        vocab_size: int | None,
        positions: int | None = None,
    ) -> None:
        self.config, self.kind = config, kind
        self.chat = document_format(config, tokenizer, kind=kind)
        self.vocab_size, self.positions = vocab_size, positions
        self.pad_id: int | None = None
        """A reward model's pad token, whose positions it does not score."""

    @property
    def selective(self) -> bool:
        """Whether a setting leaves documents out."""
        config = self.config
        return "drop" in (config.overlong_documents, config.untrained_documents, config.equal_answers)

    def outcomes(
        self, requests: Sequence[Request | LockstepError], *, keep_end: bool = False
    ) -> list[Outcome[TrainSample]]:
        """Return what each request becomes, see `sample`; one that is an error already stays one."""
        documents = iter(tokenised([request for request in requests if isinstance(request, Request)]))
        return [
            Outcome(error=request)
            if isinstance(request, LockstepError)
            else self._outcome(next(documents), request.where, keep_end=keep_end)
            for request in requests
        ]

    def _outcome(
        self, document: Document | LockstepError, where: str, *, keep_end: bool
    ) -> Outcome[TrainSample]:
        if isinstance(document, LockstepError):
            return Outcome(error=document)
        try:
            return self.sample(document, where, keep_end=keep_end)
        except DataError as error:
            return Outcome(error=error)

    def sample(self, document: Document, where: str, *, keep_end: bool = False) -> Outcome[TrainSample]:
        """Return the document as a TrainSample: mask[t] is about predicting token t + 1.

        Args:
            keep_end: truncate at the beginning, behind the beginning-of-sequence token.

        Raises:
            DataError: see `load_sft`.
        """
        config, ids = self.config, document.ids
        state: State = "kept"
        trained: Marks = np.zeros(len(ids), np.bool_)
        for begin, end in [(0, len(ids))] if config.train_on == "all" else document.trained:
            trained[begin:end] = True
        if len(ids) > config.max_length:
            if config.overlong_documents == "error":
                raise DataError(
                    f"too-long: {where}: the document has {len(ids)} tokens, data.max_length = "
                    f"{config.max_length}; raise it, or set data.overlong_documents = 'truncate' or 'drop'"
                )
            if config.overlong_documents == "drop":
                return Outcome(state="dropped_overlong")
            state = "truncated"
            ids, trained = self._cut(ids, trained, keep_end=keep_end)
        if self.positions is not None and len(ids) > self.positions:
            raise DataError(
                f"too-long: {where}: data.max_length = {config.max_length} lets the document have {len(ids)} "
                f"tokens, which exceeds the {self.positions} positions of the model "
                f"(max_position_embeddings); lower data.max_length to {self.positions}"
            )
        token_ids, mask = np.array(ids, np.int64), np.zeros(len(ids), np.bool_)
        mask[:-1] = trained[1:]
        if not (count := int(np.count_nonzero(mask))):
            if config.untrained_documents == "error":
                raise DataError(
                    f"nothing-left: {where}: no token of the document is trained on (no assistant turn, an "
                    f"empty one, or one beyond data.max_length = {config.max_length}); correct the row, or "
                    "set data.untrained_documents = 'drop'"
                )
            return Outcome(state="dropped_untrained")
        if self.vocab_size is not None and token_ids.max() >= self.vocab_size:
            tokenizer = self.chat.tokenizer
            check_known(ids, self.vocab_size, tokenizer=tokenizer, model="the model", where=where)
        sample = TrainSample(token_ids=torch.from_numpy(token_ids), loss_mask=torch.from_numpy(mask))
        return Outcome(item=sample, state=state, tokens=len(ids), trained=count)

    def _cut(self, ids: list[int], trained: Marks, *, keep_end: bool) -> tuple[list[int], Marks]:
        limit = self.config.max_length
        if not keep_end:
            return ids[:limit], trained[:limit]
        first, rest = kept_at_end(ids, limit, tokenizer=self.chat.tokenizer, template=self.chat.template)
        return ids[:first] + ids[rest:], np.concatenate([trained[:first], trained[rest:]])


class DocumentSet(Generic[T]):
    """Documents, or pairs of them, made of the rows of a source when they come near; batches are epoch
    shuffles, a pure function of (step, n, seed).

    Args:
        maker: None for items that were there already.
        source: None: likewise.
    """

    name = "documents"
    """The name of the items in messages."""

    def __init__(
        self, items: LazyItems[T], *, maker: DocumentMaker | None = None, source: Source | None = None
    ) -> None:
        self.items, self._maker, self._source = items, maker, source
        if maker is not None and not items.sampled:
            first = items.first_bad
            raise DataError(
                f"nothing-left: no {self.name} left of data.source = {maker.config.source!r}: {self.report}"
                + (f"; the first: {first}" if first else "")
            )
        self.fingerprint = self._fingerprint()
        """Hash of all of them, or of the first rows and the source's content, by which a resumed run
        recognises its data."""
        self.verdict_key: str | None = None
        """The key of `lockstep data check`'s verdict; None: the set was made as a whole."""
        self._verdict: tuple[str, ...] = ()
        if maker is not None and source is not None and not items.whole:
            maker.chat.counts_borders = False
        if maker is not None and source is not None and not (items.whole or maker.config.streaming):
            self.verdict_key = verdicts.key(
                maker.kind,
                maker.config,
                maker.chat.tokenizer,
                source,
                template=maker.chat.template,
                vocab_size=maker.vocab_size,
                positions=maker.positions,
                pad_id=maker.pad_id,
            )
            self._verdict = verdicts.apply(self.verdict_key, items, maker.config.source)

    def __len__(self) -> int:
        return len(self.items)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about the rows for the start of a run, one sentence each."""
        found = () if self._maker is None else self._maker.chat.notes
        return (*(() if self._source is None else self._source.table.notes), *self._verdict, *found)

    @property
    def report(self) -> dict[str, int]:
        """Counts: documents or pairs, tokens, trained_tokens, what was dropped or truncated, merged_borders
        (of a prompt and its answer, see `tokenised`). Of a large set of the rows that were `examined` so far,
        of which merged_borders are those of the first."""
        counts = self.items.counts
        report = {name: counts[name] for name in ("dropped_overlong", "dropped_untrained", "truncated")}
        report |= {name: counts[name] for name in ("dropped_equal", "bad") if counts[name]}
        if not self.items.whole:
            report |= {"rows": self.items.rows // self.items.of_row} if self.items.has_end else {}
            report |= {"examined": self.items.examined}
        report[self.name] = counts["kept"] + counts["truncated"]
        report |= {"tokens": self.items.tokens, "trained_tokens": self.items.trained}
        if self._maker is not None:
            report["merged_borders"] = len(self._maker.chat.merged_borders)
        return report

    def _fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for item in self.items.sampled:
            for part in self._hashed(item):
                digest.update(part)
        if not self.items.whole and self._source is not None:
            digest.update(self._source.fingerprint.encode())
        return digest.hexdigest()

    def _hashed(self, item: T) -> Iterator[bytes]:
        """Yield the bytes of an item that the fingerprint covers."""
        raise NotImplementedError

    def close(self) -> None:
        """End the threads that make items."""
        self.items.close()


def hashed(sample: TrainSample) -> Iterator[bytes]:
    """Yield the bytes of a sample that belong to a fingerprint."""
    yield sample.token_ids.numpy().tobytes()
    yield sample.loss_mask.numpy().tobytes()


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


def tokenised(requests: Sequence[Request]) -> list[Document | LockstepError]:
    """Return the document of each request, or the error of one at fault.

    Plain text is a prompt and a completion, encoded apart; the ids of the completion and the eos after it are
    marked. Of a conversation the assistant's turns are marked, but for those before `Conversation.prompt` and
    those of `weight` 0. A template with {% generation %} marks them itself. Otherwise a turn is what it adds
    to the header that opens it, up to and including the token that ends it (`ChatFormat.end_ids`). White
    space between that token and the next turn is not marked. The texts before, in and after a turn are
    encoded apart: the policy, which is given the ids before, could not write a token across the border. A
    conversation that does not end in an end token gets the tokenizer's eos.

    A request is at fault if the template refuses the messages, or renders earlier turns so differently later
    on that their text cannot be located; or if a text holds half a surrogate pair.
    """
    if not requests:
        return []
    jobs = [attempted(_jobs, request) for request in requests]
    rendered = render_chats(
        requests[0].chat.tokenizer,
        [job for of_one in jobs if not isinstance(of_one, LockstepError) for job in of_one],
    )
    texts = [
        of_one
        if isinstance(of_one, LockstepError)
        else attempted(_text, request, [next(rendered) for _ in of_one])
        for request, of_one in zip(requests, jobs, strict=True)
    ]
    ids = iter(_encoded(requests[0].chat, [text for text in texts if isinstance(text, _Text)]))
    return [
        attempted(_document, request, text, next(ids)) if isinstance(text, _Text) else text
        for request, text in zip(requests, texts, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class _Text:
    """The text of a document."""

    text: str
    spans: Sequence[tuple[int, int]] = ()
    """Characters [start, end) that are marked."""
    whole: bool = False
    """Every token is marked."""
    plain: Places = ()
    """Where the text is part of no special token."""

    @cached_property
    def pieces(self) -> list[tuple[str, bool, Places]]:
        """The texts that are encoded apart, whether each lies within a span, and its plain places."""
        text, end = self.text, len(self.text)
        borders = sorted({0, end, *(border for span in self.spans for border in span)})
        return [
            (
                text[begin:end],
                self.whole or any(low <= begin < end <= high for low, high in self.spans),
                within(self.plain, begin, end),
            )
            for begin, end in pairwise(borders)
        ] or [(text, self.whole, self.plain)]


_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
_ANCHORS = ("\n", ".", "a", ",")


def _marks_itself(chat: ChatFormat) -> bool:
    return chat.template is not None and _GENERATION.search(chat.template) is not None


def _first(request: Request, content: Conversation) -> int:
    """Number of the first message that may be marked."""
    if request.marked != "last":
        return content.prompt
    return max([content.prompt, *_turns(content.messages)[-1:]])


def _turns(messages: list[Message]) -> list[int]:
    return [number for number, message in enumerate(messages) if message["role"] == "assistant"]


def _is_trained(message: Message) -> bool:
    """As OpenAI's fine-tuning reads `weight`."""
    return message.get("weight") != 0


def _trained_turns(request: Request, content: Conversation) -> list[int]:
    first, messages = _first(request, content), content.messages
    return [i for i in _turns(messages) if i >= first and _is_trained(messages[i])]


def _jobs(request: Request) -> list[RenderJob]:
    """Return the renderings that a document needs."""
    content, chat, where = request.content, request.chat, request.where
    if isinstance(content, tuple) or chat.template is None:
        return []
    messages = content.messages
    if request.marked in ("all", "score"):
        return [chat.job(messages, where=where)]
    if _marks_itself(chat):
        first = _first(request, content)
        before = [chat.job(messages[:first], where=where)] if first else []
        return [chat.job(messages, where=where), *before]
    turns = _trained_turns(request, content)
    return [chat.job(messages, turns=() if 0 in turns else turns, where=where)]


def _text(request: Request, results: Sequence[Rendered | DataError]) -> _Text:
    """Return the text of a document and its marked spans, from the results of its jobs."""
    content, where = request.content, request.where
    rendered = [checked(result) for result in results]
    whole, plain = request.marked in ("all", "score"), Places()
    if isinstance(content, tuple):
        text = "".join(content)
        spans = [(len(content[0]), len(text))]
        whole = request.marked == "score"
    elif not rendered:
        text, spans = request.chat.render(content.messages, generate=False, where=where).text, []
    else:
        text, spans, plain = rendered[0].text, [], rendered[0].plain
        if not whole and _marks_itself(request.chat):
            spans = _marked_by_template(request, content, rendered)
        elif not whole:
            spans = _marked_turns(request, content, rendered[0])
    check_text(text, where)
    return _Text(text=text, spans=() if whole else spans, whole=whole, plain=plain)


def _marked_by_template(
    request: Request, content: Conversation, rendered: Sequence[Rendered]
) -> list[tuple[int, int]]:
    # By number: where a template rewrites earlier turns, their text is elsewhere without those that follow.
    before = rendered[1].spans if len(rendered) > 1 else ()
    messages, first = content.messages, _first(request, content)
    turns, spans = [i for i in _turns(messages) if i >= first], list(rendered[0].spans)[len(before) :]
    if len(spans) == len(turns):
        return [span for span, number in zip(spans, turns, strict=True) if _is_trained(messages[number])]
    if not all(_is_trained(messages[number]) for number in turns):
        raise DataError(
            f"unsupported-chat-template: {request.where}: a turn has weight 0, and the template's "
            f"{{% generation %}} marks {len(spans)} texts for {len(turns)} turns of the assistant, so that "
            "its text is not known; leave the row out"
        )
    return spans


def _marked_turns(request: Request, content: Conversation, rendered: Rendered) -> list[tuple[int, int]]:
    turns = _trained_turns(request, content)
    if 0 in turns:
        raise DataError(
            f"wrong-row: {request.where}: the conversation begins with the assistant; begin with a user turn"
        )
    return [
        _turn_span(request, content.messages, number, turn=turn, text=rendered.text)
        for number, turn in zip(turns, rendered.turns, strict=True)
    ]


def _turn_span(
    request: Request, messages: list[Message], number: int, *, turn: RenderedTurn, text: str
) -> tuple[int, int]:
    """Characters [start, end) of `text` that assistant turn `number` added."""
    start = turn.start
    if turn.end is not None:
        return start, turn.end
    # Templates such as Qwen3's render a turn otherwise once others follow (thinking is taken out).
    found = _by_probe(request.chat, messages, number, text=text, where=request.where)
    if found is None:
        raise DataError(
            f"unsupported-chat-template: {request.where}: message {number + 1} is not found in the rendered "
            "conversation, because the chat template rewrites earlier turns; use a template with {% "
            "generation %} around the assistant's text, or data.train_on = 'all'"
        )
    first, end = found
    # Phi-3's template writes an eos where no answer is asked for, so that what comes before need not begin
    # the text.
    if start < turn.opened or start > first:
        tail = turn.header
        start = text.rfind(tail, 0, first + len(tail)) if tail else -1
        start = first if start < 0 else min(first, start + len(tail))
    return start, end


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
        ).text
        if PROBE in other:
            break
    else:
        return None
    first = common_length(text, other)
    last = len(text) - common_length(text[first:][::-1], other[first:][::-1])
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


def _end_texts(chat: ChatFormat) -> list[str]:
    added = chat.tokenizer.added_tokens_decoder
    return [added[i].content for i in chat.end_ids if i in added]


def _encoded(chat: ChatFormat, texts: Sequence[_Text]) -> list[list[list[int]]]:
    """The ids of the pieces of each text, and after them, if it has several and borders are counted, those of
    the whole text."""
    strings: list[tuple[str, Places]] = []
    whole = chat.counts_borders
    for text in texts:
        strings += [(piece, plain) for piece, _, plain in text.pieces]
        strings += [(text.text, text.plain)] if whole and len(text.pieces) > 1 else []
    encoded = iter(token_ids(chat.tokenizer, [s for s, _ in strings], [plain for _, plain in strings]))
    result = []
    for text in texts:
        count = len(text.pieces)
        result.append([next(encoded) for _ in range(count + (whole and count > 1))])
    return result


def _document(request: Request, text: _Text, encoded: Sequence[list[int]]) -> Document:
    """The ids of the text and which are marked; `bos` in front as ChatFormat.encode puts it. A text that
    would have other ids if it were encoded whole joins `chat.merged_borders`."""
    chat, ids = request.chat, list[int]()
    runs: list[tuple[int, int]] = []
    """Tokens [begin, end) that are marked."""
    for number, (piece, is_trained, plain) in enumerate(text.pieces):
        of_piece = encoded[number] if number == 0 else _continued(chat, piece, plain, encoded[number])
        if number == 0 and of_piece[: len(chat.bos)] != chat.bos:
            of_piece = [*chat.bos, *of_piece]
        begin = len(ids)
        ids += of_piece
        if is_trained and of_piece:
            begin = runs.pop()[0] if runs and runs[-1][1] == begin else begin
            runs.append((begin, len(ids)))
    if len(encoded) > len(text.pieces):
        whole = encoded[-1]
        if (whole if whole[: len(chat.bos)] == chat.bos else [*chat.bos, *whole]) != ids:
            chat.merged_borders.append(request.where)
    content = request.content
    if request.marked != "score":
        ends = isinstance(content, tuple) or request.marked == "all"
        if not ends and not _marks_itself(chat):
            runs = [(begin, _end_at_mark(chat, ids, begin, end)) for begin, end in runs]
        if runs and (ends or _last_role(content) == "assistant"):
            ids, runs[-1] = _ended(chat, ids, *runs[-1])
    return Document(ids=ids, trained=runs)


def _last_role(content: Content) -> Any:
    return None if isinstance(content, tuple) else content.messages[-1]["role"]


def _continued(chat: ChatFormat, text: str, plain: Places, encoded: list[int]) -> list[int]:
    """The ids of a text that follows another one: without the space that SentencePiece's tokenizers (Llama 2)
    put in front of a text. `encoded`: its ids with it."""
    if not chat.begins_with_space:
        return encoded
    for anchor in _ANCHORS:
        moved = tuple((start + len(anchor), end + len(anchor)) for start, end in plain)
        alone, both = token_ids(chat.tokenizer, [anchor, anchor + text], [(), moved])
        if both[: len(alone)] == alone:
            return both[len(alone) :]
    return encoded


def _end_at_mark(chat: ChatFormat, ids: list[int], begin: int, end: int) -> int:
    """The end of a marked turn without the white space behind its end token."""
    ends = chat.end_ids
    last = next((t for t in range(end - 1, begin - 1, -1) if ids[t] in ends), end - 1)
    return last + 1 if chat.is_blank(ids[last + 1 : end]) else end


def _ended(chat: ChatFormat, ids: list[int], begin: int, end: int) -> tuple[list[int], tuple[int, int]]:
    """The ids and the last run of marked tokens, with an eos behind it unless an end token is its last."""
    ends = chat.end_ids
    last = next((t for t in range(end - 1, -1, -1) if ids[t] in ends), None)
    if last is not None and chat.is_blank(ids[last + 1 : end]):
        return ids, (begin, end)
    eos = chat.tokenizer.eos_token_id
    if eos is None:
        raise DataError(
            "no-tokenizer: the tokenizer has no eos token, so no document could end; set tokenizer.eos_token"
        )
    # Untrained white space that a template puts behind the turn would stand between the text and its end.
    return [*ids[:end], eos], (begin, end + 1)
