"""Qwen 3.5 with experts, text: gated delta nets, every fourth layer gated attention."""

from lockstep.invariant.forms import ExpertBlock, GatedDeltaNet, GroupedExperts, TopRouter
from lockstep.models.architectures.record import (
    DELTA_NET,
    DELTA_NET_CENTRES,
    EXPERTS,
    SIZES,
    Architecture,
    shrink_delta_net_and_experts,
)

ARCHITECTURE = Architecture(
    model_type="qwen3_5_moe_text",
    title="Qwen 3.5 with experts, text",
    reads=(SIZES - {"intermediate_size"})
    | EXPERTS
    | DELTA_NET
    | {
        "attention_bias",
        "hidden_act",
        "layer_types",
        "moe_intermediate_size",
        "num_experts",
        "shared_expert_intermediate_size",
    },
    forms={
        "Qwen3_5MoeGatedDeltaNet": GatedDeltaNet(),
        "Qwen3_5MoeSparseMoeBlock": ExpertBlock(shared=True),
        "Qwen3_5MoeTopKRouter": TopRouter(),
        "Qwen3_5MoeExperts": GroupedExperts(),
    },
    norm_centre=0.0,
    drawn_around=DELTA_NET_CENTRES,
    shrink=shrink_delta_net_and_experts,
    wrapper="qwen3_5_moe",
    attention_linears=("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj"),
    native=False,
    batch_invariant=False,
)
