"""Stop strings, and the text of a completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.errors import EngineError


class StopStrings:
    """Looks for stop strings in the text of one growing completion.

    Text is decoded a few tokens at a time: a token may be part of a character or change the space before it,
    so each new piece is the difference of two decodings that start at the same earlier token. Only the tail
    that could hold the beginning of a stop string is searched again.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._keep = max(len(s) for s in stop) - 1
        self._tail = ""
        self._start = 0
        self._read = 0

    def find(self, token_ids: Sequence[int]) -> str | None:
        """Find the stop string that starts first in the text of `token_ids`; None if there is none.

        Call it with the completion so far, which must grow from call to call.
        """
        before = decode(self._tokenizer, token_ids[self._start : self._read])
        after = decode(self._tokenizer, token_ids[self._start :])
        if after.endswith("\ufffd"):  # an incomplete character: wait for the rest of its bytes
            new = ""
        else:
            new = after[len(before) :]
            self._start, self._read = self._read, len(token_ids)
        text = self._tail + new
        matches = [(text.find(s), s) for s in self._stop if s in text]
        self._tail = text[-self._keep :] if self._keep else ""
        return min(matches)[1] if matches else None


def decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Text of token ids, special tokens skipped, spaces left as they are."""
    return str(
        tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )


def completion_text(
    tokenizer: Any | None, token_ids: Sequence[int], *, stop: str | None, keep: bool
) -> str | None:
    """The decoded completion, cut at the stop string that ended it (after it when `keep`)."""
    if tokenizer is None:
        return None
    text = decode(tokenizer, token_ids)
    if stop is None:
        return text
    at = text.find(stop)
    return text if at < 0 else text[: at + len(stop) if keep else at]


def check_stop_strings(tokenizer: Any | None, stop: Sequence[str]) -> None:
    """Raises EngineError for stop strings that could never be found."""
    if not stop:
        return
    if tokenizer is None:
        raise EngineError(
            f"sampling.stop = {list(stop)!r} needs a tokenizer and this model has none; set "
            f"sampling.stop_token_ids"
        )
    for text in stop:
        if not text:
            raise EngineError("sampling.stop holds an empty string, which would end every sample; remove it")
        if text in tokenizer.all_special_tokens:
            raise EngineError(
                f"sampling.stop holds the special token {text!r}, and special tokens are not part of the "
                f"text; set sampling.stop_token_ids = [{tokenizer.convert_tokens_to_ids(text)}]"
            )
