"""rollout.max_lag with an engine in a process of its own, which samples while the trainer works."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loop_runs import metrics_of

sys.path.insert(0, str(Path(__file__).parent))

from test_engine_process import engine_metrics
from test_max_lag import LAG, ledger_of, rollouts_of, run_of

from lockstep import loops
from lockstep.engine.local_server.engine import LocalServerEngine
from lockstep.loop.policy import Policy

pytestmark = pytest.mark.slow
APART = {"process": "separate"}


def before_updates(monkeypatch: pytest.MonkeyPatch, call: Callable[[], None]) -> None:
    """Let the trainer call this before each update, while the engine samples."""
    plain = Policy.update

    def update(self: Policy, *args: Any) -> dict[str, float]:
        call()
        return plain(self, *args)

    monkeypatch.setattr(Policy, "update", update)


def wait_for_rollouts() -> None:
    """Until everything that the lag allows is sampled."""
    for thread in threading.enumerate():
        if thread.name == "rollouts":
            thread.join(120.0)
            assert not thread.is_alive()


def check_ledger(run: Path, *, steps: int) -> None:
    """Every sample of every step is trained on once, and no token is older than the lag."""
    rows = ledger_of(run)
    counts = Counter(row["id"] for row in rows)
    assert len(rows) == len(counts) == steps * 16
    for row in rows:
        assert 0 <= row["trained_step"] - min(row["policy_versions"]) <= LAG
        assert max(row["policy_versions"]) <= row["trained_step"]


def test_the_engine_samples_while_the_trainer_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow trainer finds the rollouts of its next step ended, under the weights before."""
    before_updates(monkeypatch, wait_for_rollouts)
    loops.train(run_of(tmp_path, engine=APART, steps=4, checkpoint={"every": 0}))
    rows = metrics_of(tmp_path / "run")
    check_ledger(tmp_path / "run", steps=4)
    assert rows[0]["logprob_gap_share"] == 1.0 and rows[0]["logprob_gap_max"] == 0.0
    assert [row["rollout/lag_max"] for row in rows] == [0, 1, 2, 2]
    for row in rows[1:]:
        assert row["logprob_gap_share"] == 0.0 and row["policy_drift_mean"] > 0
        assert "logprob_gap_max" not in row
    log = (tmp_path / "run/logs/rank-0.log").read_text()
    assert log.count("warning: logprob_gap_share is 0") == 1


def test_a_gap_of_zero_across_the_cuts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that are cut off at updates and go on under new weights; few at a time, they take longer than
    the trainer."""
    sampling = {"max_tokens": 100, "stop_token_ids": list(range(100, 108))}
    loops.train(run_of(tmp_path, engine=APART | {"max_batch": 4}, steps=4, rollout={"sampling": sampling}))
    rows = metrics_of(tmp_path / "run")
    check_ledger(tmp_path / "run", steps=4)
    assert all(row.get("logprob_gap_max", 0.0) == 0.0 for row in rows)
    assert sum("logprob_gap_max" in row for row in rows) >= 2
    spans = rollouts_of(tmp_path / "run", "token_ids", "rollout_logprobs")
    assert all(len(ids) == len(logprobs) for ids, logprobs in spans)
    assert any(len(row["policy_versions"]) > 1 for row in ledger_of(tmp_path / "run"))


@pytest.mark.exhaustive
def test_a_server_that_dies_while_the_trainer_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had sampled under the last weights is sampled again, and each sample is trained on once."""
    engines: list[LocalServerEngine] = []
    plain, kills = LocalServerEngine.__init__, [0]

    def made(self: LocalServerEngine, *args: Any, **named: Any) -> None:
        plain(self, *args, **named)
        engines.append(self)

    def kill() -> None:
        kills[0] += 1
        if kills[0] == 2:
            os.kill(engines[0]._client.get("/info", seconds=60.0).object()["pid"], signal.SIGKILL)
            time.sleep(1.0)

    monkeypatch.setattr(LocalServerEngine, "__init__", made)
    before_updates(monkeypatch, kill)
    loops.train(run_of(tmp_path, engine=APART, steps=4, checkpoint={"every": 0}))
    rows = metrics_of(tmp_path / "run")
    check_ledger(tmp_path / "run", steps=4)
    assert engine_metrics(tmp_path / "run")[-1]["engine/restarts"] == 1
    assert all(row.get("logprob_gap_max", 0.0) == 0.0 for row in rows)
