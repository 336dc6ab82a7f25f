"""What classes of transformers' models compute, for the converter: the records of architectures say it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class RMSNorm:
    """weight * x / rms(x), over the last dimension, in float32."""

    epsilon: str = "variance_epsilon"
    """The attribute with epsilon."""
    unit_offset: bool = False
    """Whether 1 is added to the weight."""
    rounded_last: bool = False
    """Whether the product with the weight is in float32 and rounded once, as it is with `unit_offset`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerNorm:
    """weight * (x - mean(x)) / std(x), over the last dimension, in float32; without a bias. The weight may be
    one of each head, [N, H]."""

    epsilon: str = "variance_epsilon"
    """The attribute with epsilon."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedMLP:
    """down_proj(act_fn(gate_proj(x)) * up_proj(x))."""

    dropout: bool = False
    """Whether a dropout comes last; models whose config turns it on are refused."""


@dataclass(frozen=True, slots=True)
class FusedMLP:
    """down_proj(act(gate) * up), gate and up the halves of gate_up_proj(x)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotary:
    """cos and sin of positions, with frequencies in buffers."""

    layout: Literal["halves", "pairs", "once"] = "halves"
    """The columns: all frequencies twice, each twice in a row, or all once."""
    rounded: bool = True
    """Whether they are rounded to the dtype of the hidden states."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TopRouter:
    """The router of a mixture of experts: weight [E, C] and maybe a bias; `top_k` experts for each token.
    Logits are in the weights' dtype, probabilities in float32."""

    softmax: Literal["all", "chosen"] = "all"
    """all: over the experts, of which the largest are taken; chosen: over the largest logits."""
    normalise: bool | None = True
    """Whether a token's weights are divided by their sum; None: as the module's `norm_topk_prob` says."""
    rounded: bool = True
    """Whether weights are rounded to the dtype of the logits."""


@dataclass(frozen=True, slots=True)
class GroupedExperts:
    """gate_up_proj and down_proj of all experts, in one of the layouts of transformers'
    `use_experts_implementation`."""


@dataclass(frozen=True, slots=True)
class ExpertBlock:
    """A router and its experts."""

    shared: bool = False
    """Whether one expert is for all tokens, under a sigmoid gate of its own, as in Qwen2-MoE."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDeltaNet:
    """A gated delta net; it has no row-invariant form, since chunks and single tokens round differently."""

    fused: bool = False
    """Whether queries, keys, values and gates come from one linear, by key head, as in Qwen3-Next."""


Form = (
    RMSNorm
    | LayerNorm
    | GatedMLP
    | FusedMLP
    | Rotary
    | TopRouter
    | GroupedExperts
    | ExpertBlock
    | GatedDeltaNet
)
"""What a class computes; `lockstep.invariant.convert` knows a row-invariant form of each but the last."""

FORMS: dict[str, Form] = {}
"""Class name -> form. `register_forms` fills it."""


def register_forms(forms: Mapping[str, Form]) -> None:
    """Tell the converter what classes compute, by their names.

    Raises:
        ValueError: a class is known already, as something else.
    """
    for name, form in forms.items():
        if FORMS.setdefault(name, form) != form:
            raise ValueError(f"class {name!r} is registered as {FORMS[name]}, not {form}")
