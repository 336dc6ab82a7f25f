"""Batch-invariant runs of the loop: equal contracts, what they save, and what ends a run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_runs import metrics_of
from raising import raises

from lockstep import loops
from lockstep.config.load import build, load_run
from lockstep.config.model import ModelConfig
from lockstep.config.run import GRPORun, SFTRun
from lockstep.engine.native import NativeEngine
from lockstep.errors import ConfigError, ModelError, TrainError
from lockstep.loop.determinism import (
    batch_invariance_lines,
    batch_invariance_manifest,
    contract_change,
    make_invariant,
)
from lockstep.models.load import load_model
from lockstep.protocols.engine import Finished
from lockstep.recording import Recording
from lockstep.schema.contract import KernelContract
from lockstep.train.local import LocalBackend

TINY: dict[str, Any] = {
    "kind": "grpo",
    "steps": 2,
    "model": {"name": "shape:tiny-llama", "dtype": "float32"},
    "data": {"source": "ids", "max_prompt_tokens": 16},
    "rollout": {
        "prompts_per_step": 4,
        "group_size": 4,
        "sampling": {"max_tokens": 12, "temperature": 0.7},
    },
    "rewards": [{"name": "ids"}],
    "train": {"lr": 1e-3, "token_budget": 64, "batch_invariant": True, "device": "cpu"},
    "engine": {"name": "native"},
    "eval": {"before": False, "after": False},
    "checkpoint": {"save_at_end": False, "export_at_end": False},
    "log": {"tensorboard": False, "display": "off"},
}


def run_of(folder: Path, **tables: dict[str, Any]) -> GRPORun:
    values: dict[str, Any] = TINY | {"run_dir": str(folder / "run")}
    for name, table in tables.items():
        values[name] = values.get(name, {}) | table
    run = build(values, origin="test")
    assert isinstance(run, GRPORun)
    return run


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many micro-batches each call of LocalBackend.logprobs computed."""
    counts: list[int] = []
    plain = LocalBackend.logprobs

    def logprobs(self: LocalBackend, batches: Any) -> list[torch.Tensor]:
        counts.append(len(batches))
        return plain(self, batches)

    monkeypatch.setattr(LocalBackend, "logprobs", logprobs)
    return counts


def test_rollout_logprobs_are_the_old_ones_and_the_forward_is_left_out(
    tmp_path: Path, forwards: list[int]
) -> None:
    """The same numbers as with the forward over all samples, which the first run leaves out."""
    moved = {"minibatches": 2, "epochs_per_batch": 2}
    loops.train(run_of(tmp_path / "reused", train=moved))
    reused, skipped = metrics_of(tmp_path / "reused/run"), list(forwards)
    forwards.clear()
    loops.train(run_of(tmp_path / "computed", train=moved | {"reuse_rollout_logprobs": False}))
    computed = metrics_of(tmp_path / "computed/run")
    for ours, theirs in zip(reused, computed, strict=True):
        assert ours.pop("old_logprobs_reused") == 1.0
        assert 0.5 <= ours.pop("contract_verified") < theirs.pop("contract_verified") == 1.0
        assert ours == theirs and ours["logprob_gap_max"] == 0.0 and ours["grad_norm"] > 0
    assert reused[0]["kl_old"] > 0  # the policy moved away from the old logprobs
    batches = int(reused[0]["input/micro_batches"])
    assert sum(forwards[:2]) == batches  # one call per minibatch
    assert len(skipped) == 2 and skipped[1] == 1 and batches > 4 * skipped[1]


def test_the_manifest_and_the_recording_say_the_contract(tmp_path: Path) -> None:
    loops.train(run_of(tmp_path, record={"enabled": True}))
    for row in metrics_of(tmp_path / "run"):
        assert row["logprob_gap_max"] == 0.0 and row["contract_verified"] == 1.0
        assert row["importance_ratio_max"] == 1.0 and "old_logprobs_reused" not in row
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    contract = KernelContract.from_json(manifest["contract"])
    assert (contract.compile, contract.dtype) == ("eager", "float32")
    assert contract.threads == torch.get_num_threads()
    assert manifest["axes"]["batch_invariant"] and manifest["batch_invariant"]["replaced"]["linear"] == 15
    header = Recording.open(tmp_path / "run/recordings").header
    assert header.contract == contract.as_json() and header.axes["batch_invariant"] is True


