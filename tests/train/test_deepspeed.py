"""DeepSpeedBackend against LocalBackend: loss, logprobs, gradients and AdamW steps, at every ZeRO stage, with
one rank and with two. Each group of cases runs in processes of its own: DeepSpeed's state is of a process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.train import TrainConfig
from lockstep.errors import ConfigError
from lockstep.train.deepspeed import DeepSpeedBackend
from lockstep.train.deepspeed_setup import announced_build, check_cuda_architectures

WORKER = Path(__file__).with_name("deepspeed_worker.py")
TIMEOUT = 300  # DeepSpeed compiles its collectives at the first use on a machine


def run_cases(cases: list[dict[str, Any]], *, ranks: int = 1) -> list[list[dict[str, Any]]]:
    """The results of each rank, in the order of the cases."""
    pytest.importorskip("deepspeed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers = []
    for rank in range(ranks):
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        if ranks > 1:
            environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, str(WORKER), json.dumps(cases)]
        workers.append(
            subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    try:
        outputs = [worker.communicate(timeout=TIMEOUT) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, (out, err) in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, f"{out[-2000:]}\n{err[-6000:]}"
    return [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out, _ in outputs]


def check(results: list[list[dict[str, Any]]], cases: list[dict[str, Any]]) -> None:
    for of_rank in results:
        assert [result["case"] for result in of_rank] == cases
        for result in of_rank:
            tolerance = result["case"].get("tolerance", 1e-5)
            for key in ("loss", "logprobs", "scored", "gradient", "again", "norm"):
                assert result[key] < tolerance, (key, result)
            assert result["spans"] == ["time/backward", "time/forward"]
            if result["case"]["stage"] == 3:
                assert result["head_elements_outside"] == 0  # gathered for each use, and released


@pytest.mark.slow
@pytest.mark.parametrize("stages", [(0, 1), (2, 3)])
def test_one_rank_computes_what_local_computes(stages: tuple[int, ...]) -> None:
    cases = [case for stage in stages for case in one_rank_cases(stage)]
    check(run_cases(cases), cases)


def one_rank_cases(stage: int) -> list[dict[str, Any]]:
    return [
        {"stage": stage},
        {"stage": stage, "model": "tiny-qwen3", "train": {"layout": "padded", "padding_side": "left"}},
        {"stage": stage, "model": "tiny-qwen3", "attention": "varlen", "whole": True},
        {"stage": stage, "train": {"activation_checkpointing": True, "layout": "padded"}, "steps": 0},
        {"stage": stage, "train": {"static_capacity": True, "optimizer": "sgd"}, "lora": True},
        {"stage": stage, "fail": "forward"},
        {"stage": stage, "fail": "backward", "model": "tiny-qwen3"},
    ]


@pytest.mark.slow
@pytest.mark.parametrize("stages", [(0, 1), (2, 3)])
def test_two_ranks_add_their_gradients(stages: tuple[int, ...]) -> None:
    """Each rank has its own inputs; the second one once has none."""
    cases = [case for stage in stages for case in two_rank_cases(stage)]
    check(run_cases(cases, ranks=2), cases)


def two_rank_cases(stage: int) -> list[dict[str, Any]]:
    return [
        {"stage": stage},
        {"stage": stage, "model": "tiny-qwen3", "train": {"layout": "padded"}, "whole": True},
        {"stage": stage, "empty": True, "micro_batches": 1, "steps": 0},
        {"stage": stage, "empty": True, "model": "tiny-qwen3", "attention": "varlen", "whole": True},
    ]


@pytest.mark.slow
def test_compiled_equals_eager() -> None:
    compiled = {"train": {"execution": "compile"}, "micro_batches": 1, "steps": 0, "inputs": 1}
    cases: list[dict[str, Any]] = [{"stage": stage, **compiled} for stage in (1, 3)]
    check(run_cases(cases), cases)


@pytest.mark.slow
def test_bfloat16() -> None:
    """One micro-batch: LocalBackend would add several up in float32. Gradients of bfloat16 weights have 8
    bits; the updates go through float32 masters on both sides."""
    cases: list[dict[str, Any]] = [
        {"stage": 0, "dtype": "bfloat16", "micro_batches": 1, "steps": 0, "tolerance": 1e-2},
        *({"stage": s, "dtype": "bfloat16", "micro_batches": 1, "tolerance": 2e-2} for s in (1, 2, 3)),
    ]
    check(run_cases(cases), cases)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"deepcompile": True}, "--deepcompile needs a CUDA device"),
        ({"zero_stage": 4}, "--zero-stage 4 does not exist"),
        ({"ref": True}, "no reference model"),
        ({"train": {"execution": "joint"}}, "train.execution = 'joint'"),
        ({"train": {"optimizer": "adamw8bit"}}, "adamw8bit"),
        ({"train": {"optimizer_device": "cpu"}}, "optimizer_device"),
        ({"dtype": "bfloat16", "zero_stage": 0}, "--zero-stage 1"),
        ({"dtype": "float16"}, "float16"),
    ],
)
def test_what_cannot_work_is_refused_before_deepspeed_starts(
    tiny_model: Any, settings: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # importing it fails
    model = tiny_model(settings.pop("dtype", "float32"))
    config = TrainConfig(**settings.pop("train", {}))
    with pytest.raises(ConfigError, match=named):
        DeepSpeedBackend(config, model=model, total_steps=1, **settings)
    assert not torch.distributed.is_initialized()


def test_deepspeed_is_missing(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ConfigError, match="--no-build-isolation deepspeed"):
        DeepSpeedBackend(TrainConfig(), model=tiny_model(), total_steps=0)


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with (
        pytest.raises(ConfigError, match=r"g\+\+ and ninja"),
        announced_build(torch.device("cpu")),
    ):
        raise AssertionError("it started")


def test_an_architecture_that_deepspeed_cannot_read_is_named() -> None:
    check_cuda_architectures("")
    check_cuda_architectures("8.0 9.0+PTX")
    with pytest.raises(ConfigError, match=r"for 9.0a; set TORCH_CUDA_ARCH_LIST='8.0;9.0'"):
        check_cuda_architectures("8.0;9.0a")
