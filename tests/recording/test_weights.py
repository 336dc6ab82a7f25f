from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises
from torch import nn

from lockstep.config.model import LoraConfig, ModelConfig
from lockstep.config.train import TrainConfig
from lockstep.errors import RecordingError
from lockstep.models.load import LoadedModel, load_model
from lockstep.recording.files import fingerprint, module_tensors
from lockstep.recording.weights import FILE, find_weights, load_weights, save_weights
from lockstep.schema.recording import InputMeta
from lockstep.train.local import LocalBackend

LORA = LoraConfig(rank=2)


def model(*, seed: int = 0, **config: Any) -> LoadedModel:
    settings = {"name": "shape:tiny-llama", "dtype": "float32", "seed": seed} | config
    return load_model(ModelConfig(**settings), attention="sdpa", device=torch.device("cpu"))


def moved(module: nn.Module) -> nn.Module:
    """Every trained weight is another one now."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.01)
    return module


def of(module: nn.Module) -> str:
    return fingerprint(module_tensors(module).items())


def meta(**values: Any) -> InputMeta:
    return InputMeta(**{"step": 3, "update": 3, "micro_batch": 0, "num_micro_batches": 1} | values)


def test_weights_come_back_to_the_bit(tmp_path: Path) -> None:
    one, other = moved(model().module), model(seed=1).module
    saved = save_weights(one, tmp_path / "weights/step-000003")
    assert saved == of(one) != of(other)
    assert load_weights(other, tmp_path / "weights/step-000003") == saved == of(other)


def test_nothing_is_written_twice_and_other_weights_replace_them(tmp_path: Path) -> None:
    module = model().module
    save_weights(module, tmp_path)
    stamp = (tmp_path / FILE).stat()
    save_weights(module, tmp_path)
    assert (tmp_path / FILE).stat().st_ino == stamp.st_ino
    saved = save_weights(moved(module), tmp_path)
    assert load_weights(model().module, tmp_path) == saved


def test_of_lora_models_the_adapters(tmp_path: Path) -> None:
    one = moved(model(lora=LORA).module)
    saved = save_weights(one, tmp_path)
    full = save_weights(model().module, tmp_path / "full")
    assert (tmp_path / FILE).stat().st_size < (tmp_path / "full" / FILE).stat().st_size / 5
    other = model(lora=LORA).module
    assert of(other) != saved
    assert load_weights(other, tmp_path) == saved == of(other)
    on_another_base = model(lora=LORA, seed=1).module
    assert load_weights(on_another_base, tmp_path) == of(on_another_base) != saved
    with raises(RecordingError, "other-model: LoRA adapters"):
        load_weights(model().module, tmp_path)
    with raises(RecordingError, "other-model"):
        load_weights(model(lora=LORA).module, tmp_path / "full")
    assert full == of(model().module)


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_checkpoint_of_a_run_is_read_as_well(lora: LoraConfig | None, tmp_path: Path) -> None:
    loaded = model(lora=lora)
    moved(loaded.module)
    LocalBackend(TrainConfig(), model=loaded, total_steps=1).save(tmp_path)
    other = model(lora=lora).module
    assert load_weights(other, tmp_path) == of(loaded.module) == of(other)


def test_another_dtype_and_fewer_layers_when_asked_for(tmp_path: Path) -> None:
    one = moved(model().module)
    saved = save_weights(one, tmp_path)
    half = model(dtype="bfloat16").module
    before = of(half)
    with raises(RecordingError, "wrong-type: model.embed_tokens.weight"):
        load_weights(half, tmp_path)
    assert of(half) == before
    assert load_weights(half, tmp_path, cast=True) == saved
    expected = moved(model().module).to(torch.bfloat16)
    assert of(half) == of(expected)
    short = model(num_layers=1).module
    with raises(RecordingError, "other-model"):
        load_weights(short, tmp_path)
    assert load_weights(short, tmp_path, partial=True) == saved
    own = module_tensors(one)
    assert all(torch.equal(tensor, own[name]) for name, tensor in module_tensors(short).items())
    with raises(RecordingError, "other-model"):
        deep = model().module
        save_weights(short, tmp_path / "short")
        load_weights(deep, tmp_path / "short", partial=True)


def test_a_flipped_bit_is_told_before_anything_changes(tmp_path: Path) -> None:
    save_weights(model().module, tmp_path)
    file = tmp_path / FILE
    data = bytearray(file.read_bytes())
    data[-1000] ^= 4
    file.write_bytes(data)
    other = model(seed=1).module
    before = of(other)
    with raises(RecordingError, "hash-differs: fingerprint"):
        load_weights(other, tmp_path)
    assert of(other) == before
    file.write_bytes(data[:-3])
    with raises(RecordingError, "damaged-file: model.safetensors"):
        load_weights(other, tmp_path)
    with raises(RecordingError, "cannot-read"):
        load_weights(other, tmp_path / "nowhere")


def test_another_model_is_refused(tmp_path: Path) -> None:
    save_weights(model().module, tmp_path)
    with raises(RecordingError, "other-model: 4 missing ['model.layers.0.self_attn.k_norm.weight'"):
        load_weights(model(name="shape:tiny-qwen3").module, tmp_path)
    with raises(RecordingError, "wrong-shape: weight"):
        save_weights(nn.Linear(2, 2, bias=False), tmp_path / "linear")
        load_weights(nn.Linear(3, 2, bias=False), tmp_path / "linear")


class Run:
    """RUN/recordings with weights of two steps beside RUN/checkpoints."""

    def __init__(self, path: Path) -> None:
        self.recording = path / "recordings"
        self.module = model().module
        self.prints: dict[str, str] = {}
        for name in ("weights/step-000003", "../checkpoints/step-000003", "../checkpoints/step-000004"):
            folder = (self.recording / name).resolve()
            self.prints[name] = save_weights(moved(self.module), folder)
            if "checkpoints" in name:  # what a train backend writes does not say what it is
                file = folder / FILE
                raw = file.read_bytes()
                length = int.from_bytes(raw[:8], "little")
                header = json.loads(raw[8 : 8 + length])
                header["__metadata__"] = {"format": "pt"}
                text = json.dumps(header).encode()
                file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])

    def find(self, **values: Any) -> str | None:
        found = find_weights(self.recording, meta(**values))
        return None if found is None else str(found.relative_to(self.recording.parent.resolve()))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_the_weights_of_an_input_are_those_it_names_or_those_with_its_fingerprint(run: Run) -> None:
    stored, saved, later = run.prints.values()
    assert run.find(checkpoint="weights/step-000003", weights=stored) == "recordings/weights/step-000003"
    assert run.find(checkpoint="../checkpoints/step-000004") == "checkpoints/step-000004"
    assert run.find(weights=stored) == "recordings/weights/step-000003"
    assert run.find(weights=saved) == "checkpoints/step-000003"
    assert run.find(weights=saved, checkpoint="weights/step-000099") == "checkpoints/step-000003"
    assert run.find(weights=later) is None  # a later update of step 3
    assert run.find(weights=later, step=4) == "checkpoints/step-000004"
    assert run.find(weights=stored, step=5) is None
    assert run.find(weights=None) == "recordings/weights/step-000003"


@pytest.mark.parametrize(
    "name",
    [
        *(
            "/etc",
            "..",
            "../../checkpoints/step-000003",
            "weights/../../step-000003",
            "weights/step-000003/..",
        ),
        *("../checkpoints/step-000003\n", "weights", "", "weights/.hidden", "../other/step-000003"),
    ],
)
def test_a_checkpoint_elsewhere_is_refused(run: Run, name: str) -> None:
    with raises(RecordingError, "wrong-field: checkpoint"):
        run.find(checkpoint=name)


def test_a_link_out_of_the_recording_is_refused(run: Run, tmp_path: Path) -> None:
    (run.recording / "weights/step-000007").symlink_to(tmp_path / "checkpoints/step-000004")
    for values in ({"checkpoint": "weights/step-000007"}, {"step": 7}):
        with raises(RecordingError, "leads-out-of-folder"):
            run.find(**values)
