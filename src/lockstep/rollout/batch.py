"""Sample many prompts into a file, a rollout batch at a time.

prompts ──► batches ──► engine.generate ──► a row as soon as its sample is finished ──► RowFile
               ▲                                                                            │
               └── a batch with missing rows is sampled again, as a whole ◄────────── crash ┘

A sample's noise depends on its seed alone, but its rounding may depend on the rest of its batch. So a batch
that a crash cut short is sampled again in full, and only missing rows are added: the file is that of an
uninterrupted run. An engine whose samples do not depend on their batch only samples the missing ones.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.config.batch import Column, GenerateConfig
from lockstep.data.prompts import PromptSet
from lockstep.errors import ConfigError, DataError, EngineError
from lockstep.protocols.engine import InferenceEngine
from lockstep.rollout.row_values import encoded
from lockstep.rollout.rows import Key, RowFile
from lockstep.rollout.sampler import check_completion, sample_seed
from lockstep.schema.rollout import Completion, GenerationRequest, Prompt, SamplingParams

ALL_PROMPTS_STEP = -4
"""Used in place of the step in seeds, less i + 1 for iteration i, so that no rollout of a run is repeated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleWork:
    """How each prompt is sampled, and which columns are kept."""

    sampling: SamplingParams
    n: int
    seed: int
    step: int
    columns: tuple[Column, ...]
    conversation: Callable[[Prompt], Any]
    """The prompt before its chat template, which SFT renders again."""
    whole_batches: bool
    """Whether a sample's rounding depends on its batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hooks:
    """Callbacks by which a caller follows and stops the work."""

    on_row: Callable[[int, int], None] = lambda done, expected: None
    """Called with (rows in the file, rows of the whole file)."""
    cancelled: Callable[[], bool] = lambda: False
    """Called before every batch; an engine's abort ends only what is running."""


@dataclass(kw_only=True, slots=True)
class Totals:
    """Totals of the rows that this call added."""

    rows: int = 0
    tokens: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)


def prompt_batches(prompts: PromptSet, config: GenerateConfig) -> list[list[Prompt]]:
    """Return the prompts to sample in batches of rollout_batch_size: all, or batch number `iteration`.

    Raises:
        ConfigError: a rollout batch is larger than the data.
    """
    size = config.rollout_batch_size
    if config.iteration is not None:
        if prompts.size is not None and prompts.size < size:
            raise ConfigError(
                f"not-enough: rollout_batch_size = {size} with iteration = {config.iteration}, but the data "
                f"has only {prompts.size} prompts; set rollout_batch_size to at most that",
                setting="rollout_batch_size",
            )
        return [prompts.batch(config.iteration, size, config.seed)]
    limits = [number for number in (config.max_samples, prompts.size) if number is not None]
    if prompts.size is None:
        first = prompts.batch(0, min(limits), config.seed)
    else:
        first = prompts.batch(0, prompts.size, config.seed)[: min(limits)]
    return [first[start : start + size] for start in range(0, len(first), size)]


def check_prompts(
    batches: Sequence[Sequence[Prompt]], *, vocab_size: int, context: int, max_tokens: int
) -> int:
    """Check the prompts, and return the longest prompt and completion together, in tokens.

    Raises:
        DataError: a prompt is blank, has ids that the model does not know, or does not fit its context.
    """
    longest = 0
    for prompt in (prompt for batch in batches for prompt in batch):
        where = prompt.where
        text = str(prompt.row.get("problem", prompt.text))
        if not prompt.token_ids or not text.strip():
            raise DataError(f"empty: {where}: the prompt is empty; fill it, or leave the row out")
        outside = [i for i in prompt.token_ids if not 0 <= i < vocab_size]
        if outside:
            raise DataError(
                f"outside-vocabulary: {where}: token id {outside[0]} is outside the vocabulary of "
                f"{vocab_size} entries; the prompt was made for another model",
                where=where,
                token=outside[0],
            )
        length = len(prompt.token_ids) + max_tokens
        if length > context:
            raise DataError(
                f"too-long: {where}: the prompt has {len(prompt.token_ids)} tokens and sampling.max_tokens = "
                f"{max_tokens}, together more than the context of {context} tokens; lower "
                "sampling.max_tokens, or leave long prompts out (data.max_prompt_tokens with "
                f"data.overlong_prompts = 'drop'). It begins with {text[:60]!r}"
            )
        longest = max(longest, length)
    return longest


