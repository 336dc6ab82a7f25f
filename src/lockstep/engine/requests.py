"""Checks of generation requests, before anything is computed."""

from __future__ import annotations

from typing import Any

from lockstep.engine.stop import check_stop_strings
from lockstep.errors import EngineError
from lockstep.schema.rollout import GenerationRequest, SamplingParams

_REMEMBERED = 64


class RequestCheck:
    """Checks requests against what a model can take. May be called from any thread."""

    def __init__(self, *, vocab_size: int, max_positions: int, tokenizer: Any | None) -> None:
        self._vocab_size, self._max_positions, self._tokenizer = vocab_size, max_positions, tokenizer
        self._good: tuple[SamplingParams, ...] = ()
        """Settings that were checked: requests come in hundreds with the same."""

    def __call__(self, request: GenerationRequest, *, index: int) -> None:
        """Raises EngineError naming the request, the value and what to change."""
        vocab_size, sampling = self._vocab_size, request.sampling
        _check_prompt(
            index, request.prompt_token_ids, vocab_size=vocab_size, max_positions=self._max_positions
        )
        if not any(sampling is good for good in self._good):
            _check_sampling(sampling, vocab_size=vocab_size)
            check_stop_strings(self._tokenizer, sampling.stop)
            self._good = (*self._good[1 - _REMEMBERED :], sampling)
        for seed in request.seeds:
            if not 0 <= seed < 1 << 63:
                raise EngineError(f"request {index}: seed {seed} is not a 63-bit unsigned integer")


def _check_prompt(index: int, ids: tuple[int, ...], *, vocab_size: int, max_positions: int) -> None:
    if not ids:
        raise EngineError(
            f"request {index} has an empty prompt; give it at least one token, such as the bos id"
        )
    if len(ids) >= max_positions:
        raise EngineError(
            f"request {index}: a prompt of {len(ids)} tokens leaves no room in the model's {max_positions} "
            "positions (max_position_embeddings); lower data.max_prompt_tokens"
        )
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        raise EngineError(
            f"request {index}: token id {low if low < 0 else high} is outside the vocabulary of {vocab_size} "
            "entries; the prompt was made with another tokenizer"
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
            raise EngineError(f"sampling: {message}")
