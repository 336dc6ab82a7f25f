"""What a matrix ran on: what makes two of them comparable, or not."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch

import lockstep
from lockstep.lab.replay.summary import device_name, versions


def machine(device: str) -> dict[str, str]:
    """Device, processors, versions, and the commit where lockstep runs from a clone."""
    found = {"machine": device_name(torch.device(device)), "processors": str(os.cpu_count())}
    if device.startswith("cpu"):
        found["machine"] = cpu_name()
    found |= versions() | {"system": platform.system()}
    commit = git_commit(Path(lockstep.__file__).parent)
    return found | ({"commit": commit} if commit else {})


def cpu_name() -> str:
    """The processor's name; where it is not known, its architecture."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return f"cpu ({line.partition(':')[2].strip()})"
    return f"cpu ({platform.machine()})"


def git_commit(folder: Path) -> str | None:
    """The commit of the clone that `folder` is in, short; None outside a clone, or without git."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"],
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
