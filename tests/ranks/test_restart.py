"""Generations of ranks, with programs in their place that end as they are told."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.ranks.environment import Recovery
from lockstep.ranks.in_memory_checkpoint import (
    CopiedFile,
    committed_steps,
    complete,
    copy_folder,
    step_folder,
)
from lockstep.ranks.launch import Launch, RankEnd
from lockstep.ranks.restart import RestartRules, launch_with_restarts

WORKER = """
import json, os, signal, sys, time
from pathlib import Path
restart = json.loads(os.environ.get("LOCKSTEP_RESTART", '{"number": 0}'))
copies, rank = Path(os.environ["LOCKSTEP_COPIES"]), os.environ["RANK"]
line = {"restart": restart, "rank": rank, "copies": str(copies), "mode": copies.stat().st_mode & 0o777}
line["store"] = [os.environ["MASTER_PORT"], os.environ["LOCKSTEP_RANKS_SECRET"]]
with Path(sys.argv[1], "seen").open("a") as file:
    file.write(json.dumps(line) + "\\n")
# the other rank is ended at once
while rank == "1" and Path(sys.argv[1], "seen").read_text().count("\\n") < 2 * restart["number"] + 2:
    time.sleep(0.02)
act = sys.argv[2:][restart["number"]] if rank == "1" else "wait"
if act.startswith("begin"):
    config = Path(sys.argv[1], "run/config.toml")
    config.with_suffix(".new").write_text("begun again")
    config.with_suffix(".new").replace(config)
    act = act.removeprefix("begin")
if act.startswith("-"):
    os.kill(os.getpid(), -int(act))
elif act == "wait":
    time.sleep(0.5 if rank == "0" and sys.argv[2:][restart["number"]] == "0" else 600)
else:
    sys.exit(int(act))
"""


def rules(tmp_path: Path, *, max_restarts: int = 2, restart: bool = False) -> RestartRules:
    (tmp_path / "memory").mkdir(exist_ok=True)
    memory, run = tmp_path / "memory", tmp_path / "run"
    return RestartRules(copy_dir=memory, max_restarts=max_restarts, run_dir=run, restart=restart)


def heal(
    tmp_path: Path, *acts: str, max_restarts: int = 2, restart: bool = False
) -> tuple[int, list[dict[str, object]]]:
    """Rank 1 of each generation ends by these: a status, or a signal; begin: it writes the
    config first. The status, and what ranks saw."""
    command = [sys.executable, "-c", WORKER, str(tmp_path), *acts]
    status = launch_with_restarts(
        lambda logs: Launch(command, ranks=2, log_dir=logs, graceful=True),
        rules(tmp_path, max_restarts=max_restarts, restart=restart),
        log_dir=tmp_path / "logs",
    )
    assert list((tmp_path / "memory").iterdir()) == []
    return status, [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]


def test_ranks_of_which_one_is_killed_are_started_again(tmp_path, capfd):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").touch()
    status, seen = heal(tmp_path, "-9", "-11", "0")
    assert status == 0
    assert sorted((line["restart"]["number"], line["rank"]) for line in seen) == [  # type: ignore[index]
        (number, rank) for number in range(3) for rank in "01"
    ]
    assert len({str(line["store"]) for line in seen}) == 3, "each generation has a store and a secret"
    assert {line["mode"] for line in seen} == {0o700} and len({line["copies"] for line in seen}) == 1
    second = next(line["restart"] for line in seen if line["restart"]["number"] == 2)  # type: ignore[index]
    assert second["run_dir"] == str(tmp_path / "run") and second["most"] == 2  # type: ignore[index]
    assert second["phases"].keys() == {"end the others", "begin again"}  # type: ignore[index]
    said = capfd.readouterr().err.splitlines()
    assert said == [
        "lockstep: rank 1 of 2 was killed by SIGKILL; the run is started again (restart 1 of 2)",
        "lockstep: rank 1 of 2 was killed by SIGSEGV; the run is started again (restart 2 of 2)",
    ]
    assert sorted(path.name for path in tmp_path.glob("logs*")) == [
        "logs",
        "logs-restart-1",
        "logs-restart-2",
    ]


def test_a_run_that_is_begun_again_has_begun_when_its_config_is_written(tmp_path):
    """--restart: until then the ranks begin it again, and do not resume what it was."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").write_text("as it was")
    status, seen = heal(tmp_path, "-9", "begin-9", "0", restart=True)
    assert status == 0
    begun = {line["restart"]["number"]: line["restart"].get("run_dir") for line in seen}  # type: ignore
    assert begun == {0: None, 1: None, 2: str(tmp_path / "run")}


