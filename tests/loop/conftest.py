from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for loop_runs

from loop_runs import TINY, Commands, everything

from lockstep.config.model import ModelConfig
from lockstep.models.export import export_hf
from lockstep.models.load import load_model


@pytest.fixture(scope="session")
def lockstep() -> Iterator[Commands]:
    commands = Commands()
    yield commands
    commands.close()


@pytest.fixture(scope="session")
def tiny_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("config") / "tiny.toml"
    file.write_text(TINY)
    return file


@pytest.fixture(scope="session")
def straight(
    lockstep: Commands, tiny_toml: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[str, Any]]:
    """`everything` of an uninterrupted run with these flags; each set of flags is run once."""
    known: dict[tuple[str, ...], dict[str, Any]] = {}

    def run(*flags: str, toml: Path = tiny_toml) -> dict[str, Any]:
        key = (str(toml), *flags)
        if key not in known:
            folder = tmp_path_factory.mktemp("straight")
            lockstep("train", toml, "--run-dir", folder / "run", *flags, cwd=folder)
            known[key] = everything(folder / "run")
        return known[key]

    return run


@pytest.fixture(scope="session")
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
background = false
[log]
tensorboard = false
display = "plain"
""")
    return toml
