"""Cohere 1: attention and MLP beside each other, layer norms, scaled logits."""

from lockstep.invariant.forms import GatedMLP, LayerNorm, Rotary
from lockstep.models.architectures.record import SIZES, Architecture

ARCHITECTURE = Architecture(
    model_type="cohere",
    title="Command R (Cohere 1)",
    reads=(SIZES - {"rms_norm_eps"})
    | {"attention_bias", "hidden_act", "layer_norm_eps", "logit_scale", "tie_word_embeddings", "use_qk_norm"},
    forms={
        "CohereLayerNorm": LayerNorm(),
        "CohereMLP": GatedMLP(),
        "CohereRotaryEmbedding": Rotary(layout="pairs"),
    },
    logit_scale=lambda config: config.logit_scale,
)
