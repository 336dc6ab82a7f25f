"""GPT-OSS as it is published: experts in MXFP4, which become bfloat16 when they are loaded."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from lockstep.config.model import ModelConfig
from lockstep.models.export import export_hf, exported_folder
from lockstep.models.load import load_model
from lockstep.models.published import BLOCKS, SCALES, from_mxfp4

CPU = torch.device("cpu")
GROUP = 32


def test_numbers_by_hand():
    """0x21 is 1 (0.5) and 2 (1.0); 0xF9 is 9 (-0.5) and 15 (-6.0); the scale 128 is 2."""
    blocks = torch.zeros(1, 1, 1, 16, dtype=torch.uint8)
    blocks[0, 0, 0, :2] = torch.tensor([0x21, 0xF9])
    out = from_mxfp4(blocks, torch.full((1, 1, 1), 128, dtype=torch.uint8))
    assert out.shape == (1, 32, 1)
    assert out.flatten()[:5].tolist() == [1.0, 2.0, -1.0, -12.0, 0.0]


def random_mxfp4(experts, outputs, inputs, seed):
    generator = torch.Generator().manual_seed(seed)
    size = (experts, outputs, inputs // GROUP)
    blocks = torch.randint(256, (*size, GROUP // 2), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(118, 124, size, dtype=torch.uint8, generator=generator)


def test_numbers_are_transformers_own():
    blocks, scales = random_mxfp4(3, 10, 64, seed=0)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(from_mxfp4(blocks, scales), theirs)
    assert torch.equal(theirs.bfloat16().float(), theirs)


@pytest.fixture
def folder(tmp_path):
    """A miniature in the published format."""
    place = tmp_path / "published"
    module = load_model(
        ModelConfig(name="shape:tiny-gpt-oss", dtype="bfloat16"), attention="sdpa", device=CPU
    ).module
    export_hf(module, None, place)
    tensors = load_file(place / "model.safetensors")
    for index, name in enumerate([name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]):
        experts, inputs, outputs = tensors.pop(name).shape
        blocks, scales = random_mxfp4(experts, outputs, inputs, seed=index)
        tensors |= {name + BLOCKS: blocks, name + SCALES: scales}
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    config = json.loads((place / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (place / "config.json").write_text(json.dumps(config))
    return place


def test_a_published_folder_is_dequantised_at_load_and_exported_so(folder, tmp_path, caplog):
    config = ModelConfig(name=str(folder), dtype="bfloat16")
    model = load_model(config, attention="sdpa", device=CPU)
    assert caplog.text.count("are MXFP4; they become bfloat16, here and in exports") == 1
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    )
    expected = dict(theirs.named_parameters())
    bare = load_model(config, attention="sdpa", device=CPU, materialize=False)
    for name, parameter in model.module.named_parameters():
        assert torch.equal(parameter, expected[name]), name
        for dim, size in enumerate(parameter.shape):
            part = bare.source.read_part(name, dim=dim, start=size // 3, stop=size - 1, device=CPU)
            assert torch.equal(part, parameter.narrow(dim, size // 3, size - 1 - size // 3)), name

    export_hf(model.module, None, tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    stored = load_file(tmp_path / "out/model.safetensors")
    assert {name: w.dtype for name, w in stored.items()} == dict.fromkeys(expected, torch.bfloat16)
    assert all(torch.equal(stored[name], weight) for name, weight in expected.items())
    # An engine of its own is not given the four-bit folder, whose weights no update fits.
    given = exported_folder(config, device=CPU, work_dir=tmp_path / "engine").folder
    assert given == tmp_path / "engine/model" and "lm_head.weight" in load_file(given / "model.safetensors")
