"""The architectures that train packed, and why others do not; transformers' models, typed and kept quiet."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from typing import Any, cast

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from lockstep.errors import ModelError

# Which architectures train packed, and why others do not.


log = logging.getLogger(__name__)

SUPPORTED: dict[str, str] = {
    "llama": "Llama 2 and 3, SmolLM2 and their like",
    "qwen2": "Qwen 2 and 2.5",
    "qwen3": "Qwen 3, dense",
    "mistral": "Mistral (sliding window)",
    "gemma3_text": "Gemma 3, text (alternating windows, scaled embeddings)",
}

_SIZES = frozenset(
    {
        "attention_dropout",
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "pad_token_id",
        "rms_norm_eps",
        "rope_parameters",
        "vocab_size",
    }
)
READS: dict[str, frozenset[str]] = {
    "llama": _SIZES | {"hidden_act", "attention_bias", "mlp_bias"},
    "qwen2": _SIZES | {"hidden_act", "layer_types", "sliding_window"},
    "qwen3": _SIZES | {"hidden_act", "attention_bias", "layer_types", "sliding_window"},
    "mistral": _SIZES | {"hidden_act", "sliding_window"},
    "gemma3_text": _SIZES
    | {
        "attention_bias",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "hidden_activation",
        "layer_types",
        "query_pre_attn_scalar",
        "sliding_window",
        "use_bidirectional_attention",
    },
}
"""The config keys that the modelling code of each architecture reads. Any other key of a config.json, such as
a Llama's sliding_window, has no effect there."""
_SHARED = frozenset({"is_causal"})
"""The keys that transformers' masking code reads for every architecture."""
_FOREIGN = frozenset().union(*READS.values()) - _SIZES
"""Keys that change numbers in one architecture and have no effect in another."""

ROPES = frozenset({"default", "linear", "yarn", "llama3", "proportional"})
"""Rotary embeddings whose frequencies are the same for every document."""
_LENGTH_DEPENDENT = {
    "longrope": (
        "its frequencies change for the whole batch once a document is longer than "
        "original_max_position_embeddings, so a document's numbers depend on its neighbours; choose a "
        "model with a different rotary embedding"
    ),
    "dynamic": (
        "its frequencies depend on the longest document of a batch, so a document's numbers depend on its "
        "neighbours; for documents within max_position_embeddings it equals 'default', so set that in the "
        "config.json of a copy of the folder"
    ),
}
_LAYER_KINDS = ("full_attention", "sliding_attention")

