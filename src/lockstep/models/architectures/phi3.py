"""Phi 3 and 4: one linear for queries, keys and values, and one for gate and up."""

from lockstep.invariant.forms import FusedMLP, RMSNorm, Rotary
from lockstep.models.architectures.record import SIZES, Architecture

ARCHITECTURE = Architecture(
    model_type="phi3",
    title="Phi 3 and 4; with long rope up to its original length",
    reads=SIZES
    | {
        "hidden_act",
        "original_max_position_embeddings",
        "resid_pdrop",
        "sliding_window",
    },
    forms={
        "Phi3RMSNorm": RMSNorm(),
        "Phi3MLP": FusedMLP(),
        "Phi3RotaryEmbedding": Rotary(),
    },
    attention_linears=("qkv_proj", "o_proj"),
    mlp_linears=("gate_up_proj", "down_proj"),
)
