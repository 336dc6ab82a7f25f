"""Cohere 2: attention and MLP beside each other, layer norms, rotation in layers with a window only."""

from lockstep.invariant.forms import GatedMLP, LayerNorm, Rotary
from lockstep.models.architectures.record import PLAN, SIZES, Architecture

ARCHITECTURE = Architecture(
    model_type="cohere2",
    title="Command R7B and A (Cohere 2)",
    reads=(SIZES - {"rms_norm_eps"})
    | {
        "attention_bias",
        "hidden_act",
        "layer_norm_eps",
        "layer_types",
        "logit_scale",
        "sliding_window",
        "tie_word_embeddings",
    },
    forms={
        "Cohere2LayerNorm": LayerNorm(),
        "Cohere2MLP": GatedMLP(),
        "Cohere2RotaryEmbedding": Rotary(layout="pairs"),
    },
    tensor_parallel=PLAN,
    logit_scale=lambda config: config.logit_scale,
)
