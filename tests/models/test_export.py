import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from lockstep.config.model import LoraConfig, ModelConfig
from lockstep.errors import ModelError
from lockstep.models import export
from lockstep.models.export import export_hf
from lockstep.models.load import load_model

IDS = torch.arange(3, 23)[None]
SHAPES = ["tiny-llama", "tiny-qwen3", "tiny-gemma3", "tiny-mistral"]


def load(shape: str, **options: object) -> nn.Module:
    config = ModelConfig(name=f"shape:{shape}", **{"dtype": "float32"} | options)  # type: ignore[arg-type]
    return load_model(config, attention="hf:sdpa", device=torch.device("cpu")).module


def logits(module: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return module.eval()(input_ids=IDS).logits


def reload(directory: Path) -> nn.Module:
    """As a stranger would; every key must match."""
    module, info = AutoModelForCausalLM.from_pretrained(
        directory, output_loading_info=True, attn_implementation="sdpa"
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return module


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_export_loads_with_all_keys_and_equal_logits(shape: str, dtype: str, tmp_path: Path) -> None:
    module = load(shape, dtype=dtype)
    export_hf(module, None, tmp_path / "out")
    again = reload(tmp_path / "out")
    assert str(again.dtype) == f"torch.{dtype}"
    assert torch.equal(logits(again), logits(module))
    assert {w.dtype for w in load_file(tmp_path / "out/model.safetensors").values()} == {module.dtype}


@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-qwen3"])
def test_lora_is_merged(shape: str, tmp_path: Path) -> None:
    module = load(shape, lora=LoraConfig(rank=4))
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.2, generator=torch.Generator().manual_seed(1))
    export_hf(module, None, tmp_path / "out")
    torch.testing.assert_close(logits(reload(tmp_path / "out")), logits(module), atol=2e-5, rtol=1e-5)
    assert not any("lora" in p.read_text() for p in (tmp_path / "out").glob("*.json"))


@pytest.mark.parametrize(("shape", "tied"), [("tiny-qwen3", True), ("tiny-llama", False)])
def test_a_tied_head_is_written_once(shape: str, tied: bool, tmp_path: Path) -> None:
    export_hf(load(shape), None, tmp_path / "out")
    names = set(load_file(tmp_path / "out/model.safetensors"))
    assert ("lm_head.weight" in names) != tied
    assert "model.embed_tokens.weight" in names


def test_the_export_does_not_touch_the_module(tmp_path: Path) -> None:
    module = load("tiny-llama", dtype="bfloat16")
    before = module.config.to_dict() | {"attention": module.config._attn_implementation}
    export_hf(module, None, tmp_path / "out")
    assert module.config.to_dict() | {"attention": module.config._attn_implementation} == before
    assert "attn" not in " ".join(json.loads((tmp_path / "out/config.json").read_text()))


def test_all_eos_ids_survive(tmp_path: Path) -> None:
    module = load("tiny-llama")
    module.generation_config.eos_token_id = [2, 5]
    export_hf(module, None, tmp_path / "out")
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"] == [2, 5]


def test_an_export_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_hf(load("tiny-llama"), None, tmp_path / "out")
    old = (tmp_path / "out/model.safetensors").read_bytes()

    def fail(module: nn.Module) -> dict[str, torch.Tensor]:
        raise MemoryError

    monkeypatch.setattr(export, "merged_state_dict", fail)
    with pytest.raises(MemoryError):
        export_hf(load("tiny-llama", seed=1), None, tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_old_export_is_replaced_whole(tmp_path: Path) -> None:
    export_hf(load("tiny-llama"), None, tmp_path / "out")
    (tmp_path / "out/extra.json").write_text("{}")
    module = load("tiny-qwen3")
    export_hf(module, None, tmp_path / "out")
    assert torch.equal(logits(reload(tmp_path / "out")), logits(module))
    assert not (tmp_path / "out/extra.json").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_folder_with_other_things_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ModelError, match="not a model folder"):
        export_hf(load("tiny-llama"), None, tmp_path)
    assert (tmp_path / "thesis.tex").exists()
