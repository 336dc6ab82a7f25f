"""The finding, from records as ranks write them; test_watchdog.py has real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from raising import raises

from lockstep.cli.main import main
from lockstep.errors import DataError
from lockstep.observe.flight import FlightRecorder, read_all
from lockstep.ranks.hang import HangReport, RankState, diagnose, examine, find_records
from lockstep.ranks.stacks import Frame, parse_stacks

A, B = ("allreduce", "[8] float32", "step 1: optimizer"), ("broadcast", "[1] int64", "the step's metrics")


def ranks(folder: Path, *histories: list[tuple[str, str, str]], phase: str = "optimizer") -> HangReport:
    """The ranks have left all collectives but the last that each is in; one that has fewer is in none."""
    common = min(map(len, histories))
    recorders = [
        FlightRecorder(folder, rank=rank, world_size=len(histories)) for rank in range(len(histories))
    ]
    for recorder, history in zip(recorders, histories, strict=True):
        recorder.note(step=1, phase=phase)
        recorder.introduce("0", list(range(len(histories))))
        for number, (op, shapes, purpose) in enumerate(history):
            with recorder.purpose(purpose):
                entered = recorder.enter(recorder.label(op, group="0", shapes=shapes))
            if number < len(history) - 1 or (number < common and len(max(histories, key=len)) > common):
                recorder.leave(entered)
    report = examine(folder, stacks=False)
    for recorder in recorders:
        recorder.close()
    return report


def test_a_rank_that_never_came_is_named_with_the_collective(tmp_path: Path) -> None:
    report = ranks(tmp_path, [A, B, A], [A, B], [A, B, A])
    assert report.culprits == (1,)
    assert report.collective == "collective 3 of group 0: allreduce [8] float32 (step 1: optimizer)"
    assert report.lines[0] == f"rank 1 never came to {report.collective}"


def test_a_wrong_shape(tmp_path: Path) -> None:
    wrong = (A[0], "[9] float32", A[2])
    report = ranks(tmp_path, [B, A], [B, wrong], [B, A])
    assert (report.cause, report.culprits) == ("wrong shape", (1,))
    assert "[8] float32 on rank 0, [9] float32 on rank 1" in report.lines[-1]


def test_shapes_that_went_through_are_no_finding(tmp_path: Path) -> None:
    """Such as the sizes that an all_to_all has on each rank."""
    report = ranks(tmp_path, [("all_to_all", "[1] int64", "x"), A, B], [("all_to_all", "[2] int64", "x"), A])
    assert report.collective == "collective 3 of group 0: broadcast [1] int64 (the step's metrics)"


def test_a_skipped_collective_is_told_by_what_earlier_steps_did(tmp_path: Path) -> None:
    ahead = [A, B, A, B, B]  # the third A is missing
    report = ranks(tmp_path, [A, B, A, B, A], ahead)
    assert (report.cause, report.culprits) == ("skipped collective", (1,))
    assert report.lines[-1] == "likely cause: rank 1 skipped allreduce [8] float32 (step 1: optimizer)"
    report = ranks(tmp_path, ahead, [A, B, A, B, A])
    assert report.culprits == (0,)


def test_another_order(tmp_path: Path) -> None:
    report = ranks(tmp_path, [A, B], [B, A], [A, B])
    assert (report.cause, report.culprits) == ("other order", (1,))


def test_a_rank_that_has_finished_has_ended_early(tmp_path: Path) -> None:
    report = ranks(tmp_path, [A, B], [A], phase="finished")
    assert (report.cause, report.culprits) == ("ended early", (1,))


def test_ranks_in_step_blame_nobody(tmp_path: Path) -> None:
    report = ranks(tmp_path, [A, B], [A, B])
    assert (report.cause, report.culprits) == ("transport", ())


def test_only_the_last_dump_of_stacks_counts() -> None:
    dump = (
        "Thread 0x0000000a (most recent call first):\n"
        '  File "/x/src/lockstep/rollout/rewards.py", line {line} in score\n\n'
        "Current thread 0x0000000b (most recent call first):\n"
        '  File "/usr/lib/python3.11/threading.py", line 5 in wait\n'
        '  File "/x/src/lockstep/loop/rollouts.py", line 9 in sample\n'
    )
    threads = parse_stacks(dump.format(line=1) + dump.format(line=2), 0xB)
    assert [[frame.line for frame in frames] for frames in threads] == [[5, 9], [2]]
    assert threads[1][0].text == "rollout/rewards.py:2 score"


def waiting_rank(folder: Path, *thread: Frame) -> RankState:
    """A rank whose main thread waits for the result of another thread."""
    recorder = FlightRecorder(folder, rank=0, world_size=1)
    recorder.note(step=1, phase="log")
    recorder.close()
    (record,) = read_all(folder)
    main = Frame(file="/lib/python3.11/threading.py", line=1, name="acquire")
    return RankState(flight=record, state="S", threads=((main,), thread))


def test_a_main_thread_that_waits_for_one_stuck_in_a_file_is_no_lock_that_nobody_frees(
    tmp_path: Path,
) -> None:
    free = Frame(file="/lib/python3.11/threading.py", line=1, name="run")
    write = Frame(file="/src/lockstep/observe/files.py", line=1, name="write_atomic")
    assert diagnose([waiting_rank(tmp_path, free)]).cause == "lock that nobody frees"
    assert diagnose([waiting_rank(tmp_path, write, free)]).cause == "slow or stuck file"


def test_a_rank_that_asks_a_remote_role_waits_for_no_engine(tmp_path: Path) -> None:
    turn = Frame(file="/src/lockstep/engine/remote/http.py", line=1, name="_turn")
    ask = Frame(file="/src/lockstep/loop/role_worker.py", line=1, name="_ask")
    assert diagnose([waiting_rank(tmp_path, turn)]).cause == "engine does not answer"
    assert diagnose([waiting_rank(tmp_path, turn, ask)]).cause == "remote role does not answer"


def test_a_node_that_does_not_answer_is_named_with_the_reason(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path, rank=0, world_size=2)
    recorder.introduce("0", [0, 1])
    recorder.enter(recorder.label("allreduce", group="0", shapes="[8] float32"))
    recorder.close()
    (record,) = read_all(tmp_path)
    report = diagnose([RankState(flight=record, state="S")], {1: "no route to it"})
    assert (report.cause, report.culprits) == ("node does not answer", (1,))
    assert "rank 1: its node did not answer: no route to it" in report.text()
    assert report.as_dict()["missing"] == {"1": "no route to it"}
    # one that is seen to be stopped explains more
    report = diagnose([RankState(flight=record, state="T")], {1: "no route to it"})
    assert (report.cause, report.culprits) == ("stopped process", (0,))
    assert "rank 1: its node did not answer: no route to it" in report.text()
    assert diagnose([], {0: "gone", 1: "gone"}).culprits == (0, 1)


def test_the_command_prints_and_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks(tmp_path / "run/logs/flight", [A, B], [A])
    out = tmp_path / "hang.json"
    assert main(["hang", str(tmp_path / "run"), "--no-stacks", "--json", str(out)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("rank 1 never came to collective 2 of group 0: broadcast [1] int64")
    assert shown[-1].startswith("hang: ") and shown[-1].endswith("rank 1")
    assert json.loads(out.read_text())["culprits"] == [1]


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with raises(DataError, "wrong-kind-of-file"):
        find_records(tmp_path)
    assert main(["hang", str(tmp_path)]) == 2
