"""The language-model head of a causal LM, as data."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from lockstep.errors import ModelError
from lockstep.invariant.modules import head_kernels
from lockstep.models.architectures import option
from lockstep.models.causal_lm import causal_lm, text_config
from lockstep.ops.logprobs import HeadOptions
from lockstep.ops.vocab_parallel import VocabShard


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
            "plain linear; leave lm_head out of model.lora.target_modules",
            name=type(linear).__name__,
        )
    config = text_config(module)
    return Head(
        weight=linear.weight,
        bias=linear.bias,
        softcap=option(config, "final_logit_softcapping"),
        logit_scale=1.0,
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
        ModelError: the output embedding is no plain linear, or is converted and split over ranks.
    """
    head = head_of(module)
    linear = causal_lm(module).get_output_embeddings()
    kernels = head_kernels(linear) if isinstance(linear, nn.Linear) else None
    if kernels is not None and vocab is not None:
        raise ModelError(
            "unsupported-combination: lm_head is split over ranks, and a sum over ranks is not "
            "batch-invariant; set train.tp = 1, or train.batch_invariant = false",
            setting="train.tp",
        )
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
