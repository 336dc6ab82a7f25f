"""The next token of each row, as tensor operations: what a CUDA graph can hold.

The draw is `lockstep.engine.sampling`'s: Gumbel-max over blocks of the vocabulary, then inside of the block.
Here a block's mass stays a logarithm, so that the logits are read once and no copy of them in float32 is
written.

R rows, V vocabulary, BLOCK entries of a block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from lockstep.engine.sampling import BLOCK, ENTRY_COUNTER, noise_keys, uniform
from lockstep.invariant import row_ops
from lockstep.ops.logprobs import HeadOptions


def choose(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    head: HeadOptions,
    *,
    invariant: bool = False,
    compiled: bool = False,
) -> Tensor:
    """Tokens [R] int64, drawn from softmax(scaled(logits)).

    Args:
        logits: [R, V], any floating dtype.
        seeds: [R] int64, as of `noise_keys`.
        positions: [R] int64, as of `noise_keys`.
        invariant: the mass of blocks is bitwise that of a row alone, as logprobs are; on CUDA neither
            ATen's sums nor a compiler's promise it.
        compiled: the draw is a few kernels and not a hundred; without `invariant`, the pass over the logits
            goes through torch.compile as well.
    """
    mass = block_mass(logits, head, invariant=invariant, compiled=compiled)
    keys = (_compiled(noise_keys, dynamic=True) if compiled else noise_keys)(seeds, positions)
    # From outside of what is compiled: inductor would fold a constant of 64 bits into an index of 32.
    counting = torch.arange(max(mass.shape[1], BLOCK), device=logits.device)
    if not compiled:
        return _drawn(mass, logits, keys, counting, *_factors(head))
    return _compiled(_drawn, dynamic=True)(mass, logits, keys, counting, *_tensors(head, logits))


def _drawn(  # what a compiler sees of a draw
    mass: Tensor,
    logits: Tensor,
    keys: Tensor,
    counting: Tensor,
    factor: float | Tensor,
    cap: float | Tensor | None,
) -> Tensor:
    """The tokens of `choose`, of the logarithms of the blocks' masses; `counting` is 0, 1, 2, ..."""

    def exponential(counters: Tensor) -> Tensor:
        return uniform(keys, counters).log().neg()

    block = (mass - exponential(counting[: mass.shape[1]]).log()).argmax(-1, keepdim=True)
    entries = block * BLOCK + counting[:BLOCK]
    last = logits.shape[1] - 1
    # The last block may reach beyond the vocabulary; such entries are masked in the next line.
    inner = _scaled(logits.gather(-1, entries.clamp(max=last)), factor, cap)
    inner = inner.masked_fill(entries > last, float("-inf"))
    within = (inner - exponential(entries + ENTRY_COUNTER).log()).argmax(-1, keepdim=True)
    return (block * BLOCK + within).squeeze(-1).clamp(max=last)  # NaN anywhere: still a token


def block_mass(
    logits: Tensor, head: HeadOptions, *, invariant: bool = False, compiled: bool = False
) -> Tensor:
    """[R, M] float32: the logarithm of each block's mass, before normalisation."""
    if invariant:
        mass: Tensor = row_ops.block_mass(logits, head.scale, head.cap, BLOCK)
        return mass
    if not compiled:
        return _block_mass(logits, *_factors(head))
    return _compiled(_block_mass, dynamic=False)(logits, *_tensors(head, logits))


def _tensors(head: HeadOptions, logits: Tensor) -> list[Tensor | None]:
    """`_factors` as tensors, as a compiler makes a graph for each number; filled, as a CUDA graph cannot copy
    from a host."""
    return [
        None if x is None else torch.full((), x, dtype=torch.float32, device=logits.device)
        for x in _factors(head)
    ]


def scaled(logits: Tensor, head: HeadOptions) -> Tensor:
    """The float32 argument of softmax, bitwise the trainer's."""
    return _scaled(logits, *_factors(head))


def _factors(head: HeadOptions) -> tuple[float, float | None]:
    """The factor of the logits, and the soft cap of the product."""
    return (head.scale, None) if head.cap is None else (head.scale / head.cap, head.cap)


def _block_mass(logits: Tensor, factor: float | Tensor, cap: float | Tensor | None) -> Tensor:
    return row_ops.log_mass(_scaled(logits, factor, cap), BLOCK)


def _scaled(logits: Tensor, factor: float | Tensor, cap: float | Tensor | None) -> Tensor:
    x = logits.float() * factor
    return x if cap is None else torch.tanh(x) * cap


@functools.cache
def _compiled(function: Callable[..., Tensor], *, dynamic: bool) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=dynamic, fullgraph=True)
