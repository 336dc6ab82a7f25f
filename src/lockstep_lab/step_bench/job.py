"""The work of one synthetic RL step: lengths like those of RL rollouts, requests, packs.

Every cell is given the same work: lengths are decided beforehand, and generation goes on to exactly these.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, NonNegativeInt, model_validator

from lockstep.config.base import PositiveInt, Record, Seconds
from lockstep.config.run import GRPORun
from lockstep.observe.files import write_atomic
from lockstep_lab.suite.job_files import Job, WorkerOutcome, read_if_whole, read_lines

if TYPE_CHECKING:
    from lockstep.schema.batch import PolicySample
    from lockstep.schema.rollout import GenerationRequest


SIGMA = 0.8
"""Standard deviation of the log length, that of benchmarks/lengths.json's rl_512."""
_MEDIAN, _LEAST = 0.2, 0.02
"""Limits of a document's length, as shares of the longest one."""


class BenchWork(Record):
    """The work of an RL step of the bench."""

    prompts: PositiveInt = 8
    group: PositiveInt = 4
    """Samples of each prompt, all of one length."""
    prompt_tokens: PositiveInt = 32
    longest: PositiveInt = 512
    """Tokens of prompt and completion together, at most."""
    seed: NonNegativeInt = 0

    @model_validator(mode="after")
    def _check(self) -> BenchWork:
        if self.longest <= self.prompt_tokens:
            raise ValueError(
                f"documents of at most {self.longest} tokens leave no room for a completion after a prompt "
                f"of {self.prompt_tokens}; raise --longest or lower --prompt-tokens"
            )
        return self

    def lengths(self) -> list[int]:
        """Tokens of each sample's prompt and completion; the samples of a prompt come one after the other.

        Example:
            >>> BenchWork(prompts=3, group=2, prompt_tokens=4, longest=100, seed=1).lengths()
            [56, 56, 63, 63, 21, 21]
        """
        rng = random.Random(f"lockstep bench {self.seed}")
        low = max(self.prompt_tokens + 1, round(_LEAST * self.longest))
        centre = math.log(_MEDIAN * self.longest)
        drawn = [round(math.exp(rng.gauss(centre, SIGMA))) for _ in range(self.prompts)]
        return [min(self.longest, max(low, length)) for length in drawn for _ in range(self.group)]

    @property
    def completion_tokens(self) -> int:
        """Tokens that one step samples, and that its loss is about."""
        return sum(self.lengths()) - self.prompts * self.group * self.prompt_tokens


def requests(work: BenchWork, *, vocab_size: int, part: int = 0, parts: int = 1) -> list[GenerationRequest]:
    """Make the generation requests of one rank: every `parts`-th prompt from `part` on."""
    from lockstep.schema.rollout import GenerationRequest, SamplingParams

    rng = random.Random(f"lockstep bench prompts {work.seed}")
    lengths = work.lengths()[:: work.group]
    all_requests = []
    for index, length in enumerate(lengths):
        params = SamplingParams(max_tokens=length - work.prompt_tokens, ignore_eos=True)
        seeds = tuple(1 + index * work.group + sample for sample in range(work.group))
        ids = tuple(rng.randrange(vocab_size) for _ in range(work.prompt_tokens))
        all_requests.append(GenerationRequest(prompt_token_ids=ids, sampling=params, seeds=seeds))
    return all_requests[part::parts]


def samples(work: BenchWork, *, vocab_size: int) -> list[PolicySample]:
    """Make random documents of the same lengths, trained on from the end of the prompt on."""
    import torch

    from lockstep.schema.batch import PolicySample

    generator = torch.Generator().manual_seed(work.seed)
    documents = []
    for index, length in enumerate(work.lengths()):
        mask = torch.zeros(length, dtype=torch.bool)
        mask[work.prompt_tokens - 1 : -1] = True
        advantage = 1.0 if index % 2 else -1.0
        documents.append(
            PolicySample(
                token_ids=torch.randint(vocab_size, (length,), generator=generator),
                loss_mask=mask,
                sample_id=index,
                rollout_logprobs=torch.where(mask, -math.log(vocab_size), 0.0),
                advantages=torch.where(mask, advantage, 0.0),
            )
        )
    return documents


TURN, READY, ROWS = "turn", "ready.json", "rows.jsonl"
END = "end"
PHASES = ("generate", "forward", "backward", "optimizer", "weights")
"""Of one step. weights: how the engine gets the new ones."""


class BenchSettings(Record):
    """What the measurement of all cells is asked for, and that of one is told."""

    ranks: PositiveInt = 1
    device: Literal["cpu", "cuda"] = "cpu"
    run: GRPORun
    """Model, backend, engine and how they run; its data and rewards are not used."""
    work: BenchWork = BenchWork()
    warmup: PositiveInt = 2
    """Whole steps before anything is measured; the first one compiles."""


class BenchJob(BenchSettings, Job):
    """One cell."""

    cell: str
    """The cell's name."""
    timeout: Seconds = 600.0
    """Seconds of the start and of one turn, after which the suite ends it; as long waits one rank for
    another."""
    patience: Seconds = 600.0
    """Seconds without a turn, while other cells take theirs, after which it gives up."""


class StepTimes(Record):
    """One measured step: seconds, device-synchronised. On several ranks: of rank 0, which waits for the
    slowest one at the end of each phase but forward."""

    step: float
    """The whole step."""
    generate: float
    train: float
    """Forward and backward of all micro-batches and what is between them."""
    forward: float
    """The part of it in forward passes, the loss included."""
    backward: float
    optimizer: float
    weights: float


class Ready(Record):
    """ready.json: a cell that is warm."""

    load_seconds: float
    """From the start of the process to a model, a backend and an engine."""
    first_step_seconds: float
    """The warm-up steps, with everything that is compiled."""
    compile_seconds: float
    """Seconds of torch.compile so far."""
    graphs: int


class BenchOutcome(WorkerOutcome):
    """result.json, by rank 0, or by the rank that failed first."""

    recompiles: int = 0
    """Graphs that were compiled after the warm-up."""
    graph_breaks: int = 0
    memory_kind: str = ""
    micro_batches: tuple[int, ...] = ()
    """Token slots of each."""
    tokens: int = 0
    """Prompts and completions of one step."""
    sampled_tokens: int = 0
    """Completions of one step."""
    training_flops: float = 0.0
    peak_flops: float | None = None
    """Peak FLOP/s of all GPUs; None: not known."""
    logprob_gap: float | None = Field(default=None, allow_inf_nan=True)
    """Largest |trainer - engine| over the tokens of one more generation behind the last step, nats; NaN where
    one of them is."""
    axes: dict[str, Any] = Field(default_factory=dict)
    """What each "auto" resolved to."""
    statement: str = ""


def read_ready(folder: Path) -> Ready | None:
    """Read ready.json; None: the cell is not warm yet."""
    return read_if_whole(folder / READY, Ready)


def read_times(folder: Path) -> list[StepTimes]:
    """Read the steps measured so far; a last line that is cut off is left out."""
    return read_lines(folder / ROWS, StepTimes)


def grant_turn(folder: Path, turn: int | str) -> None:
    """Let the cell take measured steps up to this number in all, or end it."""
    write_atomic(folder / TURN, str(turn))


def read_turn(folder: Path) -> int | None:
    """Read the number of steps that the cell may take; None: it is to end."""
    path = folder / TURN
    text = path.read_text(encoding="utf-8") if path.exists() else "0"
    return None if text == END else int(text)
