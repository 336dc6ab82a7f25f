"""Damaged and hostile recordings: an error that names file and field, bounded memory, nothing executed."""

import dataclasses
import errno
import hashlib
import json
import os
import pickle
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import recordings
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raising import raises
from recordings import assert_same, header, run_inputs, write

from lockstep.errors import RecordingError
from lockstep.recording import Recording, RecordingWriter
from lockstep.recording.files import TensorFile, write_signed_json
from lockstep.recording.format import metadata_digest
from lockstep.recording.reader import KERNELS, header_problems, recorded_axes, recorded_model
from lockstep.recording.weights import save_tensors
from lockstep.schema.recording import RecordedInput
from lockstep_lab.cli import recording as cli
from lockstep_lab.recording.edit import Selection, merge_recordings, slice_recording
from lockstep_lab.replay.cell import ReplayOptions, resolve_cell
from lockstep_lab.replay.losses import token_loss
from lockstep_lab.replay.run import replay

INPUTS = run_inputs(3)

SUPPRESSED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@pytest.fixture
def valid(tmp_path: Path) -> Path:
    write(tmp_path / "rec", INPUTS)
    return tmp_path / "rec"


def read_all(path: Path) -> list[RecordedInput]:
    return list(Recording.open(path))


def refused(path: Path, *named: str) -> None:
    with pytest.raises(RecordingError) as caught:
        read_all(path)
    for name in named:
        assert name in str(caught.value), str(caught.value)


def edit_root(path: Path, change: Callable[[dict[str, Any]], Any], *, name: str = "recording.json") -> None:
    """Change a JSON file and give it the right sha256 again, as an attacker would."""
    value = json.loads((path / name).read_text())
    value.pop("sha256")
    write_signed_json(path / name, change(value) or value)


def edit_shard(
    path: Path, change: Callable[[dict[str, Any], list[dict[str, Any]]], Any], *, header_only: bool = False
) -> None:
    """Change (header, inputs) of rank 0's first shard; every checksum is made to fit, the index too."""
    shard = path / "rank-0000/shard-000000.safetensors"
    raw = shard.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    head, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    metadata = head["__metadata__"]
    inputs = json.loads(metadata["inputs"])
    change(head, inputs)
    metadata["inputs"] = json.dumps(inputs)
    if not header_only:
        metadata["tensors"] = json.dumps(
            {
                name: [
                    value["dtype"],
                    value["shape"],
                    hashlib.sha256(data[slice(*value["data_offsets"])]).hexdigest(),
                ]
                for name, value in head.items()
                if name != "__metadata__"
            }
        )
    metadata["sha256"] = metadata_digest(metadata)
    text = json.dumps(head).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + data)

    def listed(index: dict[str, Any]) -> None:
        index["shards"][0] |= {"sha256": metadata["sha256"], "inputs": max(len(inputs), 1)}

    edit_root(path, listed, name="rank-0000/index.json")


def test_the_tools_of_these_tests_leave_a_recording_valid(valid):
    edit_root(valid, lambda value: None)
    edit_shard(valid, lambda head, inputs: None)
    for one, other in zip(INPUTS, sorted(read_all(valid), key=lambda r: INPUTS.index(_twin(r))), strict=True):
        assert_same(one, other)


