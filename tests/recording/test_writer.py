"""A recording outlives its run: killed in a forward or while a shard is written, resumed, of many ranks."""

import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import recordings
from raising import raises
from recordings import assert_same, batch, header, key_order, recorded, run_inputs

from lockstep.errors import RecordingError
from lockstep.recording import Recording, RecordingWriter, writer
from lockstep.schema.recording import RecordedInput


def pending(one: RecordedInput) -> RecordedInput:
    """As `begin` sees it."""
    meta = dataclasses.replace(one.meta, outcome="pending")
    return dataclasses.replace(one, meta=meta, outputs=None)


def one_rank(directory: Path, **changes: Any) -> RecordingWriter:
    return RecordingWriter(directory, header(), **{"shard_inputs": 4, **changes})


def assert_holds(directory: Path, inputs: list[RecordedInput]) -> Recording:
    recording = Recording.open(directory)
    assert len(recording) == len(inputs)
    for one, other in zip(key_order(inputs), recording, strict=True):
        assert_same(one, other)
    return recording


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "rank-0000").iterdir())


def test_inputs_are_there_before_the_forward_and_finished_ones_replace_them(tmp_path: Path) -> None:
    inputs = run_inputs(3, 1)
    writer = one_rank(tmp_path)
    writer.begin([pending(one) for one in inputs[:2]])
    assert names(tmp_path) == ["index.json", "open-000000.safetensors"]
    assert not assert_holds(tmp_path, [pending(one) for one in inputs[:2]]).closed
    writer.finish(inputs[:2])
    assert_holds(tmp_path, inputs[:2])
    writer.begin([pending(one) for one in inputs[2:4]])
    assert_holds(tmp_path, [*inputs[:2], *(pending(one) for one in inputs[2:4])])
    writer.finish(inputs[2:4])
    assert names(tmp_path) == ["index.json", "shard-000000.safetensors"]
    writer.finish(inputs[4:])
    writer.close()
    writer.close()
    assert names(tmp_path) == ["index.json", "shard-000000.safetensors", "shard-000001.safetensors"]
    assert assert_holds(tmp_path, inputs).closed
    with raises(RecordingError, "wrong-state"):
        writer.begin(inputs)


def test_micro_batches_may_begin_one_by_one_and_finish_with_another_content(tmp_path: Path) -> None:
    inputs = run_inputs(1, 1)
    other = batch((4, 4), policy=False, capacity=None)
    metas = [dataclasses.replace(pending(one).meta, documents=()) for one in inputs]
    seen = [
        dataclasses.replace(pending(one), batch=other, meta=meta)
        for one, meta in zip(inputs, metas, strict=True)
    ]
    writer = one_rank(tmp_path)
    for one in seen:
        writer.begin([one])
    assert_holds(tmp_path, seen)
    writer.finish(inputs)
    assert_holds(tmp_path, inputs)
    writer.finish([dataclasses.replace(inputs[0], meta=dataclasses.replace(inputs[0].meta, error="x"))])
    assert Recording.open(tmp_path).metas[0].error == "x"


def test_a_step_that_never_finishes_does_not_keep_shards_from_being_written(tmp_path: Path) -> None:
    inputs = run_inputs(8, 1)
    with one_rank(tmp_path) as writer:
        writer.begin([pending(inputs[0])])
        for one in inputs[1:]:
            writer.finish([one])
    assert_holds(tmp_path, [pending(inputs[0]), *inputs[1:]])
    assert len(names(tmp_path)) == 4


def test_large_inputs_make_shards_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "SHARD_BYTES", 1000)
    inputs = run_inputs(3, 1)
    with one_rank(tmp_path, shard_inputs=1000) as opened:
        opened.add(inputs)
        assert "shard-000000.safetensors" in names(tmp_path)
    assert_holds(tmp_path, inputs)


CHILD = """
import sys
sys.path[:0] = [sys.argv[2]]
from pathlib import Path
from test_writer import one_rank, pending
from recordings import run_inputs
inputs = run_inputs(6, 1)
writer = one_rank(Path(sys.argv[1]))
for update in range(6):
    step = inputs[2 * update : 2 * update + 2]
    writer.begin([pending(one) for one in step])
    if update == 5:
        print("fed", flush=True)
        while True:  # the forward that never ends
            pass
    writer.finish(step)
"""