REFUSED: dict[str, str] = {
    "gemma3": (
        "it is the multimodal wrapper, where image tokens attend in both directions; load the text model "
        "(gemma3_text)"
    ),
    "gemma2": "it soft-caps attention scores, which the flash kernels behind torch's varlen op cannot do",
    "gemma": "no parity test covers it; use gemma3_text instead",
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
    """Refuse, by name and with a reason, a transformers config that does not train packed; warn of keys that
    its architecture does not read.

    Raises:
        ModelError: unsupported architecture or setting.
    """
    name = config.model_type
    if name not in SUPPORTED:
        reason = REFUSED.get(name, "no parity test has run with it")
        raise ModelError(
            f"unsupported-model: architecture {name!r} is not supported: {reason}. Supported: "
            f"{', '.join(SUPPORTED)}"
        )
    _check_options(config)
    check_rope(config)
    if unread := foreign_options(config):
        log.warning(
            "config.json has %s, which architecture %s does not read; it is ignored, as in transformers",
            ", ".join(f"{key} = {value!r}" for key, value in unread.items()),
            name,
        )


def _check_options(config: Any) -> None:
    if dropout := option(config, "attention_dropout", 0.0):
        why = "Lockstep's attention kernels have no dropout; set it to 0.0"
        raise _unsupported(f"attention_dropout = {dropout}", why)
    if (cap := option(config, "attn_logit_softcapping")) is not None:
        raise _unsupported(f"attn_logit_softcapping = {cap}", "flash kernels cannot soft-cap scores")
    if option(config, "use_bidirectional_attention"):
        raise _unsupported("use_bidirectional_attention", "attention here is causal")
    if not option(config, "is_causal", True):
        raise _unsupported("is_causal = false", "attention here is causal")
    kinds = option(config, "layer_types") or ()
    if unknown := [kind for kind in kinds if kind not in _LAYER_KINDS]:
        raise _unsupported(f"{unknown[0]!r} in layer_types", f"supported: {', '.join(_LAYER_KINDS)}")


def _unsupported(what: str, why: str) -> ModelError:
    return ModelError(f"unsupported-model: {what} in the model's config.json: {why}")


def check_rope(config: Any) -> None:
    """Refuse rotary embeddings with which a token's numbers depend on the length of other documents.

    Raises:
        ModelError: names the variant.
    """
    for rope in rope_parameters(config):
        kind = str(rope.get("rope_type", rope.get("type", "default")))
        if kind in ROPES:
            continue
        reason = _LENGTH_DEPENDENT.get(kind, "no test covers it")
        raise _unsupported(f"rope_type = {kind!r}", f"{reason}. Supported: {', '.join(sorted(ROPES))}")


def rope_parameters(config: Any) -> list[dict[str, Any]]:
    """The rotary embeddings of a config: one, or one for each kind of layer."""
    value = getattr(config.get_text_config(), "rope_parameters", None)
    if not isinstance(value, dict):
        return []
    nested = [rope for rope in value.values() if isinstance(rope, dict)]
    return [value, *nested] if "rope_type" in value or not nested else nested


def option(config: Any, name: str, default: Any = None) -> Any:
    """A value of config.json, if the modelling code of its architecture reads it; else `default`."""
    read = READS.get(config.model_type, frozenset()) | _SHARED
    return getattr(config, name, default) if name in read else default


def foreign_options(config: Any) -> dict[str, Any]:
    """Return the keys of config.json that another architecture reads, and this one does not."""
    keys = _FOREIGN - READS[config.model_type] - {"hidden_act", "hidden_activation"}
    values = {key: getattr(config, key, None) for key in sorted(keys)}
    # transformers' own configs have some of these, without any effect: off, they need no warning.
    own = type(config).__dataclass_fields__ if dataclasses.is_dataclass(type(config)) else {}
    return {key: value for key, value in values.items() if value not in (None, False) and key not in own}


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """Return the sliding window of each layer; None: the layer sees the whole document."""
    window: int | None = option(config, "sliding_window")
    kinds = option(config, "layer_types")
    if kinds is None:
        return tuple([window] * config.num_hidden_layers)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


# Attributes that transformers' causal LMs share and nn.Module does not declare.


def causal_lm(module: nn.Module) -> PreTrainedModel:
    """Return the module typed as PreTrainedModel; fields that hold a policy's module are typed nn.Module."""
    return cast(PreTrainedModel, module)


def hf_config(module: nn.Module) -> PretrainedConfig:
    """Return the module's whole config."""
    return cast(PretrainedConfig, module.config)


def text_config(module: nn.Module) -> Any:
    """Return the config of the module's decoder: for multimodal models a part of the whole config."""
    return hf_config(module).get_text_config()


def checkpoint_activations(module: nn.Module) -> None:
    """Recompute each layer's activations in backward, in train mode only: logprobs and an engine that shares
    the module do not pay for it."""
    # In older transformers it goes by the older name only.
    enable = getattr(module, "activation_checkpointing_enable", None)
    # Not reentrant: that needs an input with a gradient, and with LoRA the first layer's has none.
    (enable or causal_lm(module).gradient_checkpointing_enable)({"use_reentrant": False})


# Keep transformers quiet while files are read.


@contextlib.contextmanager
def silence_transformers() -> Iterator[None]:
    """Silence progress bars and warnings of transformers inside, and restore its settings afterwards.

    Where accelerate and DeepSpeed are installed, save_pretrained imports DeepSpeed, whose logger writes to
    standard output that there is no GPU.
    """
    deepspeed = logging.getLogger("DeepSpeed")
    # A filter, because DeepSpeed sets its logger's level when it is imported, which may be inside.
    deepspeed.addFilter(_is_error)
    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        deepspeed.removeFilter(_is_error)
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
