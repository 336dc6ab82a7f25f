import importlib.util

import pytest
import torch
from raising import raises
from torch import nn

from lockstep.config.model import LoraConfig, ModelConfig
from lockstep.errors import ConfigError
from lockstep.models.load import load_model
from lockstep.models.lora import has_lora, merged_state_dict, without_lora

CPU = torch.device("cpu")
IDS = torch.arange(3, 23)[None]


def load(lora: LoraConfig | None, shape: str = "tiny-llama", dtype: str = "float32") -> nn.Module:
    config = ModelConfig(name=f"shape:{shape}", dtype=dtype, lora=lora)  # type: ignore[arg-type]
    return load_model(config, attention="hf:sdpa", device=CPU).module


def moved(lora: LoraConfig, shape: str = "tiny-llama") -> nn.Module:
    """A module whose adapters do something."""
    module = load(lora, shape)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.2, generator=generator)
    return module


def logits(module: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return module(input_ids=IDS).logits


def test_without_config_there_are_no_adapters() -> None:
    module = load(None)
    assert not has_lora(module)
    assert all(p.requires_grad for p in module.parameters())
    assert merged_state_dict(module).keys() == module.state_dict().keys()


def test_adapters_start_as_a_no_op_and_only_they_train() -> None:
    module, plain = load(LoraConfig(rank=4)), load(None)
    assert torch.equal(logits(module), logits(plain))
    assert all((".lora_" in name) == p.requires_grad for name, p in module.named_parameters())
    # 7 linears per layer: q 64->64, k and v 64->32, o 64->64, gate and up 64->160, down 160->64, rank 4, 2
    # layers.
    expected = 2 * 4 * (128 + 96 + 96 + 128 + 224 + 224 + 224)
    assert sum(p.numel() for p in module.parameters() if p.requires_grad) == expected


def test_the_start_depends_on_the_seed_alone() -> None:
    state = torch.get_rng_state()
    first = load(LoraConfig()).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    second = load(LoraConfig()).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-qwen3"])
def test_merged_weights_compute_what_the_adapters_compute(shape: str) -> None:
    module, plain = moved(LoraConfig(rank=4, alpha=8.0), shape), load(None, shape)
    before = logits(plain)
    plain.load_state_dict(merged_state_dict(module))
    torch.testing.assert_close(logits(plain), logits(module), atol=2e-5, rtol=1e-5)
    assert (logits(plain) - before).abs().max() > 0.1


def test_merging_by_hand() -> None:
    module = moved(LoraConfig(rank=2, alpha=6.0, target_modules=("q_proj",)))
    layer = module.model.layers[1].self_attn.q_proj
    expected = layer.base_layer.weight + 3.0 * layer.lora_B.default.weight @ layer.lora_A.default.weight
    merged = merged_state_dict(module)
    torch.testing.assert_close(merged["model.layers.1.self_attn.q_proj.weight"], expected)
    assert merged["model.layers.1.self_attn.k_proj.weight"].data_ptr() == (
        module.model.layers[1].self_attn.k_proj.weight.data_ptr()
    )


def test_without_lora_is_the_reference_policy() -> None:
    module, plain = moved(LoraConfig(rank=4)), load(None)
    with without_lora(module):
        torch.testing.assert_close(logits(module), logits(plain), rtol=0, atol=0)
    assert (logits(module) - logits(plain)).abs().max() > 0.1
    assert all((".lora_" in name) == p.requires_grad for name, p in module.named_parameters())


def test_all_linear_leaves_the_head_out() -> None:
    module = load(LoraConfig(rank=2, target_modules=("all-linear",)))
    adapted = {n.split(".lora_")[0].rpartition(".")[2] for n in module.state_dict() if ".lora_" in n}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_adapters_are_in_the_compute_dtype() -> None:
    assert {p.dtype for p in load(LoraConfig(), dtype="bfloat16").parameters()} == {torch.bfloat16}


def test_a_target_that_the_model_lacks_is_refused_though_another_is_there() -> None:
    with raises(ConfigError, "unknown-name: model.lora.target_modules, layers.7.self_attn.k_proj"):
        load(LoraConfig(target_modules=("q_proj", "layers.7.self_attn.k_proj")))
    module = load(LoraConfig(target_modules=("layers.1.self_attn.q_proj",)))
    adapted = {name.split(".lora_")[0] for name in module.state_dict() if ".lora_" in name}
    assert adapted == {"model.layers.1.self_attn.q_proj"}


def test_experts_and_routers_have_no_adapters() -> None:
    for target in ("down_proj", "layers.0.mlp.experts.down_proj"):
        with raises(ConfigError, f"unknown-name: model.lora.target_modules, {target}, experts"):
            load(LoraConfig(target_modules=("q_proj", target)), shape="tiny-qwen3-moe")
    module = load(LoraConfig(target_modules=("all-linear",)), shape="tiny-qwen3-moe")
    adapted = {name.split(".lora_")[0].rpartition(".")[2] for name in module.state_dict() if ".lora_" in name}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert not module.model.layers[0].mlp.experts.down_proj.requires_grad


def test_a_missing_peft_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == "peft" else found(n, *a))
    told = "missing-package: model.lora needs peft, which is not installed; pip install 'lockstep-rl[lora]'"
    with raises(ConfigError, told):
        load(LoraConfig())
