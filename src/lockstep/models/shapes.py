"""`shape:NAME`: named architectures with random weights and no tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from lockstep.errors import ModelError, unknown_name
from lockstep.models.architectures import architecture_of
from lockstep.models.heads import SCORE_WEIGHT, HeadKind, auto_class, head_std
from lockstep.models.shape_table import PREFIX as PREFIX
from lockstep.models.shape_table import SHAPES as SHAPES


def shape_config(name: str) -> PretrainedConfig:
    """Return the transformers config of `shape:name` (without the prefix); a new object on every call.

    Raises:
        ModelError: an unknown name; the text lists the known ones.
    """
    if name not in SHAPES:
        raise ModelError(unknown_name("shape", name, SHAPES), code="unknown-name")
    return AutoConfig.for_model(**SHAPES[name])


def random_model(
    config: PretrainedConfig,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
    head: HeadKind = "logits",
) -> nn.Module:
    """Build a model of `config` with random weights in `dtype` on `device`; no larger copy ever exists.

    Every Parameter has its own generator, seeded by (seed, Parameter name): the same layers come out whatever
    `num_hidden_layers` is. The numbers depend on the device type and dtype, not on the number of threads.

    Args:
        attention: name of the implementation in transformers' AttentionInterface.
    """
    with torch.device(device):
        module = empty_model(config, dtype=dtype, attention=attention, head=head)
    module.tie_weights()
    set_eos(module, config)
    fill_parameters(module, None, seed=seed, config=config)
    module.eval()
    return module


def empty_model(
    config: PretrainedConfig, *, dtype: torch.dtype, attention: str = "eager", head: HeadKind = "logits"
) -> PreTrainedModel:
    """Build a model on torch's default device, whose Parameters are not initialised."""
    with no_init_weights():
        module: PreTrainedModel = auto_class(head).from_config(
            config,
            dtype=dtype,
            attn_implementation=attention,
            # A config whose class comes with the model was read with model.trust_remote_code.
            trust_remote_code=not type(config).__module__.startswith("transformers."),
        )
    return module


def set_eos(module: PreTrainedModel, config: PretrainedConfig) -> None:
    """Copy the eos ids into the generation config: transformers derives it from the config, and reads a list
    of ids only from there."""
    if getattr(module, "generation_config", None) is not None:
        module.generation_config.eos_token_id = config.eos_token_id


@torch.no_grad()
def fill_parameters(
    module: nn.Module, names: Collection[str] | None, *, seed: int, config: PretrainedConfig
) -> None:
    """Draw the Parameters with these names, None: all; see `fill`."""
    for name, parameter in module.named_parameters():
        if names is None or name in names:
            fill(name, parameter, seed=seed, config=config)


def fill(name: str, parameter: Tensor, *, seed: int, config: PretrainedConfig) -> None:
    """Draw one Parameter: matrices and biases N(0, initializer_range), a scalar head N(0, head_std); norm
    weights around what acts as 1; and what its record says."""
    # Not hash(): Python salts that of strings in each process.
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    record = architecture_of(config)
    own = () if record is None else record.drawn_around.items()
    centre = next((value for end, value in own if name.endswith(end)), None)
    if "norm" in name or centre is not None:
        if centre is None:  # Gemma multiplies by 1 + weight, everybody else by weight.
            centre = 1.0 if record is None else record.norm_centre
        parameter.normal_(centre, 0.1, generator=generator)
    else:
        std = head_std(config) if name == SCORE_WEIGHT else config.initializer_range
        parameter.normal_(0.0, std, generator=generator)


# FLOPs of training a transformer, and the peaks of GPUs: the two sides of model FLOPs utilisation (MFU).


PEAKS: Mapping[str, float] = {
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}
"""Part of a GPU's name -> FLOP/s of dense bfloat16, as its maker says. The longest name that fits counts."""


def training_flops(config: Any, *, parameters: int, lengths: Sequence[int]) -> float:
    """FLOPs of forward and backward: 6 N sum(L) + 3 A, with A = 2 L^2 heads head_dim layers summed over
    documents (causal attention). Padding and what is computed twice do not count.

    Args:
        config: of the text model (transformers).
        parameters: that take part in a matmul: all where the embeddings are tied, else without the input's.
    """
    return 6.0 * parameters * sum(lengths) + attention_flops(config) * sum(n * n for n in lengths)


def attention_flops(config: Any) -> float:
    """FLOPs of causal attention, forward and backward, over the squared length of a document: the 3 A of
    `training_flops`."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    layers = sum(kind != "linear_attention" for kind in kinds)  # a delta net's are linear in the length
    return 3.0 * 2.0 * float(config.num_attention_heads * head_dim * layers)


def peak_flops(device_name: str) -> float | None:
    """FLOP/s of dense bfloat16 of a GPU; None: not known.

    Example:
        >>> peak_flops("NVIDIA H200")
        989000000000000.0
    """
    matches = [name for name in PEAKS if name in device_name]
    return PEAKS[max(matches, key=len)] if matches else None


def utilisation(flops: float, *, seconds: float, peak: float) -> float:
    """MFU: the share of `peak`, in FLOP/s of all GPUs together, that `flops` done in `seconds` are."""
    return flops / seconds / peak
