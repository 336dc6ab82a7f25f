"""Reward models of a tiny model with a tokenizer: they learn, resume exactly, and score as transformers reads
what they export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from loop_runs import FORWARD, Commands, assert_ranks_train_as_one, everything, kill, metrics_of, on_pairs
from transformers import AutoModelForSequenceClassification

from lockstep.config.batch import RewardModelConfig
from lockstep.models.reward import RewardModel
from lockstep.recording import Recording
from lockstep.schema.batch import PreferenceBatch

# Two-digit answers are preferred; the words are those of the tokenizer.
PAIRS = [
    {
        "prompt": f"{i % 10} + {i % 7} =",
        "chosen": f" {10 + i % 9}",
        "rejected": f" {i % 10}",
        "margin": i % 3 / 4,
    }
    for i in range(24)
]


@pytest.fixture(scope="module")
def rm_toml(sft_toml: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The SFT run's config, made one of a reward model."""
    return on_pairs(sft_toml, tmp_path_factory.mktemp("rm"), "rm", PAIRS)


def test_it_learns_exports_what_scores_the_same_and_goes_on_exactly_after_a_kill(
    lockstep: Commands, rm_toml: Path, tmp_path: Path
) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    lockstep("train", rm_toml, "--run-dir", straight, cwd=tmp_path)
    evaluations = {row["evaluation"]: row for row in metrics_of(straight) if "evaluation" in row}
    before, after = evaluations["before"], evaluations["after"]
    assert after["eval/loss"] < before["eval/loss"] and after["eval/accuracy"] > 0.9

    model = RewardModel(
        RewardModelConfig(name=str(straight / "export"), dtype="float32"), device=torch.device("cpu")
    )
    rows = [
        [model.document(pair["prompt"], pair[side], "a row") for side in ("chosen", "rejected")]
        for pair in PAIRS
    ]
    scores = torch.tensor(model.score([document for row in rows for document in row])).view(-1, 2)
    assert float(scores[:, 0].mean()) == pytest.approx(after["eval/reward_chosen"], abs=1e-5)
    assert float(scores[:, 1].mean()) == pytest.approx(after["eval/reward_rejected"], abs=1e-5)

    lockstep.broken_off(rm_toml, broken, [kill(FORWARD, step=3, call=2)])
    assert everything(broken) == everything(straight)


def test_its_inputs_are_recorded_and_replayed(lockstep: Commands, rm_toml: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ["--record", "--steps", "2", "--eval-every", "0", "--run-dir", run]
    lockstep("train", rm_toml, *options, cwd=tmp_path)
    recording = Recording.open(run / "recordings")
    batch = recording[0].batch
    assert isinstance(batch, PreferenceBatch) and batch.margins is not None
    assert set(batch.margins.tolist()) > {0.25, 0.5} and recording.header.has_scores
    out = tmp_path / "replay"
    lockstep("replay", run / "recordings", "--out", out, cwd=tmp_path)
    lockstep("recording", "validate", run / "recordings", cwd=tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--train.batch-invariant", "true"], "no batch-invariant implementation"),
        (["--algorithm.center-coef", "-1"], "greater than or equal to 0"),
    ],
)
def test_what_it_cannot_do_is_refused_before_anything_is_loaded(
    options: list[str], message: str, lockstep: Commands, rm_toml: Path, tmp_path: Path
) -> None:
    ended = lockstep("train", rm_toml, *options, "--run-dir", tmp_path / "run", cwd=tmp_path, code=2)
    assert message in ended.err and not (tmp_path / "run").exists()


def test_two_ranks_of_fsdp2_train_as_one_process(lockstep: Commands, rm_toml: Path, tmp_path: Path) -> None:
    keys = ("loss", "grad_norm", "reward_margin", "accuracy", "eval/loss", "eval/reward_margin")
    assert_ranks_train_as_one(lockstep, rm_toml, tmp_path, "--eval-every", "0", keys=keys)
    model = {
        name: AutoModelForSequenceClassification.from_pretrained(tmp_path / name / "export").score.weight
        for name in ("one", "two")
    }
    torch.testing.assert_close(model["one"], model["two"], rtol=1e-4, atol=1e-5)
