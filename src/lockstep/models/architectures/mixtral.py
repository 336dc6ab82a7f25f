"""Mixtral: Mistral's blocks with experts."""

from lockstep.invariant.forms import ExpertBlock, GroupedExperts, RMSNorm, Rotary, TopRouter
from lockstep.models.architectures.record import EXPERTS, SIZES, Architecture, shrink_experts

ARCHITECTURE = Architecture(
    model_type="mixtral",
    title="Mixtral",
    reads=SIZES | EXPERTS | {"hidden_act", "num_local_experts", "router_jitter_noise", "sliding_window"},
    forms={
        "MixtralRMSNorm": RMSNorm(),
        "MixtralRotaryEmbedding": Rotary(),
        "MixtralSparseMoeBlock": ExpertBlock(),
        "MixtralTopKRouter": TopRouter(rounded=False),
        "MixtralExperts": GroupedExperts(),
    },
    shrink=shrink_experts,
)
