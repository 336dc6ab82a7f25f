"""Names of weights in published folders, where transformers computes with others: the experts of a layer are
two three-dimensional Parameters, and in files a matrix or two for each expert."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from lockstep.models.architectures import causal_lm, is_moe, text_config

_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def as_published(bare: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under the names that save_pretrained writes.

    Args:
        bare: the model that they are of; its own weights are not read.
    """
    if not is_moe(text_config(bare)):
        return dict(tensors)
    # In transformers 5.17 to 5.23 it is what save_pretrained itself calls.
    published = revert_weight_conversion(bare, dict(tensors))
    return {name: tensor.contiguous() for name, tensor in published.items()}


def published_pieces(module: nn.Module) -> dict[str, list[list[str]]]:
    """Return the Parameters that files have under other names: of each index of the first dimension the names
    of the matrices whose rows it has, in order. A Parameter that is only renamed has one list of one name.

    Example:
        published_pieces(mixtral)["model.layers.0.mlp.experts.gate_up_proj"][3] == [
            "model.layers.0.block_sparse_moe.experts.3.w1.weight",
            "model.layers.0.block_sparse_moe.experts.3.w3.weight",
        ]
    """
    if not is_moe(text_config(module)):
        return {}
    found: dict[str, list[list[str]]] = {}
    for name, parameter in module.named_parameters():
        meta = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        names = [*as_published(causal_lm(module), {name: meta})]
        if names == [name]:
            continue
        pieces: dict[int, list[str]] = {}
        for published in names:
            match = _EXPERT.search(published)
            pieces.setdefault(int(match.group(1)) if match else 0, []).append(published)
        found[name] = [pieces[index] for index in sorted(pieces)]
    return found