def test_a_process_killed_in_the_forward_leaves_every_input(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path / "rec"), str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "fed\n"
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait(timeout=30)
    inputs = run_inputs(6, 1)
    assert_holds(tmp_path / "rec", [*inputs[:10], *(pending(one) for one in inputs[10:])])
    with one_rank(tmp_path / "rec", resume_at=2) as resumed:  # steps hold two updates
        resumed.finish([recorded(4), recorded(4, 1)])
    assert_holds(tmp_path / "rec", [*inputs[:8], recorded(4), recorded(4, 1)])


class Died(Exception):
    """Stands for the death of the process."""


@pytest.mark.parametrize("at", range(7))
def test_dying_anywhere_while_a_shard_is_written_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    inputs = run_inputs(4, 1)
    opened = one_rank(tmp_path)
    opened.finish(inputs[:2])
    calls = iter(range(100))

    def mortal(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == at:
                raise Died
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for target, name in ((os, "replace"), (os, "fsync"), (Path, "unlink")):
            patch.setattr(target, name, mortal(getattr(target, name)))
        with pytest.raises(Died):
            opened.finish(inputs[2:4])
            opened.finish(inputs[4:6])
            opened.finish(inputs[6:])
    recording = Recording.open(tmp_path)
    assert len(recording) >= 2
    for one, other in zip(inputs, recording, strict=False):
        assert_same(one, other)
    count = len(recording)
    with one_rank(tmp_path, resume_at=100) as resumed:
        resumed.finish(inputs[count:])
    assert_holds(tmp_path, inputs)


def test_resuming_drops_later_steps_and_goes_on(tmp_path: Path) -> None:
    inputs = run_inputs(10, 1)  # steps 0 to 4
    recordings.write(tmp_path, inputs, shard_inputs=6, world_size=1)
    with one_rank(tmp_path, resume_at=2) as resumed:
        assert_holds(tmp_path, inputs[:8])
        resumed.finish([recorded(4, 1)])
    assert_holds(tmp_path, [*inputs[:8], recorded(4, 1)])
    one_rank(tmp_path, resume_at=0).close()
    with raises(RecordingError, "nothing-left"):
        Recording.open(tmp_path)
    one_rank(tmp_path / "new", resume_at=7).close()


def test_resuming_on_fewer_ranks_cuts_the_others_too(tmp_path: Path) -> None:
    inputs = recordings.write(tmp_path, run_inputs(6))
    with one_rank(tmp_path, resume_at=1) as resumed:
        resumed.finish([recorded(2)])
    assert_holds(tmp_path, [*(one for one in inputs if one.meta.step < 1), recorded(2)])


def test_what_must_not_be_overwritten_is_refused(tmp_path: Path) -> None:
    recordings.write(tmp_path, run_inputs(1))
    for rank in (0, 1):
        with raises(RecordingError, "already-exists"):
            RecordingWriter(tmp_path, header(world_size=2), rank=rank)
    with raises(RecordingError, "other-model"):
        RecordingWriter(tmp_path, header(world_size=2, vocab_size=7), resume_at=0)
    with raises(RecordingError, "out-of-range: rank"):
        RecordingWriter(tmp_path / "other", header(), rank=3)
    with raises(RecordingError, "wrong-field: temperature"):
        RecordingWriter(tmp_path / "other", header(temperature=float("nan")))
    with (
        RecordingWriter(tmp_path / "third", header()) as opened,
        raises(RecordingError, "out-of-range: rank"),
    ):
        opened.begin([recorded(0, rank=1)])


def test_the_header_may_be_replaced_by_the_first_rank(tmp_path: Path) -> None:
    writers = [RecordingWriter(tmp_path, header(world_size=2), rank=rank) for rank in (1, 0)]
    for rank, opened in zip((1, 0), writers, strict=True):
        opened.finish([recorded(0, rank=rank)])
        opened.update_header(header(world_size=2, notes={"from": rank}))
        opened.close()
    assert Recording.open(tmp_path).header.notes == {"from": 0}


def _write_rank(directory: Path, rank: int) -> None:
    with RecordingWriter(directory, header(world_size=4), rank=rank, shard_inputs=3) as opened:
        for update in range(8):
            one = recorded(update, 0, rank, world_size=4)
            opened.begin([pending(one)])
            opened.finish([one])


def test_ranks_write_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_write_rank, args=(tmp_path / "rec", rank)) for rank in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
        assert worker.exitcode == 0
    assert_holds(tmp_path / "rec", [recorded(u, 0, r, world_size=4) for u in range(8) for r in range(4)])


def test_a_full_disk_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = one_rank(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with raises(RecordingError, "cannot-write"):
        opened.begin(run_inputs(1, 1))
