"""Gemma 3, text: alternating windows, each kind of layer with a rotation of its own; four norms a layer whose
weights are added to 1, scaled embeddings."""

from lockstep.invariant.forms import GatedMLP, RMSNorm, Rotary
from lockstep.models.architectures.record import HEAD_NORMS, PLAN, SIZES, Architecture, Replicated

ARCHITECTURE = Architecture(
    model_type="gemma3_text",
    title="Gemma 3, text (alternating windows, scaled embeddings)",
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
        "Gemma3RMSNorm": RMSNorm(epsilon="eps", unit_offset=True),
        "Gemma3MLP": GatedMLP(),
        "Gemma3RotaryEmbedding": Rotary(),
    },
    tensor_parallel={
        **PLAN,
        **HEAD_NORMS,
        "pre_feedforward_layernorm": Replicated(),
        "post_feedforward_layernorm": Replicated(),
    },
    norm_centre=0.0,
    rotation_by_kind=True,
)
