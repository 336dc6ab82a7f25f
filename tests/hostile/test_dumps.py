"""Dumps of others: values as torch has them, work in proportion to the file, errors that say what is so."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from raising import raises
from torch import Tensor

from lockstep.errors import LockstepError, RecordingError
from lockstep_lab.cli import recording as cli
from lockstep_lab.recording.importers import dumps as importers
from lockstep_lab.recording.importers.dumps import Pace, import_dump
from lockstep_lab.recording.importers.unpickle import load_dump

IDS = torch.arange(5, 13).view(2, 4)


def saved(path: Path, value: Any, *, legacy: bool = False) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=not legacy)
    return path


# --- lazy bits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("legacy", [False, True])
def test_the_negative_bit_of_a_tensor_is_honoured(tmp_path, legacy):
    plain = torch.complex(torch.randn(2, 4), torch.randn(2, 4))
    negated = plain.conj().imag
    assert negated.is_neg()
    value = {"neg": negated, "twice": -negated, "part": negated[:, 1:3], "nn": torch.nn.Parameter(negated)}
    loaded = load_dump(saved(tmp_path / "a.pt", value, legacy=legacy)).value
    for name, tensor in value.items():
        assert loaded[name].tolist() == tensor.tolist(), name


def test_advantages_with_the_negative_bit_keep_their_sign(tmp_path):
    plain = torch.complex(torch.ones(2, 4), torch.full((2, 4), 3.0))
    dump = {"input_ids": IDS, "advantages": plain.conj().imag, "old_logprobs": -torch.ones(2, 4)}
    import_dump(saved(tmp_path / "a.pt", dump), tmp_path / "out")
    batch = cli_batch(tmp_path / "out")
    assert batch.advantages[batch.loss_mask].tolist() == [-3.0] * 6


def cli_batch(path: Path) -> Any:
    from lockstep.recording import Recording

    return Recording.open(path)[0].batch


@pytest.mark.parametrize("kind", [torch.complex64, torch.complex128, torch.quint8])
def test_conjugates_and_quantised_tensors_are_refused_by_name(tmp_path, kind):
    if kind.is_complex:
        value: Tensor = torch.ones(2, dtype=kind).conj()
    else:
        value = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, kind)
    with raises(RecordingError, "forbidden-content") as caught:
        load_dump(saved(tmp_path / "a.pt", {"input_ids": IDS, "x": value}))
    assert "torch." in str(caught.value)


def crafted(metadata: Any) -> bytes:
    """The pickle of a tensor with these bits, by torch's own pickler of storages."""

    class Rebuilt:
        def __reduce__(self) -> Any:
            storage = torch.storage.TypedStorage(
                wrap_storage=torch.ones(2).untyped_storage(), dtype=torch.float32, _internal=True
            )
            return torch._utils._rebuild_tensor_v2, (storage, 0, (2,), (1,), False, {}, metadata)

    buffer = io.BytesIO()
    torch.save({"x": Rebuilt()}, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("metadata", [{"scale": True}, {"neg": 1}, ["neg"], {"neg": {}}, "neg"])
def test_bits_that_are_not_known_are_refused(tmp_path, metadata):
    (tmp_path / "a.pt").write_bytes(crafted(metadata))
    with raises(RecordingError, "damaged-file"):
        load_dump(tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(crafted({"neg": True, "conj": False}))
    assert load_dump(tmp_path / "b.pt").value["x"].tolist() == [-1.0, -1.0]


# --- work ---------------------------------------------------------------------------------------------------


def test_a_tensor_that_many_dicts_share_is_refused_before_the_first_is_read(tmp_path, monkeypatch):
    read = monkeypatch.setattr(importers.DumpReader, "read", lambda self: pytest.fail("one was read"))
    assert read is None
    path = saved(tmp_path / "a.pt", [{"input_ids": IDS} for _ in range(6_000)])
    with raises(RecordingError, "too-large: 6,000 inputs"):
        import_dump(path, tmp_path / "out")


def test_an_import_says_how_far_it_is_and_ends_at_its_deadline(tmp_path, monkeypatch):
    clock = itertools.count(0.0, 2.0)
    monkeypatch.setattr(importers, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    path = saved(tmp_path / "a.pt", [{"input_ids": IDS + i} for i in range(6)])
    lines: list[str] = []
    import_dump(path, tmp_path / "out", pace=Pace(say=lines.append))
    assert lines[0].startswith("import: reading a.pt, input 1 of 6, ") and "writing a.pt" in lines[-1]
    with raises(RecordingError, "deadline: --timeout"):
        import_dump(path, tmp_path / "late", pace=Pace(seconds=9.0))
    assert not list(tmp_path.glob("*late*"))


def test_an_input_of_very_many_documents_is_refused(tmp_path):
    ids = torch.ones(1, 60_000, dtype=torch.uint8)
    dump = {"input_ids": ids, "position_ids": torch.zeros(1, 60_000, dtype=torch.int64)}
    with raises(RecordingError, "too-large: input_ids"):
        import_dump(saved(tmp_path / "a.pt", dump), tmp_path / "out")


# --- texts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["nan", "0", "-1"])
def test_a_timeout_that_is_none_is_a_wrong_setting(tmp_path, value):
    with raises(LockstepError, "wrong-format: --timeout"):
        cli.main(["import", str(tmp_path / "x"), "--out", str(tmp_path / "y"), "--timeout", value])


def test_an_import_onto_a_disk_that_is_full_is_one_line(tmp_path, monkeypatch):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.rename", full)
    with raises(RecordingError, "cannot-write"):
        import_dump(saved(tmp_path / "a.pt", {"input_ids": IDS}), tmp_path / "out")
