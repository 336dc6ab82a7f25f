"""GLM 4 of 2024: one linear for gate and up, rotation of a part of each head."""

from lockstep.invariant.forms import FusedMLP, RMSNorm, Rotary
from lockstep.models.architectures.record import SIZES, Architecture

ARCHITECTURE = Architecture(
    model_type="glm",
    title="GLM 4, dense (2024)",
    reads=SIZES | {"attention_bias", "hidden_act"},
    forms={"GlmRMSNorm": RMSNorm(), "GlmMLP": FusedMLP(), "GlmRotaryEmbedding": Rotary()},
    mlp_linears=("gate_up_proj", "down_proj"),
)
