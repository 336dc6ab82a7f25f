from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep.config.model import LoraConfig
from lockstep.errors import CheckpointError
from lockstep.train.files import write_tensors
from lockstep.train.local import LocalBackend
from lockstep.train.rng import restore_rng_state, rng_state

LORA = LoraConfig(rank=4, alpha=8.0, dropout=0.3, target_modules=("q_proj", "v_proj"))


@pytest.fixture
def train(documents: Any, batch_of: Any, loss: Any) -> Any:
    """Optimizer steps first to last of one and the same run; returns what each reported."""

    def steps(backend: LocalBackend, first: int, last: int) -> list[tuple[float, ...]]:
        seen = []
        for step in range(first, last):
            batches = [batch_of(documents(2, seed=10 * step + i), weight=1 / 60) for i in range(2)]
            losses = [float(value) for value in backend.forward_backward(batches, loss).losses]
            seen.append((*losses, *backend.optimizer_step().values()))
        return seen

    return steps


def everything(backend: LocalBackend) -> dict[str, Tensor]:
    return {**backend.module.state_dict(), **backend._optimizer_state()}


@pytest.mark.parametrize(
    ("dtype", "lora", "optimizer"),
    [
        ("float32", None, "adamw"),
        ("bfloat16", None, "adamw"),
        ("bfloat16", LORA, "adamw"),
        ("float32", LORA, "adamw"),
        ("bfloat16", None, "sgd"),
    ],
)
def test_three_steps_and_three_more_are_six(
    make_backend: Any, train: Any, tmp_path: Path, dtype: str, lora: LoraConfig | None, optimizer: str
) -> None:
    """To the bit: losses, norms, weights, masters, moments. LoRA's dropout draws from torch's generator."""
    options: dict[str, Any] = {
        "dtype": dtype,
        "lora": lora,
        "optimizer": optimizer,
        "schedule": "cosine",
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "lr": 1e-2,
    }
    torch.manual_seed(7)
    whole = make_backend(**options)
    expected = train(whole, 0, 6)

    torch.manual_seed(7)
    first = make_backend(**options)
    seen = train(first, 0, 3)
    first.save(tmp_path)
    torch.manual_seed(1234)
    second = make_backend(**options)
    second.load(tmp_path)
    assert second.steps_done == 3
    seen += train(second, 3, 6)

    assert seen == expected
    ours, theirs = everything(second), everything(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_masters_are_kept_beside_low_precision_weights_only(make_backend: Any, tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        (tmp_path / dtype).mkdir()
        backend = make_backend(dtype=dtype)
        backend.save(tmp_path / dtype)
        names = load_file(tmp_path / dtype / "optimizer.safetensors").keys()
        assert any(name.startswith("master/") for name in names) == (dtype == "bfloat16")
        weights = load_file(tmp_path / dtype / "model.safetensors")
        assert weights.keys() <= backend.module.state_dict().keys()
        assert all(torch.equal(t, backend.module.state_dict()[name]) for name, t in weights.items())


def test_lora_saves_the_adapters_only(make_backend: Any, tmp_path: Path) -> None:
    make_backend(lora=LORA).save(tmp_path)
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert all("lora_" in name for name in load_file(tmp_path / file))


def test_files_are_hashed_and_named(make_backend: Any, tmp_path: Path) -> None:
    written = make_backend().save(tmp_path)()
    assert set(written) == {p.name for p in tmp_path.iterdir()}
    state = json.loads((tmp_path / "state.json").read_text())
    for name, record in state["files"].items():
        assert record == {"bytes": (tmp_path / name).stat().st_size, "sha256": written[name]}
    assert {"torch", "transformers", "numpy", "python", "lockstep"} == set(state["versions"])


def rewrite(path: Path, change: Any) -> None:
    """Change a file and make state.json's record of it fit: wrong, but not damaged."""
    from lockstep.train.files import sha256_of

    change(path)
    state_path = path.parent / "state.json"
    if path != state_path:
        state = json.loads(state_path.read_text())
        state["files"][path.name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        state_path.write_text(json.dumps(state))


def change_tensors(change: Any) -> Any:
    def apply(path: Path) -> None:
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return apply


def change_json(change: Any) -> Any:
    def apply(path: Path) -> None:
        value = json.loads(path.read_text())
        change(value)
        path.write_text(json.dumps(value))

    return apply


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


NORM = "model.norm.weight"
WRONG = {
    "a tensor of another shape": (
        "model.safetensors",
        change_tensors(lambda t: t.update({NORM: torch.zeros(3)})),
        rf"model\.safetensors: tensor '{NORM}' is F32 \[3\]",
    ),
    "a tensor of another dtype": (
        "optimizer.safetensors",
        change_tensors(lambda t: t.update({f"exp_avg/{NORM}": t[f"exp_avg/{NORM}"].double()})),
        rf"optimizer\.safetensors: tensor 'exp_avg/{NORM}' is F64",
    ),
    "a missing tensor": (
        "optimizer.safetensors",
        change_tensors(lambda t: t.pop(f"exp_avg_sq/{NORM}")),
        rf"optimizer\.safetensors: tensor 'exp_avg_sq/{NORM}' is missing; .*state\.json says",
    ),
    "one tensor too many": (
        "model.safetensors",
        change_tensors(lambda t: t.update({"surplus": torch.zeros(1)})),
        r"model\.safetensors: tensor 'surplus' is not in .*state\.json",
    ),
    "another optimizer": (
        "state.json",
        change_json(lambda s: s["progress"].update(optimizer="sgd")),
        r"state\.json: field 'progress\.optimizer' is 'sgd', this run has 'adamw'",
    ),
    "a later format": (
        "state.json",
        change_json(lambda s: s.update(version=99)),
        r"state\.json: field 'version' is 99",
    ),
    "no step": (
        "state.json",
        change_json(lambda s: s["progress"].pop("step")),
        r"state\.json: field 'progress\.step' is None",
    ),
    "no JSON": ("state.json", lambda p: p.write_text("{"), r"state\.json is not valid JSON"),
    "a generator of another kind": (
        "rng.safetensors",
        change_tensors(lambda t: t.update(torch_cpu=torch.zeros(4, dtype=torch.uint8))),
        r"rng\.safetensors: generator 'torch_cpu' has a state of \[4\]",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_named_and_nothing_changes(make_backend: Any, tmp_path: Path, case: str) -> None:
    file, change, message = WRONG[case]
    make_backend(seed=1).save(tmp_path)
    rewrite(tmp_path / file, change)
    backend = make_backend()
    before = {name: t.clone() for name, t in everything(backend).items()}
    generator = torch.get_rng_state()
    with pytest.raises(CheckpointError, match=message):
        backend.load(tmp_path)
    assert all(torch.equal(t, before[name]) for name, t in everything(backend).items())
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "rng.safetensors"])
def test_a_damaged_file_is_named(make_backend: Any, tmp_path: Path, file: str) -> None:
    make_backend(seed=1).save(tmp_path)
    backend = make_backend()
    before = {name: t.clone() for name, t in everything(backend).items()}
    good = shutil.copytree(tmp_path, tmp_path.parent / f"{tmp_path.name}-good")
    flip_last_byte(tmp_path / file)
    with pytest.raises(CheckpointError, match=rf"{file} has sha256 .* it is damaged"):
        backend.load(tmp_path)
    (tmp_path / file).write_bytes((good / file).read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"{file} has \d+ bytes"):
        backend.load(tmp_path)
    (tmp_path / file).unlink()
    with pytest.raises(CheckpointError, match=rf"{file} is missing"):
        backend.load(tmp_path)
    assert all(torch.equal(t, before[name]) for name, t in everything(backend).items())
    backend.load(good)
    assert not all(torch.equal(t, before[name]) for name, t in everything(backend).items())


def test_too_little_disk_is_said_before_anything_is_written(
    make_backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match=r"needs \d+ bytes .* has 1000 bytes free"):
        make_backend().save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_writer_makes_what_safetensors_reads(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "odd": torch.arange(5, dtype=torch.uint8),
        "turned": torch.arange(6, dtype=torch.float32).reshape(2, 3).t(),
        "low": torch.randn(7, 3).bfloat16(),
        "ids": torch.tensor([-(2**40), 2**40]),
        "flags": torch.tensor([True, False]),
    }
    write_tensors(tmp_path / "x.safetensors", tensors)
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[n], t) and found[n].dtype == t.dtype for n, t in tensors.items())


def test_generators_come_back(tmp_path: Path) -> None:
    random.seed(3)
    np.random.seed(4)
    torch.manual_seed(5)
    random.gauss(0, 1)  # leaves a second Gaussian waiting in both
    np.random.standard_normal()

    def draw() -> list[float]:
        drawn = [random.gauss(0, 1), random.random(), np.random.standard_normal(), np.random.random()]
        return [*map(float, drawn), *torch.rand(2).tolist()]

    write_tensors(tmp_path / "rng.safetensors", rng_state())
    expected = draw()
    assert draw() != expected
    restore_rng_state(load_file(tmp_path / "rng.safetensors"))
    assert draw() == expected
