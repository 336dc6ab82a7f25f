"""Which architectures train packed, and why others do not."""

from __future__ import annotations

from typing import Any

from lockstep.errors import ModelError

SUPPORTED: dict[str, str] = {
    "llama": "Llama 2 and 3, SmolLM2 and their like",
    "qwen2": "Qwen 2 and 2.5",
    "qwen3": "Qwen 3, dense",
    "mistral": "Mistral (sliding window)",
    "gemma3_text": "Gemma 3, text (alternating windows, scaled embeddings)",
}

REFUSED: dict[str, str] = {
    "gemma3": "it is the multimodal wrapper, and image tokens attend in both directions; load the text model "
    "(gemma3_text)",
    "gemma2": "it soft-caps attention scores, which flash kernels behind torch's varlen op cannot",
    "gemma": "no parity test has run with it; gemma3_text is supported",
    "gpt2": "its positions are learned and its layers are not at .model.layers",
    "gpt_oss": "its attention sinks need a gradient that torch's varlen op drops",
    "cohere": "no parity test has run with its parallel blocks and logit scale",
    "cohere2": "no parity test has run with its parallel blocks and logit scale",
    "granite": "no parity test has run with its residual and logit multipliers",
    "mixtral": "experts are not supported in this version",
    "qwen2_moe": "experts are not supported in this version",
    "qwen3_moe": "experts are not supported in this version",
    "qwen3_next": "its linear-attention layers carry state across packed documents",
    "mamba": "its state runs across packed documents",
    "mamba2": "its state runs across packed documents",
    "jamba": "its Mamba layers carry state across packed documents",
}


def check_architecture(config: Any) -> None:
    """Refuse, by name and with a reason, a transformers config that does not train packed.

    Raises:
        ModelError: unsupported architecture or setting.
    """
    name = config.model_type
    if name not in SUPPORTED:
        reason = REFUSED.get(name, "no parity test has run with it")
        raise ModelError(
            f"architecture {name!r} is not supported: {reason}. Supported: {', '.join(SUPPORTED)}"
        )
    if getattr(config, "attention_dropout", 0.0):
        raise ModelError(
            f"attention_dropout = {config.attention_dropout} in the model's config.json: no attention kernel "
            "here has dropout; set it to 0.0 there"
        )
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise ModelError(
            f"attn_logit_softcapping = {config.attn_logit_softcapping} in the model's config.json: flash "
            "kernels cannot soft-cap scores"
        )
    if getattr(config, "use_bidirectional_attention", None):
        raise ModelError("use_bidirectional_attention in the model's config.json: attention here is causal")


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """The sliding window of each layer; None: the layer sees the whole document."""
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if config.model_type == "mistral" or kinds is None:
        return tuple([window] * config.num_hidden_layers)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
