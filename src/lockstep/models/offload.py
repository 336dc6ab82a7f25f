"""Training state in host memory: tensors that are offloaded while they are idle, and copies for checkpoints.

To offload is to copy the bytes to host memory and to resize the storages to zero, in place: everything that
refers to the tensors (Parameters, views of them, FSDP2's shards, an optimizer) finds the same values after
they are restored. Between uses they must not be read. On a CPU this saves nothing: the copy takes the memory
that it frees.
"""

from __future__ import annotations

import contextlib
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, UntypedStorage

from lockstep.errors import CheckpointError, TrainError
from lockstep.protocols.train import OffloadPart

_BLOCK = 1 << 28
"""Bytes of one allocation of pinned memory. Each is registered with the driver, which is slow, and torch
rounds it up to a power of two."""


class OffloadedTensors:
    """Tensors in host memory that return to their device inside `on_device`.

    Args:
        tensors: of any dtype, on one device. Tensors that share memory are moved once; empty ones are
        skipped.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages: dict[int, UntypedStorage] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                # By address: tied weights and views are several
                # tensors over one storage, whose bytes must move once.
                storages[storage.data_ptr()] = storage
        self._storages = [(storage, storage.nbytes()) for storage in storages.values()]
        self.bytes = sum(size for _, size in self._storages)
        """Device memory that is freed."""
        # Pinned: from pageable memory the copy would go through
        # a staging buffer, at a fraction of the link's speed.
        pin = any(storage.device.type == "cuda" for storage, _ in self._storages)
        sizes = [_BLOCK] * (self.bytes // _BLOCK) + [self.bytes % _BLOCK]
        self._blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=pin) for size in sizes if size]
        self._users = 0
        self._to_host()

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Bring the tensors back to the device for the duration of the block. Reentrant; in-place updates are
        kept."""
        if self._users == 0:
            self._to_device()
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if self._users == 0:
                self._to_host()

    def _to_host(self) -> None:
        # FSDP2 reads shards on streams of its own. Copies and the next use of the memory are on this one.
        if self._storages and self._storages[0][0].device.type == "cuda":
            torch.cuda.synchronize(self._storages[0][0].device)
        for on_host, on_device in self._pieces():
            on_host.copy_(on_device, non_blocking=True)
        for storage, _ in self._storages:
            if storage.resizable():  # not on a CPU where a numpy array has had a view of it, as in a save
                # The only way to free memory that views, Parameters and other libraries refer to: they keep
                # the storage, and find it filled again.
                storage.resize_(0)

    def _to_device(self) -> None:
        for storage, size in self._storages:
            # On this stream, as are the copies below: torch's allocator orders reuse of the memory by stream.
            if storage.nbytes() < size:
                storage.resize_(size)
        for on_host, on_device in self._pieces():
            on_device.copy_(on_host, non_blocking=True)

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each piece of host memory with the piece of a storage that it holds, every byte once."""
        block, used = 0, 0
        for storage, size in self._storages:
            # A view of bytes over the same storage, so that one copy serves tensors of any dtype and shape.
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            done = 0
            while done < size:
                if used == len(self._blocks[block]):
                    block, used = block + 1, 0
                count = min(size - done, len(self._blocks[block]) - used)
                yield self._blocks[block][used : used + count], whole[done : done + count]
                done, used = done + count, used + count


class Offloadable(ABC):
    """Base of backends that can offload their state. A subclass lists the tensors of each part, and wraps
    each call in `_on_device` with the parts that it uses."""

    device: torch.device
    _offloaded: dict[OffloadPart, OffloadedTensors]

    def offload(self, *parts: OffloadPart) -> None:
        """See OffloadableBackend."""
        weights = {_address(tensor) for tensor in self._tensors_of("weights")}
        found = {
            part: [
                tensor
                for tensor in self._tensors_of(part)
                if tensor.device.type == self.device.type
                # A float32 Parameter is its own master.
                and (part == "weights" or _address(tensor) not in weights)
            ]
            for part in parts
        }
        self._offloaded.update({part: OffloadedTensors(tensors) for part, tensors in found.items()})

    @contextlib.contextmanager
    def _on_device(self, *parts: OffloadPart) -> Iterator[None]:
        """Keep the tensors of these parts on the device for the duration of the block."""
        with contextlib.ExitStack() as stack:
            for part in parts:
                if part in self._offloaded:
                    stack.enter_context(self._offloaded[part].on_device())
            yield

    @abstractmethod
    def _tensors_of(self, part: OffloadPart) -> Iterable[Tensor]:
        """Return the tensors of a part; some may be in host memory."""


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# Copies in host memory of the state that a save in the background writes.
#
# State in host memory does not change before the next optimizer step, so a thread copies it while the loop
# goes on, and the update waits for what is not copied yet. State on a GPU is copied before `save` returns,
# into pinned memory that is kept from save to save: a thread that calls CUDA would disturb the capture of
# CUDA graphs.


COPY_SECONDS = 600.0
"""An update waits no longer than this for a copy in memory."""


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
                "the machine out of memory and swapping? checkpoint.background = false saves without a copy"
            )

    def take(self) -> list[Tensor]:
        """Wait, and return the copies, once. Raises CheckpointError: they could not be made."""
        self.wait()
        if self._error is not None:
            raise CheckpointError(
                f"out-of-memory: the train state could not be copied to host memory: {self._error}; set "
                "checkpoint.background = false, which saves without a copy"
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
    """The memory that a backend's saves copy to; one per backend.

    Args:
        pin: None: whether there is a GPU.
    """

    def __init__(self, *, pin: bool | None = None) -> None:
        self._pin = torch.cuda.is_available() if pin is None else pin
        self._blocks: list[Tensor] = []
        self._block, self._used = 0, 0
        self._device: torch.device | None = None
        """The device from which copies are under way."""
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
