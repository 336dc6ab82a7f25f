"""Qwen 2 and 1.5 with experts, one of them for all tokens."""

from lockstep.invariant.forms import ExpertBlock, GatedMLP, GroupedExperts, RMSNorm, Rotary, TopRouter
from lockstep.models.architectures.record import EXPERTS, SIZES, Architecture, shrink_experts

ARCHITECTURE = Architecture(
    model_type="qwen2_moe",
    title="Qwen 2 with experts",
    reads=SIZES
    | EXPERTS
    | {
        "decoder_sparse_step",
        "hidden_act",
        "layer_types",
        "mlp_only_layers",
        "moe_intermediate_size",
        "norm_topk_prob",
        "num_experts",
        "qkv_bias",
        "shared_expert_intermediate_size",
        "sliding_window",
    },
    forms={
        "Qwen2MoeRMSNorm": RMSNorm(),
        "Qwen2MoeMLP": GatedMLP(),
        "Qwen2MoeRotaryEmbedding": Rotary(),
        "Qwen2MoeSparseMoeBlock": ExpertBlock(shared=True),
        "Qwen2MoeTopKRouter": TopRouter(normalise=None),
        "Qwen2MoeExperts": GroupedExperts(),
    },
    shrink=shrink_experts,
)
