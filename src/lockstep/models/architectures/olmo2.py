"""OLMo 2: norms behind attention and MLP, and over all heads' queries and keys together."""

from lockstep.invariant.forms import GatedMLP
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
        "Olmo2MLP": GatedMLP(),
    },
    batch_invariant=False,
)
