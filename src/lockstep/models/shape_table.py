"""The named architectures behind `shape:NAME`, as plain values: importing this loads no torch.

The published ones carry the exact config of the hub model of that name. The tiny ones are for tests:
vocabulary 256, hidden size 64, two layers, 4 query and 2 key/value heads, and weights wide enough for
attention to matter.
"""

from __future__ import annotations

from typing import Any

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
_TINY_DELTA_NET: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "tie_word_embeddings": True,
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
    "qwen3-14b": _QWEN3  # Qwen/Qwen3-14B
    | {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": _QWEN3  # Qwen/Qwen3-30B-A3B
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
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
    "tiny-mixtral": _TINY
    | {
        "model_type": "mixtral",
        "intermediate_size": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
    "tiny-qwen2-moe": _TINY
    | {
        "model_type": "qwen2_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "tie_word_embeddings": False,
    },
    "tiny-qwen3-moe": _TINY
    | {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
    },
    "tiny-qwen3-next": _TINY
    | _TINY_DELTA_NET
    | {
        "model_type": "qwen3_next",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "norm_topk_prob": True,
    },
    "tiny-qwen3.5": _TINY | _TINY_DELTA_NET | {"model_type": "qwen3_5_text"},
    "tiny-qwen3.5-moe": {key: _TINY[key] for key in _TINY.keys() - {"intermediate_size"}}
    | _TINY_DELTA_NET
    | {
        "model_type": "qwen3_5_moe_text",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
    "tiny-qwen2": _TINY | {"model_type": "qwen2", "tie_word_embeddings": False},
    "tiny-phi3": _TINY
    | {
        "model_type": "phi3",
        "sliding_window": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
        "tie_word_embeddings": False,
    },
    "tiny-olmo2": _TINY | {"model_type": "olmo2", "tie_word_embeddings": False},
    "tiny-olmo3": _TINY
    | {
        "model_type": "olmo3",
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": False,
    },
    "tiny-smollm3": _TINY | {"model_type": "smollm3", "no_rope_layers": [1, 0], "tie_word_embeddings": True},
    "tiny-granite": _TINY
    | {
        "model_type": "granite",
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.22,
        "logits_scaling": 2.0,
        "tie_word_embeddings": True,
    },
    "tiny-cohere2": _TINY
    | {
        "model_type": "cohere2",
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "logit_scale": 0.25,
        "tie_word_embeddings": True,
    },
    "tiny-cohere": _TINY
    | {"model_type": "cohere", "logit_scale": 0.25, "use_qk_norm": True, "tie_word_embeddings": True},
    "tiny-gemma2": _TINY
    | {
        "model_type": "gemma2",
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 10.0,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": True,
    },
    "tiny-gpt-oss": _TINY
    | {
        "model_type": "gpt_oss",
        "intermediate_size": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
        "tie_word_embeddings": False,
    },
    "tiny-gemma": _TINY | {"model_type": "gemma", "tie_word_embeddings": True},
    "tiny-glm": _TINY | {"model_type": "glm", "attention_bias": True, "tie_word_embeddings": False},
    "tiny-exaone4": _TINY
    | {
        "model_type": "exaone4",
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": False,
    },
    "tiny-helium": _TINY | {"model_type": "helium", "tie_word_embeddings": False},
    "tiny-ministral": _TINY
    | {
        "model_type": "ministral",
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": False,
    },
    "tiny-seed-oss": _TINY
    | {
        "model_type": "seed_oss",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
        "tie_word_embeddings": False,
    },
    "tiny-glm4": _TINY | {"model_type": "glm4", "attention_bias": True, "tie_word_embeddings": False},
    "tiny-gpt-neox": {key: _TINY[key] for key in _TINY.keys() - {"num_key_value_heads", "head_dim"}}
    | {"model_type": "gpt_neox", "tie_word_embeddings": False},
    "tiny-ministral3": _TINY
    | {
        "model_type": "ministral3",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 256,
            "llama_4_scaling_beta": 0.1,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "tie_word_embeddings": False,
    },
    "tiny-mistral": _TINY | {"model_type": "mistral", "sliding_window": 8, "tie_word_embeddings": False},
}
