import pytest
import torch
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
)

from lockstep.errors import ModelError
from lockstep.models.architectures import check_architecture, layer_windows
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
    with pytest.raises(ModelError, match="is a Sequential, not a plain linear"):
        head_of(model)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2Config(), "architecture 'gpt2' is not supported: its positions are learned"),
        (Gemma2Config(), "'gemma2' is not supported: it soft-caps attention scores"),
        (Gemma3Config(), "'gemma3' is not supported: it is the multimodal wrapper"),
        (LlamaConfig(attention_dropout=0.1), "attention_dropout = 0.1"),
        (Gemma3TextConfig(attn_logit_softcapping=50.0), "attn_logit_softcapping = 50.0"),
    ],
)
def test_refused_by_name_with_a_reason(config, message):
    with pytest.raises(ModelError, match=message):
        check_architecture(config)


def test_windows_by_layer():
    assert layer_windows(MistralConfig(num_hidden_layers=2, sliding_window=7)) == (7, 7)
    assert layer_windows(MistralConfig(num_hidden_layers=2, sliding_window=None)) == (None, None)
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(num_hidden_layers=2, layer_types=kinds, sliding_window=5)
    assert layer_windows(config) == (5, None)
    assert layer_windows(LlamaConfig(num_hidden_layers=2)) == (None, None)
