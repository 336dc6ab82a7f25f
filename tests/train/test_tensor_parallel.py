"""Tensor parallel on real ranks: loss, logprobs, weights and gradients of the split module are those of the
whole one, for every architecture."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lockstep.config.model import LoraConfig, ModelConfig
from lockstep.errors import ConfigError
from lockstep.models.architectures import ARCHITECTURES, Replicated, Split
from lockstep.models.load import meta_module
from lockstep.models.shape_table import SHAPES
from lockstep.models.shapes import random_model
from lockstep.models.tensor_parallel import (
    check_tensor_parallel_size,
    part_bounds,
    resolve_tp_plan,
    tensor_parallel_plan,
    tensor_parallel_sizes,
)
from lockstep.ranks.launch import launch_command

WORKER = Path(__file__).with_name("tensor_parallel_worker.py")
# Three query groups, parts of MLP and vocabulary that are not equal, and a pad id (whose embedding row gets
# no gradient) that is in the documents and not on rank 0.
THREE = {
    "hidden_size": 60,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 161,
    "vocab_size": 257,
    "pad_token_id": 169,
}
QWEN2 = {**SHAPES["tiny-llama"], "model_type": "qwen2"}
QWEN2.pop("attention_bias")
QWEN2.pop("head_dim")


@pytest.fixture
def run_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OUT", str(tmp_path))

    def run(cases: list[dict[str, Any]], *, ranks: int) -> list[list[dict[str, Any]]]:
        command = [sys.executable, str(WORKER), json.dumps(cases)]
        assert launch_command(command, ranks=ranks, timeout=200, log_dir=tmp_path / "logs") == 0
        return [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(ranks)]

    return run


def check(results: list[list[dict[str, Any]]], cases: list[dict[str, Any]]) -> None:
    for of_rank in results:
        for case, result in zip(cases, of_rank, strict=True):
            assert result["other_weights"] == 0, (case, result)
            # Gemma's norms make the gradients of their weights in float32.
            tolerance = 1e-6 if case["config"]["model_type"].startswith("gemma") else 1e-12
            assert max(result["loss"], result["logprobs"]) < 1e-12, (case, result)
            assert result["gradient"] < tolerance, (case, result)


@pytest.mark.slow
def test_two_ranks_compute_what_one_computes(run_cases: Any, tmp_path: Path) -> None:
    cases = [
        {"config": SHAPES["tiny-llama"]},
        {"config": SHAPES["tiny-llama"] | {"mlp_bias": True}, "separable": False},
        {"config": QWEN2},
        {"config": SHAPES["tiny-qwen3"], "separable": False, "export": True},
        {"config": SHAPES["tiny-gemma3"]},
        {"config": SHAPES["tiny-mistral"]},
        {"config": SHAPES["tiny-llama"], "plan": "hf"},
        {"config": SHAPES["tiny-qwen3"], "plan": "hf"},
        *({"config": SHAPES[n], "compile": "aot_eager"} for n in ("tiny-llama", "tiny-gemma3")),
        {"config": SHAPES["tiny-qwen3"], "checkpointing": True},
    ]
    results = run_cases(cases, ranks=2)
    check(results, cases)
    # transformers does not split the embedding, unless it is tied to the head.
    assert [result["share"] < 0.52 for result in results[0]] == [case is not cases[6] for case in cases]
    assert [of_rank[0]["vocab"] for of_rank in results] == [[0, 128], [128, 256]]
    check_export(tmp_path / "export", SHAPES["tiny-qwen3"])


def check_export(folder: Path, config: dict[str, Any]) -> None:
    """from_pretrained finds every key, and the weights that were split."""
    module, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = random_model(
        AutoConfig.for_model(**config), seed=3, dtype=torch.float32, device=module.device, attention="eager"
    ).state_dict()
    found = module.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.exhaustive
def test_every_plan_of_a_record_computes_what_one_rank_computes(run_cases: Any) -> None:
    tiny = [values for name, values in SHAPES.items() if name.startswith("tiny")]
    planned = [values for values in tiny if ARCHITECTURES[values["model_type"]].tensor_parallel]
    assert len(planned) >= 13
    cases = [{"config": values} for values in planned]
    check(run_cases(cases, ranks=2), cases)


@pytest.mark.exhaustive
def test_three_ranks_with_unequal_parts_compute_what_one_computes(run_cases: Any) -> None:
    cases = [{"config": SHAPES[name] | THREE} for name in ("tiny-llama", "tiny-qwen3", "tiny-gemma3")]
    results = run_cases(cases, ranks=3)
    check(results, cases)
    assert [of_rank[0]["vocab"] for of_rank in results] == [[0, 85], [85, 171], [171, 257]]


@pytest.mark.slow
def test_rows_of_a_part_do_not_depend_on_other_rows(run_cases: Any) -> None:
    """Three ranks, whose sums depend on their order; parts of MLP and vocabulary that are not equal."""
    config = SHAPES["tiny-llama"] | THREE
    cases = [{"config": config, "invariant": True, "dtype": dtype} for dtype in ("float32", "bfloat16")]
    results = run_cases(cases, ranks=3)
    for index in range(len(cases)):
        found = [of_rank[index] for of_rank in results]
        assert [result["differ"] for result in found] == [0, 0, 0]
        assert all(result["logprobs"] == found[0]["logprobs"] for result in found)
        assert found[2]["linears"] == ["16x60", "32x60", "54x60", "60x32", "60x54", "86x60"]
        assert {"linear 60x32", "linear 86x60", "partial_token_stats 86"} <= {*found[2]["tested"]}


def tiny(name: str, **options: Any) -> nn.Module:
    return meta_module(ModelConfig(name=name, **options), dtype=torch.float32)


def test_heads_must_divide() -> None:
    config = tiny("bundled:smollm2-135m", num_layers=1).config
    assert tensor_parallel_sizes(config) == (1, 3)
    check_tensor_parallel_size(config, 3)
    with raises(ConfigError, "not-divisible: train.tp"):
        check_tensor_parallel_size(config, 2)


@pytest.mark.parametrize("plan", ["lockstep", "hf"])
@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-qwen3", "tiny-gemma3", "tiny-mistral"])
def test_every_parameter_is_planned(shape: str, plan: str) -> None:
    module = tiny(f"shape:{shape}")
    found = tensor_parallel_plan(module, size=2, plan=plan)
    assert [*found] == [name for name, _ in module.named_parameters()]
    layer = {n.partition(".0.")[2]: how for n, how in found.items() if ".0." in n}
    for name, how in layer.items():
        if name.endswith("norm.weight"):
            on_heads = name.partition(".")[2].startswith(("q_norm", "k_norm"))
            assert how == Replicated(summed=on_heads)
        elif "o_proj" in name or "down_proj" in name:
            assert how == (Replicated() if name.endswith("bias") else Split(1))
        else:
            assert how == Split(0)
    untied = shape in ("tiny-llama", "tiny-mistral")
    assert found["model.embed_tokens.weight"] == (Replicated() if untied and plan == "hf" else Split(0))
    assert found.get("lm_head.weight", Split(0)) == Split(0)


def test_styles_of_transformers_that_are_not_known_are_named() -> None:
    module: Any = tiny("shape:tiny-llama")
    plan = module.config.base_model_tp_plan
    for style, known in (("packed_colwise", "which Lockstep does not know"), ("rowwise", "does not fit")):
        module.config.base_model_tp_plan = plan | {"layers.*.mlp.up_proj": style}
        with raises(ConfigError, f"unsupported-model: train.tp_plan, {style}, {known}"):
            tensor_parallel_plan(module, size=2, plan="hf")
    module.config.base_model_tp_plan = {k: v for k, v in plan.items() if "down" not in k}
    with raises(ConfigError, "unsupported-model: train.tp_plan, model.layers.0.mlp"):
        tensor_parallel_plan(module, size=2, plan="hf")
    module.config.base_model_tp_plan = plan
    tensor_parallel_plan(module, size=2, plan="hf")


def test_the_plan_of_transformers_is_for_tensor_parallel_alone() -> None:
    assert resolve_tp_plan("hf", tp=2, others=1) == "hf"
    assert (
        resolve_tp_plan("auto", tp=2, others=2) == resolve_tp_plan("lockstep", tp=2, others=2) == "lockstep"
    )
    with raises(ConfigError, "unsupported-combination: train.tp_plan"):
        resolve_tp_plan("hf", tp=2, others=2)


@pytest.mark.parametrize("plan", ["hf", "lockstep"])
def test_an_adapter_is_split_as_the_matrix_beside_it(plan: str) -> None:
    pytest.importorskip("peft")
    found = tensor_parallel_plan(tiny("shape:tiny-llama", lora=LoraConfig()), size=2, plan=plan)
    layer, a, b = "model.layers.1.", ".lora_A.default.weight", ".lora_B.default.weight"
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj"):
        assert found[f"{layer}{name}.base_layer.weight"] == found[layer + name + b] == Split(0)
        assert found[layer + name + a] == Replicated(summed=True)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        assert found[f"{layer}{name}.base_layer.weight"] == found[layer + name + a] == Split(1)
        assert found[layer + name + b] == Replicated()


def test_parts_follow_each_other_and_differ_by_one_at_most() -> None:
    for length, size in ((8, 3), (257, 4), (6, 6), (10, 1)):
        bounds = [part_bounds(length, rank=rank, size=size) for rank in range(size)]
        assert bounds[0][0] == 0 and bounds[-1][1] == length
        assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
        assert {b - a for a, b in bounds} <= {length // size, length // size + 1}
