"""The manifest's record of how a run is computed, and the changes in it when the run is resumed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lockstep import attention
from lockstep.config.run import RunConfig
from lockstep.errors import ConfigError, DataError
from lockstep.loop.checkpoint_files import algorithm_notes
from lockstep.loop.distributed import manifest, mesh_coordinates, resume_flags
from lockstep.loop.resolve import Resolved
from lockstep.models.load import LoadedModel
from lockstep.observe.memory_plans import by_step
from lockstep.observe.run_dir import RunDir
from lockstep.observe.run_history import FLAGS, LEDGER_SINCE, RANK_TIMEOUT, check_against_ledger, rollout_gaps
from lockstep.observe.text import counted, printable
from lockstep.ranks.context import RankContext

_SINGLE_PROCESS = {"backend": "local", "ranks": 1, "dp": 1, "ring": 1, "tp": 1}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunManifest:
    """The manifest of one run. Every rank makes the same calls; only rank 0's write."""

    run: RunConfig
    dir: RunDir
    ranks: RankContext
    say: Callable[[str], None]
    """Shows a line."""

    def describe(
        self,
        resolved: Resolved[Any],
        *,
        model: LoadedModel,
        data: Mapping[str, Any],
        fingerprint: str | None,
        done: int | None,
    ) -> None:
        """Write what "auto" became, and show it: see Run.describe. Raises DataError.

        Args:
            done: steps after which the run is resumed; None: it begins.
        """
        axes = resolved.axes
        same = axes | {
            "device": resolved.device.partition(":")[0],
            "data fingerprint": fingerprint,
        }
        self.ranks.require_same(same, what="what they found")
        with self.ranks.fail_together("comparing the run with what it was"):
            if done is not None and self.ranks.is_first:
                self._compare_manifest(fingerprint)
        self.dir.update_manifest(
            {
                "axes": axes,
                "model": model.name,
                "data": dict(data),
                "data_fingerprint": fingerprint,
                "cpu_threads": torch.get_num_threads(),
                "spread": self._parallel_layout(),
                FLAGS: resume_flags(self.ranks),
                RANK_TIMEOUT: self.ranks.seconds if self.ranks.world_size > 1 else None,
                "algorithm": self._algorithm(),
            }
            | self._plans(resolved, done)
        )
        engine = f", engine {resolved.engine}" if resolved.engine else ""
        train = resolved.run.train
        kernel = attention.label(
            resolved.attention,
            torch.device(resolved.device),
            ring=train.ring,
            gathers=train.gathers_keys,
        )
        self.say(
            f"{model.name} on {resolved.device} in {resolved.dtype}: {axes['backend']} backend{engine}, "
            f"{kernel} attention, {resolved.execution}, {resolved.layout}"
        )
        for line in resolved.reasons:
            self.say(line)
        if self.ranks.world_size > 1:
            self.say(self.ranks.description)
        if resolved.support == "untested":
            self.say(
                f"untested combination: {resolved.support_note} (`lockstep support` lists what is tested)"
            )
        left_out = {name: count for name, count in data.items() if count}
        if left_out:
            self.say("data: " + ", ".join(f"{count} {name}" for name, count in left_out.items()))

    def _plans(self, resolved: Resolved[Any], done: int | None) -> dict[str, Any]:
        """The memory plans by step, if the run has one."""
        if not resolved.memory:
            return {}
        before = [] if done is None else self.dir.read_manifest().get("plans", [])
        return {"plans": by_step(before, resolved.memory, done or 0)}

    def _compare_manifest(self, fingerprint: str | None) -> None:
        then = self.dir.read_manifest()
        data = then.get("data_fingerprint")
        if data is not None and data != fingerprint:
            raise DataError(
                f"values-differ: the training data changed since {str(self.dir.path)!r} was started "
                f"(fingerprint {printable(str(data))}, now {fingerprint}), so the run cannot be resumed; "
                "restore the original data, or start a new run",
                name="data",
            )
        now = manifest() | self._parallel_layout()
        # Runs of earlier versions were of one process; and a run may end before it says how it is spread.
        then |= then.get("spread", _SINGLE_PROCESS if "axes" in then else self._parallel_layout())
        for name in ("lockstep", "torch", "transformers", "python", "cuda_device", *_SINGLE_PROCESS):
            if then.get(name) != now[name]:
                before = printable(str(then.get(name)))
                self.say(
                    f"the run was started with {name} {before} and continues with {now[name]}, so its "
                    "numbers may differ from those of an uninterrupted run"
                )
        for note in algorithm_notes(self._algorithm(), then):
            self.say(note)
        self.dir.update_manifest({"resumed": [*then.get("resumed", []), now]})

    def _algorithm(self) -> dict[str, Any] | None:
        """The options of the algorithm with every published value filled in; None for other kinds of run."""
        return self.run.algorithm_options.model_dump(mode="json") if self.run.online else None

    def _parallel_layout(self) -> dict[str, Any]:
        """The backend and the number of ranks along each mesh axis."""
        mesh = mesh_coordinates(self.ranks, tp=self.run.train.tp, ring=self.run.train.ring)
        return {"backend": self.run.train.backend, "ranks": self.ranks.world_size, **mesh.sizes}

    def check_steps(self, done: int, *, saved: Callable[[], Sequence[int]]) -> None:
        """Raise ConfigError if more steps are done than the run has. saved: the steps of its checkpoints."""
        if done > self.run.steps:
            steps = sorted(step for step in saved() if step <= self.run.steps)
            earlier = f", or go back with --checkpoint STEP (available: {steps})" if steps else ""
            raise ConfigError(
                f"nothing-to-do: steps = {self.run.steps}, but {done} steps are already done in "
                f"{str(self.dir.path)!r}; raise --steps{earlier}",
                setting="steps",
            )

    def check_history(
        self, evaluated: Sequence[Sequence[Any]], *, done: int, saved: Sequence[int]
    ) -> tuple[list[list[Any]], list[str]]:
        """Check that the files of a run that goes on after `done` steps agree.

        Args:
            evaluated: step and name of the evaluations that the checkpoint knows.
            saved: the steps of the run's checkpoints.

        Returns:
            The evaluations that need not be made again; and what files lack that the run can do without.

        Raises:
            CheckpointError: they do not agree.
        """
        evaluations = {
            (step, name)
            for step, name in evaluated
            # Of a run that goes on further than it was first asked to: no more the last one.
            if (step, name) != (done, "after") or done == self.run.steps
        }
        known = self.dir.check_history(done, evaluations=evaluations, saved=saved)
        gaps: list[str] = []
        if self.run.online:
            since = check_against_ledger(self.dir.path, done=done, saved=saved)
            self.dir.update_manifest({LEDGER_SINCE: since} | self.dir.read_manifest())
            gaps = rollout_gaps(self.dir.path, range(since, done), saves=self.run.keeps_rollouts)[:1]
        return sorted(map(list, known)), gaps


def wandb_settings(run: RunConfig) -> dict[str, Any] | None:
    """Return what wandb is started with; None: the run does not use it."""
    wandb = None
    if run.log.wandb:
        wandb = {
            "project": run.log.wandb_project,
            "name": run.name,
            "config": run.model_dump(mode="json"),
        }
    return wandb


def evaluation_line(name: str, done: int, numbers: Mapping[str, Any], *, budget_factor: int) -> str:
    """Return what is shown of an evaluation, see EvaluationResult."""
    text = "  ".join(f"{k} {v:z.3f}" for k, v in numbers.items() if isinstance(v, float))
    budget = ""
    if budget_factor != 1:
        most = numbers["max_tokens"]
        budget = f", at most {most} tokens instead of {most // budget_factor}"
    return f"evaluation {name} ({counted(done, 'step')}{budget}): {text}"
