"""Everything around a loop: the run's folder, its checkpoints, metrics, display, signals and summary.

with Run.open(config) as run:
    ...                                             # build the parts
    run.restore(policy)
    for step, batch in run.steps(source, evaluate=evaluate):
        ...                                         # the algorithm
        run.log(step, metrics)
    return run.finish()
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, TypedDict, TypeVar, Unpack

import torch

from lockstep.config.run import RunConfig
from lockstep.config.run_config import on_ranks
from lockstep.data.lazy import LazyItems
from lockstep.errors import CheckpointError, ConfigError, LockstepError
from lockstep.loop.checkpoint_files import seen_field
from lockstep.loop.determinism import deterministic, weights_hash
from lockstep.loop.distributed import (
    compare_settings,
    connect_ranks,
    log_header,
    mesh_coordinates,
    open_run_dir,
    resume_command,
    saying_how_to_go_on,
    started_at,
)
from lockstep.loop.gap_check import GapWatch
from lockstep.loop.hub import push_export
from lockstep.loop.interrupt import Interrupt, Interrupted
from lockstep.loop.metrics import CompileMeter, TrainingWork, memory_of_ranks
from lockstep.loop.policy import Policy
from lockstep.loop.remote_roles import RemoteCritic
from lockstep.loop.resolve import Resolved
from lockstep.loop.roles import Critic
from lockstep.loop.rollout_rows import RolloutLog
from lockstep.loop.rollouts import Rollouts
from lockstep.loop.run_manifest import RunManifest, evaluation_line, wandb_settings
from lockstep.loop.run_recorders import Recorded, RunRecorders, recording_header
from lockstep.loop.saved import saved
from lockstep.loop.saving import Saving, is_due
from lockstep.loop.warm_start import warm_start_seconds
from lockstep.models.architectures import text_config
from lockstep.models.load import LoadedModel
from lockstep.observe import flight
from lockstep.observe.display import Display, RunLog
from lockstep.observe.memory import MemoryMeter
from lockstep.observe.memory_plans import OutOfMemory
from lockstep.observe.metrics import MetricsLog, Spans
from lockstep.observe.run_dir import new_path
from lockstep.observe.run_history import EVALUATIONS
from lockstep.observe.template_renderer import rendering_at
from lockstep.protocols import Algorithm
from lockstep.ranks.context import RankContext, record
from lockstep.ranks.environment import recovery
from lockstep.rollout.sampler import SampledStep
from lockstep.schema.recording import RecordingHeader
from lockstep.schema.rollout import RolloutGroup

Batch = TypeVar("Batch")
Batch_co = TypeVar("Batch_co", covariant=True)
_BETWEEN = ("time/evaluate", "time/save", "time/peer_copy")
"""Spans of what happens between two steps."""


class Source(Protocol[Batch_co]):
    """The source of a step's batch: rollouts, or documents."""

    def next(self, step: int) -> Batch_co | None:
        """Return the batch of a step; None: the run was asked to stop meanwhile."""
        ...

    def abort(self) -> None:
        """Cut `next` short, from another thread or a signal."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationResult:
    """An evaluation of the weights at a step's boundary."""

    numbers: Mapping[str, Any]
    """By name, without the eval/ of metrics.jsonl."""
    rows: Sequence[Mapping[str, Any]] = ()
    """The rows of rollouts/evaluation-NAME.jsonl."""
    budget_factor: int = 1
    """Its token limit, as a multiple of the other evaluations'."""


EvaluationName = Literal["before", "during", "after"]
Evaluate = Callable[[EvaluationName, int], EvaluationResult | None]
"""Called with the name and the steps that are done; None: it was cut short."""


class Start(TypedDict, total=False):
    """How to start a run: new or resumed, and on which ranks."""

    resume: Path | None
    """A run directory to go on from; the run is its config."""
    checkpoint: int | None
    """The step of the checkpoint to go on from; None is the last."""
    restart: bool
    """Begin the run in its folder again; what it has written is kept beside."""
    ranks: RankContext | None
    """Every one of them makes the same call; None: those of this process's launcher, if it has one."""


