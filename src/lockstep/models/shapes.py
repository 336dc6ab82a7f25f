"""`shape:NAME`: named architectures with random weights and no tokenizer.

The published ones carry the exact config of the hub model of that name. The tiny ones are for tests:
vocabulary 256, hidden size 64, two layers, 4 query and 2 key/value heads, and weights wide enough for
attention to matter.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.initialization import no_init_weights

from lockstep.errors import ModelError, unknown_name

PREFIX = "shape:"

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}


def _llama3_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_TINY: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _LLAMA  # meta-llama/Llama-3.1-8B
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "head_dim": 128,
        "rope_parameters": _llama3_rope(8.0),
        "tie_word_embeddings": False,
    },
    "llama-3.2-1b": _LLAMA  # meta-llama/Llama-3.2-1B
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
        "rope_parameters": _llama3_rope(32.0),
        "tie_word_embeddings": True,
    },
    "llama-3.2-3b": _LLAMA  # meta-llama/Llama-3.2-3B
    | {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "head_dim": 128,
        "rope_parameters": _llama3_rope(32.0),
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": _QWEN3  # Qwen/Qwen3-0.6B
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _QWEN3  # Qwen/Qwen3-8B
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "tiny-llama": _TINY | {"model_type": "llama", "attention_bias": True, "tie_word_embeddings": False},
    "tiny-qwen3": _TINY | {"model_type": "qwen3", "tie_word_embeddings": True},
    "tiny-gemma3": _TINY
    | {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 16,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": True,
    },
    "tiny-mistral": _TINY | {"model_type": "mistral", "sliding_window": 8, "tie_word_embeddings": False},
}


def shape_config(name: str) -> PretrainedConfig:
    """The transformers config of `shape:name` (without the prefix); a new object on every call.

    Raises:
        ModelError: an unknown name; the text lists the known ones.
    """
    if name not in SHAPES:
        raise ModelError(unknown_name("shape", name, SHAPES))
    return AutoConfig.for_model(**SHAPES[name])


def random_model(
    config: PretrainedConfig, *, seed: int, dtype: torch.dtype, device: torch.device, attention: str
) -> nn.Module:
    """A causal LM of `config` whose weights are drawn in `dtype`, on `device`; no larger copy ever exists.

    Every Parameter has its own generator, seeded by (seed, Parameter name): the same layers come out whatever
    `num_hidden_layers` is. The numbers depend on the device type and dtype, not on the number of threads.

    Args:
        attention: name of the implementation in transformers' AttentionInterface.
    """
    with torch.device(device), no_init_weights():
        module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    module.tie_weights()
    if module.generation_config is not None:
        # transformers derives it from the config and would read a list of eos ids only from here.
        module.generation_config.eos_token_id = config.eos_token_id
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            _fill(name, parameter, seed=seed, config=config)
    return module.eval()


def _fill(name: str, parameter: nn.Parameter, *, seed: int, config: PretrainedConfig) -> None:
    """Matrices N(0, initializer_range); biases too; norm weights around what acts as 1."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    if "norm" in name and parameter.ndim == 1:
        # Gemma multiplies by 1 + weight, everybody else by weight.
        centre = 0.0 if config.model_type.startswith("gemma") else 1.0
        parameter.normal_(centre, 0.1, generator=generator)
    else:
        parameter.normal_(0.0, config.initializer_range, generator=generator)
