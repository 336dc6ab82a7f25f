"""Qwen 3.5, dense, text: gated delta nets, every fourth layer gated attention."""

from lockstep.invariant.forms import GatedDeltaNet
from lockstep.models.architectures.record import (
    DELTA_NET,
    DELTA_NET_CENTRES,
    SIZES,
    Architecture,
    shrink_delta_net,
)

ARCHITECTURE = Architecture(
    model_type="qwen3_5_text",
    title="Qwen 3.5, dense, text",
    reads=SIZES | DELTA_NET | {"attention_bias", "hidden_act", "layer_types"},
    forms={"Qwen3_5GatedDeltaNet": GatedDeltaNet()},
    norm_centre=0.0,
    drawn_around=DELTA_NET_CENTRES,
    shrink=shrink_delta_net,
    wrapper="qwen3_5",
    attention_linears=("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj"),
    native=False,
    batch_invariant=False,
)
