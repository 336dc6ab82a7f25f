"""EXAONE 4: norms behind attention and MLP, windows with rotation, full attention without."""

from lockstep.invariant.forms import GatedMLP, RMSNorm, Rotary
from lockstep.models.architectures.record import HEAD_NORMS, PLAN, SIZES, Architecture, Replicated

ARCHITECTURE = Architecture(
    model_type="exaone4",
    title="EXAONE 4, dense",
    reads=SIZES | {"hidden_act", "layer_types", "sliding_window", "sliding_window_pattern"},
    forms={"Exaone4RMSNorm": RMSNorm(), "Exaone4MLP": GatedMLP(), "Exaone4RotaryEmbedding": Rotary()},
    tensor_parallel={**PLAN, **HEAD_NORMS, "post_feedforward_layernorm": Replicated()},
)
