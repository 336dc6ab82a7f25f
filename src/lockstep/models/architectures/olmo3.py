"""OLMo 3: OLMo 2 with windows, and a rotation for each kind of layer."""

from lockstep.invariant.forms import GatedMLP, RMSNorm, Rotary
from lockstep.models.architectures.record import SIZES, Architecture

ARCHITECTURE = Architecture(
    model_type="olmo3",
    title="OLMo 3",
    reads=SIZES
    | {
        "attention_bias",
        "hidden_act",
        "layer_types",
        "sliding_window",
    },
    forms={
        "Olmo3RMSNorm": RMSNorm(rounded_last=True),
        "Olmo3MLP": GatedMLP(),
        "Olmo3RotaryEmbedding": Rotary(rounded=False),
    },
    rotation_by_kind=True,
)
