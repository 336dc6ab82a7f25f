"""Real ranks that are killed and restarted from host memory end as those of an undisturbed run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from loop_runs import OF_HEALING, everything, healed_toml
from starting import lockstep

from lockstep.observe.metrics import check_ledger
from lockstep.ranks.launch import Launch
from lockstep.ranks.restart import RestartRules, launch_with_restarts

BACKEND = "lockstep.train.fsdp2.backend:FSDP2Backend"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With tiny.toml and the run `alone`, which makes no copies."""
    folder = tmp_path_factory.mktemp("heal")
    (folder / "tiny.toml").write_text(healed_toml("rewards_of_ranks:EvenShare"))
    shutil.copy(Path(__file__).with_name("rewards_of_ranks.py"), folder)
    assert train(folder, "alone").returncode == 0
    return folder


def train(folder: Path, name: str, *flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    argv = ("train", "tiny.toml", "--ranks", "2", "--run-dir", name, *flags)
    return lockstep(*argv, cwd=folder, **environ)


def assert_as_alone(folder: Path, name: str) -> dict[str, Any]:
    """What the summary says of healing; everything else is as in the run alone."""
    healed, alone = everything(folder / name), everything(folder / "alone")
    found = {field: healed["summary"].pop(field) for field in OF_HEALING}
    assert healed == alone
    assert not check_ledger(folder / name).problems
    return found


@pytest.mark.exhaustive
def test_kills_at_every_place_leave_no_trace(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kills = [
        # in the middle of an update; the same again while the state is loaded
        {"rank": 1, "restart": 0, "step": 1, "target": f"{BACKEND}.forward_backward", "call": 1},
        {"rank": 0, "restart": 1, "target": f"{BACKEND}.load", "call": 1},
        # after the optimizer step: the other rank's part of the copy is whole, this one's is not
        {"rank": 0, "restart": 2, "step": 2, "target": f"{BACKEND}.save", "call": 1, "when": "after"},
        # between sampling and the update
        {"rank": 1, "restart": 3, "step": 3, "target": "lockstep.rollout.sampler:GroupSampler.step"}
        | {"call": 1, "when": "after"},
    ]
    monkeypatch.chdir(folder)
    monkeypatch.setenv("KILLS", json.dumps(kills))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = [sys.executable, str(Path(__file__).with_name("killed_rank.py"))]
    command += ["train", "tiny.toml", "--ranks", "2", "--run-dir", "killed", "--cluster.peer-copy"]
    (folder / "memory").mkdir()
    status = launch_with_restarts(
        lambda logs: Launch(command, ranks=2, log_dir=logs, graceful=True, watch=300),
        RestartRules(copy_dir=folder / "memory", max_restarts=4, run_dir=Path("killed")),
        log_dir=Path("killed/logs/ranks/first"),
    )
    assert status == 0 and not list((folder / "memory").iterdir())
    found = assert_as_alone(folder, "killed")
    assert found["restarts"] == 4 and found["restored_from"] == "memory" and found["checkpoints_read"] == 0
    assert [*found["recovery_seconds"]] == [
        *("end the others", "begin again", "import", "connect", "build", "load", "step")
    ]
    logs = [folder / f"killed/logs/ranks/first-restart-{number}/rank-0.log" for number in (2, 3, 4)]
    resumed = [line for log in logs for line in log.read_text().splitlines() if "resuming" in line]
    assert [line.rpartition("-")[2] for line in resumed] == ["000001", "000002", "000003"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("kill", "lockstep: rank 1 of 2 was killed by SIGKILL; last seen at step "),
        ("stop", "lockstep: no rank has made progress for 15 s"),
    ],
)
def test_the_command_heals_a_rank_that_is_killed_or_stopped(folder: Path, action: str, said: str) -> None:
    memory = folder / f"memory-{action}"
    memory.mkdir()
    flags = ("--cluster.peer-copy", "--cluster.copy-dir", str(memory), "--rank-timeout", "15")
    ended = train(folder, action, *flags, AT=f"1:20:{action}")
    (folder / "acted").unlink()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert not list(memory.iterdir())
    assert said in ended.stderr
    assert "; the run is restarted from host memory at step " in ended.stderr
    found = assert_as_alone(folder, action)
    assert (found["restarts"], found["restored_from"], found["checkpoints_read"]) == (1, "memory", 0)
