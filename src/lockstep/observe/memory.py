"""Memory of this process and of its CUDA device."""

from __future__ import annotations

import resource
import sys

GIB = 1024**3


def memory_metrics(device: str = "cpu", *, reset: bool = True) -> dict[str, float]:
    """memory/rss_peak_gib, since the process started; on CUDA also memory/cuda_peak_gib, allocated since the
    last call with `reset`, and memory/cuda_reserved_gib.

    Args:
        device: "cpu", "cuda" or "cuda:N".
    """
    # Linux reports kibibytes, macOS bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    metrics = {"memory/rss_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB}
    if device.startswith("cuda"):
        import torch

        metrics["memory/cuda_peak_gib"] = torch.cuda.max_memory_allocated(device) / GIB
        metrics["memory/cuda_reserved_gib"] = torch.cuda.memory_reserved(device) / GIB
        if reset:
            torch.cuda.reset_peak_memory_stats(device)
    return metrics
