"""Slices and merges hold the very inputs, and the weights that those need."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import recordings
import torch
from raising import raises
from recordings import assert_same, header, recorded, run_inputs, write
from torch import nn

from lockstep.errors import RecordingError
from lockstep.recording import Recording, RecordingWriter
from lockstep.recording.weights import load_weights, save_weights
from lockstep.schema.recording import RecordedInput
from lockstep_lab.recording.edit import Selection, merge_recordings, slice_recording


def unnamed(one: RecordedInput) -> RecordedInput:
    return dataclasses.replace(one, meta=dataclasses.replace(one.meta, checkpoint=None))


def assert_holds(path: Path, inputs: list[RecordedInput]) -> Recording:
    recording = Recording.open(path)
    assert len(recording) == len(inputs)
    for one, other in zip(inputs, recording, strict=True):
        assert_same(one, other)
    assert all(row.problem is None for row in recording.validate())
    return recording


@pytest.mark.parametrize(
    ("selection", "keep"),
    [
        (Selection(indices=(3, 1, 18)), lambda i, m: i in (1, 3, 18)),
        (Selection(first_step=1, last_step=1), lambda i, m: m.step == 1),
        (Selection(first_step=2), lambda i, m: m.step >= 2),
        (Selection(ranks=(1,)), lambda i, m: m.rank == 1),
        (Selection(every=3), lambda i, m: i % 3 == 0),
        (Selection(ranks=(0,), every=2), lambda i, m: i % 4 == 0),
        (Selection(), lambda i, m: True),
    ],
)
def test_a_slice_holds_the_selected_inputs(tmp_path: Path, selection: Selection, keep: Any) -> None:
    inputs = write(tmp_path / "rec", run_inputs())
    edited = slice_recording(Recording.open(tmp_path / "rec"), tmp_path / "out", selection)
    wanted = [unnamed(one) for i, one in enumerate(inputs) if keep(i, one.meta)]
    assert edited.inputs == edited.without_weights == len(wanted) and edited.weights == ()
    found = assert_holds(tmp_path / "out", wanted)
    assert found.closed and found.header.notes["slice"]["of_inputs"] == 20


def test_what_selects_nothing_or_writes_over_something_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "rec", run_inputs(1))
    recording = Recording.open(tmp_path / "rec")
    for selection, named in (
        (Selection(first_step=7), "nothing-left"),
        (Selection(indices=(4,)), "out-of-range"),
        (Selection(every=0), "out-of-range"),
    ):
        with raises(RecordingError, named):
            slice_recording(recording, tmp_path / "out", selection)
    with raises(RecordingError, "already-exists"):
        slice_recording(recording, tmp_path / "rec", Selection())
    path, _ = recording.source(0)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with raises(RecordingError, "damaged-file: shard-000000.safetensors"):
        slice_recording(Recording.open(tmp_path / "rec"), tmp_path / "out", Selection())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rec"]


def test_weights_go_with_the_inputs_that_need_them(tmp_path: Path) -> None:
    module = nn.Linear(3, 2)
    run, rec = tmp_path / "run", tmp_path / "run/recordings"
    first = save_weights(module, rec / "weights/step-000000")
    with torch.no_grad():
        module.weight.add_(1)
    later = save_weights(module, run / "checkpoints/step-000002")
    of_run = {"checkpoint": "../checkpoints/step-000002", "weights": later}
    inputs = [
        recorded(0, weights=first),
        recorded(2, weights=first),
        recorded(4, **of_run),
        recorded(6, checkpoint=None, weights=None),
    ]
    write(rec, inputs)
    out = tmp_path / "out"
    edited = slice_recording(Recording.open(run), out, Selection(first_step=1))
    assert edited.weights == ("weights/step-000000", "weights/step-000002") and edited.without_weights == 1
    found = Recording.open(out)
    names = [meta.checkpoint for meta in found.metas]
    assert names == ["weights/step-000000", "weights/step-000002", None]
    twin = nn.Linear(3, 2)
    assert load_weights(twin, out / "weights/step-000002") == later
    assert torch.equal(twin.weight, module.weight)
    bare = slice_recording(Recording.open(run), tmp_path / "bare", Selection(), weights=False)
    assert bare.without_weights == 4 and not (tmp_path / "bare/weights").exists()


def test_ranks_that_recorded_apart_are_merged(tmp_path: Path) -> None:
    inputs = run_inputs(3)
    for rank in (0, 1):
        created = f"2026-01-0{2 - rank}T00:00:00Z"
        own = header(
            world_size=2, created=created, device_name=f"gpu {rank}", capacity={"token_budget": rank}
        )
        with RecordingWriter(tmp_path / str(rank), own, rank=rank, ranks=[rank]) as writer:
            writer.add([one for one in inputs if one.meta.rank == rank])
    sources = [Recording.open(tmp_path / str(rank)) for rank in (0, 1)]
    edited = merge_recordings(sources, tmp_path / "out")
    assert edited.inputs == 12
    found = assert_holds(tmp_path / "out", [unnamed(one) for one in recordings.key_order(inputs)])
    assert found.header.created == "2026-01-01T00:00:00Z" and found.header.device_name == "gpu 0, gpu 1"
    assert found.header.capacity == {"token_budget": 1} and found.ranks == (0, 1)
    with raises(RecordingError, "duplicate"):
        merge_recordings([sources[0], found], tmp_path / "twice")
    with raises(RecordingError, "missing-argument"):
        merge_recordings(sources[:1], tmp_path / "one")


def test_recordings_of_different_runs_are_not_merged(tmp_path: Path) -> None:
    write(tmp_path / "a", run_inputs(1))
    write(tmp_path / "b", run_inputs(1), temperature=0.5, axes={"attention": "flex", "device": "cuda"})
    with pytest.raises(RecordingError) as caught:
        merge_recordings([Recording.open(tmp_path / name) for name in "ab"], tmp_path / "out")
    assert "axes.attention: 'sdpa' / 'flex'; " in str(caught.value) or "temperature: '1.0' / '0.5'" in str(
        caught.value
    )
    assert "temperature: '1.0' / '0.5'" in str(caught.value) and "axes.device" not in str(caught.value)
