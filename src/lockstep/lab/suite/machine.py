"""The machine and the versions that a suite ran on: two runs are comparable where they are the same."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch

import lockstep
from lockstep.version import __version__


def machine(device: str) -> dict[str, str]:
    """Describe the machine: device, processors, versions, and the commit if lockstep runs from a clone."""
    name = cpu_name() if device.startswith("cpu") else device_name(torch.device(device))
    facts = {"machine": name, "processors": str(os.cpu_count())}
    facts |= versions() | {"system": platform.system()}
    commit = git_commit(Path(lockstep.__file__).parent)
    return facts | ({"commit": commit} if commit else {})


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
        process = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"],
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() or None if process.returncode == 0 else None


def device_name(device: torch.device) -> str:
    """The device's name, such as "NVIDIA H200" or "cpu (x86_64)"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.machine()})"


def versions() -> dict[str, str]:
    """The versions that decide what is computed: lockstep, torch, transformers and Python."""
    import transformers

    return {
        "lockstep": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
