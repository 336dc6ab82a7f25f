"""Named tensors into buckets, through two buffers: one is filled while an engine reads the other.

tensors ─► waiting (references) ─► one copy per bucket ─► buffer 0 ─► engine
                                                          buffer 1 ◄─ next bucket, meanwhile
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.wire.buckets import Layout, TensorSpec, heads, pack

MIB = 1024**2


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """One full bucket. Its memory is reused for the bucket after the next."""

    index: int
    slot: int
    """Which of the two buffers holds it."""
    specs: tuple[TensorSpec, ...]
    buffer: Tensor
    """[N] uint8: the whole buffer."""
    num_bytes: int
    """Bytes of the bucket: the first ones of the buffer."""
    done: torch.cuda.Event | None
    """CUDA event recorded after the copies; None: they are done."""

    @property
    def data(self) -> Tensor:
        """[num_bytes] uint8"""
        return self.buffer[: self.num_bytes]

    def wait(self) -> None:
        """Wait until other processes see the bytes too: the only wait for the device per bucket."""
        if self.done is not None:
            self.done.synchronize()

    def heads(self) -> Tensor:
        """See wire.buckets.heads."""
        if not self.buffer.is_cuda:  # read now, and not after the copies as another kernel would
            self.wait()
        return heads(self.data, self.specs)


class Packer:
    """Fills buckets of at most `bucket_bytes`; a larger tensor gets a bucket of its own.

    Args:
        device: of the buffers. The host with a source on a GPU: pinned memory.
    """

    def __init__(self, *, bucket_bytes: int, device: torch.device) -> None:
        self.bucket_bytes, self.device = bucket_bytes, device
        self._buffers: list[Tensor | None] = [None, None]

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(0 if buffer is None else buffer.numel() for buffer in self._buffers)

    def free(self) -> None:
        """Free the buffers."""
        self._buffers = [None, None]

    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Packed]:
        """Pack all tensors in order. Copies are launched when a bucket is full, and not waited for."""
        layout, waiting, index = Layout(self.bucket_bytes), list[Tensor](), 0
        for name, tensor in tensors:
            if layout.place(name, tensor) is None:
                yield self._pack(index, layout, waiting)
                layout, waiting, index = Layout(self.bucket_bytes), [], index + 1
                layout.place(name, tensor)
            waiting.append(tensor)
        if waiting:
            yield self._pack(index, layout, waiting)

    def _pack(self, index: int, layout: Layout, waiting: list[Tensor]) -> Packed:
        slot = index % 2
        sources = {tensor.device for tensor in waiting if tensor.is_cuda}
        buffer = self._buffer(slot, layout.num_bytes, pinned=bool(sources))
        pack(buffer, layout.specs, waiting)
        done = None
        for device in sources:  # one, but for a model that is spread over GPUs: then the last one's is kept
            if done is not None:
                done.synchronize()
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(device))
        return Packed(
            index=index,
            slot=slot,
            specs=tuple(layout.specs),
            buffer=buffer,
            num_bytes=layout.num_bytes,
            done=done,
        )

    def _buffer(self, slot: int, num_bytes: int, *, pinned: bool) -> Tensor:
        """A buffer of the size that will be needed: a small model does not take a whole bucket, and the
        buffer of a larger one is not reallocated for every slightly fuller bucket."""
        buffer = self._buffers[slot]
        if buffer is None or buffer.numel() < num_bytes:
            size = num_bytes if num_bytes < self.bucket_bytes // 2 else max(num_bytes, self.bucket_bytes)
            self._buffers[slot] = buffer = None  # before the new one is made
            buffer = torch.empty(
                size,
                dtype=torch.uint8,
                device=self.device,
                pin_memory=pinned and self.device.type == "cpu",
            )
            self._buffers[slot] = buffer
        return buffer
