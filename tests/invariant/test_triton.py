"""The Triton kernels under Triton's interpreter, in a process of its own, where Triton is installed."""

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install triton"
)

CODE = """
import torch
import torch.nn.functional as F
from lockstep.invariant import row_ops, triton_kernels as kernels

torch.manual_seed(0)


def check(op, reference, *rows, rtol, atol):
    whole = op(*rows)
    whole, expected = ([x] if isinstance(x, torch.Tensor) else x for x in (whole, reference(*rows)))
    for left, right in zip(whole, expected, strict=True):
        torch.testing.assert_close(left.float(), right.float(), rtol=rtol, atol=atol)
    for part in (slice(0, 1), slice(0, 3), slice(64, 65), slice(64, 70)):
        some = op(*(x[part] for x in rows))
        some = [some] if isinstance(some, torch.Tensor) else some
        assert all(torch.equal(a, b[part]) for a, b in zip(some, whole, strict=True)), part


for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 2**-6)):
    near = dict(rtol=tolerance, atol=tolerance)
    x, norm = torch.randn(70, 200).to(dtype), torch.randn(200).to(dtype)
    weight, bias = torch.randn(150, 200).to(dtype), torch.randn(150).to(dtype)
    for b in (None, bias):
        check(
            lambda x: kernels.matmul(x, weight.t(), b),
            lambda x: F.linear(x.double(), weight.double(), None if b is None else b.double()),
            x, **near,
        )
    # 1 to 3 weights of other heights in one launch, none a whole number of blocks; all kinds of blocks.
    weights, biases = [weight, weight[:37], weight[20:101]], [bias, bias[:37], bias[20:101]]
    for count, rows in ((3, 5), (3, 16), (2, 20), (3, 64), (1, 40)):
        for some in ([], biases[:count]):
            residual = torch.randn(rows, 150).to(dtype) if count == 1 else None
            outs = kernels.few_rows(x[-rows:], weights[:count], some, residual)
            for i, (out, w) in enumerate(zip(outs, weights, strict=False)):
                expected = F.linear(x[-rows:].float(), w.float(), some[i].float() if some else None).to(dtype)
                expected = expected if residual is None else expected + residual
                torch.testing.assert_close(out, expected, **near)
            assert len(outs) == count
    for offset, last in ((False, False), (True, False), (False, True)):
        check(
            lambda x: kernels.rms_norm(x, norm, 1e-6, unit_offset=offset, rounded_last=last),
            lambda x: row_ops.rms_norm(x, norm, 1e-6, offset, last),
            x, **near,
        )
    for op in (kernels, row_ops):
        assert op.standardise(x, 1e-6).dtype == torch.float32
    check(
        lambda x: kernels.standardise(x, 1e-6),
        lambda x: row_ops.standardise(x, 1e-6),
        x, rtol=1e-5, atol=1e-5,
    )
    logits, labels = torch.randn(70, 5000).to(dtype) * 3, torch.arange(70) * 71 - 1
    for cap in (None, 5.0):
        check(
            lambda x, y: kernels.token_stats(x, y, scale=1.4, cap=cap),
            lambda x, y: row_ops.token_stats(x, y, 1.4, cap),
            logits, labels, rtol=1e-5, atol=1e-5,
        )
        check(
            lambda x, y: kernels.partial_token_stats(x, y, scale=1.4, cap=cap, start=2000).T,
            lambda x, y: row_ops.partial_token_stats(x, y, 1.4, cap, 2000).T,
            logits, labels, rtol=1e-5, atol=1e-5,
        )
    logits[:, 300:600], logits[5, :] = float("-inf"), float("-inf")
    for width in (5000, 100):
        for cap in (None, 5.0):
            check(
                lambda x: kernels.block_mass(x, scale=1.4, cap=cap, block=256),
                lambda x: row_ops.block_mass(x, 1.4, cap, 256),
                logits[:, :width].contiguous(), rtol=1e-5, atol=1e-5,
            )
    check(kernels.mean, row_ops.mean, x, **near)
    # A row that does not begin at a multiple of 16 bytes is copied to one that does.
    shifted = torch.randn(201).to(dtype)[1:][None]
    assert shifted.data_ptr() % 16 and kernels._aligned(shifted).data_ptr() % 16 == 0
out = torch.empty(3, 150)
assert kernels.matmul(torch.ones(3, 200), torch.ones(200, 150), None, out=out) is out and out.eq(200).all()
out = torch.empty(3, 150)
kernels.few_rows(torch.ones(3, 200), [torch.ones(150, 200)], [], None, outs=[out])
assert out.eq(200).all()
assert kernels.few_rows(torch.ones(0, 8), [torch.ones(4, 8)], [], None)[0].shape == (0, 4)
assert kernels.matmul(torch.ones(0, 8), torch.ones(8, 4), None).shape == (0, 4)
assert kernels.rms_norm(torch.ones(0, 8), torch.ones(8), 1e-6, unit_offset=False).shape == (0, 8)
assert kernels.standardise(torch.ones(0, 8), 1e-6).shape == (0, 8)
assert kernels.mean(torch.ones(0, 8)).shape == (0,)
assert kernels.block_mass(torch.ones(0, 300), scale=1.0, cap=None, block=256).shape == (0, 2)
assert kernels.token_stats(torch.ones(0, 8), torch.ones(0).long(), scale=1.0, cap=None)[0].shape == (0,)
print("kernels agree")
"""


@pytest.mark.slow
def test_the_kernels_under_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0 and "kernels agree" in done.stdout, done.stderr
