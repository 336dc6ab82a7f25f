"""Attention over gathered keys: more keys than queries, and gradients that several documents add to."""

import pytest
import torch

from lockstep import attention
from lockstep.models.forward import _shared_inputs
from lockstep.ops.masks import Keys, gather
from lockstep.packing import pack, share
from lockstep.schema.batch import TrainSample

QUERIES, KEYS = (3, 1, 4), (3, 4, 7)
"""A prefix, and two documents that go on from it: one token, and four."""
OF_KEYS = [0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 4, 5, 6, 7]


def batch():
    lengths = (4, 7)
    samples = [
        TrainSample(token_ids=torch.tensor([1, 2, 3, *range(10 * n, 11 * n - 3)]), loss_mask=mask)
        for n in lengths
        for mask in [torch.arange(n).ge(3) & torch.arange(n).lt(n - 1)]
    ]
    return share(pack(samples, [torch.ones(n) for n in lengths]))


def inputs(dtype=torch.float64, kv_heads=2):
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 4, 8), (8, kv_heads, 8), (8, kv_heads, 8)]
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def arguments():
    return _shared_inputs("varlen", batch(), None, compiled=True).kwargs


def run(kernel, q, k, v, *, lengths=True, window=None):
    kwargs = arguments()
    k, v = gather(k, v, kwargs["shared"])
    keys = Keys(kwargs["shared"]["cu_keys"], kwargs["shared"]["max_keys"], KEYS if lengths else None)
    return attention.KERNELS[kernel](
        q,
        k,
        v,
        cu_seqlens=kwargs["cu_seqlens"],
        max_seqlen=kwargs["max_seqlen"],
        lengths=QUERIES if lengths else None,
        scale=None,
        window=window,
        keys=keys,
    )


def slow(q, k, v, window):
    """One row at a time, straight from the definition."""
    rows, first_row, first_key = [], 0, 0
    for queries, keys in zip(QUERIES, KEYS, strict=True):
        seen = OF_KEYS[first_key : first_key + keys]
        for i in range(queries):
            stop = keys - queries + i + 1
            visible = seen[0 if window is None else max(0, stop - window) : stop]
            heads = []
            for n in range(q.shape[1]):
                kv = n // (q.shape[1] // k.shape[1])
                weights = (k[visible, kv] @ q[first_row + i, n] * 8**-0.5).softmax(0)
                heads.append(weights @ v[visible, kv])
            rows.append(torch.stack(heads))
        first_row, first_key = first_row + queries, first_key + keys
    return torch.stack(rows)


def test_the_layout_that_these_tests_assume():
    shared = batch().shared
    assert (shared.row_lengths, shared.key_lengths) == (QUERIES, KEYS) and shared.keys.tolist() == OF_KEYS


@pytest.mark.parametrize("lengths", [True, False])
@pytest.mark.parametrize("window", [None, 1, 2, 50])
@pytest.mark.parametrize("kernel", ["sdpa", "varlen"])
def test_the_last_query_stands_at_the_last_key(kernel, window, lengths):
    """A causal mask of the first query at the first key, as `is_causal=True` means it, fails this."""
    q, k, v = inputs()
    out, reference = run(kernel, q, k, v, lengths=lengths, window=window), slow(q, k, v, window)
    torch.testing.assert_close(out, reference, rtol=0, atol=1e-12)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours = torch.autograd.grad((out * direction).sum(), (q, k, v))
    theirs = torch.autograd.grad((reference * direction).sum(), (q, k, v))
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [None, 2])
def test_flex_forward(window):
    q, k, v = (x.detach().float() for x in inputs())
    torch.testing.assert_close(run("flex", q, k, v, window=window), slow(q, k, v, window), rtol=0, atol=1e-6)


@pytest.mark.parametrize("window", [None, 2])
def test_varlen_gives_the_bits_of_whole_documents(window):
    q, k, v = inputs(torch.bfloat16)
    rows = batch().shared.rows
    options = {"scale": None, "window": window, "lengths": (4, 7)}
    cu = torch.tensor([0, 4, 11], dtype=torch.int32)
    whole = attention.KERNELS["varlen"](q[rows], k[rows], v[rows], cu_seqlens=cu, max_seqlen=7, **options)
    assert torch.equal(run("varlen", q, k, v, window=window)[rows], whole)


def test_gradients_of_a_shared_key_are_added_up_in_float32():
    """In bfloat16 1 + 2 ** -8 + 2 ** -8 would stay 1."""
    shared = arguments()["shared"]
    k = torch.zeros(8, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    gathered, _ = gather(k, k.detach(), shared)
    grad = torch.full((14, 1, 1), 2.0**-8, dtype=torch.bfloat16)
    grad[0] = 1.0
    (found,) = torch.autograd.grad(gathered, k, grad)
    assert found[0].item() == torch.tensor(1 + 2**-7).bfloat16().item() > 1
    assert found[1].item() == 3 * 2**-8 and found[7].item() == 2**-8
