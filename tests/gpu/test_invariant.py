"""The row-invariant ops on CUDA, stock and Triton: a row alone and among many, to the bit, and float64.

LOCKSTEP_GPU_INVARIANT=1 python -m pytest tests/gpu/test_invariant.py
"""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "invariant"))

import torch
import torch.nn.functional as F
from invariant_models import ROW_WISE, hidden_of, row_wise

from lockstep import invariant
from lockstep.execution import compile_blocks
from lockstep.invariant import dependence
from lockstep.invariant.few_rows import few_rows
from lockstep.invariant.modules import InvariantLinear, head_kernels
from lockstep.invariant.row_ops import (
    TILES,
    bmm,
    linear,
    mean,
    partial_token_stats,
    rms_norm,
    token_stats,
)
from lockstep.models.shapes import random_model
from lockstep.ops.logprobs import merged_stats

pytestmark = pytest.mark.skipif(
    os.environ.get("LOCKSTEP_GPU_INVARIANT") != "1", reason="LOCKSTEP_GPU_INVARIANT is not 1"
)
BF16 = torch.bfloat16


@pytest.fixture(scope="module", autouse=True)
def settings():
    invariant.configure_cuda()


def normal(*shape, std=1.0, dtype=BF16):
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(*shape, device="cuda", generator=generator).mul_(std).to(dtype)


# The 1B and 8B Llama shapes, Qwen 3 8B's, and biases.
SHAPES = [(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (6144, 4096), (4096, 4096), (24576, 4096)]
SHAPES += [(4096, 12288), (4096, 14336), (512, 2048), (151936, 1024)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_stock_linear(shape, bias):
    weight, x = normal(*shape, std=shape[1] ** -0.5), normal(4096 if shape[0] < 10**5 else 1024, shape[1])
    offset = normal(shape[0]) if bias else None
    assert dependence(lambda x: F.linear(x, weight, offset), x) is None


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (16, 2048), (96, 576)], ids=str)
def test_few_rows_have_the_bits_of_many(shape, bias):
    weight, x = normal(*shape, std=shape[1] ** -0.5), normal(4096 if shape[0] < 10**5 else 1024, shape[1])
    biases = [normal(shape[0])] if bias else []
    whole = F.linear(x, weight, *biases)
    for count in (1, 2, 7, 16, 17, 32, 50, 64):
        rows, residual = x[5 : 5 + count], normal(count, shape[0])
        for out in few_rows(rows, [weight] * 3, biases * 3, None):
            assert torch.equal(out, whole[5 : 5 + count]), count
        out = few_rows(rows, [weight], biases, residual)[0]
        assert torch.equal(out, residual + whole[5 : 5 + count]), count


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(2048, 8192), (96, 50), (4096, 4096), (50000, 512)], ids=str)
def test_triton_linear(shape, dtype):
    weight, x = normal(*shape, std=shape[1] ** -0.5, dtype=dtype), normal(1100, shape[1], dtype=dtype)
    bias = normal(shape[0], dtype=dtype)
    assert dependence(lambda x: linear(x, weight, bias, TILES), x) is None
    torch.testing.assert_close(
        linear(x, weight, bias, TILES),
        F.linear(x.double(), weight.double(), bias.double()).to(dtype),
        rtol=2**-7 if dtype == BF16 else 1e-4,
        atol=2**-7 if dtype == BF16 else 1e-4,
    )


def test_stock_head():
    """Logits as trainer and engine compute them, into a buffer."""
    weight, bias, hidden = normal(128256, 2048, std=2048**-0.5), normal(128256), normal(1024, 2048)
    linear = torch.nn.Linear(2048, 128256, device="meta")
    linear.__class__ = InvariantLinear
    linear.tiles, linear.stock = TILES, True
    logits = head_kernels(linear).logits
    for b in (None, bias):
        assert (
            dependence(lambda x, b=b: logits(x, weight, b, x.new_empty(x.shape[0], 128256)), hidden) is None
        )