def _twin(one: RecordedInput) -> RecordedInput:
    return next(other for other in INPUTS if other.meta.key == one.meta.key)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda v: v | {"version": 2}, "field version is '2', but this Lockstep reads 1"),
        (lambda v: v | {"format": "zip"}, "field format"),
        (lambda v: v | {"vocab_size": 20}, "vocab_size = 20"),
        (lambda v: v | {"vocab_size": "300"}, "field vocab_size"),
        (lambda v: v | {"vocab_size": 10**30}, "field vocab_size"),
        (lambda v: v | {"temperature": "NaN"}, "field temperature"),
        (lambda v: v | {"temperature": -1.0}, "field temperature"),
        (lambda v: v | {"capacity": {"token_budget": -1}}, "field capacity.token_budget"),
        (lambda v: v | {"world_size": 2**40}, "field world_size"),
        (lambda v: v | {"router_losses": {"lr": 1.0}}, "field router_losses.lr"),
        (lambda v: v | {"router_losses": {"router_z_loss": "NaN"}}, "field router_losses.router_z_loss"),
        (lambda v: v | {"ranks": []}, "field ranks"),
        (lambda v: v | {"ranks": [1, 0]}, "field ranks"),
        (lambda v: v | {"ranks": [0, 1, 2]}, "rank-0002"),
        (lambda v: v | {"more": 1}, "field more"),
        (lambda v: {k: v[k] for k in v if k != "model"}, "field model"),
    ],
)
def test_header_fields_are_checked(valid, change, named):
    edit_root(valid, change)
    refused(valid, "rank-0000" if "vocab_size = 20" in named else str(valid), named)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "JSON"),
        ("[]", "not an object"),
        ("{", "JSON"),
        ('{"a": NaN}', "NaN"),
        ('{"a": -Infinity}', "Infinity"),
        ('{"a": 1e999}', "too large"),
        ('{"a": 1, "a": 2}', "occurs twice"),
        ("[" * 100_000, "JSON"),
        ('{"a": ' + "9" * 5000 + "}", "JSON"),
        ('{"a": [' + "1," * 2_000_000 + "1]}", "bytes of JSON"),
        ('{"a": "' + "x" * 17_000_000 + '"}', "larger than 16,777,216 bytes"),
        ('{"format": "lockstep-recording", "version": 1}', "sha256"),
    ],
)
def test_json_is_checked_before_it_is_believed(valid, text, named):
    (valid / "recording.json").write_text(text)
    tracemalloc.start()
    try:
        refused(valid, "recording.json", named)
        assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    finally:
        tracemalloc.stop()


def _meta(**fields: Any) -> Callable[[Any, Any], None]:
    return lambda head, inputs: inputs[1]["meta"].update(fields)


def _entry(**fields: Any) -> Callable[[Any, Any], None]:
    return lambda head, inputs: inputs[1].update(fields)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_meta(checkpoint="../../../etc"), "inputs[1]: field meta.checkpoint"),
        (_meta(checkpoint="/etc"), "meta.checkpoint"),
        (_meta(checkpoint="weights/.."), "meta.checkpoint"),
        (_meta(checkpoint="weights/a/../../b"), "meta.checkpoint"),
        (_meta(checkpoint="weights/step\n"), "meta.checkpoint"),
        (_meta(rank=1), "meta.rank"),
        (_meta(rank=5), "meta.rank 5"),
        (_meta(micro_batch=2), "micro_batch"),
        (_meta(update=-1), "meta.update"),
        (_meta(step=1.5), "meta.step"),
        (_meta(time="Infinity"), "meta.time"),
        (_meta(outcome="great"), "meta.outcome"),
        (_meta(documents=[{}]), "meta.documents"),
        (_entry(lengths=[5, 9, 4]), "the inputs' lengths need"),
        (_entry(lengths=[10**15, 9, 3]), "field lengths.0"),
        (_entry(lengths=[5, 0, 12]), "field lengths.1"),
        (_entry(lengths=[]), "field lengths"),
        (_entry(lengths=[17]), "sample_ids"),
        (_entry(tail=[2**30]), "tail"),
        (_entry(tail=[2**20] * 100), "tail"),
        (_entry(document_slots=2**31 - 1), "document_slots"),
        (_entry(document_slots=2), "document_slots"),
        (_entry(max_seqlen=3), "max_seqlen"),
        (_entry(sample_ids=[1, 2, 2**70]), "sample_ids"),
        (_entry(trained=8), "tensor"),
        (_entry(kind="pickle"), "field kind"),
        (_entry(kind="packed", policy_versions=[]), "floats"),
        (_entry(floats={"loss_weights": "document"}), "floats"),
        (_entry(others=["extras/nothing"]), "differ in"),
        (_entry(trajectories=[1, 2]), "2 trajectories for 3 lengths"),
        (_entry(trajectories=[1, -1, 2]), "field trajectories.1"),
        (_entry(current=True), "differ in 'current'"),
        (_entry(step_tokens=16), "step_tokens 16"),
        (_entry(others=["../../x"]), "field others"),
        (_entry(outputs={"loss": "many", "grad_norm": None, "fingerprints": {}}), "outputs.loss"),
        (lambda head, inputs: inputs.clear(), "at least one input"),
        (_meta(micro_batch=0, update=0), "is inputs[0] already"),
        (lambda head, inputs: inputs.pop(), "differ in"),
        (lambda head, inputs: head["token_ids"].update(dtype="I16"), "token_ids"),
        (lambda head, inputs: head["loss_mask"].update(dtype="BOOL"), "loss_mask"),
        (lambda head, inputs: head["loss_mask"].update(dtype="OBJECT"), "dtype 'OBJECT'"),
        (lambda head, inputs: head["advantages"].update(dtype="I32"), "advantages"),
        (lambda head, inputs: head["advantages"].update(shape=[2**61]), "too large"),
        (lambda head, inputs: head["advantages"].update(shape=[-1, -12]), "shape"),
        (lambda head, inputs: head["advantages"].update(data_offsets=[0, 10**18]), "data_offsets"),
        (lambda head, inputs: head["advantages"].update(data_offsets=[3]), "data_offsets"),
        (lambda head, inputs: head["__metadata__"].update(version="7"), "field version"),
        (lambda head, inputs: head["__metadata__"].update(more="7"), "metadata"),
    ],
)
def test_shard_fields_are_checked_in_bounded_memory(valid, change, named):
    edit_shard(valid, change)
    tracemalloc.start()
    try:
        refused(valid, str(valid / "rank-0000/shard-000000.safetensors"), named)
        assert tracemalloc.get_traced_memory()[1] < 50 * 2**20
    finally:
        tracemalloc.stop()


