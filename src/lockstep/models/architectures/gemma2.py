"""Gemma 2: soft caps of scores and of logits, alternating windows, four norms a layer, scaled embeddings."""

from lockstep.invariant.forms import GatedMLP, RMSNorm, Rotary
from lockstep.models.architectures.record import SIZES, Architecture

ARCHITECTURE = Architecture(
    model_type="gemma2",
    title="Gemma 2 (soft caps)",
    reads=SIZES
    | {
        "attention_bias",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "hidden_activation",
        "layer_types",
        "query_pre_attn_scalar",
        "sliding_window",
        "use_bidirectional_attention",
    },
    forms={
        "Gemma2RMSNorm": RMSNorm(epsilon="eps", unit_offset=True),
        "Gemma2MLP": GatedMLP(),
        "Gemma2RotaryEmbedding": Rotary(),
    },
    norm_centre=0.0,
    batch_invariant=False,
    native=False,
)
