"""Linears with arranged weights compute what F.linear computes, and never with weights of yesterday."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep.config.engine import EngineConfig
from lockstep.config.model import ModelConfig
from lockstep.engine.hf.engine import HFEngine
from lockstep.engine.hf.kv_cache import PackedLinears, can_pack
from lockstep.models.load import load_model
from lockstep.schema.rollout import GenerationRequest, SamplingParams
from lockstep.schema.weights import WeightUpdate

needs_bf16_cpu = pytest.mark.skipif(
    not can_pack(torch.zeros(1, 1, dtype=torch.bfloat16)),
    reason="weights are arranged on x86 CPUs whose oneDNN computes in bfloat16 (AVX512-BF16 or AMX) only",
)


def random_linear(inputs=96, outputs=80, *, bias=True, dtype=torch.bfloat16, seed=0):
    linear = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return linear


def random_rows(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def output(linear, x):
    with torch.inference_mode():
        return linear(x)


@needs_bf16_cpu
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 16, 64, 257])
def test_equals_f_linear(rows, bias):
    linear = random_linear(bias=bias)
    packed = PackedLinears(nn.Sequential(linear))
    packed.refresh()
    assert len(packed._weights) == 1
    x = random_rows(1, rows, 96)  # decode and prefill call with [1, T, C]
    out = output(linear, x)
    exact = F.linear(x.double(), linear.weight.double(), linear.bias.double() if bias else None)
    assert out.dtype == torch.bfloat16 and out.shape == (1, rows, 80)
    # one rounding to bfloat16 (8 significant bits) of sums of 96 products of about 1, made in float32
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-4)
    plain = F.linear(x, linear.weight, linear.bias)
    torch.testing.assert_close(out, plain, rtol=2**-7, atol=1e-4)


@needs_bf16_cpu
@pytest.mark.parametrize("change", ["in place", "new storage", "optimizer"])
def test_refresh_sees_changed_weights(change):
    linear = random_linear()
    packed = PackedLinears(nn.Sequential(linear))
    packed.refresh()
    x = random_rows(4, 96)
    before = output(linear, x)
    new = random_linear(seed=2).weight.detach()
    if change == "in place":
        with torch.no_grad():
            linear.weight.copy_(new)
    elif change == "new storage":
        linear.weight.data = new
    else:
        linear.weight.grad = torch.ones_like(linear.weight)
        torch.optim.SGD([linear.weight], lr=0.5).step()
    packed.refresh()
    after = output(linear, x)
    torch.testing.assert_close(after, F.linear(x, linear.weight, linear.bias), rtol=2**-7, atol=1e-3)
    assert (after - before).abs().max() > 1


@needs_bf16_cpu
def test_unchanged_weights_are_arranged_once():
    linear = random_linear()
    packed = PackedLinears(nn.Sequential(linear))
    packed.refresh()
    (first,) = packed._weights.values()
    packed.refresh()
    (second,) = packed._weights.values()
    assert second is first


@needs_bf16_cpu
def test_without_arranged_weights_linears_read_the_parameter():
    linear = random_linear()
    packed = PackedLinears(nn.Sequential(linear))
    packed.refresh()
    packed.clear()
    with torch.no_grad():
        linear.weight.zero_()
    x = random_rows(4, 96)
    assert torch.equal(output(linear, x), linear.bias.expand(4, -1))


def test_other_weights_and_other_linears_are_left_alone():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    assert not can_pack(torch.zeros(1, 1, dtype=torch.float32))
    assert not can_pack(torch.zeros(1, 1, dtype=torch.bfloat16, device="meta"))
    single = random_linear(dtype=torch.float32)
    doubled = Doubled(96, 80, bias=False, dtype=torch.bfloat16)
    module = nn.Sequential(single, doubled)
    packed = PackedLinears(module)
    packed.refresh()
    assert packed._weights == {}
    x = random_rows(4, 96)
    assert torch.equal(output(doubled, x), 2 * F.linear(x, doubled.weight))


@needs_bf16_cpu
@pytest.mark.parametrize("write", ["copy_", "data.copy_"])
def test_engine_samples_from_updated_weights(write):
    """`p.data.copy_` does not move p's version counter: what announces the change is update_weights."""
    model, other = (
        load_model(
            ModelConfig(name="shape:tiny-llama", dtype="bfloat16", seed=seed),
            attention="sdpa",
            device=torch.device("cpu"),
        )
        for seed in (0, 7)
    )
    request = GenerationRequest(
        prompt_token_ids=(5, 9, 40), sampling=SamplingParams(max_tokens=12), seeds=(1, 2, 3)
    )
    engine = HFEngine(EngineConfig(max_batch=4), model=model)
    before = engine.generate([request])[0]
    assert engine._skeleton.linears._weights  # arranged, else all of this is about nothing
    with torch.no_grad():
        for own, new in zip(model.module.parameters(), other.module.parameters(), strict=True):
            (own if write == "copy_" else own.data).copy_(new)
    update = WeightUpdate(policy_version=1, tensors=lambda: iter(()), shared_module=model.module)
    engine.update_weights(update)
    after = engine.generate([request])[0]
    expected = HFEngine(EngineConfig(max_batch=4), model=other).generate([request])[0]
    assert [c.token_ids for c in after] == [c.token_ids for c in expected]
    assert [c.logprobs for c in after] == [c.logprobs for c in expected]
    assert [c.token_ids for c in before] != [c.token_ids for c in after]
