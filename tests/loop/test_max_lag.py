"""Rollouts that take several steps (rollout.max_lag)."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from loop_runs import Commands, everything, metrics_of
from raising import raises
from sampled import completion

from lockstep import loops
from lockstep.config.load import build, dump_toml, load_resumed
from lockstep.config.run import GRPORun
from lockstep.engine.native import NativeEngine
from lockstep.engine.native.engine import Generation
from lockstep.errors import CheckpointError, EngineError, TrainError
from lockstep.loop.run import Run
from lockstep.loop.saved import SavedRollouts
from lockstep.ranks.context import RankContext
from lockstep.rollout.shares import SentShare, Share
from lockstep.schema.rollout import Prompt, Rollout, Trajectory

LAG = 2
TINY: dict[str, Any] = {
    "kind": "grpo",
    "steps": 6,
    "model": {"name": "shape:tiny-llama", "dtype": "float32"},
    "data": {"source": "ids", "max_prompt_tokens": 16},
    "rollout": {
        "prompts_per_step": 4,
        "group_size": 4,
        "max_lag": LAG,
        "sampling": {"max_tokens": 48, "temperature": 1.0, "stop_token_ids": list(range(100, 108))},
    },
    "algorithm": {"rollout_correction": {"kind": "tis"}},
    "rewards": [{"name": "ids"}],
    "train": {"lr": 3e-3, "token_budget": 128, "batch_invariant": True, "device": "cpu"},
    "engine": {"name": "native", "max_batch": 12},
    "eval": {"before": False, "after": False},
    "checkpoint": {"every": 2, "export_at_end": False},
    "log": {"tensorboard": False, "display": "off"},
}


def run_of(folder: Path, **tables: Any) -> GRPORun:
    values: dict[str, Any] = TINY | {"run_dir": str(folder / "run")}
    for name, table in tables.items():
        values[name] = values.get(name, {}) | table if isinstance(table, dict) else table
    run = build(values, origin="test")
    assert isinstance(run, GRPORun)
    return run


def ledger_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]


def rollouts_of(run: Path, *names: str) -> list[list[Any]]:
    files = sorted((run / "rollouts").glob("step-*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [[row[name] for name in names] for row in rows]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    loops.train(run_of(folder))
    return folder / "run"


def test_no_token_is_older_than_the_lag_and_the_gap_is_zero(straight: Path) -> None:
    rows = metrics_of(straight)
    assert len(rows) == 6
    for step, row in enumerate(rows):
        assert row["rollout/lag_max"] <= min(step, LAG)
        assert row["logprob_gap_max"] == 0.0 and 0 < row["logprob_gap_share"] <= 1.0
        assert row["contract_verified"] == pytest.approx(row["logprob_gap_share"])
    assert rows[0]["logprob_gap_share"] == 1.0 and rows[0]["rollout/lag_mean"] == 0.0
    assert max(row["rollout/lag_max"] for row in rows) == LAG
    assert all(row["policy_drift_mean"] > 0 for row in rows[2:])
    assert rows[0]["rollout/tokens_ahead"] > 0 and rows[-1]["rollout/tokens_ahead"] == 0  # it drains
    lags = [row["trained_step"] - row["policy_versions"][0] for row in ledger_of(straight)]
    assert max(lags) == LAG and len(lags) == 6 * 16
    assert any(len(row["policy_versions"]) > 1 for row in ledger_of(straight))


def test_weights_that_do_not_move_sample_what_a_run_without_lag_does(tmp_path: Path) -> None:
    """Same tasks, seeds, tokens and logprobs in the same step, to the bit."""
    still = {"lr": 1e-30}
    loops.train(run_of(tmp_path / "lag", train=still))
    loops.train(run_of(tmp_path / "none", train=still, rollout={"max_lag": 0}))
    names = ("step", "prompt_index", "seed", "token_ids", "rollout_logprobs", "reward", "finish_reason")
    ours, theirs = (rollouts_of(tmp_path / name / "run", *names) for name in ("lag", "none"))
    assert ours == theirs and len(ours) == 96
    assert {row[-1] for row in ours} == {"stop", "length"}
    assert sum(row["rollout/tokens_ahead"] for row in metrics_of(tmp_path / "lag/run")) > 0


def test_the_same_run_twice_has_the_same_bits(straight: Path, tmp_path: Path) -> None:
    loops.train(run_of(tmp_path))
    assert everything(tmp_path / "run") == everything(straight)


@pytest.mark.parametrize("moment", [3, 20, 45])
def test_a_run_that_died_goes_on_from_its_checkpoint_to_the_same_bits(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """The checkpoint holds the tokens of what was begun; keys are computed again."""
    plain, seen = NativeEngine._run, [0]

    def run(self: NativeEngine) -> Any:
        seen[0] += 1
        if seen[0] == moment:
            raise RuntimeError("planted")
        return plain(self)

    monkeypatch.setattr(NativeEngine, "_run", run)
    with pytest.raises((RuntimeError, EngineError), match="planted"):
        loops.train(run_of(tmp_path))
    monkeypatch.undo()
    loops.train(load_resumed(tmp_path / "run"), resume=tmp_path / "run")
    ours, theirs = everything(tmp_path / "run"), everything(straight)
    assert ours == theirs


def test_a_checkpoint_without_the_begun_rollouts_is_refused(straight: Path, tmp_path: Path) -> None:
    loops.train(run_of(tmp_path, steps=2))
    (file,) = (tmp_path / "run/checkpoints/step-000002").glob("rollouts-*.json")
    file.unlink()
    with raises(CheckpointError, "damaged-file"):
        loops.train(load_resumed(tmp_path / "run", {"steps": 3}), resume=tmp_path / "run")


def test_a_checkpoint_holds_what_policies_write(tmp_path: Path) -> None:
    """More signs of JSON than one that is read from elsewhere may have."""
    wrote = completion((1, 2), (3, 4), text="[{," * (1 << 21), policy_version=5)
    begun = Rollout(trajectory=Trajectory.of(wrote), reward=0.0, rewards={})
    prompt = Prompt(index=0, token_ids=(1, 2), text="")
    state, read = SentShare.of(Share(numbers=(7,), rollouts=((begun,),)), {7: prompt}), list[SentShare]()
    models = SimpleNamespace(save=lambda *_, **__: dict, load=lambda *_, **__: None)
    rollouts = SimpleNamespace(state=lambda: state, restore=read.extend)
    saved = SavedRollouts(models=models, rollouts=cast(Any, rollouts), ranks=RankContext.alone())
    assert saved.save(tmp_path)().keys() == {"rollouts-00000.json"}
    saved.load(tmp_path)
    assert read == [state] and read[0].received({7: prompt}).rollouts == ((begun,),)


def test_a_stop_before_the_first_step_of_a_resume_keeps_what_was_begun(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shutil.copytree(straight, tmp_path / "run")
    file = run / "checkpoints/step-000004/rollouts-00000.json"
    before = json.loads(file.read_text())
    assert before["share"]["numbers"]
    monkeypatch.setattr(Run, "stopping", lambda self: True)
    summary = loops.train(load_resumed(run), resume=run, checkpoint=4)
    assert (summary["outcome"], summary["steps"]) == ("interrupted", 4)
    assert json.loads(file.read_text()) == before


def test_rollouts_that_were_begun_for_steps_that_a_resume_leaves_out(straight: Path, tmp_path: Path) -> None:
    run = shutil.copytree(straight, tmp_path / "run")
    assert loops.train(load_resumed(run, {"steps": 5}), resume=run, checkpoint=4)["outcome"] == "finished"
    names = ("seed", "token_ids", "rollout_logprobs", "reward")
    assert rollouts_of(run, *names) == rollouts_of(straight, *names)[: 5 * 16]


def test_a_wrong_bit_in_a_token_of_the_present_weights_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of earlier weights would show there, too."""
    plain = NativeEngine.update_weights

    def update(self: NativeEngine, update: Any) -> None:
        plain(self, dataclasses.replace(update, policy_version=update.policy_version))
        if update.policy_version == 3:
            self.__dict__["_policy_version"] = 4  # tokens of version 3 that say they are of another

    monkeypatch.setattr(NativeEngine, "update_weights", update)
    with raises(TrainError, "values-differ"):
        loops.train(run_of(tmp_path))


