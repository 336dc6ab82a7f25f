"""Tensors that give their memory on the device back while nobody uses them.

The bytes go to host memory and the storages are resized to nothing, in place: whatever refers to the tensors
(Parameters, views of them, FSDP2's shards, an optimizer) finds the same values when they are back. Between
uses they must not be read. On a CPU there is nothing to gain: the copy takes what the tensors gave.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, UntypedStorage

from lockstep.protocols.train import RestPart

_BLOCK = 1 << 28
"""Bytes of pinned memory that are taken at once: torch rounds an allocation up to a power of two."""


class Rest:
    """Tensors at rest, but for the time in `awake`.

    Args:
        tensors: of any dtype, on one device; those that share memory count once, empty ones not at all.
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
        """What is given back."""
        # Pinned: from pageable memory the copy would go through
        # a staging buffer, at a fraction of the link's speed.
        pin = any(storage.device.type == "cuda" for storage, _ in self._storages)
        sizes = [_BLOCK] * (self.bytes // _BLOCK) + [self.bytes % _BLOCK]
        self._blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=pin) for size in sizes if size]
        self._users = 0
        self._lie_down()

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Have the tensors on their device, with their values; changes are kept. May be nested."""
        if self._users == 0:
            self._get_up()
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if self._users == 0:
                self._lie_down()

    def _lie_down(self) -> None:
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

    def _get_up(self) -> None:
        for storage, size in self._storages:
            # On this stream, as are the copies below: torch's allocator orders reuse of the memory by stream.
            if storage.nbytes() < size:
                storage.resize_(size)
        for on_host, on_device in self._pieces():
            on_device.copy_(on_host, non_blocking=True)

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Every byte once: the part of a block, and the part of a storage that it holds."""
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


class Rests(ABC):
    """Base of the backends that can rest: they say which tensors a part has, and wake the parts that a call
    uses."""

    device: torch.device
    _rests: dict[RestPart, Rest]

    def rest(self, *parts: RestPart) -> None:
        """See RestingBackend."""
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
        self._rests.update({part: Rest(tensors) for part, tensors in found.items()})

    @contextlib.contextmanager
    def _awake(self, *parts: RestPart) -> Iterator[None]:
        """Have the tensors of these parts on their device, whether they rest or not."""
        with contextlib.ExitStack() as stack:
            for part in parts:
                if part in self._rests:
                    stack.enter_context(self._rests[part].awake())
            yield

    @abstractmethod
    def _tensors_of(self, part: RestPart) -> Iterable[Tensor]:
        """The tensors of a part, some of which may be in host memory."""


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
