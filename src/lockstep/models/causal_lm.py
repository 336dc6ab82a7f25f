"""Attributes that transformers' causal LMs share and nn.Module does not declare."""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


def causal_lm(module: nn.Module) -> PreTrainedModel:
    """Return the module typed as PreTrainedModel; fields that hold a policy's module are typed nn.Module."""
    return cast(PreTrainedModel, module)


def hf_config(module: nn.Module) -> PretrainedConfig:
    """Return the module's whole config."""
    return cast(PretrainedConfig, module.config)


def text_config(module: nn.Module) -> Any:
    """Return the config of the module's decoder: for multimodal models a part of the whole config."""
    return hf_config(module).get_text_config()


def checkpoint_activations(module: nn.Module) -> None:
    """Recompute each layer's activations in backward, in train mode only: logprobs and an engine that shares
    the module do not pay for it."""
    # In older transformers it goes by the older name only.
    enable = getattr(module, "activation_checkpointing_enable", None)
    # Not reentrant: that needs an input with a gradient, and with LoRA the first layer's has none.
    (enable or causal_lm(module).gradient_checkpointing_enable)({"use_reentrant": False})
