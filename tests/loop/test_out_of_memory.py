"""Memory that runs out although the plan fits; memory that others hold; GPUs of different sizes. No GPU is
needed: ranks are real, what the driver and torch.cuda say is a mock."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loop_runs import healed_toml, metrics_of
from raising import raises
from resolving import resolved_on

from lockstep.config.load import load_run
from lockstep.errors import ConfigError
from lockstep.loop import machine
from lockstep.loop.machine import check_free, find_machine
from lockstep.models.memory import GIB
from lockstep.observe.memory_plans import by_step
from lockstep.ranks.context import RankContext

WORKER = Path(__file__).with_name("memory_worker.py")


def train(folder: Path, name: str, *flags: str, **runs_out: int) -> subprocess.CompletedProcess[str]:
    """`lockstep train`; runs_out: of memory_worker."""
    settings = healed_toml("ids").replace("token_budget = 256\n", "")
    settings = settings.replace("prompts_per_step = 4", "prompts_per_step = 42")
    settings = settings.replace("[eval]\n", "[eval]\nbefore = false\nafter = false\n").replace(
        "every = 2", "every = 0"
    )
    (folder / "tiny.toml").write_text(settings)
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    if runs_out:
        environ["RUNS_OUT"] = json.dumps(runs_out)
    source = [] if "--resume" in flags else ["tiny.toml", "--run-dir", name]
    return subprocess.run(
        [sys.executable, str(WORKER), "train", *source, *flags],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def manifest_of(run: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((run / "manifest.json").read_text())
    return value


@pytest.mark.slow
def test_ranks_go_on_from_the_step_with_the_next_plan(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    flags = ("--ranks", "2", "--steps", "2", "--checkpoint.every", "1")
    copies = ("--cluster.peer-copy", "--cluster.copy-dir", "memory", "--cluster.warm-spares", "false")
    ended = train(tmp_path, "oom", *flags, *copies, rank=1, step=1, micro_batch=1, times=1)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    plans = manifest_of(tmp_path / "oom")["plans"]
    assert [plan["from_step"] for plan in plans] == [0, 1]
    assert [plan["settings"]["train.token_budget"] for plan in plans] == [4096, 2048]
    why = "out of memory in step 1 with the plan that was to fit in 0 of 1 GiB"
    assert plans[1]["why"] == why
    assert ended.stderr.splitlines() == [f"lockstep: {why}: goes on from step 1 with: {plans[1]['line']}"]

    # An undisturbed run with that plan, from the checkpoint of the step before it.
    shutil.copytree(tmp_path / "oom", tmp_path / "alone")
    (tmp_path / "alone" / "summary.json").unlink()
    resumed = train(tmp_path, "alone", "--resume", "alone", "--checkpoint", "1", *flags)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "resuming after 1 step from alone/checkpoints/step-000001" in resumed.stdout
    rows = metrics_of(tmp_path / "oom")
    assert rows == metrics_of(tmp_path / "alone")
    assert [row["input/micro_batches"] for row in rows] == [2, 4]


@pytest.mark.slow
def test_one_process_starts_over_at_most_twice(tmp_path: Path) -> None:
    flags = ("--ranks", "1", "--train.backend", "local", "--train.num-threads", "1")
    ended = train(tmp_path, "run", *flags, rank=0, step=0, micro_batch=0, times=9)
    assert ended.returncode == 1
    plans = manifest_of(tmp_path / "run")["plans"]
    lines = ended.stderr.splitlines()
    assert [line.partition(" with: ")[2] for line in lines[:2]] == [plan["line"] for plan in plans[1:]]
    assert len(lines) == 3 and lines[2].startswith(
        "lockstep train: error[out-of-memory]: step 0, micro-batch 0 of "
    )
    assert [plan["settings"]["train.token_budget"] for plan in plans] == [8192, 4096, 2048]


def test_plans_by_step_forget_what_was_gone_back_from() -> None:
    def plan(budget: int, **more: Any) -> dict[str, Any]:
        return {"settings": {"train.token_budget": budget}, "line": "", "why": "", **more}

    before = [plan(3, from_step=0), plan(2, from_step=4), plan(1, from_step=6)]
    assert by_step(before, plan(1), 7) == before
    assert by_step(before, plan(2), 5) == before[:2]
    assert by_step(before, plan(1), 5) == [*before[:2], plan(1, from_step=5)]


def mock_gpu(monkeypatch: pytest.MonkeyPatch, *, free: int) -> None:
    """What torch says of an H100 of 80 GiB."""
    properties = SimpleNamespace(total_memory=80 * GIB, uuid="1a-2b")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 2 * GIB)


def test_a_run_whose_memory_others_hold_is_refused_with_their_pids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mock_gpu(monkeypatch, free=9 * GIB)
    smi = tmp_path / "nvidia-smi"
    rows = [
        "GPU-1a-2b, 4242, 71680",
        "GPU-9f, 77, 100",
        f"GPU-1a-2b, {os.getpid()}, 500",
        "GPU-1a-2b, 43, [N/A]",
    ]
    smi.write_text("#!/bin/sh\n" + "\n".join(f"echo '{row}'" for row in rows))
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = find_machine(load_run(kind="sft"))
    assert (found.total_bytes, found.free_bytes) == (80 * GIB, 10 * GIB)
    device = torch.device("cuda")
    check_free(10 * GIB, found.free_bytes, device=device)
    with raises(ConfigError, "out-of-memory") as refused:
        check_free(11 * GIB, found.free_bytes, device=device)
    assert "pid 4242 holds 70.00 GiB; pid 43 holds an unknown size. " in str(refused.value)
    assert (refused.value.fields["needed_bytes"], refused.value.fields["free_bytes"]) == (11 * GIB, 10 * GIB)
    smi.unlink()
    with raises(ConfigError, "out-of-memory") as refused:
        check_free(11 * GIB, found.free_bytes, device=device)
    assert "who holds the rest is not known (nvidia-smi: " in str(refused.value)


def sft(**train: Any) -> Any:
    settings = {"model.name": "shape:llama-3.2-1b", "model.dtype": "bfloat16", "data.source": "x.jsonl"}
    return load_run(
        kind="sft", overrides=settings | {f"train.{name}": value for name, value in train.items()}
    )


def test_a_plan_is_for_the_total_unless_for_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    mock_gpu(monkeypatch, free=17 * GIB)
    alone = RankContext.alone()
    memory = resolved_on(sft(), "cuda", total_bytes=80 * GIB, free_bytes=80 * GIB).memory
    assert memory["total_bytes"] == 80 * GIB and memory["allocated_bytes"] > 18 * GIB
    with raises(ConfigError, "out-of-memory"):
        resolved_on(sft(), "cuda", total_bytes=80 * GIB, free_bytes=18 * GIB)
    free = sft(plan_for_free=True)
    there = machine._gpu_memory(torch.device("cuda"), alone, plan_for_free=True)
    found = resolved_on(free, "cuda", **there).memory
    assert found["total_bytes"] == 18 * GIB and found["allocated_bytes"] < 18 * GIB
    # A run that goes on keeps the plan as long as it fits what is free.
    kept = {"axes": {"memory": found}}
    less = {**there, "total_bytes": found["allocated_bytes"]}
    assert resolved_on(free, "cuda", manifest=kept, **less).memory == found
    other = resolved_on(free, "cuda", manifest=kept, **{**there, "total_bytes": found["allocated_bytes"] - 1})
    assert other.memory["settings"] != found["settings"]


def test_gpus_of_different_sizes_are_named_and_the_smallest_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    mock_gpu(monkeypatch, free=79 * GIB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    small = {"name": "NVIDIA A100-PCIE-40GB", "total": 40 * GIB, "free": 39 * GIB}

    class Ranks:
        world_size = 3

        def gather(self, own: dict[str, Any], *_: object, **__: object) -> list[dict[str, Any]]:
            return [own, small, own]

    there = machine._gpu_memory(torch.device("cuda"), Ranks(), plan_for_free=False)  # type: ignore[arg-type]
    assert there == {
        "gpu": "NVIDIA A100-PCIE-40GB",
        "total_bytes": 40 * GIB,
        "free_bytes": 80 * GIB,
        "unequal": "GPUs of different sizes: NVIDIA H100 80GB HBM3 with 80.00 GiB on ranks 0, 2; NVIDIA "
        "A100-PCIE-40GB with 40.00 GiB on rank 1. The memory plan goes by the smallest",
    }
    lines = resolved_on(sft(), "cuda", unequal=there["unequal"], total_bytes=80 * GIB).reasons
    assert lines[-1] == there["unequal"]
