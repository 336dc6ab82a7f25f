"""Runs that hang or are killed, by the scripts that count them: benchmarks/faults.py and kills.py.

A few of what benchmarks/results has many of: the kinds of hang that the other tests of this folder do not
cause, in a real run, once each, and kills at random moments. Left out: disk, which mounts a file system.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
DEADLINE = 20.0
"""Of the watchdog: other tests run beside this one, and a rank may be slow to start."""


@pytest.fixture(scope="module")
def faults() -> ModuleType:
    spec = importlib.util.spec_from_file_location("faults", BENCHMARKS / "faults.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["reward", "engine-silent", "lock", "writes"])
def test_a_hang_is_named_with_rank_and_cause(
    kind: str, faults: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "SECONDS", DEADLINE)
    found = faults.case(kind)
    assert found["right"] and found["by"] == "watchdog", found
    assert found["seconds_after_last_sign"] < DEADLINE + 60


@pytest.mark.slow
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
