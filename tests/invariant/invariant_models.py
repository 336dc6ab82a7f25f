"""Tiny models whose attention is row-wise: position by position, no token sees another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig

from lockstep.models.shape_table import SHAPES
from lockstep.models.shapes import random_model

ROW_WISE = "row_wise_for_tests"
_TINY = {key: value for key, value in SHAPES["tiny-qwen3"].items() if key != "model_type"}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SHAPES["tiny-llama"] | {"mlp_bias": True},
    "qwen2": _TINY | {"model_type": "qwen2", "tie_word_embeddings": False},
    "qwen3": SHAPES["tiny-qwen3"],
    "mistral": SHAPES["tiny-mistral"],
    "gemma3_text": SHAPES["tiny-gemma3"],
    "qwen3_moe": SHAPES["tiny-qwen3-moe"],
    "qwen2_moe": SHAPES["tiny-qwen2-moe"],
    "mixtral": SHAPES["tiny-mixtral"],
}
"""By model_type: every architecture that Lockstep supports."""


def row_wise(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    """Something of q, k and v that mixes no rows: q * k + v per head; [B, N, T, H] -> [B, T, N, H]."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return (query * key + value).transpose(1, 2).contiguous(), None


def tiny(model_type: str, dtype: torch.dtype, **changes: Any) -> nn.Module:
    """Random weights, biases and norm weights."""
    AttentionInterface.register(ROW_WISE, row_wise)
    config = AutoConfig.for_model(**CONFIGS[model_type] | changes)
    module = random_model(config, seed=3, dtype=dtype, device=torch.device("cpu"), attention=ROW_WISE)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.5, generator=torch.Generator().manual_seed(len(name)))
    return module.eval().requires_grad_(True)


def hidden_of(module: nn.Module, ids: Tensor, positions: Tensor) -> Tensor:
    """[T, C]: the last hidden states of T tokens."""
    base: Any = module.model
    out = base(input_ids=ids[None], position_ids=positions[None], use_cache=False, attention_mask=None)
    hidden: Tensor = out.last_hidden_state[0]
    return hidden


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal, the same for the same shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)
