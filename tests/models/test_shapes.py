import pytest
import torch
from raising import raises
from transformers import AutoModelForCausalLM

from lockstep.errors import ModelError
from lockstep.models.miniature import keep_layers
from lockstep.models.shapes import SHAPES, random_model, shape_config

CPU = torch.device("cpu")
# Sizes of the published checkpoints (safetensors metadata of the hub models).
PUBLISHED = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
}
TINY = [name for name in SHAPES if name.startswith("tiny-")]


def tiny(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return random_model(shape_config(name), seed=seed, dtype=dtype, device=CPU, attention="eager")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_have_the_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(shape_config(name))
    module.tie_weights()
    assert sum(p.numel() for p in module.parameters()) == PUBLISHED[name]


def test_llama3_rope_scaling_is_applied() -> None:
    # By hand for theta 5e5, head_dim 128, factor 8: wavelengths below 8192/4 keep their frequency, those
    # above 8192 have it divided by 8 (Llama 3.1 model card).
    config = shape_config("llama-3.1-8b")
    keep_layers(config, 1)
    config.hidden_size, config.vocab_size, config.intermediate_size = 64, 8, 8
    config.num_attention_heads = config.num_key_value_heads = 1
    module = random_model(config, seed=0, dtype=torch.float32, device=CPU, attention="eager")
    inv_freq = module.model.rotary_emb.inv_freq
    plain = 500000.0 ** (-torch.arange(0, 128, 2) / 128)
    torch.testing.assert_close(inv_freq[:20], plain[:20])
    torch.testing.assert_close(inv_freq[-20:], plain[-20:] / 8)


@pytest.mark.parametrize("name", TINY)
def test_no_norm_weight_or_bias_is_constant(name: str) -> None:
    for parameter_name, parameter in tiny(name).named_parameters():
        offset = any(family in name for family in ("gemma", "qwen3.5", "qwen3-next"))  # they add 1
        ones = ("linear_attn.norm.weight", "linear_attn.dt_bias")
        centre = float(parameter_name.endswith(ones) or ("norm" in parameter_name and not offset))
        centre = 0.5 if "conv1d" in parameter_name else centre
        few = parameter.numel() < 8  # sinks: one for each head
        assert parameter.std() > (0.02 if few else 0.05), parameter_name
        assert abs(parameter.mean() - centre) < 0.08, parameter_name


def test_weights_depend_on_the_seed_and_nothing_else() -> None:
    first = tiny("tiny-llama").state_dict()
    torch.manual_seed(99)
    again = tiny("tiny-llama").state_dict()
    other = tiny("tiny-llama", seed=1).state_dict()
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert not any(torch.equal(first[k], other[k]) for k in first)


def test_no_two_parameters_share_their_numbers() -> None:
    firsts = [p.detach().flatten()[:32] - p.detach().mean().round() for p in tiny("tiny-llama").parameters()]
    scaled = torch.stack([values / values.norm() for values in firsts])
    cosines = (scaled @ scaled.T).fill_diagonal_(0.0)
    assert cosines.abs().max() < 0.9


def test_a_truncated_shape_has_the_first_layers_of_the_whole_one() -> None:
    config = shape_config("tiny-gemma3")
    keep_layers(config, 1)
    one = random_model(config, seed=0, dtype=torch.float32, device=CPU, attention="eager").state_dict()
    two = tiny("tiny-gemma3").state_dict()
    assert config.layer_types == ["sliding_attention"]
    assert set(two) - set(one) == {k for k in two if ".layers.1." in k}
    assert all(torch.equal(one[k], two[k]) for k in one)


def test_building_in_bfloat16_leaves_the_default_dtype_and_the_generator_alone() -> None:
    state = torch.get_rng_state()
    module = tiny("tiny-qwen3", dtype=torch.bfloat16)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert module.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32
    assert torch.equal(torch.get_rng_state(), state)
    assert module.lm_head.weight is module.model.embed_tokens.weight


@pytest.mark.parametrize("name", TINY)
def test_attention_matters_in_tiny_shapes(name: str) -> None:
    module = tiny(name)
    ids = torch.randint(0, 256, (1, 20), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[0, 15] = (ids[0, 15] + 1) % 256
    with torch.no_grad():
        delta = (module(input_ids=ids).logits - module(input_ids=changed).logits)[0].abs().amax(-1)
    assert delta[:15].max() < 1e-5
    assert delta[16:].min() > 1e-2


def test_tiny_shapes_take_long_documents() -> None:
    assert all(SHAPES[name]["max_position_embeddings"] >= 2048 for name in TINY)


def test_an_unknown_shape_lists_the_known_ones() -> None:
    with raises(ModelError, "unknown-name: llama-3.2-1"):
        shape_config("llama-3.2-1")
