"""What one engine of `lockstep parity engines` is told, and what it leaves behind.

A job is a JSON file; `python -m lockstep.lab.engine_parity.worker JOB.json` makes the engine and writes into
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

from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveFloat

from lockstep.config.base import PositiveInt, Record, Seconds, Seed
from lockstep.config.engine import EngineConfig
from lockstep.config.model import ModelConfig
from lockstep.lab.suite.job_files import read_if_whole, read_job_file, read_lines

JOB, ROWS, PASSES, RESULT = "job.json", "rows.jsonl", "passes.jsonl", "result.json"

Phase = Literal["before", "after"]
Kind = Literal["greedy", "stop", "sampled", "again", "alone", "other"]
Weights = Literal["pushed", "folder"]


class EnginesJob(Record):
    """One engine, its model and its prompts."""

    name: str
    """For people."""
    engine: EngineConfig
    model: ModelConfig
    device: str = "cpu"
    attention: str = "auto"
    """Of the trainer."""
    prompts: tuple[tuple[int, ...], ...]
    """Token ids."""
    temperature: PositiveFloat
    """Of the samples."""
    max_tokens: PositiveInt
    num_samples: PositiveInt
    """Of each prompt."""
    ignore_eos: bool = False
    seed: Seed = 0
    weights: Weights = "pushed"
    """Where the engine's first weights come from."""
    update: bool = True
    """Change the weights, push them, and ask everything again."""
    update_scale: NonNegativeFloat = 0.1
    """Noise that is added to each weight, in units of its matrix's root mean square."""
    token_budget: PositiveInt = 4096
    """Of the trainer's micro-batches; a longer document gets one of its own."""
    out: Path
    """A folder that is there."""
    timeout: Seconds
    """Seconds of the whole job."""
    threads: PositiveInt | None = None

    def write(self) -> Path:
        """OUT/job.json."""
        path = self.out / JOB
        path.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
        return path


class _Record(Record):
    """What was seen: numbers that are not finite are facts too."""

    model_config = ConfigDict(allow_inf_nan=True)


class Row(_Record):
    """One completion and what the trainer thinks of it."""

    phase: Phase
    kind: Kind
    prompt: int
    """Index into the job's prompts."""
    sample: int
    """0 to n - 1."""
    seed: int
    """That was asked for."""
    stop_id: int | None = None
    """That was asked for, besides the end-of-sequence ids."""
    prompt_ids: tuple[int, ...]
    """As the engine says it has read them."""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """The engine's."""
    trainer: tuple[float, ...] = ()
    """The trainer's, of the same tokens behind the prompt that was *asked*, at the request's temperature;
    empty when the completion could not be scored."""
    unscaled: tuple[float, ...] = ()
    """The trainer's at temperature 1; of the sampled pass, where the temperature is not 1."""
    finish_reason: str
    stop_reason: int | str | None
    text: str | None
    policy_version: int
    told_seed: int
    """That the engine says it has used."""
    cached_tokens: int = 0


class Pass(_Record):
    """One call of `generate` (alone: several)."""

    phase: Phase
    kind: Kind
    seconds: float
    samples: int
    tokens: int
    """Of completions."""
    prompt_tokens: int
    """As the engine counts them: each sample's."""
    cached_tokens: int


class Outcome(_Record):
    """result.json."""

    status: Literal["ok", "refused", "failed", "oom"]
    """refused: the settings cannot work, or something is not installed."""
    reason: str = ""
    start_seconds: float | None = None
    """Of making the engine."""
    push_seconds: tuple[float, ...] = ()
    """Of each push of weights, the first one included."""
    update_effect: float | None = None
    """Mean |logprob after - before the update| of the greedy completions, by the trainer, nats."""
    eos_token_ids: tuple[int, ...] = ()
    special_ids: tuple[int, ...] = ()
    vocab_size: int = 0
    dtype: str = ""
    attention: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    engine: dict[str, str] = Field(default_factory=dict)
    """What the engine says about itself, such as its version and command."""
    peak_memory_bytes: int = 0


def read_job(path: Path) -> EnginesJob:
    """A job file. Raises ConfigError."""
    return read_job_file(path, EnginesJob)


def read_outcome(folder: Path) -> Outcome | None:
    """What a worker wrote; None: it ended before it could. A file that is no outcome counts as none."""
    return read_if_whole(folder / RESULT, Outcome)


def read_rows(folder: Path) -> tuple[Row, ...]:
    """All completions; a last line that is cut off is left out."""
    return tuple(read_lines(folder / ROWS, Row))


def read_passes(folder: Path) -> tuple[Pass, ...]:
    """All calls of generate."""
    return tuple(read_lines(folder / PASSES, Pass))