def test_one_wrong_bit_of_the_engine_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = NativeEngine.finished

    def finished(self: NativeEngine, *, wait: bool = True) -> Iterator[Finished]:
        for done in plain(self, wait=wait):
            if self.stats().policy_version == 1 and (done.handle.index, done.sample) == (2, 3):
                bits = torch.tensor(done.completion.logprobs)
                bits.view(torch.int32)[1] += 1  # one unit in the last place
                changed = dataclasses.replace(done.completion, logprobs=tuple(bits.tolist()))
                done = dataclasses.replace(done, completion=changed)
            yield done

    monkeypatch.setattr(NativeEngine, "finished", finished)
    with raises(
        TrainError, "values-differ", step=1, name="prompt 6, sample 3", position=10, token=1
    ) as found:
        loops.train(run_of(tmp_path))
    assert "1 of " in str(found.value) and "No weights were changed" in str(found.value)


def test_contracts_that_differ_are_refused_before_the_first_step(tmp_path: Path) -> None:
    run = run_of(tmp_path, train={"execution": "compile"}, engine={"eager": True})
    with raises(
        ConfigError,
        "kernels-differ: train.batch_invariant",
        different=["compile: 'inductor' here, 'eager' there"],
    ):
        loops.train(run)


def test_a_model_outside_of_the_claim(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Asked for, it is an error that names the module; on by default, it is off and says so."""
    config = ModelConfig(name="shape:tiny-llama", dtype="float32")
    model = load_model(config, attention="varlen", device=torch.device("cpu"))
    layer = model.module.model.layers[0]
    layer.mlp.down_proj = torch.nn.Sequential(layer.mlp.down_proj, torch.nn.Tanh())
    cpu = torch.device("cpu")
    with raises(ModelError, "not-batch-invariant: model.layers.0.mlp.down_proj (Sequential)"):
        make_invariant(model, device=cpu, required=True)
    result = make_invariant(model, device=cpu, required=None)
    assert "down_proj" in (result.refused or "")
    assert batch_invariance_lines(result, None)[0].startswith(
        "train.batch_invariant is off: model.layers.0.mlp.down"
    )


def test_a_resumed_run_with_other_kernels_says_so(tmp_path: Path) -> None:
    run = run_of(tmp_path, checkpoint={"save_at_end": True})
    loops.train(build(run.model_dump(mode="json") | {"steps": 1}, origin="test"))  # type: ignore[arg-type]
    file = tmp_path / "run/manifest.json"
    manifest = json.loads(file.read_text())
    changed = KernelContract.from_json(manifest["contract"])
    changed = dataclasses.replace(changed, torch="2.11.0", gemm="triton-persistent")
    assert contract_change(manifest["contract"], KernelContract.from_json(manifest["contract"])) == []
    assert contract_change(None, changed) == []
    (line,) = contract_change(manifest["contract"], None)
    assert "continues without one; its logprob_gap was 0" in line
    assert batch_invariance_manifest(None, None) == {"batch_invariant": None, "contract": None}
    (line,) = contract_change(manifest["contract"], changed)
    assert "gemm 'cpu-tiles" in line and "now 'triton-persistent'; " in line and "now '2.11.0')" in line
    loops.train(run, resume=tmp_path / "run")
    assert [row["logprob_gap_max"] for row in metrics_of(tmp_path / "run")] == [0.0, 0.0]


def test_sft_has_a_contract_of_its_own(tmp_path: Path, sft_toml: Path) -> None:
    train = {"train.batch_invariant": True, "train.device": "cpu", "steps": 1, "log.display": "off"}
    run = load_run(sft_toml, overrides=train | {"run_dir": str(tmp_path / "run"), "eval_every": 0})
    assert isinstance(run, SFTRun)
    loops.train(run)
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    assert manifest["axes"]["attention"] == "varlen"
    assert KernelContract.from_json(manifest["contract"]).attention_splits == 1


def test_reuse_without_a_contract_is_refused(tmp_path: Path) -> None:
    run = run_of(tmp_path, train={"batch_invariant": None, "reuse_rollout_logprobs": True})
    with raises(ConfigError, "unsupported-combination: train.reuse_rollout_logprobs"):
        loops.train(run)
