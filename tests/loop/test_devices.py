"""What processes beside a rank see of a node's GPUs, on a machine that has none."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from loop_runs import TINY
from raising import raises
from resolving import moved, resolved_on

from lockstep.config.load import build, parse_toml
from lockstep.config.run import GRPORun
from lockstep.errors import ConfigError
from lockstep.loop import machine, role_worker
from lockstep.loop.machine import find_machine
from lockstep.loop.role_worker import RoleWorker
from lockstep.loops.online import build_online
from lockstep.ranks.context import RankContext

OWN = {"colocate": [["policy"], ["ref"], ["value"]], "dedicated_gpus": True, "engine_gpus": 1}
UUIDS = "GPU-a,GPU-b,GPU-c,GPU-d,GPU-e,GPU-f,GPU-g,GPU-h"


def run_of(**cluster: object) -> GRPORun:
    values = parse_toml(TINY.encode(), origin="test")
    values |= {"kind": "ppo", "algorithm": {"kl": {"coef": 0.1}}, "cluster": cluster}
    values["engine"] = {"name": "native", "process": "separate"}
    run = build(values, origin="test")
    assert isinstance(run, GRPORun)
    return run


def rank_of(number: int, ranks: int) -> RankContext:
    alone = RankContext.alone()
    return dataclasses.replace(alone, rank=number, local_rank=number, world_size=ranks)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, ["2,3", "4,5"]), ("9,8,7,6,5,4,3,2", ["7,6", "5,4"]), (UUIDS, ["GPU-c,GPU-d", "GPU-e,GPU-f"])],
)
def test_the_processes_of_a_remote_group_see_its_gpus_by_local_rank(
    visible: str | None, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    run, ranks = run_of(**OWN), rank_of(1, 2)
    resolved = moved(resolved_on(run), "cuda:1")
    workers = [RoleWorker(roles, resolved, ranks=ranks, work_dir=tmp_path) for roles in run.remote_groups]
    environments = [worker._server.spec.environment for worker in workers]
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in environments] == expected


def test_the_node_counts_its_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    layout = role_worker.layout_here(run_of(**OWN).cluster, rank_of(1, 4))
    assert (layout.ranks, layout.total) == (2, 8)


def test_a_remote_role_that_shares_its_ranks_gpu_sees_what_the_rank_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", UUIDS)
    run, ranks = run_of(colocate=OWN["colocate"]), rank_of(1, 2)
    resolved = moved(resolved_on(run), "cuda:1")
    worker = RoleWorker(run.remote_groups[0], resolved, ranks=ranks, work_dir=tmp_path)
    assert worker._server.spec.environment["CUDA_VISIBLE_DEVICES"] == UUIDS
    run = run_of(**OWN)
    on_cpu = resolved_on(run)
    own = RoleWorker(run.remote_groups[0], on_cpu, ranks=ranks, work_dir=tmp_path)
    assert own._server.spec.environment["CUDA_VISIBLE_DEVICES"] == UUIDS


def test_an_engine_has_the_gpus_behind_those_of_remote_roles() -> None:
    run = run_of(**OWN)
    gpus = find_machine(run, rank_of(1, 2)).engine_gpus
    assert gpus == (7,)
    run = run.model_copy(update={"model": run.model.model_copy(update={"dtype": "bfloat16"})})
    placed = resolved_on(run, "cuda:1", ranks=2, engine_gpus=gpus)
    assert (placed.run.engine.cuda_devices, placed.given.engine.cuda_devices) == ((7,), ())
    assert resolved_on(run, ranks=2, engine_gpus=gpus).run.engine.cuda_devices == ()
    shared = run_of(colocate=OWN["colocate"], dedicated_gpus=True)
    assert find_machine(shared, rank_of(1, 2)).engine_gpus == ()


def test_a_run_that_needs_more_gpus_than_are_seen_is_refused_before_it_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(machine, "_gpu_memory", lambda *_, **__: {})  # there is none to ask
    with raises(ConfigError, "not-enough: cluster.dedicated_gpus, 4 GPUs, only 3 are visible"):
        build_online(run_of(**OWN))
