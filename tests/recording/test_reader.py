"""What a reader knows without touching tensors, and where it finds a recording."""

import math
import shutil
from pathlib import Path

import pytest
import recordings
import torch
from raising import raises
from recordings import assert_same, batch, recorded, run_inputs, write

from lockstep.errors import RecordingError
from lockstep.recording import Recording, reader
from lockstep.recording.files import TensorFile


def test_inputs_come_in_the_order_of_their_keys(tmp_path: Path) -> None:
    inputs = write(tmp_path / "rec", run_inputs())
    recording = Recording.open(tmp_path / "rec")
    assert len(recording) == 20 and recording.header == recordings.header(world_size=2)
    assert [meta.key for meta in recording.metas[:5]] == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
        (0, 1, 1),
        (1, 0, 0),
    ]
    assert recording.metas == tuple(one.meta for one in inputs)
    assert recording.closed and recording.ranks == (0, 1)
    for one, other in zip(inputs, recording, strict=True):
        assert_same(one, other)
    assert_same(recording[-1], inputs[-1])
    with pytest.raises(IndexError):
        recording[20]


def test_metas_and_lengths_need_no_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, run_inputs(2))
    for name in ("digest", "read", "read_tensor"):
        monkeypatch.delattr(TensorFile, name)
    recording = Recording.open(tmp_path)
    assert set(recording.lengths) == {(5, 9, 3)}
    assert recording.outputs_of(5) == (-0.1 * 101, None)
    assert "ref_logprobs" in recording.stored(2) and "rng" in recording.stored(0)


def test_a_run_directory_has_its_recording_in_recordings(tmp_path: Path) -> None:
    write(tmp_path / "run/recordings", run_inputs(1))
    assert Recording.open(tmp_path / "run").path == tmp_path / "run/recordings"
    with raises(RecordingError, "wrong-kind-of-file"):
        Recording.open(tmp_path)
    with raises(RecordingError, "no-such-file"):
        Recording.open(tmp_path / "nowhere")


def test_without_a_path_the_shipped_corpus_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(reader, "ARCHIVE", tmp_path / "corpus.tar.xz")
    with raises(RecordingError, "cannot-read"):
        Recording.open()
    write(tmp_path / "corpus", run_inputs(1))
    shutil.make_archive(str(tmp_path / "corpus"), "xztar", tmp_path, "corpus")
    assert len(Recording.open()) == 4
    made = sorted((tmp_path / "cache").iterdir())
    assert len(made) == 1 and len(Recording.open()) == 4 and sorted((tmp_path / "cache").iterdir()) == made


def test_a_process_that_unpacks_the_corpus_second_takes_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "ARCHIVE", tmp_path / "corpus.tar.xz")
    write(tmp_path / "corpus", run_inputs(1))
    shutil.make_archive(str(tmp_path / "corpus"), "xztar", tmp_path, "corpus")
    folder = tmp_path / "cache" / "corpus-0"
    reader._unpack(folder)
    reader._unpack(folder)
    assert [path.name for path in folder.parent.iterdir()] == ["corpus-0"]
    assert not (folder / "corpus").exists()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "file" / "cache"))
    with raises(RecordingError, "cannot-write"):
        Recording.open()


def test_validate_goes_on_behind_a_damaged_file(tmp_path: Path) -> None:
    values = batch()
    values.rollout_logprobs[2] = math.nan
    write(tmp_path, [*run_inputs(4), recorded(9, content=values)])
    path, _ = Recording.open(tmp_path).source(0)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    rows = list(Recording.open(tmp_path).validate())
    broken = [row for row in rows if row.problem]
    assert len(rows) == 17 and len(broken) == 4
    assert all(str(path) in str(row.problem) and "sha256" in str(row.problem) for row in broken)
    assert rows[-1].notes == ("rollout_logprobs is not finite at 1 tokens",)


def test_a_file_that_changes_after_it_was_verified_is_verified_again(tmp_path: Path) -> None:
    write(tmp_path, run_inputs(1, 1), world_size=1)
    recording = Recording.open(tmp_path)
    assert torch.is_tensor(recording[0].batch.token_ids)
    path, _ = recording.source(0)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with raises(RecordingError, "damaged-file: shard-000000.safetensors"):
        recording[0]
