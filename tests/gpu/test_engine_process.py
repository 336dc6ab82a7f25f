"""engine.process = "separate" on CUDA: a run equals the one with native in the trainer's process, to the bit.

LOCKSTEP_GPU_ENGINE_PROCESS=1 python -m pytest tests/gpu/test_engine_process.py

"collective" needs a second GPU, on which the server is: one that the run names, or that is set aside for it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from starting import succeeds

from lockstep import loops
from lockstep.config.load import build
from lockstep.config.run import GRPORun

pytestmark = pytest.mark.skipif(
    os.environ.get("LOCKSTEP_GPU_ENGINE_PROCESS") != "1", reason="LOCKSTEP_GPU_ENGINE_PROCESS is not 1"
)
MEASURED = ("time/", "memory/", "throughput/", "timestamp", "engine/")
"""What a metric's name begins with that is about the machine."""


def run_of(run_dir: Path, *, cluster: dict[str, Any] | None = None, **engine: Any) -> GRPORun:
    values: dict[str, Any] = {
        "kind": "grpo",
        "steps": 3,
        "run_dir": str(run_dir),
        "model": {"name": "shape:llama-3.2-1b", "num_layers": 2, "dtype": "bfloat16"},
        "data": {"source": "ids", "max_prompt_tokens": 32},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "sampling": {"max_tokens": 32}},
        "rewards": [{"name": "ids"}],
        "train": {"lr": 1e-4, "token_budget": 512, "batch_invariant": True, "device": "cuda"},
        "eval": {"before": False, "after": False},
        "log": {"tensorboard": False, "display": "off"},
        "engine": {"name": "native", **engine},
    }
    values |= {} if cluster is None else {"cluster": cluster}
    run = build(values, origin="test")
    assert isinstance(run, GRPORun)
    return run


def numbers(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(MEASURED)} for line in lines]


def weights(run: Path) -> dict[str, bytes]:
    files = sorted(run.glob("export*/*.safetensors"))
    assert files
    return {
        f"{file.name}/{name}": tensor.view(torch.uint8).numpy().tobytes()
        for file in files
        for name, tensor in load_file(file).items()
    }


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("embedded") / "run"
    loops.train(run_of(run))
    return run


@pytest.mark.parametrize(
    ("transfer", "placed"),
    [
        ("ipc", {}),
        ("disk", {}),
        ("collective", {"cuda_devices": (1,)}),
        ("collective", {"cluster": {"gpus": 1, "engine_gpus": 1}}),
    ],
)
def test_it_trains_to_the_bit_as_in_the_trainers_process(
    transfer: str, placed: dict[str, Any], embedded: Path, tmp_path: Path
) -> None:
    if placed and torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    run = tmp_path / "run"
    loops.train(run_of(run, process="separate", transfer=transfer, verify="always", **placed))
    ours = numbers(run)
    assert [row["logprob_gap_max"] for row in ours if "logprob_gap_max" in row] == [0.0] * 3
    assert ours == numbers(embedded)
    assert weights(run) == weights(embedded)
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["engine"]["transport"] == transfer


RANKS = """
kind = "grpo"
[model]
name = "shape:llama-3.2-1b"
num_layers = 2
dtype = "bfloat16"
[data]
source = "ids"
max_prompt_tokens = 32
[rollout]
prompts_per_step = 4
group_size = 4
sampling.max_tokens = 32
[[rewards]]
name = "ids"
[train]
backend = "fsdp2"
lr = 1e-4
token_budget = 512
batch_invariant = true
device = "cuda"
[engine]
name = "native"
[log]
tensorboard = false
"""
HOOK = """
import json, os, signal
from pathlib import Path
from lockstep.algorithms.policy_loss import clipped_objective as objective
from lockstep.engine.remote.driver import EventStreams
from lockstep.engine.remote.http import Unreachable

poll, seen = EventStreams.poll, []

def cut(self, seconds):
    events = poll(self, seconds)
    for number, (key, event) in enumerate(events):
        if isinstance(event, bytes) and json.loads(event)["policy_version"] == 1:
            seen.append(event)
            if len(seen) == 3:
                os.kill(self._client.get("/info", seconds=60.0).object()["pid"], signal.SIGKILL)
                Path("killed").touch()
                died = Unreachable("the server was killed", code="unreachable")
                return [*events[: number + 1], (key, died)]
    return events

if os.environ.get("RANK") == "1":
    EventStreams.poll = cut
"""
"""Kills the server of rank 1 when 3 of the second step's samples have come from it."""


def test_two_ranks_keep_the_bits_when_a_server_is_killed(tmp_path: Path) -> None:
    """FSDP2's shards are gathered again for the new server, from both GPUs."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    (tmp_path / "run.toml").write_text(RANKS)
    (tmp_path / "hook.py").write_text(HOOK)
    for process in ("auto", "separate"):
        argv = ["train", "run.toml", "--ranks", "2", "--steps", "3", "--run-dir", process]
        argv += ["--algorithm.objective", "hook:objective", "--engine.process", process]
        succeeds(*argv, cwd=tmp_path, seconds=600)
    ours, theirs = tmp_path / "separate", tmp_path / "auto"
    assert (tmp_path / "killed").exists()
    lines = [json.loads(line) for line in (ours / "metrics.jsonl").read_text().splitlines()]
    assert [line["engine/restarts"] for line in lines if "engine/restarts" in line] == [0.0, 1.0, 1.0]
    again = "rollout/cached_tokens"  # a prompt is computed again for those of its samples that were missing
    found, expected = (
        [{k: v for k, v in row.items() if k != again} for row in numbers(r)] for r in (ours, theirs)
    )
    assert found == expected
    assert weights(ours) == weights(theirs)
