"""A run whose checkpoints are written while it trains is the run that waited for them, killed or not."""

from __future__ import annotations

import pytest
from loop_runs import FILE, OPTIMIZER, everything, kill
from selected import exhaustive

COPY = "lockstep.train.state.save_load:_RankFiles.put"
POLL = "lockstep.loop.checkpoint:CheckpointManager.poll"
COMMIT = "lockstep.loop.checkpoint:CheckpointManager._commit"
PUT = "lockstep.loop.checkpoint:CheckpointManager._publish"
SECOND, THIRD = "saving-step-000002-", "saving-step-000003-"
FLAGS = ("--checkpoint.background", "--checkpoint.every", "1")

MOMENTS = {
    "copying": [kill(COPY, step=1, call=2), kill(COPY, step=2, call=30)],
    "writing": [kill(FILE, of=SECOND), kill(FILE, of=SECOND, call=40), kill(FILE, of=THIRD, call=9)],
    "between": [kill(POLL, step=2), kill(OPTIMIZER, step=2, when="after"), kill(OPTIMIZER, step=3)],
    "committing": [kill(COMMIT, call=2), kill(PUT, call=2), kill(PUT, when="after"), kill("shutil:rmtree")],
}
"""All after the first checkpoint: a run that was killed before it is not begun again."""


@pytest.mark.slow
@pytest.mark.parametrize("phase", exhaustive(MOMENTS, quick=list(MOMENTS)[:2]))
def test_a_killed_run_goes_on_as_if_nothing_had_happened(phase, lockstep, straight, tiny_toml, tmp_path):
    lockstep.broken_off(tiny_toml, tmp_path / "run", MOMENTS[phase], *FLAGS)
    assert everything(tmp_path / "run") == straight()
