from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from raising import raises
from selected import exhaustive
from torch import Tensor

from lockstep.errors import TrainError
from lockstep.ops.logprobs import HeadOptions, linear_logprob_loss, linear_logprobs, token_logprobs

R, C, V = 7, 5, 11
HEADS = {
    "plain": HeadOptions(chunk_rows=3),
    "one_chunk": HeadOptions(),
    "temperature": HeadOptions(temperature=0.7, chunk_rows=2),
    "softcap_scale_bias": HeadOptions(
        temperature=0.7, softcap=2.0, logit_scale=0.5, bias=torch.linspace(-1, 1, V), chunk_rows=3
    ),
}


def head_in(name: str, dtype: torch.dtype, **changes: object) -> HeadOptions:
    head = HEADS[name]
    bias = None if head.bias is None else head.bias.to(dtype).requires_grad_()
    return dataclasses.replace(head, bias=bias, **changes)


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(R, C, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, C, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.tensor([3, 0, -100, 10, 3, 7, -100])
    return hidden, weight, labels


def reference(hidden: Tensor, weight: Tensor, labels: Tensor, head: HeadOptions) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.t()
    logits = (logits if head.bias is None else logits + head.bias) * head.logit_scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return token_logprobs(logits, labels, temperature=head.temperature)


def quadratic(logprobs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
    """A separable loss whose gradients differ from row to row."""
    coefficients = torch.arange(1, R + 1, dtype=logprobs.dtype)[rows]
    return (coefficients * logprobs**2).sum() + (coefficients.cos() * entropy**2).sum()


def test_reference_by_hand() -> None:
    """Logits ln 1, ln 2, ln 5: p = 1/8, 2/8, 5/8. At temperature 1/2 the odds are squared: 1, 4, 25 of 30."""
    logits = torch.tensor([[1.0, 2.0, 5.0]]).log()
    logprobs, entropy = token_logprobs(logits, torch.tensor([1]))
    assert logprobs.item() == pytest.approx(math.log(1 / 4), abs=1e-6)
    by_hand = math.log(8) / 8 + math.log(4) / 4 + 5 / 8 * math.log(8 / 5)
    assert entropy.item() == pytest.approx(by_hand, abs=1e-6)
    logprobs, _ = token_logprobs(logits, torch.tensor([2]), temperature=0.5)
    assert logprobs.item() == pytest.approx(math.log(25 / 30), abs=1e-6)


@pytest.mark.parametrize("name", HEADS)
def test_linear_logprobs_and_gradients_equal_the_reference(name: str) -> None:
    hidden, weight, labels = problem()
    head = head_in(name, torch.float64)
    inputs = [x for x in (hidden, weight, head.bias) if x is not None]
    expected = reference(hidden, weight, labels, head)
    found = linear_logprobs(hidden, weight, labels, head=head)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    expected_grads = torch.autograd.grad(quadratic(*expected, slice(0, R)), inputs)
    found_grads = torch.autograd.grad(quadratic(*found, slice(0, R)), inputs)
    torch.testing.assert_close(found_grads, expected_grads, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("entropy_grad", [True, False])
def test_loss_with_gradients_in_forward_equals_the_reference(name: str, entropy_grad: bool) -> None:
    hidden, weight, labels = problem()
    head = head_in(name, torch.float64, entropy_grad=entropy_grad)
    inputs = [x for x in (hidden, weight, head.bias) if x is not None]
    logprobs, entropy = reference(hidden, weight, labels, head)
    expected = quadratic(logprobs, entropy if entropy_grad else entropy.detach(), slice(0, R))
    expected_grads = torch.autograd.grad(3.0 * expected, inputs)
    loss, *rows = linear_logprob_loss(hidden, weight, labels, quadratic, head=head)
    found_grads = torch.autograd.grad(3.0 * loss, inputs)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(rows, [logprobs.detach(), entropy.detach()], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found_grads, expected_grads, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", HEADS)
def test_finite_differences(name: str) -> None:
    hidden, weight, labels = problem()
    head = head_in(name, torch.float64, entropy_grad=True)

    def two_pass(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return linear_logprobs(hidden, weight, labels, head=head)

    assert torch.autograd.gradcheck(two_pass, (hidden, weight))


@pytest.mark.parametrize("head", [HeadOptions(chunk_rows=2), HeadOptions()])
def test_ignored_rows_may_hold_nan(head: HeadOptions) -> None:
    hidden, weight, labels = problem()
    kept = labels >= 0
    poisoned = torch.where(kept[:, None], hidden, torch.nan).detach().requires_grad_()
    loss, logprobs, entropy = linear_logprob_loss(
        poisoned, weight, labels, lambda lp, ent, rows: (lp * labels[rows]).sum(), head=head
    )
    by_hidden, by_weight = torch.autograd.grad(loss, (poisoned, weight))
    clean, _ = reference(hidden[kept], weight, labels[kept], head)
    expected = torch.autograd.grad((clean * labels[kept]).sum(), (hidden, weight))
    torch.testing.assert_close((by_hidden, by_weight), expected)
    torch.testing.assert_close(logprobs[kept], clean)
    assert not logprobs[~kept].any() and not entropy[~kept].any()
    again = linear_logprobs(poisoned, weight, labels, head=head)
    torch.testing.assert_close(torch.autograd.grad((again[0] * labels).sum(), (poisoned, weight)), expected)


def test_frozen_weight_no_rows_and_no_grad() -> None:
    hidden, weight, labels = problem()
    frozen = weight.detach()
    loss, _, _ = linear_logprob_loss(hidden, frozen, labels, quadratic, head=HeadOptions())
    loss.backward()
    expected = torch.autograd.grad(
        linear_logprobs(hidden, frozen, labels, head=HeadOptions())[0].square()
        @ torch.arange(1.0, 8).double(),
        hidden,
    )[0]
    torch.testing.assert_close(hidden.grad, expected)
    assert frozen.grad is None
    loss, logprobs, _ = linear_logprob_loss(
        hidden[:0], weight, labels[:0], lambda lp, ent, rows: lp.sum(), head=HeadOptions()
    )
    loss.backward()
    assert loss.item() == 0 and logprobs.numel() == 0 and not weight.grad.any()
    with torch.no_grad():
        loss, _, _ = linear_logprob_loss(hidden, weight, labels, quadratic, head=HeadOptions())
    assert not loss.requires_grad


def test_backward_twice_and_vector_losses_are_refused() -> None:
    hidden, weight, labels = problem()
    loss, _, _ = linear_logprob_loss(hidden, weight, labels, quadratic, head=HeadOptions())
    loss.backward(retain_graph=True)
    with raises(TrainError, "wrong-state"):
        loss.backward()
    with raises(TrainError, "wrong-shape", shape=[7]):
        linear_logprob_loss(hidden, weight, labels, lambda lp, ent, rows: lp, head=HeadOptions())


def test_bfloat16_weight_gradient_is_summed_in_float32() -> None:
    """512 chunks of one row: bf16 sums of them stop growing, float32 sums do not."""
    generator = torch.Generator().manual_seed(1)
    hidden = (1 + torch.rand(512, 4, generator=generator)).bfloat16().requires_grad_()
    weight = torch.zeros(3, 4).bfloat16().requires_grad_()
    labels = torch.zeros(512, dtype=torch.int64)
    exact = (hidden.detach().double().sum(0) / 3).expand(3, 4)
    exact = torch.stack([-2 * exact[0], exact[1], exact[2]])
    loss, _, _ = linear_logprob_loss(
        hidden, weight, labels, lambda lp, ent, rows: -lp.sum(), head=HeadOptions(chunk_rows=1)
    )
    loss.backward()
    error = (weight.grad.double() - exact).norm() / exact.norm()
    assert error < 5e-3, error


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"softcap": 0.0}, {"chunk_rows": 0}])
def test_impossible_options_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        HeadOptions(**bad)


@pytest.mark.slow
@pytest.mark.parametrize("name", exhaustive(HEADS, quick=list(HEADS)[:2]))
def test_compiled_equals_eager(name: str) -> None:
    hidden, weight, labels = problem(torch.float32)
    results = []
    for compiled in (False, True):
        head = head_in(name, torch.float32, compiled=compiled, entropy_grad=True)
        loss, *rows = linear_logprob_loss(hidden, weight, labels, quadratic, head=head)
        results.append([loss.detach(), *rows, *torch.autograd.grad(loss, (hidden, weight))])
    torch.testing.assert_close(results[1], results[0])
