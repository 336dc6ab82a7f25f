"""The job of one cell of `lockstep bench step`, and the files that it leaves behind.

A job is a JSON file; `python -m lockstep.lab.step_bench.worker JOB.json` runs it on `ranks` processes. They
load and warm up, write ready.json, and then take one RL step whenever the number in `turn` grows, so that
several cells can take turns:

    turn          steps that may have been taken by now, or "end"; by the suite
    ready.json    Ready
    rows.jsonl    one line per measured step (StepTimes)
    result.json   BenchOutcome
    ranks/        everything each rank printed
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from lockstep.config.base import PositiveInt, Record, Seconds
from lockstep.config.run import GRPORun
from lockstep.lab.step_bench.work import BenchWork
from lockstep.lab.suite.job_files import Job, WorkerOutcome, read_if_whole, read_lines
from lockstep.observe.files import write_atomic

TURN, READY, ROWS = "turn", "ready.json", "rows.jsonl"
END = "end"
PHASES = ("generate", "forward", "backward", "optimizer", "weights")
"""Of one step. weights: how the engine gets the new ones."""


class BenchJob(Job):
    """One cell."""

    cell: str
    """The cell's name."""
    ranks: PositiveInt = 1
    device: Literal["cpu", "cuda"] = "cpu"
    run: GRPORun
    """Model, backend, engine and how they run; its data and rewards are not used."""
    work: BenchWork = BenchWork()
    warmup: PositiveInt = 2
    """Whole steps before anything is measured; the first one compiles."""
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


def give_turn(folder: Path, turn: int | str) -> None:
    """Let the cell take measured steps up to this number in all, or end it."""
    write_atomic(folder / TURN, str(turn))


def read_turn(folder: Path) -> int | None:
    """Read the number of steps that the cell may take; None: it is to end."""
    path = folder / TURN
    text = path.read_text(encoding="utf-8") if path.exists() else "0"
    return None if text == END else int(text)