def test_negative_ids_are_refused(tmp_path):
    write(tmp_path, run_inputs(1), vocab_size=70_000)

    def negative(head: dict[str, Any], inputs: Any) -> None:
        pass

    edit_shard(tmp_path, negative)
    path = tmp_path / "rank-0000/shard-000000.safetensors"
    raw = bytearray(path.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    start = 8 + length + json.loads(raw[8 : 8 + length])["token_ids"]["data_offsets"][0]
    raw[start : start + 4] = (-5).to_bytes(4, "little", signed=True)
    path.write_bytes(raw)
    refused(tmp_path, "shard-000000", "token_ids", "sha256")
    edit_shard(tmp_path, negative)
    refused(tmp_path, "inputs[0]", "token_ids range from -5")


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("kind", ["pickle", "torch", "text", "empty", "huge header"])
def test_other_files_under_a_shards_name_are_refused_and_never_executed(valid, kind):
    shard, trace = valid / "rank-0000/shard-000000.safetensors", valid / "executed"
    if kind == "torch":
        torch.save({"a": Payload(trace)}, shard)
    else:
        content = {
            "pickle": pickle.dumps(Payload(trace)),
            "text": b"hello, this is no recording at all",
            "empty": b"",
            "huge header": (2**62).to_bytes(8, "little") + b"{}",
        }
        shard.write_bytes(content[kind])
    refused(valid, str(shard), "header would be")
    assert not trace.exists()


@pytest.mark.parametrize("shape", [[2**61, 2**61, 0], [0, 2**40, 2**40, 2**40], [2**60, 0]])
def test_absurd_shapes_of_empty_tensors_are_refused(tmp_path, shape):
    path = tmp_path / "a.safetensors"
    head = json.dumps({"x": {"dtype": "U8", "shape": shape, "data_offsets": [0, 0]}}).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head)
    with raises(RecordingError, "damaged-file: a.safetensors"):
        TensorFile(path, tmp_path)


