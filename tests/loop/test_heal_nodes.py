"""A run on several nodes of a real Ray cluster heals from their memory when a rank and when a node dies."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from loop_runs import OF_HEALING, everything, healed_toml
from starting import lockstep, ray_nodes

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: pip install 'lockstep-rl[cluster]'", allow_module_level=True)

SECONDS = 400
NODES = ["--cluster", "auto", "--cluster.nodes", "2", "--cluster.peer-copy"]


@pytest.fixture
def cluster() -> Iterator[dict[str, str]]:
    """Three nodes: the environment that finds them."""
    with tempfile.TemporaryDirectory(prefix="ls", dir="/tmp") as cache:  # Ray's sockets need short names
        folder, env = Path(cache) / "nodes", {"LOCKSTEP_CACHE": cache}
        single = os.environ | env | {"OMP_NUM_THREADS": "1"}
        with ray_nodes(folder, "spare", env=single, seconds=SECONDS) as address:
            yield env | {"RAY_ADDRESS": address, "RAY_AUTH_TOKEN_PATH": str(folder / "token")}


def train(folder: Path, name: str, *flags: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return lockstep("train", "tiny.toml", "--run-dir", name, *flags, cwd=folder, seconds=SECONDS, **env)


@pytest.mark.exhaustive
def test_a_rank_and_then_a_node_die_and_leave_no_trace_while_a_node_is_free(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    (tmp_path / "tiny.toml").write_text(healed_toml("rewards_of_nodes:EvenShare"))
    shutil.copy(Path(__file__).with_name("rewards_of_nodes.py"), tmp_path)
    memory = tmp_path / "memory"
    memory.mkdir()
    (tmp_path / "events.json").write_text("[]")
    alone = train(tmp_path, "alone", "--ranks", "2", "--cluster", "none", env=cluster)
    assert alone.returncode == 0, alone.stderr
    (tmp_path / "events.json").write_text(json.dumps([[1, 14, "rank"], [1, 12, "node"]]))
    ended = train(tmp_path, "died", *NODES, "--cluster.copy-dir", str(memory), env=cluster)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (tmp_path / "done-1").exists() and not list(memory.iterdir())
    assert "rank 1 of 2 was killed by SIGKILL" in ended.stderr
    healed, expected = everything(tmp_path / "died"), everything(tmp_path / "alone")
    found = {field: healed["summary"].pop(field) for field in OF_HEALING}
    assert healed == expected
    assert (found["restarts"], found["restored_from"], found["checkpoints_read"]) == (2, "memory", 0)

    # Two nodes are left. One more dies, and none can take its place.
    for done in tmp_path.glob("done-*"):
        done.unlink()
    (tmp_path / "events.json").write_text(json.dumps([[0, 24, "node"]]))
    flags = ("--cluster.copy-dir", str(memory), "--cluster.node-seconds", "5", "--checkpoint.every", "2")
    stuck = train(tmp_path, "stuck", *NODES, *flags, env=cluster)
    assert stuck.returncode not in (0, 124), stuck.stdout + stuck.stderr
    assert "cluster.node_seconds = 5" in stuck.stderr and "Traceback" not in stuck.stderr
    # The whole path: healing knows the run directory by it, and the command then works in any folder.
    assert f"resume with: lockstep train --resume {tmp_path / 'stuck'} --cluster auto" in stuck.stderr
    assert not list(memory.iterdir()) and list((tmp_path / "stuck/checkpoints").iterdir())
