"""Two ranks on nodes without a common file system train as on one machine, to the bit."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from loop_runs import TINY, everything
from raising import raises
from safetensors.torch import load_file

from lockstep.errors import ConfigError
from lockstep.observe.run_dir import FollowedRunDir, RunDir
from lockstep.ranks.launch import launch_command

WORKER = Path(__file__).with_name("node_worker.py")


def on_nodes(folder: Path, *argv: str) -> int:
    """The status of a command whose two ranks have different working directories: node-0, node-1."""
    for rank in range(2):
        (folder / f"node-{rank}").mkdir(exist_ok=True)
    command = [sys.executable, str(WORKER), str(folder), *argv]
    return launch_command(command, ranks=2, timeout=300, log_dir=folder / "logs", graceful=True)


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(TINY.replace("[train]", '[record]\nenabled = true\n[train]\nbackend = "fsdp2"'))
    return file


@pytest.mark.slow
def test_a_run_is_saved_resumed_and_collected(
    tmp_path: Path, toml: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    start = ("train", str(toml), "--run-dir", "run")
    assert on_nodes(tmp_path, *start, "--steps", "2") == 0
    assert "no common file system: ranks 1 do not see this folder" in capfd.readouterr().out
    first, second = tmp_path / "node-0/run", tmp_path / "node-1/run"
    second.rename(tmp_path / "kept")  # a node that is new to the run
    second.mkdir()
    shutil.copy(first / "config.toml", second)
    assert on_nodes(tmp_path, "train", "--resume", "run", "--steps", "4") == 2
    assert "recordings/rank-0001 does not exist" in capfd.readouterr().err
    shutil.rmtree(second)
    (tmp_path / "kept").rename(second)
    assert on_nodes(tmp_path, "train", "--resume", "run", "--steps", "4") == 0
    alone = tmp_path / "alone"
    alone.mkdir()
    command = [sys.executable, "-m", "lockstep", *start[:3], str(alone / "run"), "--steps", "2"]
    assert launch_command(command, ranks=2, timeout=300, log_dir=alone / "logs") == 0
    command = [sys.executable, "-m", "lockstep", "train", "--resume", str(alone / "run"), "--steps", "4"]
    assert launch_command(command, ranks=2, timeout=300, log_dir=alone / "logs") == 0
    assert everything(first) == everything(alone / "run")
    shard = "recordings/rank-0001/shard-000000.safetensors"
    collected, expected = load_file(first / shard), load_file(alone / "run" / shard)
    assert (first / shard).read_bytes() == (second / shard).read_bytes()
    assert collected.keys() == expected.keys() and all(collected[n].equal(expected[n]) for n in expected)
    assert (first / "logs/rank-1.log").read_text() in (second / "logs/rank-1.log").read_text()
    assert not (second / "checkpoints").exists() and not (second / "metrics.jsonl").exists()


def test_a_node_whose_folder_holds_another_run_is_refused(
    tmp_path: Path, toml: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "node-1/run"
    other.mkdir(parents=True)
    (other / "metrics.jsonl").write_text('{"step": 0}\n')
    assert on_nodes(tmp_path, "train", str(toml), "--run-dir", "run") == 2
    assert "'run' already contains a run" in capfd.readouterr().err
    assert (other / "metrics.jsonl").read_text() == '{"step": 0}\n' and len(list(other.iterdir())) == 1


def test_a_nodes_share_is_no_run_and_a_run_is_no_nodes_share(tmp_path: Path) -> None:
    share, run = tmp_path / "share", tmp_path / "run"
    files = {"config.toml": "steps = 1\n", "manifest.json": "{}"}
    FollowedRunDir.of_node(share, files).close()
    (share / "checkpoints/step-000002").mkdir(parents=True)  # sent there by a start that was killed
    FollowedRunDir.of_node(share, files).close()
    assert not (share / "checkpoints").exists()
    with raises(ConfigError, "wrong-kind-of-file"):
        RunDir.open(share)
    RunDir.create(run, config_toml="steps = 1\n", manifest={}).close()
    (run / "metrics.jsonl").write_text('{"step": 0}\n')
    (run / "checkpoints/step-000001").mkdir()
    with raises(ConfigError, "already-exists"):
        FollowedRunDir.of_node(run, files)
    assert (run / "checkpoints/step-000001").is_dir() and (run / "lock").read_text() == ""
    RunDir.create(share, config_toml="", manifest={}).close()
    RunDir.open(share).close()
