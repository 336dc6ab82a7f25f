"""Remote roles as the loop sees them: a Scorer, reward models, a value model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.config.batch import RewardRoleConfig
from lockstep.config.ppo import ValueConfig
from lockstep.config.run import GRPORun
from lockstep.errors import TrainError
from lockstep.loop.memory_plan import start_offloading
from lockstep.loop.policy import Policy, Trained
from lockstep.loop.resolve import Resolved
from lockstep.loop.role_worker import RoleWorker
from lockstep.loop.roles import Critic, build_reward_models, build_value
from lockstep.observe.lock import OwnedFolder
from lockstep.observe.metrics import Spans
from lockstep.protocols.reward import RewardInput
from lockstep.protocols.train import Estimates, FinishSave, Scorer
from lockstep.ranks.context import RankContext
from lockstep.rollout.reward_models import RewardModels
from lockstep.schema.batch import PackedBatch, RolloutSample


@dataclass(frozen=True, slots=True)
class RemoteScorer:
    """The frozen reference. Implements protocols.Scorer."""

    worker: RoleWorker

    def logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """See protocols.Scorer; on the host."""
        scores = self.worker.call("logprobs", batches=list(batches))
        return _per_token(scores, [batch.num_slots for batch in batches], what="ref")


class RemoteRewardModels(RewardModels):
    """Reward models that are complete in the process beside each rank, which scores the samples of its rank.

    Args:
        notes: of their start.
    """

    def __init__(self, config: RewardRoleConfig, *, worker: RoleWorker, notes: Sequence[str]) -> None:
        self.config, self.models, self.truncated = config, [], 0
        self._worker, self._notes = worker, list(notes)

    def notes(self, policy_tokenizer: Any) -> list[str]:
        """See RewardModels."""
        return self._notes

    def score(self, inputs: Sequence[RewardInput]) -> list[dict[str, float]]:
        """See RewardModels. Raises what `RoleWorker.call` raises."""
        if not inputs:
            return []
        asked = [_read_by_models(each) for each in inputs]
        answer = self._worker.call("rewards", alone=True, inputs=asked)
        scores = [dict(each) for each in answer["scores"]]
        if len(scores) != len(inputs):
            raise _wrong("reward_model", f"{len(scores)} scores for {len(inputs)} samples")
        self.truncated += int(answer["truncated"])
        return scores


@dataclass(frozen=True, slots=True)
class RemoteState:
    """The saved parts of the value model, see protocols.Saved. Its process writes and reads the files."""

    worker: RoleWorker

    def save(self, directory: Path, *, background: bool = False) -> FinishSave:
        """See TrainBackend."""
        where = str(directory.absolute())
        self.worker.call("save", directory=where, background=background)
        return lambda: dict(self.worker.call("finish", alone=True, directory=where))

    def load(self, directory: Path, *, verified: bool = False) -> None:
        """See TrainBackend."""
        self.worker.call("load", directory=str(directory.absolute()), verified=verified)

    def export(self, directory: Path) -> None:
        """See TrainBackend."""
        self.worker.call("export", directory=str(directory.absolute()))

    def close(self) -> None:
        """Do nothing: the remote process is closed as a whole."""


@dataclass(kw_only=True)
class RemoteCritic(Trained):
    """A remote value model: the counterpart of Critic. Its inputs are not recorded."""

    worker: RoleWorker
    backend: RemoteState
    config: ValueConfig
    spans: Spans
    beside_policy: bool = False
    """Whether it has a dedicated GPU and computes while the policy does."""
    beside_ref: bool = False
    """Whether it computes while the reference does, which is neither on its GPU nor in its group."""

    def begin_score(self, samples: Sequence[RolloutSample]) -> Callable[[], list[Tensor]]:
        """Start scoring, if that can overlap with the reference; the returned call waits for the result."""
        if self.beside_ref:
            with self._working():
                self.worker.begin("score", samples=list(samples))
        return partial(self.score, samples)

    def score(self, samples: Sequence[RolloutSample]) -> list[Tensor]:
        """See Critic."""
        with self._working(), self.spans("values"):
            values = self.worker.call("score", samples=list(samples))
        return _per_token(values, [len(sample) for sample in samples], what="value")

    def begin_update(
        self, samples: Sequence[RolloutSample], estimates: Estimates
    ) -> Callable[[], dict[str, float]]:
        """See Critic. All its optimizer steps are one call, which may overlap with the policy's update."""
        batch: dict[str, Any] = {
            "samples": list(samples),
            "values": list(estimates.values),
            "returns": list(estimates.returns),
        }

        def update() -> dict[str, float]:
            with self._working(), self.spans("value"):
                metrics: Mapping[str, float] = self.worker.call("update", **batch)
            return dict(metrics)

        if self.beside_policy:
            self.worker.begin("update", **batch)
            return update
        metrics = update()
        return lambda: metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherRoles:
    """The models of a run besides the policy, local or remote."""

    ref: Scorer | None
    """None if the run has no reference, or the policy's backend holds it."""
    reward_models: RewardModels | None
    value: Critic | RemoteCritic | None
    workers: tuple[RoleWorker, ...]
    """The groups of remote roles."""
    temporary: OwnedFolder | None = None
    """Folder for files of remote roles, if the run has no folder."""

    def close(self) -> None:
        """End the remote processes."""
        for worker in self.workers:
            worker.close()
        if self.temporary is not None:
            self.temporary.close()


