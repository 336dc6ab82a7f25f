"""PPO runs: two models that are trained, saved and resumed together, and kept apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_runs import FORWARD, OPTIMIZER, TINY, everything, kill
from raising import raises
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from lockstep.config.load import build, parse_toml
from lockstep.config.model import ModelConfig
from lockstep.config.ppo import PPORun
from lockstep.errors import ConfigError, ModelError
from lockstep.loop.determinism import weights_hash
from lockstep.loop.preflight import preflight
from lockstep.loops.online import OnlineTrainer, build_online
from lockstep.models.export import export_hf
from lockstep.models.load import load_model
from lockstep.recording import Recording
from lockstep.schema.batch import PolicyBatch, ValueBatch, rollout_samples

PPO = TINY.replace('kind = "grpo"', 'kind = "ppo"') + "[value]\nlr = 1e-2\n"
SAVE = "lockstep.train.local:LocalBackend.save"
LOAD = "lockstep.train.local:LocalBackend.load"


NO_EVALUATION = {"eval__before": False, "eval__after": False, "eval__every": 0}


def run_of(**overrides: Any) -> PPORun:
    values = parse_toml(PPO.encode(), origin="test")
    for path, value in overrides.items():
        section, _, name = path.partition("__")
        values.setdefault(section, {})[name] = value
    run = build(values, origin="test")
    assert isinstance(run, PPORun)
    return run


@pytest.fixture(scope="session")
def ppo_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("config") / "ppo.toml"
    file.write_text(PPO)
    return file


KILLS = [
    kill(OPTIMIZER, step=0, when="after"),  # of the value model: the policy's comes second
    kill(SAVE, step=1, call=2),  # the policy's files are written, the value model's are not
    kill(SAVE, step=1, call=2, when="after"),
    kill(OPTIMIZER, step=2, when="after"),
    kill(LOAD, call=2),  # the value model is loaded, the policy is not
    kill(FORWARD, step=3, call=2, when="backward"),
]


def test_a_killed_run_goes_on_with_both_models(lockstep, straight, ppo_toml, tmp_path):
    run = tmp_path / "run"
    argv: tuple[str | Path, ...] = ("train", ppo_toml, "--run-dir", run)
    begun = False
    for order in KILLS:
        lockstep(*argv, cwd=tmp_path, signals=[order], code=-9)
        begun = begun or any((run / "checkpoints").glob("step-*"))
        if begun:
            argv = ("train", "--resume", run)
        elif order["target"] == SAVE:  # two steps are done and nothing is saved: it begins again elsewhere
            run = tmp_path / f"run-{KILLS.index(order)}"
            argv = ("train", ppo_toml, "--run-dir", run)
        else:
            argv = ("train", "--resume", run)
    lockstep(*argv, cwd=tmp_path)
    found = everything(run)
    assert {name.partition("/")[0] for name in found["weights"]} == {
        "step-000004",
        "value",
        "export",
        "export-value",
    }
    assert found == straight(toml=ppo_toml)


REMEMBERS = (
    *("--algorithm.kl.coef", "0.1", "--algorithm.kl.target", "0.01", "--algorithm.kl.horizon", "32"),
    *("--algorithm.normalize-rewards", "--algorithm.bootstrap-truncated", "--algorithm.lam", "0.9"),
    *("--value.warmup-batches", "1", "--train.minibatches", "2", "--value.epochs-per-batch", "2"),
)


def test_what_the_algorithm_remembers_is_in_the_checkpoint(lockstep, straight, ppo_toml, tmp_path):
    """The coefficient of KL, the moments of the rewards, and how far the critic's warm-up is."""
    run = tmp_path / "run"
    orders = [kill(OPTIMIZER, step=2, when="after")]
    lockstep.broken_off(ppo_toml, run, orders, *REMEMBERS, "--checkpoint.every", "1")
    saved = json.loads((run / "checkpoints" / "step-000002" / "algorithm.json").read_text())
    assert saved["reward_count"] == 32 and saved["kl_coef"] != 0.1
    found, expected = everything(run), straight(*REMEMBERS, toml=ppo_toml)
    assert found == expected
    steps = [row for row in found["metrics"] if "value/loss" in row]
    assert "loss" not in steps[0] and all("loss" in row for row in steps[1:])
    assert len({row["kl_coef"] for row in steps}) == 4


