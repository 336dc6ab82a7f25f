"""A config is admitted by a proof in small, and one that we get wrong is refused with the two numbers."""

import json

import pytest
import torch
from raising import raises
from transformers import AutoConfig, LlamaConfig

from lockstep.config.model import ModelConfig
from lockstep.engine.spec import EMBEDDED, decoded_gap, decoding_proof
from lockstep.errors import ModelError
from lockstep.models import admission, heads, miniature
from lockstep.models.admission import check_proof, proof_key
from lockstep.models.architectures import ARCHITECTURES, checks, has_delta_nets
from lockstep.models.load import load_model
from lockstep.models.miniature import LENGTHS, POSITIONS, WINDOW, documents, random_miniature, tiny_model
from lockstep.models.proof_rows import TOLERANCE, Gap, forward_gaps, kernels_of
from lockstep.models.shape_table import SHAPES
from lockstep.models.source import bundled_config

PUBLISHED = {
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        },
    },
    "qwen2 with windows in the upper layers": {
        "model_type": "qwen2",
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 4096,
        "max_window_layers": 2,
    },
    "gemma-3-1b": {
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "sliding_window": 512,
        "final_logit_softcapping": 30.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "phi-3.5-mini": {
        "model_type": "phi3",
        "hidden_size": 3072,
        "num_attention_heads": 32,
        "sliding_window": 262144,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0 + i / 40 for i in range(48)],
            "long_factor": [1.0 + i for i in range(48)],
        },
    },
    "mistral-7b-v0.1": {"model_type": "mistral", "sliding_window": 4096},
    "linear": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        "mlp_bias": True,
    },
}


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(admission, "_memory", {})


def config_of(values):
    return AutoConfig.for_model(**values)


def llama(**more):
    return LlamaConfig(
        hidden_size=64, num_attention_heads=4, num_hidden_layers=2, max_position_embeddings=64, **more
    )


def longrope(**more):
    """The issue's example: frequencies change for the whole batch beyond 64 tokens."""
    return llama(
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 8,
            "long_factor": [4.0] * 8,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        **more,
    )


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}


@pytest.mark.parametrize("name", [*SHAPES, "bundled", *PUBLISHED])
def test_supported_configs_pass_in_every_way(name):
    values = (SHAPES | PUBLISHED).get(name)
    config = bundled_config("smollm2-135m") if values is None else config_of(values)
    small = tiny_model(config)
    record = ARCHITECTURES[config.model_type]
    engines = [engine for engine in EMBEDDED if engine != "native" or record.native]
    gaps = [*forward_gaps(small), *(decoded_gap(engine, small) for engine in engines)]
    print(f"{name}: {max(gap.size for gap in gaps):.1e} in {len(gaps)} comparisons")
    tiny = name.startswith("tiny")
    assert max(gap.size for gap in gaps if not gap.of_gradient) <= (1e-5 if tiny else 2e-5)
    # Eager's own gradients are as far from those in float64 where a gated norm blows up small outputs.
    exact = tiny and not has_delta_nets(small)
    assert max(gap.size for gap in gaps if gap.of_gradient) <= (1e-5 if exact else 2e-5)
    ways = 6 * len(kernels_of(small))
    assert len({gap.way for gap in gaps}) == ways + len(engines)
    assert sum(gap.of_gradient for gap in gaps) == ways


def test_the_miniature_keeps_options_and_crosses_every_length():
    config = config_of(SHAPES["llama-3.1-8b"])
    small = tiny_model(config)
    assert small.head_dim == 128 and small.num_attention_heads == 4 * small.num_key_value_heads == 8
    rope = small.rope_parameters
    assert rope["factor"] == 8.0 and rope["original_max_position_embeddings"] == POSITIONS < max(LENGTHS)
    assert small.max_position_embeddings == 256  # 16 times the original one, as in the published config
    assert config.rope_parameters["original_max_position_embeddings"] == 8192  # untouched
    gemma = tiny_model(config_of(PUBLISHED["gemma-3-1b"]))
    assert gemma.layer_types == ["sliding_attention", "full_attention"] and gemma.sliding_window == WINDOW
    assert gemma.final_logit_softcapping == 30.0
    # Attention matters in it: another first token changes the last logprob of a document.
    module, ids = random_miniature(small, attention="eager"), torch.tensor([documents()[1]])
    with torch.no_grad():
        one, other = module(ids).logits[0, -1], module((ids + (torch.arange(9) == 0)) % 64).logits[0, -1]
    assert (one - other).abs().max() > 0.05


