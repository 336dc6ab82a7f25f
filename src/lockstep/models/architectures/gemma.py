"""Gemma 1: norm weights are added to 1, scaled embeddings."""

from lockstep.invariant.forms import GatedMLP, RMSNorm, Rotary
from lockstep.models.architectures.record import PLAN, SIZES, Architecture

ARCHITECTURE = Architecture(
    model_type="gemma",
    title="Gemma 1",
    reads=SIZES | {"attention_bias", "hidden_act", "use_bidirectional_attention"},
    forms={
        "GemmaRMSNorm": RMSNorm(epsilon="eps", unit_offset=True),
        "GemmaMLP": GatedMLP(),
        "GemmaRotaryEmbedding": Rotary(),
    },
    tensor_parallel=PLAN,
    norm_centre=0.0,
)
