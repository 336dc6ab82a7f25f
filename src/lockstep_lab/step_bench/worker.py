"""One cell of `lockstep bench step`: `python -m lockstep_lab.step_bench.worker JOB.json` (see job.py).

The parts are those of `lockstep train grpo` (lockstep.loop.build), so what is timed is what trains. Exit
status 0: all turns are taken; 2: refused while loading; 1: anything else.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.errors import ConfigError, EngineError, LockstepError, ModelError
from lockstep.models.shapes import peak_flops, training_flops
from lockstep.observe.files import write_json
from lockstep.ranks.environment import in_launcher
from lockstep_lab.step_bench.job import (
    READY,
    ROWS,
    BenchJob,
    BenchOutcome,
    Ready,
    StepTimes,
    read_turn,
    requests,
    samples,
)
from lockstep_lab.suite.worker import Worker, append_rows, clock, leave_with, watched

if TYPE_CHECKING:
    import torch

    from lockstep.execution import CompileWatch
    from lockstep.loop.build import Builder
    from lockstep.loop.policy import Policy
    from lockstep.loop.rollouts import RolloutEngine
    from lockstep.protocols.train import TokenLoss
    from lockstep.ranks.context import RankContext
    from lockstep.schema.batch import PackedBatch
    from lockstep.schema.rollout import Completion
    from lockstep_lab.suite.machine import PeakMemory

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


class Cell(Worker[BenchJob]):
    """A rank's state."""

    MODULE = "lockstep_lab.step_bench.worker"
    OUTCOME = BenchOutcome
    REFUSALS = (ConfigError, ModelError, EngineError)
    build: Builder
    policy: Policy
    engine: RolloutEngine
    watch: CompileWatch
    memory: PeakMemory

    def __init__(self, job: BenchJob) -> None:
        super().__init__(job)
        self.batches: list[PackedBatch] = []
        self.steps_taken = 0
        self.started = time.perf_counter()

    @property
    def name(self) -> str:
        return self.job.cell

    def launch(self) -> tuple[int, float | None]:
        return self.job.ranks if self.job.ranks > 1 else 0, None

    def work(self) -> None:
        """Load, warm up, take turns."""
        with contextlib.ExitStack() as stack:
            with watched(self.job.timeout, least=0.9):  # once: the suite has one timeout for all of it
                self.ranks = stack.enter_context(self._join())
                self.load()
                self.begun = True
                stack.callback(self.build.close)
                self.warm_up()
            self.round_robin()
            with watched(self.job.timeout, least=0.9):
                self.say("the end")
                outcome = self._outcome()
                if self.is_first:
                    self.end("ok", **outcome)

    def _join(self) -> RankContext:
        from lockstep.ranks.context import RankContext, init_ranks

        if in_launcher():
            return init_ranks(device=self.job.device, seconds=self.job.timeout)
        return RankContext.alone()

    # --- the parts ------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Load the model, backend and engine, and make the step's packs."""
        import torch

        from lockstep.execution import CompileWatch
        from lockstep.loop.build import Builder
        from lockstep.models.architectures import silence_transformers, text_config
        from lockstep_lab.suite.machine import PeakMemory

        self.say("loading")
        job, self.watch = self.job, CompileWatch()
        with silence_transformers():
            self.build = Builder(job.run, ranks=self.ranks, work_dir=job.out / "engine")
            try:
                environment, algorithm = self.build.environment(), self.build.algorithm()
                self.policy = self.build.policy(algorithm)
                self.build.roles(self.policy, environment, algorithm)
                self.engine = self.build.engine(self.policy)
            except BaseException:
                self.build.close()
                raise
        self.device = torch.device(self.policy.resolved.device)
        self.memory = PeakMemory(self.device)
        self.clock = PhaseClock(self.device)
        self.policy.backend.spans = self.clock  # type: ignore[attr-defined]
        self.config = text_config(self.policy.model.module)
        vocab = int(self.config.vocab_size)
        documents = samples(job.work, vocab_size=vocab)
        self.batches = self.policy.plan(documents, algorithm.loss_weights(documents))
        self.requests = requests(
            job.work, vocab_size=vocab, part=self.ranks.rank, parts=self.ranks.world_size
        )
        self.loss: TokenLoss = algorithm.loss()
        self._push()
        self.load_seconds = clock(self.device) - self.started
        self.say(f"{job.cell}: {self.ranks.description}, {self.policy.resolved.axes}")

    def warm_up(self) -> None:
        """Take whole steps, in which everything compiles."""
        self.say("warming up")
        first = 0.0
        for step in range(self.job.warmup):
            started = clock(self.device)
            self._generate()
            self._train()
            first = first if step else clock(self.device) - started
        self.clock.take()
        self.watch.mark_warm()
        report = self.watch.report()
        ready = Ready(
            load_seconds=self.load_seconds,
            first_step_seconds=first,
            compile_seconds=report.seconds,
            graphs=report.graphs,
        )
        if self.is_first:
            write_json(self.job.out / READY, ready.model_dump())

    # --- one step -------------------------------------------------------------------------------------------

    def round_robin(self) -> None:
        """Take a measured step whenever the suite requests one."""
        while True:
            turn = self._next_turn()
            if turn is None:
                return
            while self.steps_taken < turn:
                if self.steps_taken == 0:
                    self.memory.reset()
                self.say(f"step {self.steps_taken + 1}")
                with watched(self.job.timeout, least=0.9):
                    times = self.step()
                self.steps_taken += 1
                if self.is_first:
                    append_rows(self.job.out / ROWS, [times])
                self.say(f"step {self.steps_taken}: " + ", ".join(f"{k} {v:.4f}" for k, v in times))

    def step(self) -> StepTimes:
        """Take one step: generate, train, update the engine, and time each phase."""
        self._wait()
        marks = [clock(self.device)]
        self._generate()
        marks.append(self._wait())
        self.policy.backend.forward_backward(self.batches, self.loss)
        marks.append(self._wait())
        self.policy.backend.optimizer_step()
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
        rows = self.engine.engine.generate(self.requests) if self.requests else []
        return [completion for row in rows for completion in row]

    def _train(self) -> None:
        self.policy.backend.forward_backward(self.batches, self.loss)
        self.policy.backend.optimizer_step()
        self._push()

    def _push(self) -> None:
        self.engine.transfer.push(self.policy.backend, self.engine.engine, policy_version=self.steps_taken)

    def _logprob_gap(self) -> float:
        """Largest |trainer - engine| over all tokens of one more generation, of all ranks. Collective."""
        import torch

        from lockstep.schema.batch import policy_samples, rollout_samples
        from lockstep.schema.rollout import Completion, Trajectory

        shares = self.ranks.gather(self._generate(), list[Completion], what="the gap")
        every = [completion for share in shares for completion in share]
        documents = policy_samples(rollout_samples(map(Trajectory.of, every)), None)
        batches = self.policy.plan(documents, [sample.loss_mask.float() for sample in documents])
        gaps = []
        for batch, scored in zip(batches, self.policy.backend.logprobs(batches), strict=True):
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
                raise LockstepError(f"deadline: the cell got no turn within {self.job.patience:g} s")
            time.sleep(_POLL_SECONDS)

    def _wait(self) -> float:
        """Wait until every rank's device is done; return the time."""
        clock(self.device)
        if self.ranks.world_size > 1:
            self.ranks.gather(None, what="the end of a phase")
        return time.perf_counter()

    # --- the end --------------------------------------------------------------------------------------------

    def _outcome(self) -> dict[str, Any]:
        """Collective. Counters first: the gap has a forward of its own to compile."""

        from lockstep_lab.suite.machine import device_name

        job, report = self.job, self.watch.report()
        peaks = self.ranks.gather(self.memory.peak(), int, what="memory")
        peak = peak_flops(device_name(self.device)) if self.device.type == "cuda" else None
        lengths = job.work.lengths()
        return {
            "recompiles": report.recompiles,
            "graph_breaks": report.graph_breaks,
            "peak_memory_bytes": max(peaks),
            "memory_kind": self.memory.kind.replace("of each input", "since the warm-up"),
            "micro_batches": tuple(batch.num_slots for batch in self.batches),
            "tokens": sum(lengths),
            "sampled_tokens": job.work.completion_tokens,
            "training_flops": training_flops(
                self.config, parameters=self._matmul_parameters(), lengths=lengths
            ),
            "peak_flops": None if peak is None else peak * self.ranks.world_size,
            "logprob_gap": self._logprob_gap(),
            "axes": self.policy.resolved.axes,
            "statement": self.ranks.description,
        }

    def _matmul_parameters(self) -> int:
        """All, tied ones once; without the input embedding where it is a matrix of its own."""
        module: Any = self.policy.model.module
        count = sum(map(_entries, module.parameters()))
        tied = bool(self.config.tie_word_embeddings)
        return count - (0 if tied else _entries(module.get_input_embeddings().weight))


def _entries(parameter: torch.Tensor) -> int:
    """Of all ranks. ZeRO 3 leaves an empty tensor where it has cut one up; a DTensor's numel is the whole."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; return the exit status."""
    return Cell.main(BenchJob, argv)


if __name__ == "__main__":
    leave_with(main, "bench")
