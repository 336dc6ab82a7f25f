"""Transports of a packed bucket to an engine, one class each."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor

from lockstep.common_errors import cannot_write
from lockstep.errors import EngineError
from lockstep.observe.lock import SHARED_MEMORY, OwnedFolder
from lockstep.observe.tensor_file import save_tensors
from lockstep.protocols.engine import ReceivesWeights
from lockstep.schema.weights import Transport, UpdateSession, WeightBucket
from lockstep.wire.buckets import Layout, TensorSpec, heads, pack, unpack
from lockstep.wire.receive import Group, GroupError, Rendezvous, connect_group, export_handle, host_store

_GRACE_SECONDS = 2.0
"""Seconds for the trainer's side of a collective to end, once the engine's side has failed."""


class BucketSender(Protocol):
    """Carries one bucket at a time."""

    transport: Transport
    packs_on_host: bool
    """Whether buckets are packed in host memory, whatever the device of the weights."""

    def send(self, target: ReceivesWeights, packed: Packed, session: UpdateSession) -> None:
        """Send a bucket; returns when its memory may be reused. Raises EngineError."""
        ...

    def reset(self) -> None:
        """Create shared resources again: the engine is, or may be, another process now."""
        ...

    def close(self) -> None: ...


class MemorySender:
    """The engine is in this process and reads the buffer itself."""

    transport: Transport = "memory"
    packs_on_host = False

    def send(self, target: ReceivesWeights, packed: Packed, session: UpdateSession) -> None:
        packed.wait()
        target.receive(
            WeightBucket(
                index=packed.index,
                specs=packed.specs,
                num_bytes=packed.num_bytes,
                transport="memory",
                data=packed.data,
            )
        )

    def reset(self) -> None:
        """Nothing is shared beyond a call."""

    def close(self) -> None:
        """Nothing to close."""


class IpcSender:
    """The engine is another process on the same GPU: it opens each of the two buffers once."""

    transport: Transport = "ipc"
    packs_on_host = False

    def __init__(self) -> None:
        self._id = uuid.uuid4().hex[:12]
        self._versions = itertools.count()
        self._exported: dict[int, tuple[torch.Tensor, dict[str, Any]]] = {}

    def send(self, target: ReceivesWeights, packed: Packed, session: UpdateSession) -> None:
        known = self._exported.get(packed.slot)
        if known is None or known[0] is not packed.buffer:
            handle = {
                "key": f"{self._id}/{packed.slot}/{next(self._versions)}",
                "memory": export_handle(packed.buffer),
            }
            self._exported[packed.slot] = known = (packed.buffer, handle)
        packed.wait()
        target.receive(
            WeightBucket(
                index=packed.index,
                specs=packed.specs,
                num_bytes=packed.num_bytes,
                transport="ipc",
                handle=known[1],
            )
        )

    def reset(self) -> None:
        """Export anew: a handle is good for one opening by each worker."""
        self._exported.clear()

    def close(self) -> None:
        self._exported.clear()


class DiskSender:
    """Through files of safetensors, in shared memory where they fit; each is removed when it is read.

    Args:
        work_dir: folder for files that do not fit.
    """

    transport: Transport = "disk"
    packs_on_host = True

    def __init__(self, work_dir: Path) -> None:
        self._work_dir = work_dir
        self._folders: dict[Path, OwnedFolder] = {}

    def send(self, target: ReceivesWeights, packed: Packed, session: UpdateSession) -> None:
        packed.wait()
        with self._file(packed) as path:
            target.receive(
                WeightBucket(
                    index=packed.index,
                    specs=packed.specs,
                    num_bytes=packed.num_bytes,
                    transport="disk",
                    handle={"path": str(path)},
                )
            )

    @contextlib.contextmanager
    def _file(self, packed: Packed) -> Iterator[Path]:
        path = self._folder(packed.num_bytes) / f"bucket-{packed.index}.safetensors"
        try:
            try:
                save_tensors(dict(unpack(packed.data, packed.specs)), path)
            except OSError as error:
                fix = f"free {packed.num_bytes} bytes there, lower engine.bucket_mb, or set another run_dir"
                raise cannot_write(EngineError, path, error, fix) from error
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _folder(self, num_bytes: int) -> Path:
        parent = SHARED_MEMORY
        # As much again stays free: others use shared memory too, and running out of it is a bus error.
        if not parent.is_dir() or shutil.disk_usage(parent).free < 2 * num_bytes:
            parent = self._work_dir
        if parent not in self._folders:
            parent.mkdir(parents=True, exist_ok=True)
            self._folders[parent] = OwnedFolder("weights", parent)
        return self._folders[parent].path

    def reset(self) -> None:
        self.close()

    def close(self) -> None:
        for folder in self._folders.values():
            folder.close()
        self._folders.clear()


class CollectiveSender:
    """A broadcast to every worker of the engine, beside the engine's own call: the trainer's half waits in a
    thread, so that an engine that fails does not leave the trainer in a collective.

    Args:
        backend: "nccl" or "gloo".
        address: address of this machine for the engine's workers.
    """

    transport: Transport = "collective"
    packs_on_host = False

    def __init__(self, *, backend: str, address: str = "127.0.0.1") -> None:
        self.backend, self.address = backend, address
        self._store: Any = None
        self._group: Group | None = None
        self._name, self._world_size, self._target = "", 0, 0

    def send(self, target: ReceivesWeights, packed: Packed, session: UpdateSession) -> None:
        self._name_group(target)
        packed.wait()
        bucket = WeightBucket(
            index=packed.index,
            specs=packed.specs,
            num_bytes=packed.num_bytes,
            transport="collective",
            handle={
                "group": self._name,
                "address": self.address,
                "port": self._store.port,
                "world_size": self._world_size,
                "first_rank": 1,
                "backend": self.backend,
                "number": 0 if self._group is None else self._group.count,
            },
        )
        # Both halves must run at once: the engine's call returns when its workers have the bucket, for which
        # the broadcast must have been entered here.
        half = _Broadcast(self, packed, session)
        half.start()
        failed: EngineError | None = None
        try:
            target.receive(bucket)
        except EngineError as error:
            failed = error
            half.cancel.set()
        # Ctrl-C as well: the thread would go on waiting for workers.
        except BaseException:
            half.cancel.set()
            raise
        left = _GRACE_SECONDS if failed else max(session.deadline - time.monotonic(), 0.0) + _GRACE_SECONDS
        half.join(left)
        if failed is None and half.error is None and not half.is_alive():
            return
        raise self._blame(packed.index, failed, half) from (failed or half.error)

    def broadcast(self, packed: Packed, session: UpdateSession, cancel: threading.Event) -> None:
        """Broadcast the trainer's half. Raises GroupError."""
        if self._group is None:
            rendezvous = Rendezvous(
                name=self._name,
                address=self.address,
                port=self._store.port,
                world_size=self._world_size,
                backend=self.backend,
            )
            left = session.deadline - time.monotonic()
            self._group = connect_group(rendezvous, rank=0, seconds=left, store=self._store)
        self._group.broadcast(packed.data, deadline=session.deadline, cancel=cancel)

    def _name_group(self, target: ReceivesWeights) -> None:
        """Name the group: it belongs to one start of one engine."""
        if self._target != id(target):
            self.reset()
            self._target = id(target)
        if not self._name:
            if self._store is None:
                self._store = host_store(self.address)
            self._name = f"lockstep-{uuid.uuid4().hex[:12]}"
            self._world_size = 1 + target.receivers

    def _blame(self, index: int, failed: EngineError | None, half: _Broadcast) -> EngineError:
        """Say which side is missing, with the errors of both."""
        workers = self._world_size - 1
        where = f"bucket {index} did not reach the engine's {workers} worker{'s' if workers > 1 else ''}"
        trainer = half.error or "it is still waiting for the workers"
        if failed is not None:
            return EngineError(
                f"transfer-failed: {where}: the engine's side failed: {failed}; the trainer's side: {trainer}"
            )
        return EngineError(
            f"deadline: {where} in time: the engine's call returned, but the trainer's side did not finish: "
            f"{trainer}; raise engine.update_seconds, or set engine.transfer = 'disk'"
        )

    def reset(self) -> None:
        """Drop the group: it is useless once it has lost a rank."""
        if self._group is not None:
            self._group.abort()
        self._group, self._name, self._target = None, "", 0

    def close(self) -> None:
        self.reset()
        self._store = None


class _Broadcast(threading.Thread):
    def __init__(self, sender: CollectiveSender, packed: Packed, session: UpdateSession) -> None:
        super().__init__(name="weights broadcast", daemon=True)
        self._sender, self._packed, self._session = sender, packed, session
        self.cancel = threading.Event()
        self.error: GroupError | None = None

    def run(self) -> None:
        if self._packed.buffer.is_cuda:
            torch.cuda.set_device(self._packed.buffer.device)  # per thread
        try:
            self._sender.broadcast(self._packed, self._session, self.cancel)
        except GroupError as error:
            self.error = error


def own_address(url: str | None) -> str:
    """Address of this machine for the machine of `url`; None: the engine is on this machine."""
    host = urlsplit(url).hostname if url else None
    if host in (None, "localhost", "127.0.0.1", "::1"):
        return "127.0.0.1"
    assert host is not None
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing: only the route is looked up
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EngineError(f"unreachable: engine.url = {url!r}: {host} cannot be reached: {error}") from error


# Named tensors into buckets, through two buffers: one is filled while an engine reads the other.
#
# tensors ─► waiting (references) ─► one copy per bucket ─► buffer 0 ─► engine
#                                                           buffer 1 ◄─ next bucket, meanwhile


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
