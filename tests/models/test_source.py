"""Models without weights: what is read tensor by tensor is what load_model gives whole, to the bit."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from raising import raises
from safetensors.torch import load_file, save_file
from torch import nn

from lockstep.config.model import LoraConfig, ModelConfig
from lockstep.errors import ModelError
from lockstep.models.export import export_hf
from lockstep.models.heads import HeadKind
from lockstep.models.load import LoadedModel, load_model
from lockstep.models.source import kept_buffers

CPU = torch.device("cpu")
TINY = [
    "tiny-llama",
    "tiny-qwen3",
    "tiny-gemma3",
    "tiny-mistral",
    "tiny-qwen3-moe",
    "tiny-qwen2-moe",
    "tiny-mixtral",
]


def load(name: str | Path, *, materialize: bool = True, **options: object) -> LoadedModel:
    config = ModelConfig(name=str(name), **{"dtype": "float32"} | options)
    return load_model(config, attention="hf:sdpa", device=CPU, materialize=materialize)


def assert_same(name: str | Path, **options: object) -> None:
    """Everything that is known about the model is equal, and every weight, whole and in parts."""
    whole, bare = load(name, **options), load(name, materialize=False, **options)
    assert bare.source is not None and whole.source is None
    for field in ("eos_token_ids", "pad_token_id", "dtype", "name", "max_positions"):
        assert getattr(bare, field) == getattr(whole, field)
    assert not bare.module.training
    assert all(p.is_meta and p.requires_grad for p in bare.module.parameters())
    theirs = dict(whole.module.named_parameters(remove_duplicate=False))
    own = dict(bare.module.named_parameters(remove_duplicate=False))
    assert [n for n, _ in bare.module.named_parameters()] == [n for n, _ in whole.module.named_parameters()]
    assert own.keys() == theirs.keys()
    for key, expected in theirs.items():
        assert (own[key].shape, own[key].dtype) == (expected.shape, expected.dtype)
        found = bare.source.read(key, device=CPU)
        assert found.dtype == expected.dtype and torch.equal(found, expected)
        for dim, size in enumerate(expected.shape):
            cuts = [0, size // 3, size // 3, size]
            parts = [
                bare.source.read_part(key, dim=dim, start=a, stop=b, device=CPU)
                for a, b in itertools.pairwise(cuts)
            ]
            assert torch.equal(torch.cat(parts, dim), expected)
            assert all(p.untyped_storage().nbytes() == p.numel() * p.element_size() for p in parts)
    buffers = dict(bare.module.named_buffers())
    for key, buffer in whole.module.named_buffers():
        assert buffers[key].dtype == buffer.dtype and torch.equal(buffers[key], buffer)
    fill(bare)
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        assert torch.equal(bare.module(input_ids=ids).logits, whole.module(input_ids=ids).logits)


def fill(bare: LoadedModel) -> None:
    with kept_buffers(bare.module):
        bare.module.to_empty(device=CPU)
    with torch.no_grad():
        for name, parameter in bare.module.named_parameters():
            parameter.copy_(bare.source.read(name, device=CPU))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", TINY)
def test_a_shape_gives_the_weights_of_random_model(shape: str, dtype: str) -> None:
    assert_same(f"shape:{shape}", dtype=dtype, seed=3)


@pytest.mark.parametrize("shape", TINY)
def test_a_folder_gives_the_weights_that_from_pretrained_loads(shape: str, tmp_path: Path) -> None:
    export_hf(load(f"shape:{shape}").module, None, tmp_path / "model")
    assert_same(tmp_path / "model")
    assert_same(tmp_path / "model", dtype="bfloat16", num_layers=1)


@pytest.fixture()
def folder(tmp_path: Path) -> Path:
    """Tied, in several files."""
    module = load("shape:tiny-qwen3").module
    module.save_pretrained(tmp_path / "model", max_shard_size="100KB")
    return tmp_path / "model"


def test_an_index_of_several_files_is_followed(folder: Path) -> None:
    assert len(list(folder.glob("*.safetensors"))) > 3
    assert_same(folder)


def test_a_generation_config_counts(folder: Path) -> None:
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [9, 7]}))
    assert load(folder, materialize=False).eos_token_ids == (2, 7, 9)
    assert_same(folder)


def one_file(folder: Path) -> dict[str, torch.Tensor]:
    """The folder's weights; its files are gone."""
    weights: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        weights |= load_file(path)
        path.unlink()
    (folder / "model.safetensors.index.json").unlink()
    return {name: tensor.clone() for name, tensor in weights.items()}


