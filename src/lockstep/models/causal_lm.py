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