def test_without_the_settings_the_self_test_finds_split_k():
    """In a process of its own, whose cuBLAS is as torch sets it: Triton takes over where it splits."""
    code = """
import torch
from torch import nn
from lockstep.invariant import modules, self_test
with torch.device("meta"):
    module = nn.ModuleDict({"down_proj": nn.Linear(8192, 2048, bias=False)})
for part in module.values():
    modules.swap_linear(part, exact_backward=False)
verdicts = self_test(module, device=torch.device("cuda"), dtype=torch.bfloat16, cache=False)
print(verdicts)
assert verdicts["linear 2048x8192"].choice == "triton" and not module["down_proj"].stock
assert verdicts["linear 2048x8192"].rejected[0].startswith("stock (")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stderr


def test_triton_bmm():
    x, y = normal(3, 70, 96), normal(3, 96, 40)
    torch.testing.assert_close(bmm(x, y, TILES), x @ y)
    part = bmm(x[:, :1], y, TILES)
    assert torch.equal(part, bmm(x, y, TILES)[:, :1])


@pytest.mark.parametrize("width", [50, 64, 128, 2048, 4096, 12288])
@pytest.mark.parametrize("offset", [False, True])
def test_rms_norm(width, offset):
    x, weight = normal(4100, width), normal(width)
    assert dependence(lambda x: rms_norm(x, weight, 1e-6, offset), x) is None
    shifted = normal(4100 * width + 1)[1:].view(4100, width)  # not at a multiple of 16 bytes
    assert torch.equal(
        rms_norm(shifted, weight, 1e-6, offset), rms_norm(shifted.clone(), weight, 1e-6, offset)
    )
    wide = x.double()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    expected = normed * (weight.double() + offset)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6, offset), expected.to(BF16), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("vocab", [259, 32000, 128256, 151936])
@pytest.mark.parametrize("cap", [None, 30.0])
def test_token_stats(vocab, cap):
    logits, labels = normal(1100, vocab, std=3.0), torch.arange(1100, device="cuda") * 7919 % vocab
    assert dependence(lambda x, y: token_stats(x, y, 1 / 0.7, cap), logits, labels) is None
    x = logits[:64].double() / 0.7
    x = x if cap is None else cap * torch.tanh(x / cap)
    logp = torch.log_softmax(x, -1)
    found = token_stats(logits[:64], labels[:64], 1 / 0.7, cap)
    expected = (logp.gather(1, labels[:64, None])[:, 0], -(logp.exp() * logp).sum(-1), x.logsumexp(-1))
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("part", [130, 64128, 37984])
def test_figures_of_a_part_of_the_vocabulary(part):
    logits, labels = normal(1100, part, std=3.0), torch.arange(1100, device="cuda") * 7919 % (2 * part)
    op = partial(partial_token_stats, scale=1 / 0.7, cap=None, start=part)
    assert dependence(lambda x, y: op(x, y).T, logits, labels) is None
    both = [partial_token_stats(logits, labels, 1 / 0.7, None, start) for start in (0, part)]
    found = merged_stats(torch.stack(both), labels)
    x = torch.cat([logits, logits], 1)[:64].double() / 0.7
    logp = torch.log_softmax(x, -1)
    expected = (logp.gather(1, labels[:64, None])[:, 0], -(logp.exp() * logp).sum(-1), x.logsumexp(-1))
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left[:64], right.float(), rtol=1e-5, atol=1e-5)


def test_mean():
    x = normal(1100, 3000)
    assert dependence(mean, x) is None
    torch.testing.assert_close(mean(x).float(), x.double().mean(-1).float(), rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-0.6b", "tiny-gemma3"])
def test_compiled_layers(name):
    """Rows of compiled converted layers, by number of rows, with and without gradients."""
    from transformers import AttentionInterface

    from lockstep.models.shapes import shape_config

    AttentionInterface.register(ROW_WISE, row_wise)
    torch._dynamo.reset()
    config = shape_config(name)
    config.num_hidden_layers = 2
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    module = random_model(config, seed=1, dtype=BF16, device=torch.device("cuda"), attention=ROW_WISE)
    report = invariant.convert(module)
    print({op: (v.choice, v.rejected) for op, v in report.verdicts.items()}, invariant.kernels_of(module))
    compile_blocks(module, options=invariant.inductor_options())
    ids = torch.arange(2048, device="cuda") * 7 % config.vocab_size
    positions = torch.arange(2048, device="cuda") * 3
    whole = hidden_of(module, ids, positions).detach()
    for num_rows in (1, 8, 200, 1024):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                part = hidden_of(module, ids[3 : 3 + num_rows], positions[3 : 3 + num_rows])
            assert torch.equal(part, whole[3 : 3 + num_rows]), (num_rows, grad)
