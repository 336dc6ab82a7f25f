"""GLM 4: four norms a layer, one linear for gate and up, rotation of a part of each head."""

from lockstep.invariant.forms import FusedMLP, RMSNorm, Rotary
from lockstep.models.architectures.record import SIZES, Architecture

ARCHITECTURE = Architecture(
    model_type="glm4",
    title="GLM 4, dense (0414)",
    reads=SIZES
    | {
        "attention_bias",
        "hidden_act",
    },
    forms={
        "Glm4RMSNorm": RMSNorm(),
        "Glm4MLP": FusedMLP(),
        "Glm4RotaryEmbedding": Rotary(),
    },
    mlp_linears=("gate_up_proj", "down_proj"),
)
