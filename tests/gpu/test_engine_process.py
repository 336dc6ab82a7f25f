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
