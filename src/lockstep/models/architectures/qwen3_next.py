"""Qwen3-Next: gated delta nets, every fourth layer gated attention; experts, one of them for all tokens."""

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
    model_type="qwen3_next",
    title="Qwen3-Next",
    reads=SIZES
    | EXPERTS
    | DELTA_NET
    | {
        "attention_bias",
        "decoder_sparse_step",
        "hidden_act",
        "layer_types",
        "mlp_only_layers",
        "moe_intermediate_size",
        "norm_topk_prob",
        "num_experts",
        "shared_expert_intermediate_size",
    },
    forms={
        "Qwen3NextGatedDeltaNet": GatedDeltaNet(fused=True),
        "Qwen3NextSparseMoeBlock": ExpertBlock(shared=True),
        "Qwen3NextTopKRouter": TopRouter(normalise=None),
        "Qwen3NextExperts": GroupedExperts(),
    },
    norm_centre=0.0,
    drawn_around=DELTA_NET_CENTRES,
    shrink=shrink_delta_net_and_experts,
    attention_linears=("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkvz", "out_proj"),
    native=False,
    batch_invariant=False,
)
