"""The generation skeleton: a second module over the trainer's Parameters, and how its logits are computed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lockstep.engine.hf import cached_attention
from lockstep.engine.hf.kv_cache import SampleCache
from lockstep.engine.hf.packed_linear import PackedLinears
from lockstep.models.causal_lm import causal_lm
from lockstep.models.heads import head_of
from lockstep.models.load import share_parameters


class Skeleton:
    """The decoder and the head of a causal LM, with attention over a SampleCache."""

    def __init__(self, module: nn.Module) -> None:
        cached_attention.register()
        self.module = share_parameters(module, attention=f"hf:{cached_attention.IMPLEMENTATION}")
        self._decoder: nn.Module = causal_lm(self.module).get_decoder()
        self._output: nn.Module = causal_lm(self.module).get_output_embeddings()
        self._head = head_of(self.module)
        self.linears = PackedLinears(self.module)
        self.vocab_size: int = self._head.weight.shape[0]

    @property
    def device(self) -> torch.device:
        return self._head.weight.device

    def hidden_states(self, token_ids: Tensor, positions: Tensor, cache: SampleCache) -> Tensor:
        """[T, C] of [T] tokens; `cache.plan` says what they are."""
        out = self._decoder(
            input_ids=token_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            past_key_values=cache,
            use_cache=True,
            sample_cache=cache,
        )
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, V] of [R, C], in the compute dtype; float32 when the model scales or caps its logits."""
        logits: Tensor = self._output(hidden)
        if self._head.logit_scale != 1.0:
            logits = logits.float() * self._head.logit_scale
        if self._head.softcap is not None:
            logits = torch.tanh(logits.float() / self._head.softcap) * self._head.softcap
        return logits
