"""The tokens of a conversation that the assistant wrote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lockstep.data.chat import ChatFormat, Message, check_text
from lockstep.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A tokenised document."""

    ids: list[int]
    trained: list[bool]
    """Per token: whether the policy is to learn to write it. The loss mask is this, one slot earlier."""


def conversation(chat: ChatFormat, messages: list[Message], *, where: str, first: int = 0) -> Document:
    """Tokenise a rendered conversation, with the assistant's tokens marked from message `first` on.

    A template with {% generation %} marks the assistant's text itself. Otherwise the text is located by
    rendering the conversation turn by turn: what turn i adds to the header that opens it, up to and including
    the special token that ends it. White space between that token and the next turn is not marked. A
    conversation that does not end in a special token gets the tokenizer's eos.

    Raises:
        DataError: the template refuses the messages, or renders earlier turns so differently later on that
            their text cannot be located.
    """
    if chat.template is not None and "{% generation" in chat.template.replace("{%-", "{%"):
        document = _by_template(chat, messages, where, first)
    else:
        document = _by_rendering(chat, messages, where, first)
    return document if messages[-1]["role"] != "assistant" else _ended(chat, document)


def whole_conversation(chat: ChatFormat, messages: list[Message], *, where: str) -> Document:
    """Tokenise a rendered conversation, every token marked; ends as `conversation` does."""
    ids = chat.encode(chat.render(messages, generate=False, where=where))
    return _ended(chat, Document(ids=ids, trained=[True] * len(ids)))


def text_document(chat: ChatFormat, prompt: str, completion: str) -> Document:
    """Tokenise plain text; the ids of the completion and the eos after it are marked."""
    ids, trained = _encode_spans(chat, prompt + completion, [(len(prompt), len(prompt) + len(completion))])
    return _ended(chat, Document(ids=ids, trained=trained))


def _by_template(chat: ChatFormat, messages: list[Message], where: str, first: int) -> Document:
    rendered = chat.rendered(messages, generate=False, where=where)
    # By number: where a template rewrites earlier turns, their text is elsewhere without those that follow.
    before = chat.rendered(messages[:first], generate=False, where=where).spans if first else ()
    ids, trained = _encode_spans(chat, rendered.text, list(rendered.spans)[len(before) :])
    return Document(ids=ids, trained=trained)


def _by_rendering(chat: ChatFormat, messages: list[Message], where: str, first: int) -> Document:
    text = chat.render(messages, generate=False, where=where)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
    spans = [_turn_span(chat, messages, number, text=text, where=where) for number in turns]
    ids, trained = _encode_spans(chat, text, spans)
    return Document(ids=ids, trained=_end_at_special(chat.tokenizer, ids, trained))


def _turn_span(
    chat: ChatFormat, messages: list[Message], number: int, *, text: str, where: str
) -> tuple[int, int]:
    """Characters [start, end) of `text` that assistant turn `number` added."""
    if number == 0:
        raise DataError(
            f"{where}: the conversation begins with the assistant; begin with a user turn",
            code="wrong-row",
            where=where,
        )
    before = chat.render(messages[:number], generate=False, where=where)
    header = chat.render(messages[:number], generate=True, where=where)
    start = _common_length(header, text)
    if text.startswith(before) and start >= len(before):
        through = chat.render(messages[: number + 1], generate=False, where=where)
        if text.startswith(through) and len(through) >= start:
            return start, len(through)
        # Templates such as Qwen3's render a turn otherwise once others follow (thinking is taken out): look
        # for its text.
        content = messages[number]["content"].strip()
        position = text.find(content, start) if content else -1
        following = [m["content"] for m in messages[number + 1 :]]
        if position >= 0 and (not following or text.find(following[0], position + len(content)) >= 0):
            return start, _after_special(chat.tokenizer, text, position + len(content))
    raise DataError(
        f"{where}: message {number} is not found in the rendered conversation, because the chat template "
        "rewrites earlier turns; use a template with {% generation %} around the assistant's text, or "
        "data.train_on = 'all'",
        code="unsupported-chat-template",
        where=where,
        turn=number,
    )


def _common_length(left: str, right: str) -> int:
    """Characters that two texts share at their beginning."""
    pairs = zip(left, right, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _after_special(tokenizer: Any, text: str, end: int) -> int:
    """`end`, moved past a special token that follows it."""
    return end + max((len(s) for s in _special_texts(tokenizer) if text.startswith(s, end)), default=0)


def _special_texts(tokenizer: Any) -> list[str]:
    added = tokenizer.added_tokens_decoder.values()
    return [token.content for token in added if token.special]


def _special_ids(tokenizer: Any) -> set[int]:
    added = tokenizer.added_tokens_decoder.items()
    return {number for number, token in added if token.special} | set(tokenizer.all_special_ids)


def _encode_spans(chat: ChatFormat, text: str, spans: list[tuple[int, int]]) -> tuple[list[int], list[bool]]:
    """(ids, whether each token lies within one of the character spans), `bos` in front as ChatFormat.encode
    puts it.

    A token across the border of a span is not in it: the policy, which is given the text before, could not
    write it.
    """
    check_text(text, "a text to be tokenised")
    encoded = chat.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids: list[int] = encoded["input_ids"]
    trained = [
        any(begin <= low < high <= end for begin, end in spans) for low, high in encoded["offset_mapping"]
    ]
    if ids[: len(chat.bos)] != chat.bos:
        ids, trained = [*chat.bos, *ids], [*(False for _ in chat.bos), *trained]
    return ids, trained


def _end_at_special(tokenizer: Any, ids: list[int], trained: list[bool]) -> list[bool]:
    """`trained` without the white space between a turn's last special token and the end of its span."""
    special = _special_ids(tokenizer)
    result = list(trained)
    end = len(ids)
    while end > 0:
        if not trained[end - 1]:
            end -= 1
            continue
        begin = end
        while begin > 0 and trained[begin - 1]:
            begin -= 1
        last = max((t for t in range(begin, end) if ids[t] in special), default=end - 1)
        if not tokenizer.decode(ids[last + 1 : end]).strip():
            result[last + 1 : end] = [False] * (end - last - 1)
        end = begin
    return result


def _ended(chat: ChatFormat, document: Document) -> Document:
    """The document, with a trained eos behind its last trained token, unless a special token ends it."""
    last = max((t for t, mark in enumerate(document.trained) if mark), default=None)
    if last is None:
        return document
    tokenizer, special = chat.tokenizer, _special_ids(chat.tokenizer)
    end = max((t for t in range(last + 1) if document.ids[t] in special), default=None)
    if end is not None and not tokenizer.decode(document.ids[end + 1 : last + 1]).strip():
        return document
    if tokenizer.eos_token_id is None:
        raise DataError(
            "the tokenizer has no eos token, so no document could end; set tokenizer.eos_token",
            code="no-tokenizer",
        )
    # Untrained white space that a template puts behind the turn would stand between the text and its end.
    ids, trained = document.ids[: last + 1], document.trained[: last + 1]
    return Document(ids=[*ids, tokenizer.eos_token_id], trained=[*trained, True])
