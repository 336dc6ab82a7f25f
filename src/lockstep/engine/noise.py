"""The noise of a sample: a pure function of (seed, position), and sampling with it.

Gumbel-max draws `argmax_i (z_i + g_i)` with independent Gumbel g_i, which has the distribution softmax(z).
Done literally it needs one noise value per vocabulary entry and token. Here it is done twice over blocks of
BLOCK entries:

    block = argmax_b (log sum_{i in b} exp z_i + g_b)        one value per block
    token = argmax_{i in block} (z_i + g_i)                  one value per entry of that block

P(token) = P(block) * P(token | block) = softmax(z)[token] exactly, with V / BLOCK + BLOCK values instead of V
(448 instead of 49152 for SmolLM2). Like plain Gumbel-max, a small change of the logits changes the token only
at a near tie.

The values come from SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators") as
a counter-based hash of (seed, position, counter): integer arithmetic, the same on every device, and torch's
generators are neither read nor advanced. Block b has counter b; vocabulary entry i has counter 2**32 + i.
`-log(u)` with u uniform in (0, 1) at 53 bits is exponential, and argmin_i e_i / p_i is argmax_i (log p_i +
g_i).
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256
"""Vocabulary entries per block. Part of the definition of the noise: another value gives other samples."""

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_POSITION = 0xD1342543DE82EF95 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
ENTRY_COUNTER = 1 << 32
"""Vocabulary entry i has the counter ENTRY_COUNTER + i."""


def noise_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """The 64-bit key of each (seed, position).

    Args:
        seeds: [R] int64.
        positions: [R] int64, >= 0; the index that the sampled token will have in prompt + completion.

    Returns:
        [R] int64.
    """
    return _mix(_mix(seeds + _GOLDEN) + (positions + 1) * _POSITION)


def exponential(keys: Tensor, counters: Tensor) -> Tensor:
    """Independent Exp(1) values, one per (key, counter): [R, M] float64, > 0. Arguments as of `uniform`."""
    return uniform(keys, counters).log_().neg_()


def uniform(keys: Tensor, counters: Tensor) -> Tensor:
    """Independent uniform values, one per (key, counter). Every operation is exact, so that a compiler may
    fuse them.

    Args:
        keys: [R] int64, from `noise_keys`.
        counters: [M] or [R, M] int64, >= 0.

    Returns:
        [R, M] float64, in (0, 1).
    """
    bits = _mix(keys.unsqueeze(-1) + (counters + 1) * _GOLDEN)
    bits.bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1)
    return bits.to(torch.float64).add_(0.5).mul_(2.0**-53)


def sample_blocks(weights: Tensor, keys: Tensor) -> Tensor:
    """One token per row, with probability proportional to its weight.

    Args:
        weights: [R, M * BLOCK] float32, >= 0, a positive sum per row; zeros beyond the vocabulary.
        keys: [R] int64, from `noise_keys`.

    Returns:
        [R] int64.
    """
    blocks = weights.unflatten(-1, (-1, BLOCK))
    mass = blocks.sum(-1)
    counters = torch.arange(mass.shape[1], device=keys.device)
    block: Tensor = (mass / exponential(keys, counters)).argmax(-1)
    inner = blocks[torch.arange(len(keys), device=keys.device), block]
    entries = block.unsqueeze(-1) * BLOCK + torch.arange(BLOCK, device=keys.device)
    within: Tensor = (inner / exponential(keys, entries + ENTRY_COUNTER)).argmax(-1)
    return block * BLOCK + within


def _mix(state: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place. The masks make int64's arithmetic shift a logical one."""
    state.bitwise_xor_((state >> 30).bitwise_and_((1 << 34) - 1)).mul_(_MIX_1)
    state.bitwise_xor_((state >> 27).bitwise_and_((1 << 37) - 1)).mul_(_MIX_2)
    return state.bitwise_xor_((state >> 31).bitwise_and_((1 << 33) - 1))
