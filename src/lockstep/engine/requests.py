"""Checks of generation requests, before anything is computed; stop strings, and the text of a completion."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.errors import EngineError
from lockstep.schema.rollout import GenerationRequest, SamplingParams

_REMEMBERED = 64


class RequestCheck:
    """Checks requests against what a model can take. May be called from any thread."""

    def __init__(
        self, *, vocab_size: int, max_positions: int, tokenizer: Any | None, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._vocab_size, self._max_positions, self._tokenizer = vocab_size, max_positions, tokenizer
        self._eos_token_ids = eos_token_ids
        self._good: tuple[SamplingParams, ...] = ()
        """Settings that were checked: the requests of a run have few different ones."""

    def __call__(self, request: GenerationRequest, *, index: int) -> None:
        """Raises EngineError naming the request, the value and what to change."""
        ids, sampling, vocab_size = request.prompt_token_ids, request.sampling, self._vocab_size
        if not ids:
            raise EngineError(
                f"empty: request {index} has an empty prompt; give it at least one token, such as the bos id",
                request=index,
            )
        if len(ids) >= self._max_positions:
            raise EngineError(
                f"too-long: request {index}: a prompt of {len(ids)} tokens leaves no room in the model's "
                f"{self._max_positions} positions (max_position_embeddings); lower data.max_prompt_tokens",
                request=index,
                limit=self._max_positions,
            )
        low, high = min(ids), max(ids)
        if low < 0 or high >= vocab_size:
            raise EngineError(
                f"outside-vocabulary: request {index}: token id {low if low < 0 else high} is outside the "
                f"vocabulary of {vocab_size} entries; the prompt was made with another tokenizer",
                request=index,
                token=low if low < 0 else high,
            )
        if sampling not in self._good:
            _check_sampling(sampling, vocab_size=vocab_size)
            check_stop_strings(self._tokenizer, sampling, eos_token_ids=self._eos_token_ids)
            self._good = (*self._good[1 - _REMEMBERED :], sampling)
        for seed in request.seeds:
            if not 0 <= seed < 1 << 63:
                raise EngineError(
                    f"out-of-range: request {index}: seed {seed} is not a 63-bit unsigned integer",
                    name="seed",
                    request=index,
                )


def _check_sampling(p: SamplingParams, *, vocab_size: int) -> None:
    wrong = [
        (p.max_tokens < 1, f"max_tokens = {p.max_tokens} must be at least 1"),
        (
            not 0 <= p.min_tokens <= p.max_tokens,
            f"min_tokens = {p.min_tokens} must be in 0..max_tokens = {p.max_tokens}",
        ),
        (not p.temperature >= 0.0, f"temperature = {p.temperature} must be 0 (greedy) or positive"),
        (not 0.0 < p.top_p <= 1.0, f"top_p = {p.top_p} must be in (0, 1]"),
        (p.top_k == 0 or p.top_k < -1, f"top_k = {p.top_k} must be positive, or -1 for off"),
        (not 0.0 <= p.min_p <= 1.0, f"min_p = {p.min_p} must be in [0, 1]"),
        (not p.repetition_penalty > 0.0, f"repetition_penalty = {p.repetition_penalty} must be positive"),
        (
            p.logprob_kind != "temperature_scaled",
            f"logprob_kind = {p.logprob_kind!r} is not 'temperature_scaled'",
        ),
        (
            any(not 0 <= i < vocab_size for i in p.stop_token_ids),
            f"stop_token_ids = {p.stop_token_ids} has an id outside the vocabulary of {vocab_size} entries",
        ),
    ]
    for failed, message in wrong:
        if failed:
            raise EngineError(f"out-of-range: sampling: {message}", setting=f"sampling.{message.split()[0]}")


def check_stop_strings(
    tokenizer: Any | None, sampling: SamplingParams, *, eos_token_ids: Iterable[int]
) -> None:
    """Raises EngineError for stop strings that could never be found."""
    stop = sampling.stop
    if not stop:
        return
    if tokenizer is None:
        raise EngineError(
            f"no-tokenizer: sampling.stop = {list(stop)!r} needs a tokenizer and this model has none; set "
            "sampling.stop_token_ids"
        )
    ends = set(tokenizer.convert_ids_to_tokens(sorted(eos_token_ids)))
    skipped = set(_special_tokens(tokenizer).values()) if sampling.skip_special_tokens else set()
    for text in stop:
        if not text:
            raise EngineError(
                "empty: sampling.stop holds an empty string, which would end every sample; remove it",
                setting="sampling.stop",
            )
        if text in ends:
            raise EngineError(
                f"unsupported-combination: sampling.stop holds the end-of-sequence token {text!r}, which is "
                "not part of the text and ends a completion by itself; remove it",
                setting="sampling.stop",
            )
        if text in skipped:
            raise EngineError(
                f"unsupported-combination: sampling.stop holds the special token {text!r}, which "
                "sampling.skip_special_tokens = true leaves out of the text; set "
                "sampling.skip_special_tokens = false, or sampling.stop_token_ids = "
                f"[{tokenizer.convert_tokens_to_ids(text)}]",
                setting="sampling.stop",
            )


class StopStrings:
    """Looks for stop strings in the text of one growing completion.

    Text is decoded a few tokens at a time: a token may be part of a character or change the space before it,
    so each new piece is the difference of two decodings that start at the same earlier token. Only the tail
    that could hold the beginning of a stop string is searched again.
    """

    def __init__(self, decoding: Decoding, stop: Sequence[str]) -> None:
        self._decoding = decoding
        self._stop = tuple(stop)
        self._keep = max(len(s) for s in stop) - 1
        self._tail = ""
        self._start = 0
        self._read = 0

    def find(self, token_ids: Sequence[int]) -> str | None:
        """Find the stop string that starts first in the text of `token_ids`; None if there is none.

        Call it with the completion so far, which must grow from call to call.
        """
        before = self._decoding(token_ids[self._start : self._read])
        after = self._decoding(token_ids[self._start :])
        if after.endswith("\ufffd"):  # an incomplete character: wait for the rest of its bytes
            new = ""
        else:
            new = after[len(before) :]
            self._start, self._read = self._read, len(token_ids)
        text = self._tail + new
        matches = [(text.find(s), s) for s in self._stop if s in text]
        self._tail = text[-self._keep :] if self._keep else ""
        return min(matches)[1] if matches else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoding:
    """From the token ids of a completion to the text that rewards, stop strings and files get.

    The text is what the policy wrote, without the tokens that say where it ends: every end-of-sequence id is
    left out, wherever it stands, and so is a stop id that ends a turn in the tokenizer's chat template, such
    as the id of <|im_end|> in a base model whose end of sequence is <|endoftext|>. Other special tokens stay
    unless `skip_special_tokens`; pads too, as a completion has no pads but those that were sampled.
    """

    tokenizer: Any
    end_ids: frozenset[int]
    skip_special_tokens: bool

    @classmethod
    def of(cls, tokenizer: Any, sampling: SamplingParams, *, eos_token_ids: Iterable[int]) -> Decoding:
        """Return the decoding of completions sampled with `sampling`."""
        return cls(
            tokenizer=tokenizer,
            end_ids=frozenset((*eos_token_ids, *_turn_ends(tokenizer, sampling.stop_token_ids))),
            skip_special_tokens=sampling.skip_special_tokens,
        )

    def __call__(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, spaces left as they are."""
        return str(
            self.tokenizer.decode(
                [i for i in token_ids if i not in self.end_ids],
                skip_special_tokens=self.skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        )


def _turn_ends(tokenizer: Any, stop_token_ids: Sequence[int]) -> list[int]:
    """The stop ids that are special tokens of the chat template."""
    if not stop_token_ids or not tokenizer.chat_template:
        return []
    special, template = _special_tokens(tokenizer), str(tokenizer.chat_template)
    return [i for i in stop_token_ids if i in special and special[i] in template]


def _special_tokens(tokenizer: Any) -> dict[int, str]:
    """Those that decoding skips, by id; `all_special_tokens` has only those with a role, such as eos."""
    added = tokenizer.added_tokens_decoder.items()
    return {number: token.content for number, token in added if token.special}


def completion_text(
    decoding: Decoding | None, token_ids: Sequence[int], *, stop: str | None, keep: bool
) -> str | None:
    """The decoded completion, cut at the stop string that ended it (after it when `keep`)."""
    if decoding is None:
        return None
    text = decoding(token_ids)
    if stop is None:
        return text
    at = text.find(stop)
    return text if at < 0 else text[: at + len(stop) if keep else at]
