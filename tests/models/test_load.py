import json
import socket
from pathlib import Path

import pytest
import torch
from raising import raises
from safetensors.torch import load_file, save_file
from torch import nn

from lockstep.config.model import LoraConfig, ModelConfig
from lockstep.errors import ModelError
from lockstep.models import admission, dtypes
from lockstep.models.export import export_hf, model_facts
from lockstep.models.load import LoadedModel, load_model, prepared_config, share_parameters
from lockstep.models.shape_table import SHAPES

CPU = torch.device("cpu")
IDS = torch.arange(3, 43)[None]


def load(name: str | Path, *, attention: str = "hf:sdpa", **options: object) -> LoadedModel:
    config = ModelConfig(name=str(name), **{"dtype": "float32"} | options)
    return load_model(config, attention=attention, device=CPU)


def parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(remove_duplicate=False))


@pytest.fixture()
def folder(tmp_path: Path) -> Path:
    export_hf(load("shape:tiny-llama").module, None, tmp_path / "model")
    return tmp_path / "model"


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_gives_the_weights_that_were_saved(folder: Path) -> None:
    source, loaded = load("shape:tiny-llama"), load(folder)
    assert all(torch.equal(p, parameters(source.module)[n]) for n, p in parameters(loaded.module).items())
    assert (loaded.tokenizer, loaded.max_positions, loaded.eos_token_ids) == (None, 4096, (2,))
    assert not loaded.module.training


@pytest.mark.parametrize("name", [name for name in SHAPES if name.startswith("tiny")])
def test_every_architecture_is_loaded_from_a_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "admit", lambda config, name: None)  # proofs have tests of their own
    source = load(f"shape:{name}", attention="sdpa")
    export_hf(source.module, None, tmp_path)
    loaded = parameters(load(tmp_path, attention="sdpa").module)
    assert loaded.keys() == parameters(source.module).keys()
    assert all(torch.equal(p, loaded[n]) for n, p in parameters(source.module).items())


def test_loading_asks_no_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)

    def refuse(self: socket.socket, address: object) -> None:
        raise AssertionError(f"connects to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    load(folder)


def test_weights_come_in_the_compute_dtype(folder: Path) -> None:
    loaded = load(folder, dtype="bfloat16")
    assert {p.dtype for p in loaded.module.parameters()} == {torch.bfloat16} == {loaded.dtype}
    assert torch.get_default_dtype() == torch.float32


def test_eos_ids_are_the_union_of_all_sources(folder: Path) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=[9, 7])
    loaded = load(folder)
    assert loaded.eos_token_ids == (2, 7, 9)


def test_pad_token_falls_back_to_an_eos_id(folder: Path) -> None:
    edit_json(folder / "config.json", pad_token_id=None)
    assert load(folder).pad_token_id == 2


def test_num_layers_keeps_the_first_layers(folder: Path) -> None:
    whole, cut = parameters(load(folder).module), parameters(load(folder, num_layers=1).module)
    assert set(whole) - set(cut) == {n for n in whole if ".layers.1." in n}
    assert all(torch.equal(p, whole[n]) for n, p in cut.items())
    with raises(ModelError, "out-of-range: model.num_layers"):
        load(folder, num_layers=3)


def drop_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def cut_the_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def pickle_the_weights(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("spoil", "what", "fields"),
    [
        (drop_a_weight, "wrong-shape", {"missing_keys": ["model.norm.weight"]}),
        (
            lambda folder: edit_json(folder / "config.json", intermediate_size=128),
            *("wrong-shape: model.layers.0.mlp.gate_proj.weight", {}),
        ),
        (cut_the_weights, "damaged-file: a weight file", {}),
        (pickle_the_weights, "cannot-read: weights", {}),
        (lambda folder: (folder / "config.json").unlink(), "wrong-kind-of-file", {}),
    ],
    ids=["missing weight", "another shape", "damaged", "pickled", "no config"],
)
def test_weights_that_are_not_the_models_are_refused(folder, spoil, what, fields):
    spoil(folder)
    with raises(ModelError, what, **fields):
        load(folder)


def test_code_that_comes_with_a_model_is_not_run(folder: Path, tmp_path: Path) -> None:
    edit_json(
        folder / "config.json",
        model_type="own",
        auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"},
    )
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with raises(ModelError, "cannot-read: config"):
        load(folder)
    assert not (tmp_path / "ran").exists()


