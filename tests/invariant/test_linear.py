"""lockstep::linear and bmm: row tiles, bits, gradients against float64."""

import pytest
import torch
import torch.nn.functional as F
from invariant_models import normal

from lockstep.invariant import dependence
from lockstep.invariant.cases import equal_tiles
from lockstep.invariant.row_ops import TILES, bmm, linear, spans

DTYPES = [torch.float32, torch.bfloat16]
# Odd widths too: vectors and blocks of GEMM kernels then end in the middle of a row.
SHAPES = [(64, 64), (160, 64), (50, 96), (259, 33), (576, 1536)]


def tiles_here(weight, bias=None):
    """The tiles that the self-test keeps for this weight on this CPU: MKL held to AVX2 computes rows of small
    tiles in another order."""
    return equal_tiles(normal(128, weight.shape[1], dtype=weight.dtype), weight, bias)


def test_spans_cover_every_row_once():
    assert spans(0, (8,)) == []
    assert spans(3, (16, 8)) == [(0, 8)]
    assert spans(16, (16, 8)) == [(0, 16)]
    assert spans(150, (128, 16, 8)) == [(0, 128), (128, 16), (144, 8)]
    assert spans(30, (8, 16)) == [(0, 16), (16, 8), (24, 8)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_rows_are_independent(shape, dtype, bias):
    weight = normal(*shape, dtype=dtype)
    offset = normal(shape[0], dtype=dtype) if bias else None
    tiles = tiles_here(weight, offset)
    assert dependence(lambda x: linear(x, weight, offset, tiles), normal(251, shape[1], dtype=dtype)) is None


def test_the_ordinary_linear_is_caught():
    """Were F.linear invariant on this machine, this op would not be needed here."""
    weight = normal(576, 1536)
    found = dependence(lambda x: F.linear(x, weight), normal(251, 1536))
    assert found is not None and found.startswith("the first 1 of 251 rows alone: ")


def test_a_product_of_one_row_is_caught():
    """The last rows as matrix-vector products: what tiles are for."""
    weight = normal(576, 1536)
    assert dependence(lambda x: linear(x, weight, None, (8, 1)), normal(251, 1536)) is not None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients_against_float64(dtype):
    weight, bias, x, dy = (normal(*s, dtype=dtype) for s in ((50, 96), (50,), (3, 15, 96), (3, 15, 50)))
    wide = [t.double().requires_grad_() for t in (x, weight, bias)]
    expected = F.linear(*wide)
    expected.backward(dy.double())
    for exact in (False, True):
        narrow = [t.clone().requires_grad_() for t in (x, weight, bias)]
        out = linear(*narrow, TILES, exact)
        out.backward(dy)
        rtol, atol = (2**-7, 2**-4) if dtype == torch.bfloat16 else (1e-5, 1e-4)
        torch.testing.assert_close(out.double(), expected.detach(), rtol=rtol, atol=atol)
        for left, right in zip(narrow, wide, strict=True):
            assert left.grad.dtype == dtype
            torch.testing.assert_close(left.grad.double(), right.grad, rtol=rtol, atol=atol)


def test_exact_backward_gives_a_row_the_same_gradient_alone_and_among_many():
    weight = normal(50, 1536)
    tiles = tiles_here(weight.t().contiguous())

    def dx(exact):
        def gradient(x, dy):
            x = x.requires_grad_()
            with torch.enable_grad():
                return torch.autograd.grad(linear(x, weight, None, tiles, exact), x, dy)[0]

        return gradient

    rows = normal(251, 1536), normal(251, 50)
    assert dependence(dx(True), *rows) is None
    assert dependence(dx(False), *rows) is not None


def test_no_gradient_is_made_for_a_frozen_weight():
    x, weight = normal(9, 64).requires_grad_(), normal(32, 64)
    linear(x, weight, None, TILES).sum().backward()
    assert x.grad is not None and weight.grad is None


def test_no_rows():
    assert linear(normal(0, 64), normal(32, 64), None, TILES).shape == (0, 32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bmm(dtype):
    x, y = normal(3, 40, 96, dtype=dtype), normal(3, 96, 50, dtype=dtype)
    wide = x.double().requires_grad_(), y.double().requires_grad_()
    narrow = x.clone().requires_grad_(), y.clone().requires_grad_()
    tiles = tiles_here(y[0].t())
    out = bmm(*narrow, tiles)
    expected = wide[0] @ wide[1]
    out.sum().backward()
    expected.sum().backward()
    rtol, atol = (2**-7, 2**-3) if dtype == torch.bfloat16 else (1e-5, 1e-4)
    for left, right in ((out, expected), (narrow[0].grad, wide[0].grad), (narrow[1].grad, wide[1].grad)):
        torch.testing.assert_close(left.double(), right, rtol=rtol, atol=atol)
    for batch in range(3):
        assert dependence(lambda rows, b=batch: bmm(rows[None], y[b : b + 1], tiles)[0], x[batch]) is None
    assert torch.equal(bmm(x[:1, 5:6], y[:1], tiles), out[:1, 5:6])


def test_registrations():
    """Fake, autograd and aliasing rules agree with what the ops do."""
    x, weight, bias = normal(9, 64), normal(32, 64), normal(32)
    torch.library.opcheck(linear, (x.requires_grad_(), weight.requires_grad_(), bias, TILES))
    torch.library.opcheck(bmm, (normal(2, 9, 16).requires_grad_(), normal(2, 16, 8), TILES))