def test_a_checkpoint_without_a_part_of_a_role_is_damaged(lockstep, ppo_toml, tmp_path):
    run = tmp_path / "run"
    lockstep("train", ppo_toml, "--run-dir", run, "--steps", "2", cwd=tmp_path)
    folder = run / "checkpoints" / "step-000002"
    for name in ("algorithm.json", "value/model.safetensors", "value/state.json"):
        kept = (folder / name).read_bytes()
        (folder / name).write_bytes(kept[:-1])
        ended = lockstep("train", "--resume", run, "--steps", "4", cwd=tmp_path, code=2)
        assert "is damaged" in ended.err and name in ended.err, ended.err
        (folder / name).write_bytes(kept)


def test_inputs_of_both_models_are_recorded_and_replayed(lockstep, ppo_toml, tmp_path):
    """Where the weights of an input are known: those of a checkpoint are before the first update of its
    step."""
    run = tmp_path / "run"
    lockstep(
        *("train", ppo_toml, "--run-dir", run, "--steps", "2", "--record.enabled"),
        *("--train.layout", "packed", "--checkpoint.every", "1"),
        cwd=tmp_path,
    )
    for role, kind in (("", PolicyBatch), ("-value", ValueBatch)):
        recording = Recording.open(run / f"recordings{role}")
        assert recording.header.role == (role[1:] or "policy")
        inputs = list(recording)
        assert {each.meta.step for each in inputs} == {0, 1} and {type(e.batch) for e in inputs} == {kind}
        out = tmp_path / f"replay{role}"
        lockstep("replay", run / f"recordings{role}", "--out", out, cwd=tmp_path)
        summary = json.loads((out / "summary.json").read_text())
        assert summary["weights"]["inputs"] == {"match": len(inputs), "mismatch": 0, "unknown": 0}
        assert summary["differences"]["logprob_max"] == summary["differences"]["loss_max"] == 0.0
    trained = [each.batch for each in inputs]
    assert all(isinstance(batch, ValueBatch) and batch.returns.any() for batch in trained)


def test_the_policy_waits_for_the_value_model():
    parts = build_online(run_of(**NO_EVALUATION, value__warmup_batches=1))
    try:
        trainer = OnlineTrainer(parts)
        trainer.push(policy_version=0)
        assert parts.value is not None
        before = weights_hash(parts.backend), weights_hash(parts.value.backend)
        result = trainer.update(trainer.sample(0).groups, step=0)
        assert "loss" not in result.metrics and "value/loss" in result.metrics
        after = weights_hash(parts.backend), weights_hash(parts.value.backend)
        assert before[0] == after[0] and before[1] != after[1]
        result = trainer.update(trainer.sample(1).groups, step=1)
        assert result.metrics["grad_norm"] > 0 and weights_hash(parts.backend) != after[0]
    finally:
        parts.close()


def test_what_a_run_leaves(lockstep, ppo_toml, tmp_path):
    run = tmp_path / "run"
    lockstep("train", ppo_toml, "--run-dir", run, "--steps", "2", cwd=tmp_path)
    exported = AutoModelForSequenceClassification.from_pretrained(run / "export-value")
    saved = load_file(run / "checkpoints" / "step-000002" / "value" / "model.safetensors")
    weights = exported.state_dict()
    assert saved.keys() == weights.keys() and all(weights[n].equal(saved[n]) for n in saved)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    for name in ("explained_variance", "loss", "error", "grad_norm", "lr", "returns_mean", "clip_fraction"):
        assert all(isinstance(row[f"value/{name}"], float) for row in steps), name
    assert steps[0]["value/lr"] == 1e-2 and steps[0]["lr"] == 1e-3


def test_no_role_reaches_the_others_weights():
    """An update of the value model changes it alone, and leaves no gradient in the policy; so does one of the
    policy."""
    parts = build_online(run_of(**NO_EVALUATION))
    try:
        trainer = OnlineTrainer(parts)
        trainer.push(policy_version=0)
        value = parts.value
        assert value is not None
        memory = {p.data_ptr() for p in parts.model.module.parameters()}
        assert not memory & {p.data_ptr() for p in value.model.module.parameters()}
        before = weights_hash(parts.backend), weights_hash(value.backend)
        groups = trainer.sample(0).groups
        trainer.update(groups, step=0)
        after = weights_hash(parts.backend), weights_hash(value.backend)
        assert before[0] != after[0] and before[1] != after[1]
        samples = rollout_samples(r.trajectory for group in groups for r in group.rollouts)
        values = value.score(samples)
        value.update(samples, values=values, returns=[v + 1.0 for v in values])
        assert weights_hash(parts.backend) == after[0] and weights_hash(value.backend) != after[1]
        assert all(p.grad is None for p in parts.model.module.parameters())
    finally:
        parts.close()


