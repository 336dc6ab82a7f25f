"""A run directory that is used again: finished, extended, damaged, full, or not a run at all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from loop_runs import Commands, everything, metrics_of


@pytest.fixture(scope="module")
def finished(lockstep: Commands, tiny_toml: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    lockstep("train", tiny_toml, "--run-dir", folder / "run", cwd=folder)
    return folder / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, to be spoilt."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_finished_run_has_nothing_to_resume(lockstep, run):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    ended = lockstep("train", "--resume", run, cwd=run)
    assert ended.err == ""
    note, verdict = ended.out.splitlines()
    assert note.startswith("nothing to do: all 4 steps are done") and "--steps" in note
    assert verdict.startswith("train: finished, 4 steps")
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()} == before


def test_more_steps_extend_a_run_as_if_they_had_been_asked_for_at_once(lockstep, straight, run):
    killed = {"target": "lockstep.engine.hf.engine:Generation._step", "call": 2, "step": 5}
    lockstep(
        "train", "--resume", run, "--steps", "6", cwd=run, signals=[killed | {"send": "SIGKILL"}], code=-9
    )
    lockstep("train", "--resume", run, cwd=run)  # the run knows by now that it is to have 6 steps
    assert everything(run) == straight("--steps", "6")


def test_fewer_steps_than_are_done_are_refused(lockstep, run):
    ended = lockstep("train", "--resume", run, "--steps", "3", cwd=run, code=2)
    assert "steps = 3, but 4 steps are already done" in ended.err
    assert "--checkpoint STEP (available: [2])" in ended.err  # from the one at 4 on, 3 is as impossible
    assert metrics_of(run)[-1]["evaluation"] == "after"


def test_more_steps_under_a_decay_are_refused(lockstep, run):
    config = run / "config.toml"
    config.write_text(config.read_text().replace('schedule = "constant"', 'schedule = "linear"'))
    ended = lockstep("train", "--resume", run, "--steps", "6", cwd=run, code=2)
    assert "steps: 4 in the run, now 6 (only train.schedule = 'constant' lets it change)" in ended.err


def test_a_damaged_checkpoint_is_named_with_the_flag_that_goes_back(lockstep, straight, run):
    (run / "summary.json").unlink()
    flip(run / "checkpoints" / "step-000004" / "optimizer.safetensors")
    ended = lockstep("train", "--resume", run, cwd=run, code=2)
    assert "step-000004 is damaged" in ended.err and "add --checkpoint 2" in ended.err
    assert len(metrics_of(run)) == 7, "a resume that failed has rewound the run"
    lockstep("train", "--resume", run, "--checkpoint", "2", cwd=run)
    assert everything(run) == straight()


def test_a_config_that_was_edited_to_nonsense_is_named(lockstep, run):
    config = run / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.001", 'lr = "fast"'))
    ended = lockstep("train", "--resume", run, cwd=run, code=2)
    assert "train.lr = 'fast': expected a number" in ended.err


def test_the_folder_of_a_start_that_failed_can_be_used_again(lockstep, tiny_toml, tmp_path):
    """The reward fails on its first completion, after the folder was made; corrected, the same line works."""
    argv = ("train", tiny_toml, "--run-dir", tmp_path / "run", "--rewards", "mine:reward", "--steps", "1")
    for body, code in (("return None", 1), ("return 1.0", 0)):
        (tmp_path / "mine.py").write_text(f"def reward(prompt, completion, row):\n    {body}\n")
        lockstep(*argv, cwd=tmp_path, code=code)


def test_a_write_that_fails_in_a_save_leaves_the_earlier_checkpoints(lockstep, straight, tiny_toml, tmp_path):
    run = tmp_path / "run"
    lockstep("train", tiny_toml, "--run-dir", run, "--steps", "2", cwd=tmp_path)
    ended = lockstep("train", "--resume", run, "--steps", "4", cwd=tmp_path, file_bytes=100_000, code=1)
    assert "the checkpoint needs" in ended.err and "earlier checkpoints are unchanged" in ended.err
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-000002"]
    assert json.loads((run / "summary.json").read_text())["outcome"] == "failed"
    lockstep("train", "--resume", run, cwd=tmp_path)
    assert everything(run) == straight()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """3 MB: one checkpoint of the tiny model and a half."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_told_with_its_numbers(small_disk, lockstep, tiny_toml):
    ended = lockstep("train", tiny_toml, "--run-dir", small_disk / "run", cwd=small_disk, code=1)
    assert "the checkpoint needs" in ended.err and "bytes free" in ended.err
    assert [p.name for p in (small_disk / "run" / "checkpoints").iterdir()] == ["step-000002"]
