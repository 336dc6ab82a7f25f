"""Which configs train packed, and why others do not; their options, as the modelling code reads them."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import logging
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError, ModelError
from lockstep.invariant.forms import GatedDeltaNet
from lockstep.models.architectures.record import SIZES
from lockstep.models.architectures.registry import ARCHITECTURES

log = logging.getLogger(__name__)

_SHARED = frozenset({"is_causal"})
"""The keys that transformers' masking code reads for every architecture."""

ROPES = frozenset({"default", "linear", "yarn", "llama3", "proportional"})
"""Rotary embeddings whose frequencies are the same for every document."""
BOUNDED = frozenset({"longrope", "dynamic"})
"""Those whose frequencies change for the whole batch once a document of it is longer than a length, up to
which they are the same for every document: `max_positions`."""
_LAYER_KINDS = ("full_attention", "sliding_attention")
_DELTA_NET = "linear_attention"


def check_architecture(config: Any) -> None:
    """Refuse, with a reason, a transformers config that cannot train packed; warn of keys that its
    architecture does not read. One without a record is left to its proof (lockstep.models.admission).

    Raises:
        ModelError: unsupported setting.
    """
    if (text := config.get_text_config()) is not config:
        raise ModelError(
            f"unsupported-model: architecture {config.model_type!r} is not supported: it is a multimodal "
            f"wrapper; load its text model ({text.model_type})"
        )
    _check_options(config)
    check_rope(config)
    if option(config, "output_router_logits"):
        log.warning(
            "config.json has output_router_logits = true, which in transformers adds an auxiliary loss of "
            "the router; Lockstep goes by train.router_aux_loss alone"
        )
    if unread := foreign_options(config):
        log.warning(
            "config.json has %s, which architecture %s does not read; it is ignored, as in transformers",
            ", ".join(f"{key} = {value!r}" for key, value in unread.items()),
            config.model_type,
        )


def _check_options(config: Any) -> None:
    for key, value in unknown_options(config).items():
        why = f"transformers reads it, but Lockstep's record of {config.model_type} does not know it"
        raise _unsupported(f"{key} = {value!r}", f"{why}; remove it, or use the published file")
    dropouts = [key for key in reads_of(config) if "dropout" in key or key.endswith("_pdrop")]
    for name in sorted({*dropouts} - {"classifier_dropout"}):
        if dropout := getattr(config, name, 0.0):
            why = "Lockstep's attention kernels have no dropout, and it trains without; set it to 0.0"
            raise _unsupported(f"{name} = {dropout}", why)
    if option(config, "use_bidirectional_attention"):
        raise _unsupported("use_bidirectional_attention", "attention here is causal")
    if not option(config, "is_causal", True):
        raise _unsupported("is_causal = false", "attention here is causal")
    for name in sorted(key for key in reads_of(config) if "jitter" in key or key.endswith("layerdrop")):
        if noise := getattr(config, name, None):
            why = "a run samples and trains with the same model, without noise; set it to 0.0"
            raise _unsupported(f"{name} = {noise}", why)
    kinds = option(config, "layer_types") or ()
    record = ARCHITECTURES.get(config.model_type)
    forms = () if record is None else record.forms.values()
    has_form = any(isinstance(form, GatedDeltaNet) for form in forms)
    known = (*_LAYER_KINDS, _DELTA_NET) if has_form else _LAYER_KINDS
    if unknown := [kind for kind in kinds if kind not in known]:
        raise _unsupported(f"{unknown[0]!r} in layer_types", f"supported: {', '.join(known)}")


def unknown_options(config: Any) -> dict[str, Any]:
    """Return the keys of config.json, other than by default, that transformers reads and the record does not
    know: a newer transformers than the record may have some."""
    record = ARCHITECTURES.get(config.model_type)
    if record is None:
        return {}
    unknown = modelling_reads(type(config)) - record.reads
    changed = config.to_diff_dict()
    return {key: changed[key] for key in sorted(unknown & changed.keys())}


def _unsupported(what: str, why: str) -> ModelError:
    return ModelError(f"unsupported-model: {what} in the model's config.json: {why}")


def check_rope(config: Any, *, bounded: bool = True) -> None:
    """Refuse rotary embeddings with which a token's numbers depend on the length of other documents.

    Args:
        bounded: whether documents are kept within `max_positions`.

    Raises:
        ModelError: names the variant.
    """
    known = ROPES | BOUNDED if bounded else ROPES
    for rope in rope_parameters(config):
        if (kind := _rope_type(rope)) in known:
            continue
        reason = "no test covers it"
        if kind in BOUNDED:
            reason = (
                "its frequencies change for the whole batch with its longest document, so a document's "
                "numbers depend on its neighbours; choose a model with a different rotary embedding"
            )
        raise _unsupported(f"rope_type = {kind!r}", f"{reason}. Supported: {', '.join(sorted(known))}")


