"""Writers go on with whole recordings only, and through no link; results of others are
read as what they are."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import recordings
from raising import raises
from recordings import header, run_inputs, write

from lockstep.errors import LockstepError, RecordingError
from lockstep.recording import Recording, RecordingWriter
from lockstep_lab.loss_curves.read import read_losses
from lockstep_lab.matrix.compare import compare_outputs
from lockstep_lab.matrix.result import read_cell, read_matrix, read_rows


def killed_run(root: Path) -> None:
    """Two shards of four inputs, never closed."""
    writer = RecordingWriter(root, header(), shard_inputs=2)
    for update in range(2):
        writer.finish([recordings.recorded(update, m, world_size=1) for m in range(2)])


@pytest.mark.parametrize("name", ["rank-0000/index.json", "recording.json", "rank-0000"])
@pytest.mark.parametrize("resume_at", [0, 1, None])
def test_a_writer_refuses_what_the_reader_calls_incomplete(
    tmp_path: Path, name: str, resume_at: int | None
) -> None:
    killed_run(tmp_path / "rec")
    (tmp_path / "rec" / name).rename(tmp_path / "away")
    with pytest.raises(RecordingError):
        Recording.open(tmp_path / "rec")
    before = contents(tmp_path)
    if name == "rank-0000" and resume_at == 0:  # nothing is left, and nothing of it is asked for
        RecordingWriter(tmp_path / "rec", header(), resume_at=resume_at)
        return
    with raises(RecordingError, "already-exists" if resume_at is None else "incomplete"):
        RecordingWriter(tmp_path / "rec", header(), resume_at=resume_at)
    assert contents(tmp_path) == before


def contents(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_lost_folder_of_another_rank_is_refused_too(tmp_path: Path) -> None:
    write(tmp_path / "rec", run_inputs(3))
    shutil.rmtree(tmp_path / "rec/rank-0001")
    with raises(RecordingError, "incomplete"):
        RecordingWriter(tmp_path / "rec", header(), ranks=[0, 1], resume_at=1)


@pytest.mark.parametrize("place", ["rank-0000", "rank-0000/.shard-000002.safetensors.tmp"])
def test_a_writer_does_not_write_through_links(tmp_path: Path, place: str) -> None:
    killed_run(tmp_path / "rec")
    elsewhere, link = tmp_path / "elsewhere", tmp_path / "rec" / place
    if link.exists():
        link.rename(elsewhere)
    else:
        elsewhere.write_text("mine")
    link.symlink_to(elsewhere)
    before = contents(elsewhere) or elsewhere.read_bytes()
    try:
        with RecordingWriter(tmp_path / "rec", header(), resume_at=2, shard_inputs=1) as writer:
            writer.finish([recordings.recorded(4, 0, world_size=1)])
    except RecordingError as error:
        assert "link" in str(error)
    assert (contents(elsewhere) or elsewhere.read_bytes()) == before


def test_what_a_killed_writer_left_is_cleared_by_the_next_one(tmp_path: Path) -> None:
    killed_run(tmp_path)
    litter = ["rank-0000/.shard-000002.safetensors.tmp", "rank-0000/.index.json.ab12", ".recording.json.x"]
    for name in litter:
        (tmp_path / name).write_text("half")
    (tmp_path / "rank-0000/.notes").write_text("someone else's")
    RecordingWriter(tmp_path, header(), resume_at=1).close()
    assert [name for name in litter if (tmp_path / name).exists()] == []
    assert (tmp_path / "rank-0000/.notes").exists()


# --- results of a replay or a matrix ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [None, b"", b"\xff\xfe", b"[" * 10**5, b"9" * 5000, b"[1]", b'{"a": NaN}']
)
def test_results_that_are_none_are_one_line_and_never_waited_for(
    tmp_path: Path, content: bytes | None
) -> None:
    names = ("matrix.json", "cell.json", "results.jsonl", "outputs.safetensors", "metrics.jsonl")
    for name in names:
        if content is None:
            os.mkfifo(tmp_path / name)
        else:
            (tmp_path / name).write_bytes(content)
    readers: list[tuple[str, Callable[[], Any]]] = [
        ("matrix.json", lambda: read_matrix(tmp_path)),
        ("cell.json", lambda: read_cell(tmp_path)),
        ("outputs.safetensors", lambda: compare_outputs(tmp_path / names[3], tmp_path / names[3])),
        ("metrics.jsonl", lambda: read_losses(tmp_path / "metrics.jsonl")),
    ]
    for name, read in readers:
        with pytest.raises(LockstepError) as caught:
            read()
        assert str(tmp_path / name) in str(caught.value)
    if content is None:
        with raises(RecordingError, "not-a-file: results.jsonl"):
            read_rows(tmp_path / "results.jsonl")
    else:
        assert read_rows(tmp_path / "results.jsonl") in (
            [],
            [{"a": pytest.approx(float("nan"), nan_ok=True)}],
        )
