"""The job of one engine of `lockstep parity engines`, and the files that it leaves behind.

A job is a JSON file; `python -m lockstep_lab.engine_parity.worker JOB.json` makes the engine and writes into
its folder:

    rows.jsonl     one line per completion (Row), the trainer's logprobs beside the engine's
    passes.jsonl   one line per call of generate (Pass)
    result.json    Outcome: status, reason, seconds, versions
    engine/        what a started server writes

A *phase* is what the engine was asked under one version of the weights; a *pass* is one call of `generate`:

    greedy    every prompt at temperature 0                          same tokens as the reference?
    stop      some prompts again, with a stop id from their greedy completion
    sampled   every prompt, n samples
    again     the very same requests                                 same seeds, same samples?
    alone     some samples of `sampled`, one request at a time       alone as in a batch?
    other     some prompts with other seeds                          other samples?
"""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveFloat

from lockstep.config.base import PositiveInt, Record, Seconds, Seed
from lockstep.config.engine import EngineConfig
from lockstep.config.model import ModelConfig
from lockstep_lab.suite.job_files import Job, WorkerOutcome

ROWS, PASSES = "rows.jsonl", "passes.jsonl"

Phase = Literal["before", "after"]
Kind = Literal["greedy", "stop", "sampled", "again", "alone", "other"]
Weights = Literal["pushed", "folder"]


class EnginesSettings(Record):
    """What the comparison of all engines is asked for, and the worker of one is told."""

    model: ModelConfig
    """Its dtype is one of a device, not "auto"."""
    device: Literal["cpu", "cuda"] = "cpu"
    attention: str = "auto"
    """The trainer's."""
    temperature: PositiveFloat = 0.7
    """Temperature of the samples."""
    max_tokens: PositiveInt = 32
    num_samples: PositiveInt = 4
    """Samples of each prompt."""
    ignore_eos: bool = False
    seed: Seed = 0
    weights: Weights = "pushed"
    """Where the engine's first weights come from."""
    update: bool = True
    """Change the weights, push them, and generate everything again."""
    update_scale: NonNegativeFloat = 0.1
    """Noise that is added to each weight, in units of its matrix's root mean square."""


class EnginesJob(EnginesSettings, Job):
    """One engine, its model and its prompts."""

    name: str
    """The engine's display name."""
    engine: EngineConfig
    prompts: tuple[tuple[int, ...], ...]
    """Token ids."""
    token_budget: PositiveInt = 4096
    """Token budget of the trainer's micro-batches; a longer document gets one of its own."""
    timeout: Seconds
    """Time limit of the whole job, seconds."""
    threads: PositiveInt | None = None


class _Record(Record):
    """A record of what was measured; it may hold numbers that are not finite."""

    model_config = ConfigDict(allow_inf_nan=True)


class Row(_Record):
    """One completion and its logprobs by the trainer."""

    phase: Phase
    kind: Kind
    prompt: int
    """Index into the job's prompts."""
    sample: int
    """0 to n - 1."""
    seed: int
    """The requested seed."""
    stop_id: int | None = None
    """The requested stop id, besides the end-of-sequence ids."""
    prompt_ids: tuple[int, ...]
    """The prompt's ids as the engine reports them."""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """The engine's logprobs."""
    trainer: tuple[float, ...] = ()
    """The trainer's logprobs of the same tokens after the *requested* prompt, at the request's temperature;
    empty when the completion could not be scored."""
    unscaled: tuple[float, ...] = ()
    """The trainer's at temperature 1; of the sampled pass, where the temperature is not 1."""
    finish_reason: str
    stop_reason: int | str | None
    text: str | None
    policy_version: int
    told_seed: int
    """The seed that the engine reports."""
    cached_tokens: int = 0


class Pass(_Record):
    """One call of `generate` (alone: several)."""

    phase: Phase
    kind: Kind
    seconds: float
    samples: int
    tokens: int
    """Tokens of completions."""
    prompt_tokens: int
    """Prompt tokens of each sample, as the engine counts them."""
    cached_tokens: int


class Outcome(WorkerOutcome):
    """result.json; it may hold numbers that are not finite."""

    model_config = ConfigDict(allow_inf_nan=True)

    start_seconds: float | None = None
    """Seconds to make the engine."""
    push_seconds: tuple[float, ...] = ()
    """Seconds of each push of weights, the first one included."""
    update_effect: float | None = None
    """Mean |logprob after - before the update| of the greedy completions, by the trainer, nats."""
    eos_token_ids: tuple[int, ...] = ()
    special_ids: tuple[int, ...] = ()
    vocab_size: int = 0
    dtype: str = ""
    attention: str = ""
    engine: dict[str, str] = Field(default_factory=dict)
    """What the engine reports about itself, such as its version and command."""
