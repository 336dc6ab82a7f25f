"""What surrounds the two CUDA graphs of a joint step: static buffers, gradients, order. The graphs themselves
are stood in for by code that runs the same functions again, into the same tensors."""

import inspect

import pytest
import torch
from raising import raises
from torch import Tensor, nn

from lockstep.errors import TrainError
from lockstep.execution import regions as cuda_graph
from lockstep.execution.regions import GraphPool, RecordedStep


def warm_up(forward, backward):
    hidden = forward()
    backward(hidden, torch.zeros_like(hidden))
    return torch.zeros_like(hidden)


def record(function, pool):
    static = function()
    pool.live = static

    def replay_forward():
        with torch.enable_grad():
            pool.live = function()
        static.data.copy_(pool.live.data)

    def replay_backward():
        step = inspect.getclosurevars(function).nonlocals["self"]
        for old, new in zip(static, step._gradients_of(pool.live), strict=True):
            old.copy_(new)

    return static, replay_forward if isinstance(static, Tensor) else replay_backward


@pytest.fixture(autouse=True)
def _by_hand(monkeypatch):
    monkeypatch.setattr(cuda_graph, "warm_up", warm_up)
    monkeypatch.setattr(cuda_graph, "record", record)


def function(weight, again, buffer, x, options):
    """The weight twice, as a tied one; a constant among the arguments."""
    return (x @ weight).tanh() @ again * buffer + options["shift"] * options["bias"]


def make(pool=None):
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(3, 3, generator=generator))
    weights = [weight, weight, torch.tensor(0.5)]
    arguments = (torch.randn(4, 3, generator=generator), {"shift": 2, "bias": torch.ones(3)})
    return weights, RecordedStep(function, weights, arguments, pool=pool or GraphPool())


def inputs(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 3, generator=generator), {"shift": 2, "bias": torch.randn(3, generator=generator)}


def test_replays_give_the_values_and_gradients_of_the_function():
    weights, step = make()
    for seed in (1, 2):
        expected = function(*weights, *inputs(seed))
        expected.square().sum().backward()
        gradient, weights[0].grad = weights[0].grad, None
        hidden = step.run(inputs(seed))
        hidden.square().sum().backward()
        assert torch.equal(hidden, expected) and torch.equal(weights[0].grad, gradient)
        weights[0].grad = None
    with torch.no_grad():
        weights[0].mul_(2.0)
        assert torch.equal(step.run(inputs(3)), function(*weights, *inputs(3)))


def test_gradients_of_several_micro_batches_add_up():
    """A gradient that autograd took without a copy would be overwritten by the next replay."""
    weights, step = make()
    expected = torch.zeros(3, 3)
    for seed in (1, 2, 3):
        step.run(inputs(seed)).square().sum().backward()
        expected += torch.autograd.grad(function(*weights, *inputs(seed)).square().sum(), weights[0])[0]
        torch.testing.assert_close(weights[0].grad, expected)


def test_a_backward_after_a_later_forward_is_an_error_for_any_shape_of_the_pool():
    pool = GraphPool()
    (_, first), (_, other) = make(pool), make(pool)
    hidden = first.run(inputs(1))
    other.run(inputs(2))
    with raises(TrainError, "wrong-state: train.cuda_graph"):
        hidden.sum().backward()


def test_weights_that_moved_do_not_fit():
    weights, step = make()
    assert step.fits(weights)
    with torch.no_grad():
        weights[0].add_(1.0)
    assert step.fits(weights)
    moved = nn.Parameter(weights[0].detach().clone())
    assert not step.fits([moved, moved, weights[2]])
