"""The next token of each row, as tensor operations: what a CUDA graph can hold.

The draw is `lockstep.engine.noise`'s: Gumbel-max over blocks of the vocabulary, then inside of the block.
Here a block's mass stays a logarithm, so that the logits are read once and no copy of them in float32 is
written.

R rows, V vocabulary, BLOCK entries of a block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.noise import BLOCK, ENTRY_COUNTER, exponential
from lockstep.ops.logprobs import HeadOptions


def choose(logits: Tensor, keys: Tensor, head: HeadOptions, *, compiled: bool = False) -> Tensor:
    """Tokens [R] int64, drawn from softmax(scaled(logits)).

    Args:
        logits: [R, V], any floating dtype.
        keys: [R] int64, from `noise_keys`.
        compiled: the pass over the logits through torch.compile.
    """
    mass = (_compiled if compiled else _eager)(_block_mass)(logits, head.scale, head.cap)
    counters = torch.arange(mass.shape[1], device=keys.device)
    block = (mass - exponential(keys, counters).log()).argmax(-1, keepdim=True)
    entries = block * BLOCK + torch.arange(BLOCK, device=keys.device)
    last = logits.shape[1] - 1
    inner = scaled(logits.gather(-1, entries.clamp(max=last)), head)
    inner = inner.masked_fill(entries > last, float("-inf"))
    within = (inner - exponential(keys, entries + ENTRY_COUNTER).log()).argmax(-1, keepdim=True)
    return (block * BLOCK + within).squeeze(-1).clamp(max=last)  # NaN anywhere: still a token


def _block_mass(logits: Tensor, scale: float, cap: float | None) -> Tensor:
    """[R, M] float32: the logarithm of each block's mass, before normalisation."""
    x = _scaled(logits, scale, cap)
    x = F.pad(x, (0, -x.shape[1] % BLOCK), value=float("-inf")).view(x.shape[0], -1, BLOCK)
    peak = x.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)  # a block may be all -inf
    return (x - peak).exp().sum(-1).log() + peak.squeeze(-1)


def scaled(logits: Tensor, head: HeadOptions) -> Tensor:
    """What softmax is applied to, float32."""
    return _scaled(logits, head.scale, head.cap)


def _scaled(logits: Tensor, scale: float, cap: float | None) -> Tensor:
    x = logits.float()
    return x * scale if cap is None else torch.tanh(x * (scale / cap)) * cap


def _eager(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return function


@functools.cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=False, fullgraph=True)
