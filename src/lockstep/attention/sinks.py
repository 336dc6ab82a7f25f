"""Flash attention with a sink for each head: a score that is in the sum of the softmax and has no value.

With the ordinary kernel's out O and log-sum-exp lse, and the sink's score s,

    O' = O sigmoid(lse - s),   lse' = log(exp(lse) + exp(s)),   ds = -sum over rows exp(s - lse') (dO . O')

and dq, dk and dv are what the ordinary backward makes of dO, O' and lse': its probabilities are
exp(scores - lse'), and its rowsum(dO . O') is the whole gradient's. Not through the kernel's own autograd,
which drops the gradient of lse.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_flash = torch.ops.aten._flash_attention_forward
_flash_backward = torch.ops.aten._flash_attention_backward
# torch 2.11 has no such argument, and never splits the keys of packed documents.
NO_SPLITS: dict[str, Any] = (
    {"num_splits": 1} if any(a.name == "num_splits" for a in _flash.default._schema.arguments) else {}
)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """O' in the dtype of out [T, N, H], of lse [N, T] and sinks [N]; a row without keys gets zeros."""
    # By exp, which is the same in vectors and tails on a CPU; torch.sigmoid is not.
    weight = torch.exp(sinks.to(lse.dtype)[:, None] - _finite(lse)).add_(1.0).reciprocal_()
    return (out * weight.t()[:, :, None]).to(out.dtype)


def _finite(lse: Tensor) -> Tensor:
    """Without keys CUDA's kernel says +inf, others -inf."""
    return torch.where(lse == float("inf"), float("-inf"), lse)


@torch.library.custom_op("lockstep::sink_attention", mutates_args=())
def sink_attention(  # signature: an op takes tensors and numbers, no records
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float | None,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """q [T, N, H], k and v [S, K, H], sinks [N] -> out [T, N, H], lse' [N, T]; causal, documents as in
    lockstep.attention. Rows of no document are undefined."""
    out, lse, *_ = _flash(
        q, k, v, cu_q, cu_k, max_q, max_k, 0.0, True, False, **_options(scale, window), **NO_SPLITS
    )
    total = torch.logaddexp(_finite(lse), sinks.to(lse.dtype)[:, None])
    # The kernels lay their results out as q is, which after GPT-OSS's rotation is not contiguous.
    return with_sinks(out, lse, sinks).contiguous(), total.contiguous()


def _options(scale: float | None, window: int | None) -> dict[str, Any]:
    left, right = (None, None) if window is None else (window - 1, 0)
    return {"scale": scale, "window_size_left": left, "window_size_right": right}


@sink_attention.register_fake
def _fake(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(
        (q.shape[1], q.shape[0]), dtype=wide
    )


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, cu_q, cu_k, ctx.max_q, ctx.max_k, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(q, k, v, sinks, cu_q, cu_k, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 10
    sizes = (ctx.max_q, ctx.max_k, ctx.scale, ctx.window)
    return (*_sink_backward(grad.contiguous(), *ctx.saved_tensors, *sizes), *(None,) * 6)


@torch.library.custom_op("lockstep::sink_attention_backward", mutates_args=())
def _sink_backward(  # signature: the op's
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    out: Tensor,
    lse: Tensor,
    max_q: int,
    max_k: int,
    scale: float | None,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the sinks."""
    # The random state of dropout, which is off.
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    dq, dk, dv = _flash_backward(
        grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, 0.0, True, *unused, **_options(scale, window)
    )
    dots = (grad * out.to(lse.dtype)).sum(-1).t()
    share = -torch.exp(sinks.to(lse.dtype)[:, None] - lse) * dots
    # Rows of no document are uninitialised memory: masked, not multiplied.
    covered = torch.arange(q.shape[0], device=q.device) < cu_q[-1]
    dsinks = torch.where(covered, share, 0.0).sum(1).to(sinks.dtype)
    return dq.contiguous(), dk.contiguous(), dv.contiguous(), dsinks


@_sink_backward.register_fake
def _backward_fake(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, sinks))


sink_attention.register_autograd(_backward, setup_context=_context)
