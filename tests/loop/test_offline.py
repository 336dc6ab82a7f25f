"""SFT runs of a tiny model with a tokenizer: exact resume, Ctrl-C, held-out loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_runs import Commands, everything, metrics_of

from lockstep.config.model import ModelConfig
from lockstep.models.export import export_hf
from lockstep.models.load import load_model

FORWARD = "lockstep.train.local:LocalBackend._hidden"
FILE = "lockstep.train.files:_HashingFile.write"


def moment(target: str, **order: Any) -> dict[str, Any]:
    return {"target": target, "send": "SIGKILL"} | order


@pytest.fixture(scope="module")
def sft_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny-llama, a tokenizer of 19 words, and sums to learn."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("sft")
    words = ["<unk>", "<s>", "</s>", "+", "=", *map(str, range(19))]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", eos_token="</s>")
    config = ModelConfig(name="shape:tiny-llama", dtype="float32")
    export_hf(
        load_model(config, attention="sdpa", device=torch.device("cpu")).module, tokenizer, folder / "model"
    )
    rows = [{"prompt": f"{a} + {b} =", "completion": f" {a + b}"} for a in range(10) for b in range(10)]
    for name, part in (("train", rows[:80]), ("held_out", rows[80:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    toml = folder / "sft.toml"
    toml.write_text(f"""
kind = "sft"
steps = 6
batch_size = 16
eval_every = 2
[model]
name = "{folder / "model"}"
dtype = "float32"
[data]
source = "{folder / "train.jsonl"}"
max_length = 16
[eval_data]
source = "{folder / "held_out.jsonl"}"
max_length = 16
[train]
lr = 1e-2
token_budget = 32
[checkpoint]
every = 2
metric = "eval/loss"
mode = "min"
[log]
tensorboard = false
display = "plain"
""")
    return toml


@pytest.fixture(scope="module")
def straight_run(lockstep: Commands, sft_toml: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("straight") / "run"
    ended = lockstep("train", sft_toml, "--run-dir", run, cwd=run.parent)
    assert ended.code == 0, ended.out + ended.err
    assert ended.verdict.startswith("train: finished, 6 steps") and ", loss " in ended.verdict
    return run


def test_it_learns_and_is_evaluated_before_during_and_after(straight_run: Path) -> None:
    rows = metrics_of(straight_run)
    evaluations = [row for row in rows if "evaluation" in row]
    assert [(e["step"], e["evaluation"]) for e in evaluations] == [
        (0, "before"),
        (2, "during"),
        (4, "during"),
        (6, "after"),
    ]
    losses = [e["eval/loss"] for e in evaluations]
    assert losses[-1] < losses[0] - 0.5
    assert [row["step"] for row in rows if "evaluation" not in row] == list(range(6))


@pytest.mark.parametrize(
    "orders",
    [
        [moment(FORWARD, step=step, call=3, when="backward") for step in (1, 3, 5)],
        [moment(FILE, step=step, call=5) for step in (1, 3, 5)],
        [moment(FORWARD, step=step, call=2, when="backward", send="SIGINT") for step in (0, 1, 3)],
    ],
    ids=["killed in backward", "killed in a save", "Ctrl-C"],
)
def test_a_broken_off_run_goes_on_exactly(
    orders: list[dict[str, Any]], lockstep: Commands, sft_toml: Path, straight_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    argv: tuple[str | Path, ...] = ("train", sft_toml, "--run-dir", run)
    for order in orders:
        ended = lockstep(*argv, cwd=tmp_path, signals=[order])
        assert ended.code == {"SIGKILL": -9, "SIGINT": 130}[order["send"]], ended.out + ended.err
        argv = ("train", "--resume", run)
    ended = lockstep(*argv, cwd=tmp_path)
    assert ended.code == 0, ended.out + ended.err
    assert everything(run) == everything(straight_run)
