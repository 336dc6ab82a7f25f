"""Granite: multipliers of embeddings, scores, residuals and logits."""

from lockstep.invariant.forms import GatedMLP, RMSNorm, Rotary
from lockstep.models.architectures.record import PLAN, SIZES, Architecture

ARCHITECTURE = Architecture(
    model_type="granite",
    title="Granite 3, dense",
    reads=SIZES
    | {
        "attention_bias",
        "attention_multiplier",
        "embedding_multiplier",
        "hidden_act",
        "logits_scaling",
        "mlp_bias",
        "residual_multiplier",
    },
    forms={
        "GraniteRMSNorm": RMSNorm(),
        "GraniteMLP": GatedMLP(),
        "GraniteRotaryEmbedding": Rotary(),
    },
    tensor_parallel=PLAN,
    logit_scale=lambda config: 1.0 / config.logits_scaling,
    embedding_scale=lambda config: config.embedding_multiplier,
)
