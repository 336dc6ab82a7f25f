"""Samples of many prompts, and their rewards, batch by batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeGuard, get_args

from lockstep.common_errors import outside_vocabulary
from lockstep.config.batch import Column, GenerateConfig, ScoreConfig
from lockstep.data.prompts import PromptSet
from lockstep.data.rows import place
from lockstep.data.tables import column_names
from lockstep.errors import ConfigError, DataError
from lockstep.models.reward import RewardModel
from lockstep.protocols.engine import InferenceEngine
from lockstep.protocols.reward import RewardInput
from lockstep.rollout.environment import Environment, TrajectoryRules
from lockstep.rollout.episodes import at_once, run_episodes
from lockstep.rollout.reward_functions import decoded, encoded
from lockstep.rollout.reward_models import MODEL
from lockstep.rollout.rewards import RewardSet
from lockstep.rollout.rows import Key, RowFile
from lockstep.rollout.sampler import sample_seed
from lockstep.schema.rollout import FinishReason, Prompt, SamplingParams, Trajectory

# Rewards for rows of samples: functions and verifiers as in training, or a reward model.
#
# Rows are scored a window at a time, in order. A window that a crash cut short is scored again as a whole,
# and only missing rows are added: a reward model's rounding depends on the rest of the batch.


_KEY = ("index", "sample")


@dataclass(frozen=True, kw_only=True, slots=True)
class ToScore:
    """One sample and its row."""

    row: Mapping[str, Any]
    """The row, to be written with a reward."""
    prompt: Any
    """Text or messages."""
    reward_input: RewardInput
    where: str


@dataclass(kw_only=True, slots=True)
class ScoreTotals:
    """Totals over the rows that this call added."""

    rows: int = 0
    failed: int = 0
    """Rows whose reward failed under on_error = "drop"; their reward is null."""
    truncated: int = 0
    sum: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, kw_only=True, slots=True)
class Judges:
    """The sources of rewards; at least one of the two."""

    rewards: RewardSet | None
    model: RewardModel | None
    model_weight: float = 1.0

    def close(self) -> None:
        """End the verifiers' process."""
        if self.rewards is not None:
            self.rewards.close()


def samples(rows: Iterable[Mapping[str, Any]], source: str) -> Iterator[ToScore]:
    """Yield the samples of rows of `lockstep generate` or any other: they need `prompt` (text or messages)
    and `completion`. Rows without `index` and `sample` are numbered by their prompts, in order.

    Raises:
        DataError: a column is missing or of the wrong kind, or a sample occurs twice.
    """
    numbers: dict[str, int] = {}
    counts: Counter[int] = Counter()
    seen: set[tuple[int, int]] = set()
    for position, row in enumerate(rows):
        where = place(row, source, position)
        prompt, completion = _texts(row, where)
        index, sample = row.get("index"), row.get("sample")
        if index is None:
            index = numbers.setdefault(repr(prompt), len(numbers))
        if sample is None and type(index) is int:
            sample = counts[index]
            counts[index] += 1
        if not _is_number(index) or not _is_number(sample) or (index, sample) in seen:
            raise DataError(
                f"wrong-row: {where}: index = {index!r} and sample = {sample!r} must be whole numbers, and "
                "their combination must be unique; correct them, or leave both columns out"
            )
        seen.add((index, sample))
        data = decoded(row["row"], where) if isinstance(row.get("row"), dict) else row
        yield ToScore(
            row={"index": index, "sample": sample, **{k: v for k, v in row.items() if k not in _KEY}},
            prompt=prompt,
            where=where,
            reward_input=RewardInput(
                prompt=str(row.get("prompt_text") or (prompt if isinstance(prompt, str) else "")),
                completion=completion,
                row=data,
                prompt_token_ids=_ids(row, "prompt_token_ids", where),
                completion_token_ids=_ids(row, "token_ids", where),
                finish_reason=_finish_reason(row, where),
                index=index,
                where=where,
                seed=row["seed"] if _is_number(row.get("seed")) else sample_seed(0, 0, index, sample),
            ),
        )


