"""Peak memory of one piece of work, such as an input of a replay or a step."""

from __future__ import annotations

from pathlib import Path

import torch

from lockstep.observe.memory import peak_rss_bytes

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
