"""The job of one stack of a parity run, and the files that the stack leaves behind.

A job is a JSON file; `python -m lockstep_lab.train_parity.worker JOB.json` runs it on `ranks` processes and
writes into its folder:

    metrics.jsonl                one line per optimizer step (StepRow)
    logprobs.safetensors         "step-000003": [trained tokens] float32, in the order of the step's inputs
    gradients-000000.safetensors Parameter name -> float32, unclipped; of the steps in `gradients_at`
    result.json                  Outcome: status, reason, seconds, memory, versions
    ranks/                       everything each rank printed
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from lockstep.config.algorithm import PreferenceName
from lockstep.config.base import PositiveInt, Record, Seconds, Seed
from lockstep.config.data import DataConfig
from lockstep.config.model import ModelConfig
from lockstep.config.train import TrainConfig
from lockstep_lab.suite.job_files import Job, WorkerOutcome

METRICS, LOGPROBS = "metrics.jsonl", "logprobs.safetensors"
INPUTS, REPORT = "inputs", "inputs.json"
VALUE_INPUTS = "inputs-value"
"""PPO: the recording of the value model's inputs."""


ParityAlgorithm = Literal["sft", "grpo", "ppo", "rm"] | PreferenceName
Role = Literal["policy", "value"]


class InputsSettings(Record):
    """What the comparison of stacks is asked for, and what makes its inputs is told."""

    algorithm: ParityAlgorithm = "sft"
    model: ModelConfig = ModelConfig()
    data: DataConfig | None = None
    """SFT and losses of pairs; None: generated documents."""
    recording: Path | None = None
    """GRPO and PPO; None: the shipped corpus."""
    max_samples: PositiveInt = 160
    batch_size: PositiveInt = 8
    """Documents of one optimizer step."""
    steps: PositiveInt | None = None
    """Optimizer steps; None: one pass over the documents."""
    max_length: PositiveInt = 1024
    """Tokens of one document; longer documents are cut (SFT) or their inputs left out (GRPO, PPO)."""
    seed: Seed = 0
    device: Literal["cpu", "cuda"] = "cpu"


class InputsSpec(InputsSettings, Job):
    """The inputs to make."""

    FILE = "inputs-spec.json"
    min_packs: PositiveInt = 1
    """Least number of micro-batches a step: one per rank."""
    token_budget: PositiveInt = 4096
    static_capacity: bool = False


class InputsReport(Record):
    """inputs.json."""

    steps: tuple[tuple[int, ...], ...]
    """Inputs of each optimizer step, by index in the recording."""
    source: str
    """A description of where the documents come from."""
    notes: tuple[str, ...] = ()
    documents: int
    """Number of different documents."""
    tokens: int
    """Tokens of all steps."""
    trained_tokens: int
    baselines: tuple[float, ...] | None = None
    """GRPO, PPO: the loss of each step's inputs at the starting weights, which "falls" is measured from."""
    value_baselines: tuple[float, ...] | None = None
    """PPO: those of the value model, whose inputs have the same indices in a recording of their own."""
    heads: int
    kv_heads: int
    vocab_size: int


class ParityJob(Job):
    """One stack, its model and the optimizer steps that it takes."""

    stack: str
    """The stack's name."""
    ranks: PositiveInt = 1
    device: Literal["cpu", "cuda"] = "cpu"
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    """train.backend is the backend; attention "auto" is resolved by the worker."""
    inputs: Path
    """A recording; the loss is its algorithm's."""
    steps: tuple[tuple[int, ...], ...]
    """The recording's inputs for each optimizer step, on every rank."""
    timeout: Seconds = 600.0
    """Time limit of the whole job, seconds."""
    wait: Seconds = 120.0
    """Seconds that one rank waits for another."""
    keep_logprobs: bool = True
    gradients_at: tuple[int, ...] = ()
    """Steps, from 0, whose gradients are kept."""
    total_steps: PositiveInt | None = None
    """Where the schedule ends; None: with the last of `steps`, counted from the checkpoint that is loaded."""

    @property
    def engine_name(self) -> str | None:
        """Nothing samples."""
        return None

    load: Path | None = None
    """A checkpoint folder of any backend to begin from."""
    save: Path | None = None
    """An empty folder to save to, behind the last step."""
    threads: PositiveInt | None = Field(None)
    """CPU threads of each rank; None: the launcher's choice."""

    @model_validator(mode="after")
    def _check(self) -> ParityJob:
        if not self.steps or not all(self.steps):
            raise ValueError("steps must name at least one step, and each at least one input")
        wrong = [step for step in self.gradients_at if not 0 <= step < len(self.steps)]
        if wrong:
            raise ValueError(f"gradients_at names step {wrong[0]}; there are {len(self.steps)}, from 0")
        return self


class StepRow(Record):
    """One line of metrics.jsonl."""

    step: int
    """From 1: after the step's update."""
    loss: float = Field(allow_inf_nan=True)
    grad_norm: float = Field(allow_inf_nan=True)
    """Gradient norm before clipping."""
    lr: float
    tokens: int
    """Tokens of real documents."""
    seconds: float
    """From the step's first forward to the end of its optimizer step, device-synchronised."""
    tokens_per_second: float
    peak_memory_bytes: int
    """Largest of any rank so far: allocated on a GPU, resident on a CPU."""


class Outcome(WorkerOutcome):
    """result.json, by rank 0."""

    steps: int = 0
    """Done."""
    seconds: float = 0.0
    """Duration of all steps, without loading."""
    load_seconds: float = 0.0
    statement: str = ""
    """Ranks and devices in words."""
    attention: str = ""
    dtype: str = ""
    spans: dict[str, float] = Field(default_factory=dict)
    """Seconds in forward and backward, of rank 0, where the backend times them."""
