"""DeepSpeedBackend against LocalBackend: loss, logprobs, gradients, steps, checkpoints and errors, at every
ZeRO stage, with one rank and with two. Each group of cases runs in processes of its own: DeepSpeed's state is
of a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises
from selected import exhaustive
from starting import run_ranks

from lockstep.config.train import TrainConfig
from lockstep.errors import ConfigError
from lockstep.train.deepspeed.backend import DeepSpeedBackend
from lockstep.train.deepspeed.setup import announced_build, check_cuda_architectures

WORKER = Path(__file__).with_name("deepspeed_worker.py")
TIMEOUT = 900  # DeepSpeed compiles its extensions at the first use on a machine: minutes on a busy one


def run_cases(cases: list[dict[str, Any]], *, ranks: int = 1) -> list[list[dict[str, Any]]]:
    """The results of each rank, in the order of the cases."""
    pytest.importorskip("deepspeed")
    return run_ranks(WORKER, json.dumps(cases), ranks=ranks, seconds=TIMEOUT, alone=ranks == 1)


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
@pytest.mark.parametrize("stages", [pytest.param((0, 1, 2), marks=pytest.mark.exhaustive), (3,)])
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
def test_two_ranks_add_their_own_gradients() -> None:
    """forward_backward_own: each rank has its own inputs; the second one once has none."""
    cases = [case for stage in (0, 1, 2, 3) for case in two_rank_cases(stage)]
    check(run_cases(cases, ranks=2), cases)


@pytest.mark.exhaustive
def test_groups_without_a_signal_are_left_out_of_two_ranks() -> None:
    """The worker compares gradients and weights with those of a run that leaves nothing out."""
    for of_rank in run_cases([{"kind": "left_out", "stages": [0, 1, 2, 3]}], ranks=2):
        assert len(of_rank) == 1 and all(of_rank[0][str(stage)] < 1e-5 for stage in range(4))


def two_rank_cases(stage: int) -> list[dict[str, Any]]:
    return [
        {"stage": stage, "model": "tiny-qwen3", "train": {"layout": "padded"}, "whole": True, "steps": 2},
        {"stage": stage, "empty": True, "micro_batches": 1, "steps": 0},
    ]


@pytest.mark.exhaustive
def test_twenty_steps_of_two_ranks(tmp_path: Path) -> None:
    """Every rank is given all micro-batches, of which one rank has one more; gradients are clipped."""
    sgd, offload = {"optimizer": "sgd", "lr": 0.1}, {"optimizer_device": "cpu"}
    cases: list[dict[str, Any]] = [
        *({"stage": s, "train": sgd, "tolerance": 1e-5} for s in (0, 1, 2, 3)),
        *({"stage": s, "tolerance": 1e-4} for s in (0, 1, 2, 3)),
        *(
            {"stage": s, "dtype": "bfloat16", "steps": 8, "tolerance": 1e-2, "ref": s > 1}
            for s in (0, 1, 2, 3)
        ),
        {"stage": 1, "train": offload | sgd, "steps": 4, "tolerance": 1e-5},
        {"stage": 2, "train": offload, "steps": 4, "tolerance": 1e-4},
        {
            "stage": 3,
            "train": offload | {"parameter_device": "cpu"},
            "model": "tiny-qwen3",
            "steps": 4,
            "tolerance": 1e-4,
            "ref": True,
            "export": str(tmp_path),
        },
        *(
            {"stage": s, "lora": True, "steps": 4, "tolerance": 1e-4, "ref": True, "export": str(tmp_path)}
            for s in (2, 3)
        ),
    ]
    cases = [{"kind": "train", **case} for case in cases]
    results = run_cases(cases, ranks=2)
    assert [{**r, "case": 0} for r in results[0]] == [{**r, "case": 0} for r in results[1]]
    for case, result in zip(cases, results[0], strict=True):
        low = case.get("dtype") == "bfloat16"
        assert result["case"] == case
        assert result["loss"] < case["tolerance"], result
        assert result["norm"] < case["tolerance"], result
        assert result["scored"] < (0.1 if low else 1e-4), result  # nats
        assert result["weights"] < (0.1 if low else 1e-4), result
        assert result["shared"] == (case["stage"] < 3)
        assert result["exported"] == ("export" in case)
        assert result["clipped"] or case.get("lora"), result
        assert result["fell"] or case.get("steps") == 4, result


CHAINS: dict[str, dict[str, Any]] = {
    "short": {"chain": ["zero2", "zero2", "local", "zero3", "fsdp2", "zero1"]},
    "fp32": {
        "chain": [
            *("zero2", "zero2", "local", "zero3", "zero3"),
            *("zero0", "zero0", "fsdp2", "zero1", "zero1"),
        ],
    },
    "bf16": {"chain": ["zero3", "local", "zero0", "zero0", "zero2"], "dtype": "bfloat16"},
    "lora": {"chain": ["zero3", "zero1", "local", "zero2"], "lora": True},
    "offload": {
        "chain": ["zero2", "zero2", "zero3", "zero3"],
        "train": {"optimizer_device": "cpu"},
        "model": "tiny-qwen3",
    },
    "start": {"chain": ["zero2", "zero3", "local"], "at_start": True},
}
"""The backends that load, one after another, what the one before has saved."""
LAUNCHED = [(("short",), (2,)), (("fp32", "bf16", "lora", "offload", "start"), (2, 3))]
"""Chains and ZeRO stages with errors that one launch of two ranks goes through."""


@pytest.mark.slow
@pytest.mark.parametrize(("names", "stages"), exhaustive(LAUNCHED, quick=LAUNCHED[:1]))
def test_checkpoints_go_from_backend_to_backend_and_errors_to_every_rank(
    names: tuple[str, ...], stages: tuple[int, ...], tmp_path: Path
) -> None:
    chains = [{"kind": "states", "folder": name, **CHAINS[name]} for name in names]
    broken = [{"kind": "errors", "folder": f"errors{stage}", "stage": stage} for stage in stages]
    cases = [case | {"folder": str(tmp_path / case["folder"])} for case in (*chains, *broken)]
    for case in cases:
        Path(case["folder"]).mkdir()
    results = run_cases(cases, ranks=2)
    for chain, result in zip(chains, results[0], strict=False):
        check_chain(chain, result["chain"])
    for index in range(len(chains), len(cases)):
        check_errors([of_rank[index] for of_rank in results])


def check_chain(case: dict[str, Any], links: list[dict[str, Any]]) -> None:
    for before, link in zip(case["chain"][:-1], links, strict=True):
        assert link["unequal"] == [], (before, link)  # what is saved again is what was loaded, to the bit
        if link["to"] == before:
            assert link["step"] == 0.0, (before, link)
            assert link["after_equal"], (before, link)
        low = case.get("dtype") == "bfloat16"
        assert link["step"] < (1e-2 if low else 1e-5), (before, link)
        assert link["after"] < (1e-1 if low else 1e-4), (before, link)
        assert link["tensors"] > 30


def check_errors(results: list[dict[str, Any]]) -> None:
    first, second = (result["said"] for result in results)
    for result in results:
        assert result["norm"] < 1e-5
        assert result["logprobs"] < 1e-5
    for name in ("nan", "infinite", "different", "no gradients", "twice", "save", "nothing trained"):
        assert first[name] == second[name]
        assert first[name][0] == "TrainError"
    assert "micro-batch 1 of 4: the loss is nan; its samples are [100, " in first["nan"][1]  # rank 1's
    assert "micro-batch 3 of 4: the loss is inf" in first["infinite"][1]
    assert "call forward_backward with at least one trained token" in first["nothing trained"][1]
    for said in (first, second):
        assert "micro-batch 1 of 2: out of memory with" in said["memory"][1]
        kind, text = said["uneven"]
        assert kind == "CheckpointError"
        assert "updated 2 times and other parameters 1 times" in text


@pytest.mark.exhaustive
def test_compiled_equals_eager() -> None:
    compiled = {"train": {"execution": "compile"}, "micro_batches": 1, "steps": 0, "inputs": 1}
    cases: list[dict[str, Any]] = [{"stage": stage, **compiled} for stage in (1, 3)]
    # ZeRO 1 and 2 with a joint graph: parity/test_train_backends.py
    cases.append({"stage": 0, **compiled, "train": {"execution": "joint"}})
    check(run_cases(cases), cases)


@pytest.mark.exhaustive
def test_bfloat16() -> None:
    """One micro-batch: LocalBackend would add several up in float32. Gradients of bfloat16 weights have 8
    bits; the updates go through float32 masters on both sides, at stage 0 too: the very same numbers."""
    cases: list[dict[str, Any]] = [
        {"stage": 0, "dtype": "bfloat16", "micro_batches": 1, "steps": 0, "tolerance": 1e-2},
        {"stage": 0, "dtype": "bfloat16", "micro_batches": 1, "tolerance": 1e-6},
        *({"stage": s, "dtype": "bfloat16", "micro_batches": 1, "tolerance": 2e-2} for s in (1, 2, 3)),
    ]
    check(run_cases(cases), cases)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"execution": "deepcompile"}, "missing-device: train.execution"),
        ({"execution": "joint", "zero_stage": 3}, "unsupported-combination: train.zero_stage"),
        ({"optimizer": "adamw8bit"}, "unsupported-combination: train.optimizer"),
        (
            {"optimizer_device": "cpu", "zero_stage": 0},
            "unsupported-combination: train.optimizer_device",
        ),
        (
            {"parameter_device": "cpu", "zero_stage": 2},
            "unsupported-combination: train.parameter_device",
        ),
        ({"parameter_device": "cpu", "zero_stage": 3}, "unsupported-combination: train.optimizer_device"),
        ({"tp": 2}, "unsupported-combination: train.tp"),
        ({"ring": 2}, "unsupported-combination: train.ring"),
        ({"dtype": "float16"}, "unsupported-combination: model.dtype"),
    ],
)
def test_what_cannot_work_is_refused_before_deepspeed_starts(
    tiny_model: Any, settings: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # importing it fails
    model = tiny_model(settings.pop("dtype", "float32"))
    with raises(ConfigError, named):
        DeepSpeedBackend(TrainConfig(**settings), model=model, total_steps=1)
    assert not torch.distributed.is_initialized()


def test_deepspeed_is_missing(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with raises(ConfigError, "missing-package"):
        DeepSpeedBackend(TrainConfig(), model=tiny_model(), total_steps=0)


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with (
        raises(ConfigError, "missing-package"),
        announced_build(["cpu_adam"]),
    ):
        raise AssertionError("it started")


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an extension that has been built."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = tmp_path / "cpu_adam"
    folder.mkdir()
    (folder / "cpu_adam.so").touch()
    return folder


def test_the_lock_of_a_build_that_was_killed_is_removed(
    built: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lock = built / "lock"
    killed = "import os, sys; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", killed, str(lock)], check=False).returncode == -9
    os.utime(lock, (0, 0))
    with announced_build(["cpu_adam"]):
        assert not lock.exists()
    assert "has been killed" in caplog.text


def test_the_lock_of_a_build_that_hangs_is_named(built: Path) -> None:
    lock = built / "lock"
    with lock.open("w"):
        os.utime(lock, (0, 0))
        with (
            raises(ConfigError, "locked"),
            announced_build(["cpu_adam"]),
        ):
            raise AssertionError("it waits for ever")
        assert lock.exists()


def test_an_architecture_that_deepspeed_cannot_read_is_named() -> None:
    check_cuda_architectures("")
    check_cuda_architectures("8.0 9.0+PTX")
    with raises(ConfigError, "wrong-environment"):
        check_cuda_architectures("8.0;9.0a")