def store(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_checkpoint_of_the_bare_decoder_is_read(folder: Path) -> None:
    weights = one_file(folder)
    store(folder, {name.removeprefix("model."): tensor for name, tensor in weights.items()})
    assert_same(folder)


def test_a_tied_weight_may_be_stored_under_either_name_or_both(folder: Path) -> None:
    weights = one_file(folder)
    embedding = weights.pop("model.embed_tokens.weight")
    store(folder, weights | {"lm_head.weight": embedding})
    assert_same(folder)
    store(folder, weights | {"lm_head.weight": embedding, "model.embed_tokens.weight": embedding.clone()})
    assert_same(folder)
    other = embedding.clone()
    other[-1, -1] += 1
    store(folder, weights | {"lm_head.weight": other, "model.embed_tokens.weight": embedding})
    with raises(ModelError, "values-differ"):
        load(folder, materialize=False)


def same_error(folder: Path, what: str) -> None:
    for materialize in (True, False):
        with raises(ModelError, what) as caught:
            load(folder, materialize=materialize)
        assert str(folder) in str(caught.value)


def test_what_load_model_refuses_is_refused_in_the_same_words(folder: Path) -> None:
    weights = one_file(folder)
    store(folder, {k: v for k, v in weights.items() if k != "model.norm.weight"})
    same_error(folder, "wrong-shape: model.norm.weight")
    store(folder, weights | {"model.norm.weight": torch.ones(63)})
    same_error(folder, "wrong-shape: model.norm.weight")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    same_error(folder, "damaged-file: a weight file")
    path.unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    same_error(folder, "cannot-read: weights")


def test_a_weight_that_nobody_uses_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = one_file(folder)
    store(folder, weights | {"model.extra.weight": torch.ones(3)})
    with caplog.at_level("WARNING"):
        load(folder, materialize=False)
    assert "model.extra.weight" in caplog.text


def test_an_index_cannot_point_outside_the_folder(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    path.write_text(json.dumps(index))
    with raises(ModelError, "cannot-read: weights"):
        load(folder, materialize=False)


@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-qwen3"])
@pytest.mark.parametrize("head", ["logits", "scalar"])
def test_adapters_are_those_of_a_module_with_weights(shape: str, head: HeadKind) -> None:
    """Names, what is trained, ties, and every value, the adapters' random ones included."""
    pytest.importorskip("peft")
    lora = LoraConfig(rank=4, target_modules=("all-linear",))
    config = ModelConfig(name=f"shape:{shape}", dtype="bfloat16", lora=lora, seed=3)
    state = torch.random.get_rng_state()
    whole = load_model(config, attention="sdpa", device=CPU, head=head)
    bare = load_model(config, attention="sdpa", device=CPU, head=head, materialize=False)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert bare.source is not None
    expected = dict(whole.module.named_parameters())
    found = dict(bare.module.named_parameters())
    assert list(found) == list(expected) and all(p.is_meta for p in found.values())
    assert {n for n, p in found.items() if p.requires_grad} == {
        n for n in expected if ".lora_" in n or n == "score.weight"
    }
    for name, values in expected.items():
        assert found[name].requires_grad == values.requires_grad
        assert (found[name].shape, found[name].dtype) == (values.shape, values.dtype)
        assert torch.equal(bare.source.read(name, device=CPU), values)
        part = bare.source.read_part(name, dim=values.ndim - 1, start=1, stop=3, device=CPU)
        assert torch.equal(part, values[..., 1:3])


def test_modules_made_later_have_their_weights() -> None:
    load("shape:tiny-llama", materialize=False)
    assert not nn.Linear(2, 2).weight.is_meta


# Prints by how many MiB memory grew at most while a quarter of a model was read and kept, the MiB that were
# kept, and the same growth while the whole model was loaded.
QUARTER = """
import torch
from pathlib import Path
from lockstep.config.model import ModelConfig
from lockstep.models.load import load_model
from lockstep.models.shape_table import SHAPES

SHAPES["medium"] = SHAPES["tiny-llama"] | {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 10, "vocab_size": 8000
}
device = torch.device("cpu")

def load(name, **options):
    return load_model(ModelConfig(name=name, dtype="float32"), attention="hf:sdpa", device=device, **options)

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(key))) / 1024

def growth(run):
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    kept = run()
    return status("VmHWM") - before, kept

def quarter(name):
    loaded, kept = load(name, materialize=False), []
    for key, parameter in loaded.module.named_parameters():
        stop = parameter.shape[0] // 4
        kept.append(loaded.source.read_part(key, dim=0, start=0, stop=stop, device=device))
    return kept

load("shape:medium").module.save_pretrained("model", max_shard_size="30MB")
load("shape:tiny-llama", materialize=False)  # what is imported late
for name in ("shape:medium", "./model"):
    most, kept = growth(lambda: quarter(name))
    share = sum(t.numel() * 4 for t in kept) / 2**20
    del kept
    print("figures", most, share, growth(lambda: load(name) and None)[0])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_holds_its_share_and_one_tensor(tmp_path: Path) -> None:
    # Otherwise glibc keeps what was freed, up to 32 MiB a block, and it would count here.
    environ = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run(
        [sys.executable, "-c", QUARTER],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=200,
        env=environ,
    )
    assert done.returncode == 0, done.stderr
    figures = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("figures")]
    assert len(figures) == 2
    largest = 8000 * 512 * 4 / 2**20
    for most, share, _ in (map(float, line) for line in figures):
        assert 20 < share < 30
        assert most < share + largest + 12
    assert float(figures[0][2]) > 90  # so the figure sees a whole model; that of a folder is mapped, not read


def test_routers_that_are_not_finite_are_named_before_any_rank_reads_its_part(tmp_path):
    model = load("shape:tiny-qwen3-moe")
    with torch.no_grad():
        model.module.get_parameter("model.layers.1.mlp.gate.weight")[3, 5] = float("inf")
    export_hf(model.module, None, tmp_path)
    for materialize in (True, False):
        with raises(ModelError, "not-finite: model.layers.1.mlp.gate.weight, 1 of 512"):
            load(tmp_path, materialize=materialize)
