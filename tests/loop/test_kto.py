"""KTO runs of a tiny model with a tokenizer: on labels and on pairs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from loop_runs import Commands, assert_ranks_train_as_one, metrics_of

SUMS = [(a, b) for a in range(10) for b in range(6)]


@pytest.fixture(scope="module")
def kto_toml(sft_toml: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The SFT run's config: answers with labels to train on, pairs to evaluate on."""
    folder = tmp_path_factory.mktemp("kto")
    rows = [
        {"prompt": f"{a} + {b} =", "completion": f" {a + b + wrong}", "label": not wrong}
        for a, b in SUMS[:40]
        for wrong in (0, 1)
    ]
    pairs = [
        {"prompt": f"{a} + {b} =", "chosen": f" {a + b}", "rejected": f" {a + b + 1}"} for a, b in SUMS[40:]
    ]
    for name, part in (("train", rows), ("held_out", pairs)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    text = sft_toml.read_text().replace('kind = "sft"', 'kind = "dpo"\nalgorithm = { name = "kto" }')
    path = folder / "kto.toml"
    path.write_text(
        text.replace(str(sft_toml.parent / "train"), str(folder / "train")).replace(
            str(sft_toml.parent / "held_out"), str(folder / "held_out")
        )
    )
    return path


def test_it_learns_whatever_the_micro_batches(lockstep: Commands, kto_toml: Path, tmp_path: Path) -> None:
    losses = []
    for budget, layout in (("1024", "packed"), ("32", "packed"), ("64", "padded")):
        run, more = (
            tmp_path / f"{budget}-{layout}",
            ["--train.token-budget", budget, "--train.layout", layout],
        )
        lockstep("train", kto_toml, "--run-dir", run, *more, cwd=tmp_path)
        rows = metrics_of(run)
        steps = [row for row in rows if "evaluation" not in row]
        assert steps[0]["loss"] == pytest.approx(0.5, abs=1e-5) and steps[0]["kl"] == 0.0  # is the reference
        assert steps[-1]["loss"] < 0.5 and steps[-1]["reward_margin"] > 0
        after = next(row for row in rows if row.get("evaluation") == "after")
        assert 0 <= after["eval/accuracy"] <= 1 and {"eval/loss", "eval/reward_margin", "eval/kl"} <= set(
            after
        )
        losses.append([row["loss"] for row in steps])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4) and losses[2] == pytest.approx(losses[0], rel=1e-4)


def test_a_batch_of_one_answer_has_no_baseline(lockstep: Commands, kto_toml: Path, tmp_path: Path) -> None:
    ended = lockstep("train", kto_toml, "--batch-size", "1", cwd=tmp_path, code=2)
    assert "set batch_size to 2 or more" in ended.err


def test_two_ranks_of_fsdp2_train_as_one_process(lockstep: Commands, kto_toml: Path, tmp_path: Path) -> None:
    """The baseline is of the answers of all ranks."""
    keys = ("loss", "grad_norm", "kl", "reward_margin", "eval/loss", "eval/kl")
    assert_ranks_train_as_one(lockstep, kto_toml, tmp_path, keys=keys)
