"""What transformers' causal LMs have in common and nn.Module does not declare."""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


def causal_lm(module: nn.Module) -> PreTrainedModel:
    """The same module, as the type checker should see it; what holds a policy's module says nn.Module."""
    return cast(PreTrainedModel, module)


def hf_config(module: nn.Module) -> PretrainedConfig:
    """The module's whole config."""
    return cast(PretrainedConfig, module.config)


def text_config(module: nn.Module) -> Any:
    """The config of the module's decoder: the config itself, but for models that also see or hear."""
    return hf_config(module).get_text_config()


def checkpoint_activations(module: nn.Module) -> None:
    """In train mode each layer's activations are computed again in backward: neither logprobs nor an engine
    that shares the module pays for it."""
    # In older transformers it goes by the older name only.
    enable = getattr(module, "activation_checkpointing_enable", None)
    (enable or causal_lm(module).gradient_checkpointing_enable)({"use_reentrant": False})
