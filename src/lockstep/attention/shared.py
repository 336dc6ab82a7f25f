"""Keys and values that several documents share: gathered per document, their gradients added up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor


class SharedKeys(TypedDict):
    """What attention needs to know of `SharedRows`, as a compiled graph takes it: tensors and ints by
    name."""

    keys: Tensor
    """These three are fields of SharedRows, [S], [S] and [R + 1] int64."""
    order: Tensor
    ends: Tensor
    cu_keys: Tensor
    max_keys: int


@dataclass(frozen=True, slots=True)
class Keys:
    """Where each document's keys are, if they are not its rows."""

    cu_keys: Tensor
    """[D_cap + 1] int32."""
    max_keys: int
    """No document has more."""
    lengths: tuple[int, ...] | None
    """The host's copy of the lengths, as `lengths` is of the queries'."""


def gather(k: Tensor, v: Tensor, shared: SharedKeys) -> tuple[Tensor, Tensor]:
    """k and v [R, K, H] of rows -> [S, K, H]. The gradients of a row that is several documents' key are added
    up in float32, in the order of the documents: the same bits every time."""
    index, order, ends = shared["keys"], shared["order"], shared["ends"]
    return _gathered(k, index, order, ends), _gathered(v, index, order, ends)


@torch.library.custom_op("lockstep::shared_keys", mutates_args=())
def _gathered(x: Tensor, index: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    return x.index_select(0, index)


@_gathered.register_fake
def _(x: Tensor, index: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(index.shape[0], *x.shape[1:])


@torch.library.custom_op("lockstep::shared_key_grads", mutates_args=())
def _added_up(grad: Tensor, index: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    exact = grad.to(torch.float64 if grad.dtype == torch.float64 else torch.float32)
    if grad.device.type == "cpu":  # one key after the other; segment_reduce is ten times slower there
        sums = exact.new_zeros(ends.shape[0] - 1, *grad.shape[1:]).index_add_(0, index, exact)
    else:  # index_add_ on CUDA adds up in any order
        parts = exact.index_select(0, order).flatten(1)
        sums = torch.segment_reduce(parts, "sum", offsets=ends, initial=0).unflatten(1, grad.shape[1:])
    return sums.to(grad.dtype)


@_added_up.register_fake
def _(grad: Tensor, index: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    return grad.new_empty(ends.shape[0] - 1, *grad.shape[1:])


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return _added_up(grad, *ctx.saved_tensors), None, None, None


_gathered.register_autograd(_backward, setup_context=_keep)
