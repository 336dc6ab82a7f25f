import json
import sys
from pathlib import Path

import pytest
import torch
from raising import raises
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from lockstep.config.model import LoraConfig, ModelConfig
from lockstep.errors import ModelError
from lockstep.models import export
from lockstep.models.export import FILE_BYTES, export_hf, export_tensors
from lockstep.models.load import load_model

CPU = torch.device("cpu")
IDS = torch.arange(3, 23)[None]
SHAPES = ["tiny-llama", "tiny-qwen3", "tiny-gemma3", "tiny-mistral", "tiny-qwen3-moe", "tiny-mixtral"]


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
    if "moe" in shape or "mixtral" in shape:  # transformers' own experts, which add in another order
        assert (logits(again) - logits(module)).abs().max() < (1e-5 if dtype == "float32" else 0.1)
        again = load_model(
            ModelConfig(name=str(tmp_path / "out"), dtype=dtype), attention="hf:sdpa", device=CPU
        ).module
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
    with raises(ModelError, "already-exists"):
        export_hf(load("tiny-llama"), None, tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def tensors_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(n, p.detach()) for n, p in module.named_parameters(remove_duplicate=False)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("file_bytes", [FILE_BYTES, 60_000])
def test_whole_tensors_that_come_one_by_one_make_the_same_folder(
    shape: str, file_bytes: int, tmp_path: Path
) -> None:
    """The module has float32 weights, cut; what is written is bfloat16 and whole."""
    module = load(shape)
    export_hf(load(shape, dtype="bfloat16"), None, tmp_path / "expected")
    tensors = [(n, t.bfloat16().float()) for n, t in tensors_of(module)]
    for parameter in module.parameters():
        parameter.data = parameter.data[:1]
    expected = logits(reload(tmp_path / "expected"))
    tensors = [(n, load_whole(tmp_path / "expected").get(n, t).float()) for n, t in tensors]
    for _ in range(2):  # the second time over the first
        export_tensors(
            module,
            iter(tensors),
            tokenizer=None,
            directory=tmp_path / "out",
            dtype=torch.bfloat16,
            file_bytes=file_bytes,
        )
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1 or file_bytes == FILE_BYTES
    assert {p.name for p in tmp_path.iterdir()} == {"expected", "out"}
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_text() == (tmp_path / "expected" / name).read_text()
    assert torch.equal(logits(reload(tmp_path / "out")), expected)
    own, theirs = load_whole(tmp_path / "out"), load_whole(tmp_path / "expected")
    assert own.keys() == theirs.keys() and all(own[n].dtype == torch.bfloat16 for n in own)


def load_whole(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}


def test_tensors_that_are_not_the_models_leave_the_old_export(tmp_path: Path) -> None:
    module, out = load("tiny-llama"), tmp_path / "out"
    export_hf(module, None, out)
    old = (out / "model.safetensors").read_bytes()
    tensors = tensors_of(load("tiny-llama", seed=1))
    wrong = [
        (tensors[1:], "cannot-write"),
        ([*tensors, ("model.more", torch.ones(1))], "cannot-write"),
        ([*tensors, tensors[0]], "cannot-write"),
    ]
    for given, text in wrong:
        drained = iter(given)
        with raises(ModelError, text):
            export_tensors(module, drained, tokenizer=None, directory=out, dtype=torch.float32)
        assert next(drained, None) is None  # other ranks have gone through all of them
        assert (out / "model.safetensors").read_bytes() == old
        assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "save_tensors", full)
    module = load("tiny-llama")
    with raises(ModelError, "cannot-write"):
        export_tensors(
            module, tensors_of(module), tokenizer=None, directory=tmp_path / "o", dtype=torch.float32
        )
    assert not list(tmp_path.iterdir())


def test_a_broken_deepspeed_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would, to look for its engine around the model."""
    monkeypatch.setattr("accelerate.utils.other.is_deepspeed_available", lambda: True)
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    export_hf(load("tiny-llama"), None, tmp_path / "export")
    assert (tmp_path / "export" / "model.safetensors").is_file()