@pytest.mark.exhaustive
def test_keys_that_are_kept_over_new_weights_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are to be computed again."""
    kept: dict[int, list[torch.Tensor]] = {}
    abort, bring_up = Generation.abort, Generation._bring_up

    def rows_of(generation: Generation) -> Iterator[tuple[int, int, list[torch.Tensor]]]:
        """Of each sample in the KV cache: its seed, its keys, and its rows in each tensor."""
        scheduler = generation.scheduler
        for sample, block in scheduler._blocks.items():
            keys = sample.known - 1
            cache = scheduler._kv_cache
            yield (
                sample.state.seed,
                keys,
                [tensor[block.start : block.start + keys] for tensor in (*cache.keys, *cache.values)],
            )

    def keep(self: Generation) -> Any:
        kept.update({seed: [rows.clone() for rows in each] for seed, _, each in rows_of(self)})
        return abort(self)

    def put_back(self: Generation, *args: Any) -> None:
        bring_up(self, *args)
        for seed, keys, each in rows_of(self):
            for rows, before in zip(each, kept.pop(seed, ()), strict=False):
                assert len(before) == keys
                rows.copy_(before)

    monkeypatch.setattr(Generation, "abort", keep)
    monkeypatch.setattr(Generation, "_bring_up", put_back)
    with raises(TrainError, "values-differ"):
        loops.train(run_of(tmp_path))


@pytest.mark.exhaustive
def test_two_ranks_have_groups_of_their_own_and_go_on_to_the_same_bits(
    lockstep: Commands, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(dump_toml(run_of(tmp_path, steps=4, train={"backend": "fsdp2"})))
    lockstep("train", tmp_path / "run.toml", "--ranks", "2", cwd=tmp_path)
    run = tmp_path / "run"
    before, weights = metrics_of(run), [path.read_bytes() for path in _weights(run)]
    assert len(list((run / "checkpoints/step-000002").glob("rollouts-*.json"))) == 2
    lockstep("train", "--resume", run, "--checkpoint", "2", "--ranks", "2", cwd=tmp_path)
    assert metrics_of(run) == before and [path.read_bytes() for path in _weights(run)] == weights
    assert all(row["logprob_gap_max"] == 0.0 for row in before)
    assert max(row["rollout/lag_max"] for row in before) == LAG


def _weights(run: Path) -> list[Path]:
    return sorted((run / "checkpoints/step-000004").glob("model-*.safetensors"))
