"""Saving and resuming a run: checkpoints, copies in the memory of peers, and run_state.json."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.data.lazy import LazyItems
from lockstep.errors import LockstepError
from lockstep.loop.checkpoint import CheckpointManager
from lockstep.loop.checkpoint_files import Boundary, checked_run_state
from lockstep.loop.peer_checkpoint import PeerCheckpoints
from lockstep.loop.row_log import RowLog
from lockstep.loop.run_manifest import RunManifest
from lockstep.loop.run_recorders import RunRecorders
from lockstep.observe.memory import ran_out_on_gpu
from lockstep.observe.memory_plans import OutOfMemory
from lockstep.observe.metrics import MetricsLog, Spans
from lockstep.observe.text import counted, printable
from lockstep.protocols import Saved
from lockstep.ranks.environment import Recovery
from lockstep.ranks.guard import failed_together
from lockstep.ranks.node_folders import NodeFolders
from lockstep.train.state.rng import generators_at


class RunState:
    """The numbers of a run that a checkpoint holds as run_state.json."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"evaluations": {}, "evaluated": [], "wall_seconds": 0.0}
        self.values |= {"trained_tokens": 0, "gap_checked": False, "evaluation_seconds": 0.0}
        self._started = time.monotonic()

    def is_evaluated(self, name: str, done: int) -> bool:
        """Return whether evaluation `name` of the weights after `done` steps is known."""
        return bool(self.values["evaluations"].get(name, {}).get("step") == done)

    def add_evaluation(self, name: str, done: int, numbers: Mapping[str, Any], *, seconds: float) -> None:
        """Remember an evaluation, which need not be made again."""
        self.values["evaluation_seconds"] += seconds
        self.values["evaluations"][name] = {"step": done, **numbers}
        self.values["evaluated"].append([done, name])

    def wall_seconds(self) -> float:
        """Return the time that all processes of the run have taken so far."""
        return float(self.values["wall_seconds"]) + time.monotonic() - self._started


