"""A run whose checkpoints are written while it trains is the run that waited for them, killed or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loop_runs import Commands, everything

FILE = "lockstep.train.state.files:_HashingFile.write"
COPY = "lockstep.train.state.save_load:_RankFiles.put"
POLL = "lockstep.loop.checkpoint:CheckpointManager.poll"
COMMIT = "lockstep.loop.checkpoint:CheckpointManager._commit"
PUT = "lockstep.loop.checkpoint:CheckpointManager._publish"
OPTIMIZER = "lockstep.train.local:LocalBackend.optimizer_step"
SECOND, THIRD = "saving-step-000002-", "saving-step-000003-"
FLAGS = ("--checkpoint.background", "--checkpoint.every", "1")


def kill(target: str, **order: Any) -> dict[str, Any]:
    return {"target": target, "call": 1, "send": "SIGKILL"} | order


MOMENTS = {
    "copying": [kill(COPY, step=1, call=2), kill(COPY, step=2, call=30)],
    "writing": [kill(FILE, of=SECOND), kill(FILE, of=SECOND, call=40), kill(FILE, of=THIRD, call=9)],
    "between": [kill(POLL, step=2), kill(OPTIMIZER, step=2, when="after"), kill(OPTIMIZER, step=3)],
    "committing": [kill(COMMIT, call=2), kill(PUT, call=2), kill(PUT, when="after"), kill("shutil:rmtree")],
}
"""All after the first checkpoint: a run that was killed before it is not begun again."""


@pytest.mark.slow
@pytest.mark.parametrize("phase", MOMENTS)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    phase: str, lockstep: Commands, straight: Callable[..., dict[str, Any]], tiny_toml: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    argv: tuple[str | Path, ...] = ("train", tiny_toml, "--run-dir", run, *FLAGS)
    for order in MOMENTS[phase]:
        ended = lockstep(*argv, cwd=tmp_path, signals=[order])
        assert ended.code == -9, (order, ended.out, ended.err)
        argv = ("train", "--resume", run)
    ended = lockstep(*argv, cwd=tmp_path)
    assert ended.code == 0, ended.out + ended.err
    assert not list((run / "checkpoints").glob(".*")), "leftovers of a killed save"
    assert everything(run) == straight()
