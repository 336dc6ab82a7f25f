"""Our kernels as transformers attention implementations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from lockstep.attention import sdpa
from lockstep.attention.ring import Ring, ring_attention
from lockstep.config.declarations import kernels, names
from lockstep.errors import ConfigError, ModelError, unknown_name
from lockstep.ops.masks import Keys, SharedKeys, gather
from lockstep.registry import load_object

KERNELS: dict[str, Callable[..., Tensor]] = {
    name: load_object(kernel.object, what=f"attention kernel {name!r}") for name, kernel in kernels().items()
}
_MASKS: dict[str, Callable[..., Tensor | BlockMask | None]] = {
    name: load_object(kernel.mask, what=f"the mask of attention kernel {name!r}")
    for name, kernel in kernels().items()
    if kernel.mask
}
PREFIX = "lockstep_"
# transformers refuses any name with "sdpa" in it where its own sdpa cannot compute a model (sinks, caps).
_SDPA, _ITS_NAME = "sdpa", "sdp-a"


def implementation(kernel: str) -> str:
    """Register the kernel with transformers' AttentionInterface and return its name there: "varlen" ->
    "lockstep_varlen", "hf:NAME" -> "NAME", "module:function" -> "lockstep_module:function".

    Raises:
        ConfigError: there is no such kernel.
    """
    if kernel.startswith("hf:") and len(kernel) > 3:
        return kernel.removeprefix("hf:")
    if kernel not in KERNELS and ":" not in kernel:
        raise ConfigError(unknown_name("attention kernel", kernel, names("attention")), code="unknown-name")
    name = PREFIX + kernel.replace(_SDPA, _ITS_NAME)
    _register(name, kernel)
    return name


def kernel_of(name: str | None) -> str:
    """Return the kernel of a name in AttentionInterface: the inverse of `implementation`."""
    if name is not None and name.startswith(PREFIX):
        return name.removeprefix(PREFIX).replace(_ITS_NAME, _SDPA)
    return f"hf:{name or 'eager'}"


def label(kernel: str, device: torch.device, *, ring: int = 1, gathers: bool = False) -> str:
    """Return the kernel's name for reports, which marks reference kernels: their timings are not comparable.
    A ring runs varlen's kernels under either name that it takes; `gathers`: it gathers keys."""
    if ring > 1:
        name = f"{'all-gather ' if gathers else ''}ring of {ring}"
        return f"{name} (cpu reference)" if device.type == "cpu" else f"{name} {kernel}"
    return "varlen (cpu reference)" if kernel == "varlen" and device.type == "cpu" else kernel


def _register(name: str, kernel: str) -> None:
    """Register a kernel with transformers under a name; a second call does nothing.

    No mask function is registered: transformers then makes no mask at all, where a function that returns None
    would still cost it a device synchronisation per forward to look for packed documents.
    """
    from transformers import AttentionInterface

    # Private. A new closure under the same name would make layers that are compiled around it compile again.
    if name not in AttentionInterface._global_mapping:
        AttentionInterface.register(name, _adapter(kernel))


def build_mask(
    kernel: str,
    cu_seqlens: Tensor,
    *,
    num_slots: int,
    window: int | None,
    keys: Keys | None = None,
    num_keys: int | None = None,
) -> Tensor | BlockMask | None:
    """Build the mask that the layers of one forward share for one window; None for a kernel that needs only
    cu_seqlens.

    Args:
        keys: of layout shared, with the number of gathered keys.
    """
    build = _MASKS.get(kernel)
    if build is None:
        return None
    return build(cu_seqlens, num_slots=num_slots, window=window, keys=keys, num_keys=num_keys)


def _adapter(kernel: str) -> Callable[..., tuple[Tensor, None]]:
    attend = KERNELS.get(kernel) or load_object(kernel, what=f"attention kernel {kernel!r}")
    takes = frozenset(inspect.signature(attend).parameters)

    def forward(  # signature: transformers' AttentionInterface
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int = 0,
        lengths: tuple[int, ...] | None = None,
        masks: Mapping[int, Any] | None = None,
        dense: bool = False,
        shared: SharedKeys | None = None,
        key_lengths: tuple[int, ...] | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        ring: Ring | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """query [B, N, L, H], key and value [B, K, L, H] -> [B, L, N, H]; the rest is what hidden_states
        passes on."""
        if cu_seqlens is None and ring is None:
            raise ModelError(
                f"missing-values: attention kernel {kernel!r} was called without "
                "cu_seqlens; run the model through lockstep.models.forward.hidden_states, or load it with "
                "attention = 'hf:sdpa'"
            )
        # transformers passes these to every implementation, so a kernel that ignored one would compute
        # another model without a word.
        more: dict[str, Any] = {
            name: value for name, value in (("softcap", softcap), ("sinks", s_aux)) if value is not None
        }
        lacking = [name for name in more if ring is not None or name not in takes]
        if dropout or lacking:
            name = "ring" if ring is not None else kernel
            raise ModelError(
                f"unsupported-combination: attention kernel {name!r} has no "
                f"{' or '.join(lacking) or 'dropout'}, which this model needs; set train.attention = "
                "'sdpa', or 'flex' on a GPU"
            )
        if ring is not None:
            return _ring(query, key, value, ring=ring, scale=scaling, window=sliding_window), None
        mask = None if masks is None else masks[sliding_window or 0]
        if dense:
            return sdpa.dense(query, key, value, mask=mask, scale=scaling, **more).transpose(1, 2), None
        batch, length = query.shape[0], query.shape[2]
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        if shared is not None:
            k, v = gather(k, v, shared)
            more["keys"] = Keys(shared["cu_keys"], shared["max_keys"], key_lengths)
        out = attend(
            q,
            k,
            v,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            lengths=lengths,
            scale=scaling,
            window=sliding_window,
            mask=mask,
            **more,
        )
        return out.unflatten(0, (batch, length)), None

    return forward


def _ring(
    query: Tensor, key: Tensor, value: Tensor, *, ring: Ring, scale: float | None, window: int | None
) -> Tensor:
    """query [1, N, t, H], key and value [1, K, t, H] -> [1, t, N, H]."""
    if window is not None:
        raise ModelError(
            "unsupported-combination: ring attention does not support a sliding window (this layer has "
            f"{window}); set train.ring = 1"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return ring_attention(q, k, v, shard=ring.shard, group=ring.group, scale=scale)[None]
