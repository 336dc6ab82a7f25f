"""Recorded runs whose loss needs more than tokens and logprobs: replayed, it is the recorded loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from raising import raises

from lockstep import Environment
from lockstep.config.load import load_run
from lockstep.errors import ConfigError
from lockstep.loops import train_online
from lockstep.recording import Recording
from lockstep.rollout.environment import Sampler, Trajectories
from lockstep.schema.rollout import Prompt, Trajectory
from lockstep_lab.replay.cell import Cell, ReplayOptions
from lockstep_lab.replay.results import ReplayRow
from lockstep_lab.replay.run import replay

SEQUENCES = {
    "algorithm.name": "gspo",
    "algorithm.rollout_correction.kind": "tis",
    "algorithm.rollout_correction.level": "sequence",
    "rollout.max_trajectory_tokens": 20,
}
ROUTERS = {
    "model.name": "shape:tiny-qwen3-moe",
    "train.router_aux_loss": 0.1,
    "train.router_z_loss": 0.01,
    "train.token_budget": 48,
}


class Branches(Environment):
    """The second turn has another context, in which the first one is repeated."""

    def tasks(self, step: int, n: int, seed: int) -> list[Prompt]:
        return [
            Prompt(index=step * n + i, token_ids=(step + 1, i + 1, 3), text=f"task {i}") for i in range(n)
        ]

    async def run(self, task: Prompt, sample: Sampler) -> Trajectory:
        trajectory = await sample()
        return await sample.branch((5, *trajectory.token_ids, 6))

    def score(self, groups: Sequence[Trajectories]) -> list[list[float]]:
        return [[float(sum(t.token_ids) % 5) for t in trajectories] for _, trajectories in groups]


def recorded(folder: Path, settings: dict[str, Any], environment: Environment | None = None) -> Recording:
    """The recording of a run of two steps."""
    small = {
        "steps": 2,
        "rollout.prompts_per_step": 2,
        "rollout.group_size": 4,
        "rollout.sampling.max_tokens": 4,
        "eval.before": False,
        "eval.after": False,
        "log.tensorboard": False,
        "log.display": "off",
        "checkpoint.export_at_end": False,
        "record.enabled": True,
        "record.weights": "every 1",
        "run_dir": str(folder / "run"),
    }
    run: Any = load_run("tiny", overrides=small | settings)
    train_online(run, environment=environment)
    return Recording.open(folder / "run")


def replayed(recording: Any, **options: Any) -> list[ReplayRow]:
    cell = Cell.of_recording(recording.header, device="cpu")
    result = replay(recording, ReplayOptions(cell=cell, **options))
    assert all(row.error is None and row.weights == "match" for row in result.rows)
    return list(result.rows)


def without(recording: Any, memory: Any, field: str) -> Any:
    """The recording, as if the batches had no such field."""
    inputs = [dataclasses.replace(r, batch=dataclasses.replace(r.batch, **{field: None})) for r in recording]
    return dataclasses.replace(memory, path=recording.path, header=recording.header, inputs=inputs)


def test_parts_of_a_trajectory_are_one_sequence(tmp_path: Path, recording: Any) -> None:
    found = recorded(tmp_path, SEQUENCES, Branches())
    rows = replayed(found)
    assert [row.loss_difference for row in rows] == [0.0] * 2
    for row in replayed(without(found, recording, "trajectories")):
        assert row.loss_difference != 0.0 and row.logprob_max_difference == 0.0


def test_router_losses_count_by_the_steps_tokens(tmp_path: Path, recording: Any) -> None:
    found = recorded(tmp_path, ROUTERS)
    rows = replayed(found)
    assert len(rows) > 2 and [row.loss_difference for row in rows] == [0.0] * len(rows)
    for row in replayed(without(found, recording, "step_tokens")):
        assert abs(row.loss_difference or 0.0) > 0.01  # as if each micro-batch were the whole step
    plain = replayed(found, loss="logprob-sum")
    alone = dataclasses.replace(
        recording,
        path=found.path,
        header=dataclasses.replace(found.header, router_losses={}),
        inputs=list(found),
    )
    assert [row.loss for row in plain] == [row.loss for row in replayed(alone, loss="logprob-sum")]
    assert {row.loss for row in replayed(found, backward=False)} == {None}
    cell = dataclasses.replace(Cell.of_recording(found.header, device="cpu"), zero_stage=1)
    with raises(ConfigError, "unsupported-combination"):
        replay(found, ReplayOptions(cell=cell))


@pytest.mark.exhaustive
def test_a_branched_run_of_experts(tmp_path: Path) -> None:
    found = recorded(tmp_path, SEQUENCES | ROUTERS, Branches())
    rows = replayed(found)
    assert len(rows) > 2 and {row.loss_difference for row in rows} == {0.0}
