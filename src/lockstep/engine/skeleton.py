"""The generation skeleton: a second module over the trainer's Parameters, and how its logits are made."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.engine import cached_attention
from lockstep.engine.cache import SampleCache
from lockstep.engine.packed_linear import PackedLinears


class Skeleton:
    """The decoder and the head of a causal LM, with attention over a SampleCache."""

    def __init__(self, module: nn.Module) -> None:
        cached_attention.register()
        shared = {id(t): t for t in (*module.parameters(), *module.buffers())}
        self.module: Any = copy.deepcopy(module, memo=dict(shared)).eval()
        config = self.module.config
        config._attn_implementation = cached_attention.IMPLEMENTATION
        self._decoder = self.module.get_decoder()
        self._head = self.module.get_output_embeddings()
        text = config.get_text_config()
        self._softcap: float | None = getattr(text, "final_logit_softcapping", None)
        self._scale = float(getattr(text, "logit_scale", None) or 1.0) / float(
            getattr(text, "logits_scaling", None) or 1.0
        )
        self.linears = PackedLinears(self.module)
        self.vocab_size: int = self._head.weight.shape[0]

    @property
    def device(self) -> torch.device:
        return self._head.weight.device  # type: ignore[no-any-return]

    def hidden_states(self, token_ids: Tensor, positions: Tensor, cache: SampleCache) -> Tensor:
        """[T, C] of [T] tokens; `cache.plan` says what they are."""
        out = self._decoder(
            input_ids=token_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            past_key_values=cache,
            use_cache=True,
            sample_cache=cache,
        )
        return out.last_hidden_state[0]  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, V] of [R, C], in the compute dtype unless the model scales or caps its logits (then float32)."""
        logits: Tensor = self._head(hidden)
        if self._scale != 1.0:
            logits = logits.float() * self._scale
        if self._softcap is not None:
            logits = torch.tanh(logits.float() / self._softcap) * self._softcap
        return logits
