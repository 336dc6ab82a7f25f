"""One cell of `lockstep bench step`: `python -m lockstep.lab.step_bench.worker JOB.json` (see job.py).

The parts are those of `lockstep train grpo` (lockstep.loop.build), so what is timed is what trains. Exit
status 0: all turns are taken; 2: refused while loading; 1: anything else.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lockstep.errors import ConfigError, EngineError, LockstepError, ModelError
from lockstep.lab.step_bench.job import READY, ROWS, BenchJob, BenchOutcome, Ready, StepTimes, read_turn
from lockstep.lab.step_bench.work import peak_flops, requests, samples, training_flops
from lockstep.lab.suite.job_files import RANK_LOGS, RESULT, read_job_file
from lockstep.lab.suite.worker import (
    REFUSED,
    append_rows,
    failure,
    job_path,
    leave_with,
    run_job,
    says_it_already,
)
from lockstep.observe.files import write_json
from lockstep.observe.text import echo
from lockstep.ranks.launch import in_launcher, launch_command

if TYPE_CHECKING:
    import torch

    from lockstep.execution import CompileWatch
    from lockstep.lab.suite.memory import PeakMemory
    from lockstep.loop.build import OnlineParts
    from lockstep.protocols.train import TokenLoss
    from lockstep.ranks.context import RankContext
    from lockstep.schema.batch import PackedBatch
    from lockstep.schema.rollout import Completion

MODULE = "lockstep.lab.step_bench.worker"
_POLL_SECONDS = 0.01


class PhaseClock:
    """Stands in for the Spans of a train backend: seconds by name, without waiting for the device inside.

    On CUDA a phase is measured by events in the stream: a synchronisation at its ends would slow down a step
    in which the host runs ahead.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the body under `name`."""
        if not self._cuda:
            started = time.perf_counter()
            yield
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started
            return
        import torch

        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        yield
        last.record()
        self._events.append((name, first, last))

    def take(self) -> dict[str, float]:
        """Take the seconds since the last call; the device must be synchronised."""
        seconds, self._seconds = self._seconds, {}
        for name, first, last in self._events:
            seconds[name] = seconds.get(name, 0.0) + first.elapsed_time(last) / 1e3
        self._events = []
        return seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; return the exit status."""
    path = job_path(argv, MODULE)
    if path is None:
        return REFUSED
    job = read_job_file(path, BenchJob)
    if job.ranks > 1 and not in_launcher():
        command = [sys.executable, "-u", "-m", MODULE, str(path)]
        return launch_command(command, ranks=job.ranks, timeout=None, log_dir=job.out / RANK_LOGS)
    return run_rank(job)


def run_rank(job: BenchJob) -> int:
    """Run this rank's part of the job."""
    faulthandler.enable()
    cell = _Cell(job)

    def work() -> None:
        with contextlib.ExitStack() as stack:
            with cell.watched():  # once: the suite has one timeout for all of it
                cell.ranks = stack.enter_context(_join(job))
                cell.load()
                cell.loaded = True
                stack.callback(cell.parts.close)
                cell.warm_up()
            cell.take_turns()
            with cell.watched():
                cell.say("the end")
                cell.end()

    refuses = (ConfigError, ModelError, EngineError)
    return run_job(work, give_up=cell.give_up, refuses=lambda: () if cell.loaded else refuses)


def _join(job: BenchJob) -> RankContext:
    from lockstep.ranks.context import RankContext, init_ranks

    return init_ranks(device=job.device, seconds=job.timeout) if in_launcher() else RankContext.alone()


