"""The machine and the versions that a suite ran on: two runs are comparable where they are the same."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch

import lockstep
from lockstep.invariant.selftest import cpu_name
from lockstep.observe.memory import peak_rss_bytes
from lockstep.version import __version__


def machine(device: str) -> dict[str, str]:
    """Describe the machine: device, processors, versions, and the commit if lockstep runs from a clone."""
    name = f"cpu ({cpu_name()})" if device.startswith("cpu") else device_name(torch.device(device))
    facts = {"machine": name, "processors": str(os.cpu_count())}
    facts |= versions() | {"system": platform.system()}
    commit = git_commit(Path(lockstep.__file__).parent)
    return facts | ({"commit": commit} if commit else {})


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


# --- memory -----------------------------------------------------------------------------------------------


_CLEAR = Path("/proc/self/clear_refs")


class PeakMemory:
    """On CUDA the allocator's peak; on a CPU the process's largest resident size.

    On Linux a process can reset its own peak; elsewhere a CPU's peak is that since the process started.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._resets = not self._cuda and self._clear()
        self.overall = 0
        """Largest peak so far, bytes."""

    @property
    def kind(self) -> str:
        """The measured quantity, for reports."""
        if self._cuda:
            return "CUDA memory allocated, peak of each input"
        since = "of each input" if self._resets else "since the process started"
        return f"resident size of the process, peak {since}"

    def reset(self) -> None:
        """Start a new peak."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self._resets:
            self._clear()

    def peak(self) -> int:
        """Peak since `reset`, bytes."""
        peak = torch.cuda.max_memory_allocated(self._device) if self._cuda else peak_rss_bytes()
        self.overall = max(self.overall, peak)
        return peak

    @staticmethod
    def _clear() -> bool:
        try:
            _CLEAR.write_text("5", encoding="ascii")  # 5: the peak only
        except OSError:
            return False
        return True
