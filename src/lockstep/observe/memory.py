"""The memory of this process and of its CUDA device."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.errors import EngineError, TrainError

GIB = 1024**3
PHASES: Mapping[str, str] = {
    "weights": "generate",
    "sleep": "generate",
    "generate": "generate",
    "logprobs": "train",
    "values": "train",
    "value": "train",
    "forward_backward": "train",
    "optimizer": "update",
}
"""Outermost span of a step -> the phase of the memory plan that it belongs to."""


class MemoryMeter:
    """The peaks of each step, as a whole and by phase of the memory plan.

    Args:
        device: "cpu", "cuda" or "cuda:N".
    """

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._phase = ""
        """Empty: between the phases."""
        self._peaks: dict[str, float] = {}
        """GiB by phase, since the last call of `metrics`."""
        self._reserved = 0.0
        """GiB, likewise."""

    def enter(self, spans: Sequence[str]) -> None:
        """Tell which spans are open from here on, outermost first."""
        phase = PHASES.get(spans[0], "") if spans else ""
        if phase != self._phase:
            self._take()
            self._phase = phase

    def metrics(self) -> dict[str, float]:
        """Return memory/rss_peak_gib, since the process started; on CUDA also, of what was allocated since
        the last call, memory/cuda_peak_gib and memory/PHASE_peak_gib, and of what the allocator reserved
        memory/cuda_reserved_gib."""
        metrics = {"memory/rss_peak_gib": peak_rss_bytes() / GIB}
        if self._device.startswith("cuda"):
            self._take()
            metrics["memory/cuda_peak_gib"] = max(self._peaks.values())
            metrics |= {f"memory/{phase}_peak_gib": peak for phase, peak in self._peaks.items() if phase}
            metrics["memory/cuda_reserved_gib"] = self._reserved
            self._peaks.clear()
            self._reserved = 0.0
        return metrics

    def _take(self) -> None:
        """Add the peak since the last call to the phase that is on."""
        if not self._device.startswith("cuda"):
            return
        import torch

        peak = torch.cuda.max_memory_allocated(self._device) / GIB
        self._peaks[self._phase] = max(peak, self._peaks.get(self._phase, 0.0))
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved(self._device) / GIB)
        torch.cuda.reset_peak_memory_stats(self._device)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error is an out-of-memory error: a GPU's allocator has its own exception, the CPU's
    raises a plain RuntimeError."""
    import torch

    of_cpu = type(error) is RuntimeError and "DefaultCPUAllocator: can't allocate memory" in str(error)
    return of_cpu or isinstance(error, (torch.OutOfMemoryError, MemoryError))


def ran_out_on_gpu(error: BaseException) -> bool:
    """Return whether a GPU's memory ran out, for which a smaller memory plan may help: the error, or one that
    it was raised from, is that of torch's allocator, or an engine's or a role's error that came from another
    process and says so. A text of anybody else's that mentions memory is not enough."""
    import torch

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch.OutOfMemoryError):
            return True
        if isinstance(cause, EngineError | TrainError) and cause.__cause__ is None:
            remote = cause.fields.get("remote_data")
            codes = (cause.code, remote.get("code") if isinstance(remote, Mapping) else None)
            if "out-of-memory" in codes or _SAID.search(str(cause)):
                return True
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return False


_SAID = re.compile(r"CUDA out of memory\. Tried to allocate|ran out of memory with a KV cache of \d+ bytes")
"""The words of torch's allocator, and of our own engines."""


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
