"""convert: what it swaps, what stays, what it refuses."""

import copy

import pytest
import torch
from invariant_models import CONFIGS, hidden_of, tiny
from raising import raises
from torch import nn

from lockstep import invariant
from lockstep.config.model import LoraConfig
from lockstep.errors import ModelError
from lockstep.invariant.cases import apply_tiles
from lockstep.invariant.modules import STOCK, InvariantLinear, InvariantMLP, InvariantNorm, InvariantRotary
from lockstep.invariant.row_ops import TILES
from lockstep.models.architectures import ARCHITECTURES
from lockstep.models.lora import add_lora, without_lora

LAYERS = {
    "llama": (15, 5),
    "qwen2": (15, 5),
    "qwen3": (15, 9),
    "mistral": (15, 5),
    "gemma3_text": (15, 13),
}
"""Linears (7 a layer and lm_head), norms (of layers, q, k and the last) of two layers."""


@pytest.fixture(autouse=True)
def no_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def run(module):
    ids = torch.arange(20) * 7 % module.config.vocab_size
    return hidden_of(module, ids, torch.arange(20) * 3)


def test_the_architectures_are_known():
    assert set(LAYERS) < set(CONFIGS) <= set(ARCHITECTURES)  # test_experts.py converts the others


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", sorted(LAYERS))
def test_convert(name, dtype):
    module = tiny(name, dtype)
    before = run(module).detach()
    names = list(module.state_dict())
    pointers = [p.data_ptr() for p in module.parameters()]
    assert not invariant.is_converted(module)
    report = invariant.convert(module)
    assert invariant.is_converted(module)
    linears, norms = LAYERS[name]
    assert report.replaced == {"linear": linears, "rms_norm": norms, "mlp": 2, "rotary": 1}
    kinds = {
        "linear": InvariantLinear,
        "rms_norm": InvariantNorm,
        "mlp": InvariantMLP,
        "rotary": InvariantRotary,
    }
    swapped = {key: sum(isinstance(p, kind) for p in module.modules()) for key, kind in kinds.items()}
    assert swapped == report.replaced
    assert set(report.stock) & {"ModuleList"} and not any("Norm" in kind for kind in report.stock)
    assert list(module.state_dict()) == names
    assert [p.data_ptr() for p in module.parameters()] == pointers
    tolerance = 2**-4 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(run(module), before, rtol=tolerance, atol=tolerance)
    if CONFIGS[name]["tie_word_embeddings"]:
        assert module.lm_head.weight is module.model.embed_tokens.weight
    assert invariant.convert(module).replaced == report.replaced
    before_and_after = [
        [type(part).__name__ for part in each.modules()] for each in (tiny(name, dtype), module)
    ]
    assert before_and_after[0] == before_and_after[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_rows_of_the_whole_decoder(name, dtype):
    """Attention apart, which is row-wise here."""
    module = tiny(name, dtype)
    invariant.convert(module)
    ids, positions = torch.arange(251) * 7 % module.config.vocab_size, torch.arange(251) * 3
    with torch.no_grad():
        found = invariant.dependence(lambda i, p: hidden_of(module, i, p), ids, positions)
    assert found is None


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_gradients_are_those_of_the_stock_module(name):
    stock, module = tiny(name, torch.float32), tiny(name, torch.float32)
    invariant.convert(module)
    for each in (stock, module):
        run(each).sin().sum().backward()
    for (label, left), right in zip(stock.named_parameters(), module.parameters(), strict=True):
        if left.grad is not None:
            # Of the tensor's norm: its smallest elements are differences of large terms, 2e-5 off with AVX2.
            assert (right.grad - left.grad).norm() <= 2e-6 * left.grad.norm(), label


def test_exact_backward_gives_the_same_gradients():
    module, exact = tiny("llama", torch.float32), tiny("llama", torch.float32)
    invariant.convert(module)
    invariant.convert(exact, exact_backward=True)
    for each in (exact, module):
        run(each).sin().sum().backward()
    for left, right in zip(exact.model.parameters(), module.model.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad, rtol=1e-4, atol=1e-5)


def test_own_code_computes_what_has_an_exact_backward():
    module = tiny("llama", torch.float32)
    invariant.convert(module, exact_backward=True)
    apply_tiles(module.lm_head, STOCK)
    assert not module.lm_head.stock
    invariant.convert(ordinary := tiny("llama", torch.float32))
    apply_tiles(ordinary.lm_head, STOCK)
    assert ordinary.lm_head.stock


def all_tiles(module):
    """As where the self-test finds the rows of all tiles equal; which they are depends on the CPU."""
    for part in module.modules():
        if isinstance(part, InvariantLinear):
            part.tiles = TILES


def test_the_contract_says_which_shape_is_computed_how():
    """The same two kinds of product the other way round are other bits."""
    module = tiny("llama", torch.float32)
    invariant.convert(module)
    all_tiles(module)
    assert "(" not in invariant.kernels_of(module)["gemm"]
    module.lm_head.tiles = (16,)
    gemm = invariant.kernels_of(module)["gemm"]
    assert gemm.startswith("cpu-tiles-128-64-32-16-8 (") and gemm.endswith(" + cpu-tiles-16 (256x64)")
    assert "256x64" not in gemm.partition(" + ")[0]


def test_a_copy_is_converted_and_apart():
    module = tiny("llama", torch.float32)
    invariant.convert(module)
    reference = copy.deepcopy(module)
    before = run(reference).detach()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert invariant.is_converted(reference) and torch.equal(run(reference), before)


def test_a_module_on_meta_is_converted_and_tested_later():
    with torch.device("meta"):
        module = tiny("qwen3", torch.float32).to("meta")
    assert invariant.convert(module).verdicts == {}
    verdicts = invariant.self_test(module, device=torch.device("cpu"), dtype=torch.bfloat16)
    assert "linear 256x64" in verdicts and "rms_norm 16" in verdicts
    with raises(ModelError, "missing-device"):
        invariant.self_test(module)


def test_kernels_of():
    module = tiny("gemma3_text", torch.float32)
    with raises(ModelError, "not-batch-invariant: has not been converted"):
        invariant.kernels_of(module)
    invariant.convert(module)
    all_tiles(module)
    assert invariant.kernels_of(module) == {
        "gemm": "cpu-tiles-128-64-32-16-8",
        "norm": "rms_norm cpu-row",
        "activation": "gelu_tanh cpu-row",
        "logprob": "token_stats cpu-row",
    }
    cuda = invariant.kernels_of(module, device=torch.device("cuda"))
    assert cuda["gemm"] == "triton-persistent" and cuda["norm"] == "rms_norm triton-row"


def adapted(dtype, *, dropout=0.0):
    """tiny Llama with adapters that do something."""
    pytest.importorskip("peft")
    module = tiny("llama", dtype)
    config = LoraConfig(rank=4, alpha=8.0, dropout=dropout, target_modules=("q_proj", "down_proj"))
    add_lora(module, config, seed=0)
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adapters(dtype):
    stock, module = adapted(dtype), adapted(dtype)
    names = list(module.state_dict())
    report = invariant.convert(module)
    # two adapted linears in each of two layers, of a base and two small linears each
    assert report.replaced["adapted linear"] == 4 and report.replaced["linear"] == LAYERS["llama"][0] + 8
    assert list(module.state_dict()) == names
    tolerance = 2**-4 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(run(module), run(stock), rtol=tolerance, atol=tolerance)
    with without_lora(module), without_lora(stock):
        base = run(module)
        torch.testing.assert_close(base, run(stock), rtol=tolerance, atol=tolerance)
    assert (run(module) - base).abs().max() > 10 * tolerance
    ids, positions = torch.arange(251) * 7 % module.config.vocab_size, torch.arange(251) * 3
    with torch.no_grad():
        assert invariant.dependence(lambda i, p: hidden_of(module, i, p), ids, positions) is None


def test_gradients_of_adapters_are_those_of_the_stock_module():
    stock, module = adapted(torch.float32), adapted(torch.float32)
    invariant.convert(module)
    for each in (stock, module):
        run(each).sin().sum().backward()
    seen = 0
    for (label, left), right in zip(stock.named_parameters(), module.parameters(), strict=True):
        assert (left.grad is None) == (right.grad is None) == ("lora_" not in label)
        if left.grad is not None:
            seen += 1
            torch.testing.assert_close(right.grad, left.grad, rtol=1e-4, atol=1e-5, msg=label)
    assert seen == 8


def test_adapters_that_drop_out_are_refused():
    with raises(ModelError, "not-batch-invariant"):
        invariant.convert(adapted(torch.float32, dropout=0.1))


class OddLinear(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: m.model.register_module("extra", nn.LayerNorm(4)),
            "not-batch-invariant: model.extra (LayerNorm)",
        ),
        (
            lambda m: setattr(m.model, "norm", OddLinear(64, 64)),
            "not-batch-invariant: model.norm (OddLinear)",
        ),
        (lambda m: setattr(m.model, "norm", nn.Dropout(0.1)), "not-batch-invariant: model.norm (Dropout)"),
        (
            lambda m: m.model.norm.bfloat16(),
            "not-batch-invariant: model.layers.0.self_attn.q_proj.weight, model.norm.weight",
        ),
        (
            lambda m: setattr(m.model.rotary_emb, "rope_type", "axial"),
            "not-batch-invariant: model.rotary_emb (LlamaRotaryEmbedding)",
        ),
        (
            lambda m: setattr(m.config, "hidden_act", "relu"),
            "not-batch-invariant: model.layers.0.mlp (LlamaMLP)",
        ),
    ],
)
def test_refused_by_name_and_left_alone(change, message):
    module = tiny("llama", torch.float32)
    change(module)
    with raises(ModelError, message) as caught:
        invariant.convert(module)
    assert "train.batch_invariant = false" in str(caught.value)
    assert not invariant.is_converted(module)
