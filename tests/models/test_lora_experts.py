"""Adapters of experts: what they compute, their gradients, peft's names, and a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lockstep.config.load import load_run
from lockstep.config.model import LoraConfig, ModelConfig
from lockstep.config.train import TrainConfig
from lockstep.errors import ConfigError
from lockstep.loop.expert_checks import check_experts
from lockstep.loops import train_online
from lockstep.models.load import load_model
from lockstep.models.lora import merged_state_dict, without_lora
from lockstep.observe.run_history import read_lines
from lockstep.train.local import LocalBackend

CPU = torch.device("cpu")
IDS = torch.arange(3, 23)[None]
PARAMETERS = ("experts.gate_up_proj", "experts.down_proj")
LORA = LoraConfig(rank=4, alpha=8.0, target_parameters=PARAMETERS)


def load(lora: LoraConfig | None, shape: str = "tiny-qwen3-moe") -> nn.Module:
    attention = "hf:eager" if shape == "tiny-gpt-oss" else "hf:sdpa"
    config = ModelConfig(name=f"shape:{shape}", dtype="float32", lora=lora)
    return load_model(config, attention=attention, device=CPU).module


def moved(lora: LoraConfig, shape: str = "tiny-qwen3-moe") -> nn.Module:
    """A module whose adapters do something."""
    module = load(lora, shape)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.1, generator=generator)
    return module


def logits(module: nn.Module) -> Tensor:
    with torch.no_grad():
        return module(input_ids=IDS).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("shape", ["tiny-qwen3-moe", "tiny-gpt-oss", "tiny-qwen2-moe", "tiny-mixtral"])
def test_merged_weights_compute_what_the_adapters_compute(shape: str) -> None:
    """Of GPT-OSS weights are [E, inputs, outputs], with gate and up interleaved."""
    plain, fresh = load(None, shape), load(LORA, shape)
    before = logits(plain)
    assert torch.equal(logits(fresh), before)
    assert all((".lora_" in name) == p.requires_grad for name, p in fresh.named_parameters())
    module = moved(LORA, shape)
    merged = merged_state_dict(module)
    assert merged.keys() == plain.state_dict().keys()
    plain.load_state_dict(merged)
    torch.testing.assert_close(logits(plain), logits(module), atol=2e-5, rtol=1e-5)
    assert (logits(plain) - before).abs().max() > 0.1
    with without_lora(module):
        assert torch.equal(logits(module), before)


@pytest.mark.parametrize("shape", ["tiny-qwen3-moe", "tiny-gpt-oss"])
def test_gradients_are_those_of_the_merged_weights(shape: str) -> None:
    """In float64: dA = s B^T dW and dB = s dW A^T, for each expert."""
    module, dense = moved(LORA, shape).double(), load(None, shape).double()
    dense.load_state_dict({n: t.double() for n, t in merged_in_double(module).items()})
    for each in (module, dense):
        each(input_ids=IDS).logits.log_softmax(-1)[..., 5].sum().backward()
    gradients = {name: p.grad for name, p in dense.named_parameters()}
    for path, part in wrappers(module):
        a, b, scaling = part.factors()
        name = f"{path}.{part.parameter_name}"
        of_weight = gradients[name]
        of_weight = of_weight.transpose(1, 2) if part.get_base_layer().inputs_first else of_weight
        of_a = scaling * b.transpose(1, 2) @ of_weight
        of_b = scaling * of_weight @ a.transpose(1, 2)
        found_a = part.lora_A.default.weight.grad.view_as(of_a)
        found_b = part.lora_B.default.weight.grad
        found_b = found_b.view(found_b.shape[0], -1, len(a)).permute(2, 0, 1)
        for found, wanted in ((found_a, of_a), (found_b, of_b)):
            assert float((found - wanted).norm() / wanted.norm()) <= 1e-6, name


def wrappers(module: nn.Module) -> list[tuple[str, Any]]:
    found = [(path, part) for path, part in module.named_modules() if hasattr(part, "parameter_name")]
    assert len(found) == 4
    return [(path.replace(".base_layer", ""), part) for path, part in found]


def merged_in_double(module: nn.Module) -> dict[str, Tensor]:
    """merged_state_dict rounds to float32 in between."""
    merged = merged_state_dict(module)
    for path, part in wrappers(module):
        a, b, scaling = part.factors()
        update = scaling * b @ a
        base = part.get_base_layer()
        weight = getattr(base, part.parameter_name)
        merged[f"{path}.{part.parameter_name}"] = weight + (
            update.transpose(1, 2) if base.inputs_first else update
        )
    return merged


def test_peft_loads_the_adapters(tmp_path: Path) -> None:
    """Real peft around transformers' own module: its names, its shapes, the same logits."""
    import peft

    module, source = moved(LORA), load(None)
    plain = AutoModelForCausalLM.from_config(source.config, dtype=torch.float32)
    plain.load_state_dict(source.state_dict())
    own = peft.get_peft_model_state_dict(module, adapter_name="default")
    wrapped = peft.get_peft_model(
        plain,
        peft.LoraConfig(
            r=LORA.rank,
            lora_alpha=LORA.alpha,  # type: ignore[arg-type]
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            target_parameters=list(PARAMETERS),
        ),
    )
    names = {f"base_model.model.{name}": tensor for name, tensor in own.items()}
    loaded = peft.set_peft_model_state_dict(wrapped, names)
    assert not loaded.unexpected_keys
    assert not [key for key in loaded.missing_keys if ".lora_" in key]
    torch.testing.assert_close(logits(wrapped), logits(module), atol=2e-5, rtol=1e-5)
    assert (logits(module) - logits(source)).abs().max() > 0.1


