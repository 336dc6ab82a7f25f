"""rollout.schedule = "fixed": an engine in a process of its own samples while the trainer works, and the same
run has the same bits, however fast either side is."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from loop_runs import everything, metrics_of
from raising import raises

sys.path.insert(0, str(Path(__file__).parent))

from test_engine_process import engine_metrics
from test_lag_apart import APART, before_updates, check_ledger, wait_for_rollouts
from test_max_lag import ledger_of, run_of

from lockstep import loops
from lockstep.config.load import load_resumed
from lockstep.config.run import GRPORun
from lockstep.engine.local_server.engine import LocalServerDriver, LocalServerEngine
from lockstep.errors import EngineError
from lockstep.rollout.background import Background
from lockstep.rollout.partial import PartialRollouts

pytestmark = pytest.mark.slow
STEPS = 4


def fixed(folder: Path, **tables: Any) -> GRPORun:
    train = {"batch_invariant": True, "deterministic": True}
    rollout = {"schedule": "fixed", "slots": 6}
    return run_of(folder, engine=APART, rollout=rollout, train=train, **{"steps": STEPS, **tables})


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    loops.train(fixed(folder))
    return folder / "run"


def check_same(run: Path, reference: Path, *, physical: bool = True) -> None:
    """Metrics but times, ledger, rollouts, weights and states of optimizers.

    Args:
        physical: also how many keys were shared, which memory and restarts decide.
    """
    found, expected = everything(run), everything(reference)
    for row in () if physical else (*found["metrics"], *expected["metrics"]):
        row.pop("rollout/cached_tokens")
    assert found == expected
    ours, theirs = (
        [{name: value for name, value in row.items() if name != "attempt"} for row in ledger_of(each)]
        for each in (run, reference)
    )
    assert ours == theirs
    check_ledger(run, steps=STEPS)


def server_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int | None]:
    """What tells the pid of the engine's process."""
    engines: list[LocalServerEngine] = []
    plain = LocalServerEngine.__init__

    def made(self: LocalServerEngine, *args: Any, **named: Any) -> None:
        plain(self, *args, **named)
        engines.append(self)

    def pid() -> int | None:
        server = engines[-1]._server if engines else None
        return None if server is None else server.pid

    monkeypatch.setattr(LocalServerEngine, "__init__", made)
    return pid


class Brake:
    """Stops a process for some time, again and again, at random moments."""

    def __init__(self, pid: Callable[[], int | None], *, seed: int) -> None:
        self._pid, self._random = pid, random.Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.stops = 0

    def __enter__(self) -> Brake:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(10.0)

    def _run(self) -> None:
        while not self._over.wait(self._random.uniform(0.0, 0.2)):
            pid = self._pid()
            if pid is not None and psutil.pid_exists(pid):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(self._random.uniform(0.0, 0.3))
                os.kill(pid, signal.SIGCONT)
                self.stops += 1


def test_what_is_sampled_does_not_depend_on_who_is_slow(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step finds all rollouts sampled, in the next the trainer waits for the engine, which is stopped
    again and again."""
    rows = metrics_of(straight)
    assert [row["rollout/lag_max"] for row in rows] == [0, 1, 2, 2]
    assert any(row["rollout/versions_mean"] > 1 for row in rows)  # some were cut off
    updates = [0]

    def wait() -> None:
        updates[0] += 1
        if updates[0] % 2:
            wait_for_rollouts()

    before_updates(monkeypatch, wait)
    with Brake(server_of(monkeypatch), seed=0) as brake:
        loops.train(fixed(tmp_path))
    assert brake.stops > 3
    check_same(tmp_path / "run", straight)


@pytest.mark.exhaustive
@pytest.mark.parametrize("side", ["trainer", "engine"])
@pytest.mark.parametrize("seed", [1, 2])
def test_one_side_slowed_by_random_sleeps(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: str, seed: int
) -> None:
    sleeps = random.Random(seed)
    if side == "trainer":
        before_updates(monkeypatch, lambda: time.sleep(sleeps.uniform(0.0, 2.0)))
        loops.train(fixed(tmp_path))
    else:
        with Brake(server_of(monkeypatch), seed=seed):
            loops.train(fixed(tmp_path))
    check_same(tmp_path / "run", straight)


@pytest.mark.exhaustive
def test_memory_and_rows_change_no_bit(straight: Path, tmp_path: Path) -> None:
    """Fewer rows than slots, and a KV cache that preempts: only the time that it takes depends on them."""
    small = APART | {"max_batch": 3, "kv_cache_tokens": 150}
    train = {"batch_invariant": True, "deterministic": True}
    rollout = {"schedule": "fixed", "slots": 6}
    loops.train(run_of(tmp_path, engine=small, rollout=rollout, train=train, steps=STEPS))
    check_same(tmp_path / "run", straight, physical=False)


@pytest.mark.exhaustive
def test_an_engine_that_dies_while_the_trainer_waits_costs_no_bit(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is started again with the same weights, and samples the same."""
    pid, seen, plain = server_of(monkeypatch), [0], LocalServerDriver.read

    def read(self: LocalServerDriver, *args: Any) -> Any:
        sample = plain(self, *args)
        seen[0] += 1
        if seen[0] in (3, 9):
            found = pid()
            assert found is not None
            os.kill(found, signal.SIGKILL)
        return sample

    monkeypatch.setattr(LocalServerDriver, "read", read)
    loops.train(fixed(tmp_path))
    assert engine_metrics(tmp_path / "run")[-1]["engine/restarts"] == 2
    check_same(tmp_path / "run", straight, physical=False)


@pytest.mark.exhaustive
def test_an_engine_that_dies_while_the_trainer_works_is_an_error_and_a_resume_costs_no_bit(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = server_of(monkeypatch)
    plain = PartialRollouts.step

    def step(self: PartialRollouts, number: int) -> Any:
        """Kills the engine when the rollouts of step 2 are there, and more to be sampled."""
        sampled = plain(self, number)
        found = pid()
        if number == 2 and found is not None:
            os.kill(found, signal.SIGKILL)
        return sampled

    monkeypatch.setattr(PartialRollouts, "step", step)
    with raises(EngineError, "process-died"):
        loops.train(fixed(tmp_path))
    monkeypatch.undo()
    loops.train(load_resumed(tmp_path / "run"), resume=tmp_path / "run")
    check_same(tmp_path / "run", straight)


@pytest.mark.exhaustive
def test_ctrl_c_while_the_border_is_waited_for_costs_no_bit(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, ends = Background.end, [0]

    def end(self: Background, **how: Any) -> None:
        ends[0] += 1
        if ends[0] == 2:
            os.kill(os.getpid(), signal.SIGINT)
        plain(self, **how)

    monkeypatch.setattr(Background, "end", end)
    loops.train(fixed(tmp_path))
    monkeypatch.undo()
    assert len(metrics_of(tmp_path / "run")) < STEPS  # it was stopped
    loops.train(load_resumed(tmp_path / "run"), resume=tmp_path / "run")
    check_same(tmp_path / "run", straight)