def _is_number(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 2**63


def _ids(row: Mapping[str, Any], name: str, where: str) -> tuple[int, ...]:
    ids = row.get(name)
    if ids is None:
        return ()
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise DataError(f"wrong-row: {where}: {name} must be a list of token ids, got {str(ids)[:80]!r}")
    return tuple(ids)


def _finish_reason(row: Mapping[str, Any], where: str) -> Any:
    reason = row.get("finish_reason") or "stop"
    if reason not in get_args(FinishReason):
        known = " or ".join(get_args(FinishReason))
        raise DataError(f"wrong-row: {where}: finish_reason must be {known}, got {str(reason)[:80]!r}")
    return reason


def _texts(row: Mapping[str, Any], where: str) -> tuple[Any, str]:
    for name in ("prompt", "completion"):
        if name not in row:
            raise DataError(
                f"missing-column: {where} has no column {name!r}; columns: {column_names(row)}. Rows "
                "written by `lockstep generate` have it; in other files, rename the column"
            )
    prompt, completion = row["prompt"], row["completion"]
    if completion is None and row.get("token_ids") is not None:
        completion = ""  # of a model without a tokenizer
    if not isinstance(completion, str) or not isinstance(prompt, str | list) or not prompt:
        raise DataError(
            f"wrong-row: {where}: prompt must be text or messages, and completion must be text; got "
            f"{str(prompt)[:60]!r} and {str(completion)[:60]!r}"
        )
    return prompt, completion


def check_columns(config: ScoreConfig, first: ToScore) -> None:
    """Raise ConfigError if the rows lack a column that a reward needs."""
    for reward in config.rewards:
        if reward.name in ("ids", "length") and "token_ids" not in first.row:
            raise ConfigError(
                f"missing-column: reward {reward.name!r} needs token ids, but the rows have no column "
                "token_ids; keep that column when sampling (lockstep generate --columns token_ids)"
            )
    if config.reward_model is not None and first.row["completion"] is None:
        raise ConfigError(
            "no-tokenizer: a reward model reads text, but the rows have no text because their model has no "
            "tokenizer; use --reward ids or length"
        )


def score_rows(
    items: Iterable[ToScore], judges: Judges, *, window: int, sink: RowFile, hooks: Hooks
) -> ScoreTotals:
    """Write every row that `sink` lacks, with `reward` and `rewards` added.

    Raises:
        RewardError: a reward failed under on_error = "fail". Rows written before stay.
        DataError: a row cannot be scored or written.
    """
    totals = ScoreTotals()
    source = iter(items)
    while chunk := list(islice(source, window)):
        missing = {_key(item) for item in chunk} - sink.done
        if not missing or hooks.cancelled():
            continue
        rewards = judge(chunk, judges, totals)
        rows = []
        for item, (total, by_name) in zip(chunk, rewards, strict=True):
            if _key(item) in missing:
                rows.append({**item.row, "reward": total, "rewards": by_name})
                totals.rows += 1
                totals.failed += total is None
                totals.sum += total or 0.0
        sink.append(rows)
        sink.sync()
        hooks.on_row(len(sink.done), sink.expected)
    return totals


def judge(
    items: Sequence[ToScore], judges: Judges, totals: ScoreTotals
) -> list[tuple[float | None, Mapping[str, float] | None]]:
    """Return (total, by name) for each sample; None where a reward failed under on_error = "drop"."""
    scores: list[tuple[float | None, Mapping[str, float] | None]] = [(0.0, {})] * len(items)
    if judges.rewards is not None:
        scored = judges.rewards.score([item.reward_input for item in items])
        totals.counts.update(judges.rewards.pop_counts())
        scores = [(None, None) if s is None else (s.total, s.by_name) for s in scored]
    if judges.model is not None:
        documents = [
            judges.model.document(i.prompt, i.reward_input.completion, i.where, row=i.row) for i in items
        ]
        totals.truncated += sum(document.truncated for document in documents)
        logits = judges.model.score(documents)
        scores = [
            (total, by_name)
            if total is None or by_name is None
            else (total + judges.model_weight * logit, {**by_name, MODEL: logit})
            for (total, by_name), logit in zip(scores, logits, strict=True)
        ]
    return scores


def _key(item: ToScore) -> tuple[int, int]:
    return item.row["index"], item.row["sample"]


# Sample many prompts into a file, a rollout batch at a time.
#
# prompts ──► batches ──► run_episodes ──►    a row as soon as its sample is finished ──► RowFile
#                ▲                                                                            │
#                └── a batch with missing rows is sampled again, as a whole ◄────────── crash ┘
#
# A sample's noise depends on its seed alone, but its rounding may depend on the rest of its batch. So a
# batch that a crash cut short is sampled again in full, and only missing rows are added: the file is that of
# an uninterrupted run. An engine whose samples do not depend on their batch only samples the missing ones.


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
    """The prompt before its chat template, for SFT to render."""
    whole_batches: bool
    """Whether rounding in a sample depends on its batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hooks:
    """Callbacks for progress and cancellation."""

    on_row: Callable[[int, int], None] = lambda done, expected: None
    """Called with (rows in the file, rows of the whole file)."""
    cancelled: Callable[[], bool] = lambda: False
    """Called before every batch; an engine's abort ends only what is running."""


@dataclass(kw_only=True, slots=True)
class Totals:
    """Totals over the rows that this call added."""

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
                f"has only {prompts.size} prompts; set rollout_batch_size to at most {prompts.size}"
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
            raise DataError(f"empty: {where}: the prompt is empty; add its text, or leave the row out")
        outside = [i for i in prompt.token_ids if not 0 <= i < vocab_size]
        if outside:
            fix = "the prompt was tokenized for another model"
            raise outside_vocabulary(DataError, where, outside[0], vocab_size, fix=fix)
        length = len(prompt.token_ids) + max_tokens
        if length > context:
            raise DataError(
                f"too-long: {where}: the prompt's {len(prompt.token_ids)} tokens plus sampling.max_tokens = "
                f"{max_tokens} exceed the context of {context} tokens; lower sampling.max_tokens, or leave "
                "long prompts out (data.max_prompt_tokens with data.overlong_prompts = 'drop'). The prompt "
                f"begins with {text[:60]!r}"
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

    def run(self) -> bool:
        """Sample the batch, and write each row as soon as its sample has ended; returns whether it was
        aborted before all were. Raises DataError, EngineError: what was written before stays."""
        step, seed, batch = self.work.step, self.work.seed, self.prompts_and_samples
        run_episodes(
            self.engine,
            Environment(),
            at_once(
                [
                    (prompt, [sample_seed(seed, step, prompt.index, i) for i in samples])
                    for prompt, samples in batch
                ]
            ),
            rules=TrajectoryRules.of(self.work.sampling),
            on_end=self._write,
        )
        return bool(self.missing)

    def _write(self, number: int, position: int, trajectory: Trajectory) -> None:
        prompt, samples = self.prompts_and_samples[number]
        key = (prompt.index, samples[position])
        if trajectory.finish_reason == "abort" or key not in self.missing:
            return
        self.sink.append([sample_row(prompt, key[1], trajectory, self.work)])
        self.missing.discard(key)
        self.totals.rows += 1
        self.totals.tokens += trajectory.policy_tokens
        self.totals.finish_reasons[trajectory.finish_reason] += 1
        self.hooks.on_row(len(self.sink.done), self.sink.expected)


def sample_row(prompt: Prompt, sample: int, trajectory: Trajectory, work: SampleWork) -> dict[str, Any]:
    """Return the row of a sample.

    index, sample      name the row
    prompt             before the chat template: text, or messages; SFT trains on prompt and completion
    completion         text; null for a model without a tokenizer
    finish_reason, stop_reason, seed
    prompt_text        the rendered prompt
    row                all columns of the data, for rewards
    and work.columns
    """
    prompt_ids = trajectory.prompt_token_ids
    numbers: dict[str, list[int] | list[float]] = {
        "prompt_token_ids": list(prompt_ids),
        "token_ids": list(trajectory.token_ids[len(prompt_ids) :]),
        "logprobs": [logprob for span in trajectory.spans for logprob in span.logprobs],
    }
    return {
        "index": prompt.index,
        "sample": sample,
        "prompt": work.conversation(prompt),
        "completion": trajectory.text,
        "finish_reason": trajectory.finish_reason,
        "stop_reason": trajectory.stop_reason,
        "seed": trajectory.seed,
        **{name: numbers[name] for name in work.columns},
        "prompt_text": prompt.text,
        "row": encoded(dict(prompt.row), prompt.where),
    }
