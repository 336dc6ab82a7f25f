"""A run on several nodes of a real Ray cluster heals from their memory when a rank and when a node dies."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from loop_runs import TINY, everything

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: pip install 'lockstep-rl[cluster]'", allow_module_level=True)

SECONDS = 400
RUN = (
    TINY.replace('name = "ids"\n[train]', 'name = "rewards_of_nodes:EvenShare"\n[train]')
    .replace(
        "[train]", '[train]\nbackend = "fsdp2"\ndevice = "cpu"\nbatch_invariant = true\ndeterministic = true'
    )
    .replace("[checkpoint]\nevery = 2", "[checkpoint]\nevery = 0")
)
OF_HEALING = ("restarts", "restored_from", "recovery_seconds", "checkpoints_read", "copies_left_out")
NODES = ["--cluster", "auto", "--cluster.nodes", "2", "--cluster.peer-copy"]


@pytest.fixture
def cluster() -> Iterator[dict[str, str]]:
    """Three nodes: the environment that finds them."""
    script = Path(__file__).parent.parent / "cluster/ray_nodes.py"
    with tempfile.TemporaryDirectory(prefix="ls", dir="/tmp") as cache:  # Ray's sockets need short names
        folder, env = Path(cache) / "nodes", os.environ | {"LOCKSTEP_CACHE": cache, "OMP_NUM_THREADS": "1"}
        folder.mkdir()
        with (
            (folder / "out").open("wb") as output,
            subprocess.Popen(
                [sys.executable, str(script), str(folder), "spare"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
            ) as process,
        ):
            until = time.monotonic() + SECONDS
            while not (folder / "address").exists():
                assert process.poll() is None and time.monotonic() < until, (folder / "out").read_text()
                time.sleep(0.1)
            address = {"RAY_ADDRESS": (folder / "address").read_text()}
            with contextlib.ExitStack() as stack:
                assert process.stdin is not None
                stack.callback(process.wait, SECONDS)
                stack.callback(process.stdin.close)
                yield env | address | {"RAY_AUTH_TOKEN_PATH": str(folder / "token")}


def train(folder: Path, name: str, *flags: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lockstep", "train", "tiny.toml", "--run-dir", name, *flags],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


@pytest.mark.slow
def test_a_rank_and_then_a_node_die_and_leave_no_trace_while_a_node_is_free(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    (tmp_path / "tiny.toml").write_text(RUN)
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
    assert "go on with: lockstep train --resume stuck --cluster auto" in stuck.stderr
    assert not list(memory.iterdir()) and list((tmp_path / "stuck/checkpoints").iterdir())
