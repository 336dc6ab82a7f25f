"""flex_attention with a block mask made of document ids, causality and the window."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from lockstep.errors import TrainError
from lockstep.ops.masks import Keys, aligned_places, document_ids


def attention(  # signature: every kernel's, see lockstep.attention
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    lengths: tuple[int, ...] | None,
    scale: float | None,
    window: int | None,
    mask: BlockMask | None = None,
    keys: Keys | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """See lockstep.attention.

    Raises:
        TrainError: on a CPU with gradients; flex_attention has no CPU backward.
    """
    # torch 2.11 to 2.13 raise NotImplementedError in that case, eager and compiled, and do not say what to
    # do.
    if q.device.type == "cpu" and torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        raise TrainError(
            "missing-device: attention kernel 'flex' has no backward pass on a CPU; set train.attention = "
            "'sdpa', or 'varlen' to use its reference kernels"
        )
    if mask is None:
        mask = build_mask(cu_seqlens, num_slots=q.shape[0], window=window, keys=keys, num_keys=k.shape[0])
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    options: dict[str, Any] = {"block_mask": mask, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    if softcap is not None:
        options["score_mod"] = _cap(softcap)
    if sinks is None:
        out = _kernel(q.device.type)(q, k, v, **options)
    else:
        # Unlike varlen's, this kernel's autograd has the gradient of the log-sum-exp.
        out, aux = _kernel(q.device.type)(q, k, v, return_aux=AuxRequest(lse=True), **options)
        out = (out * torch.sigmoid(aux.lse - sinks[:, None])[..., None]).to(q.dtype)
    packed: Tensor = out[0].transpose(0, 1)
    return packed


@functools.cache
def _cap(cap: float) -> Callable[..., Tensor]:
    """The same function for all layers: compiled code is specialised to it."""

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


def build_mask(
    cu_seqlens: Tensor,
    *,
    num_slots: int,
    window: int | None,
    keys: Keys | None = None,
    num_keys: int | None = None,
) -> BlockMask:
    """Build the block mask of a pack; blocks of other documents are never computed.

    Args:
        keys: where the documents' keys are, of which there are `num_keys`; None: they are its rows.
    """
    device = str(cu_seqlens.device)
    if keys is None:
        ids = document_ids(cu_seqlens, num_slots)

        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            same = (query >= key) & (ids[query] == ids[key])
            return same if window is None else same & (query - key < window)

        return create_block_mask(visible, None, None, num_slots, num_slots, device=device)
    assert num_keys is not None
    queries, gathered = aligned_places(cu_seqlens, keys.cu_keys, num_slots=num_slots, num_keys=num_keys)

    def visible_key(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = queries.position[query] - gathered.position[key]
        same = (distance >= 0) & (queries.document[query] == gathered.document[key])
        return same if window is None else same & (distance < window)

    return create_block_mask(visible_key, None, None, num_slots, num_keys, device=device)


def _kernel(device_type: str) -> Callable[..., Any]:
    # Outside compiled code flex_attention materialises [T, T] scores: on a GPU it is always compiled.
    if device_type == "cpu" or torch.compiler.is_compiling():
        return flex_attention
    return _compiled()


@functools.cache
def _compiled() -> Callable[..., Any]:
    # Static: the lengths in a BlockMask are numbers, by which torch 2.13 specialises its graph anyway.
    return torch.compile(flex_attention, dynamic=False)
