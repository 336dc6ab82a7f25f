"""GPT-OSS: a sink for each head, alternating windows, experts with biases, gate and up in turn."""

from lockstep.invariant.forms import ExpertBlock, GroupedExperts, RMSNorm, Rotary, TopRouter
from lockstep.models.architectures.record import EXPERTS, SIZES, Architecture, shrink_experts

ARCHITECTURE = Architecture(
    model_type="gpt_oss",
    title="GPT-OSS, MXFP4 folders as bfloat16",
    reads=SIZES
    | EXPERTS
    | {
        "attention_bias",
        "layer_types",
        "num_local_experts",
        "sliding_window",
        "swiglu_alpha",
        "swiglu_limit",
    },
    forms={
        "GptOssRMSNorm": RMSNorm(rounded_last=True),
        "GptOssRotaryEmbedding": Rotary(layout="once"),
        "GptOssMLP": ExpertBlock(),
        "GptOssTopKRouter": TopRouter(softmax="chosen", normalise=False),
        "GptOssExperts": GroupedExperts(),
    },
    dequantised=frozenset({"mxfp4"}),
    shrink=shrink_experts,
)
