"""transformers' models, typed and kept quiet."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, cast

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging as hf_logging


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


# Keep transformers quiet while files are read.


@contextlib.contextmanager
def silence_transformers() -> Iterator[None]:
    """Silence progress bars and warnings of transformers inside, and restore its settings afterwards.

    Where accelerate and DeepSpeed are installed, save_pretrained imports DeepSpeed, whose logger writes to
    standard output that there is no GPU.
    """
    deepspeed = logging.getLogger("DeepSpeed")
    # A filter, because DeepSpeed sets its logger's level when it is imported, which may be inside.
    deepspeed.addFilter(_is_error)
    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        deepspeed.removeFilter(_is_error)
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
