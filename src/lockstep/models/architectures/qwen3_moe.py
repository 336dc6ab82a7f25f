"""Qwen 3 with experts: Qwen3-30B-A3B and its like."""

from lockstep.invariant.forms import ExpertBlock, GatedMLP, GroupedExperts, RMSNorm, Rotary, TopRouter
from lockstep.models.architectures.record import EXPERTS, SIZES, Architecture, shrink_experts

ARCHITECTURE = Architecture(
    model_type="qwen3_moe",
    title="Qwen 3 with experts",
    reads=SIZES
    | EXPERTS
    | {
        "attention_bias",
        "decoder_sparse_step",
        "hidden_act",
        "mlp_only_layers",
        "moe_intermediate_size",
        "norm_topk_prob",
        "num_experts",
        "sliding_window",
    },
    forms={
        "Qwen3MoeRMSNorm": RMSNorm(),
        "Qwen3MoeMLP": GatedMLP(),
        "Qwen3MoeRotaryEmbedding": Rotary(),
        "Qwen3MoeSparseMoeBlock": ExpertBlock(),
        "Qwen3MoeTopKRouter": TopRouter(normalise=None),
        "Qwen3MoeExperts": GroupedExperts(),
    },
    shrink=shrink_experts,
)
