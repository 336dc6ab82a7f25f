import io
import json

import pytest
import torch
from raising import raises

from lockstep.cli.common_model import find_weights
from lockstep.cli.sample import CHAT_KEYS, chat, sample
from lockstep.config.data import DataConfig
from lockstep.config.load import dump_toml
from lockstep.config.model import ModelConfig
from lockstep.config.run import GRPORun
from lockstep.config.train import TrainConfig
from lockstep.errors import CheckpointError, ConfigError
from lockstep.models.load import load_model
from lockstep.train.local import LocalBackend

TINY = ModelConfig(name="shape:tiny-llama", dtype="float32")


@pytest.fixture
def run_dir(tmp_path):
    """A run of a model without a tokenizer, with two checkpoints; the second was saved first."""
    run = GRPORun(model=TINY, data=DataConfig(source="ids", size=64), rewards=({"name": "ids"},))
    (tmp_path / "config.toml").write_text(dump_toml(run))
    (tmp_path / "manifest.json").write_text("{}")
    model = load_model(TINY, attention="sdpa", device=torch.device("cpu"))
    backend = LocalBackend(TrainConfig(), model=model, total_steps=1)
    for step, sequence, scale in ((10, 1, 1.0), (20, 0, 3.0)):
        folder = tmp_path / "checkpoints" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        with torch.no_grad():
            for parameter in model.module.parameters():
                parameter *= scale
        backend.save(folder)()
        (folder / "complete.json").write_text(json.dumps({"step": step, "sequence": sequence}))
    (tmp_path / "checkpoints" / "step-000030").mkdir()
    return tmp_path


def sampled(run_dir, *flags):
    out = run_dir / "out.json"
    assert sample([str(run_dir), "--num-prompts", "2", "--max-tokens", "5", "--json", str(out), *flags]) == 0
    return json.loads(out.read_text())


def test_completions_of_held_out_prompts_come_from_the_chosen_checkpoint(run_dir, capsys):
    last = sampled(run_dir, "--n", "2")
    assert [len(p["completions"]) for p in last["prompts"]] == [2, 2]
    assert capsys.readouterr().out.splitlines()[-1].startswith("sample: 4 completions, ")
    first = sampled(run_dir, "--n", "2", "--checkpoint", "10")
    assert first["prompts"] == last["prompts"]  # step 10 was saved last
    other = sampled(run_dir, "--n", "2", "--checkpoint", "20")
    assert other["prompts"] != last["prompts"]
    assert all(len(c["token_ids"]) <= 5 for p in other["prompts"] for c in p["completions"])


def test_seeds_and_temperature_reach_the_engine(run_dir):
    def tokens(*flags):
        return [p["completions"][0]["token_ids"] for p in sampled(run_dir, *flags)["prompts"]]

    assert tokens("--seed", "1") != tokens("--seed", "2")
    assert tokens("--seed", "1", "--temperature", "0") == tokens("--seed", "2", "--temperature", "0")


def test_checkpoints_that_are_not_there_are_refused(run_dir, tmp_path_factory):
    with raises(CheckpointError, "no-such-file: --checkpoint"):
        find_weights(run_dir, "30")
    with raises(ConfigError, "unknown-name: --checkpoint"):
        find_weights(run_dir, "best")
    with raises(CheckpointError, "no-such-file: --checkpoint"):
        find_weights(tmp_path_factory.mktemp("empty"), None)
    (run_dir / "checkpoints" / "step-000010" / "model.safetensors").write_bytes(b"junk")
    with raises(CheckpointError, "damaged-file: model.safetensors"):
        sample([str(run_dir)])
    with raises(ConfigError, "missing-setting: --prompt"):
        sample(["shape:tiny-llama"])
    with raises(ConfigError, "no-tokenizer"):
        sample(["shape:tiny-llama", "--prompt", "hello"])


def test_chat_refuses_a_model_without_a_tokenizer(run_dir):
    with raises(ConfigError, "no-tokenizer"):
        chat([str(run_dir)])


@pytest.mark.slow
def test_chat_answers_piped_lines_and_forgets_on_reset(monkeypatch, capsys):
    def talk(text):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        assert chat(["bundled:smollm2-135m", "--temperature", "0", "--max-tokens", "12"]) == 0
        return capsys.readouterr().out

    once = talk("Say hi.\n")
    twice = talk("Say hi.\n/reset\nSay hi.\n")
    assert once.strip()
    assert twice == f"{once}(conversation forgotten)\n{once}"
    assert talk("Say hi.\nAgain.\n").startswith(once)
    assert talk("/help\n/quit\nSay hi.\n") == f"{CHAT_KEYS}\n"
    assert talk("Say hi.\n/exit\nSay hi.\n") == once
