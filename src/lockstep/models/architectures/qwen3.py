"""Qwen 3, dense: norms of queries and keys."""

from lockstep.invariant.forms import GatedMLP, RMSNorm, Rotary
from lockstep.models.architectures.record import HEAD_NORMS, PLAN, SIZES, Architecture

ARCHITECTURE = Architecture(
    model_type="qwen3",
    title="Qwen 3, dense",
    reads=SIZES | {"attention_bias", "hidden_act", "layer_types", "sliding_window"},
    forms={"Qwen3RMSNorm": RMSNorm(), "Qwen3MLP": GatedMLP(), "Qwen3RotaryEmbedding": Rotary()},
    tensor_parallel={**PLAN, **HEAD_NORMS},
)
