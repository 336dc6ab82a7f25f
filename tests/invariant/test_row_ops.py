"""Norm, activations, mean, token figures, rotary tables: bits, values and gradients against float64."""

import pytest
import torch
import torch.nn.functional as F
from invariant_models import normal

from lockstep.invariant import dependence
from lockstep.invariant.row_ops import (
    gelu_and_mul,
    mean,
    rms_norm,
    rotary,
    row_sums,
    silu_and_mul,
    standardise,
    token_stats,
)

DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [16, 50, 64, 259, 1536]
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2**-6, 2**-6)}


def check(op, reference, *inputs):
    """Values and gradients of all inputs against the same formula in float64."""
    rtol, atol = TOLERANCE[inputs[0].dtype]
    narrow = [x.clone().requires_grad_() for x in inputs]
    wide = [x.double().requires_grad_() for x in inputs]
    out, expected = op(*narrow), reference(*wide)
    dy = normal(*out.shape, dtype=out.dtype)
    out.backward(dy)
    expected.backward(dy.double())
    torch.testing.assert_close(out.double(), expected.detach(), rtol=rtol, atol=atol)
    for left, right in zip(narrow, wide, strict=True):
        torch.testing.assert_close(left.grad.double(), right.grad, rtol=rtol, atol=atol * 8)


def rms_reference(x, weight, offset):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (weight + offset)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [False, True])
def test_rms_norm(dtype, offset):
    for width in WIDTHS:
        weight = normal(width, dtype=dtype)
        x = normal(251, width, dtype=dtype)
        assert dependence(lambda x, w=weight: rms_norm(x, w, 1e-6, offset), x) is None
    check(
        lambda x, w: rms_norm(x, w, 1e-6, offset),
        lambda x, w: rms_reference(x, w, offset),
        normal(4, 5, 50, dtype=dtype),
        normal(50, dtype=dtype),
    )


def test_rms_norm_is_transformers_own():
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    x = normal(7, 64, dtype=torch.bfloat16)
    forms = ((LlamaRMSNorm, False, False), (Gemma3RMSNorm, True, False), (Olmo2RMSNorm, False, True))
    for kind, *form in forms:
        norm = kind(64, eps=1e-6).to(torch.bfloat16)
        torch.nn.init.normal_(norm.weight)
        torch.testing.assert_close(rms_norm(x, norm.weight, 1e-6, *form), norm(x), rtol=2**-7, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_standardise(dtype):
    for width in WIDTHS:
        assert dependence(lambda x: standardise(x, 1e-5), normal(251, width, dtype=dtype)) is None
    x = normal(4, 5, 50, dtype=dtype)
    expected = torch.nn.functional.layer_norm(x.float(), (50,), eps=1e-5)
    torch.testing.assert_close(standardise(x, 1e-5), expected, rtol=1e-5, atol=1e-6)


def test_the_gradient_of_standardise():
    x, y = (normal(3, 4, 20).requires_grad_() for _ in range(2))
    direction = normal(4, 20)
    (standardise(x, 1e-5) * direction).sum().backward()
    (torch.nn.functional.layer_norm(y, (20,), eps=1e-5) * direction).sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-6)


