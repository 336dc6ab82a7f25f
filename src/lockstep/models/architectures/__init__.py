"""The architectures that train packed: a record for each, and why others do not train."""

from lockstep.models.architectures.checks import (
    caps_scores,
    check_architecture,
    check_kernel,
    check_rope,
    foreign_options,
    has_delta_nets,
    is_moe,
    kv_heads,
    layer_windows,
    max_positions,
    option,
    rope_parameters,
)
from lockstep.models.architectures.modules import (
    causal_lm,
    checkpoint_activations,
    hf_config,
    silence_transformers,
    text_config,
)
from lockstep.models.architectures.record import Architecture, Replicated, Split
from lockstep.models.architectures.registry import (
    ARCHITECTURES,
    SHIPPED,
    architecture_of,
    register,
    register_all,
)

__all__ = [
    "ARCHITECTURES",
    "SHIPPED",
    "Architecture",
    "Replicated",
    "Split",
    "architecture_of",
    "caps_scores",
    "causal_lm",
    "check_architecture",
    "check_kernel",
    "check_rope",
    "checkpoint_activations",
    "foreign_options",
    "has_delta_nets",
    "hf_config",
    "is_moe",
    "kv_heads",
    "layer_windows",
    "max_positions",
    "option",
    "register",
    "rope_parameters",
    "silence_transformers",
    "text_config",
]

register_all()