def test_restarts_are_bounded(tmp_path, capfd):
    status, seen = heal(tmp_path, "-9", "-9", "0", max_restarts=1)
    assert status == 128 + 9 and {line["restart"]["number"] for line in seen} == {0, 1}  # type: ignore[index]
    assert "lockstep: cluster.max_restarts = 1" in capfd.readouterr().err


def test_what_a_rank_does_itself_is_not_healed(tmp_path, monkeypatch):
    monkeypatch.setattr("lockstep.ranks.launch._GRACE_SECONDS", 0.1)
    status, seen = heal(tmp_path, "3", "0")
    assert status == 3 and {line["restart"]["number"] for line in seen} == {0}  # type: ignore[index]


@pytest.mark.parametrize(
    ("status", "error", "heals"),
    [
        (-9, None, True),
        (-6, {"type": "ConfigError", "peer": False}, False),
        (1, {"type": "ConfigError", "peer": False}, False),
        (1, {"type": "RankError", "peer": True}, True),
        (1, {"type": "RolesLost", "peer": False, "outside": True}, True),
        (1, None, False),
    ],
)
def test_only_what_came_from_outside_is_healed(tmp_path, monkeypatch, status, error, heals):
    ends = [RankEnd(rank=1, status=status, error=error), RankEnd(rank=0, status=-15, stopped=True)]
    monkeypatch.setattr(Launch, "ends", lambda _: ends)
    assert (Launch(["true"], ranks=2, log_dir=tmp_path)._death() is not None) == heals


def test_ctrl_c_while_ranks_are_started_again_ends_them(tmp_path):
    def interrupt() -> None:
        log = tmp_path / "seen"
        while not log.exists() or log.read_text().count('"number": 1') < 2:
            if stop.wait(0.05):
                return
        os.kill(os.getpid(), signal.SIGINT)

    stop = threading.Event()
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        status, _ = heal(tmp_path, "-9", "wait", "0")
    finally:
        stop.set()
        thread.join()
    assert status == 128 + 2
    found = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False)
    assert found.stdout == "", "no process is left"


def test_a_step_counts_when_all_ranks_have_completed_it(tmp_path):
    for step in (3, 4, 5):
        path = step_folder(tmp_path, step)
        path.mkdir()
        for rank in range(2 if step < 5 else 1):
            (path / f"state-{rank}").write_bytes(b"x" * 10)
            complete(path, rank, {f"state-{rank}": CopiedFile(10)})
    assert committed_steps(tmp_path, 2) == [3, 4]
    (step_folder(tmp_path, 4) / "state-1").write_bytes(b"x")
    assert committed_steps(tmp_path, 2) == [3]
    shutil.rmtree(tmp_path)
    assert committed_steps(tmp_path, 2) == []


def test_a_folder_that_a_killed_launcher_left_is_removed_and_no_other(tmp_path):
    left = tmp_path / "lockstep-copies-left0000"
    (left / "step-000001").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    with copy_folder(tmp_path) as first, copy_folder(tmp_path) as second:
        assert {path.name for path in tmp_path.iterdir()} == {"other", first.name, second.name}
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_a_place_without_room_is_refused(tmp_path, monkeypatch):
    def code(place: Path) -> str:
        with pytest.raises(ConfigError) as refused, copy_folder(place):
            pass
        return refused.value.code

    assert code(tmp_path / "absent") == "no-such-file"
    usage = namedtuple("usage", "total used free")(10, 10, 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert code(tmp_path) == "no-space"


def test_phases_add_up_from_the_death_on(monkeypatch):
    times = iter([10.5, 13.0])
    monkeypatch.setattr("time.time", lambda: next(times))
    restart = Recovery(number=1, most=3, run_dir=None, died=10.0)
    restart.mark("end the others")
    restart.mark("import")
    assert restart.phases == {"end the others": 0.5, "import": 2.5} and restart.seconds == 3.0