class Saving:
    """Saves and restores a run. Every rank makes the same calls.

    Args:
        restart: set where the launcher has started this process in place of one that died.
    """

    def __init__(
        self,
        manifest: RunManifest,
        *,
        folders: NodeFolders,
        recorders: RunRecorders,
        spans: Spans,
        restart: Recovery | None,
    ) -> None:
        config, ranks, say = manifest.run, manifest.ranks, manifest.say
        self.config, self.ranks, self.spans = config, ranks, spans
        self.state = RunState()
        self.gaps: list[str] = []
        """Gaps in the files of a resumed run that do not prevent the resume."""
        self.metrics: MetricsLog | None = None
        """Flushed to the disk before each save; set when it is opened, on rank 0."""
        self.rows: RowLog | None = None
        """The log of rows left out, if the data is read lazily."""
        self.saved: int | None = None
        """The step of the checkpoint that was saved or loaded last."""
        self.source: str | None = None
        """"memory" or "checkpoint": where the state of a resumed run came from; None: a new run."""
        self.copies = PeerCheckpoints.of_launcher(ranks, say=say)
        self._dir, self._manifest, self._recorders, self._say = manifest.dir, manifest, recorders, say
        self._restart = restart
        self._roles: Saved | None = None
        self._boundary: Boundary | None = None
        self._from: Path | None = None
        self.checkpoints = CheckpointManager(
            manifest.dir.checkpoints, config.checkpoint, ranks=ranks, folders=folders, say=say
        )

    def find(self, checkpoint: int | None) -> None:
        """Find what a resumed run goes on from, and take its state; without any it begins again.

        Args:
            checkpoint: its step; None: the last one.

        Raises:
            CheckpointError: there is no such checkpoint, it is damaged, or does not agree with the files of
                the run.
        """
        copied, path = None, None
        if self.copies is not None and self._restart is not None:
            self._restart.mark("connect")
            copied = self.copies.newest()
        if copied is not None:
            self.source, (path, state) = "memory", copied
            self.state.values = checked_run_state(state, path)
        elif (path := self.checkpoints.find(checkpoint)) is not None:
            self.source = "checkpoint"
            values = self.state.values = checked_run_state(self.checkpoints.check(path), path)
            values["checkpoints_read"] = values.get("checkpoints_read", 0) + 1
        values = self.state.values
        done = int(values.get("step", 0))
        with self.ranks.fail_together("looking at what is done"):
            self._manifest.check_steps(done, saved=self.checkpoints.steps)
        known = self.ranks.on_rank_zero(
            lambda: self._consistent_evaluations(path, done), what="comparing the run's files"
        )
        values["evaluated"] = known
        values["evaluations"] = {
            name: each for name, each in values["evaluations"].items() if [each["step"], name] in known
        }
        self._from = path

    def _consistent_evaluations(self, path: Path | None, done: int) -> list[list[Any]]:
        """The evaluations that need not be made again. Raises CheckpointError: the files do not agree."""
        self._dir.read_manifest()
        if path is None:
            self._dir.check_nothing_done()
            return []
        known, self.gaps = self._manifest.check_history(
            self.state.values["evaluated"], done=done, saved=self.checkpoints.steps()
        )
        return known

    def load(self, roles: Saved) -> int:
        """Load the checkpoint that was found into `roles`; returns the number of steps that are done."""
        done = 0
        if self._restart is not None:
            self._restart.mark("build")
        if self._from is not None:
            roles.load(self._from, verified=True)
            done = int(self.state.values["step"])
            self.saved = done if self.source == "checkpoint" else None
        if self._restart is not None:
            self._restart.mark("load")
        origin = f" from {self._from}" if self._from else ": no checkpoint yet"
        self._say(f"resuming after {counted(done, 'step')}{origin}")
        return done

    def follow_rows(self, items: LazyItems[Any], *, resumed: bool) -> None:
        """Keep which rows are left out, and go on from what is known of those before the checkpoint that was
        found."""
        self.rows = RowLog(items, self._dir, writes=self.ranks.is_first, say=self._say)
        with self.ranks.fail_together("reading which rows are left out"):
            self.rows.resume(int(self.state.values.get("step", 0)) if resumed else 0)

    def write_rows(self) -> None:
        """Write which rows were left out since the last call."""
        if self.rows is not None:
            self.rows.write()

    def begin(self, done: int, roles: Saved) -> None:
        """Begin with the state after `done` steps. From here on `roles` are what is saved."""
        self._roles = roles
        self.take_boundary(done)
        if self.copies is not None and self.source != "memory":
            values = {"inputs_seen": 0} | self.state.values | {"wall_seconds": self.state.wall_seconds()}
            self.copies.begin(done, roles, values)

    def take_boundary(self, done: int) -> None:
        """Take the state after `done` steps, of which any save until the next boundary is."""
        self._boundary = Boundary.take(done, self.state.values, ranks=self.ranks)

    def save(self, done: int, *, wait: bool = False) -> Path:
        """Save a checkpoint of the state after `done` steps, and prune older ones.

        In the middle of the next step, the generators go back to where they were after `done` steps.

        Args:
            wait: not in the background, whatever checkpoint.background says; so is that of the last step.
        """
        boundary = self._boundary
        assert boundary is not None and boundary.done == done, "only the last boundary can be saved"
        with self.spans("save"):
            metric = self.config.checkpoint.metric.removeprefix("eval/")
            evaluations = boundary.state["evaluations"].values()
            current = [e[metric] for e in evaluations if e["step"] == done and e.get(metric) is not None]
            self._sync_metrics()
            if self.copies is not None:
                self.copies.wait()  # both use the backend's buffers
            with generators_at(boundary.generators):
                path = self.checkpoints.save(
                    done,
                    self._tracked(),
                    self._run_state(boundary.state),
                    metric=current[0] if current else None,
                    wait=wait or done == self.config.steps,
                )
        self.saved = done
        return path

    def copy(self, done: int) -> None:
        """Copy the state after `done` steps into memory that outlives this process, where the launcher has
        made room for that (cluster.peer_copy)."""
        if self.copies is not None:
            with self.spans("peer_copy"):
                if self.copies.on_nodes:
                    self._sync_metrics()
                state = self._run_state(self.state.values)
                self.copies.save(done, self._tracked(), state, busy=self.checkpoints.busy)

    def export(self, directory: Path) -> None:
        """Write the models in the form that transformers loads."""
        self._tracked().export(directory)

    def _sync_metrics(self) -> None:
        """A resume can cut lines that come after what is saved, and cannot make up for lost ones."""
        if self.metrics is not None:
            self.metrics.sync()

    def _tracked(self) -> Saved:
        assert self._roles is not None, "begin() comes first"
        return self._roles

    def _run_state(self, values: Mapping[str, Any]) -> dict[str, Any]:
        own = {"wall_seconds": self.state.wall_seconds(), "inputs_seen": 0}
        return {**values, **own, **self._recorders.inputs_seen()}

    @contextlib.contextmanager
    def saved_on_error(self, done: int) -> Iterator[None]:
        """Save the steps since the last checkpoint when the body fails, then raise. The body must leave the
        weights alone (sampling, rewards, evaluation)."""
        try:
            yield
        except Exception as error:
            unsaved = done > 0 and self.saved != done
            if unsaved and failed_together(self.ranks, error, where=f"after {done} steps"):
                with self.errors_noted_after(error):
                    path = self.save(done, wait=True)
                    self._say(f"failed after {counted(done, 'step')}; saved {path}")
            raise

    @contextlib.contextmanager
    def errors_noted_after(self, error: BaseException | None) -> Iterator[None]:
        """Show instead of raise an error of the cleanup after `error`, which is the one to raise; None: raise
        it."""
        try:
            yield
        except LockstepError as second:
            if error is None:
                raise
            self._say(f"then: {printable(str(second))}")

    def note_out_of_memory(self, error: BaseException, plan: Mapping[str, Any], *, step: int) -> None:
        """Note on the error that ends the run that it can go on with a smaller memory plan: if it has run out
        of memory, there is such a plan, and there is something to go on from.

        Args:
            plan: the memory plan, as in the manifest.
            step: that the run was in.
        """
        begins = step == 0 or self.copies is not None or bool(self.checkpoints.steps())
        if plan.get("then") and begins and ran_out_on_gpu(error):
            OutOfMemory(step=step, run_dir=str(self._dir.path)).note(error)

    def finish_after(self, error: BaseException) -> None:
        """Let a save in the background end, where the ranks fail together."""
        if self.config.checkpoint.background and failed_together(self.ranks, error, where="at the end"):
            with self.errors_noted_after(error):
                self.checkpoints.finish()

    def summary(self) -> dict[str, Any]:
        """Return the fields of summary.json that tell of copies and restarts."""
        if self.copies is None:
            return {}
        read = self.state.values.get("checkpoints_read", 0)
        return self.copies.summary(self._restart, source=self.source, checkpoints_read=read)


def is_due(every: int, done: int) -> bool:
    """Return whether something that happens every `every` steps (0: never) is due after `done` steps."""
    return every > 0 and done > 0 and done % every == 0
