"""Processes of tests: ranks that find each other as under torchrun, and waiting for what a process does."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def run_ranks(
    worker: Path, *arguments: str, ranks: int, seconds: float, alone: bool = False
) -> list[list[dict[str, Any]]]:
    """Run `worker` once per rank, and return the JSON objects that each prints; every rank must end with 0.

    Args:
        alone: a single rank is told of no others, as a program that no launcher started.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(worker), *arguments]
    workers = []
    for rank in range(ranks):
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        if not alone:
            environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        workers.append(
            subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    try:
        outputs = [worker.communicate(timeout=seconds) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, (out, err) in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, f"{out[-2000:]}\n{err[-6000:]}"
    return [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out, _ in outputs]


def lockstep(
    *argv: str | Path, cwd: Path, seconds: float = 300.0, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run `lockstep ARGV` in `cwd` as a process of its own, on one thread.

    Args:
        environ: variables beside those of the tests.
    """
    return subprocess.run(
        [sys.executable, "-m", "lockstep", *map(str, argv)],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environ,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def succeeds(*argv: str | Path, cwd: Path, **more: Any) -> subprocess.CompletedProcess[str]:
    """`lockstep`, of which the exit status must be 0."""
    ended = lockstep(*argv, cwd=cwd, **more)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended


@contextlib.contextmanager
def ray_nodes(folder: Path, kind: str, *, env: dict[str, str], seconds: float) -> Iterator[str]:
    """A cluster that tests/cluster/ray_nodes.py runs: its address. `folder` is made, and holds its token."""
    folder.mkdir()
    script = Path(__file__).parents[1] / "cluster" / "ray_nodes.py"
    with (
        (folder / "out").open("wb") as output,
        subprocess.Popen(
            [sys.executable, str(script), str(folder), kind],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
        ) as process,
    ):
        until = time.monotonic() + seconds
        while not (folder / "address").exists():
            assert process.poll() is None and time.monotonic() < until, (folder / "out").read_text()
            time.sleep(0.1)
        with contextlib.ExitStack() as stack:
            assert process.stdin is not None
            stack.callback(process.wait, seconds)
            stack.callback(process.stdin.close)
            yield (folder / "address").read_text()


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie, which is somebody else's to reap, does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def until(condition: Callable[[], Any], *, seconds: float = 20.0) -> None:
    """Wait for the condition, which must hold within `seconds`."""
    assert wait_for(condition, seconds=seconds), "the condition did not become true in time"


def wait_for(condition: Callable[[], Any], *, seconds: float = 10.0) -> bool:
    """Whether the condition holds within `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False
