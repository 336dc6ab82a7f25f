"""The policy of a suite's worker."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.config.model import ModelConfig
from lockstep.loop.resolve import resolve_attention
from lockstep.models.architectures import silence_transformers
from lockstep.models.dtypes import resolve_dtype
from lockstep.models.load import LoadedModel, load_model


def load_policy(
    config: ModelConfig, attention: str, *, device: torch.device, **options: Any
) -> tuple[LoadedModel, str]:
    """Load a model; return it and what `attention` resolved to.

    Args:
        options: of load_model.
    """
    dtype = str(resolve_dtype(config.dtype, device)).removeprefix("torch.")
    attention = resolve_attention(attention, device=device.type, dtype=dtype)
    with silence_transformers():
        return load_model(config, attention=attention, device=device, **options), attention