def test_quantised_models_are_refused_to_the_trainer_and_left_to_engines(folder: Path) -> None:
    edit_json(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    packed = {"model.layers.0.self_attn.q_proj.qweight": torch.zeros(8, 64, dtype=torch.int32)}
    save_file(packed, folder / "model.safetensors")
    with raises(ModelError, "unsupported-model: quantised weights"):
        load(folder)
    assert model_facts(ModelConfig(name=str(folder))).max_positions == 4096


def test_a_config_is_read_where_of_the_weights_only_the_index_was_fetched(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert prepared_config(ModelConfig(name=str(folder))).num_hidden_layers == 2
    with raises(ModelError, "cannot-read: weights"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/folder", "no-such-file: /no/such/folder"),
        ("not a name", "unknown-name: not a name"),
        ("bundled:nothing", "unknown-name: nothing"),
    ],
)
def test_a_wrong_name_says_what_to_set(name: str, message: str) -> None:
    with raises(ModelError, message):
        load(name)


def test_a_hub_that_cannot_be_reached_names_cause_and_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(self: socket.socket, address: object) -> None:
        raise OSError("network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", unreachable)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: unreachable(None, None))
    with raises(ModelError, "unreachable"):
        load("nobody/nothing", revision="main")


@pytest.fixture
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable hides units of the CPU from torch."""
    for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("unlimited")
@pytest.mark.parametrize(
    ("flags", "expected"), [({"avx2", "avx512f"}, torch.float32), ({"amx_bf16"}, torch.bfloat16)]
)
def test_auto_dtype_follows_the_cpu(
    flags: set[str], expected: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dtypes, "cpu_flags", lambda: frozenset(flags))
    with caplog.at_level("INFO"):
        assert dtypes.resolve_dtype("auto", CPU) == expected
    assert str(expected).removeprefix("torch.") in caplog.text


@pytest.mark.usefixtures("unlimited")
@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("ATEN_CPU_CAPABILITY", "avx2", torch.float32),
        ("ATEN_CPU_CAPABILITY", "avx512", torch.bfloat16),
        ("ONEDNN_MAX_CPU_ISA", "AVX2", torch.float32),
        ("DNNL_MAX_CPU_ISA", "avx512_core", torch.float32),
        ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16", torch.bfloat16),  # AMX is hidden, AVX512-BF16 is not
        ("ONEDNN_MAX_CPU_ISA", "DEFAULT", torch.bfloat16),
        ("MKL_ENABLE_INSTRUCTIONS", "AVX2", torch.float32),
    ],
)
def test_auto_dtype_honours_variables_that_limit_the_cpu(
    variable: str, value: str, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtypes, "cpu_flags", lambda: frozenset({"amx_bf16", "avx512_bf16"}))
    monkeypatch.setenv(variable, value)
    assert dtypes.resolve_dtype("auto", CPU) == expected
    fast, reason = dtypes.fast_bfloat16(CPU)
    assert fast == (expected == torch.bfloat16)
    assert fast or f"{variable} = {value}" in reason


@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-qwen3", "tiny-gemma3", "tiny-mistral"])
def test_a_second_skeleton_has_the_very_same_parameters(shape: str) -> None:
    loaded = load(f"shape:{shape}")
    twin = share_parameters(loaded.module, attention="hf:eager")
    assert parameters(twin).keys() == parameters(loaded.module).keys()
    assert all(p is parameters(loaded.module)[n] for n, p in parameters(twin).items())
    assert all(b is dict(loaded.module.named_buffers())[n] for n, b in twin.named_buffers())
    assert loaded.module.config._attn_implementation == "sdpa"
    assert {m.config._attn_implementation for m in twin.modules() if hasattr(m, "config")} == {"eager"}
    with torch.no_grad():
        torch.testing.assert_close(twin(input_ids=IDS).logits, loaded.module(input_ids=IDS).logits)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
def test_an_optimizer_step_is_seen_by_the_second_skeleton(lora: LoraConfig | None) -> None:
    module = load("shape:tiny-qwen3", lora=lora).module
    twin = share_parameters(module, attention="hf:eager")
    before = twin(input_ids=IDS).logits.detach()
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    module(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    after = twin(input_ids=IDS).logits.detach()
    assert (after - before).abs().max() > 1e-3
    torch.testing.assert_close(after, module(input_ids=IDS).logits.detach())


def test_the_second_skeleton_keeps_its_own_settings() -> None:
    module = load("shape:tiny-llama").module
    twin = share_parameters(module, attention="hf:eager")
    module.train()
    module.register_forward_hook(lambda *_: pytest.fail("the hook of the other module ran"))
    assert not twin.training
    twin(input_ids=IDS)


def test_a_tokenizer_that_is_there_is_loaded_with_its_template(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 5, "b": 6, "[END]": 11}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]", eos_token="[END]")
    made.chat_template = "{{ messages[0]['content'] }}"
    made.save_pretrained(folder)
    loaded = load(folder)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer("a b")["input_ids"] == [5, 6]
    assert loaded.tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a"
    assert loaded.eos_token_ids == (2, 11)