class Run:
    """One process's share of a run: from its start, or from a checkpoint, to its end. A context manager.

    On several ranks every rank makes the same calls; only rank 0's write and show something.

    Args:
        resume: the folder of the run to go on with; None starts a new one in `config.run_dir`.
        restart: begin the run in `config.run_dir` again; what it has written is kept (see RunDir.create).
        checkpoint: the step of its checkpoint to go on from; None: the last.
        ranks: None: this process alone.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged or of another run; no model is loaded.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        resume: Path | None = None,
        checkpoint: int | None = None,
        ranks: RankContext | None = None,
        restart: bool = False,
    ) -> None:
        ranks = ranks or RankContext.alone()
        self.config, self.ranks = on_ranks(config, ranks.world_size), ranks
        resume = None if resume is None else Path(resume)
        compare_settings(config, self.ranks, resume=resume)
        mode = config.log.display if self.ranks.is_first else "off"
        self.display = Display(config.name, total_steps=config.steps, mode=mode)
        self.spans, self._memory = Spans(on_change=self._show_phase), MemoryMeter()
        self.first_step = 0
        """Steps that were done when this process began."""
        self.dir, self._folders = open_run_dir(
            config,
            self.ranks,
            folder=resume or config.run_dir or new_path(config.name),
            resume=resume is not None,
            restart=restart,
        )
        self._resumed = resume is not None
        self._log: RunLog | None = None
        """Set in `__enter__`: a resume that is refused leaves the folder as it was."""
        self._logging = contextlib.ExitStack()
        self._interrupt = Interrupt()
        self._deferring = contextlib.ExitStack()
        """The first Ctrl-C lets the loop end in good order while this is open."""
        self._begun = False
        """Whether this process has begun a step or written an evaluation."""
        self._stopped_at: int | None = None
        self._resolved: Resolved[Any] | None = None
        self._work: TrainingWork | None = None
        self._policy: Policy | None = None
        self._compiled: CompileMeter | None = None
        self._gaps = GapWatch(config.sampling_temperature, self.display.note)
        self._steps_logged = 0
        self._between: dict[str, float] = {}
        """Seconds of evaluations and saves since the last step."""
        self._rollouts = RolloutLog(self.dir, token_details=config.log.token_details and self.ranks.is_first)
        self._sampled: SampledStep | None = None
        """The rollouts that the step is on; None: it is on documents."""
        self._restart = recovery()
        try:
            self._recorders = RunRecorders(self.dir.path, self.ranks, folders=self._folders, spans=self.spans)
            say = self.display.note
            self._manifest = RunManifest(run=self.config, dir=self.dir, ranks=self.ranks, say=say)
            self._saving = Saving(
                self._manifest,
                folders=self._folders,
                recorders=self._recorders,
                spans=self.spans,
                restart=self._restart,
            )
            if self._resumed:
                self._saving.find(checkpoint)
        except BaseException:
            self.dir.discard()
            self.dir.close()
            raise

    @classmethod
    @contextlib.contextmanager
    def open(cls, config: RunConfig, **start: Unpack[Start]) -> Iterator[Run]:
        """Connect the ranks, and open the run on them."""
        train, check = config.train, partial(on_ranks, config)
        with (
            deterministic(train.deterministic),
            connect_ranks(train.device, start.get("ranks"), check=check) as ranks,
        ):
            given: Start = {**start, "ranks": ranks}
            with Run(config, **given) as run, rendering_at(started_at(run.dir)):
                yield run

    def _show_phase(self, spans: tuple[str, ...]) -> None:
        self.display.phase(spans)
        self._memory.enter(spans)
        flight.note(phase=spans[-1] if spans else "loop")

    def progress(self, done: int, total: int) -> None:
        """Show the number of completions finished in the current generation."""
        self.display.progress(done, total)
        flight.note(completions=[done, total])

    def __enter__(self) -> Run:
        try:
            with self.ranks.fail_together("opening the log"):
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
        for gap in self._saving.gaps:
            self.display.note(f"warning: {gap}")
        if self._folders.leaders:
            self.display.note(self._folders.text())
        cluster = self.config.cluster
        if self._saving.copies is None and cluster is not None and cluster.peer_copy:
            self.display.note(
                "cluster.peer_copy can only restart ranks of --ranks and --cluster, but this run is one "
                "process"
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_deferring()
        if error is not None and self._log is not None:
            self._log.error(error)
        if error is not None and self._resolved is not None:
            self._saving.note_out_of_memory(error, self._resolved.memory, step=self._steps_logged)
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
            for part in (*self._recorders.all, self._saving.metrics, self._saving.rows):
                if part is not None:
                    with self._saving.errors_noted_after(error):
                        part.close()
            if discards and self.dir.is_new:
                self.display.note("no step had begun, so the files of this run are removed")
        if summary is not None and summary["outcome"] == "interrupted":
            raise Interrupted(summary) from error

    def _leaves_something(self, error: BaseException | None) -> bool:
        """Return whether the folder has steps, evaluations, a smaller plan, or a log that the error names."""
        named = any(f"{path}/" in str(error) for path in (self.dir.path, self.dir.path.resolve()))
        return self._begun or named or not isinstance(error, LockstepError) or bool(OutOfMemory.of(error))

    def _summarize_failure(self, error: BaseException) -> dict[str, Any]:
        if not isinstance(error, KeyboardInterrupt) and not self._interrupt.at_once:
            self._saving.finish_after(error)
            code = error.code if isinstance(error, LockstepError) else None
            return self._summary("failed", after=error, error=f"{type(error).__name__}: {error}", code=code)
        steps = self._saving.checkpoints.steps()
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
        """Write what everything became to the manifest, and show it.

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
            self._memory = MemoryMeter(resolved.device)
            self._work = TrainingWork.of(resolved, text_config(model.module), ranks=self.ranks.world_size)
        done = int(self._saving.state.values.get("step", 0)) if self._resumed else None
        self._manifest.describe(resolved, model=model, data=data, fingerprint=fingerprint, done=done)

    def follow_rows(self, items: LazyItems[Any]) -> None:
        """Keep in the run's folder which rows of its data are left out; see RowLog."""
        self._saving.follow_rows(items, resumed=self._resumed)

    def restore(
        self,
        policy: Policy,
        critic: Critic | RemoteCritic | None = None,
        algorithm: Algorithm | None = None,
        rollouts: Rollouts | None = None,
    ) -> None:
        """Load the checkpoint to go on from, if any; from here on these are what a checkpoint holds, and what
        is recorded."""
        self._policy, self._compiled = policy, CompileMeter(policy.backend, ranks=self.ranks)
        policy.details = self._rollouts.details
        begun = None if rollouts is None else rollouts.partial
        done = self._saving.load(saved(policy, critic, algorithm, begun, self.ranks)) if self._resumed else 0
        self._begin(done)
        self._attach_recorders(policy, critic)
        self._saving.begin(done, saved(policy, critic, algorithm, begun, self.ranks))

    def _begin(self, done: int) -> None:
        """Open the metrics, on rank 0, for the steps after the first `done`."""
        self.first_step = self._steps_logged = done
        with self.ranks.fail_together("opening the metrics"):
            if self._resumed:
                known = self._saving.state.is_evaluated
                self.dir.rewind(done, evaluated=[name for name in EVALUATIONS if known(name, done)])
            wandb = wandb_settings(self.config)
            if self.ranks.is_first:
                self._saving.metrics = MetricsLog.of_run(
                    self.dir, tensorboard=self.config.log.tensorboard, wandb=wandb, first_step=done
                )

    def _attach_recorders(self, policy: Policy, critic: Critic | RemoteCritic | None) -> None:
        """Let the inputs of the trained models go through recorders, if the run has any. Every rank records
        the micro-batches assigned to it; of ranks that share them, the first."""
        if not self.config.record.enabled:
            return
        header = recording_header(
            policy.resolved,
            model=policy.model,
            plan=policy.plan,
            temperature=self.config.sampling_temperature,
            contract=policy.backend.contract,
        )
        state, train = self._saving.state.values, self.config.train
        roles: list[tuple[Recorded, RecordingHeader]] = [(policy, header)]
        if isinstance(critic, Critic):
            roles.insert(0, (critic, critic.recording_header(header)))
        for role, own in roles:
            self._recorders.open(
                role,
                own,
                self.config.record,
                coordinates=mesh_coordinates(self.ranks, tp=train.tp, ring=train.ring),
                first_step=self.first_step,
                inputs_seen=int(state.get(seen_field(own.role), 0)),
            )

    def steps(self, source: Source[Batch], *, evaluate: Evaluate) -> Iterator[tuple[int, Batch]]:
        """Yield each step that is left, from 0, with its batch of `source`. Between the steps the run
        evaluates, saves, and stops where a signal asks for it."""
        self._deferring.enter_context(self._interrupt.deferred(partial(self._say_stopping, source.abort)))
        saving, every = self._saving, self.config.checkpoint.every
        for done in range(self.first_step, self.config.steps + 1):
            with saving.saved_on_error(done):
                fresh = not self.stopping() and self._evaluate(done, evaluate)
            if self.stopping():
                self._stopped_at = done
                return
            # A resumed run has just loaded the checkpoint of `first_step`; only an evaluation adds to it.
            if is_due(every, done) and (fresh or done > self.first_step):
                self.save(done)
            if done == self.config.steps:
                return
            self._begin_step(done)
            with saving.saved_on_error(done):
                batch = source.next(done)
            saving.write_rows()
            if batch is None:  # cut short: this step never happened
                self._stopped_at = done
                return
            self._sampled = batch if isinstance(batch, SampledStep) else None
            yield done, batch
            assert self._steps_logged == done + 1, "log() ends each step"

    def stop_deferring(self) -> None:
        """Let a signal stop the process at once again: nothing that it could wait for comes any more."""
        self._deferring.close()

    def _say_stopping(self, abort: Callable[[], None]) -> None:
        self.display.note("stopping: saving first (Ctrl-C again stops at once, without saving)")
        abort()

    def stopping(self) -> bool:
        """Return whether the run stops gracefully here, because a signal came to one of its ranks.
        Collective: every rank gets the same answer."""
        return self._interrupt.agree(
            lambda own: self.ranks.gather(own, str | None, what="the step's boundary")
        )

    def is_cancelled(self) -> bool:
        """Return whether this process was asked to stop gracefully; `stopping` answers for all ranks."""
        return self._interrupt.requested

    def _begin_step(self, step: int) -> None:
        self._begun = True
        self._saving.checkpoints.poll()
        self.ranks.at("sampling and training", step=step)
        flight.note(step=step, phase="loop", micro_batch=None, inputs=None, completions=None)
        self.display.begin(step)
        self._recorders.begin_step(step)
        times = self.spans.flush()
        self._between = {name: times[name] for name in _BETWEEN if name in times}

    def _evaluate(self, done: int, evaluate: Evaluate) -> bool:
        """Make the evaluation that is due after `done` steps; False when there is none, or when it was cut
        short."""
        name: EvaluationName = "before" if done == 0 else "after" if done == self.config.steps else "during"
        if not self.config.is_evaluation_due(name, done) or self._saving.state.is_evaluated(name, done):
            return False
        began = time.monotonic()
        result = evaluate(name, done)
        if result is None:
            return False
        seconds, self._begun = time.monotonic() - began, True
        self._write(done, {f"eval/{key}": value for key, value in result.numbers.items()}, evaluation=name)
        if result.rows:
            self.dir.write_evaluation(name if name != "during" else f"step-{done:06d}", result.rows)
        # Last: what could not be written is evaluated again.
        self._saving.state.add_evaluation(name, done, result.numbers, seconds=seconds)
        self._saving.take_boundary(done)
        self.display.note(evaluation_line(name, done, result.numbers, budget_factor=result.budget_factor))
        return True

    def write_rollouts(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Begin to write the rollouts that a step is trained on, in a thread; `log` waits for it."""
        config = self.config
        assert config.sampling is not None and self._sampled is not None, "documents are no rollouts"
        skip, requested = config.sampling.skip_special_tokens, self._sampled.requested
        save = config.keeps_rollouts
        groups = groups if self.ranks.is_first else groups[: config.log.samples_per_step]  # shown, not saved
        self._rollouts.begin(step, groups, requested=requested, save=save, skip_special_tokens=skip)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """End a step: write one line of metrics.jsonl, with the counts of its rollouts, times, throughput and
        memory added, and the hash of the weights, where it is computed. time/evaluate and time/save happened
        just before the step and are no part of time/step.

        Raises:
            EngineError: in the first step that this process trains, engine and trainer do not agree at all
                about the logprobs of the same tokens.
            LockstepError: the rollouts could not be written.
        """
        if self._sampled is not None:
            if not self._rollouts.begun:
                self.write_rollouts(step, self._sampled.groups)
            self._log_rollouts()
            metrics = {**metrics, **self._sampled.counts}
        assert self._policy is not None and self._compiled is not None, "restore() comes first"
        values = {**metrics, **self._gap_metrics(metrics), **self._compiled.metrics()}
        hashed = {}
        if self.config.train.deterministic:
            hashed["weights_hash"] = weights_hash(self._policy.backend)
        times = self.spans.flush() | self._between
        seconds = times["time/step"]
        tokens = values.get("rollout/tokens", values.get("input/tokens", 0.0))
        self._saving.state.values["trained_tokens"] += int(values.get("input/trained_tokens", 0.0))
        speed = {"throughput/tokens_per_second": tokens / seconds if seconds else 0.0}
        values = {**values, **times, **speed, **memory_of_ranks(self._memory, self.ranks)}
        values |= {} if self._work is None else self._work.metrics(values)
        self._write(step, values | hashed)
        self._steps_logged = step + 1
        self.display.step(step, values, seconds=seconds)
        if self._restart is not None and "step" not in self._restart.phases:
            self._restart.mark("step")
            self.display.note(str(self._restart))
        self._saving.take_boundary(step + 1)
        self._saving.copy(step + 1)

    def _log_rollouts(self) -> None:
        """Wait until the rollouts of the step are written, and display the first `log.samples_per_step`.
        Write what became of every sample that the step asked for, before its line of metrics.jsonl."""
        with self.spans("log"):
            rows, ledger = self._rollouts.wait()
            if self._saving.metrics is not None:
                self._saving.metrics.write_ledger(ledger)
            for row in rows[: self.config.log.samples_per_step]:
                content = row["token_ids"] if row["completion"] is None else row["completion"]
                self.display.note(f"    [{row['reward']:.2f}] {content!r}"[:200])

    def _gap_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Check the step's logprob gap.

        Returns:
            logprob_gap_first_step_ok, 1 or 0, once in a run (a resumed run's metrics are those of a run that
            was not interrupted); nothing before a logprob_gap_mean.
        """
        fine = None if self._resolved is None else self._gaps.check(metrics, dtype=self._resolved.dtype)
        if fine is None or self._saving.state.values["gap_checked"]:
            return {}
        self._saving.state.values["gap_checked"] = True
        return {"logprob_gap_first_step_ok": float(fine)}

    def save(self, done: int, *, wait: bool = False) -> Path:
        """Save a checkpoint of the state after `done` steps; see Saving.save."""
        return self._saving.save(done, wait=wait)

    def finish(self) -> dict[str, Any]:
        """Save, export, and write the summary, which is returned; of a run that was asked to stop, save and
        say how to go on."""
        if (done := self._stopped_at) is not None:
            path = self.save(done, wait=True)
            self._close_recorders()
            self.display.note(f"stopped after step {done}; saved {path}")
            return self._summary("interrupted", **self._resume_fields(done))
        done, saving, checkpoint = self.config.steps, self._saving, self.config.checkpoint
        extra: dict[str, Any] = {"steps": done}
        if checkpoint.save_at_end and saving.saved != done:
            self.save(done, wait=True)
        saving.checkpoints.finish()
        self._close_recorders()
        if checkpoint.export_at_end:
            folder, say = self.dir.path / "export", self.display.note
            with self.spans("export"), saying_how_to_go_on(self.dir.path, saved=saving.saved == done):
                saving.export(folder)
                extra |= push_export(checkpoint, folder, ranks=self.ranks, say=say) | {"export": str(folder)}
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
            assert self._saving.metrics is not None, "restore() opens the metrics"
            self._saving.metrics.write(step, values, evaluation=evaluation)

    def _summary(self, outcome: str, *, after: BaseException | None = None, **extra: Any) -> dict[str, Any]:
        """Write and return it. after: the error that ends the run."""
        state = self._saving.state
        evaluations = state.values["evaluations"]
        summary = {
            "outcome": outcome,
            "run_dir": str(self.dir.path),
            "wall_seconds": round(state.wall_seconds(), 1),
            "evaluation_seconds": round(state.values["evaluation_seconds"], 1),
            **warm_start_seconds(self.dir.path),
            "trained_tokens": state.values["trained_tokens"],
            "eval_before": evaluations.get("before"),
            "eval_after": evaluations.get("after"),
            **extra,
            **self._saving.summary(),
        }
        flight.note(phase=outcome)
        if self._log is not None:
            self._log.line(f"{outcome} after {summary['wall_seconds']} s")
        if after and self._resumed and self._saving.metrics is None:  # nothing has begun: the old one remains
            return summary
        with self._saving.errors_noted_after(after):
            self.dir.write_summary(summary)
        return summary
