"""Llama 2 and 3, and what was published in their form."""

from lockstep.invariant.forms import GatedMLP, RMSNorm, Rotary
from lockstep.models.architectures.record import PLAN, SIZES, Architecture

ARCHITECTURE = Architecture(
    model_type="llama",
    title="Llama 2 and 3, SmolLM2 and their like",
    reads=SIZES | {"attention_bias", "hidden_act", "mlp_bias"},
    forms={"LlamaRMSNorm": RMSNorm(), "LlamaMLP": GatedMLP(), "LlamaRotaryEmbedding": Rotary()},
    tensor_parallel=PLAN,
)