def generate_rows(
    engine: InferenceEngine,
    batches: Sequence[Sequence[Prompt]],
    work: SampleWork,
    *,
    sink: RowFile,
    hooks: Hooks,
) -> Totals:
    """Sample the rows that `sink` lacks. Returns early, with rows missing, when `hooks.cancelled` or when the
    engine was aborted.

    Raises:
        EngineError: from the engine, or when it returns other samples than requested.
        DataError: a row cannot be written. What was written before stays, in either case.
    """
    totals = Totals()
    for batch in batches:
        missing = {(p.index, i) for p in batch for i in range(work.n)} - sink.done
        if missing and not hooks.cancelled():
            prompts_and_samples = [
                (p, tuple(i for i in range(work.n) if (p.index, i) in missing)) for p in batch
            ]
            if work.whole_batches:
                prompts_and_samples = [(p, tuple(range(work.n))) for p in batch]
            call = _BatchCall(
                engine=engine,
                work=work,
                prompts_and_samples=[(prompt, samples) for prompt, samples in prompts_and_samples if samples],
                missing=missing,
                sink=sink,
                totals=totals,
                hooks=hooks,
            )
            aborted = call.run()
            sink.sync()
            if aborted:
                break
    return totals


@dataclass(kw_only=True)
class _BatchCall:
    """One rollout batch in the engine."""

    engine: InferenceEngine
    work: SampleWork
    prompts_and_samples: Sequence[tuple[Prompt, tuple[int, ...]]]
    """Prompts with the numbers of their samples."""
    missing: set[Key]
    """Rows to write; other samples only fill the batch."""
    sink: RowFile
    totals: Totals
    hooks: Hooks

    def __post_init__(self) -> None:
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        self._requests = [
            GenerationRequest(
                prompt_token_ids=prompt.token_ids,
                sampling=self.work.sampling,
                seeds=tuple(sample_seed(self.work.seed, self.work.step, prompt.index, i) for i in samples),
            )
            for prompt, samples in self.prompts_and_samples
        ]

    def run(self) -> bool:
        """Sample the batch; returns whether it was aborted before all samples were finished."""
        requests = self._requests
        groups = self.engine.generate(requests, on_completion=self._finished)
        if self._failure is not None:
            raise self._failure
        if [len(group) for group in groups] != [len(request.seeds) for request in requests]:
            raise EngineError(
                f"wrong-result: the engine returned {len(groups)} groups of other sizes than were asked for",
                name="groups",
            )
        for number, group in enumerate(groups):
            for position, completion in enumerate(group):
                self._finished(number, position, completion)  # of an engine that did not call it
        if self._failure is not None:
            raise self._failure
        aborted = any(c.finish_reason == "abort" for group in groups for c in group)
        if self.missing and not aborted:
            raise EngineError(
                f"wrong-result: the engine did not return samples {sorted(self.missing)[:5]}", name="samples"
            )
        return bool(self.missing)

    def _finished(self, number: int, position: int, completion: Completion) -> None:
        """Write the row. An error must not be lost in an engine's thread, so it ends the batch."""
        prompt, samples = self.prompts_and_samples[number]
        with self._lock:
            if self._failure is not None or completion.finish_reason == "abort":
                return
            try:
                self._check(number, position, completion)
                key = (prompt.index, samples[position])
                if key not in self.missing:
                    return
                self.sink.append([sample_row(prompt, key[1], completion, self.work)])
            except (DataError, EngineError) as error:
                self._failure = error
                self.engine.abort()
                return
            self.missing.discard(key)
            self.totals.rows += 1
            self.totals.tokens += len(completion.token_ids)
            self.totals.finish_reasons[completion.finish_reason] += 1
            self.hooks.on_row(len(self.sink.done), self.sink.expected)

    def _check(self, number: int, position: int, completion: Completion) -> None:
        """Check a completion: a mix-up would put an answer under another question."""
        request = self._requests[number]
        check_completion(number, request, completion)
        if completion.seed != request.seeds[position]:
            raise EngineError(
                f"wrong-result: request {number}: the engine returned another sample than was asked for",
                name="seed",
            )


def sample_row(prompt: Prompt, sample: int, completion: Completion, work: SampleWork) -> dict[str, Any]:
    """Return the row of a sample.

    index, sample      name the row
    prompt             before the chat template: text, or messages; SFT trains on prompt and completion
    completion         text; null for a model without a tokenizer
    finish_reason, stop_reason, seed
    prompt_text        the rendered prompt
    row                all columns of the data, for rewards
    and work.columns
    """
    numbers: dict[str, list[int] | list[float]] = {
        "prompt_token_ids": list(completion.prompt_token_ids),
        "token_ids": list(completion.token_ids),
        "logprobs": list(completion.logprobs),
    }
    return {
        "index": prompt.index,
        "sample": sample,
        "prompt": work.conversation(prompt),
        "completion": completion.text,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "seed": completion.seed,
        **{name: numbers[name] for name in work.columns},
        "prompt_text": prompt.text,
        "row": encoded(dict(prompt.row), prompt.where),
    }
