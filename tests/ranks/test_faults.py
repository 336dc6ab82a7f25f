"""Runs that hang or are killed, by the scripts that count them: benchmarks/faults.py and kills.py.

A few of what benchmarks/results has many of: each kind of hang twice, in a real run, and kills at random
moments. Kills at chosen places are in tests/loop/test_resume.py.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
from selected import exhaustive

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
DEADLINE = 30.0
"""Of the watchdog: other tests run beside this one, and a rank may be slow to start."""
BY_ERROR = ("shape", "order", "engine-dead", "disk", "data")
"""Kinds that end by an error of a rank, before the watchdog looks."""
KINDS = ("skipped", "shape", "order", "reward", "engine-dead", "engine-silent", "producer", "disk", "stopped")
KINDS += ("data", "lock", "writes")


@pytest.fixture(scope="module")
def faults() -> ModuleType:
    spec = importlib.util.spec_from_file_location("faults", BENCHMARKS / "faults.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("kind", exhaustive(KINDS, quick=("skipped", "engine-dead", "stopped")))
def test_a_hang_is_named_with_rank_and_cause(
    kind: str, faults: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two cases at once: they wait most of the time."""
    assert set(KINDS) == set(faults.EXPECTED)
    if kind == "disk" and os.geteuid() != 0:
        pytest.skip("only root mounts a small tmpfs")
    monkeypatch.setattr(faults, "SECONDS", DEADLINE)
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(faults.case, [kind, kind]):
            assert found["right"], found
            assert found["by"] == ("error" if kind in BY_ERROR else "watchdog"), found
            assert found["by"] == "error" or found["seconds_after_last_sign"] < DEADLINE + 60


@pytest.mark.exhaustive
def test_runs_that_are_killed_at_random_moments_end_as_the_undisturbed_one() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "kills.py"), "--n", "6", "--seed", "18", "--set", "steps", "6"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 of 6 runs ended as the undisturbed one, to the bit" in done.stdout
