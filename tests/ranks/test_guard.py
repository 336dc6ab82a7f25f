"""Two real ranks on gloo: sums, agreement, and what is said instead of a hang."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.ranks.guard import Position, describe_desync
from lockstep.ranks.launch import launch_command

WORKER = Path(__file__).with_name("rank_worker.py")


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a mode of the worker on two ranks: (status, what each rank reported)."""
    monkeypatch.setenv("OUT", str(tmp_path))

    def run(mode: str) -> tuple[int, list[dict[str, Any] | None]]:
        command = [sys.executable, str(WORKER), mode]
        status = launch_command(command, ranks=2, timeout=300, log_dir=tmp_path / "logs")
        paths = [tmp_path / f"rank-{rank}.json" for rank in range(2)]
        return status, [json.loads(p.read_text()) if p.exists() else None for p in paths]

    return run


def test_sums_over_ranks_in_place_in_the_tensors_own_dtype(two: Any) -> None:
    status, (zero, one) = two("sums")
    assert status == 0
    for found in (zero, one):
        assert found["first"] == [3.0] * 6  # 1 + 2
        assert found["second"] == [1.0, 256.0]
        assert found["steps"] == [4, 4]
        assert found["inputs"] == [10, 11]
        assert found["position"]
    assert zero["local"] == [0, "cpu"] and one["local"] == [1, "cpu"]


@pytest.mark.slow
def test_a_rank_that_never_enters_an_all_reduce_is_named_before_a_hang(two: Any) -> None:
    _, (zero, _) = two("absent")
    assert 2.0 <= zero["seconds"] < 10.0 and zero["step"] == 2
    assert "Rank 0 at all_reduce of the step's number before gradients" in zero["text"]
    assert "rank 1: step 2: forward and backward of input 9" in zero["text"]


def test_a_rank_that_does_not_come_to_an_agreement_is_named(two: Any) -> None:
    _, (zero, _) = two("late")
    assert zero["seconds"] >= 2.0
    assert "agreement on step 5 waits for rank 1, which did not arrive within 2 s" in zero["text"]
    assert "rank 1: step 4: forward and backward of input 9" in zero["text"]
    assert "rank 0 is 1 step ahead of rank 1" in zero["text"]


def test_collectives_of_different_steps_pair_silently_and_only_the_marks_show_it(two: Any) -> None:
    status, reports = two("another_step")
    assert status == 0
    for found in reports:
        assert found["sum"] == [2.0] * 3  # no collective has noticed
        assert found["steps"] == [6, 7]
        assert "do not agree on 'step' of the next step (rank 0: 6, rank 1: 7)" in found["text"]


def test_gathering_rows_of_different_lengths_ends_in_a_diagnosis(
    two: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    status, reports = two("other_shapes")
    # gloo aborts the process of the rank that gets more bytes than it expects. The other has all
    # that it waits for, or notices the loss: which of the two is a race, so the launcher has to say it.
    said = capfd.readouterr().err
    if status == 0:
        assert any("ranks are out of step" in found["text"] for found in reports if found is not None)
    else:
        assert "rank 0 of 2 was killed by SIGABRT; last seen at step 1: all_gather of [B, L]" in said
        assert "Is there a distributed collective mismatch in your code?" in said


def test_the_text_of_a_desync() -> None:
    positions = {
        0: Position(rank=0, step=5, what="all_reduce of gradients", time=time.time()),
        1: Position(rank=1, step=3, what="forward and backward of input 8", time=time.time() - 40),
        2: None,
    }
    lines = describe_desync(0, "step 5 waits for rank 1", positions).splitlines()
    assert lines[0] == "ranks are out of step. Rank 0 at step 5 waits for rank 1"
    assert lines[1] == "  rank 0: step 5: all_reduce of gradients (0 s ago)"
    assert lines[2] == "  rank 1: step 3: forward and backward of input 8 (40 s ago)"
    assert lines[3] == "  rank 2: has not reported anything yet"
    assert "rank 0 is 2 steps ahead of rank 1" in lines[4]
