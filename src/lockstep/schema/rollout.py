"""Requests to an inference engine, its completions, and rollouts with their rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort"]
"""stop: an end-of-sequence token, a stop id or a stop string. length: max_tokens or the context ended."""

LogprobKind = Literal["temperature_scaled"]
"""The only kind that may be mixed with a trainer's: log_softmax(logits / temperature) in float32,
untruncated. At temperature 0 (greedy) the scale is 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to sample, every field explicit: no engine default and no generation_config is ever merged in."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1: off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    """Stop strings, matched in the decoded completion."""
    stop_token_ids: tuple[int, ...] = ()
    """Stop ids besides the end-of-sequence ids. A matched id stays in the completion, and so does an eos
    id."""
    keep_stop: bool = True
    """Whether the *text* keeps a matched stop string. Token ids always do: they are the policy's actions."""
    ignore_eos: bool = False
    logprob_kind: LogprobKind = "temperature_scaled"


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """One prompt, n samples. Token ids in; text is never re-tokenised between engine and trainer."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seeds: tuple[int, ...]
    """One 63-bit seed per sample; n = len(seeds). A sample's noise is a pure function of (seed, position)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One sample that an engine returned."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """Completion only, including the end-of-sequence or stop id that ended it."""
    logprobs: tuple[float, ...]
    """Nats, one per entry of token_ids, of the request's logprob_kind."""
    finish_reason: FinishReason
    stop_reason: int | str | None
    """The id or the string that ended it; None when finish_reason is not "stop"."""
    text: str | None
    """Decoded completion, special tokens skipped; None for a model without a tokenizer."""
    seed: int
    engine: str
    policy_version: int
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were not computed for this sample (shared with its group, or
    cached)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One row of a prompt set, rendered and tokenised."""

    index: int
    """Row number in its source: identifies the prompt across epochs and resumes."""
    token_ids: tuple[int, ...]
    text: str
    """The rendered prompt, chat template applied; for id-level sources a readable form of the ids."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The dataset row, for reward functions (answer, metadata, ...)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """A completion and its rewards."""

    completion: Completion
    reward: float
    """The total that the algorithm sees."""
    rewards: Mapping[str, float]
    """By reward name, before weights; shaping terms (overlong, kl) are listed too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutGroup:
    """All rollouts of one prompt in one step, in sample order."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
