"""The gated delta rule in chunks, over documents, equals one token after the other."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from lockstep.ops.delta_rule import Heads, chunked, convolve, delta_net, step

HEADS = Heads(keys=2, values=4, key_dim=6, value_dim=5)
CHANNELS = 2 * 2 * 6 + 4 * 5
LENGTHS = (3, 70, 1, 130, 40)
"""One begins in the middle of a chunk, one is longer than two, several are in one."""


def inputs(dtype=torch.float64, strong=3.0):
    generator = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)

    def normal(*shape):
        return torch.randn(shape, dtype=dtype, generator=generator)

    decay = -strong * torch.rand(tokens, 4, dtype=dtype, generator=generator)
    beta = torch.rand(tokens, 4, dtype=dtype, generator=generator)
    documents = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    return normal(tokens, CHANNELS), normal(CHANNELS, 4), decay, beta, documents


def one_by_one(x, weight, decay, beta):
    """Of each document alone: the convolution by F.conv1d, then `step`."""
    outs, ends = [], [0, *itertools.accumulate(LENGTHS)]
    for start, stop in itertools.pairwise(ends):
        own = F.pad(x[start:stop].t()[None], (3, 0))
        mixed = F.silu(F.conv1d(own, weight[:, None], groups=CHANNELS))[0].t()
        state = x.new_zeros(1, 4, 6, 5)
        for t in range(stop - start):
            at = slice(start + t, start + t + 1)
            out, state = step(mixed[t : t + 1], decay[at], beta[at], state, HEADS)
            outs.append(out)
    return torch.cat(outs), state[0]


def test_chunks_over_documents_equal_one_token_after_the_other():
    x, weight, decay, beta, documents = inputs()
    theirs, last = one_by_one(x, weight, decay, beta)
    ours, state = chunked(convolve(x, weight, documents), decay, beta, documents, HEADS)
    torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=0)
    torch.testing.assert_close(state, last, atol=1e-11, rtol=0)


def test_the_op_has_their_gradients():
    *tensors, documents = inputs()
    ours, theirs = ([t.clone().requires_grad_() for t in tensors] for _ in range(2))
    sizes = (HEADS.keys, HEADS.values, HEADS.key_dim, HEADS.value_dim)
    out = delta_net(*ours, documents, *sizes)
    grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    out.backward(grad)
    one_by_one(*theirs)[0].backward(grad)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-10, rtol=0)
    options = {"test_utils": ("test_schema", "test_faketensor", "test_autograd_registration")}
    torch.library.opcheck(delta_net, (*ours, documents, *sizes), **options)


def test_a_document_keeps_its_digits_behind_one_that_decays_fast():
    """The sums of decays over a chunk reach -6,000; those of a document that begins in it do not."""
    x, weight, decay, beta, documents = inputs(torch.float32, strong=200.0)
    decay[documents > 0] /= 1000.0
    exact = chunked(
        convolve(x.double(), weight.double(), documents), decay.double(), beta.double(), documents, HEADS
    )[0]
    ours = chunked(convolve(x, weight, documents), decay, beta, documents, HEADS)[0]
    assert ours.isfinite().all()
    assert (ours - exact)[documents == 1].abs().max() <= 1e-6 * exact.abs().max() * 10


def test_one_token_by_hand():
    """q = k = (1, 0), v = 3, beta 0.5: the state is 1.5 k; then a decay of ln 2 halves it, and the same token
    corrects the half of 3 - 0.75; the query is divided by sqrt(2)."""
    heads = Heads(keys=1, values=1, key_dim=2, value_dim=1)
    mixed = torch.tensor([[2.0, 0.0, 2.0, 0.0, 3.0]] * 2)
    decay, beta = torch.tensor([[0.0], [-0.6931472]]), torch.full((2, 1), 0.5)
    out, state = chunked(mixed, decay, beta, torch.zeros(2, dtype=torch.int64), heads)
    assert out.flatten().tolist() == pytest.approx([1.5 / 2**0.5, 1.875 / 2**0.5], rel=1e-5)
    assert state.flatten().tolist() == pytest.approx([1.875, 0.0], rel=1e-5)
    # Each a document of its own: the same number twice.
    out, _ = chunked(mixed, decay, beta, torch.tensor([0, 1]), heads)
    assert out.flatten().tolist() == pytest.approx([1.5 / 2**0.5] * 2, rel=1e-5)


def test_a_convolution_begins_anew_by_hand():
    x, weight = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[10.0, 1.0]])
    whole = convolve(x, weight, torch.tensor([0, 0, 0]))
    assert whole.flatten().tolist() == pytest.approx(F.silu(torch.tensor([1.0, 12.0, 23.0])).tolist())
    cut = convolve(x, weight, torch.tensor([0, 1, 1]))
    assert cut.flatten().tolist() == pytest.approx(F.silu(torch.tensor([1.0, 2.0, 23.0])).tolist())