def build_others(policy: Policy, *, ranks: RankContext, work_dir: Path | None) -> OtherRoles:
    """Load the models beside the policy: in this process, or as remote roles.

    Args:
        work_dir: engine/ in the run's folder; None: remote roles write to a temporary folder.

    Raises:
        ConfigError, ModelError, TrainError: one of them cannot be loaded, or a remote role does not start.
    """
    resolved, run = policy.resolved, policy.resolved.run
    folder = None if work_dir is None else work_dir.parent
    workers, temporary = _workers(resolved, ranks=ranks, folder=folder)
    of_role = {role: worker for worker in workers for role in worker.roles}
    try:
        notes = [note for worker in workers for note in worker.start()["notes"]]
        if (worker := of_role.get("reward_model")) is not None:
            assert run.reward_model is not None
            models: RewardModels | None = RemoteRewardModels(run.reward_model, worker=worker, notes=notes)
        else:
            models = build_reward_models(resolved, policy.model, ranks=ranks)
        value: Critic | RemoteCritic | None = None
        if (worker := of_role.get("value")) is not None:
            assert run.critic is not None
            own = run.cluster is not None and run.cluster.dedicated_gpus
            value = RemoteCritic(
                worker=worker,
                backend=RemoteState(worker),
                config=run.critic,
                spans=policy.spans,
                beside_policy=own,
                beside_ref=own and "ref" not in worker.roles,
            )
        elif run.critic is not None:
            value = build_value(
                resolved,
                run.critic,
                policy.model,
                plan=policy.plan,
                ranks=ranks,
                spans=policy.spans,
            )
            start_offloading(run, "value", backend=value.backend)
    except BaseException:
        for worker in workers:
            worker.close()
        raise
    ref = RemoteScorer(of_role["ref"]) if "ref" in of_role else None
    return OtherRoles(ref=ref, reward_models=models, value=value, workers=workers, temporary=temporary)


def _workers(
    resolved: Resolved[GRPORun], *, ranks: RankContext, folder: Path | None
) -> tuple[tuple[RoleWorker, ...], OwnedFolder | None]:
    """Return the groups of remote roles, not started, and a temporary folder for their files if the run has
    none."""
    if not resolved.run.remote_groups:
        return (), None
    temporary, files = None, folder
    if files is None:  # removed when the process ends, if nobody closes
        temporary = OwnedFolder("roles")
        files = temporary.path
    files /= "remote"
    made = partial(RoleWorker, resolved=resolved, ranks=ranks, work_dir=files, folder=folder)
    return tuple(map(made, resolved.run.remote_groups)), temporary


def _read_by_models(sample: RewardInput) -> RewardInput:
    """Return what a reward model reads of it: the row may hold values that no message can carry."""
    return RewardInput(
        prompt=sample.prompt,
        completion=sample.completion,
        row={},
        prompt_token_ids=(),
        completion_token_ids=(),
        finish_reason=sample.finish_reason,
        index=sample.index,
        where=sample.where,
        conversation=sample.conversation,
    )


def _per_token(scores: Any, lengths: Sequence[int], *, what: str) -> list[Tensor]:
    """Return the scores, after checking that each is [length] float32."""
    found = list(scores)
    if len(found) != len(lengths):
        raise _wrong(what, f"it returned {len(found)} tensors for {len(lengths)} documents or batches")
    for index, (score, length) in enumerate(zip(found, lengths, strict=True)):
        if not isinstance(score, Tensor) or score.dtype != torch.float32 or score.shape != (length,):
            raise _wrong(what, f"result {index} is not a float32 tensor of shape [{length}]")
    return found


def _wrong(role: str, why: str) -> TrainError:
    return TrainError(f"wrong-result: remote role {role}: {why}", role=role)
