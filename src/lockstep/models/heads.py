"""The language-model head of a causal LM, as data."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from lockstep.errors import ModelError
from lockstep.models.causal_lm import causal_lm, text_config


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """logits = softcap(logit_scale * (hidden @ weight.T + bias)), softcap(x) = cap * tanh(x / cap)."""

    weight: Tensor
    """[V, C]; the Parameter itself, tied or not."""
    bias: Tensor | None
    """[V]."""
    softcap: float | None
    logit_scale: float


def head_of(module: nn.Module) -> Head:
    """The head of a supported causal LM.

    Raises:
        ModelError: the output embedding is no plain linear.
    """
    linear = causal_lm(module).get_output_embeddings()
    if not isinstance(linear, nn.Linear):
        raise ModelError(
            f"the head of {type(module).__name__} is a {type(linear).__name__}, not a plain linear; leave "
            "lm_head out of model.lora.target_modules"
        )
    config = text_config(module)
    return Head(
        weight=linear.weight,
        bias=linear.bias,
        softcap=getattr(config, "final_logit_softcapping", None),
        logit_scale=1.0,
    )
