"""Files that torch.save and pickle wrote, hostile ones, and damaged ones."""

from __future__ import annotations

import collections
import io
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raising import raises
from torch import Tensor

from lockstep.errors import RecordingError
from lockstep_lab.recording.importers import pickle_stubs
from lockstep_lab.recording.importers.unpickle import load_dump

VALUE: dict[str, Any] = {
    "ids": torch.arange(12).reshape(3, 4)[:, 1:],
    "bf16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "expanded": torch.tensor([True, False]).expand(2, 2),
    "uint16": torch.tensor([1, 60000]).to(torch.uint16),
    "numpy": np.arange(6, dtype=np.int32).reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "big_endian": np.arange(3, dtype=">i4"),
    "numpy_bool": np.array([True, False]),
    "scalar": np.float32(2.5),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "nothing": torch.empty(0, 3),
    "size": torch.Size([2, 3]),
    "plain": [1, -7, 1.5, None, True, "text", b"bytes", (2, {"deep": 3})],
    "ordered": collections.OrderedDict(a=1),
}

SUPPRESSED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


def dumps(value: Any, form: str) -> bytes:
    if form.startswith("pickle"):
        return pickle.dumps(value, protocol=int(form[-1]))
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=form == "zip")
    return buffer.getvalue()


def load(data: bytes, tmp_path: Path) -> Any:
    path = tmp_path / "dump.pkl"
    path.write_bytes(data)
    return load_dump(path).value


def same(one: Any, other: Any) -> bool:
    if isinstance(other, np.ndarray | np.generic):
        other = torch.from_numpy(np.asarray(other).astype(other.dtype.newbyteorder("=")))
    if isinstance(other, Tensor):
        return isinstance(one, Tensor) and one.dtype == other.dtype and torch.equal(one, other.detach())
    if isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in other)
    if isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("form", ["pickle2", "pickle3", "pickle4", "pickle5", "zip", "legacy"])
def test_values_come_back(form: str, tmp_path: Path) -> None:
    found = load(dumps(VALUE, form), tmp_path)
    assert same(found, VALUE)
    assert load_dump(tmp_path / "dump.pkl").kind == ("pickle" if "pickle" in form else "torch")


def test_objects_in_numpy_arrays_are_passed_over(tmp_path: Path) -> None:
    found = load(dumps({"uid": np.array(["a", None], dtype=object)}, "pickle4"), tmp_path)
    assert found == {"uid": pickle_stubs.Opaque("numpy array of objects or text")}


# --- hostile ------------------------------------------------------------------------------------------------


class Call:
    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self.made = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self.made


def raw(module: str, name: str, argument: str) -> bytes:
    return b"\x80\x02c%s\n%s\nX%s%s\x85R." % (
        module.encode(),
        name.encode(),
        struct.pack("<I", len(argument)),
        argument.encode(),
    )


def attacks(canary: Path) -> dict[str, bytes]:
    shell, code = f"touch {canary}", f"open({str(canary)!r}, 'w')"
    inner = pickle.dumps(Call(os.system, shell), protocol=4)
    bad = io.BytesIO()
    torch.save({"input_ids": torch.ones(2), "x": Call(os.system, shell)}, bad)
    old = io.BytesIO()
    torch.save({"x": Call(os.system, shell)}, old, _use_new_zipfile_serialization=False)
    named = {
        "os": pickle.dumps({"input_ids": Call(os.system, shell)}),
        "eval": pickle.dumps([Call(eval, code)], protocol=2),
        "exec": pickle.dumps([Call(exec, code)], protocol=5),
        "getattr": pickle.dumps(Call(getattr, Call(__import__, "os"), "system")),
        "open": pickle.dumps(Call(open, str(canary), "w")),
        "nested bytes": pickle.dumps(Call(torch.storage._load_from_bytes, inner)),
        "nested zip": pickle.dumps(Call(torch.storage._load_from_bytes, bad.getvalue())),
        "nested legacy": pickle.dumps(Call(torch.storage._load_from_bytes, old.getvalue())),
        "zip": bad.getvalue(),
        "legacy": old.getvalue(),
        "torch.load": pickle.dumps(Call(torch.load, io.BytesIO)),
        "dict state": pickle.dumps(Call(collections.OrderedDict, state={"__class__": 1})),
        "numpy.load": raw("numpy", "load", str(canary)),
        "dotted": b"\x80\x04\x8c\x05torch\x8c\x10serialization.os\x93.",
        "dotted dunder": b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.__init__\x93.",
        "extension": b"\x80\x02\x82\x01.",
        "instance": b"(X\x02\x00\x00\x00idios\nsystem\n.",
        "new object": pickle.dumps(Path("x"), protocol=4),
        "class": b"\x80\x02cbuiltins\nobject\n)\x81.",
        "importlib": raw("importlib", "import_module", "os"),
        "posix": raw("posix", "system", shell),
        "subprocess": raw("subprocess", "call", shell),
        "operator": raw("operator", "attrgetter", "system"),
        "torch hub": raw("torch.hub", "load", "x"),
        "numpy testing": raw("numpy.testing._private.utils", "runstring", code),
        "call of a text": b"\x80\x02X\x02\x00\x00\x00os)R.",
        "call of a dtype": b"\x80\x02ctorch\nfloat32\n)R.",
        "build of a symbol": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x01\x00\x00\x00aK\x01sb.",
    }
    return named


