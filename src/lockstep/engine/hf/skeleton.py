"""The generation skeleton: a second module over the trainer's Parameters, how its logits are computed, and
its linears on a CPU."""

from __future__ import annotations

import functools
import platform

import torch
from torch import Tensor, nn

from lockstep.engine.hf.kv_cache import IMPLEMENTATION, SampleCache, register_attention
from lockstep.models.causal_lm import causal_lm
from lockstep.models.heads import head_of
from lockstep.models.load import share_parameters

_ROWS_HINT = 64
"""Rows the layout of packed linears is chosen for; any number of rows is computed correctly."""


class Skeleton:
    """The decoder and the head of a causal LM, with attention over a SampleCache."""

    def __init__(self, module: nn.Module) -> None:
        register_attention()
        self.module = share_parameters(module, attention=f"hf:{IMPLEMENTATION}")
        self._decoder: nn.Module = causal_lm(self.module).get_decoder()
        self._output: nn.Module = causal_lm(self.module).get_output_embeddings()
        self._head = head_of(self.module)
        self.linears = PackedLinears(self.module)
        self.vocab_size: int = self._head.weight.shape[0]
        self.device: torch.device = self._head.weight.device

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


def can_pack(weight: Tensor) -> bool:
    """Whether packing makes linears over this weight faster: bfloat16 on an x86 CPU whose oneDNN computes in
    bfloat16."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and platform.machine() in ("x86_64", "AMD64")
        and torch.backends.mkldnn.is_available()
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


class PackedLinears:
    """Linears with pre-arranged weights, for bfloat16 generation on x86 CPUs.

    Symptom: `F.linear` on CPU rearranges a bfloat16 weight into oneDNN's blocked layout at every call, which
    for the few rows of a decode step is a large part of its time. torch has the operators
    (`torch.ops.mkldnn`, used by Inductor's freezing pass, torch/_inductor/fx_passes/mkldnn_fusion.py) but no
    public call.
    Remove when torch caches the layout itself, or has a public packed linear.

    The arranged copy costs the memory of the weights once more. It is made anew when a weight has changed.
    """

    def __init__(self, module: nn.Module) -> None:
        self._linears = [m for m in module.modules() if type(m) is nn.Linear and can_pack(m.weight)]
        self._weights: dict[int, Tensor] = {}
        self._versions: list[tuple[int, int]] = []
        for linear in self._linears:
            linear.forward = functools.partial(self._forward, linear)  # type: ignore[method-assign]

    def refresh(self) -> None:
        """Arrange the weights if any of them was changed in place since the last time."""
        versions = [(m.weight.data_ptr(), m.weight._version) for m in self._linears]
        if versions == self._versions:
            return
        self.clear()
        with torch.no_grad():
            for linear in self._linears:
                packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS_HINT)
                self._weights[id(linear)] = packed
        self._versions = versions

    def clear(self) -> None:
        """Free the memory; the linears work without arranged weights too, only slower."""
        self._weights.clear()
        self._versions = []

    def _forward(self, linear: nn.Linear, x: Tensor) -> Tensor:
        packed = self._weights.get(id(linear))
        if packed is None:
            return nn.functional.linear(x, linear.weight, linear.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, linear.bias, "none", [], "")
        return out
