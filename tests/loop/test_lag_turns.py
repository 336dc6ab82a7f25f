"""rollout.max_lag with tools: instances live on from step to step, and calls are made once."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted import save_scripted

ENVIRONMENTS = Path(__file__).parent.parent / "environments"
sys.path.insert(0, str(ENVIRONMENTS))

from test_journal import (  # noqa: E402
    CALL,
    CONFIG,
    calls_of,
    metrics_of,
    weights_of,
    write_run,
)

LAG, SAMPLES = 2, 4
LAGGED = (
    CONFIG.replace(
        "[rollout]", '[engine]\nname = "native"\nmax_batch = 5\n{engine}\n\n[rollout]\nmax_lag = 2'
    )
    .replace("temperature = 0.05", "temperature = 0.5")
    .replace("max_turns = 3", "max_turns = 4")
    + """
[algorithm]
rollout_correction = {{ kind = "tis" }}

[train]
batch_invariant = true
deterministic = {deterministic}
device = "cpu"
lr = 1e-3
"""
)
Start = Callable[..., int]


@pytest.fixture
def start(tiny_folder: Path, tmp_path: Path) -> Start:
    """Run killed_run.py in a folder of its own, and return its exit status."""
    model = save_scripted(tiny_folder, tmp_path / "model", (CALL, "<|end|>"), special=False)

    def start(name: str, *arguments: object, apart: bool = False) -> int:
        folder = tmp_path / name
        engine, deterministic = ('process = "separate"', "false") if apart else ("", "true")
        config = LAGGED.format(steps=4, model=model, engine=engine, deterministic=deterministic)
        write_run(folder, config)
        command = [sys.executable, str(ENVIRONMENTS / "killed_run.py"), "run.toml", "run"]
        command += map(str, arguments)
        done = subprocess.run(command, cwd=folder, timeout=280, capture_output=True, text=True, check=False)
        assert done.returncode in (0, -signal.SIGKILL), done.stdout + done.stderr
        return done.returncode

    return start


def check_ledger(folder: Path) -> list[dict[str, Any]]:
    """Every sample is trained on once, and no token is older than the lag."""
    rows = [json.loads(line) for line in (folder / "run/ledger.jsonl").read_text().splitlines()]
    assert len(rows) == len({row["id"] for row in rows}) == 4 * SAMPLES
    assert all(0 <= row["trained_step"] - min(row["policy_versions"]) <= LAG for row in rows)
    assert all(line.get("logprob_gap_max", 0.0) == 0.0 for line in metrics_of(folder))
    return rows


@pytest.mark.slow
def test_a_killed_run_with_tools_goes_on_to_the_same_bits(start: Start, tmp_path: Path) -> None:
    assert start("whole", "new") == 0
    whole = tmp_path / "whole"
    rows = check_ledger(whole)
    assert any(len(row["policy_versions"]) > 1 for row in rows)  # some were cut off, and went on
    assert max(row["trained_step"] - min(row["policy_versions"]) for row in rows) == LAG
    assert all(0 < line["logprob_gap_share"] <= 1.0 for line in metrics_of(whole))
    assert set(calls_of(whole).values()) == {1}
    assert start("killed", "new", 2, 3) == -signal.SIGKILL
    assert start("killed", "resume") == 0
    killed = tmp_path / "killed"
    check_ledger(killed)
    assert Counter(calls_of(killed)) == calls_of(whole)
    assert metrics_of(killed) == metrics_of(whole)
    assert weights_of(killed) == weights_of(whole)


@pytest.mark.exhaustive
def test_an_engine_apart_goes_on_with_tools_while_the_trainer_works(start: Start, tmp_path: Path) -> None:
    assert start("apart", "new", apart=True) == 0
    check_ledger(tmp_path / "apart")
    assert set(calls_of(tmp_path / "apart").values()) == {1}
