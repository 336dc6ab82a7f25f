from __future__ import annotations

import json
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from raising import raises
from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep.config.model import LoraConfig
from lockstep.errors import CheckpointError
from lockstep.models.offload import CopySpace, PendingCopy
from lockstep.train.local import LocalBackend
from lockstep.train.state.files import TensorFile, write_tensors
from lockstep.train.state.rng import restore_rng_state, rng_state

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
def test_three_steps_and_three_more_are_six(make_backend, train, tmp_path, dtype, lora, optimizer):
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


def test_masters_are_kept_beside_low_precision_weights_only(make_backend, tmp_path):
    for dtype in ("float32", "bfloat16"):
        (tmp_path / dtype).mkdir()
        backend = make_backend(dtype=dtype)
        backend.save(tmp_path / dtype)
        names = load_file(tmp_path / dtype / "optimizer.safetensors").keys()
        assert any(name.startswith("master/") for name in names) == (dtype == "bfloat16")
        weights = load_file(tmp_path / dtype / "model.safetensors")
        assert weights.keys() <= backend.module.state_dict().keys()
        assert all(torch.equal(t, backend.module.state_dict()[name]) for name, t in weights.items())


def test_lora_saves_the_adapters_only(make_backend, tmp_path):
    make_backend(lora=LORA).save(tmp_path)
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert all("lora_" in name for name in load_file(tmp_path / file))


def test_files_are_hashed_and_named(make_backend, tmp_path):
    written = make_backend().save(tmp_path)()
    assert set(written) == {p.name for p in tmp_path.iterdir()}
    state = json.loads((tmp_path / "state.json").read_text())
    for name, record in state["files"].items():
        assert record == {"bytes": (tmp_path / name).stat().st_size, "sha256": written[name]}
    assert {"torch", "transformers", "numpy", "python", "lockstep"} == set(state["versions"])


def rewrite(path: Path, change: Any) -> None:
    """Change a file and make state.json's record of it fit: wrong, but not damaged."""
    from lockstep.train.state.files import sha256_of

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
        f"wrong-shape: {NORM}, model.safetensors",
    ),
    "a tensor of another dtype": (
        "optimizer.safetensors",
        change_tensors(lambda t: t.update({f"exp_avg/{NORM}": t[f"exp_avg/{NORM}"].double()})),
        f"wrong-shape: exp_avg/{NORM}, optimizer.safetensors",
    ),
    "a missing tensor": (
        "optimizer.safetensors",
        change_tensors(lambda t: t.pop(f"exp_avg_sq/{NORM}")),
        f"wrong-weights: exp_avg_sq/{NORM}, optimizer.safetensors, missing",
    ),
    "one tensor too many": (
        "model.safetensors",
        change_tensors(lambda t: t.update({"surplus": torch.zeros(1)})),
        "wrong-weights: surplus, model.safetensors",
    ),
    "another optimizer": (
        "state.json",
        change_json(lambda s: s["progress"].update(optimizer="sgd")),
        "other-model: progress.optimizer, sgd, adamw",
    ),
    "a later format": (
        "state.json",
        change_json(lambda s: s.update(version=99)),
        "version-differs: version, 99",
    ),
    "no step": (
        "state.json",
        change_json(lambda s: s["progress"].pop("step")),
        "wrong-field: progress.step",
    ),
    "no JSON": ("state.json", lambda p: p.write_text("{"), "not-json: state.json"),
    "a generator of another kind": (
        "rng.safetensors",
        change_tensors(lambda t: t.update(torch_cpu=torch.zeros(4, dtype=torch.uint8))),
        "wrong-shape: torch_cpu",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_named_and_nothing_changes(make_backend, tmp_path, case):
    file, change, message = WRONG[case]
    make_backend(seed=1).save(tmp_path)
    rewrite(tmp_path / file, change)
    backend = make_backend()
    before = {name: t.clone() for name, t in everything(backend).items()}
    generator = torch.get_rng_state()
    with raises(CheckpointError, message):
        backend.load(tmp_path)
    assert all(torch.equal(t, before[name]) for name, t in everything(backend).items())
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "rng.safetensors"])
def test_a_damaged_file_is_named(make_backend, tmp_path, file):
    make_backend(seed=1).save(tmp_path)
    backend = make_backend()
    before = {name: t.clone() for name, t in everything(backend).items()}
    good = shutil.copytree(tmp_path, tmp_path.parent / f"{tmp_path.name}-good")
    flip_last_byte(tmp_path / file)
    with raises(CheckpointError, f"hash-differs: {file}"):
        backend.load(tmp_path)
    (tmp_path / file).write_bytes((good / file).read_bytes()[:-1])
    with raises(CheckpointError, f"damaged-file: {file}"):
        backend.load(tmp_path)
    (tmp_path / file).unlink()
    with raises(CheckpointError, f"no-such-file: {file}"):
        backend.load(tmp_path)
    assert all(torch.equal(t, before[name]) for name, t in everything(backend).items())
    backend.load(good)
    assert not all(torch.equal(t, before[name]) for name, t in everything(backend).items())


