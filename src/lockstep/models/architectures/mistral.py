"""Mistral: one sliding window for all layers."""

from lockstep.invariant.forms import GatedMLP, RMSNorm, Rotary
from lockstep.models.architectures.record import PLAN, SIZES, Architecture

ARCHITECTURE = Architecture(
    model_type="mistral",
    title="Mistral (sliding window)",
    reads=SIZES | {"hidden_act", "sliding_window"},
    forms={"MistralRMSNorm": RMSNorm(), "MistralMLP": GatedMLP(), "MistralRotaryEmbedding": Rotary()},
    tensor_parallel=PLAN,
)
