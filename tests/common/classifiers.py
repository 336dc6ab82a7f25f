"""Reward models of a few thousand parameters, saved as folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForSequenceClassification


def save_classifier(folder: Path, tokenizer: Any, *, seed: int = 0, **changes: Any) -> Path:
    """A random sequence classifier with one label, and its tokenizer."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    own: dict[str, Any] = {"vocab_size": len(tokenizer), "num_labels": 1, "initializer_range": 0.3}
    torch.manual_seed(seed)
    LlamaForSequenceClassification(LlamaConfig(**sizes | ids | own | changes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
