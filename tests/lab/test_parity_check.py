from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.model import ModelConfig
from lockstep.models.architectures import text_config
from lockstep.models.load import meta_module
from lockstep.train.local import LocalBackend
from lockstep_lab.train_parity import check as parity_check
from lockstep_lab.train_parity.check import (
    check_all,
    check_imports,
    check_interfaces,
    check_stack,
    import_failure,
    interface_problems,
)
from lockstep_lab.train_parity.stacks import parse_stack, parse_stacks

TINY = ModelConfig(name="shape:tiny-llama")


def test_our_backends_are_backends() -> None:
    found = {f.name: f for f in check_interfaces()}
    assert set(found) == {"local", "fsdp2", "deepspeed"}
    assert all(f.status == "ok" for f in found.values()), found
    assert found["local"].detail == "LocalBackend has the 9 methods of TrainBackend"


class Renamed(LocalBackend):
    """forward_backward under another name, and a step that wants more than the protocol gives."""

    forward_backward = None  # type: ignore[assignment]

    def optimizer_step(self, lr: float) -> dict[str, float]:  # type: ignore[override]
        return {}

    def weights(self, version: int) -> Any:  # type: ignore[override]
        return None

    def save(self, directory: Any, *, background: bool) -> Any:
        return None

    def logprobs(self, *, batches: Sequence[Any]) -> Any:  # type: ignore[override]
        return None


class Incomplete:
    def __init__(self, config: Any, *, model: Any) -> None: ...


def test_what_is_wrong_with_a_class_is_named() -> None:
    # Python 3.12 says "a required keyword-only argument" of the last one.
    assert [said.replace("keyword-only ", "") for said in interface_problems(Renamed)] == [
        "logprobs: too many positional arguments",
        "has no method forward_backward",
        "optimizer_step: missing a required argument: 'lr'",
        "weights: missing a required argument: 'version'",
        "save: missing a required argument: 'background'",
    ]
    found = interface_problems(Incomplete)
    assert "has no method export" in found and "has no method gradient_norm" in found
    assert found[-1] == "its constructor takes no total_steps, temperature, ref, spans"


def test_a_backend_that_cannot_be_imported_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.registry import Registry

    table = Registry("train backend", {"odd": "lockstep.nowhere:Backend"})
    monkeypatch.setattr(parity_check, "BACKENDS", table)
    (found,) = check_interfaces()
    assert found.status == "problem" and "lockstep.nowhere" in found.detail


def test_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(f.status == "ok" for f in check_imports() if f.name in parity_check.REQUIRED)
    monkeypatch.setattr(parity_check, "REQUIRED", ("torch", "no_such_package"))
    monkeypatch.setattr(parity_check, "OPTIONAL", {"not_there_either": "nothing"})
    found = {f.name: f for f in check_imports()}
    assert found["no_such_package"].status == "problem"
    assert (found["not_there_either"].status, found["not_there_either"].detail) == ("missing", "nothing")


def test_a_package_that_is_there_but_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_package.py").write_text("raise ImportError('libfoo.so.1: no such file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert import_failure("broken_package") == (
        "import broken_package fails: ImportError: libfoo.so.1: no such file"
    )
    assert import_failure("json") == ""


def stack(name: str, *, gpus: int | None = None, device_count: int = 0) -> tuple[str, str]:
    import torch

    text = text_config(meta_module(TINY, dtype=torch.float32))
    found = check_stack(parse_stack(name), model=TINY, text=text, gpus=gpus, device_count=device_count)
    return found.status, found.detail


def test_which_stacks_could_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stack("fsdp2:tp2+ring2") == ("ok", "runs here: 4 ranks on the CPU, gloo")
    assert stack("local", device_count=4) == ("ok", "runs here: 1 rank, one GPU each")
    assert stack("fsdp2", device_count=4) == ("ok", "runs here: 4 ranks, one GPU each")
    status, detail = stack("fsdp2", gpus=8, device_count=4)
    assert status == "ok" and "8 ranks, sharing 4 GPUs over gloo" in detail
    status, detail = stack("fsdp2:tp4")
    assert status == "refused" and "4 query heads and 2 key/value heads" in detail
    status, detail = stack("fsdp2:tp2+ring2", gpus=6)
    assert status == "refused" and "use 4 or 8 ranks" in detail
    status, detail = stack("fsdp2:ring2+compile")
    assert status == "refused" and "ring attention communicates with other ranks inside a layer" in detail
    status, detail = stack("deepspeed:deepcompile")
    assert status == "refused" and "CUDA extension" in detail
    assert stack("deepspeed:deepcompile", device_count=2)[0] == "ok"
    monkeypatch.setattr(parity_check.importlib.util, "find_spec", lambda name: None)
    status, detail = stack("deepspeed:zero2")
    assert status == "refused" and "pip install --no-build-isolation deepspeed" in detail


def test_sliding_windows_have_no_ring() -> None:
    windows = ModelConfig(name="shape:tiny-mistral")
    found = check_all(parse_stacks("fsdp2:ring2,fsdp2"), model=windows, gpus=None, device_count=0)
    said = {f.name: (f.status, f.detail) for f in found}
    assert said["fsdp2"][0] == "ok"
    assert said["fsdp2:ring2"][0] == "refused" and "windows of 8 tokens" in said["fsdp2:ring2"][1]
    assert "no sliding windows" in said["shape:tiny-mistral"][1]


def test_everything_at_once() -> None:
    found = check_all(parse_stacks("local,fsdp2:tp3"), model=TINY, gpus=None, device_count=0)
    kinds = [f.kind for f in found]
    assert kinds == sorted(kinds, key=["import", "interface", "model", "stack"].index)
    (model,) = [f for f in found if f.kind == "model"]
    assert "tensor parallel of 1, 2;" in model.detail
    unknown = check_all(
        parse_stacks("fsdp2:tp2,fsdp2"), model=ModelConfig(name="shape:none"), gpus=None, device_count=0
    )
    by_name = {f.name: f for f in unknown}
    assert by_name["shape:none"].status == "problem" and by_name["fsdp2:tp2"].status == "refused"
    assert by_name["fsdp2"].status == "ok"