@pytest.mark.parametrize(
    ("config", "ways"),
    [
        (longrope(), forward_gaps),
        (llama(rope_parameters=DYNAMIC), forward_gaps),
        (longrope(), lambda small: [decoded_gap("hf", small)]),
        (longrope(), lambda small: [decoded_gap("native", small)]),
    ],
    ids=["longrope", "dynamic", "longrope, hf", "longrope, native"],
)
def test_length_dependent_rotary_embeddings_fail_the_proof(config, ways, monkeypatch):
    """Beyond the length that documents are kept within."""
    monkeypatch.setattr(miniature, "BOUND", 16)
    with raises(ModelError, "unsupported-model: logprob") as error:
        check_proof(config, kind="test", ways=ways, name="m")
    numbers = [float(word.strip(",")) for word in str(error.value).split() if word.startswith("-")]
    assert len(numbers) == 2 and abs(numbers[0] - numbers[1]) > 0.1
    monkeypatch.setattr(admission, "_memory", {})

    def never(small):
        raise AssertionError("the refusal was kept")

    with pytest.raises(ModelError) as again:
        check_proof(config, kind="test", ways=never, name="m")
    assert str(again.value) == str(error.value)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"final_logit_softcapping": 0.5}, "unsupported-model: logprob"),
        ({"sliding_window": 4}, "unsupported-model: KeyError"),
    ],
)
def test_a_key_that_is_believed_fails_the_proof(more, match, monkeypatch):
    """As before the table of what an architecture reads: the attribute, whatever the architecture."""
    small = llama(**more)
    assert max(gap.size for gap in check_proof(small, kind="a", ways=forward_gaps, name="m")) <= TOLERANCE

    def believe(config, name, default=None):
        return getattr(config, name, default)

    monkeypatch.setattr(checks, "option", believe)
    monkeypatch.setattr(heads, "option", believe)
    with raises(ModelError, match):
        check_proof(small, kind="b", ways=forward_gaps, name="m")


def test_a_proof_is_run_once_and_a_damaged_one_again(tmp_path, monkeypatch):
    runs = []

    def ways(small):
        runs.append(small)
        return [Gap(way="w", what="it", ours=-1.0, theirs=-1.0, size=0.0, allowed=1.0)]

    def prove(config):
        monkeypatch.setattr(admission, "_memory", {})
        return check_proof(config, kind="k", ways=ways, name="m")

    first = prove(llama())
    (file,) = (tmp_path / "cache" / "admitted").iterdir()
    assert json.loads(file.read_text())["kind"] == "k"
    assert prove(llama()) == first and len(runs) == 1
    prove(llama(vocab_size=999, intermediate_size=7))  # sizes only
    assert len(runs) == 1
    prove(llama(attention_bias=True))
    assert len(runs) == 2
    for text in ("", "[]", '{"gaps": []}', '{"gaps": [{"ours": 1}]}', '{"gaps": [[]]}', "\x00"):
        file.write_text(text)
        runs.clear()
        assert prove(llama()) == first and len(runs) == 1
    key = proof_key(tiny_model(llama()), "k")
    monkeypatch.setattr(admission, "version", lambda name: "0")
    assert proof_key(tiny_model(llama()), "k") != key


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    check_proof(llama(), kind="forward", ways=forward_gaps, name="m")
    assert "LOCKSTEP_CACHE" in caplog.text


def test_loading_a_folder_asks_for_the_proof(tiny_folder, monkeypatch):
    asked = []
    monkeypatch.setattr(admission, "check_proof", lambda config, **more: asked.append(more["name"]))
    cpu = torch.device("cpu")
    for name in (str(tiny_folder), "shape:tiny-llama"):
        load_model(ModelConfig(name=name), attention="sdpa", device=cpu)
    load_model(ModelConfig(name=str(tiny_folder)), attention="sdpa", device=cpu, materialize=False)
    assert asked == [str(tiny_folder)] * 2


def test_engines_decode_what_they_are_admitted_for():
    for engine in EMBEDDED:
        (gap,) = decoding_proof(engine, llama(), name="m")
        assert gap.size <= TOLERANCE and gap.way == f"decoded by engine {engine}"