def test_values_approach_the_returns():
    """Trained on the same rollouts again and again."""
    parts = build_online(run_of(**NO_EVALUATION, value__clip=0.0))
    try:
        trainer = OnlineTrainer(parts)
        trainer.push(policy_version=0)
        assert parts.value is not None
        groups = trainer.sample(0).groups
        samples = rollout_samples(r.trajectory for group in groups for r in group.rollouts)
        rewards = [r.reward for group in groups for r in group.rollouts]
        returns = [s.loss_mask * reward for s, reward in zip(samples, rewards, strict=True)]
        seen = []
        for _ in range(12):
            values = parts.value.score(samples)
            seen.append(parts.value.update(samples, values=values, returns=returns))
        assert seen[-1]["value/loss"] < 0.2 * seen[0]["value/loss"]
        assert seen[-1]["value/explained_variance"] > 0.3 > seen[0]["value/explained_variance"]
    finally:
        parts.close()


@pytest.mark.parametrize(
    ("setting", "value", "text"),
    [
        ("algorithm__gamma", 1.5, "out-of-range: algorithm.gamma"),
        ("algorithm__lam", -0.1, "out-of-range: algorithm.lam"),
        ("value__minibatches", 3, "not-divisible: value.minibatches"),
        ("value__clip", -1.0, "out-of-range: value.clip"),
        ("value__huber_delta", 2.0, "no-effect: value.huber_delta"),
        ("value__warmup_batches", 4, "nothing-to-do: value.warmup_batches"),
        (
            "algorithm__kl",
            {"coef": 0.1, "target": 6.0, "horizon": 8},
            "out-of-range: algorithm.kl.horizon",
        ),
        ("algorithm__advantage", "group_mean", "unknown-name: algorithm.advantage"),
    ],
)
def test_settings_that_cannot_be_right_are_refused(setting, value, text):
    with raises(ConfigError, text):
        run_of(**{setting: value})


def test_a_value_model_that_is_not_there_is_refused(tmp_path):
    run = run_of(value__name=str(tmp_path / "nowhere"))
    with raises(ModelError, "no-such-file: nowhere"):
        build_online(run)
    with raises((ConfigError, ModelError), "unknown-name: value.name"):
        preflight(run_of(value__name="shape:tiny-lama"), resume=None, checkpoint=None)


def test_a_run_whose_value_model_decays_ends_where_it_said(lockstep, ppo_toml, tmp_path):
    run = tmp_path / "run"
    lockstep("train", ppo_toml, "--run-dir", run, "--value.schedule", "linear", cwd=tmp_path)
    ended = lockstep("train", "--resume", run, "--steps", "6", cwd=tmp_path, code=2)
    assert "steps: 4 in the run, now 6" in ended.err


def test_a_value_model_with_a_smaller_vocabulary_is_refused(tmp_path):
    module: Any = load_model(
        ModelConfig(name="shape:tiny-llama", dtype="float32"),
        attention="sdpa",
        device=torch.device("cpu"),
        head="scalar",
    ).module
    module.resize_token_embeddings(128)
    export_hf(module, None, tmp_path / "value")
    with raises(ConfigError, "other-model: value.name"):
        build_online(run_of(value__name=str(tmp_path / "value")))


ADAPTERS = ("--value.lora.rank", "4", "--value.lora.dropout", "0.1")


def test_a_value_model_of_adapters_resumes_exactly(lockstep, straight, ppo_toml, tmp_path):
    """A trunk with adapters, and a head that is trained whole; dropout's noise goes on too. Both are all that
    is saved, and the export is merged."""
    pytest.importorskip("peft")
    run = tmp_path / "run"
    lockstep.broken_off(ppo_toml, run, [kill(OPTIMIZER, step=2, when="after")], *ADAPTERS)
    saved = load_file(run / "checkpoints" / "step-000002" / "value" / "model.safetensors")
    assert len(saved) > 1 and all(".lora_" in name or name == "score.weight" for name in saved)
    assert everything(run) == straight(*ADAPTERS, toml=ppo_toml)
    exported, info = AutoModelForSequenceClassification.from_pretrained(
        run / "export-value", output_loading_info=True
    )
    assert not any(info.values()), info
    assert not any(".lora_" in name for name in exported.state_dict())
