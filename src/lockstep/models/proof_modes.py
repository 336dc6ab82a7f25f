"""The rows of a proof beyond the forward: other heads, adapters, and other ways to run the same modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from lockstep import attention, invariant
from lockstep.config.model import LoraConfig
from lockstep.errors import ModelError
from lockstep.execution import compile_blocks
from lockstep.models.architectures import architecture_of, caps_scores
from lockstep.models.forward import hidden_states
from lockstep.models.heads import SCORE_WEIGHT, linear_values, scalar_head, with_one_label
from lockstep.models.lora import add_lora
from lockstep.models.miniature import random_miniature
from lockstep.models.proof_rows import (
    Corpus,
    Figures,
    Gap,
    compare,
    corpora,
    eager_figures,
    figures,
    fresh,
    kernels_of,
    largest_gap,
    sample,
)
from lockstep.packing import pack

_LORA = LoraConfig(rank=2, alpha=4.0, target_modules=("all-linear",))


def invariant_gaps(small: PretrainedConfig) -> list[Gap]:
    """Measure the batch-invariant form: against eager, and packed against alone, which must be equal bits.

    Raises:
        ModelError: a part has no batch-invariant form.
    """
    if caps_scores(small):
        raise ModelError(
            f"not-batch-invariant: {small.model_type} caps its scores, and no row-invariant form of such "
            "attention is known; set train.batch_invariant = false"
        )
    own, _ = corpora()
    module = _converted(small)
    packed = _packed(module, own)
    alone = figures(module, own, [(i,) for i in range(len(own.ids))], {})
    lengths = [len(ids) for ids in own.ids]
    bits = largest_gap("batch-invariant, packed", packed.logprobs, alone.logprobs, lengths)
    return [
        *compare("batch-invariant", packed, eager_figures(small, own), own),
        dataclasses.replace(bits, allowed=0.0, reference="alone"),
    ]


def _converted(small: PretrainedConfig) -> nn.Module:
    module = random_miniature(small, attention=attention.implementation("varlen"))
    invariant.convert(module)
    return module


def lora_gaps(small: PretrainedConfig) -> list[Gap]:
    """Measure adapters of all linears, packed: logprobs, and the adapters' gradients."""
    own, _ = corpora()
    truth = eager_figures(small, own, prepare=_with_lora)
    module = random_miniature(small, attention=attention.implementation("sdpa"))
    _with_lora(module)
    return compare("packed, with LoRA", _packed(module, own), truth, own)


def _with_lora(module: nn.Module) -> None:
    add_lora(module, _LORA, seed=0)
    with torch.no_grad():  # peft's B is zero at first, and the gradient of A with it
        for name, parameter in module.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(len(name)))


def value_gaps(small: PretrainedConfig) -> list[Gap]:
    """Measure a head of one number per token, packed, against transformers' sequence classifier.

    Raises:
        ModelError: transformers has none for this architecture.
    """
    own, _ = corpora()
    with_one_label(small := type(small).from_dict(small.to_dict()))
    try:
        stock = random_miniature(small, attention="eager", head="scalar")
    except ValueError as error:  # transformers' "Unrecognized configuration class"
        raise ModelError(
            f"unsupported-model: transformers has no sequence classifier for {small.model_type!r}, so it has "
            "no value or reward model"
        ) from error
    module = random_miniature(small, attention=attention.implementation("sdpa"), head="scalar")
    head = scalar_head(module)
    if head is None or SCORE_WEIGHT not in dict(module.named_parameters()):
        raise ModelError(
            f"unsupported-model: the head of {type(module).__name__} is not at {SCORE_WEIGHT}, so it can be "
            "no value or reward model"
        )
    samples = [sample(i, own) for i in range(len(own.ids))]
    with torch.inference_mode():
        batch = pack(samples, [torch.ones(len(sample)) for sample in samples])
        every = torch.ones(batch.num_slots, dtype=torch.bool)
        values = linear_values(hidden_states(module, batch), head.weight, every)
        ours = [one[-1:] for one in batch.split(values)]
        model: Any = stock
        theirs = [
            fresh(model)(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0] for ids in own.ids
        ]
    gap = largest_gap("packed, value head", ours, theirs, [len(ids) for ids in own.ids])
    return [dataclasses.replace(gap, what=gap.what.replace("logprob of a token", "value of the last token"))]


def compiled_gaps(small: PretrainedConfig) -> list[Gap]:
    """Measure compiled layers, packed.

    Raises:
        ModelError: runs of this model are never compiled.
    """
    if architecture_of(small) is None:
        raise ModelError(f"unsupported-model: {small.model_type} has no record, and such models train eager")
    own, _ = corpora()
    module = random_miniature(small, attention=attention.implementation(kernels_of(small)[-1]))
    compile_blocks(module)
    return compare("packed, compiled", _packed(module, own), eager_figures(small, own), own)


def bfloat16_gaps(small: PretrainedConfig) -> list[Gap]:
    """Measure bfloat16, packed: its mean distance from float32 is at most twice that of eager bfloat16."""
    own, _ = corpora()
    truth = eager_figures(small, own)
    stock = eager_figures(small, own, prepare=lambda module: module.to(torch.bfloat16))
    module = random_miniature(small, attention=attention.implementation("sdpa")).to(torch.bfloat16)
    ours, theirs = _distance(_packed(module, own), truth), _distance(stock, truth)
    return [
        Gap(
            way="packed, bfloat16",
            what="the logprobs' mean distance from float32",
            ours=ours,
            theirs=theirs,
            size=ours / theirs,
            allowed=2.0,
        )
    ]


def _distance(some: Figures, truth: Figures) -> float:
    gaps = [(a - b).abs() for a, b in zip(some.logprobs, truth.logprobs, strict=True)]
    return float(torch.cat(gaps).mean())


def _packed(module: nn.Module, corpus: Corpus) -> Figures:
    return figures(module, corpus, [tuple(range(len(corpus.ids)))], {})


MODES: dict[str, Callable[[PretrainedConfig], list[Gap]]] = {
    "value head": value_gaps,
    "LoRA": lora_gaps,
    "batch-invariant": invariant_gaps,
}
"""Name of a part of the proof -> what measures it. A run without the mode needs none of them."""
SLOW_MODES: dict[str, Callable[[PretrainedConfig], list[Gap]]] = {
    "compiled": compiled_gaps,
    "bfloat16": bfloat16_gaps,
}
