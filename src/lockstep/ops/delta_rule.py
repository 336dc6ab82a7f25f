"""The gated delta rule and the causal convolution before it, over documents laid end to end.

A head's state S [H, D] maps keys to values. Each token lets it decay, corrects what it says of the token's
key, and reads it with the token's query:

    S = exp(g) S,   S = S + beta k (v - k S),   out = q S / sqrt(H)

with q and k of length 1 (Yang, Kautz, Hatamizadeh: Gated Delta Networks, 2024, equation 10). At the first
token of a document S is zero, and the convolution sees zeros before it. `chunked` computes all tokens, by
products over chunks of 64; `step` computes one more token. The two round differently.

T tokens, N heads of queries and keys of size H, M heads of values of size D (a multiple of N, each query head
serves M / N neighbours), C channels of the convolution: queries, keys and values side by side.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
_EPSILON = 1e-6  # of the lengths of queries and keys, as in fla's l2norm


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """The heads of a layer, by which the channels of its convolution are cut."""

    keys: int
    """N."""
    values: int
    """M."""
    key_dim: int
    """H."""
    value_dim: int
    """D."""


def convolve(x: Tensor, weight: Tensor, documents: Tensor) -> Tensor:
    """silu of the causal convolution of each channel: [T, C] in the dtype of x.

    Args:
        x: [T, C].
        weight: [C, W]; the last column is of the token itself.
        documents: [T], equal within a document, and different from its neighbours.
    """
    wide, taps = x.to(_wide(x)), weight.to(_wide(x))
    total = wide * taps[:, -1]
    for back in range(1, min(weight.shape[1], x.shape[0])):
        same = (documents[back:] == documents[:-back])[:, None]
        earlier = torch.where(same, wide[:-back], 0.0) * taps[:, -1 - back]
        total = total + F.pad(earlier, (0, 0, back, 0))
    return F.silu(total).to(x.dtype)


def chunked(  # signature: the rule's
    mixed: Tensor, decay: Tensor, beta: Tensor, documents: Tensor, heads: Heads
) -> tuple[Tensor, Tensor]:
    """Return out [T, M, D] in the dtype of `mixed`, and the state [M, H, D] behind the last token.

    Args:
        mixed: [T, C], after the convolution.
        decay: [T, M]: g, at most 0.
        beta: [T, M].
        documents: [T], as of `convolve`.
    """
    tokens, missing = mixed.shape[0], -mixed.shape[0] % CHUNK
    q, k, v = (_in_chunks(x, missing) for x in split_heads(mixed, heads))
    beta, decay = (_in_chunks(x.to(q.dtype)[..., None], missing) for x in (beta, decay))
    # Added rows belong to the last document, and leave its state as it is.
    ids = F.pad(documents[None], (0, missing), mode="replicate")[0] if missing else documents
    ids = ids.view(-1, CHUNK)
    previous = F.pad(ids[:-1, -1], (1, 0), value=-1)[:, None]
    continued, last = ids == previous, ids == ids[:, -1:]
    pairs = (ids[:, :, None] == ids[:, None]).tril()
    total = _sums_within(decay[..., 0], ids)  # [M, chunks, CHUNK]

    def decayed(exponent: Tensor, where: Tensor) -> Tensor:
        # Masked before exp, which would overflow elsewhere.
        return exponent.masked_fill(~where, float("-inf")).exp()

    between = decayed(total[..., :, None] - total[..., None, :], pairs)
    since = decayed(total, continued)[..., None]
    until = decayed(total[..., -1:] - total, last)[..., None]
    across = decayed(total[..., -1], continued[:, -1])[..., None, None]
    kb = k * beta
    system = (kb @ k.mT) * between
    values = torch.linalg.solve_triangular(system, v * beta, upper=False, unitriangular=True)
    removed = torch.linalg.solve_triangular(system, kb * since, upper=False, unitriangular=True)
    inside, q, k = (q @ k.mT) * between, q * since, k * until
    state = q.new_zeros(q.shape[0], q.shape[-1], v.shape[-1])
    out = []
    for chunk in range(q.shape[1]):
        new = values[:, chunk] - removed[:, chunk] @ state
        out.append(q[:, chunk] @ state + inside[:, chunk] @ new)
        state = state * across[:, chunk] + k[:, chunk].mT @ new
    return torch.cat(out, 1)[:, :tokens].transpose(0, 1).to(mixed.dtype), state


def step(mixed: Tensor, decay: Tensor, beta: Tensor, state: Tensor, heads: Heads) -> tuple[Tensor, Tensor]:
    """Return out [R, M, D] and the new states [R, M, H, D] of one more token of each of R documents.

    Args:
        mixed: [R, C], after the convolution; decay and beta: [R, M], as of `chunked`.
        state: [R, M, H, D].
    """
    q, k, v = split_heads(mixed, heads)
    state = state * decay.to(q.dtype).exp()[..., None, None]
    correction = (v - (k[..., None] * state).sum(-2)) * beta.to(q.dtype)[..., None]
    state = state + k[..., None] * correction[..., None, :]
    return (q[..., None] * state).sum(-2).to(mixed.dtype), state


def split_heads(mixed: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys [T, M, H] and values [T, M, D] of [T, C], in float32 or wider; the first two of
    length 1, and queries divided by sqrt(H)."""
    key_sizes = heads.keys * heads.key_dim
    q, k, v = mixed.to(_wide(mixed)).split((key_sizes, key_sizes, heads.values * heads.value_dim), -1)
    q, k = (_normed(x.unflatten(-1, (heads.keys, heads.key_dim))) for x in (q, k))
    group = heads.values // heads.keys
    q, k = (x.repeat_interleave(group, -2) for x in (q * heads.key_dim**-0.5, k))
    return q, k, v.unflatten(-1, (heads.values, heads.value_dim))


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPSILON)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _in_chunks(x: Tensor, missing: int) -> Tensor:
    """[T, M, ...] -> [M, chunks, CHUNK, ...], padded with zeros."""
    rows: Tensor = F.pad(x, (0, 0, 0, 0, 0, missing)).transpose(0, 1)
    return rows.reshape(rows.shape[0], -1, CHUNK, rows.shape[-1])


