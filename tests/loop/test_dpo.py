"""DPO runs of a tiny model with a tokenizer: it learns, and a killed run goes on exactly."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from loop_runs import FORWARD, Commands, everything, kill, metrics_of, on_pairs

PAIRS = [
    {"prompt": f"Say {i}", "chosen": f"{i} it is, of course", "rejected": f"No, not {i}"} for i in range(24)
]


@pytest.fixture(scope="module")
def dpo_toml(sft_toml: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The SFT run's config, made one of preference pairs."""
    return on_pairs(sft_toml, tmp_path_factory.mktemp("dpo"), "dpo", PAIRS)


def test_it_learns_to_prefer_and_goes_on_exactly_after_a_kill(
    lockstep: Commands, dpo_toml: Path, tmp_path: Path
) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    lockstep("train", dpo_toml, "--run-dir", straight, cwd=tmp_path)
    rows = metrics_of(straight)
    steps = [row for row in rows if "evaluation" not in row]
    assert steps[0]["loss"] == pytest.approx(math.log(2.0), abs=1e-5)  # the policy is the reference
    assert steps[0]["reward_margin"] == pytest.approx(0.0, abs=1e-5)
    assert steps[-1]["loss"] < steps[0]["loss"] and steps[-1]["reward_margin"] > 0
    evaluations = {row["evaluation"]: row for row in rows if "evaluation" in row}
    assert evaluations["before"]["eval/loss"] == pytest.approx(math.log(2.0), abs=1e-5)
    assert evaluations["after"]["eval/accuracy"] > 0.9

    lockstep.broken_off(dpo_toml, broken, [kill(FORWARD, step=3, call=2)])
    assert everything(broken) == everything(straight)


def test_a_micro_batch_must_hold_a_pair(lockstep: Commands, dpo_toml: Path, tmp_path: Path) -> None:
    ended = lockstep(
        "train", dpo_toml, "--data.max-length", "200", "--train.token-budget", "256", cwd=tmp_path, code=2
    )
    assert "both answers of a pair must be in one micro-batch" in ended.err


@pytest.mark.parametrize("name", ["dpo", "orpo", "kto"])
def test_a_recorded_run_replays_to_the_bit(
    name: str, lockstep: Commands, dpo_toml: Path, tmp_path: Path
) -> None:
    run, more = tmp_path / "run", ["--algorithm.name", name, "--record", "--run-dir", tmp_path / "run"]
    lockstep("train", dpo_toml, "--steps", "2", *more, cwd=tmp_path)
    header = json.loads((run / "recordings" / "recording.json").read_text())
    assert header["algorithm"]["name"] == name and header["algorithm"]["beta"] == 0.1
    assert ('"time/logprobs"' in (run / "metrics.jsonl").read_text()) == (name != "orpo"), (
        "orpo has no reference"
    )
    ended = lockstep("replay", run, "--steps", "0:1", "--out", tmp_path / "out", cwd=tmp_path)
    assert ended.verdict.endswith("equal to the recording, bit for bit")
