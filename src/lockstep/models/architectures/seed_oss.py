"""Seed-OSS: Llama with biases on queries, keys and values."""

from lockstep.invariant.forms import GatedMLP, RMSNorm, Rotary
from lockstep.models.architectures.record import PLAN, SIZES, Architecture

ARCHITECTURE = Architecture(
    model_type="seed_oss",
    title="Seed-OSS",
    reads=SIZES | {"attention_bias", "attention_out_bias", "hidden_act", "mlp_bias", "residual_dropout"},
    forms={
        "SeedOssRMSNorm": RMSNorm(),
        "SeedOssMLP": GatedMLP(dropout=True),
        "SeedOssRotaryEmbedding": Rotary(),
    },
    tensor_parallel=PLAN,
)
