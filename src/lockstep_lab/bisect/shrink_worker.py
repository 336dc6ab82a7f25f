"""A process that runs trials of a cell, one after the other, and that a trial may kill.

`TrialRunner` is the parent's side: a trial that raises, hangs, is killed by a signal or runs out of memory is
a Crash. The worker lives on over trials that go well, so the model is loaded once per number of layers.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import resource
import signal
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from lockstep.errors import LockstepError
from lockstep.processes.child import JobProcess, Message, ProcessEnded, receive, send, signal_name
from lockstep.processes.supervisor import supervise
from lockstep_lab.bisect.shrink import Crash, Trial
from lockstep_lab.suite.process import is_out_of_memory

if TYPE_CHECKING:
    from lockstep.recording import Recording
    from lockstep.schema.batch import PackedBatch
    from lockstep_lab.replay.cell import ReplayOptions

TRIAL_SECONDS = 300.0
_START_SECONDS = 300.0


class TrialRunner:
    """Call it with a trial; a context manager that ends the worker.

    Args:
        recording: a directory, or None: the shipped corpus.
        options: of the cell that crashes.
        num_layers: of the whole model, which a trial with that many is left as it is.
        log: what the worker prints goes there.
        seconds: a trial that takes longer hangs; loading the model is not counted.
    """

    def __init__(
        self,
        recording: Path | None,
        options: ReplayOptions,
        *,
        num_layers: int,
        log: Path,
        seconds: float = TRIAL_SECONDS,
    ) -> None:
        self._setup = {
            "recording": None if recording is None else str(recording),
            "num_layers": num_layers,
            "options": dataclasses.asdict(options),
        }
        self.index = 0
        """The input that trials are parts of."""
        self._log, self._seconds = log, seconds
        self._process: JobProcess | None = None
        self._log_start = 0
        self.starts = 0
        """Number of workers started."""

    def __enter__(self) -> TrialRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.end()

    def __call__(self, trial: Trial) -> Crash | None:
        """Run one trial.

        Raises:
            LockstepError: the worker cannot be set up: no trial was run.
        """
        if self._process is None or self._process.closed:
            self._process = self._start()
        load = {"index": self.index, "num_layers": trial.num_layers}
        for job, seconds in ((load, _START_SECONDS), ({"parts": trial.parts}, self._seconds)):
            answer = self._answer(self._process, job, seconds)
            if isinstance(answer, Crash):
                return answer
            if answer["crash"] is not None:
                if answer["broken"]:
                    self._process.end()
                return Crash(**answer["crash"])
        return None

    def _start(self) -> JobProcess:
        with self._log.open("ab") as log:
            process = JobProcess(__name__, role="shrink", output=log.fileno(), traceback=True)
        self.starts += 1
        ready = self._answer(process, self._setup, _START_SECONDS)
        if isinstance(ready, Crash) or "ready" not in ready:
            process.end()
            what = ready if isinstance(ready, Crash) else ready.get("failed")
            raise LockstepError(f"process-died: the trial worker cannot start: {what}; see {self._log}")
        return process

    def _answer(self, process: JobProcess, job: Message, seconds: float) -> Message | Crash:
        self._log_start = self._log.stat().st_size
        try:
            return process.exchange(job, seconds=seconds)
        except TimeoutError:
            message = f"no answer within {seconds:.0f} s"
            return Crash(type="timeout", line="", message=message, traceback=self._printed())
        except ProcessEnded as error:
            status = process.poll()
            if status is not None and status < 0:
                message = f"killed by signal {-status}"
                return Crash(type=signal_name(status), line="", message=message, traceback=self._printed())
            return Crash(type=f"exit status {status}", line="", message=str(error))

    def _printed(self) -> str:
        """The worker's output since the trial began, with faulthandler's stack."""
        with self._log.open("rb") as log:
            log.seek(self._log_start)
            return log.read(1 << 16).decode("utf-8", "replace")


def crash_of(error: BaseException) -> Crash:
    """Class and innermost line of what was raised first."""
    first = error
    while first.__cause__ is not None:
        first = first.__cause__
    frames = traceback.extract_tb(first.__traceback__)
    kind = type(first)
    plain = kind.__module__ in ("builtins", "lockstep.errors")
    name = kind.__name__ if plain else f"{kind.__module__}.{kind.__name__}"
    if is_out_of_memory(error):
        name = "out of memory"
    return Crash(
        type=name,
        line=f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "",
        message=str(first).strip().partition("\n")[0][:500],
        traceback="".join(traceback.format_exception(error)),
    )


# --- the worker ---------------------------------------------------------------------------------------------


class Cut:
    """A recording of one input that was made smaller: the part of a Recording that a Policy and its buckets
    use."""

    def __init__(self, recording: Recording, index: int, batch: PackedBatch) -> None:
        self.path, self.header = recording.path, recording.header
        self.metas = (recording.metas[index],)
        self._input = dataclasses.replace(recording[index], batch=batch, outputs=None)
        self.lengths = (batch.lengths[: len(batch.sample_ids)],)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return self._input


class _Worker:
    def __init__(self, setup: Mapping[str, Any]) -> None:
        from lockstep.recording import Recording
        from lockstep_lab.replay.cell import ReplayOptions

        self._recording = Recording.open(setup["recording"])
        self._options = TypeAdapter(ReplayOptions).validate_python(setup["options"])
        self._whole_layers = setup["num_layers"]
        self._index, self._layers = -1, -1
        self._policy: Any = None

    def load(self, index: int, num_layers: int) -> None:
        """The input, and the model with so many layers, unless they are there."""
        from lockstep_lab.bisect.arms import exact

        if index != self._index:
            self._index, self._batch = index, exact(self._recording[index].batch)
        if num_layers == self._layers:
            return
        from lockstep.observe.metrics import Spans
        from lockstep_lab.replay.buckets import plan_buckets
        from lockstep_lab.replay.policy import Policy

        cell = self._options.cell
        # Freed before the next one is loaded: two models may not fit.
        self._policy = None
        if num_layers != self._whole_layers:
            cell = dataclasses.replace(cell, num_layers=num_layers)
        options = dataclasses.replace(self._options, cell=cell)
        cut: Any = Cut(self._recording, self._index, self._batch)
        # Of no effect on trials, each of which has a plan of its own: without a limit that could refuse.
        bucketing = plan_buckets(cut, [0], options, max_positions=1 << 20)
        self._policy = Policy(cut, options, order=[0], bucketing=bucketing, spans=Spans())
        self._layers = num_layers

    def run(self, parts: list[list[int]]) -> None:
        """One trial, as a replay of a recording of this one input would run it."""
        import torch

        from lockstep_lab.bisect.arms import take
        from lockstep_lab.replay.buckets import plan_buckets
        from lockstep_lab.replay.losses import token_loss

        batch = take(self._batch, [(i, n) for i, n in parts])
        cut: Any = Cut(self._recording, self._index, batch)
        options = self._options
        bucketing = plan_buckets(cut, [0], options, max_positions=self._policy.model.max_positions)
        if options.cell.execution != "eager":
            torch._dynamo.reset()  # many shapes would run into torch's limit of graphs, which is no crash
        fitted = bucketing.fit(batch)
        backend = self._policy.backend
        backend.drop_gradients()
        if options.backward:
            backend.forward_backward([fitted], token_loss(self._recording.header, options.loss))
        else:
            backend.logprobs([fitted])
        backend.drop_gradients()
        if options.cell.device != "cpu":
            torch.cuda.synchronize()


def main(*, jobs: int, replies: int) -> None:
    """Run trials until the pipe of jobs closes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    supervise(jobs, passed_on=[signal.SIGABRT])
    faulthandler.enable()
    job = receive(jobs)
    try:
        worker = _Worker(job)
    except LockstepError as error:
        send(replies, {"id": job["id"], "failed": f"{type(error).__name__}: {error}"})
        return
    reply: Message = {"ready": True}
    while True:
        send(replies, {"id": job["id"], **reply})
        job, reply = receive(jobs), {"crash": None}
        try:
            if "parts" in job:
                worker.run(job["parts"])
            else:
                worker.load(job["index"], job["num_layers"])
        except Exception as error:  # whatever it is: it is the answer
            # A CUDA context does not survive most errors.
            broken = worker._options.cell.device != "cpu"
            reply = {"crash": dataclasses.asdict(crash_of(error)), "broken": broken}
