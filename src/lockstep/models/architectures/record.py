"""The record of an architecture: everything that Lockstep must know of a family, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.invariant.forms import Form


@dataclass(frozen=True, slots=True)
class Split:
    """Each rank has one of `size` parts along `dim`, as equal as possible: part number rank."""

    dim: int


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every rank has the whole Parameter."""

    summed: bool = False
    """Each rank's gradient is of its own heads only, so gradients must be added over the ranks (q_norm,
    k_norm). Otherwise all ranks have the whole gradient."""


BY_OUTPUTS, BY_INPUTS = Split(0), Split(1)
PLAN: Mapping[str, Split | Replicated] = {
    "self_attn.q_proj": BY_OUTPUTS,
    "self_attn.k_proj": BY_OUTPUTS,
    "self_attn.v_proj": BY_OUTPUTS,
    "self_attn.o_proj": BY_INPUTS,
    "mlp.gate_proj": BY_OUTPUTS,
    "mlp.up_proj": BY_OUTPUTS,
    "mlp.down_proj": BY_INPUTS,
    "embed_tokens": BY_OUTPUTS,
    "lm_head": BY_OUTPUTS,
    "score": Replicated(),
    "input_layernorm": Replicated(),
    "post_attention_layernorm": Replicated(),
    "model.norm": Replicated(),
}
"""The tensor parallel plan of a Llama; others add their norms."""
HEAD_NORMS: Mapping[str, Split | Replicated] = {
    "self_attn.q_norm": Replicated(summed=True),
    "self_attn.k_norm": Replicated(summed=True),
}
"""Norms of each head's queries and keys: the same weights for all heads."""

SIZES = frozenset(
    {
        "attention_dropout",
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "pad_token_id",
        "rms_norm_eps",
        "rope_parameters",
        "vocab_size",
    }
)
"""The config keys that the modelling code of nearly all architectures reads."""

EXPERTS = frozenset(
    {"initializer_range", "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef"}
)
"""Those of a mixture of experts, besides the number and sizes of experts."""
_MOST_EXPERTS, _MOST_CHOSEN, _WIDTH = 8, 4, 32

DELTA_NET = frozenset(
    {
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_value_head_dim",
    }
)
"""Those of gated delta nets."""
DELTA_NET_CENTRES: Mapping[str, float] = {
    "linear_attn.norm.weight": 1.0,
    "linear_attn.dt_bias": 1.0,
    "linear_attn.conv1d.weight": 0.5,
}
"""`drawn_around` of the families whose other norms are centred at 0."""
_MOST_STATE = 16


def shrink_delta_net(config: Any) -> None:
    """Keep at most two key heads, with the same number of value heads for each, up to four, all of size 16 at
    most."""
    group = config.linear_num_value_heads // config.linear_num_key_heads
    config.linear_num_key_heads = min(config.linear_num_key_heads, 2)
    config.linear_num_value_heads = config.linear_num_key_heads * min(group, 4)
    for name in ("linear_key_head_dim", "linear_value_head_dim"):
        setattr(config, name, min(getattr(config, name), _MOST_STATE))


def shrink_delta_net_and_experts(config: Any) -> None:
    """Both."""
    shrink_delta_net(config)
    shrink_experts(config)


def shrink_experts(config: Any) -> None:
    """Keep at most 8 experts, 4 of them for a token, and the kinds of layers that the config has."""
    key = "num_local_experts" if hasattr(config, "num_local_experts") else "num_experts"
    setattr(config, key, min(getattr(config, key), _MOST_EXPERTS))
    config.num_experts_per_tok = min(config.num_experts_per_tok, _MOST_CHOSEN)
    for name in ("moe_intermediate_size", "shared_expert_intermediate_size"):
        if hasattr(config, name):
            setattr(config, name, _WIDTH)
    if hasattr(config, "decoder_sparse_step"):
        config.decoder_sparse_step = min(config.decoder_sparse_step, 2)
        config.mlp_only_layers = [0] if config.mlp_only_layers else []


def _one(config: Any) -> float:
    return 1.0


def _nothing(config: Any) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """One family. Adding one is a file with this record and a row of the proof's test.

    A record says how a model is computed; `lockstep prove` finds out whether that is true.
    """

    model_type: str
    """Of config.json."""
    title: str
    """Its published models, in words."""
    reads: frozenset[str]
    """The config keys that transformers' modelling code reads. Any other key of a config.json, such as a
    Llama's sliding_window, has no effect there, nor here."""
    forms: Mapping[str, Form] = field(default_factory=dict)
    """Class name -> what it computes: batch-invariant mode replaces these. Linears, LoRA, containers and
    embeddings are known for all architectures."""
    batch_invariant: bool = True
    """Whether all parts have a row-invariant form; False: some have not, and the mode is refused."""
    tensor_parallel: Mapping[str, Split | Replicated] = field(default_factory=dict)
    """The last parts of a module's path -> how its Parameters are split. Empty: train.tp is refused."""
    norm_centre: float = 1.0
    """The norm weight that leaves its input unscaled; random models are drawn around it."""
    drawn_around: Mapping[str, float] = field(default_factory=dict)
    """End of a Parameter's name -> what random models draw it around, where that is neither `norm_centre` for
    a norm nor 0."""
    logit_scale: Callable[[Any], float] = _one
    """config -> what logits are multiplied by. A soft cap is the key final_logit_softcapping."""
    attention_linears: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Names of attention's linear modules; adapters are beside them and `mlp_linears` by default."""
    mlp_linears: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    """Names of those of the MLP and of shared experts; other experts have none."""
    embedding_scale: Callable[[Any], float] = _one
    """config -> what the decoder multiplies embeddings by, outside of its embedding module."""
    wrapper: str = ""
    """The model_type of published multimodal folders whose text part is this model, with the weights of its
    decoder under `lockstep.models.wrapper.PREFIX`."""
    dequantised: frozenset[str] = frozenset()
    """The `quant_method` of published folders whose weights are dequantised when they are loaded."""
    shrink: Callable[[Any], None] = _nothing
    """Makes sizes that are this family's own small, in place, in the config of a proof's miniature."""
    native: bool = True
    """Cached decode: whether engine native can call the layers (`self_attn`; embed_tokens, norm, rotary_emb
    in the decoder; scores without caps)."""
    rotation_by_kind: bool = False
    """Cached decode: whether cos and sin differ between the kinds of layer_types."""
    positions_in_layers: bool = False
    """Cached decode: whether layers need the positions themselves."""
