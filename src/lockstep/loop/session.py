"""Everything around a loop: the run directory, metrics, display, checkpoints, Ctrl-C and the summary."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from lockstep.config.run import RunConfig
from lockstep.errors import CheckpointError, ConfigError, LockstepError
from lockstep.loop.checkpoint import CheckpointManager
from lockstep.loop.checkpoint_files import Boundary, checked_run_state, seen_field
from lockstep.loop.distributed import (
    compare_settings,
    log_header,
    open_run_dir,
    resume_command,
    saying_how_to_go_on,
)
from lockstep.loop.gap_check import gap_complaint
from lockstep.loop.interrupt import Interrupt, Interrupted
from lockstep.loop.peer_copy import PeerCopies
from lockstep.loop.resolve import Resolved
from lockstep.loop.rollout_rows import RolloutLog, ledger_rows
from lockstep.loop.run_manifest import RunManifest, evaluation_line, wandb_settings
from lockstep.loop.run_recorders import RunRecorders
from lockstep.models.load import LoadedModel
from lockstep.observe import flight
from lockstep.observe.display import Display, RunLog
from lockstep.observe.metrics import MetricsLog, Spans, memory_metrics
from lockstep.observe.run_history import EVALUATIONS
from lockstep.observe.text import printable
from lockstep.protocols import Saved, TrainBackend
from lockstep.ranks.context import RankContext, record
from lockstep.ranks.environment import recovery
from lockstep.ranks.guard import failed_together
from lockstep.recording.recorder import Recorder
from lockstep.schema.recording import RecordingHeader
from lockstep.schema.rollout import RolloutGroup, SampleRecord
from lockstep.train.state.rng import generators_at

_BETWEEN = ("time/evaluate", "time/save", "time/peer_copy")
"""Of what happens between two steps."""


class Session:
    """One process's share of a run: from its start, or from a checkpoint, to its end. A context manager.

    On several ranks every rank makes the same calls; only rank 0's write and show something.

    Args:
        resume: the folder of the run to go on with; None starts a new one in `run.run_dir`.
        restart: begin the run in `run.run_dir` again; what it has written is kept (see RunDir.create).
        checkpoint: the step of its checkpoint to go on from; None: the last.
        ranks: None: this process alone.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or does not agree with the rest of the
            run: raised before a model is loaded.
    """

    def __init__(
        self,
        run: RunConfig,
        *,
        resume: Path | None = None,
        checkpoint: int | None = None,
        ranks: RankContext | None = None,
        restart: bool = False,
    ) -> None:
        self.run = run
        self.ranks = ranks or RankContext.alone()
        compare_settings(run, self.ranks, resume=resume)
        self.display = Display(
            run.name,
            total_steps=run.steps,
            mode=run.log.display if self.ranks.is_first else "off",
        )
        self.spans = Spans(on_change=self._phase)
        self.dir, self._folders = open_run_dir(run, self.ranks, resume=resume, restart=restart)
        self._log: RunLog | None = None
        """Set in `__enter__`: a resume that is refused leaves the folder as it was."""
        self._logging = contextlib.ExitStack()
        self._interrupt = Interrupt()
        self._resumed = resume is not None
        self._started = time.monotonic()
        self._state: dict[str, Any] = {"evaluations": {}, "evaluated": [], "wall_seconds": 0.0}
        self._state |= {"trained_tokens": 0, "gap_checked": False}
        self._gaps: list[str] = []
        """What the files of a resumed run lack, and it can do without."""
        self._logged = 0
        """Number of steps in metrics.jsonl."""
        self._metrics: MetricsLog | None = None
        self._resolved: Resolved[RunConfig] | None = None
        self._boundary: Boundary | None = None
        """The last one; set by `restore`."""
        self._begun = False  # whether this process has begun a step or written an evaluation
        self._saved: int | None = None
        """The step of the checkpoint that was saved or loaded last."""
        self._rollouts = RolloutLog(self.dir)
        self._recorders = RunRecorders(
            run, self.dir.path, self.ranks, folders=self._folders, spans=self.spans
        )
        self._manifest = RunManifest(run=run, dir=self.dir, ranks=self.ranks, say=self.display.note)
        self._copies = PeerCopies.of_launcher(self.ranks, say=self.display.note)
        self._restart = recovery()
        self._source: str | None = None
        """What the run goes on from: memory, checkpoint; None: it begins."""
        self._between: dict[str, float] = {}
        """Seconds of evaluations and saves since the last step."""
        try:
            self._checkpoints = CheckpointManager(
                self.dir.checkpoints,
                run.checkpoint,
                ranks=self.ranks,
                folders=self._folders,
                say=self.display.note,
            )
            self._from = self._restore_state(checkpoint) if self._resumed else None
        except BaseException:
            self.dir.discard()
            self.dir.close()
            raise

    def _phase(self, spans: tuple[str, ...]) -> None:
        self.display.phase(spans)
        flight.note(phase=spans[-1] if spans else "loop")

    def progress(self, done: int, total: int) -> None:
        """Show the number of completions finished in the current generation."""
        self.display.progress(done, total)
        flight.note(completions=[done, total])

    def _restore_state(self, checkpoint: int | None) -> Path | None:
        """The checkpoint to go on from, whose run_state becomes this one's; None: the run begins again."""
        copied, path = None, None
        if self._copies is not None and self._restart is not None:
            self._restart.mark("connect")
            copied = self._copies.newest()
        if copied is not None:
            self._source, (path, state) = "memory", copied
            self._state = checked_run_state(state, path)
        elif (path := self._checkpoints.find(checkpoint)) is not None:
            self._source, self._state = "checkpoint", checked_run_state(self._checkpoints.check(path), path)
            self._state["checkpoints_read"] = self._state.get("checkpoints_read", 0) + 1
        done = int(self._state.get("step", 0))
        with self.ranks.together("looking at what is done"):
            self._manifest.check_steps(done, saved=self._checkpoints.steps)
        known = self.ranks.from_first(
            lambda: self._consistent_evaluations(path, done), what="comparing the run's files"
        )
        self._state["evaluated"] = known
        self._state["evaluations"] = {
            name: each for name, each in self._state["evaluations"].items() if [each["step"], name] in known
        }
        self._logged = done
        return path

    def _consistent_evaluations(self, path: Path | None, done: int) -> list[list[Any]]:
        """The evaluations that need not be made again. Raises CheckpointError: the files do not agree."""
        self.dir.read_manifest()
        if path is None:
            self.dir.check_nothing_done()
            return []
        known, self._gaps = self._manifest.check_history(
            self._state["evaluated"], done=done, saved=self._checkpoints.steps()
        )
        return known

    def __enter__(self) -> Session:
        try:
            with self.ranks.together("opening the log"):
                self._log = self.display.log = RunLog(self.dir.logs / f"rank-{self.ranks.rank}.log")
        except BaseException:
            self.dir.close()
            raise
        self._logging.callback(self._log.close)
        if flight.current() is None:
            self._logging.callback(flight.stop)
            try:
                record(self.dir.logs / "flight", rank=self.ranks.rank, world_size=self.ranks.world_size)
            except ConfigError as error:  # as for the log: a full disk ends a run where its results are lost
                self._log.line(f"without a flight record, so `lockstep hang` knows nothing: {error}")
        self._logging.enter_context(self._log.records())
        self._log.line(log_header(self.ranks, resumed=self._resumed))
        self._interrupt.__enter__()
        self.display.__enter__()
        self.display.note(f"run directory: {self.dir.path}")
        for gap in self._gaps:
            self.display.note(f"warning: {gap}")
        if self._folders.leaders:
            self.display.note(self._folders.text())
        if self._copies is None and self.run.cluster is not None and self.run.cluster.peer_copy:
            self.display.note("cluster.peer_copy heals ranks of --ranks and --cluster; here is one process")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._log is not None:
            self._log.error(error)
        with contextlib.ExitStack() as last:
            # They run in reverse: the folder's lock goes after the last write into it, and the handlers of
            # signals last, as SIGTERM's default would end the process in the middle.
            last.callback(self._interrupt.__exit__)
            last.callback(self.dir.close)
            discards = not self._leaves_something(error)
            if discards:
                last.callback(self.dir.discard)
            last.callback(self._logging.close)
            last.callback(self.display.__exit__, kind, error, trace)
            if isinstance(error, LockstepError):
                error.underway = self._begun
            summary = None if error is None else self._summarize_failure(error)
            for part in (*self._recorders.all, self._metrics):
                if part is not None:
                    with self._noting_errors_after(error):
                        part.close()
            if discards and self.dir.is_new:
                self.display.note("nothing had begun: what was written there is removed")
        if summary is not None and summary["outcome"] == "interrupted":
            raise Interrupted(summary) from error

    def _leaves_something(self, error: BaseException | None) -> bool:
        """Whether the run's folder holds steps, evaluations, or a log that the error names."""
        names_log = any(f"{path}/" in str(error) for path in (self.dir.path, self.dir.path.resolve()))
        return self._begun or names_log or not isinstance(error, LockstepError)

    @contextlib.contextmanager
    def _noting_errors_after(self, error: BaseException | None) -> Iterator[None]:
        """Show instead of raise an error of the cleanup after `error`, which is the one to raise; None: raise
        it."""
        try:
            yield
        except LockstepError as second:
            if error is None:
                raise
            self.display.note(f"then: {printable(str(second))}")

    def _summarize_failure(self, error: BaseException) -> dict[str, Any]:
        if not isinstance(error, KeyboardInterrupt) and not self._interrupt.at_once:
            if self.run.checkpoint.background and failed_together(self.ranks, error, where="at the end"):
                with self._noting_errors_after(error):
                    self._checkpoints.finish()
            code = error.code if isinstance(error, LockstepError) else None
            return self._summary("failed", after=error, error=f"{type(error).__name__}: {error}", code=code)
        steps = self._checkpoints.steps()
        self.display.note(
            f"stopped at once; the last checkpoint is of step {steps[-1]}"
            if steps
            else "stopped at once, without a checkpoint"
        )
        return self._summary("interrupted", after=error, **self._resume_fields(steps[-1] if steps else 0))

    def _resume_fields(self, steps: int) -> dict[str, Any]:
        name = None if self._interrupt.signal is None else self._interrupt.signal.name
        return {"steps": steps, "signal": name, "resume": resume_command(self.dir.path, self.ranks)}

    def describe(
        self, *, resolved: Resolved[Any], model: LoadedModel, data: Mapping[str, Any], fingerprint: str | None
    ) -> None:
        """Write what "auto" became to the manifest, and show it.

        Args:
            data: counts of the data report.
            fingerprint: of the training data; None for data that is generated on demand.

        Raises:
            DataError: a resumed run finds other training data than it was started with.
        """
        self._resolved = resolved
        self.display.status.compiled = resolved.execution != "eager"
        if resolved.device.startswith("cuda"):
            # Else a span would end when its kernels are launched, and the next one would get their time.
            self.spans.synchronize = partial(torch.cuda.synchronize, resolved.device)
        same: dict[str, Any] = {"data": data, "fingerprint": fingerprint, "resumed": self._resumed}
        self._manifest.describe(resolved, model=model, **same)

    def restore(self, backend: Saved) -> int:
        """Load the checkpoint to go on from; returns the number of steps that are done."""
        done = 0
        if self._resumed:
            if self._restart is not None:
                self._restart.mark("build")
            if self._from is not None:
                backend.load(self._from, verified=True)
                done = int(self._state["step"])
                self._saved = done if self._source == "checkpoint" else None
            if self._restart is not None:
                self._restart.mark("load")
            self.display.note(
                f"resuming after {done} steps"
                + (f" from {self._from}" if self._from else ": no checkpoint yet")
            )
        with self.ranks.together("opening the metrics"):
            self._open_metrics(done)
        self._pass_boundary(done)
        if self._copies is not None and self._source != "memory":
            state = {"inputs_seen": 0} | self._state | {"wall_seconds": self._wall()}
            self._copies.begin(done, backend, state)
        return done

    def _pass_boundary(self, done: int) -> None:
        """Take the state after `done` steps."""
        self._boundary = Boundary.take(done, self._state, ranks=self.ranks)

    def _open_metrics(self, done: int) -> None:
        """Open the metrics, on rank 0, for the steps after the first `done`."""
        if self._resumed:
            self.dir.rewind(done, evaluated=[name for name in EVALUATIONS if self.evaluated(name, done)])
        wandb = wandb_settings(self.run)
        if self.ranks.is_first:
            self._metrics = MetricsLog.of_run(
                self.dir, tensorboard=self.run.log.tensorboard, wandb=wandb, first_step=done
            )

    def recorder(
        self,
        header: RecordingHeader,
        *,
        first_step: int,
        model: LoadedModel,
        backend: TrainBackend,
        updates_per_step: int = 1,
    ) -> Recorder | None:
        """Return the recorder of a role's inputs, which the header names, if the run has one; it goes on
        after the first `first_step` steps. Every rank records the micro-batches assigned to it; of ranks that
        share them, the first."""
        return self._recorders.open(
            header,
            first_step=first_step,
            inputs_seen=int(self._state.get(seen_field(header.role), 0)),
            model=model,
            backend=backend,
            updates_per_step=updates_per_step,
        )

    @contextlib.contextmanager
    def interruptible(self, on_request: Callable[[], None] = lambda: None) -> Iterator[Interrupt]:
        """Inside, the first Ctrl-C (or SIGTERM) lets the loop end in good order; it calls `on_request` at
        once."""

        def request() -> None:
            self.display.note("stopping: saving first (Ctrl-C again stops at once, without saving)")
            on_request()

        with self._interrupt.deferred(request) as interrupt:
            yield interrupt

    def is_cancelled(self) -> bool:
        """Return whether this process was asked to stop gracefully; `stopping` answers for all ranks."""
        return self._interrupt.requested

    def stopping(self) -> bool:
        """Return whether the run stops gracefully here, because a signal came to one of its ranks.
        Collective: every rank gets the same answer."""
        return self._interrupt.agree(
            lambda own: self.ranks.gather(own, str | None, what="the step's boundary")
        )

    def begin_step(self, step: int) -> None:
        """Start step `step`, which counts from 0."""
        self._begun = True
        self._checkpoints.poll()
        self.ranks.at("sampling and training", step=step)
        flight.note(step=step, phase="loop", micro_batch=None, inputs=None, completions=None)
        self.display.begin(step)
        self._recorders.begin_step(step)
        times = self.spans.flush()
        self._between = {name: times[name] for name in _BETWEEN if name in times}

    @staticmethod
    def is_due(every: int, done: int) -> bool:
        """Return whether something that happens every `every` steps (0: never) is due after `done` steps."""
        return every > 0 and done > 0 and done % every == 0

    def evaluated(self, name: str, done: int) -> bool:
        """Return whether evaluation `name` of the weights after `done` steps is known."""
        return bool(self._state["evaluations"].get(name, {}).get("step") == done)

    def log_step(self, step: int, metrics: Mapping[str, float], *, weights_hash: str | None = None) -> None:
        """Write one line of metrics.jsonl, with times, throughput and memory added, and the hash of the
        weights after the step, where it is computed.

        time/evaluate and time/save happened just before the step and are not part of time/step.
        """
        times = self.spans.flush() | self._between
        seconds = times["time/step"]
        tokens = metrics.get("rollout/tokens", metrics.get("input/tokens", 0.0))
        self._state["trained_tokens"] += int(metrics.get("input/trained_tokens", 0.0))
        values = {
            **metrics,
            **times,
            "throughput/tokens_per_second": tokens / seconds if seconds else 0.0,
            **self._memory(),
        }
        self._write(step, values if weights_hash is None else values | {"weights_hash": weights_hash})
        self._logged = step + 1
        self.display.step(step, values, seconds=seconds)
        if self._restart is not None and "step" not in self._restart.phases:
            self._restart.mark("step")
            self.display.note(str(self._restart))
        self._pass_boundary(step + 1)

    def _memory(self) -> dict[str, float]:
        """The largest use of all ranks: that rank would run out first."""
        own = memory_metrics("cpu" if self._resolved is None else self._resolved.device)
        everyone = self.ranks.gather(own, dict[str, float], what="the step's metrics")
        return {name: max(values.get(name, 0.0) for values in everyone) for name in own}

    def check_gap(self, metrics: Mapping[str, float], *, temperature: float) -> dict[str, float]:
        """Check a process's first step: engine and trainer hold the same weights, so their logprobs must
        agree.

        Returns:
            logprob_gap_first_step_ok, 1 or 0, once in a run (a resumed run's metrics are those of a run that
            was not interrupted); nothing without a logprob_gap_mean.

        Raises:
            EngineError: they do not agree at all, see loop/gap_check.py.
        """
        if "logprob_gap_mean" not in metrics or self._resolved is None:
            return {}
        complaint = gap_complaint(metrics, dtype=self._resolved.dtype, temperature=temperature)
        if complaint is not None:
            self.display.note(f"warning: {complaint}")
        if self._state["gap_checked"]:
            return {}
        self._state["gap_checked"] = True
        return {"logprob_gap_first_step_ok": float(complaint is None)}

    def begin_rollouts(self, step: int, groups: Sequence[RolloutGroup], *, save: bool) -> None:
        """Begin to write the rollouts of a step, under `save`: in a thread, since a GPU leaves the processor
        idle in forward and backward. `log_rollouts` waits for it."""
        assert self.run.sampling is not None, "runs on documents have no rollouts"
        skip = self.run.sampling.skip_special_tokens
        self._rollouts.begin(step, groups, save=save, skip_special_tokens=skip)

    def log_rollouts(self, step: int, asked: Sequence[SampleRecord], groups: Sequence[RolloutGroup]) -> None:
        """Wait until the rollouts of the step are written, and display the first `log.samples_per_step`.
        Write what became of every sample that the step asked for, before its line of metrics.jsonl.

        Args:
            groups: that the step's update was on.

        Raises:
            LockstepError: they could not be written.
        """
        with self.spans("log"):
            if self._metrics is not None:
                trained = Counter(rollout.trajectory.seed for group in groups for rollout in group.rollouts)
                self._metrics.write_ledger(ledger_rows(step, asked, trained))
            for row in self._rollouts.wait()[: self.run.log.samples_per_step]:
                content = row["token_ids"] if row["completion"] is None else row["completion"]
                self.display.note(f"    [{row['reward']:.2f}] {content!r}"[:200])

    def log_evaluation(
        self,
        name: str,
        done: int,
        numbers: Mapping[str, Any],
        rows: Sequence[Mapping[str, Any]] = (),
        *,
        budget_factor: int = 1,
    ) -> None:
        """A held-out evaluation of the weights after `done` steps; `name` is before, during or after.
        `budget_factor`: how many times the tokens of the others it was allowed."""
        self._begun = True
        values = {f"eval/{key}": value for key, value in numbers.items()}
        self._write(done, values, evaluation=name)
        if rows:
            self.dir.write_evaluation(name if name != "during" else f"step-{done:06d}", rows)
        # Last: what could not be written is evaluated again.
        self._state["evaluations"][name] = {"step": done, **numbers}
        self._state["evaluated"].append([done, name])
        self._pass_boundary(done)
        self.display.note(evaluation_line(name, done, numbers, budget_factor=budget_factor))

    def save(self, done: int, backend: Saved, *, wait: bool = False) -> Path:
        """Save a checkpoint of the state after `done` steps and prune older ones. wait: not in the
        background, whatever checkpoint.background says; so is that of the last step.
        In the middle of the next step, the generators go back to where they were after `done` steps."""
        boundary = self._boundary
        assert boundary is not None and boundary.done == done, "only the last boundary can be saved"
        with self.spans("save"):
            metric = self.run.checkpoint.metric.removeprefix("eval/")
            evaluations = boundary.state["evaluations"].values()
            current = [e[metric] for e in evaluations if e["step"] == done and e.get(metric) is not None]
            if self._metrics is not None:
                # Before the checkpoint: a resume can cut lines that
                # come after it, and cannot make up for lost ones.
                self._metrics.sync()
            if self._copies is not None:
                self._copies.wait()  # both use the backend's buffers
            with generators_at(boundary.generators):
                path = self._checkpoints.save(
                    done,
                    backend,
                    self._run_state(boundary.state),
                    metric=current[0] if current else None,
                    wait=wait or done == self.run.steps,
                )
        self._saved = done
        return path

    def copy(self, done: int, backend: Saved) -> None:
        """Copy the state after `done` steps into memory that outlives this process, where the launcher has
        made room for that (cluster.peer_copy)."""
        if self._copies is not None:
            with self.spans("peer_copy"):
                if self._metrics is not None and self._copies.on_nodes:
                    self._metrics.sync()  # as before a checkpoint
                self._copies.save(done, backend, self._run_state(self._state), busy=self._checkpoints.busy)

    def _run_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return {**state, "wall_seconds": self._wall(), "inputs_seen": 0, **self._recorders.inputs_seen()}

    @contextlib.contextmanager
    def keeping(self, done: int, backend: Saved) -> Iterator[None]:
        """Save the steps since the last checkpoint when the body fails, then raise. The body must leave the
        weights alone (sampling, rewards, evaluation)."""
        try:
            yield
        except Exception as error:
            if (
                done > 0
                and self._saved != done
                and failed_together(self.ranks, error, where=f"after {done} steps")
            ):
                with self._noting_errors_after(error):
                    path = self.save(done, backend, wait=True)
                    self.display.note(f"failed after {done} steps; saved {path}")
            raise

    def interrupted(self, done: int, backend: Saved) -> dict[str, Any]:
        """Save after `done` steps and end the run for now."""
        path = self.save(done, backend, wait=True)
        self._close_recorders()
        self.display.note(f"stopped after {done} steps; saved {path}")
        return self._summary("interrupted", **self._resume_fields(done))

    def finish(self, done: int, backend: Saved) -> dict[str, Any]:
        """Save, export, and write the summary."""
        extra: dict[str, Any] = {"steps": done}
        if self.run.checkpoint.save_at_end and self._saved != done:
            self.save(done, backend, wait=True)
        self._checkpoints.finish()
        self._close_recorders()
        if self.run.checkpoint.export_at_end:
            with self.spans("export"), saying_how_to_go_on(self.dir.path, done, saved=self._saved == done):
                backend.export(self.dir.path / "export")
            extra["export"] = str(self.dir.path / "export")
        return self._summary("finished", **extra)

    def _close_recorders(self) -> None:
        """End the recordings, of which nothing more comes, and bring what the ranks have written together."""
        self._recorders.finish()
        try:
            self._folders.collect(self.dir.logs)
        except CheckpointError as error:  # on every rank; the run is complete without them
            self.display.note(f"the logs of the other nodes stay there: {error}")

    def _write(self, step: int, values: Mapping[str, Any], *, evaluation: str | None = None) -> None:
        if self.ranks.is_first:
            assert self._metrics is not None, "restore() opens the metrics"
            self._metrics.write(step, values, evaluation=evaluation)

    def _wall(self) -> float:
        return float(self._state["wall_seconds"]) + time.monotonic() - self._started

    def _summary(self, outcome: str, *, after: BaseException | None = None, **extra: Any) -> dict[str, Any]:
        """Write and return it. after: the error that ends the run."""
        evaluations = self._state["evaluations"]
        if self._copies is not None:
            read = self._state.get("checkpoints_read", 0)
            extra |= self._copies.summary(self._restart, source=self._source, checkpoints_read=read)
        summary = {
            "outcome": outcome,
            "run_dir": str(self.dir.path),
            "wall_seconds": round(self._wall(), 1),
            "trained_tokens": self._state["trained_tokens"],
            "eval_before": evaluations.get("before"),
            "eval_after": evaluations.get("after"),
            **extra,
        }
        flight.note(phase=outcome)
        if self._log is not None:
            self._log.line(f"{outcome} after {summary['wall_seconds']} s")
        if after is not None and self._resumed and self._metrics is None:
            return summary  # nothing has begun: the summary of the run as it was remains
        with self._noting_errors_after(after):
            self.dir.write_summary(summary)
        return summary
