"""Copies in host memory of the state that a save in the background writes.

State in host memory does not change before the next optimizer step, so a thread copies it while the loop
goes on, and the update waits for what is not copied yet. State on a GPU is copied before `save` returns, into
pinned memory that is kept from save to save: a thread that calls CUDA would disturb the capture of CUDA
graphs.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.errors import CheckpointError, TrainError

COPY_SECONDS = 600.0
"""An update waits no longer than this for a copy in memory."""
# Few large blocks: each piece of pinned memory is registered with the driver, which is slow.
_BLOCK = 1 << 28
"""Bytes of pinned memory that are taken at once."""


class PendingCopy:
    """Tensors of which a thread makes copies; `wait` before one of them changes."""

    def __init__(self, live: Sequence[Tensor]) -> None:
        self._copies: list[Tensor] = []
        self._error: Exception | None = None
        self._live = list(live)
        # A daemon, so that a copy that hangs in swapping cannot keep a process alive that has given up on it.
        self._thread = threading.Thread(target=self._run, name="copy-state", daemon=True)
        self._thread.start()

    def wait(self, seconds: float = COPY_SECONDS) -> None:
        """Wait until nothing is read any more. Raises TrainError: it took longer than `seconds`."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise TrainError(
                f"deadline: the copy of the train state for a checkpoint took more than {seconds:.0f} s; is "
                "the machine out of memory and swapping? checkpoint.background = false makes none",
                setting="checkpoint.background",
            )

    def take(self) -> list[Tensor]:
        """Wait, and return the copies, once. Raises CheckpointError: they could not be made."""
        self.wait()
        if self._error is not None:
            raise CheckpointError(
                f"out-of-memory: the train state could not be copied into host memory: {self._error}; set "
                "checkpoint.background = false, which makes no copy",
                setting="checkpoint.background",
                reason=self._error,
            ) from self._error
        copies, self._copies = self._copies, []
        return copies

    def _run(self) -> None:
        try:
            for tensor in self._live:
                self._copies.append(tensor.clone())
        except (RuntimeError, MemoryError) as error:  # for `take`: torch's and Python's lack of memory
            self._error, self._copies = error, []
        # This object stays until the next save; it must not keep replaced tensors alive until then.
        self._live = []


class CopySpace:
    """Where a backend's saves copy to; one per backend.

    Args:
        pin: None: whether there is a GPU.
    """

    def __init__(self, *, pin: bool | None = None) -> None:
        self._pin = torch.cuda.is_available() if pin is None else pin
        self._blocks: list[Tensor] = []
        self._block, self._used = 0, 0
        self._device: torch.device | None = None
        """Where copies are under way."""
        self._pending: PendingCopy | None = None

    def begin(self) -> None:
        """The copies of the save before this one are not needed any more."""
        self.wait()
        self._pending = None
        self._block, self._used = 0, 0

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor on a GPU, valid until `begin`; it is there after `synchronize`."""
        size = tensor.numel() * tensor.element_size()
        while self._block < len(self._blocks) and self._used + size > self._blocks[self._block].numel():
            self._block, self._used = self._block + 1, 0
        if self._block == len(self._blocks):
            self._blocks.append(torch.empty(max(_BLOCK, size), dtype=torch.uint8, pin_memory=self._pin))
        self._device = tensor.device
        place = self._blocks[self._block][self._used : self._used + size]
        # A multiple of every dtype's size, as `view` below needs for the next tensor, and a cache line.
        self._used += math.ceil(size / 64) * 64
        copy = place.view(tensor.dtype).view(tensor.shape)
        return copy.copy_(tensor.detach(), non_blocking=True)

    def synchronize(self) -> None:
        """Wait until every `copy` is there."""
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._device = None

    def copy_beside(self, live: Sequence[Tensor]) -> PendingCopy:
        """Begin to copy tensors in host memory, in a thread."""
        self._pending = PendingCopy(live)
        return self._pending

    def wait(self) -> None:
        """Call before live state changes."""
        if self._pending is not None:
            self._pending.wait()