def test_rms_norm_keeps_the_layout_of_heads():
    """Gemma norms [B, N, T, H], which lies in memory as [B, T, N, H]."""
    x, weight = normal(1, 5, 3, 16), normal(16)
    heads = x.transpose(1, 2)
    out = rms_norm(heads, weight, 1e-6, True)
    assert out.shape == heads.shape and out.stride() == heads.stride()
    assert torch.equal(out, rms_norm(x, weight, 1e-6, True).transpose(1, 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations(dtype):
    for op, reference in (
        (silu_and_mul, lambda gate, up: F.silu(gate) * up),
        (gelu_and_mul, lambda gate, up: F.gelu(gate, approximate="tanh") * up),
    ):
        for width in WIDTHS:
            assert dependence(op, normal(251, width, dtype=dtype), normal(251, width, dtype=dtype)) is None
        check(op, reference, normal(9, 50, dtype=dtype), normal(9, 50, dtype=dtype))


def test_the_ordinary_activations_are_caught():
    """Their vectors and their last few elements differ; see row_ops.py."""
    gate, up = normal(251, 50) * 3, normal(251, 50)
    assert dependence(lambda gate, up: F.silu(gate) * up, gate, up) is not None
    assert dependence(lambda gate, up: F.gelu(gate, approximate="tanh") * up, gate, up) is not None


def test_activations_far_out():
    far = torch.tensor([[-1e4, -90.0, 90.0, 1e4]])
    one = torch.ones_like(far)
    assert silu_and_mul(far, one).tolist() == [[-0.0, pytest.approx(-90 * 8.19e-40, abs=1e-37), 90.0, 1e4]]
    assert gelu_and_mul(far, one).tolist() == [[-0.0, -0.0, 90.0, 1e4]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mean(dtype):
    assert dependence(mean, normal(251, 259, dtype=dtype)) is None
    check(mean, lambda x: x.mean(-1), normal(4, 5, 50, dtype=dtype))


def test_a_sum_of_one_long_row():
    """ATen splits such a sum over threads, where there are several."""
    x = normal(3, 40_000)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(row_sums(x[:1]), row_sums(x)[:1])
        assert not torch.equal(x[:1].sum(-1), x.sum(-1)[:1])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("cap", [None, 5.0])
def test_token_stats(cap):
    for width in (50, 256, 5003):
        for dtype in DTYPES:
            logits = normal(251, width, dtype=dtype) * 3
            labels = torch.arange(251) * 7919 % width
            assert dependence(lambda x, y: token_stats(x, y, 1 / 0.7, cap), logits, labels) is None
    logits, labels = (normal(5, 50) * 3).requires_grad_(), torch.tensor([0, 49, -1, 7, 7])
    weights = normal(3, 5)
    found = token_stats(logits, labels, 1 / 0.7, cap)
    wide = logits.detach().double().requires_grad_()
    x = wide / 0.7 if cap is None else cap * torch.tanh(wide / 0.7 / cap)
    logp, valid = torch.log_softmax(x, -1), labels >= 0
    expected = (
        torch.where(valid, logp.gather(1, labels.clamp(min=0)[:, None])[:, 0], 0.0),
        torch.where(valid, -(logp.exp() * logp).sum(-1), 0.0),
        x.logsumexp(-1),
    )
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left.double(), right, rtol=1e-5, atol=1e-5)
    sum((w * figure).sum() for w, figure in zip(weights, found, strict=True)).backward()
    sum((w * figure).sum() for w, figure in zip(weights, expected, strict=True)).backward()
    torch.testing.assert_close(logits.grad.double(), wide.grad, rtol=1e-5, atol=1e-5)


def test_token_stats_of_one_row_with_threads():
    logits, labels = normal(2, 50_000) * 3, torch.tensor([1, 2])
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        both = token_stats(logits, labels, 1.0, None)
        one = token_stats(logits[:1], labels[:1], 1.0, None)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a[:1], b) for a, b in zip(both, one, strict=True))


def test_rotary():
    inv_freq = 10000.0 ** -(torch.arange(8) / 8)
    assert dependence(lambda p: rotary(p, inv_freq, 1.5), torch.arange(251) * 37) is None
    cos, sin = rotary(torch.tensor([[0, 3]]), inv_freq, 1.5)
    assert cos.shape == (1, 2, 16) and cos[0, 0].tolist() == [1.5] * 16 and sin[0, 0].tolist() == [0.0] * 16
    torch.testing.assert_close(cos[0, 1, :8], 1.5 * torch.cos(3 * inv_freq))
    torch.testing.assert_close(sin[0, 1, 8:], 1.5 * torch.sin(3 * inv_freq))
    for layout, columns in (("halves", slice(0, 8)), ("pairs", slice(1, None, 2)), ("once", slice(None))):
        part = rotary(torch.tensor([[0, 3]]), inv_freq, 1.5, layout)[0][..., columns]
        assert torch.equal(part, cos[..., :8])


def test_registrations():
    """Fake, autograd and aliasing rules agree with what the ops do."""
    check_op = torch.library.opcheck
    x = normal(2, 3, 16).requires_grad_()
    check_op(rms_norm, (x, normal(16).requires_grad_(), 1e-6, True))
    check_op(rms_norm, (normal(1, 3, 4, 16).transpose(1, 2), normal(16), 1e-6, False))
    check_op(standardise, (normal(1, 3, 4, 16).transpose(1, 2).requires_grad_(), 1e-6))
    check_op(silu_and_mul, (x, normal(2, 3, 16).requires_grad_()))
    check_op(gelu_and_mul, (x, normal(2, 3, 16).requires_grad_()))
    check_op(mean, (x,))
    check_op(token_stats, (normal(3, 16).requires_grad_(), torch.tensor([1, -1, 3]), 0.5, 5.0))
    check_op(rotary, (torch.arange(3), torch.ones(4), 1.0))
