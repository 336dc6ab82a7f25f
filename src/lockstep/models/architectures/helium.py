"""Helium: Llama with another rotation within a head."""

from lockstep.invariant.forms import GatedMLP, RMSNorm, Rotary
from lockstep.models.architectures.record import PLAN, SIZES, Architecture

ARCHITECTURE = Architecture(
    model_type="helium",
    title="Helium 1",
    reads=SIZES | {"attention_bias", "hidden_act", "mlp_bias"},
    forms={
        "HeliumRMSNorm": RMSNorm(rounded_last=True),
        "HeliumMLP": GatedMLP(),
        "HeliumRotaryEmbedding": Rotary(),
    },
    tensor_parallel=PLAN,
)