@dataclass
class _Cell:
    """A rank's state."""

    job: BenchJob
    ranks: RankContext = field(init=False)
    parts: OnlineParts = field(init=False)
    batches: list[PackedBatch] = field(default_factory=list)
    steps_taken: int = 0
    loaded: bool = False
    """Whether everything is loaded: errors from now on are failures, not refusals."""
    started: float = field(default_factory=time.perf_counter)
    watch: CompileWatch | None = None
    memory: PeakMemory | None = None

    # --- the parts ------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Load the model, backend and engine, and make the step's packs."""
        import torch

        from lockstep.execution import CompileWatch
        from lockstep.lab.suite.memory import PeakMemory
        from lockstep.loop.build import build_online
        from lockstep.models.causal_lm import text_config
        from lockstep.models.quiet import quiet_transformers

        self.say("loading")
        job, self.watch = self.job, CompileWatch()
        with quiet_transformers():
            self.parts = build_online(job.run, ranks=self.ranks, work_dir=job.out / "engine")
        self.device = torch.device(self.parts.axes.device)
        self.memory = PeakMemory(self.device)
        self.clock = PhaseClock(self.device)
        self.parts.backend.spans = self.clock  # type: ignore[attr-defined]
        self.config = text_config(self.parts.model.module)
        vocab = int(self.config.vocab_size)
        documents = samples(job.work, vocab_size=vocab)
        self.batches = self.parts.plan(documents, self.parts.algorithm.loss_weights(documents))
        self.requests = requests(
            job.work, vocab_size=vocab, part=self.ranks.rank, parts=self.ranks.world_size
        )
        self.loss: TokenLoss = self.parts.algorithm.loss()
        self._push()
        self.load_seconds = self._clock() - self.started
        self.say(f"{job.cell}: {self.ranks.description}, {self.parts.axes}")

    def warm_up(self) -> None:
        """Take whole steps, in which everything compiles."""
        self.say("warming up")
        first = 0.0
        for step in range(self.job.warmup):
            started = self._clock()
            self._generate()
            self._train()
            first = first if step else self._clock() - started
        assert self.watch is not None
        self.clock.take()
        self.watch.mark_warm()
        report = self.watch.report()
        ready = Ready(
            load_seconds=self.load_seconds,
            first_step_seconds=first,
            compile_seconds=report.seconds,
            graphs=report.graphs,
        )
        if self.ranks.is_first:
            write_json(self.job.out / READY, ready.model_dump())

    # --- one step -------------------------------------------------------------------------------------------

    def take_turns(self) -> None:
        """Take a measured step whenever the suite requests one."""
        while True:
            turn = self._next_turn()
            if turn is None:
                return
            while self.steps_taken < turn:
                if self.steps_taken == 0 and self.memory is not None:
                    self.memory.reset()
                self.say(f"step {self.steps_taken + 1}")
                with self.watched():
                    times = self.step()
                self.steps_taken += 1
                if self.ranks.is_first:
                    append_rows(self.job.out / ROWS, [times])
                self.say(f"step {self.steps_taken}: " + ", ".join(f"{k} {v:.4f}" for k, v in times))

    def step(self) -> StepTimes:
        """Take one step: generate, train, update the engine, and time each phase."""
        self._wait()
        marks = [self._clock()]
        self._generate()
        marks.append(self._wait())
        self.parts.backend.forward_backward(self.batches, self.loss)
        marks.append(self._wait())
        self.parts.backend.optimizer_step()
        marks.append(self._wait())
        self._push()
        marks.append(self._wait())
        seconds = self.clock.take()
        generate, train, optimizer, weights = (b - a for a, b in itertools.pairwise(marks))
        return StepTimes(
            step=marks[-1] - marks[0],
            generate=generate,
            train=train,
            forward=seconds.get("forward", 0.0),
            backward=seconds.get("backward", 0.0),
            optimizer=optimizer,
            weights=weights,
        )

    def _generate(self) -> list[Completion]:
        rows = self.parts.engine.generate(self.requests) if self.requests else []
        return [completion for row in rows for completion in row]

    def _train(self) -> None:
        self.parts.backend.forward_backward(self.batches, self.loss)
        self.parts.backend.optimizer_step()
        self._push()

    def _push(self) -> None:
        self.parts.transfer.push(self.parts.backend, self.parts.engine, policy_version=self.steps_taken)

    def _logprob_gap(self) -> float:
        """Largest |trainer - engine| over all tokens of one more generation, of all ranks. Collective."""
        import torch

        from lockstep.schema.batch import policy_samples, rollout_samples
        from lockstep.schema.rollout import Completion, Trajectory

        shares = self.ranks.gather(self._generate(), list[Completion], what="the gap")
        every = [completion for share in shares for completion in share]
        documents = policy_samples(rollout_samples(map(Trajectory.of, every)), None)
        batches = self.parts.plan(documents, [sample.loss_mask.float() for sample in documents])
        gaps = []
        for batch, scored in zip(batches, self.parts.backend.logprobs(batches), strict=True):
            mask = batch.loss_mask.cpu()
            rollout = getattr(batch, "rollout_logprobs").cpu()[mask]  # noqa: B009  (a PolicyBatch)
            gaps.append((scored.cpu()[mask] - rollout).abs())
        return float(torch.cat(gaps).max())  # unlike Python's, torch's max is NaN where one of them is

    # --- waiting --------------------------------------------------------------------------------------------

    def _next_turn(self) -> int | None:
        """The number in `turn` once it has grown; None: the end."""
        until = time.monotonic() + self.job.patience
        while True:
            turn = read_turn(self.job.out)
            if turn is None or turn > self.steps_taken:
                return turn
            if time.monotonic() > until:
                raise LockstepError(
                    f"no turn came within {self.job.patience:g} s", code="deadline", seconds=self.job.patience
                )
            time.sleep(_POLL_SECONDS)

    def _wait(self) -> float:
        """Wait until every rank's device is done; return the time."""
        self._clock()
        if self.ranks.world_size > 1:
            self.ranks.gather(None, what="the end of a phase")
        return time.perf_counter()

    def _clock(self) -> float:
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Write tracebacks of all threads into the log shortly before the suite kills a stalled process."""
        faulthandler.dump_traceback_later(0.9 * self.job.timeout, exit=False)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    # --- the end --------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Print a line on rank 0."""
        if self.ranks.is_first:
            echo(text, flush=True)

    def end(self) -> None:
        """Write result.json. Collective."""
        outcome = self._outcome()
        if self.ranks.is_first:
            outcome.write(self.job.out)

    def give_up(self, status: str, error: Exception) -> None:
        """Write why there is no more into result.json. Called on any rank."""
        echo(f"{self.job.cell}: {status}: {error}", flush=True)
        first = hasattr(self, "ranks") and self.ranks.is_first
        if not says_it_already(self.job.out / RESULT, error, first=first):
            BenchOutcome.model_validate(failure(status, error)).write(self.job.out)

    def _outcome(self) -> BenchOutcome:
        """Collective. Counters first: the gap has a forward of its own to compile."""
        import dataclasses

        from lockstep.lab.suite.machine import device_name, versions

        assert self.watch is not None and self.memory is not None
        job, report = self.job, self.watch.report()
        peaks = self.ranks.gather(self.memory.peak(), int, what="memory")
        peak = peak_flops(device_name(self.device)) if self.device.type == "cuda" else None
        lengths = job.work.lengths()
        return BenchOutcome(
            status="ok",
            recompiles=report.recompiles,
            graph_breaks=report.graph_breaks,
            peak_memory_bytes=max(peaks),
            memory_kind=self.memory.kind.replace("of each input", "since the warm-up"),
            micro_batches=tuple(batch.num_slots for batch in self.batches),
            tokens=sum(lengths),
            sampled_tokens=job.work.completion_tokens,
            training_flops=training_flops(self.config, parameters=self._matmul_parameters(), lengths=lengths),
            peak_flops=None if peak is None else peak * self.ranks.world_size,
            logprob_gap=self._logprob_gap(),
            axes=dataclasses.asdict(self.parts.axes),
            statement=self.ranks.description,
            versions=versions(),
        )

    def _matmul_parameters(self) -> int:
        """All, tied ones once; without the input embedding where it is a matrix of its own."""
        module: Any = self.parts.model.module
        count = sum(map(_entries, module.parameters()))
        tied = bool(self.config.tie_word_embeddings)
        return count - (0 if tied else _entries(module.get_input_embeddings().weight))


def _entries(parameter: torch.Tensor) -> int:
    """Of all ranks. ZeRO 3 leaves an empty tensor where it has cut one up; a DTensor's numel is the whole."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


if __name__ == "__main__":
    leave_with(main, "bench")
