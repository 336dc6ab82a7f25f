"""The timeline of a step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.observe import flight
from lockstep.view.curves import CurveReader
from lockstep.view.steps import Bar, step_detail

BEGAN = 1000.0


def write(run: Path, **timers: float) -> None:
    names = {f"time/{name}": seconds for name, seconds in timers.items()}
    row = {"step": 3, "timestamp": BEGAN + 10, "input/slots": 64.0, "memory/rss_peak_gib": 2.0, **names}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")


def test_timers_in_the_order_of_the_loop_and_what_none_of_them_counts(tmp_path: Path) -> None:
    write(
        tmp_path,
        step=10.0,
        weights=1.0,
        generate=4.0,
        forward_backward=3.0,
        reward=0.0,
        evaluate=5.0,
        host=2.0,
    )
    memory = {"peak_bytes": 3 * 2**30, "total_bytes": 8 * 2**30, "line": "fits"}
    detail = step_detail(tmp_path, 3, CurveReader(tmp_path).read(), manifest={"axes": {"memory": memory}})
    (first,) = detail.timeline
    assert first.bars == (
        Bar(phase="generate", start=0.0, seconds=4.0),
        Bar(phase="forward_backward", start=4.0, seconds=3.0),
        Bar(phase="weights", start=7.0, seconds=1.0),
        Bar(phase="idle", start=8.0, seconds=2.0),
    )
    assert detail.between == (Bar(phase="evaluate", start=0.0, seconds=5.0),)
    assert (detail.seconds, detail.batch) == (10.0, {"input/slots": 64.0})
    assert detail.memory_planned == {"peak": 3.0, "of": 8.0}
    assert detail.memory_used == {"memory/rss_peak_gib": 2.0} and detail.problems == ()


def test_a_step_that_is_not_there(tmp_path: Path) -> None:
    write(tmp_path, step=1.0)
    detail = step_detail(tmp_path, 9, CurveReader(tmp_path).read(), manifest={})
    assert (detail.timeline, detail.metrics, detail.problems) == ((), {}, ("metrics.jsonl has no step 9",))


def record(run: Path, monkeypatch: pytest.MonkeyPatch, *, earlier: bool) -> None:
    """Rank 1 of two: in step 3 a collective from second 2 to 5 while it generates, and one from 7 to 8 in the
    backward."""
    clock = [BEGAN]
    monkeypatch.setattr(flight.time, "time", lambda: clock[0])
    recorder = flight.FlightRecorder(run / "logs" / "flight", rank=1, world_size=2)
    recorder.introduce("0", [0, 1])
    label = recorder.label("allreduce", group="0", shapes="[4] float32")

    def collective(phase: str, began: float, ended: float, step: int) -> None:
        clock[0] = BEGAN + began
        recorder.note(step=step, phase=phase)
        number = recorder.enter(label)
        clock[0] = BEGAN + ended
        recorder.leave(number)

    if earlier:
        collective("generate", -3, -2, 2)
    collective("generate", 2, 5, 3)
    collective("forward_backward", 7, 8, 3)
    recorder.close()


def test_other_ranks_from_their_flight_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, step=10.0, generate=6.0, forward_backward=4.0)
    record(tmp_path, monkeypatch, earlier=True)
    detail = step_detail(tmp_path, 3, CurveReader(tmp_path).read(), manifest={})
    (_, other) = detail.timeline
    assert other.rank == 1 and [(bar.phase, bar.start, bar.seconds) for bar in other.bars] == [
        ("generate", 0.0, 2.0),
        ("idle", 2.0, 3.0),
        ("forward_backward", 5.0, 2.0),
        ("idle", 7.0, 1.0),
        ("forward_backward", 8.0, 2.0),
    ]


def test_a_record_that_has_lost_the_beginning_of_the_step_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, step=10.0, generate=10.0)
    record(tmp_path, monkeypatch, earlier=False)
    (path,) = (tmp_path / "logs" / "flight").glob("*.flight")
    data = bytearray(path.read_bytes())
    at = flight._RING_AT  # as if the ring had gone around: the first that is left is number 2
    data[at : at + flight._SLOT.size] = bytes(flight._SLOT.size)
    path.write_bytes(data)
    detail = step_detail(tmp_path, 3, CurveReader(tmp_path).read(), manifest={})
    assert [each.rank for each in detail.timeline] == [0]
