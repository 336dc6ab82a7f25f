"""The language-model head of a causal LM, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig

from lockstep.errors import ModelError
from lockstep.invariant.modules import head_kernels
from lockstep.models.architectures import architecture_of, causal_lm, option, text_config
from lockstep.ops.logprobs import HeadOptions, VocabShard


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
    """Return the head of a supported causal LM.

    Raises:
        ModelError: the output embedding is no plain linear.
    """
    linear = causal_lm(module).get_output_embeddings()
    if not isinstance(linear, nn.Linear):
        raise ModelError(
            f"unsupported-model: the head of {type(module).__name__} is a {type(linear).__name__}, not a "
            "plain linear; leave lm_head out of model.lora.target_modules"
        )
    config = text_config(module)
    record = architecture_of(config)
    return Head(
        weight=linear.weight,
        bias=linear.bias,
        softcap=option(config, "final_logit_softcapping"),
        logit_scale=1.0 if record is None else record.logit_scale(config),
    )


def head_options(
    module: nn.Module,
    *,
    temperature: float,
    compiled: bool,
    entropy_grad: bool = False,
    vocab: VocabShard | None = None,
) -> HeadOptions:
    """Return the options that turn the module's logits into logprobs: one function for trainers, engines and
    tools, so that they compute the same numbers.

    Args:
        module: a supported causal LM, converted to row-invariant ops or not.
        temperature: logprobs are of logits divided by it.
        compiled: elementwise work through torch.compile.
        entropy_grad: whether the loss has an entropy term.
        vocab: which part of the vocabulary the head has; None: all of it.

    Raises:
        ModelError: the output embedding is no plain linear.
    """
    head = head_of(module)
    linear = causal_lm(module).get_output_embeddings()
    kernels = head_kernels(linear) if isinstance(linear, nn.Linear) else None
    return HeadOptions(
        temperature=temperature,
        softcap=head.softcap,
        logit_scale=head.logit_scale,
        bias=head.bias,
        compiled=compiled,
        entropy_grad=entropy_grad,
        vocab=vocab,
        kernels=kernels,
    )


# Models whose head gives one number per token: value models, and reward models that are trained.
#
# They are transformers' sequence classifiers with one label: the decoder under `model`, the head, a linear
# without bias, under `score`. So a reward model's folder is a value model's, and what is exported loads with
# AutoModelForSequenceClassification. transformers reads the score of a document at its last token; the
# trainer reads it wherever a batch says (`loss_mask`).


HeadKind = Literal["logits", "scalar"]
"""logits: a causal LM's head, [V] per token. scalar: one number per token."""
SCORE = "score"
SCORE_WEIGHT = "score.weight"


def auto_class(head: HeadKind) -> Any:
    """Return transformers' class that builds a module with this head."""
    return AutoModelForCausalLM if head == "logits" else AutoModelForSequenceClassification


def scalar_head(module: nn.Module) -> nn.Linear | None:
    """Return the head of a model with a scalar head; None: the model is a causal LM."""
    head = getattr(module, SCORE, None)
    return head if isinstance(head, nn.Linear) else None


def with_one_label(config: PretrainedConfig) -> PretrainedConfig:
    """Set, in place, that the model has one label; the name transformers gives it says nothing."""
    config.num_labels = 1
    config.id2label, config.label2id = {0: "score"}, {"score": 0}
    return config


def head_std(config: PretrainedConfig) -> float:
    """Standard deviation of a fresh head's weights: 1 / (hidden_size + 1), so that first values are small
    beside rewards of size 1 (OpenRLHF, openrlhf/models/model.py, `value_head.weight.data.normal_`)."""
    return float(1.0 / (config.get_text_config().hidden_size + 1))


def linear_values(hidden: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
    """Compute the head's output, [R] float32, 0 where mask is False: such rows may hold anything.

    Args:
        hidden: [R, C], any float dtype.
        weight: [1, C].
        mask: [R] bool.
    """
    # Masked before the product too: a NaN times a gradient of 0 would reach the weight's gradient.
    kept = hidden.masked_fill(~mask[:, None], 0.0)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return torch.where(mask, (kept.to(wide) @ weight.to(wide).T)[:, 0], 0.0)
