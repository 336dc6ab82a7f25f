"""Every example runs as its first lines say, on random weights."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def numbers(pattern: str, text: str) -> list[float]:
    found = re.search(pattern, text)
    assert found is not None, text
    return [float(value) for value in found.groups()]


@pytest.mark.slow
def test_ten_lines_learn(tmp_path: Path) -> None:
    before, after = numbers(
        r"held-out mean reward ([\d.]+) -> ([\d.]+)", run("train_in_ten_lines.py", tmp_path)
    )
    assert after > before + 0.1
    source = (EXAMPLES / "train_in_ten_lines.py").read_text()
    code = source.split('"""')[2]
    assert len([line for line in code.splitlines() if line.strip()]) <= 10


@pytest.mark.slow
def test_own_reward_is_found_by_name_and_scores(tmp_path: Path) -> None:
    (reward,) = numbers(r"held-out mean reward ([\d.]+)", run("own_reward.py", tmp_path))
    assert 0.2 < reward <= 1.0


@pytest.mark.slow
def test_own_loop_trains_on_some_groups_and_exports(tmp_path: Path) -> None:
    output = run("own_loop.py", tmp_path)
    steps = re.findall(r"reward ([\d.]+), trained on (\d+) of 8 groups, grad norm ([\d.]+)", output)
    assert len(steps) == 5
    assert all(4 <= int(kept) < 8 and float(norm) > 0 for _, kept, norm in steps)
    assert (tmp_path / "own-loop-export" / "model.safetensors").is_file()


@pytest.mark.slow
def test_an_environment_of_two_turns_is_learnt(tmp_path: Path) -> None:
    before, after = numbers(r"held-out mean reward ([\d.]+) -> ([\d.]+)", run("own_environment.py", tmp_path))
    assert after > before + 0.05


@pytest.mark.slow
def test_a_loop_that_was_written_for_the_last_version_goes_on(tmp_path: Path) -> None:
    """examples/own_loop.py as it was before `Builder`: the same steps as the new one."""
    command = [sys.executable, "-W", "default", str(Path(__file__).with_name("own_loop_0_0.py"))]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "lockstep.OnlineTrainer will be removed in 0.2; use lockstep.Builder" in done.stderr
    steps = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    new = [line for line in run("own_loop.py", tmp_path).splitlines() if line.startswith("step ")]
    assert done.returncode == 0 and len(steps) == 5 and steps == new


@pytest.mark.slow
def test_sft_lowers_the_held_out_loss(tmp_path: Path) -> None:
    before, after = numbers(r"held-out loss ([\d.]+) -> ([\d.]+)", run("sft_tiny.py", tmp_path))
    assert after < before - 1.0


def test_the_own_reward_function_scores_by_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import own_reward

    row = {"answer": "7"}
    assert own_reward.closeness(prompt="", completion="4 + 3 = 7", row=row) == 1.0
    assert own_reward.closeness(prompt="", completion="it is 9", row=row) == pytest.approx(1 / 3)
    assert own_reward.closeness(prompt="", completion="none", row=row) == 0.0
