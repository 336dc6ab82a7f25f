"""The generation skeleton: the trainer's layers over the trainer's Parameters, attending to the KV cache.

Shapes as in lockstep.schema.batch: T tokens, C hidden size, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import invariant
from lockstep.attention.cached import store_and_attend
from lockstep.attention.varlen import enable_cpu_reference
from lockstep.engine.native.kv_cache import KVCache, KVShape
from lockstep.execution import compile_blocks, decoder_layers
from lockstep.models.causal_lm import causal_lm, text_config
from lockstep.models.heads import head_of
from lockstep.models.load import share_parameters

IMPLEMENTATION = "lockstep_native"
"""Name in transformers' AttentionInterface. It has no mask function, so transformers builds no masks for
it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionMetadata:
    """Where the tokens of a forward are in the KV cache: the arguments of lockstep.attention.cached besides
    the caches."""

    slots: Tensor
    """[T] int64."""
    cu_q: Tensor
    """[D + 1] int32."""
    starts: Tensor
    """[D + 1] int32."""
    used: Tensor
    """[D] int32."""
    max_q: int
    max_k: int
    decode: bool


class Layers:
    """Embedding, decoder layers and final norm of a causal LM."""

    def __init__(self, module: nn.Module, *, dtype: torch.dtype, compiled: bool) -> None:
        _register()
        self.module = share_parameters(module, attention=f"hf:{IMPLEMENTATION}")
        self.invariant = invariant.is_converted(module)
        if self.invariant:
            invariant.convert(self.module)
        self.layers = decoder_layers(self.module)
        self._decoder: Any = causal_lm(self.module).get_decoder()
        config = text_config(self.module)
        # Gemma 3 has another rotation for each kind of layer
        self._kinds: tuple[str, ...] | None = (
            tuple(config.layer_types) if config.model_type == "gemma3_text" else None
        )
        self.weight = head_of(self.module).weight
        self.vocab_size = self.weight.shape[0]
        attention: Any = self.layers[0].self_attn
        self.shape = KVShape(
            layers=len(self.layers),
            heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            dtype=dtype,
            device=self.weight.device,
        )
        if self.shape.device.type == "cpu":
            enable_cpu_reference()  # before any layer is traced: a compiled layer cannot register ops
        if compiled:
            options = invariant.inductor_options() if self.invariant else None
            compile_blocks(self.module, options=options)

    def run(
        self, token_ids: Tensor, positions: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> Tensor:
        """[1, T, C] of [T] tokens, before the final norm; writes their keys and values into the cache."""
        hidden: Tensor = self._decoder.embed_tokens(token_ids[None])
        rotation = self._rotations(hidden, positions[None])
        for index, layer in enumerate(self.layers):
            # Not the decoder's forward: its keyword arguments are the same for all layers, and each layer has
            # a part of the cache of its own.
            hidden = layer(
                hidden,
                attention_mask=None,
                position_embeddings=rotation[None if self._kinds is None else self._kinds[index]],
                keys=kv_cache.keys[index],
                values=kv_cache.values[index],
                slots=metadata.slots,
                cu_q=metadata.cu_q,
                starts=metadata.starts,
                used=metadata.used,
                max_q=metadata.max_q,
                max_k=metadata.max_k,
                decode=metadata.decode,
            )
        return hidden

    def norm(self, hidden: Tensor) -> Tensor:
        """The final norm: [T, C] of `run`'s result, what the head is applied to."""
        normed: Tensor = self._decoder.norm(hidden)
        return normed[0]

    def _rotations(self, hidden: Tensor, positions: Tensor) -> dict[str | None, tuple[Tensor, Tensor]]:
        rotary = self._decoder.rotary_emb
        if self._kinds is None:
            return {None: rotary(hidden, positions)}
        return {kind: rotary(hidden, positions, kind) for kind in dict.fromkeys(self._kinds)}


def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, _attention)


def _attention(  # signature: transformers' AttentionInterface
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    cu_q: Tensor,
    starts: Tensor,
    used: Tensor,
    max_q: int,
    max_k: int,
    decode: bool,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, N, T, H], key and value [1, K, T, H] -> [1, T, N, H]; the rest is what `Layers.run` passes
    on."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = store_and_attend(
        q, k, v, keys, values, slots, cu_q, starts, used, max_q, max_k, scaling, sliding_window, decode
    )
    return out[None], None