@pytest.mark.parametrize("name", sorted(attacks(Path("x"))))
def test_hostile_files_are_refused_and_nothing_runs(name: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    with pytest.raises(RecordingError) as caught:
        load(attacks(canary)[name], tmp_path)
    calls = name in ("call of a text", "call of a dtype")
    assert caught.value.code == ("damaged-file" if calls else "forbidden-content")
    assert "dump.pkl: " in str(caught.value) and not canary.exists()


@pytest.mark.parametrize("name", ["os", "eval", "zip", "legacy"])
def test_the_attacks_are_real(name: str, tmp_path: Path) -> None:
    """They do write the file when python's own loader runs them."""
    canary = tmp_path / "canary"
    data = attacks(canary)[name]
    if name in ("zip", "legacy"):
        torch.load(io.BytesIO(data), weights_only=False)
    else:
        pickle.loads(data)
    assert canary.exists()


def test_a_refusal_names_file_and_global(tmp_path: Path) -> None:
    with raises(RecordingError, "forbidden-content: posix.system"):
        load(pickle.dumps(Call(os.system, "true")), tmp_path)


def rewritten(data: bytes, change: Any, **how: Any) -> bytes:
    """The zip with `change(name, content)` as its entries."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w", **how) as new:
        for name in old.namelist():
            for changed, content in change(name, old.read(name)):
                new.writestr(changed, content)
    return buffer.getvalue()


def test_compressed_entries_are_refused(tmp_path: Path) -> None:
    bomb = rewritten(
        dumps({"a": torch.ones(4)}, "zip"),
        lambda name, content: [(name, content if "data/" not in name else bytes(50 * 2**20))],
        compression=zipfile.ZIP_DEFLATED,
    )
    assert len(bomb) < 2**18
    with raises(RecordingError, "wrong-kind-of-file: compressed"):
        load(bomb, tmp_path)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda n, c: [(n, c), (n, c)] if n.endswith("data/0") else [(n, c)], "duplicate: archive/data/0"),
        (lambda n, c: [] if n.endswith("data/0") else [(n, c)], "damaged-file: lacks the tensor data"),
        (lambda n, c: [(n, c[:-4])] if n.endswith("data/0") else [(n, c)], "damaged-file: tensor data"),
        (
            lambda n, c: [(n, b"big")] if n.endswith("byteorder") else [(n, c)],
            "unsupported-version: big-endian",
        ),
        (lambda n, c: [] if n.endswith("data.pkl") else [(n, c)], "damaged-file: data.pkl"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_zip_files_that_contradict_themselves(change: Any, match: str, tmp_path: Path) -> None:
    with raises(RecordingError, match):
        load(rewritten(dumps({"a": torch.ones(4)}, "zip"), change), tmp_path)


def test_sizes_are_checked_before_anything_is_allocated(tmp_path: Path) -> None:
    huge = torch.ones(1).expand(2**20, 2**20)
    with raises(RecordingError, "too-large: tensors"):
        load(dumps(huge, "zip"), tmp_path)
    with raises(RecordingError, "damaged-file"):
        load(b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"x.", tmp_path)
    reach = dumps({"a": torch.ones(4)}, "pickle4").replace(b"K\x04\x85", b"K\x09\x85")
    with raises(RecordingError, "damaged-file: reaches beyond its"):
        load(reach, tmp_path)


def test_small_files_that_would_grow_are_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle_stubs, "MAX_STEPS", 300_000)
    lists = b"".join(b"]q%c(h%ch%ce" % (n + 1, n, n) for n in range(22))
    cases = [
        ("too-large: values", b"\x80\x02(]q\x00" + lists + b"t."),  # 2**22 values once written out
        ("too-deep: containers", b"\x80\x02" + b"(" * 100_000 + b"t" * 100_000 + b"."),
        ("too-deep: containers", b"\x80\x02]q\x00h\x00a."),  # a list of itself
        ("wrong-type: tuple", b"\x80\x02}(K\x01\x85K\x02u."),
    ]
    for match, data in cases:
        with raises(RecordingError, match):
            load(data, tmp_path)


def test_bytes_parsed_again_and_again_are_charged(tmp_path: Path) -> None:
    inner = dumps(torch.ones(2**21).untyped_storage(), "legacy")  # 8 MiB
    head = (
        b"\x80\x04ctorch.storage\n_load_from_bytes\n\x94B" + struct.pack("<I", len(inner)) + inner + b"\x94"
    )
    many = head + b"\x85R0" + b"h\x00h\x01\x85R0" * 1000 + b"N."
    with raises(RecordingError, "too-large: tensors"):
        load(many, tmp_path)


def test_too_many_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle_stubs, "MAX_STEPS", 1000)
    assert load(pickle.dumps(list(range(400))), tmp_path) == list(range(400))
    with raises(RecordingError, "too-large: values"):
        load(pickle.dumps(list(range(1000))), tmp_path)


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pkl")
    with raises(RecordingError, "not-a-file"):
        load_dump(tmp_path / "pipe.pkl")
    with raises(RecordingError, "cannot-read"):
        load_dump(tmp_path / "absent.pkl")
    for content in (b"", b"hello", b"\x80\x02", b"PK\x03\x04", pickle.dumps([1], protocol=0)):
        with pytest.raises(RecordingError) as caught:
            load(content, tmp_path)
        assert caught.value.code in ("damaged-file", "forbidden-content") and "dump.pkl: " in str(
            caught.value
        )


# --- damage -------------------------------------------------------------------------------------------------

SMALL = {"input_ids": torch.arange(8).reshape(2, 4), "n": np.arange(3), "l": [1, "a", 2.5]}
VALID = {form: dumps(SMALL, form) for form in ("pickle2", "pickle4", "zip", "legacy")}
INERT = (dict, list, tuple, str, bytes, int, float, bool, type(None), Tensor, pickle_stubs.Opaque)


def inert(value: Any) -> bool:
    if type(value) is dict:
        return all(map(inert, value)) and all(map(inert, value.values()))
    if type(value) in (list, tuple):
        return all(map(inert, value))
    return type(value) in INERT


@given(
    form=st.sampled_from(sorted(VALID)),
    changes=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4
    ),
    cut=st.none() | st.floats(0, 1),
)
@settings(max_examples=400, suppress_health_check=SUPPRESSED)
def test_damaged_files_give_an_error_or_plain_values(
    form: str, changes: list[tuple[float, int]], cut: float | None, tmp_path: Path
) -> None:
    data = bytearray(VALID[form])
    for place, byte in changes:
        data[int(place * len(data))] = byte
    if cut is not None:
        data = data[: int(cut * len(data))]
    try:
        found = load(bytes(data), tmp_path)
    except RecordingError as error:
        assert str(error).startswith("dump.pkl")
        return
    assert inert(found)
    if form == "zip":  # every byte of it is under a CRC
        assert same(found, SMALL)


@given(st.binary(max_size=200))
@settings(max_examples=300, suppress_health_check=SUPPRESSED)
def test_noise_gives_an_error_or_plain_values(tmp_path: Path, noise: bytes) -> None:
    try:
        assert inert(load(b"\x80\x04" + noise, tmp_path))
    except RecordingError as error:
        assert str(error).startswith("dump.pkl")
