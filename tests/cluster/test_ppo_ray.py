"""examples/ppo_ray: the commands of its README, on a real Ray."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "ppo_ray"


@pytest.mark.exhaustive
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_four_roles_train_on_two_ranks_as_the_readme_says(tmp_path: Path) -> None:
    readme = (EXAMPLE / "README.md").read_text()
    commands = re.findall(r"```sh\n(.*?)```", readme, re.DOTALL)[0]
    (tmp_path / "lockstep").symlink_to(ROOT)
    folder = tmp_path / "work"
    folder.mkdir()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with tempfile.TemporaryDirectory(prefix="ls", dir="/tmp") as cache:  # Ray's sockets need a short name
        done = subprocess.run(
            ["bash", "-e", "-c", commands],
            cwd=folder,
            env={**os.environ, "PATH": path, "LOCKSTEP_CACHE": cache, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1]
    for name in ("reward/model", "kl_ref", "value/loss"):
        assert all(name in step for step in steps), sorted(steps[0])
    assert {file.name for file in folder.glob("run/logs/ranks/*/*")} >= {"rank-0.log", "rank-1.log"}
