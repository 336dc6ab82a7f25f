import pytest
import torch
from raising import raises
from torch import nn
from transformers import (
    AutoConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Qwen2Config,
)

from lockstep.errors import ConfigError, ModelError
from lockstep.models.architectures import (
    ARCHITECTURES,
    check_architecture,
    check_kernel,
    layer_windows,
    max_positions,
)
from lockstep.models.architectures.checks import modelling_reads
from lockstep.models.forward import head_of

SIZES = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "short_factor": [1.0] * 64,
    "long_factor": [4.0] * 64,
    "original_max_position_embeddings": 64,
}
GEMMA_ROPES = {
    "full_attention": {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


@pytest.mark.parametrize("cap", [None, 3.0])
def test_head_gives_the_models_own_logits(cap):
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, final_logit_softcapping=cap)).eval()
    ids = torch.arange(5)[None]
    hidden, head = model.model(ids, use_cache=False).last_hidden_state, head_of(model)
    logits = hidden @ (10 * head.weight).T
    with torch.no_grad():
        model.lm_head.weight.mul_(10)
        # The embedding is tied: undo its change by feeding the old hidden states to the head alone.
        expected = model.lm_head(hidden)
        expected = expected if cap is None else torch.tanh(expected / cap) * cap
    logits = logits if head.softcap is None else torch.tanh(logits / head.softcap) * head.softcap
    torch.testing.assert_close(logits, expected)
    assert head.weight is model.lm_head.weight and head.bias is None and head.logit_scale == 1.0


def test_a_wrapped_head_is_refused():
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.lm_head = nn.Sequential(model.lm_head)
    with raises(ModelError, "unsupported-model: Sequential"):
        head_of(model)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Gemma3Config(), "unsupported-model: gemma3"),
        (LlamaConfig(attention_dropout=0.1), "unsupported-model: attention_dropout"),
        (LlamaConfig(is_causal=False), "unsupported-model: is_causal"),
        (
            LlamaConfig(rope_parameters=LONGROPE | {"rope_type": "axial"}),
            "unsupported-model: rope_type, axial",
        ),
    ],
)
def test_refused_by_name_with_a_reason(config, message):
    with raises(ModelError, message):
        check_architecture(config)


@pytest.mark.parametrize(
    ("config", "kernel", "message"),
    [
        (Gemma2Config(), "varlen", "unsupported-combination: train.attention, attn_logit_softcapping = 50.0"),
        (Gemma2Config(), "hf:sdpa", "unsupported-combination: train.attention, does not compute it so"),
        (GptOssConfig(), "hf:sdpa", "unsupported-combination: train.attention, does not compute it so"),
    ],
)
def test_a_kernel_that_computes_another_model_is_refused(config, kernel, message):
    with raises(ConfigError, message):
        check_kernel(config, kernel)
    for other in ("sdpa", "flex", "hf:eager"):
        check_kernel(config, other)


def test_documents_are_kept_within_what_does_not_depend_on_neighbours():
    assert max_positions(LlamaConfig(max_position_embeddings=256, rope_parameters=LONGROPE)) == 64
    assert max_positions(Gemma3TextConfig(max_position_embeddings=256, rope_parameters=GEMMA_ROPES)) == 256
    yarn = LONGROPE | {"rope_type": "yarn"}
    assert max_positions(LlamaConfig(max_position_embeddings=256, rope_parameters=yarn)) == 256


def test_windows_by_layer():
    assert layer_windows(MistralConfig(num_hidden_layers=2, sliding_window=7)) == (7, 7)
    assert layer_windows(MistralConfig(num_hidden_layers=2, sliding_window=None)) == (None, None)
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(num_hidden_layers=2, layer_types=kinds, sliding_window=5)
    assert layer_windows(config) == (5, None)
    assert layer_windows(LlamaConfig(num_hidden_layers=2)) == (None, None)


WRAPPED = {"image_token_id", "mm_tokens_per_image", "text_config", "video_token_id", "vision_config"}
"""Read by the multimodal wrapper in the same file."""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_record_has_what_the_modelling_code_reads(architecture):
    """Every `config.NAME` in transformers' source."""
    config = type(AutoConfig.for_model(architecture))
    assert ARCHITECTURES[architecture].reads == modelling_reads(config) - WRAPPED


def test_keys_that_the_architecture_does_not_read_mean_nothing(caplog):
    config = LlamaConfig(**SIZES, sliding_window=4, final_logit_softcapping=2.0, attn_logit_softcapping=1.0)
    check_architecture(config)
    assert "sliding_window = 4" in caplog.text and "final_logit_softcapping = 2.0" in caplog.text
    assert layer_windows(config) == (None, None)
    assert head_of(LlamaForCausalLM(config)).softcap is None
    caplog.clear()
    for plain in (LlamaConfig(), MistralConfig(), Gemma3TextConfig(), Qwen2Config()):
        check_architecture(plain)
    assert not caplog.text
    # A Qwen 2 that does not use its window, as published.
    assert layer_windows(Qwen2Config(num_hidden_layers=2, sliding_window=9)) == (None, None)
