"""Offload tensors to host memory while they are idle.

The bytes are copied to host memory and the storages are resized to zero, in place: everything that refers to
the tensors (Parameters, views of them, FSDP2's shards, an optimizer) finds the same values after they are
restored. Between uses they must not be read. On a CPU this saves nothing: the copy takes the memory that it
frees.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, UntypedStorage

from lockstep.protocols.train import OffloadPart

_BLOCK = 1 << 28
"""Bytes of one allocation of pinned memory: torch rounds allocations up to a power of two."""


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
