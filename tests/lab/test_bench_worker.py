"""What a worker does when something fails, hangs, or is no number, and when its suite is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.errors import ConfigError, EngineError, ModelError
from lockstep.ranks import context
from lockstep.ranks.context import RankContext
from lockstep_lab.cli import bench as command
from lockstep_lab.step_bench import run as lab
from lockstep_lab.step_bench.job import READY, BenchJob, BenchOutcome
from lockstep_lab.step_bench.run import BenchOptions, run_bench
from lockstep_lab.step_bench.worker import Cell

SMALL = ["--prompts", "2", "--group", "2", "--longest", "24", "--prompt-tokens", "4", "--dtype", "float32"]
WAITS_IN = """
import sys, time
from types import SimpleNamespace
from lockstep_lab.step_bench import worker as bench_worker
from lockstep_lab.step_bench.job import READY, Ready
from lockstep.observe.files import write_json

def load(cell):
    cell.build = SimpleNamespace(close=lambda: None)
    cell.memory = SimpleNamespace(reset=lambda: None)

def warm_up(cell):
    ready = Ready(load_seconds=0, first_step_seconds=0, compile_seconds=0, graphs=0)
    write_json(cell.job.out / READY, ready.model_dump())

def waits_for_ever(cell):
    time.sleep(600)

bench_worker.Cell.load, bench_worker.Cell.warm_up = load, warm_up
bench_worker.Cell.{method} = waits_for_ever
sys.exit(bench_worker.main())
"""
"""A worker that does nothing but wait; as the suite does: `python -c WAITS_IN JOB.json`."""


def options(out: Path, *argv: str) -> BenchOptions:
    words = ["--cells", "fsdp2+eager+hf", "--out", str(out), "--device", "cpu", *SMALL, *argv]
    return command.make_options(command.parser().parse_args(words))


@pytest.fixture
def job(tmp_path: Path) -> BenchJob:
    given = options(tmp_path)
    return BenchJob(
        cell="x", run=given.run, work=given.work, warmup=1, out=tmp_path, timeout=100.0, patience=1000.0
    )


@pytest.fixture
def cell(job: BenchJob) -> Cell:
    made = Cell(job)
    made.ranks = RankContext.alone()
    return made


# --- what fails ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ConfigError, EngineError, ModelError])
@pytest.mark.parametrize(
    ("method", "status", "exit_status"), [("load", "refused", 2), ("warm_up", "failed", 1)]
)
def test_only_what_loading_raises_was_refused(
    job: BenchJob,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Exception],
    method: str,
    status: str,
    exit_status: int,
) -> None:
    def load(cell: Any) -> None:
        cell.build = SimpleNamespace(close=lambda: None)

    def broken(cell: Any) -> None:
        raise kind("the engine has died", code="process-died")

    monkeypatch.setattr(Cell, "load", load)
    monkeypatch.setattr(Cell, method, broken)
    assert Cell(job).run() == exit_status
    outcome = BenchOutcome.read(job.out)
    assert outcome is not None and (outcome.status, outcome.reason) == (status, "the engine has died")


# --- the gap ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scored", "largest"),
    [
        ([[-1.0, -2.0, 9.0], [-1.5, 9.0, 9.0]], "0.5"),
        ([[-1.0, -2.0, 9.0], [float("nan"), 9.0, 9.0]], "nan"),
        ([[float("nan"), -2.0, 9.0], [-1.5, 9.0, 9.0]], "nan"),
        ([[-1.0, -2.0, float("nan")], [float("-inf"), 9.0, 9.0]], "inf"),
    ],
)
def test_the_gap_is_the_largest_of_what_was_sampled(
    cell: Cell, scored: list[list[float]], largest: str
) -> None:
    batches = [
        SimpleNamespace(loss_mask=torch.tensor(mask), rollout_logprobs=torch.tensor(logprobs))
        for mask, logprobs in [
            ([True, True, False], [-1.0, -2.0, 0.0]),
            ([True, False, False], [-1.0, 0.0, 0.0]),
            ([False, False, False], [0.0, 0.0, 0.0]),  # nothing of its documents was sampled
        ]
    ]
    rows = [torch.tensor(row) for row in [*scored, [9.0, 9.0, 9.0]]]
    cell.requests = []
    cell.policy = SimpleNamespace(  # type: ignore[assignment]
        plan=lambda made, weights: batches,
        backend=SimpleNamespace(logprobs=lambda batches: rows),
    )
    gap = cell._logprob_gap()
    assert str(gap) == largest
    BenchOutcome(status="ok", logprob_gap=gap).write(cell.job.out)
    outcome = BenchOutcome.read(cell.job.out)
    assert outcome is not None and str(outcome.logprob_gap) == largest


# --- parameters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tied", "count"), [(True, 5 * 4 + 4 * 5), (False, 4 * 5)])
def test_parameters_that_zero_3_has_cut_up_count_as_a_whole(cell: Cell, tied: bool, count: int) -> None:
    embedding, head = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False)
    for parameter in (embedding.weight, head.weight):
        parameter.ds_numel = parameter.numel()  # type: ignore[attr-defined]
        parameter.data = torch.empty(0)
    module = torch.nn.Sequential(embedding, head)
    module.get_input_embeddings = lambda: embedding  # type: ignore[assignment]
    cell.policy = SimpleNamespace(model=SimpleNamespace(module=module))  # type: ignore[assignment]
    cell.config = SimpleNamespace(tie_word_embeddings=tied)
    assert cell._matmul_parameters() == count


# --- what hangs ---------------------------------------------------------------------------------------------


def test_ranks_wait_for_each_other_as_long_as_the_suite_for_a_turn(
    job: BenchJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init_ranks(*, device: str, seconds: float) -> RankContext:
        raise ConfigError(f"{device} {seconds}", code="wrong-state")

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(context, "init_ranks", init_ranks)
    Cell(job).run()
    outcome = BenchOutcome.read(job.out)
    assert outcome is not None and outcome.reason == "cpu 100.0"


@pytest.mark.slow
def test_a_step_that_hangs_leaves_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "WORKER", ("-c", WAITS_IN.format(method="step")))
    result = run_bench(options(tmp_path / "out", "--ranks", "1", "--timeout", "60"))
    (found,) = result.cells
    assert (found.status, found.reason) == ("hung", "step 1 took more than 60 s (--timeout)")
    log = Path(found.log).read_text()
    assert "Timeout (0:00:54" in log and " in waits_for_ever" in log


# --- a suite that is killed ---------------------------------------------------------------------------------


@pytest.fixture
def suites() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Those that a test has started."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for suite in started:
        suite.kill()
        suite.wait()


def start_suite(out: Path, *worker: str) -> subprocess.Popen[bytes]:
    """A process that runs a worker as suites do."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from lockstep_lab.suite.process import ProcessRunner\n"
        "argv = [sys.executable, '-u', *sys.argv[2:]]\n"
        "ProcessRunner().run(argv, log=Path(sys.argv[1]), timeout=600)"
    )
    words = [str(out / "log"), *worker, str(out / "job.json")]
    return subprocess.Popen([sys.executable, "-c", code, *words])