def test_too_little_disk_is_said_before_anything_is_written(make_backend, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with raises(CheckpointError, "no-space"):
        make_backend().save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_writer_makes_what_safetensors_reads(tmp_path):
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


def test_generators_come_back(tmp_path):
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


def test_a_checkpoint_of_the_first_format_loads(make_backend, tmp_path):
    saved = make_backend(dtype="bfloat16", seed=1)
    saved.save(tmp_path)
    path = tmp_path / "state.json"
    now = json.loads(path.read_text())
    first = {key: now[key] for key in ("format", "progress", "versions", "files")} | {"version": 1}
    path.write_text(json.dumps(first))
    backend = make_backend(dtype="bfloat16")
    backend.load(tmp_path)
    ours, theirs = everything(backend), everything(saved)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    path.write_text(json.dumps(first | {"files": first["files"] | {"model-00001-of-00002.safetensors": {}}}))
    with raises(CheckpointError, "damaged-file: files.model-00001-of-00002.safetensors"):
        backend.load(tmp_path)


def test_masters_go_over_to_another_compute_dtype(make_backend, train, tmp_path):
    """A float32 weight is its own master: either is read as the other, and nothing of it is lost."""
    for dtype, other in (("bfloat16", "float32"), ("float32", "bfloat16")):
        (tmp_path / dtype).mkdir()
        saved = make_backend(dtype=dtype, seed=1, lr=1e-2)
        train(saved, 0, 2)
        saved.save(tmp_path / dtype)
        backend = make_backend(dtype=other)
        backend.load(tmp_path / dtype)
        assert backend.steps_done == 2
        masters = dict(zip(saved._names, saved._optimizer.masters, strict=True))
        found = dict(zip(backend._names, backend._optimizer.masters, strict=True))
        assert all(torch.equal(found[name], master) for name, master in masters.items())
        assert all(torch.equal(p, masters[name].to(p.dtype)) for name, p in backend.module.named_parameters())
        moments = saved._optimizer.state()
        assert all(torch.equal(t, moments[name]) for name, t in backend._optimizer.state().items())


def test_what_is_saved_in_the_background_is_what_was_there(make_backend, train, tmp_path):
    backend = make_backend(dtype="bfloat16", lr=1e-2)
    train(backend, 0, 1)
    before = {name: t.clone() for name, t in everything(backend).items()}
    finish = backend.save(tmp_path, background=True)
    assert list(tmp_path.iterdir()) == []
    train(backend, 1, 2)
    assert set(finish()) == {p.name for p in tmp_path.iterdir()} and finish() == finish()
    again = make_backend(dtype="bfloat16")
    again.load(tmp_path)
    assert again.steps_done == 1
    assert all(torch.equal(t, before[name]) for name, t in everything(again).items())


def test_an_update_waits_for_the_copy_of_what_it_changes(make_backend, train, tmp_path, monkeypatch):
    """The thread that copies is held up until the loop waits for it."""
    waited = threading.Event()
    run, wait = PendingCopy._run, PendingCopy.wait

    def held_up(copy: PendingCopy) -> None:
        assert waited.wait(60)
        run(copy)

    def tell(copy: PendingCopy, seconds: float = 60.0) -> None:
        waited.set()
        wait(copy, seconds)

    backend = make_backend(lr=1e-2)
    train(backend, 0, 1)
    before = {name: t.clone() for name, t in everything(backend).items()}
    monkeypatch.setattr(PendingCopy, "_run", held_up)
    monkeypatch.setattr(PendingCopy, "wait", tell)
    finish = backend.save(tmp_path, background=True)
    assert not waited.is_set()
    train(backend, 1, 2)
    assert waited.is_set()
    finish()
    again = make_backend()
    again.load(tmp_path)
    assert all(torch.equal(t, before[name]) for name, t in everything(again).items())


def test_a_copy_that_fails_is_told_when_the_save_is_finished(make_backend, train, tmp_path, monkeypatch):
    def none_left(*_: object) -> Tensor:
        raise RuntimeError("can't allocate memory: you tried to allocate 99 bytes")

    backend = make_backend(lr=1e-2)
    train(backend, 0, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "clone", none_left)
        finish = backend.save(tmp_path, background=True)
        backend._copies.wait()
    train(backend, 1, 2)
    with raises(CheckpointError, "out-of-memory: checkpoint.background"):
        finish()


def test_copies_of_a_gpu_go_to_memory_that_is_used_again():
    """The places only: here the tensors are in host memory."""
    space = CopySpace(pin=False)
    sources = [torch.arange(5.0), torch.tensor(3.0), torch.ones(2, 3, dtype=torch.bfloat16)]
    copies = [space.copy(t) for t in sources]
    assert all(torch.equal(c, t) and c.dtype == t.dtype for c, t in zip(copies, sources, strict=True))
    assert len({c.data_ptr() for c in copies}) == 3
    space.begin()
    assert space.copy(torch.zeros(5)).data_ptr() == copies[0].data_ptr()


LACKS = {
    "sgd to adamw": ({"optimizer": "sgd"}, {}, "other-model: progress.optimizer"),
    "adapters to weights": ({"lora": LORA}, {}, "other-model: progress.lora"),
    "weights to adapters": ({}, {"lora": LORA}, "other-model: progress.lora"),
    "no optimizer": (
        {"total_steps": 0},
        {},
        "other-model",
    ),
}


@pytest.mark.parametrize("case", LACKS)
def test_what_a_checkpoint_lacks_is_named(make_backend, tmp_path, case):
    saved, wanted, message = LACKS[case]
    make_backend(**saved).save(tmp_path)
    with raises(CheckpointError, message):
        make_backend(**wanted).load(tmp_path)


def test_a_backend_that_does_not_train_reads_the_weights_only(make_backend, tmp_path):
    saved = make_backend(seed=1, dtype="bfloat16")
    saved.save(tmp_path)
    backend = make_backend(total_steps=0, dtype="bfloat16")
    backend.load(tmp_path)
    ours, theirs = backend.module.state_dict(), saved.module.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


HOSTILE: dict[str, tuple[Any, str]] = {
    "a path": (
        lambda s: s["files"].update({"../model.safetensors": s["files"].pop("model.safetensors")}),
        "wrong-field: files, ../model.safetensors",
    ),
    "a path to a tensor": (
        lambda s: s["tensors"].update({f"model/{NORM}": "/etc/passwd"}),
        f"wrong-field: tensors.model/{NORM}",
    ),
    "no list of tensors": (lambda s: s.update(tensors=[]), "missing-field: tensors"),
    "no files": (lambda s: s.update(files=3), "missing-field: files"),
    "a record without hash": (
        lambda s: s["files"].update({"model.safetensors": {"bytes": 3}}),
        "damaged-file: files.model.safetensors, must have bytes and sha256",
    ),
    "a size that is none": (
        lambda s: s["files"].update({"model.safetensors": {"bytes": True, "sha256": "x"}}),
        "damaged-file: files.model.safetensors, is {'bytes': True",
    ),
    "ranks without end": (lambda s: s.update(world_size=10**12), "wrong-field: world_size"),
    "a rank that is not there": (lambda s: s.update(world_size=2), "no-such-file: files-00001-of-00002.json"),
    "a mesh that is none": (lambda s: s.update(mesh={"dp": "2"}), "wrong-field: mesh"),
    "no backend": (lambda s: s.update(backend=None), "wrong-field: backend"),
    "no progress": (lambda s: s.update(progress=[]), "missing-field: progress"),
    "a step that counts nothing": (
        lambda s: s["progress"].update(step=-1),
        "wrong-field: progress.step",
    ),
    "no file of generators": (
        lambda s: s["files"].pop("rng.safetensors"),
        "wrong-field: files, rng.safetensors",
    ),
    "a list": (None, "wrong-kind-of-file: format"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_state_is_refused_by_name(make_backend, tmp_path, case):
    change, message = HOSTILE[case]
    backend = make_backend(seed=1)
    backend.save(tmp_path)
    path = tmp_path / "state.json"
    state = json.loads(path.read_text())
    if change is not None:
        change(state)
    path.write_text(json.dumps(state if change is not None else [state]))
    with raises(CheckpointError, message):
        make_backend().load(tmp_path)


BAD_FILES: dict[str, tuple[bytes, str]] = {
    "nesting without end": (b"[" * 100_000, "not-json: state.json"),
    "no text": (b"\xff\xfe\x00", "not-json: state.json"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_state_that_is_no_json_is_refused(make_backend, tmp_path, case):
    data, message = BAD_FILES[case]
    (tmp_path / "state.json").write_bytes(data)
    with raises(CheckpointError, message):
        make_backend().load(tmp_path)


BAD_HEADERS: dict[str, tuple[Any, str]] = {
    "longer than the file": ((1 << 40).to_bytes(8, "little") + b"{}", "damaged-file: model.safetensors"),
    "a tensor beyond the file": (
        {NORM: {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}},
        "damaged-file: model.safetensors",
    ),
    "an unknown type": (
        {NORM: {"dtype": "F8_E4M3", "shape": [0], "data_offsets": [0, 0]}},
        f"wrong-type: {NORM}",
    ),
    "empty": (b"", "damaged-file: model.safetensors"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_a_file_with_a_bad_header_is_refused(make_backend, tmp_path, case):
    header, message = BAD_HEADERS[case]
    if isinstance(header, dict):
        text = json.dumps(header).encode()
        header = len(text).to_bytes(8, "little") + text
    make_backend(seed=1).save(tmp_path)
    rewrite(tmp_path / "model.safetensors", lambda path: path.write_bytes(header))
    with raises(CheckpointError, message):
        make_backend().load(tmp_path)


@pytest.mark.parametrize("name", ["python", "numpy", "torch_cuda_0"])
def test_generators_that_have_no_valid_state_change_nothing(make_backend, tmp_path, name):
    make_backend(seed=1).save(tmp_path)
    bad = torch.full((625,), -5) if name != "torch_cuda_0" else torch.zeros(3, dtype=torch.uint8)
    rewrite(tmp_path / "rng.safetensors", change_tensors(lambda t: t.update({name: bad})))
    before = rng_state()
    code = "wrong-shape" if name == "torch_cuda_0" else "damaged-file"
    with raises(CheckpointError, f"{code}: {name}"):
        make_backend().load(tmp_path)
    after = rng_state()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())


def test_what_could_not_be_loaded_is_not_written(tmp_path):
    with raises(CheckpointError, "wrong-type: counts"):
        TensorFile(tmp_path / "model.safetensors", {"counts": ((2,), torch.uint16)})
    assert not list(tmp_path.iterdir())
