"""Special tokens as texts: where contents hold them, and ids in which they stay text.

A rendered conversation is one string, in which the `<|im_end|>` of a template and the one that a user or a
tool wrote look the same. To tell them apart, the conversation is rendered a second time, with a placeholder
for each text of the contents that is a special token or could become a part of one. Only conversations with
such a text take that second rendering.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from lockstep.errors import DataError

Places = tuple[tuple[int, int], ...]
"""Characters [start, end) of a text, in order, which are part of no special token."""


class SpecialText:
    """The special tokens of a tokenizer, as texts."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = weakref.ref(tokenizer)  # which is the key under which this is kept
        self.ids = special_ids(tokenizer)
        added = tokenizer.added_tokens_decoder
        self.by_text = {added[i].content: i for i in self.ids if i in added and added[i].content.strip()}
        longest_first = sorted(self.by_text, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._heads = {text[:n] for text in self.by_text for n in range(1, len(text))}
        self._tails = {text[-n:] for text in self.by_text for n in range(1, len(text))}
        self._longest = max(map(len, self.by_text), default=1) - 1
        ends = {end for text in self.by_text for end in (text[0], text[-1])}
        self._ends = re.compile(f"[{re.escape(''.join(sorted(ends)))}]" if ends else "(?!)")
        self._escaped = any(json.dumps(end, ensure_ascii=False) != f'"{end}"' for end in ends)
        """Whether JSON writes one of them otherwise."""

    def places(self, content: str) -> Places:
        """Return where a content holds a special token, and where the beginning or the end of one could be
        completed by what a template writes around the content."""
        # Most contents hold no such character, and millions of them are looked at.
        if self._ends.search(content) is None:
            return ()
        found = [match.span() for match in self.pattern.finditer(content)]
        first = min(found[0][0] if found else len(content), self._longest)
        last = max(found[-1][1] if found else 0, len(content) - self._longest)
        head = next((n for n in range(first, 0, -1) if content[:n] in self._tails), 0)
        tail = next((n for n in range(max(last, head), len(content)) if content[n:] in self._heads), None)
        return (
            *([(0, head)] if head else []),
            *found,
            *([(tail, len(content))] if tail is not None else []),
        )

    def hidden(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> tuple[list[Mapping[str, Any]], Mapping[str, Any], Hidden] | None:
        """Return messages and variables with placeholders for the texts at `places`, and what they stand for;
        None if there is no such text.

        A message of the assistant stays as it is: it is what a policy writes, special tokens included.
        """
        theirs = [each for each in messages if each.get("role") != "assistant"]
        if not self._may_hide([theirs, options]):
            return None
        hidden = Hidden()
        made = [each if each.get("role") == "assistant" else self._hidden(each, hidden) for each in messages]
        variables = self._hidden(options, hidden)
        return (made, variables, hidden) if hidden.texts else None

    def _may_hide(self, value: Any) -> bool:
        """Whether any text of a value could have `places`: a look at all of them at once."""
        return self._escaped or self._ends.search(json.dumps(value, ensure_ascii=False)) is not None

    def _hidden(self, value: Any, hidden: Hidden) -> Any:
        if isinstance(value, str):
            pieces, end = [], 0
            for start, stop in self.places(value):
                pieces += [value[end:start], hidden.placeholder(value[start:stop])]
                end = stop
            return "".join([*pieces, value[end:]]) if pieces else value
        if isinstance(value, Mapping):
            return {self._hidden(key, hidden): self._hidden(item, hidden) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self._hidden(item, hidden) for item in value]
        return value

    def encode(self, text: str, plain: Places) -> list[int]:
        """Return the ids of a text without special tokens around it, in which no special token has a part in
        `plain`. Everything else is as the tokenizer encodes it. An empty place makes no difference.

        Raises:
            DataError: the tokenizer cannot do that.
        """
        tokenizer: Any = self._tokenizer()
        if not plain:
            return whole_ids(tokenizer, [text])[0]
        if not tokenizer.is_fast:
            raise DataError(
                "unsupported-chat-template: a content holds the text of a special token, and this tokenizer "
                "(no fast one) would make it a token; leave the row out, or save a fast tokenizer with the "
                "model"
            )
        twin, names, numbers = self._twin
        written: list[str] = []
        count = 0
        for piece, is_plain in _pieces(text, plain):
            if not is_plain:
                # Not those of the unknown token, which also stands for characters that the tokenizer lacks.
                count += sum(self.by_text[each] != self._unknown for each in self.pattern.findall(piece))
                piece = self.pattern.sub(lambda match: names[match.group()], piece)
            written.append(piece)
        (of_twin,) = (
            each.ids for each in twin.encode_batch_fast(["".join(written)], add_special_tokens=False)
        )
        result = [numbers.get(i, i) for i in of_twin]
        if sum(i in self.ids and i != self._unknown for i in result) != count:
            held = {text[start:end] for start, end in plain}
            raise DataError(
                f"unsupported-chat-template: the tokenizer makes a special token of {sorted(held)}, which a "
                "content holds as text; leave the row out"
            )
        return result

    @cached_property
    def _unknown(self) -> int | None:
        return getattr(self._tokenizer(), "unk_token_id", None)

    @cached_property
    def _twin(self) -> tuple[Any, dict[str, str], dict[int, int]]:
        """The same tokenizer with secret names for its special tokens, which no content can hold; the names
        by text; and the tokenizer's ids of the twin's added tokens."""
        from tokenizers import AddedToken, Tokenizer

        tokenizer: Any = self._tokenizer()
        backend = tokenizer.backend_tokenizer
        twin = Tokenizer(backend.model)  # shared, not copied
        for part in ("normalizer", "pre_tokenizer"):
            if getattr(backend, part) is not None:
                setattr(twin, part, getattr(backend, part))
        nonce = secrets.token_hex(8)
        names = {text: f"<{nonce}:{i}>" for text, i in self.by_text.items()}
        own: dict[str, int] = {}
        for number, token in sorted(tokenizer.added_tokens_decoder.items()):
            name = names.get(token.content, token.content)
            own[name] = number
            flags = {flag: getattr(token, flag) for flag in ("single_word", "lstrip", "rstrip", "normalized")}
            twin.add_tokens([AddedToken(name, special=False, **flags)])
        numbers = {twin.token_to_id(name): number for name, number in own.items()}
        return twin, names, {i: number for i, number in numbers.items() if i is not None}


class Hidden:
    """Placeholders, and the texts that they stand for."""

    def __init__(self) -> None:
        self.mark = f"Zq{secrets.token_hex(8)}"
        self.texts: list[str] = []

    def placeholder(self, text: str) -> str:
        """Return a new placeholder. It is a word, so that no template changes it."""
        self.texts.append(text)
        return f"{self.mark}n{len(self.texts) - 1}z"

    def places(self, text: str, rendered: str) -> Places | None:
        """Return where the hidden texts are in `text`, the rendering of the contents; None if it differs from
        `rendered`, that of the placeholders, in anything else."""
        places, position = [], 0
        pieces = re.split(rf"{self.mark}n(\d+)z", rendered)
        for literal, number in itertools.zip_longest(pieces[::2], pieces[1::2]):
            if not text.startswith(literal, position):
                return None
            position += len(literal)
            if number is None:
                break
            hidden = self.texts[int(number)]
            form = next((form for form in _forms(hidden) if text.startswith(form, position)), None)
            if form is None:
                return None
            places.append((position, position + len(form)))
            position += len(form)
        return tuple(places) if position == len(text) else None


def _forms(text: str) -> Iterator[str]:
    """A text as a template may write it: as it is, or in JSON."""
    yield text
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield json.dumps(text)[1:-1]


def _pieces(text: str, plain: Places) -> Iterator[tuple[str, bool]]:
    """The texts between, and in, the plain places."""
    end = 0
    for start, stop in plain:
        yield text[end:start], False
        yield text[start:stop], True
        end = stop
    yield text[end:], False


def whole_ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Return the ids of each text as the tokenizer encodes it, without special tokens around it."""
    if not texts:
        return []
    if (backend := _bare_backend(tokenizer)) is not None:
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)
    ids: list[list[int]] = encoded["input_ids"]
    return ids


def _bare_backend(tokenizer: Any) -> Any:
    """The Rust tokenizer, where transformers would call it with nothing added, and without the offsets and
    masks that it would compute; else None."""
    if not _encodes_as_transformers(type(tokenizer).__mro__):
        return None
    backend = tokenizer.backend_tokenizer
    asked = (backend.truncation, backend.padding, backend.encode_special_tokens)
    return backend if asked == (None, None, bool(tokenizer.split_special_tokens)) else None


@lru_cache(maxsize=64)
def _encodes_as_transformers(classes: tuple[type, ...]) -> bool:
    """Return whether a tokenizer's classes take their call unchanged from transformers' fast tokenizers."""
    definers = (
        next((each.__module__ for each in classes if name in vars(each)), "")
        for name in ("__call__", "_encode_plus")
    )
    of_all, of_fast = "transformers.tokenization_utils_base", "transformers.tokenization_utils_tokenizers"
    return tuple(definers) == (of_all, of_fast)


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids of all special tokens."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset({number for number, token in added if token.special} | set(tokenizer.all_special_ids))


_known: weakref.WeakKeyDictionary[Any, tuple[int, SpecialText]] = weakref.WeakKeyDictionary()


def special_text(tokenizer: Any) -> SpecialText:
    """Return the special tokens of a tokenizer. They are found once, and again after tokens were added."""
    size, known = _known.get(tokenizer, (-1, None))
    if known is None or size != len(tokenizer):
        size, known = len(tokenizer), SpecialText(tokenizer)
        _known[tokenizer] = size, known
    return known


def within(plain: Places, begin: int, end: int) -> Places:
    """Return the places in text[begin:end], counted from its beginning."""
    return tuple(
        (max(start, begin) - begin, min(stop, end) - begin)
        for start, stop in plain
        if start < end and stop > begin
    )