def below(pid: int) -> list[int]:
    """Every process that it has started, and they in turn."""
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            found += [child, *below(child)]
    return found


def until(arrived: Any, out: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not arrived():
        assert time.monotonic() < end, (out / "log").read_text()
        time.sleep(0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "ranks",
    [1, pytest.param(2, marks=pytest.mark.exhaustive)],
    ids=["one process", "ranks and their launcher"],
)
def test_a_suite_that_is_killed_leaves_no_worker(
    job: BenchJob, suites: list[subprocess.Popen[bytes]], ranks: int
) -> None:
    run = job.run.model_copy(update={"train": job.run.train.model_copy(update={"backend": "fsdp2"})})
    changes = {"ranks": ranks} | ({"run": run} if ranks > 1 else {})
    job.model_copy(update=changes).write()
    worker = ("-m", "lockstep_lab.step_bench.worker")
    if ranks == 1:  # in the middle of something, where it does not look for a turn
        worker = ("-c", WAITS_IN.format(method="take_turns"))
    suites.append(start_suite(job.out, *worker))
    until(lambda: (job.out / READY).exists(), job.out, 120)
    pids = below(suites[0].pid)
    assert len(pids) >= (2 if ranks == 1 else 4)  # the supervisor among them
    suites[0].kill()
    suites[0].wait()
    try:
        until(lambda: not any(alive(pid) for pid in pids), job.out, 15)
    finally:
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    """A process that has ended but that nobody has asked about yet is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
