"""Ministral 3, text: queries are scaled by their positions."""

from lockstep.invariant.forms import GatedMLP, RMSNorm, Rotary
from lockstep.models.architectures.record import PLAN, SIZES, Architecture

ARCHITECTURE = Architecture(
    model_type="ministral3",
    title="Ministral 3, text",
    reads=SIZES
    | {
        "hidden_act",
        "sliding_window",
    },
    forms={
        "Ministral3RMSNorm": RMSNorm(),
        "Ministral3MLP": GatedMLP(),
        "Ministral3RotaryEmbedding": Rotary(),
    },
    tensor_parallel=PLAN,
    positions_in_layers=True,
)