def _rope_type(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def max_positions(config: Any) -> int:
    """Return the longest document, in tokens, that the position encoding was made for, and whose frequencies
    do not depend on its neighbours."""
    text = config.get_text_config()
    bounds = [
        rope.get(_ORIGINAL) or getattr(text, _ORIGINAL, None)
        for rope in rope_parameters(config)
        if _rope_type(rope) in BOUNDED
    ]
    return int(min([text.max_position_embeddings, *(bound for bound in bounds if bound)]))


_ORIGINAL = "original_max_position_embeddings"


def rope_parameters(config: Any) -> list[dict[str, Any]]:
    """The rotary embeddings of a config: one, or one for each kind of layer."""
    value = getattr(config.get_text_config(), "rope_parameters", None)
    if not isinstance(value, dict):
        return []
    nested = [rope for rope in value.values() if isinstance(rope, dict)]
    return [value, *nested] if "rope_type" in value or not nested else nested


def reads_of(config: Any) -> frozenset[str]:
    """Return the config keys that the modelling code of its architecture reads."""
    record = ARCHITECTURES.get(config.model_type)
    return modelling_reads(type(config)) if record is None else record.reads


def modelling_reads(config_class: type[Any]) -> frozenset[str]:
    """Return every NAME in `config.NAME` and `getattr(config, "NAME")` of the modelling file beside a config
    class; empty: there is no such file."""
    source = Path(inspect.getfile(config_class))
    source = source.with_name(source.name.replace("configuration_", "modeling_", 1))
    if not source.name.startswith("modeling_") or not source.is_file():
        return frozenset()
    return frozenset(name for name in _reads_in(source) if not callable(getattr(config_class, name, None)))


@functools.cache
def _reads_in(source: Path) -> frozenset[str]:
    top = ast.parse(source.read_text(encoding="utf-8")).body
    # A tower's config has keys of the same names.
    text = [part for part in top if not (isinstance(part, ast.ClassDef) and "Vision" in part.name)]
    nodes = (node for part in text for node in ast.walk(part))
    return frozenset(name for node in nodes if (name := _read_of_config(node)) and name[0] != "_")


def _read_of_config(node: ast.AST) -> str | None:
    def is_config(value: ast.AST) -> bool:
        return "config" in (getattr(value, "id", None), getattr(value, "attr", None))

    match node:
        case ast.Attribute(value=value, attr=name) if is_config(value):
            return name
        case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(name)), *_]) if (
            is_config(value)
        ):
            return name
    return None


def option(config: Any, name: str, default: Any = None) -> Any:
    """A value of config.json, if the modelling code of its architecture reads it; else `default`."""
    return getattr(config, name, default) if name in reads_of(config) | _SHARED else default


def caps_scores(config: Any) -> bool:
    """Return whether a config has soft caps of attention scores."""
    return option(config.get_text_config(), "attn_logit_softcapping") is not None


def check_kernel(config: Any, kernel: str) -> None:
    """Refuse an attention kernel that would compute another model.

    Raises:
        ConfigError: says which to choose.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    what = f"train.attention = {kernel!r} with a {config.model_type} model"
    fix = "set train.attention = 'sdpa', or 'flex' on a GPU"
    if kernel == "varlen" and caps_scores(config):
        raise ConfigError(
            f"unsupported-combination: {what}: torch's flash attention has no soft caps "
            f"(attn_logit_softcapping = {config.get_text_config().attn_logit_softcapping}); {fix}, and "
            "train.batch_invariant = false"
        )
    # Private, in transformers 5.17 to 5.23, whose own error is a ValueError that says to ask for support.
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kernel == "hf:sdpa" and model is not None and not model._supports_sdpa:
        raise ConfigError(f"unsupported-combination: {what}: transformers does not compute it so; {fix}")


def kv_heads(config: Any) -> int:
    """Return the number of key/value heads of a text config; older families have one for each query head."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def is_moe(config: Any) -> bool:
    """Return whether a text config is of a model with experts."""
    return option(config, "num_experts_per_tok") is not None


def has_delta_nets(config: Any) -> bool:
    """Return whether a text config is of a model with gated delta nets among its layers."""
    return _DELTA_NET in (option(config, "layer_types") or ())


def foreign_options(config: Any) -> dict[str, Any]:
    """Return the keys of config.json that another architecture reads, and this one does not."""
    known = frozenset().union(*(record.reads for record in ARCHITECTURES.values())) - SIZES
    keys = known - reads_of(config) - {"hidden_act", "hidden_activation", "num_labels", "tie_word_embeddings"}
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