def test_a_checkpoint_has_the_adapters(tmp_path: Path) -> None:
    train = TrainConfig(lr=0.01)
    models = [
        load_model(
            ModelConfig(name="shape:tiny-qwen3-moe", dtype="float32", lora=lora), attention="sdpa", device=CPU
        )
        for lora in (LORA, LORA)
    ]
    saved, other = (LocalBackend(train, model=model, total_steps=2) for model in models)
    trained = {name: p for name, p in saved.module.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for parameter in trained.values():
            parameter.normal_(0, 0.1)
    saved.save(tmp_path)()
    other.load(tmp_path)
    restored = dict(other.module.named_parameters())
    assert all(torch.equal(restored[name], parameter) for name, parameter in trained.items())
    assert sum(".experts." in name for name in trained) == 8


def test_one_parameter_of_one_layer() -> None:
    module = moved(LoraConfig(rank=2, target_parameters=("layers.1.mlp.experts.down_proj",)))
    adapted = {
        name.split(".lora_")[0] for name in module.state_dict() if ".experts." in name and ".lora_" in name
    }
    assert adapted == {"model.layers.1.mlp.experts"}


@pytest.mark.parametrize(
    ("shape", "target", "said"),
    [
        ("tiny-qwen3-moe", "layers.7.mlp.experts.down_proj", "experts.down_proj, experts.gate_up_proj"),
        ("tiny-llama", "experts.down_proj", "it has none"),
    ],
)
def test_a_parameter_that_the_model_lacks_is_refused(shape: str, target: str, said: str) -> None:
    with raises(ConfigError, f"unknown-name: model.lora.target_parameters, {target}", said=said):
        load(LoraConfig(target_parameters=(target,)), shape)


def run_of(**settings: Any) -> Any:
    given = {"model.name": "shape:tiny-qwen3-moe", "engine.name": "native", "train.backend": "local"}
    lora = {"rank": 4, "alpha": 8.0, "target_parameters": PARAMETERS}
    return load_run("tiny", overrides=given | {f"model.lora.{k}": v for k, v in lora.items()} | settings)


@pytest.mark.parametrize(("setting", "value"), [("backend", "fsdp2"), ("execution", "compile")])
def test_what_no_test_covers_is_refused(setting: str, value: str) -> None:
    check_experts(run_of(), None)
    with raises(
        ConfigError, f"unsupported-combination: train.{setting}, {value!r}, model.lora.target_parameters"
    ):
        check_experts(run_of(**{f"train.{setting}": value}), None)


def test_names_and_dropout_are_checked() -> None:
    with raises(ConfigError, "unknown-name: model.lora.target_parameters, mlp.gate.weight"):
        run_of(**{"model.lora.target_parameters": ("mlp.gate.weight",)})
    with raises(ConfigError, "unsupported-combination: model.lora, dropout"):
        run_of(**{"model.lora.dropout": 0.1})


@pytest.mark.parametrize(
    "shape", ["tiny-qwen3-moe", pytest.param("tiny-gpt-oss", marks=pytest.mark.exhaustive)]
)
def test_a_run_has_no_gap_and_its_export_is_the_policy(tmp_path: Path, shape: str) -> None:
    settings = {
        "model.name": f"shape:{shape}",
        "steps": 3,
        "train.lr": 0.02,
        "train.attention": "varlen",
        "train.batch_invariant": True,
        "train.token_budget": 256,
        "rollout.prompts_per_step": 2,
        "rollout.group_size": 4,
        "eval.before": False,
        "eval.after": False,
        "log.tensorboard": False,
        "log.display": "off",
        "run_dir": str(tmp_path / "run"),
    }
    train_online(run_of(**settings))
    steps = list(read_lines(tmp_path / "run" / "metrics.jsonl"))
    assert len(steps) == 3
    assert [step["logprob_gap_max"] for step in steps] == [0.0] * 3
    assert all(step["grad_norm"] > 0 for step in steps)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export", dtype=torch.float32)
    start = load(None, shape).state_dict()
    moved_by = {
        name: float((tensor - start[name]).abs().max()) for name, tensor in exported.state_dict().items()
    }
    changed = {
        name.rpartition(".")[2] for name, size in moved_by.items() if size > 1e-4 and ".experts." in name
    }
    assert changed == {"gate_up_proj", "down_proj"}
    frozen = ("norm", ".gate.", ".router.", "_bias")
    assert not any(size for name, size in moved_by.items() if any(part in name for part in frozen))
    assert any(size for name, size in moved_by.items() if "q_proj" in name)
