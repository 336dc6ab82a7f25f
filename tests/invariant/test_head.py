"""Row-invariant logits and figures through lockstep.ops.logprobs."""

import itertools

import pytest
import torch
from invariant_models import normal, tiny

from lockstep import invariant
from lockstep.invariant import row_ops
from lockstep.models.heads import head_options
from lockstep.ops.logprobs import (
    HeadKernels,
    HeadOptions,
    head_logits,
    linear_logprob_loss,
    linear_logprobs,
    merged_stats,
    row_stats,
)


@pytest.fixture(autouse=True)
def no_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def converted(dtype=torch.float32, **changes):
    module = tiny("llama", dtype, **changes)
    invariant.convert(module)
    return module


def head_of(module, **changes):
    return head_options(module, temperature=0.7, compiled=False, **changes)


def test_options_of_a_stock_module():
    head = head_of(tiny("llama", torch.float32), entropy_grad=True)
    assert head == HeadOptions(temperature=0.7, entropy_grad=True)


def test_options_of_a_converted_module():
    head = head_of(converted())
    assert head.kernels is not None and head.temperature == 0.7


@pytest.mark.parametrize("cap", [None, 5.0])
def test_figures_of_parts_are_merged_in_order(cap):
    """Of three parts, any of which may have the label: the figures of the whole, whatever the rows."""
    logits, labels = normal(251, 256) * 3, torch.arange(251) * 7 % 256
    labels[3] = -100
    cuts = [0, 85, 171, 256]

    def merged(rows):
        parts = [
            row_ops.partial_token_stats(logits[rows, a:b].contiguous(), labels[rows], 1.4, cap, a)
            for a, b in itertools.pairwise(cuts)
        ]
        return merged_stats(torch.stack(parts), labels[rows])

    whole = merged(slice(None))
    for found, expected in zip(whole, row_ops.token_stats(logits, labels, 1.4, cap), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for rows in (slice(0, 1), slice(3, 4), slice(7, 24), slice(250, 251)):
        assert all(torch.equal(a, b[rows]) for a, b in zip(merged(rows), whole, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logprobs_do_not_depend_on_the_chunk_nor_on_the_rows(dtype):
    module = converted(dtype)
    weight, head = module.lm_head.weight.detach(), head_of(module)
    hidden, labels = normal(251, 64, dtype=dtype), torch.arange(251) * 7 % 256
    every = linear_logprobs(hidden, weight, labels, head=head)
    for rows in (1, 3, 64, 200):
        part = linear_logprobs(hidden[7 : 7 + rows], weight, labels[7 : 7 + rows], head=head)
        assert all(torch.equal(a, b[7 : 7 + rows]) for a, b in zip(part, every, strict=True))
    chunked = HeadOptions(temperature=0.7, kernels=head.kernels, chunk_rows=31)
    _, logprobs, entropy = linear_logprob_loss(
        hidden.requires_grad_(), weight, labels, lambda lp, ent, rows: lp.sum(), head=chunked
    )
    assert torch.equal(logprobs, every[0]) and torch.equal(entropy, every[1])
    # What an engine calls, one token at a time.
    for row in (0, 100):
        out = torch.empty(1, 256, dtype=dtype)
        logits = head_logits(hidden[row : row + 1].detach(), weight, head, out)
        assert logits is out
        assert row_stats(logits, labels[row : row + 1], head)[0].equal(every[0][row : row + 1])


def test_the_kernels_are_what_computes():
    """The CPU's figures are those of the stock code, so equal numbers would not show it."""

    def logits(hidden, weight, bias, out):
        return out.fill_(2.0)

    def stats(logits, labels, scale, cap):
        assert logits.eq(2.0).all() and (scale, cap) == (1 / 0.7, 30.0 / 0.7)
        return tuple(labels + each for each in (0.25, 0.5, 0.75))

    head = HeadOptions(
        temperature=0.7, softcap=30.0, kernels=HeadKernels(logits=logits, stats=stats, partial=stats)
    )
    labels = torch.tensor([1, 2])
    with torch.no_grad():
        logprobs, entropy = linear_logprobs(normal(2, 4), normal(8, 4), labels, head=head)
    assert logprobs.tolist() == [1.25, 2.25] and entropy.tolist() == [1.5, 2.5]
    found = linear_logprob_loss(normal(2, 4), normal(8, 4), labels, lambda lp, ent, rows: lp.sum(), head=head)
    assert [x.tolist() for x in found] == [3.5, [1.25, 2.25], [1.5, 2.5]]


def test_gradients_are_those_of_the_stock_head():
    module = converted()
    labels = torch.arange(40) * 7 % 256
    found = []
    for head in (head_of(module), HeadOptions(temperature=0.7)):
        hidden = normal(40, 64).requires_grad_()
        weight = module.lm_head.weight.detach().clone().requires_grad_()
        logprobs, entropy = linear_logprobs(hidden, weight, labels, head=head)
        (logprobs.sum() + 0.1 * entropy.sum()).backward()
        found.append((logprobs, entropy, hidden.grad, weight.grad))
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


def test_a_head_with_bias():
    module = tiny("llama", torch.float32)
    module.lm_head.bias = torch.nn.Parameter(normal(256))
    invariant.convert(module)
    head = head_of(module)
    hidden = normal(9, 64)
    logits = head_logits(hidden, module.lm_head.weight, head, torch.empty(9, 256))
    torch.testing.assert_close(logits, hidden @ module.lm_head.weight.t() + module.lm_head.bias)
    assert torch.equal(
        head_logits(hidden[4:5], module.lm_head.weight, head, torch.empty(1, 256)), logits[4:5]
    )
