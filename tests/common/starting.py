"""Processes of tests: ranks that find each other as under torchrun, and waiting for what a process does."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
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


def wait_for(condition: Callable[[], Any], *, seconds: float = 10.0) -> bool:
    """Whether the condition holds within `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False
