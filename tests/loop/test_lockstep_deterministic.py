"""train.deterministic: the same run twice gives the same weights after every step."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_runs import TINY, Commands
from raising import raises

from lockstep.config.model import ModelConfig
from lockstep.errors import ConfigError
from lockstep.loop.determinism import deterministic, prepare_cublas
from lockstep.models.load import load_model
from lockstep.recording.files import fingerprint, module_tensors

DOCS = Path(__file__).parents[2] / "docs"
FLAGS = ("--deterministic", "--steps", "3", "--train.device", "cpu")
SHORT = ("--eval.no-before", "--eval.no-after", "--eval.every", "0", "--checkpoint.every", "0")
STACKS = {
    "local, compile": ("--train.execution", "compile", "--train.token-budget", "512"),
    "fsdp2, 2 ranks": ("--train.backend", "fsdp2", "--ranks", "2", "--train.epochs-per-batch", "2"),
    "native, batch-invariant": ("--engine.name", "native", "--train.batch-invariant", "true"),
}


AGAIN = {"fsdp2, 2 ranks": ("--engine.offload",)}
"""Flags of the second run, which change no bit: the engine's weights are freed and gathered again."""


def hashes(run: Path) -> list[str]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["weights_hash"] for row in rows if "evaluation" not in row]


@pytest.mark.parametrize("stack", STACKS)
def test_two_runs_have_the_same_weights_after_every_step(
    stack: str, lockstep: Commands, tmp_path: Path
) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    for name, more in (("one", ()), ("two", AGAIN.get(stack, ()))):
        flags = (*FLAGS, *SHORT, *STACKS[stack], *more)
        lockstep("train", "tiny.toml", "--run-dir", name, *flags, cwd=tmp_path)
    found = hashes(tmp_path / "one")
    assert len(set(found)) == 3, "the weights change in every step"
    assert found == hashes(tmp_path / "two")
    last = load_model(
        ModelConfig(name=str(tmp_path / "one/export"), dtype="float32"),
        attention="sdpa",
        device=torch.device("cpu"),
    )
    whole = fingerprint(module_tensors(last.module).items())
    assert found[-1] == whole, "the hash is of the weights that are exported"


def test_the_commands_of_the_docs(lockstep: Commands, tmp_path: Path) -> None:
    lines = (DOCS / "how-to/deterministic.md").read_text().splitlines()
    commands = [shlex.split(line)[2:] for line in lines if line.startswith("$ lockstep ")]
    for command in commands:
        lockstep(*command, "--train.device", "cpu", *SHORT, cwd=tmp_path)
    found = hashes(tmp_path / "runs/one")
    assert len(commands) == 2 and len(set(found)) == 3 and found == hashes(tmp_path / "runs/two")


def test_another_seed_gives_other_weights(lockstep: Commands, tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    for seed in ("0", "1"):
        flags = (*FLAGS, *SHORT, "--seed", seed)
        lockstep("train", "tiny.toml", "--run-dir", seed, *flags, cwd=tmp_path)
    pairs = zip(hashes(tmp_path / "0"), hashes(tmp_path / "1"), strict=True)
    assert all(one != other for one, other in pairs)


def state() -> dict[str, Any]:
    from torch._inductor import config

    return {
        "debug": torch.get_deterministic_debug_mode(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "cudnn": (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        "inductor": config.deterministic,
    }


def test_what_torch_is_told_and_that_it_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_ALGO", "NCCL_NVLS_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    before = state()
    with deterministic(False):
        assert state() == before and "NCCL_ALGO" not in os.environ
    with pytest.raises(KeyError), deterministic(True):
        assert state() == {"debug": 2, "fill": False, "cudnn": (True, False), "inductor": True}
        assert (os.environ["NCCL_ALGO"], os.environ["NCCL_NVLS_ENABLE"]) == ("Ring", "0")
        with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
            torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
        raise KeyError
    assert state() == before and "NCCL_ALGO" not in os.environ
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    with deterministic(True):
        assert os.environ["NCCL_ALGO"] == "Tree"
    assert os.environ["NCCL_ALGO"] == "Tree"


def test_a_workspace_that_torch_does_not_accept_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    with raises(ConfigError, "wrong-environment: CUBLAS_WORKSPACE_CONFIG", value=":4096:2:16:8"):
        prepare_cublas()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    prepare_cublas()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    prepare_cublas()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_memory_that_nobody_wrote_is_not_filled() -> None:
    """Filling costs a pass over every new tensor: the NaN that torch would fill in must not be there."""
    with deterministic(True):
        torch.full((1 << 16,), 3.0)
        assert not torch.empty(1 << 16).isnan().all()
