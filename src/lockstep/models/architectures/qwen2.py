"""Qwen 2 and 2.5: biases on queries, keys and values; windows in the upper layers where asked for."""

from lockstep.invariant.forms import GatedMLP, RMSNorm, Rotary
from lockstep.models.architectures.record import PLAN, SIZES, Architecture

ARCHITECTURE = Architecture(
    model_type="qwen2",
    title="Qwen 2 and 2.5",
    reads=SIZES | {"hidden_act", "layer_types", "sliding_window"},
    forms={"Qwen2RMSNorm": RMSNorm(), "Qwen2MLP": GatedMLP(), "Qwen2RotaryEmbedding": Rotary()},
    tensor_parallel=PLAN,
)
