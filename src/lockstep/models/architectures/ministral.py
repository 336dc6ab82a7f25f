"""Ministral: Mistral with windows in some layers."""

from lockstep.invariant.forms import GatedMLP, RMSNorm, Rotary
from lockstep.models.architectures.record import PLAN, SIZES, Architecture

ARCHITECTURE = Architecture(
    model_type="ministral",
    title="Ministral 8B",
    reads=SIZES | {"hidden_act", "layer_types", "sliding_window"},
    forms={"MinistralRMSNorm": RMSNorm(), "MinistralMLP": GatedMLP(), "MinistralRotaryEmbedding": Rotary()},
    tensor_parallel=PLAN,
)
