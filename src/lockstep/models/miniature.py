"""A small random model with another model's options, for admission proofs.

Layers, heads, vocabulary and the lengths in the config shrink; everything that decides *which* function is
computed stays: kinds of layers, rotary embedding, windows, soft caps, biases, activation, head size, ties.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from lockstep.errors import ModelError
from lockstep.invariant import experts
from lockstep.models import delta_net, shapes
from lockstep.models.architectures import architecture_of, option, rope_parameters
from lockstep.models.architectures.checks import BOUNDED
from lockstep.models.heads import HeadKind

LENGTHS = (3, 9, 20, 40)
"""Tokens of the documents of a proof: within the miniature's lengths, and far beyond them."""
WINDOW = 6
"""The largest sliding window of a miniature: most documents are longer."""
POSITIONS = 16
"""The shortest length that the config names, such as a rotary embedding's original one; others in
proportion."""
BOUND = 64
"""The same, where no document may be longer: see `lockstep.models.architectures.max_positions`."""
VOCABULARY = 64
_HEAD_GROUP = 8


def tiny_model(config: PretrainedConfig) -> Any:
    """Return a small copy of a config: at least two layers, one of each kind."""
    small: Any = copy.deepcopy(config.get_text_config())
    _shrink_lengths(small)
    _shrink_heads(small)
    _shrink_layers(small)
    if (window := option(small, "sliding_window")) is not None:
        small.sliding_window = min(window, WINDOW)
    small.intermediate_size = 64
    small.vocab_size = VOCABULARY
    small.pad_token_id = small.bos_token_id = small.eos_token_id = None
    small.initializer_range = 0.2  # wide enough for attention to matter
    small.return_dict, small.output_attentions, small.output_hidden_states = True, False, False
    if (record := architecture_of(small)) is not None:
        record.shrink(small)
    return small


def random_miniature(small: PretrainedConfig, *, attention: str, head: HeadKind = "logits") -> nn.Module:
    """Build the miniature in float32 on the CPU, with the same weights on every call.

    Args:
        attention: name in transformers' AttentionInterface.
    """
    cpu = torch.device("cpu")
    own = copy.deepcopy(small)  # a model writes into its config
    module = shapes.random_model(own, seed=0, dtype=torch.float32, device=cpu, attention=attention, head=head)
    if attention != "eager":  # that one is transformers' own, which ours is compared with
        experts.install(module)
        delta_net.install(module)
    return module


def empty_module(config: PretrainedConfig) -> nn.Module:
    """Build a config's model on the meta device."""
    with torch.device("meta"):
        return shapes.empty_model(copy.deepcopy(config), dtype=torch.float32)


def documents() -> list[list[int]]:
    """Token ids of the documents of a proof."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]


def _shrink_lengths(small: Any) -> None:
    """Scale all lengths by one factor, so that their ratios stay the same."""
    ropes = rope_parameters(small)
    originals = [rope[_ORIGINAL] for rope in ropes if rope.get(_ORIGINAL)]
    # Learned positions are a table of that length.
    bounded = not ropes or any(rope.get("rope_type") in BOUNDED for rope in ropes)
    scale = (BOUND if bounded else POSITIONS) / min(originals, default=small.max_position_embeddings)
    for rope in ropes:
        if rope.get(_ORIGINAL):
            rope[_ORIGINAL] = max(1, round(rope[_ORIGINAL] * scale))
    for key in (
        "max_position_embeddings",
        _ORIGINAL,
    ):  # the second is Phi 3's, which writes it over the rope's
        if getattr(small, key, None):
            setattr(small, key, max(1, round(getattr(small, key) * scale)))


_ORIGINAL = "original_max_position_embeddings"


def _shrink_layers(small: Any) -> None:
    """Keep the first layer of each kind: layers differ where a list of the config, one item a layer, does."""
    total = small.num_hidden_layers
    lists = {
        key: value
        for key, value in vars(small).items()
        if "layer" in key and isinstance(value, list | tuple) and len(value) == total
    }
    kinds = [tuple(map(repr, items)) for items in zip(*lists.values(), strict=True)]
    kept = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    kept = kept if len(kept) > 1 else [0, 0]
    for key, value in lists.items():
        setattr(small, key, [value[i] for i in kept])
    small.num_hidden_layers = len(kept)


def _shrink_heads(small: Any) -> None:
    """Keep at most two key/value heads, with the same number of query heads for each, up to eight."""
    heads = small.num_attention_heads
    kv_heads = getattr(small, "num_key_value_heads", None)
    head_dim = getattr(small, "head_dim", None) or small.hidden_size // heads
    if kv_heads is None:  # such models have no head_dim of their own: it follows from the hidden size
        small.num_attention_heads = min(heads, 2)
        small.hidden_size = small.num_attention_heads * head_dim
        return
    small.num_key_value_heads = min(kv_heads, 2)
    if getattr(small, "head_dim", None) is None and architecture_of(small) is None:
        # Nothing says whether the model would read one: it may follow from the hidden size.
        small.num_attention_heads = small.num_key_value_heads * min(heads // kv_heads, 2)
        small.hidden_size = small.num_attention_heads * head_dim
        return
    small.head_dim = head_dim
    small.num_attention_heads = small.num_key_value_heads * min(heads // kv_heads, _HEAD_GROUP)
    # A multiple of the number of heads, as transformers asks.
    small.hidden_size = small.num_attention_heads * -(-64 // small.num_attention_heads)


def keep_layers(hf_config: PretrainedConfig, num_layers: int) -> None:
    """Cut a config down to its first `num_layers` layers, per-layer lists (such as layer_types) included.

    Raises:
        ModelError: the model has fewer layers.
    """
    text = hf_config.get_text_config()
    total = text.num_hidden_layers
    if num_layers > total:
        raise ModelError(
            f"out-of-range: model.num_layers = {num_layers}, but the model has {total} layers; set at most "
            f"{total}"
        )
    # By length, not by name: each family calls its per-layer lists differently, and more are added.
    for key, value in list(vars(text).items()):
        if "layer" in key and isinstance(value, list | tuple) and len(value) == total:
            setattr(text, key, value[:num_layers])
    text.num_hidden_layers = num_layers
