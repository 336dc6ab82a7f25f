"""Memory of this process and of its CUDA device."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

GIB = 1024**3


def memory_metrics(device: str = "cpu") -> dict[str, float]:
    """Return memory/rss_peak_gib, since the process started; on CUDA also memory/cuda_peak_gib, allocated
    since the last call, and memory/cuda_reserved_gib.

    Args:
        device: "cpu", "cuda" or "cuda:N".
    """
    metrics = {"memory/rss_peak_gib": peak_rss_bytes() / GIB}
    if device.startswith("cuda"):
        import torch

        metrics["memory/cuda_peak_gib"] = torch.cuda.max_memory_allocated(device) / GIB
        metrics["memory/cuda_reserved_gib"] = torch.cuda.memory_reserved(device) / GIB
        torch.cuda.reset_peak_memory_stats(device)
    return metrics


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error is an out-of-memory error: a GPU's allocator has its own exception, the CPU's
    raises a plain RuntimeError."""
    import torch

    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def peak_rss_bytes() -> int:
    """Return the highest resident size of this process.

    Linux keeps ru_maxrss across exec, so a process that a larger one started would report the larger one's;
    VmHWM is the process's own.
    """
    status = Path("/proc/self/status")
    if status.exists():
        peak = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(peak.split()[1]) * 1024
    # macOS reports bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