def test_links_out_of_the_recording_and_odd_files_are_refused(valid, tmp_path):
    shard = valid / "rank-0000/shard-000000.safetensors"
    shutil.move(shard, tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    refused(valid, str(shard), "points outside")
    shard.unlink()
    shard.symlink_to(shard)
    refused(valid, str(shard), "cannot be read")
    shard.unlink()
    os.mkfifo(shard)
    refused(valid, str(shard), "not a regular file")
    shard.unlink()
    shard.mkdir()
    refused(valid, str(shard), "not a regular file")
    shard.rmdir()
    refused(valid, str(shard), "cannot be read")
    shutil.move(tmp_path / "elsewhere", shard)
    shutil.move(valid / "rank-0000", tmp_path / "rank")
    (valid / "rank-0000").symlink_to(tmp_path / "rank")
    refused(valid, "rank-0000", "link")


def test_missing_renamed_swapped_and_foreign_files_are_noticed(valid, tmp_path):
    one, two = (valid / f"rank-0000/shard-00000{n}.safetensors" for n in (0, 1))
    for change, undo, named in (
        (lambda: two.rename(tmp_path / "x"), lambda: (tmp_path / "x").rename(two), "shard-000001"),
        (lambda: swap(one, two), lambda: swap(one, two), "renamed or replaced"),
        (
            lambda: swap(valid / "rank-0000", valid / "rank-0001"),
            lambda: swap(valid / "rank-0000", valid / "rank-0001"),
            "field rank is 1",
        ),
        (
            lambda: (valid / "rank-0001").rename(tmp_path / "x"),
            lambda: (tmp_path / "x").rename(valid / "rank-0001"),
            "rank-0001 is missing",
        ),
        (
            lambda: (valid / "rank-0000/notes.txt").write_text(""),
            lambda: (valid / "rank-0000/notes.txt").unlink(),
            "notes.txt",
        ),
        (
            lambda: shutil.copy(one, valid / "rank-0000/open-000099.safetensors"),
            lambda: (valid / "rank-0000/open-000099.safetensors").unlink(),
            "open-000099",
        ),
    ):
        change()
        refused(valid, named)
        undo()
        assert len(read_all(valid)) == len(INPUTS)
    (valid / "rank-0000/index.json").unlink()
    refused(valid, "index.json", "cannot be read")
    shutil.rmtree(valid)
    valid.mkdir()
    refused(valid, str(valid), "has a recording.json")


def swap(one: Path, two: Path) -> None:
    middle = one.with_name(".middle")
    one.rename(middle)
    two.rename(one)
    middle.rename(two)


# --- any mutation -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[RecordedInput]]]:
    """Valid recordings to mutate: a closed one of two ranks, and one whose run was killed."""
    folder = tmp_path_factory.mktemp("seeds")
    closed = write(folder / "closed", run_inputs(2), shard_inputs=3)
    killed = [recordings.recorded(u, m, world_size=1) for u in range(3) for m in range(2)]
    writer = RecordingWriter(folder / "killed", header(), shard_inputs=4)
    for update in range(3):
        writer.finish(killed[2 * update : 2 * update + 2])
    return {"closed": (folder / "closed", closed), "killed": (folder / "killed", killed)}


JSON_VALUES = st.sampled_from(
    [None, True, -1, 0, 1, 2**31, 10**40, 0.5, 1e308, "", "NaN", "../x", [], [0], {}, {"a": 1}]
)


@st.composite
def mutations(draw: st.DrawFn) -> Callable[[Path], str | None]:
    """One change of a recording; tells which file it removed, if it did."""
    kind = draw(
        st.sampled_from(["flip", "insert", "cut", "append", "remove", "rename", "swap", "copy", "json"])
    )
    which, other = draw(st.integers(0, 50)), draw(st.integers(0, 50))
    place, size = draw(st.floats(0, 1)), draw(st.integers(1, 40))
    data = draw(st.binary(min_size=1, max_size=40))
    value = draw(JSON_VALUES)
    name = draw(
        st.sampled_from(
            [
                "shard-000000.safetensors",
                "shard-000002.safetensors",
                "open-000003.safetensors",
                "x",
                ".x",
                "index.json",
            ]
        )
    )

    def mutate(root: Path) -> str | None:
        files = sorted(path for path in root.rglob("*") if path.is_file())
        file, twin = files[which % len(files)], files[other % len(files)]
        raw = file.read_bytes()
        at = int(place * max(len(raw) - 1, 0))
        if kind == "flip":
            file.write_bytes(raw[:at] + bytes([raw[at] ^ (1 << size % 8)]) + raw[at + 1 :])
        elif kind == "insert":
            file.write_bytes(raw[:at] + data + raw[at:])
        elif kind == "cut":
            file.write_bytes(raw[:at] + raw[at + size :])
        elif kind == "append":
            file.write_bytes(raw + data)
        elif kind == "remove":
            file.unlink()
        elif kind == "rename":
            file.rename(file.with_name(name))
        elif kind == "copy" and file.name != name:
            shutil.copyfile(file, file.with_name(name))
        elif kind == "swap" and file != twin:
            swap(file, twin)
        elif kind == "json":
            _replace_field(file, which + other, value)
        return file.name

    return mutate


def _replace_field(path: Path, which: int, value: Any) -> None:
    """One field, deep down, of a JSON file or of a shard's inputs, changed; checksums stay as they were."""
    raw = path.read_bytes()
    if path.suffix == ".json":
        path.write_text(json.dumps(_changed(json.loads(raw), which, value), indent=1))
        return
    length = int.from_bytes(raw[:8], "little")
    head = json.loads(raw[8 : 8 + length])
    inputs = json.loads(head["__metadata__"]["inputs"])
    head["__metadata__"]["inputs"] = json.dumps(_changed(inputs, which, value), separators=(",", ":"))
    text = json.dumps(head).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def _changed(value: Any, which: int, new: Any) -> Any:
    if isinstance(value, dict) and value:
        key = sorted(value)[which % len(value)]
        return {**value, key: _changed(value[key], which // 2, new)}
    if isinstance(value, list) and value:
        index = which % len(value)
        return [*value[:index], _changed(value[index], which // 2, new), *value[index + 1 :]]
    return new


@settings(max_examples=250, suppress_health_check=SUPPRESSED)
@given(kind=st.sampled_from(["closed", "killed"]), mutate=st.lists(mutations(), min_size=1, max_size=1))
def test_a_mutated_recording_gives_the_original_values_or_a_recording_error(seeds, tmp_path, kind, mutate):
    source, inputs = seeds[kind]
    copy = tmp_path / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(source, copy)
    touched = mutate[0](copy)
    try:
        found = read_all(copy)
    except RecordingError as error:
        assert str(copy) in str(error)
        return
    # The last open file of a killed run may be gone without a trace: the run might have died earlier.
    expected = inputs[: len(found)] if kind == "killed" and str(touched).startswith("open") else inputs
    assert len(found) == len(expected) >= len(inputs) - 2
    for one, other in zip(expected, found, strict=True):
        assert_same(one, other)


# --- what a recording names ---------------------------------------------------------------------------------


def recorded_run(tmp_path: Path) -> Path:
    """A run's recording with stored weights, which its one input names."""
    root = tmp_path / "run/recordings"
    stored = save_tensors({"weight": torch.arange(6.0)}, root / "weights/step-000000")
    inputs = [recordings.recorded(0, 0, world_size=1, weights=stored)]
    with RecordingWriter(root, header()) as writer:
        writer.add(inputs)
    return root


def validated(path: Path) -> tuple[int, list[str]]:
    result, status, _ = cli.validate(cli.Validate(path=path))
    return status, result["problems"]


def sliced(path: Path, out: Path) -> None:
    slice_recording(Recording.open(path), out, Selection())


@pytest.mark.parametrize(
    "kernel", ["hf:evil/repo", "hf:kernels-community/flash-attn2@main", "hf:nope", "hf:", "flash", "hf:sdpa "]
)
def test_a_recording_may_not_choose_a_kernel_that_the_support_table_does_not_name(tmp_path, kernel):
    root = recorded_run(tmp_path)
    edit_root(root, lambda v: v | {"axes": {"attention": kernel}})
    recording = Recording.open(root)
    with raises(RecordingError, "wrong-field: axes.attention"):
        resolve_cell(recording.header, device="cpu")
    assert (
        resolve_cell(recording.header, device="cpu", overrides={"attention": "sdpa"})[0].attention == "sdpa"
    )
    status, problems = validated(root)
    assert status == 1 and "axes.attention" in problems[0]


def test_the_kernels_of_the_support_table_may_be_named():
    flash = [f"hf:flash_attention_{n}" for n in (2, 3, 4)]
    assert {*KERNELS} == {"sdpa", "varlen", "flex", "hf:sdpa", "hf:eager", *flash}


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ({"name": "x" * 5000}, "model.name"),
        ({"name": "\x1b]0;pwn\x07"}, "model.name"),
        ({"name": "a\0b"}, "model.name"),
        ({"name": "ok", "revision": "\x9b31m"}, "model.revision"),
        ({"name": "shape:tiny-llama", "lora": {"rank": 2**30}}, "model.lora.rank"),
        ({"name": "shape:tiny-llama", "seed": 10**30}, "model.seed"),
        ({"name": 7}, "model.name"),
        ({}, None),
    ],
)
def test_models_that_a_replay_refuses_are_refused_by_validate(tmp_path, model, named, capsys):
    root = recorded_run(tmp_path)
    edit_root(root, lambda v: v | {"model": model})
    status, problems = validated(root)
    assert (status, [named in p for p in problems if named]) == ((1, [True]) if named else (0, []))
    cli.show(cli.Show(index=0, path=root))
    shown = capsys.readouterr().out
    assert not any(c in shown for c in "\x1b\x07\x9b\0")


def test_algorithms_that_a_replay_refuses_are_refused_by_validate(tmp_path):
    root = recorded_run(tmp_path)
    edit_root(root, lambda v: v | {"algorithm": {"name": "\x1b[31mgrpo"}})
    with raises(RecordingError, "wrong-field: algorithm.name"):
        token_loss(Recording.open(root).header, "recorded")
    assert validated(root)[0] == 1


def secret_link(root: Path, place: str) -> None:
    secret = root.parent.parent / "secret"
    secret.write_text("PRIVATE KEY")
    file = root / "weights/step-000000/model.safetensors"
    if place == "file":
        file.unlink()
        file.symlink_to(secret)
    elif place == "safetensors file":
        file.rename(secret)
        file.symlink_to(secret)
    elif place == "fifo":
        file.unlink()
        os.mkfifo(file)
    elif place == "folder":
        file.parent.rename(secret.with_name("folder"))
        file.parent.symlink_to(secret.with_name("folder"))
    elif place == "weights":
        file.parent.parent.rename(secret.with_name("folder"))
        file.parent.parent.symlink_to(secret.with_name("folder"))
    elif place == "text":
        file.write_text("PRIVATE KEY")
    elif place == "flipped":
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
    elif place == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
    elif place == "empty":
        file.write_bytes(b"")
    elif place == "other":
        save_tensors({"weight": torch.arange(7.0)}, file.parent)


PLACES = {
    "file": "leads-out-of-folder",
    "safetensors file": "leads-out-of-folder",
    "fifo": "not-a-file",
    "folder": "leads-out-of-folder",
    "weights": "leads-out-of-folder",
    "text": "damaged-file: model.safetensors",
    "flipped": "hash-differs: fingerprint",
    "truncated": "damaged-file: model.safetensors",
    "empty": "damaged-file: model.safetensors",
    "other": "hash-differs: weights",
}


@pytest.mark.parametrize("place", PLACES)
def test_weights_that_lead_elsewhere_or_are_damaged_are_neither_copied_nor_valid(tmp_path, place):
    root = recorded_run(tmp_path)
    assert validated(root) == (0, [])
    secret_link(root, place)
    with raises(RecordingError, PLACES[place]):
        sliced(root, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))
    status, problems = validated(root)
    assert status == 1 and str(root / "weights") in problems[0]


@pytest.mark.parametrize("place", PLACES)
def test_merging_checks_weights_as_slicing_does(tmp_path, place):
    one, two = recorded_run(tmp_path / "a"), recorded_run(tmp_path / "b")
    edit_shard(two, lambda head, inputs: inputs[0]["meta"].update(update=1))
    secret_link(two, place)
    with raises(RecordingError, PLACES[place]):
        merge_recordings([Recording.open(one), Recording.open(two)], tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_a_slice_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    root = recorded_run(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for owner, name in ((shutil, "copyfileobj"), (os, "rename"), (Path, "mkdir"), (os, "fsync")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, full)
            with raises(RecordingError, "cannot-write"):
                sliced(root, tmp_path / "out")
        assert not list(tmp_path.glob("*out*"))


# --- sizes that nothing is stored for -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tail": [2**22]}, "tail of 4194304 slots"),
        ({"tail": [2**18], "document_slots": 2**20 + 1}, "document_slots"),
        ({"tail": [2**18], "document_slots": 2**17, "max_seqlen": 2**25}, "max_seqlen"),
        ({"tail": [2**19, 2**19 + 1], "document_slots": 8, "max_seqlen": 2**20}, "tail"),
    ],
)
def test_what_is_padded_is_in_proportion_to_what_is_stored(valid, change, named):
    large = {"max_seqlen": 2**23, "document_slots": 2**16} | change
    edit_shard(valid, lambda head, inputs: inputs[1].update(large))
    refused(valid, named)
    assert validated(valid)[0] == 1


@pytest.fixture
def replayable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recording of one input that shape:tiny-llama can be fed."""
    monkeypatch.setattr(recordings, "VOCAB", 256)
    batch = recordings.batch(capacity=None, policy=False)
    one = recordings.recorded(
        0, 0, world_size=1, content=batch, outputs=None, outcome="pending", checkpoint=None
    )
    with RecordingWriter(tmp_path, header(algorithm={"name": "sft"})) as writer:
        writer.add([one])
    return tmp_path


def replayed(root: Path, **options: Any) -> Any:
    cell, notes = resolve_cell(Recording.open(root).header, device="cpu")
    return replay(Recording.open(root), ReplayOptions(cell=cell, notes=notes, **options)).rows[0]


def test_an_input_beyond_the_memory_that_it_may_take_names_the_flag(replayable):
    root = replayable
    pads = {"tail": [2000] * 100, "document_slots": 200, "max_seqlen": 2000}
    edit_shard(root, lambda head, inputs: inputs[0].update(pads))
    row = replayed(root, max_memory=2**28)
    assert row.status == "failed"
    assert "a batch of 200,017 slots would take about" in row.error["line"]
    assert "0.25 GiB" in row.error["line"] and "--max-memory" in row.error["line"]
    edit_shard(root, lambda head, inputs: inputs[0].update(tail=[200_000], max_seqlen=2**18))
    assert "a pad document has 200,000 slots" in replayed(root).error["line"]
    edit_shard(root, lambda head, inputs: inputs[0].update(tail=[], max_seqlen=32))
    assert replayed(root, max_memory=2**28).status == "ok"


@pytest.mark.parametrize(
    "header_change",
    [
        {"capacity": {"token_budget": 2**31 - 1, "max_seqlen": 1}, "axes": {"static_capacity": True}},
        {"model": {"name": "shape:tiny-llama", "lora": {"rank": 2**16}}},
    ],
)
def test_a_header_that_asks_for_much_is_refused(replayable, header_change):
    root = replayable
    edit_root(root, lambda v: v | header_change)
    if "capacity" in header_change:
        row = replayed(root, max_memory=2**26)
        assert row.status == "failed" and "capacity" in row.error["line"]
        return
    with raises(RecordingError, "out-of-memory: --max-memory"):
        replayed(root, max_memory=2**26)


# --- keys ---------------------------------------------------------------------------------------------------


HOSTILE = st.sampled_from(
    [
        "",
        "x" * 5000,
        "\x1b]0;a\x07",
        "a\0b",
        "\udcff",
        "../..",
        "hf:a/b",
        10**400,
        -1,
        1e308,
        0,
        True,
        None,
        [],
        {},
    ]
)


@settings(max_examples=60, suppress_health_check=SUPPRESSED)
@given(
    field=st.sampled_from(["model", "axes", "algorithm"]),
    key=st.sampled_from(
        [
            *("name", "revision", "dtype", "num_layers", "seed", "lora", "trust_remote_code", "attention"),
            *("execution", "layout", "padding_side", "device", "static_capacity", "kl", "clip_high", "beta"),
        ]
    ),
    value=HOSTILE,
    inner=st.sampled_from(["rank", "alpha", "dropout", "target_modules", "coef", None]),
)
def test_any_header_field_is_believed_or_refused_by_replay_and_validate_alike(
    seeds, field, key, value, inner
):
    root, _ = seeds["closed"]
    base = Recording.open(root).header
    changed = {**getattr(base, field), key: value if inner is None else {inner: value}}
    changed_header = dataclasses.replace(base, **{field: changed})
    problems = list(header_problems(changed_header))
    try:
        recorded_axes(changed_header)
        recorded_model(changed_header)
        token_loss(changed_header, "recorded")
    except RecordingError as error:
        assert str(error) in problems
    else:
        assert problems == []
