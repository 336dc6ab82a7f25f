"""Processes that wait to take the place of a rank that dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
from starting import until

from lockstep.processes.child import Child
from lockstep.ranks.launch import Launch
from lockstep.ranks.restart import RestartRules, launch_with_restarts
from lockstep.ranks.warm_spares import WarmSpares

RANK = """
import json, os, psutil, signal, sys, time
from pathlib import Path
from lockstep.ranks.warm_spares import await_promotion
waited = "LOCKSTEP_TURN" in os.environ
if waited:
    Path(sys.argv[1], "waits-" + os.environ["RANK"]).write_text(str(os.getppid()))
    if sys.argv[2] == "fails":
        sys.exit("it cannot be imported")
await_promotion()
rank, copies = os.environ["RANK"], Path(os.environ["LOCKSTEP_COPIES"])
number = json.loads(os.environ.get("LOCKSTEP_RESTART", '{"number": 0}'))["number"]
line = {"rank": rank, "number": number, "waited": waited, "port": os.environ["MASTER_PORT"]}
with Path(sys.argv[1], "seen").open("a") as file:
    file.write(json.dumps(line) + "\\n")
print("rank", rank, "of generation", number)
if number == 0 and sys.argv[2] != "none":
    (copies / "step-000001").mkdir(exist_ok=True)
    (copies / "step-000001" / f"complete-{rank}.json").write_text("{}")
    waits = ["", ""]
    if sys.argv[2] == "alone":
        time.sleep(1.5)  # somebody could begin to wait
        waits = []
    while "" in waits or 0 < len(waits) < 2:
        time.sleep(0.02)
        waits = [path.read_text() for path in Path(sys.argv[1]).glob("waits-*")] or [""]
    while sys.argv[2] == "fails" and any(psutil.Process(int(pid)).status() != "zombie" for pid in waits):
        time.sleep(0.02)
if number == 0:
    os.kill(os.getpid(), signal.SIGKILL) if rank == "1" else time.sleep(600)
"""


def heal(folder: Path, what: str, *, spares: bool = True) -> list[dict[str, object]]:
    """Two ranks, of which one is killed; what each rank of both generations saw."""
    (folder / "memory").mkdir()
    command = [sys.executable, "-c", RANK, str(folder), what]
    status = launch_with_restarts(
        lambda logs: Launch(command, ranks=2, log_dir=logs, graceful=True),
        RestartRules(copy_dir=folder / "memory", max_restarts=1, run_dir=folder / "run", warm_spares=spares),
        log_dir=folder / "logs" / "first",
    )
    assert status == 0
    assert not list((folder / "memory").iterdir())
    seen = [json.loads(line) for line in (folder / "seen").read_text().splitlines()]
    return sorted(seen, key=lambda line: (line["number"], line["rank"]))


def test_who_waits_takes_the_place_of_a_rank_with_its_environment_and_its_log(tmp_path: Path) -> None:
    seen = heal(tmp_path, "copies")
    assert [(line["rank"], line["number"], line["waited"]) for line in seen] == [
        *(("0", 0, False), ("1", 0, False)),
        *(("0", 1, True), ("1", 1, True)),
    ]
    first, second = ({line["port"] for line in seen if line["number"] == number} for number in (0, 1))
    assert len(first) == len(second) == 1 and first != second
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["first", "first-restart-1"]
    log = tmp_path / "logs" / "first-restart-1" / "rank-1.log"
    assert log.read_text() == "rank 1 of generation 1\n"


def test_why_one_that_waited_has_failed_is_kept(tmp_path: Path) -> None:
    seen = heal(tmp_path, "fails")
    assert [line["waited"] for line in seen] == [False] * 4
    kept = tmp_path / "logs" / "first-restart-1" / "spare-rank-1.err.log"
    assert kept.read_text() == "it cannot be imported\n"
    assert not (tmp_path / "logs" / "spares").exists()


@pytest.mark.parametrize(("what", "spares"), [("none", True), ("alone", False)])
def test_nobody_waits_without_a_copy_or_where_it_is_set_so(tmp_path: Path, what: str, spares: bool) -> None:
    assert not any(line["waited"] for line in heal(tmp_path, what, spares=spares))
    assert not list(tmp_path.glob("waits-*"))


def spawn(rank: int, environment: Mapping[str, str]) -> Child:
    program = "import json, os; from lockstep.ranks.warm_spares import await_promotion; await_promotion()"
    program += "; print(json.dumps(dict(os.environ)))"
    return Child([sys.executable, "-c", program], env={**os.environ, **environment}, output=rank)


def filled(spares: WarmSpares, folder: Path, *outputs: int) -> list[Child]:
    """Let a process wait for each of these descriptors, which stand for ranks."""
    children: list[Child] = []

    def kept(rank: int, environment: Mapping[str, str]) -> Child:
        children.append(spawn(outputs[rank], environment))
        return children[-1]

    spares.refill(kept, [{"OLD": "1", "BOTH": "1"} for _ in outputs])
    (folder / "step-000001").mkdir()
    (folder / "step-000001" / "complete-0.json").touch()
    deadline = time.monotonic() + 60
    while len(children) < len(outputs) and time.monotonic() < deadline:
        time.sleep(0.02)
    return children


def test_the_environment_is_that_of_its_turn(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with WarmSpares(tmp_path) as spares:
        filled(spares, tmp_path, writer)
        taken = spares.promote([{"BOTH": "2", "NEW": "3"}])
        os.close(writer)
        with os.fdopen(reader) as pipe:
            environment = json.loads(pipe.read())
        assert taken[0].wait(60) == 0
    assert "OLD" not in environment and "LOCKSTEP_TURN" not in environment
    assert (environment["BOTH"], environment["NEW"]) == ("2", "3")


def test_one_that_has_ended_is_left_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with WarmSpares(tmp_path) as spares:
        children = filled(spares, tmp_path, subprocess.DEVNULL, subprocess.DEVNULL)
        supervisor = psutil.Process(children[1].pid)
        while not (programs := supervisor.children()):
            time.sleep(0.02)
        programs[0].kill()
        assert children[1].wait(60) == -signal.SIGKILL
        assert [*spares.promote([{}, {}])] == [0]
    assert "the spare of rank 1 was killed by SIGKILL" in capfd.readouterr().err


def test_the_end_ends_who_waits(tmp_path: Path) -> None:
    with WarmSpares(tmp_path) as spares:
        (child,) = filled(spares, tmp_path, subprocess.DEVNULL)
        assert child.poll() is None
    assert child.poll() is not None
    started: list[int] = []
    with WarmSpares(tmp_path) as spares:  # the copy that is there is of the generation before
        spares.refill(lambda rank, _: started.append(rank), [{}])
        time.sleep(1.5)
    assert not started


def test_one_that_cannot_be_started_is_told_and_done_without(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(rank: int, environment: Mapping[str, str]) -> Child:
        raise OSError(12, "Cannot allocate memory")

    with WarmSpares(tmp_path) as spares:
        spares.refill(fails, [{}])
        (tmp_path / "step-000001").mkdir()
        (tmp_path / "step-000001" / "complete-0.json").touch()
        until(lambda: not spares._thread.is_alive())
        assert spares.promote([{}]) == {}
    assert "no spare for rank 0: [Errno 12]" in capfd.readouterr().err
