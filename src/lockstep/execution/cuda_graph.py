"""A joint graph's forward and its backward as two CUDA graphs over static buffers: two launches for a
micro-batch, whatever the number of kernels.

The head runs between them as it always does, so a loss may be any Python function; and gradients come out of
autograd, so hooks (of DDP, of gradient accumulation) run.

    warm-up    forward and backward, twice, on a side stream
    record     forward, then backward, into the memory pool that all shapes of a decoder share
    replay     inputs are copied in; launch; hidden states are copied out
               d hidden is copied in; launch; autograd copies the gradients, because they are held here too
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from lockstep.errors import TrainError

WARM_UPS = 2


class GraphPool:
    """The memory of all CUDA graphs of one decoder: the next forward of any shape overwrites the activations
    of the last one."""

    def __init__(self) -> None:
        self.turn = 0
        self.handle: Any = None


class RecordedStep:
    """Forward and backward of one function of weights and inputs, recorded for fixed shapes and addresses.

    Args:
        function: function(*weights, *arguments) -> one tensor, differentiable by the weights.
        weights: parameters and buffers; they stay where they are.
        arguments: trees of tensors and constants; the tensors are copied.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        weights: Sequence[Tensor],
        arguments: tuple[Any, ...],
        *,
        pool: GraphPool,
    ) -> None:
        self._function, self._weights, self._pool = function, list(weights), pool
        leaves, self._spec = pytree.tree_flatten(arguments)
        self._inputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._addresses = _addresses(weights)
        # By identity: a tied weight comes under several names and has one gradient.
        self._trained = list({id(w): w for w in weights if w.requires_grad}.values())
        with torch.enable_grad():
            self._d_hidden = warm_up(self._call, self._gradients_of)
            hidden, self._replay_forward = record(self._call, pool)
            self._gradients: Sequence[Tensor | None] = ()
            if self._trained:
                self._gradients, self._replay_backward = record(lambda: self._gradients_of(hidden), pool)
        self._hidden = hidden.detach()

    def fits(self, weights: Sequence[Tensor]) -> bool:
        """Return whether the weights are at the recorded addresses."""
        return self._addresses == _addresses(weights)

    def run(self, arguments: tuple[Any, ...]) -> Tensor:
        """Return function(*weights, *arguments). Its backward must come before the next run."""
        for static, leaf in zip(self._inputs, pytree.tree_leaves(arguments), strict=True):
            if isinstance(static, Tensor):
                # On the stream of the launch below, so it is in place by then without the host waiting.
                static.copy_(leaf, non_blocking=True)
        self._pool.turn += 1
        hidden: Tensor = _Replay.apply(self, *self._trained)  # type: ignore[no-untyped-call]
        return hidden

    def _call(self) -> Tensor:
        return self._function(*self._weights, *pytree.tree_unflatten(self._inputs, self._spec))

    def _gradients_of(self, hidden: Tensor, d_hidden: Tensor | None = None) -> Sequence[Tensor | None]:
        upstream = self._d_hidden if d_hidden is None else d_hidden
        if not self._trained:
            return ()
        return torch.autograd.grad(hidden, self._trained, upstream, allow_unused=True)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: RecordedStep, *weights: Tensor) -> Tensor:
        ctx.step, ctx.turn = step, step._pool.turn
        step._replay_forward()
        # A copy: the next forward of any shape overwrites the recorded one, and a head may still read this.
        hidden: Tensor = step._hidden.clone()
        return hidden

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_hidden: Tensor) -> tuple[Tensor | None, ...]:
        step: RecordedStep = ctx.step
        if ctx.turn != step._pool.turn:
            raise TrainError(
                "wrong-state: train.cuda_graph = true: a later forward has overwritten the activations of "
                "this one; run each backward before the next forward, or set train.cuda_graph = false"
            )
        step._d_hidden.copy_(d_hidden)
        step._replay_backward()
        # The same tensors every time: autograd sees that they are held elsewhere, and copies what it keeps.
        return None, *step._gradients


def warm_up(
    forward: Callable[[], Tensor], backward: Callable[[Tensor, Tensor], Sequence[Tensor | None]]
) -> Tensor:
    """Run both twice on a side stream, as recording needs. Returns the buffer for d hidden."""
    # CUDA cannot record what a first call does once (allocate, choose kernels, load modules), and torch wants
    # the warm-up away from the default stream.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            hidden = forward()
            d_hidden = torch.zeros_like(hidden)
            backward(hidden, d_hidden)
            del hidden
    torch.cuda.current_stream().wait_stream(side)
    return d_hidden


def record(function: Callable[[], Any], pool: GraphPool) -> tuple[Any, Callable[[], None]]:
    """Record a function. Returns its result, static tensors, and a function that computes them again."""
    if pool.handle is None:
        pool.handle = torch.cuda.graph_pool_handle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.handle):
        result = function()
    return result, graph.replay


def _addresses(weights: Sequence[Tensor]) -> list[int]:
    return [weight.data_ptr() for weight in weights]
