"""Which configs train packed, and why others do not; their options, as the modelling code reads them."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from lockstep.errors import ModelError
from lockstep.models.architectures.record import SIZES
from lockstep.models.architectures.registry import ARCHITECTURES

log = logging.getLogger(__name__)

_SHARED = frozenset({"is_causal"})
"""The keys that transformers' masking code reads for every architecture."""

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
    if name not in ARCHITECTURES:
        reason = REFUSED.get(name, "no parity test has run with it")
        raise ModelError(
            f"unsupported-model: architecture {name!r} is not supported: {reason}. Supported: "
            f"{', '.join(ARCHITECTURES)}"
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
    if noise := option(config, "router_jitter_noise"):
        why = "a run samples and trains with the same router, without noise; set it to 0.0"
        raise _unsupported(f"router_jitter_noise = {noise}", why)
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
    record = ARCHITECTURES.get(config.model_type)
    read = _SHARED if record is None else record.reads | _SHARED
    return getattr(config, name, default) if name in read else default


def is_moe(config: Any) -> bool:
    """Return whether a text config is of a model with experts."""
    return option(config, "num_experts_per_tok") is not None


def foreign_options(config: Any) -> dict[str, Any]:
    """Return the keys of config.json that another architecture reads, and this one does not."""
    known = frozenset().union(*(record.reads for record in ARCHITECTURES.values())) - SIZES
    keys = known - ARCHITECTURES[config.model_type].reads - {"hidden_act", "hidden_activation"}
    values = {key: getattr(config, key, None) for key in sorted(keys)}
    # transformers' own configs have some of these, without any effect: off, they need no warning.
    own = type(config).__dataclass_fields__ if dataclasses.is_dataclass(type(config)) else {}
    own = {*own, *config.attribute_map, *config.attribute_map.values()}  # two names of one key
    return {key: value for key, value in values.items() if value not in (None, False) and key not in own}


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """Return the sliding window of each layer; None: the layer sees the whole document."""
    window: int | None = option(config, "sliding_window")
    kinds = option(config, "layer_types")
    if kinds is None:
        return tuple([window] * config.num_hidden_layers)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
