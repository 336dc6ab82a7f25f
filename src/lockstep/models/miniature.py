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

from lockstep.models import shapes
from lockstep.models.architectures import option, rope_parameters

LENGTHS = (3, 9, 20, 40)
"""Tokens of the documents of a proof: within the miniature's lengths, and far beyond them."""
WINDOW = 6
"""The largest sliding window of a miniature: most documents are longer."""
POSITIONS = 16
"""The shortest length that the config names, such as a rotary embedding's original one; others in
proportion."""
VOCABULARY = 64
_HEAD_GROUP = 8


def miniature(config: PretrainedConfig) -> Any:
    """Return a small copy of a supported config: at least two layers, one of each kind."""
    small: Any = copy.deepcopy(config.get_text_config())
    _shrink_lengths(small)
    _shrink_heads(small)
    kinds = option(small, "layer_types")
    small.num_hidden_layers = 2
    if kinds is not None:
        different = list(dict.fromkeys(kinds))
        small.layer_types = different * (2 // len(different))
        small.num_hidden_layers = len(small.layer_types)
    if (window := option(small, "sliding_window")) is not None:
        small.sliding_window = min(window, WINDOW)
    small.intermediate_size = 64
    small.vocab_size = VOCABULARY
    small.pad_token_id = small.bos_token_id = small.eos_token_id = None
    small.initializer_range = 0.2  # wide enough for attention to matter
    small.return_dict, small.output_attentions, small.output_hidden_states = True, False, False
    return small


def random_miniature(small: PretrainedConfig, *, attention: str) -> nn.Module:
    """Build the miniature in float32 on the CPU, with the same weights on every call.

    Args:
        attention: name in transformers' AttentionInterface.
    """
    cpu = torch.device("cpu")
    own = copy.deepcopy(small)  # a model writes into its config
    return shapes.random_model(own, seed=0, dtype=torch.float32, device=cpu, attention=attention)


def documents() -> list[list[int]]:
    """Token ids of the documents of a proof."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]


def _shrink_lengths(small: Any) -> None:
    """Scale all lengths by one factor, so that their ratios stay the same."""
    ropes = rope_parameters(small)
    originals = [rope[_ORIGINAL] for rope in ropes if rope.get(_ORIGINAL)]
    scale = POSITIONS / min(originals, default=small.max_position_embeddings)
    for rope in ropes:
        if rope.get(_ORIGINAL):
            rope[_ORIGINAL] = max(1, round(rope[_ORIGINAL] * scale))
    small.max_position_embeddings = max(1, round(small.max_position_embeddings * scale))


_ORIGINAL = "original_max_position_embeddings"


def _shrink_heads(small: Any) -> None:
    """Keep at most two key/value heads, with the same number of query heads for each, up to eight."""
    heads, kv_heads = small.num_attention_heads, small.num_key_value_heads
    small.head_dim = getattr(small, "head_dim", None) or small.hidden_size // heads
    small.num_key_value_heads = min(kv_heads, 2)
    small.num_attention_heads = small.num_key_value_heads * min(heads // kv_heads, _HEAD_GROUP)
    # A multiple of the number of heads, as transformers asks.
    small.hidden_size = small.num_attention_heads * -(-64 // small.num_attention_heads)
