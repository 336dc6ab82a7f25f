"""Qwen 3.5 as it is published: a vision model around the text model that is trained."""

import json

import pytest
import torch
from raising import raises
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from lockstep.config.model import ModelConfig
from lockstep.errors import ModelError
from lockstep.models.export import export_hf, export_tensors
from lockstep.models.folder import tensor_files
from lockstep.models.load import load_model, prepared_config
from lockstep.models.shape_table import SHAPES
from lockstep.models.source import fill_from

CPU = torch.device("cpu")
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}


@pytest.fixture(params=["tiny-qwen3.5", "tiny-qwen3.5-moe"], scope="module")
def published(request, tmp_path_factory):
    """A miniature in the published format, with what else such a folder has."""
    text = {key: value for key, value in SHAPES[request.param].items() if key != "model_type"}
    text["tie_word_embeddings"] = tied = "moe" not in request.param
    kind = SHAPES[request.param]["model_type"].removesuffix("_text")
    config = AutoConfig.for_model(kind, text_config=text, vision_config=VISION, tie_word_embeddings=tied)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(kind)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["mtp.norm.weight"] = torch.full((64,), 2.0, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "preprocessor_config.json").write_text('{"patch_size": 16}')
    return folder


def load(folder, **options):
    return load_model(ModelConfig(name=str(folder), dtype="float32"), attention="sdpa", device=CPU, **options)


def weights(folder):
    names = tensor_files(folder)
    return {name: load_file(path)[name] for name, path in names.items()}


def test_the_text_part_is_loaded_whole_and_tensor_by_tensor(published, caplog):
    whole, parts = load(published), load(published, materialize=False)
    filled = fill_from(parts.module, parts.source, device=CPU)
    theirs = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32)
    for name, parameter in theirs.named_parameters():
        assert torch.equal(whole.module.get_parameter(name), parameter)
        assert torch.equal(filled.get_parameter(name), parameter)
    assert "does not use these weights" not in caplog.text
    assert prepared_config(ModelConfig(name=str(published))).model_type.endswith("_text")


@pytest.mark.parametrize("way", ["module", "tensors"])
def test_an_export_is_of_the_same_kind_with_the_tower_untouched(published, way, tmp_path):
    module, before = load(published).module, weights(published)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 1.0
    out = tmp_path / "out"
    if way == "module":
        export_hf(module, None, out)
    else:
        tensors = ((name, p.detach()) for name, p in module.named_parameters())
        export_tensors(module, tensors, tokenizer=None, directory=out, dtype=torch.float32)
    after = weights(out)
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        trained = name.startswith(("model.language_model.", "lm_head."))
        assert torch.equal(after[name], tensor + 1.0 if trained else tensor), name
        assert after[name].dtype == tensor.dtype
    old, new = (json.loads((f / "config.json").read_text()) for f in (published, out))
    assert new["architectures"] == old["architectures"] and new["vision_config"] == old["vision_config"]
    assert new["text_config"]["model_type"] == old["text_config"]["model_type"]
    assert (out / "preprocessor_config.json").is_file()
    # transformers reads it as the whole and as the text model; we load and export it again.
    _, info = AutoModelForImageTextToText.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    again = load(out).module
    for name, parameter in module.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter)
    export_hf(again, None, tmp_path / "again")
    assert weights(tmp_path / "again").keys() == before.keys()


def test_a_quantised_wrapper_is_refused(published, tmp_path):
    config = json.loads((published / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with raises(ModelError, "unsupported-model: quantised, fp8"):
        prepared_config(ModelConfig(name=str(tmp_path)))