def _sums_within(decay: Tensor, ids: Tensor) -> Tensor:
    """The sum of the decays of a document's tokens in a chunk, up to each: [M, chunks, CHUNK].

    In float64, because the difference of two sums over a chunk would lose digits that a document which begins
    in it has alone.
    """
    begins = F.pad(ids[:, 1:] != ids[:, :-1], (1, 0))
    places = torch.arange(CHUNK, device=ids.device)
    first = torch.where(begins, places, 0).cummax(-1).values.expand(decay.shape)
    exact = decay.double()
    sums = exact.cumsum(-1)
    before = sums.gather(-1, first) - exact.gather(-1, first)
    return (sums - before).to(decay.dtype)


# Convolution and rule as one op, opaque to a compiler, which would unroll the loop over chunks. Its backward
# computes them again: kept are its inputs, not the matrices of every chunk.


@torch.library.custom_op("lockstep::delta_net", mutates_args=())
def delta_net(  # signature: an op takes tensors and numbers, no records
    x: Tensor,
    weight: Tensor,
    decay: Tensor,
    beta: Tensor,
    documents: Tensor,
    keys: int,
    values: int,
    key_dim: int,
    value_dim: int,
) -> Tensor:
    """out [T, M, D] of x [T, C] before the convolution; arguments as of `convolve`, `chunked` and Heads."""
    heads = Heads(keys=keys, values=values, key_dim=key_dim, value_dim=value_dim)
    return _both(x, weight, decay, beta, documents, heads).contiguous()


def _both(x: Tensor, weight: Tensor, decay: Tensor, beta: Tensor, documents: Tensor, heads: Heads) -> Tensor:
    return chunked(convolve(x, weight, documents), decay, beta, documents, heads)[0]


@delta_net.register_fake
def _fake(x: Tensor, *arguments: Any) -> Tensor:
    *_, values, _, value_dim = arguments
    return x.new_empty(x.shape[0], values, value_dim)


@torch.library.custom_op("lockstep::delta_net_backward", mutates_args=())
def _delta_net_backward(  # signature: the op's
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    decay: Tensor,
    beta: Tensor,
    documents: Tensor,
    keys: int,
    values: int,
    key_dim: int,
    value_dim: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    heads = Heads(keys=keys, values=values, key_dim=key_dim, value_dim=value_dim)
    function = functools.partial(_both, documents=documents, heads=heads)
    # Not autograd.grad: an op runs below autograd, which vjp alone turns on again.
    backward: Any = torch.func.vjp(function, x, weight, decay, beta)[1]
    grads: tuple[Tensor, ...] = backward(grad)
    return grads[0].contiguous(), grads[1].contiguous(), grads[2].contiguous(), grads[3].contiguous()


@_delta_net_backward.register_fake
def _backward_fake(grad: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:4])


def _context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.keys, ctx.values, ctx.key_dim, ctx.value_dim = inputs[5:]
    ctx.save_for_backward(*inputs[:5])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    sizes = (ctx.keys, ctx.values, ctx.key_dim, ctx.value_dim)
    return (*_delta_net_backward(grad, *ctx.saved_tensors, *sizes), *(None,) * 5)


delta_net.register_autograd(_backward, setup_context=_context)
