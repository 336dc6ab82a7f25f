"""Names of weights in published folders, where transformers computes with others: the experts of a layer are
two three-dimensional Parameters, and in files a matrix or two for each expert, or blocks of four-bit
numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from lockstep.errors import ModelError
from lockstep.models.architectures import architecture_of, causal_lm, is_moe, text_config

_EXPERT = re.compile(r"\.experts\.(\d+)\.")

BLOCKS, SCALES = "_blocks", "_scales"
"""What the names of a Parameter's two tensors end in, in MXFP4."""
# The sign, two bits of exponent and one of mantissa, in the order of their bits.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BIAS = 127


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the weights [E, K, N] float32 of MXFP4 tensors; all are exact in bfloat16.

    Source: OCP Microscaling Formats (MX) 1.0: 32 numbers E2M1 share a scale E8M0.

    Args:
        blocks: [E, N, K / 32, 16] uint8, two numbers in each, the first in the low bits.
        scales: [E, N, K / 32] uint8, exponents of 2 plus 127.
    """
    pairs = torch.stack((blocks & 0x0F, blocks >> 4), -1).flatten(-2)
    values = torch.tensor(_FP4).index_select(0, pairs.flatten().int()).view(pairs.shape)
    return torch.ldexp(values, scales.int()[..., None] - _BIAS).flatten(-2).transpose(1, 2)


def quant_method(config: PretrainedConfig) -> str:
    """How the weights in a config's folder are quantised, such as "mxfp4"; empty: they are not."""
    quantised: Any = getattr(config, "quantization_config", None)
    if quantised is None:
        return ""
    return str(quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised)


def forget_quantisation(config: PretrainedConfig, *, name: str) -> None:
    """Make a config that of the dequantised model, in place, which is what is trained and exported.

    Args:
        name: ModelConfig.name, for errors.

    Raises:
        ModelError: such weights are not dequantised.
    """
    if not (method := quant_method(config)):
        return
    record = architecture_of(config)
    if record is None or method not in record.dequantised:
        raise ModelError(
            f"unsupported-model: model.name = {name!r} has quantised weights ({method}), which cannot be "
            "trained; use the original, unquantised model"
        )
    del config.quantization_config


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
