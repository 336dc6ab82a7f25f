"""SmolLM 3: no rotation in every fourth layer."""

from lockstep.invariant.forms import GatedMLP, RMSNorm, Rotary
from lockstep.models.architectures.record import PLAN, SIZES, Architecture

ARCHITECTURE = Architecture(
    model_type="smollm3",
    title="SmolLM 3",
    reads=SIZES
    | {
        "attention_bias",
        "hidden_act",
        "layer_types",
        "mlp_bias",
        "no_rope_layers",
        "sliding_window",
        "use_sliding_window",
    },
    forms={
        "SmolLM3RMSNorm": RMSNorm(),
        "SmolLM3MLP": GatedMLP(),
        "SmolLM3RotaryEmbedding": Rotary(),
    },
    tensor_parallel=PLAN,
)
