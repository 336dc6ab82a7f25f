"""OLMo 2: norms behind attention and MLP, and over all heads' queries and keys together."""

from lockstep.invariant.forms import GatedMLP, RMSNorm, Rotary
from lockstep.models.architectures.record import SIZES, Architecture

ARCHITECTURE = Architecture(
    model_type="olmo2",
    title="OLMo 2",
    reads=SIZES
    | {
        "attention_bias",
        "hidden_act",
    },
    forms={
        "Olmo2RMSNorm": RMSNorm(rounded_last=True),
        "Olmo2MLP": GatedMLP(),
        "Olmo2RotaryEmbedding": Rotary(rounded=False),
    },
)
