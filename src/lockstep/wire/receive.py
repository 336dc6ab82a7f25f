"""An engine's end: from the description of a bucket, plain JSON, to its tensors.

receiver = Receiver(device, rank=tp_rank)
model.load_weights(receiver.tensors(bucket, deadline=...))   # bucket: WeightBucket.as_json()
"""

from __future__ import annotations

import atexit
import base64
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from lockstep.wire.buckets import TensorSpec, WireError, dtype_name, named_dtype, specs_from_json, unpack

# A separate process group, independent of the default process groups of its members.
#
# Rank 0 is the trainer and hosts the store.


# A broadcast of a bucket takes milliseconds: a longer pause would be a good part of it.
_POLL_SECONDS = 0.0003
_STORE_SECONDS = 10.0
_ABORT_SECONDS = 10.0
"""How long the end of this process waits for aborts of nccl."""
_NCCL_WATCHDOG = timedelta(days=1)
"""torch ends the process whose nccl collective takes longer; ours are aborted at an earlier deadline."""


class GroupError(WireError):
    """A rank did not arrive, or the group cannot be created."""


def host_store(address: str = "127.0.0.1", *, seconds: float = _STORE_SECONDS) -> TCPStore:
    """Host a store that listens on `address` alone, on a free port (`store.port`)."""
    # Bound by us: a TCPStore that makes its own socket listens on every address of the machine.
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.bind((address, 0))
    listener.listen(64)
    return TCPStore(
        address,
        listener.getsockname()[1],
        None,
        True,
        timedelta(seconds=seconds),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=True,
    )


_aborts: list[threading.Thread] = []


@atexit.register
def _await_aborts() -> None:
    until = time.monotonic() + _ABORT_SECONDS
    for thread in _aborts:
        thread.join(max(0.0, until - time.monotonic()))


class Group:
    """One rank's end of a group.

        every rank   marks that it is here
        rank 0       waits for all marks, says go (or stop)
        every rank   connects, at the first time, and broadcasts

    So no rank is in a collective that others will not enter, and missing ranks are known.
    """

    def __init__(
        self, name: str, *, store: TCPStore, connect: Callable[[timedelta], Any], rank: int, world_size: int
    ) -> None:
        self.name, self.rank, self.world_size = name, rank, world_size
        self.count = 0
        """Number of broadcasts so far."""
        self._marks = PrefixStore(f"{name}/marks", store)
        self._connect = connect
        self._group: Any = None
        self._work: Any = None

    def broadcast(self, tensor: Tensor, *, deadline: float, cancel: threading.Event | None = None) -> None:
        """Broadcast rank 0's `tensor` to all ranks; returns when this rank's is complete.

        Args:
            deadline: time.monotonic() of this process.
            cancel: gives up before the deadline.

        Raises:
            GroupError: it was not done in time; names the ranks that have not come. The group cannot be
                used again.
        """
        number, self.count = self.count, self.count + 1

        def late() -> bool:
            return time.monotonic() > deadline or (cancel is not None and cancel.is_set())

        try:
            self._marks.set(f"{number}/{self.rank}", "here")
            self._meet(number, late)
            left = timedelta(seconds=max(deadline - time.monotonic(), 0.1))
            if self._group is None:
                self._group = self._connect(left)
            limit = left if isinstance(self._group, ProcessGroupGloo) else _NCCL_WATCHDOG
            self._work = self._group.broadcast(tensor, 0, limit)
            # Polled: gloo's wait() would hold this thread beyond `cancel`, and nccl's makes the stream wait,
            # not the host.
            while not self._work.is_completed():
                if late():
                    raise GroupError(f"{self._at(number)} did not finish in time, although every rank joined")
                time.sleep(_POLL_SECONDS)
            self._work.wait()
        except RuntimeError as error:
            if isinstance(error, GroupError):
                raise
            raise GroupError(f"{self._at(number)} failed: {error}") from error
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()

    def missing(self, number: int) -> list[int]:
        """Ranks that have not arrived at broadcast `number`."""
        return [rank for rank in range(self.world_size) if not self._marks.check([f"{number}/{rank}"])]

    def abort(self) -> None:
        """Abort what others will never finish; the group cannot be used again. Does not wait; the end of this
        process does, since nccl's abort fails, and takes the process with it, once CUDA shuts down."""
        group, work, self._group, self._work = self._group, self._work, None, None
        if group is None:
            return
        thread = threading.Thread(target=_end, args=(group, work), name=f"abort {self.name}", daemon=True)
        thread.start()
        if not isinstance(group, ProcessGroupGloo):
            _aborts.append(thread)

    def _meet(self, number: int, late: Callable[[], bool]) -> None:
        """Wait until all ranks have arrived; rank 0 checks that."""
        if self.rank == 0:
            while absent := self.missing(number):
                if late():
                    self._marks.set(f"{number}/stop", "stop")
                    raise GroupError(f"{self._at(number)} did not begin: {_names(absent)} did not arrive")
                time.sleep(_POLL_SECONDS)
            self._marks.set(f"{number}/go", "go")
            return
        while not self._marks.check([f"{number}/go"]):
            if self._marks.check([f"{number}/stop"]):
                raise GroupError(f"{self._at(number)} was cancelled by the trainer")
            if late():
                absent = self.missing(number) or [0]
                raise GroupError(f"{self._at(number)} did not begin: {_names(absent)} did not arrive")
            time.sleep(_POLL_SECONDS)

    def _at(self, number: int) -> str:
        return f"broadcast {number} of group {self.name}, rank {self.rank} of {self.world_size},"


def announce(handle: Mapping[str, Any], *, receivers: int, seconds: float = _STORE_SECONDS) -> None:
    """Mark that an engine's workers arrive at a bucket, for an engine whose own code receives it and sets no
    marks; call it right before the engine receives.

    Args:
        handle: handle of the bucket.
        receivers: number of receivers of this engine.

    Raises:
        GroupError: the store is not reached.
    """
    try:
        store = TCPStore(
            handle["address"], handle["port"], None, False, timedelta(seconds=seconds), wait_for_workers=False
        )
        marks = PrefixStore(f"{handle['group']}/marks", store)
        for rank in range(handle["first_rank"], handle["first_rank"] + receivers):
            marks.set(f"{handle['number']}/{rank}", "here")
    except RuntimeError as error:
        raise GroupError(f"the store of group {handle['group']} cannot be reached: {error}") from error


def _names(ranks: list[int]) -> str:
    return ", ".join("the trainer" if rank == 0 else f"engine worker {rank - 1}" for rank in ranks)


def _end(group: Any, work: Any) -> None:
    """Abort nccl. gloo would wait for its running collectives while holding Python's lock: they time out by
    themselves, and only then the group is dropped."""
    if isinstance(group, ProcessGroupGloo):
        while work is not None and not work.is_completed():
            time.sleep(0.05)
    else:
        group.abort()


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """Address and name by which the ranks of a group find each other."""

    name: str
    address: str
    port: int
    """Port of the store."""
    world_size: int
    backend: str
    """gloo or nccl."""


def connect_group(
    rendezvous: Rendezvous, *, rank: int, seconds: float, store: TCPStore | None = None
) -> Group:
    """Enter a group, without waiting for other ranks: connections are made in the first broadcast.

    Args:
        store: passed by the rank that hosts it; None connects to the rendezvous's address.

    Raises:
        GroupError: the store is not reached within `seconds`.
    """
    name, address, port = rendezvous.name, rendezvous.address, rendezvous.port
    world_size, backend = rendezvous.world_size, rendezvous.backend
    if backend not in ("gloo", "nccl"):
        raise GroupError(f"backend {backend!r} is neither 'gloo' nor 'nccl'")
    try:
        if store is None:
            timeout = timedelta(seconds=max(seconds, 0.1))
            store = TCPStore(address, port, None, False, timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise GroupError(
            f"rank {rank} of {world_size} could not join group {name} at {address}:{port} within "
            f"{seconds:.0f} s: {error}"
        ) from error
    # As torch's own groups name their keys: an engine that joins by torch.distributed meets us there.
    kind = "cuda" if backend == "nccl" else "cpu"
    inner = PrefixStore(f"{kind}/", PrefixStore(f"{name}/", PrefixStore(name, store)))

    def connect(timeout: timedelta) -> Any:
        inner.set_timeout(timeout)
        if backend == "gloo":
            return _gloo(inner, rank, world_size, timeout=timeout, address=address)
        return _nccl(inner, rank, world_size)

    return Group(name, store=store, connect=connect, rank=rank, world_size=world_size)


def _gloo(store: PrefixStore, rank: int, world_size: int, *, timeout: timedelta, address: str) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stubs
    options._timeout = timeout
    local = address in ("127.0.0.1", "::1")
    options._devices = [
        # Otherwise gloo takes whatever address the host's name resolves to.
        ProcessGroupGloo.create_device(hostname=address)
        if local
        else ProcessGroupGloo.create_default_device()
    ]
    # The class itself: torch.distributed.init_process_group would make the default group of the process,
    # which belongs to the trainer here and to vLLM in its workers, and new_group wants members of that one.
    return ProcessGroupGloo(store, rank, world_size, options)


def _nccl(store: PrefixStore, rank: int, world_size: int) -> Any:
    from torch._C._distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = _NCCL_WATCHDOG
    return ProcessGroupNCCL(store, rank, world_size, options)


class Receiver:
    """Opens buckets in one worker of an engine; keeps what is opened only once: shared memory and groups.

    Args:
        device: device of the tensors.
        rank: rank of this worker among those of its engine.
    """

    def __init__(self, device: torch.device | str, *, rank: int = 0) -> None:
        self.device, self.rank = torch.device(device), rank
        self._memory: dict[str, Tensor] = {}
        self._group: Group | None = None
        self._buffer: Tensor | None = None

    def tensors(self, bucket: Mapping[str, Any], *, deadline: float) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) in order. A tensor is valid until the next bucket is requested; with "ipc", until
        the engine reports this one as done: synchronise the device before.

        Args:
            deadline: time.monotonic() of this process.

        Raises:
            WireError: the bytes cannot be read, or are not those that were announced.
        """
        transport, handle = bucket["transport"], bucket["handle"]
        specs = specs_from_json(bucket["specs"])
        if transport == "disk":
            return self._from_file(handle["path"], specs)
        if transport == "ipc":
            return unpack(self._opened(handle), specs)
        if transport == "collective":
            return unpack(self._broadcast(handle, int(bucket["num_bytes"]), deadline), specs)
        raise WireError(f"a worker cannot receive weights by {transport!r}, only by ipc, collective and disk")

    def close(self) -> None:
        """Release the trainer's memory, the group and the buffer."""
        self._memory.clear()
        self._buffer = None
        if self._group is not None:
            self._group.abort()
            self._group = None

    def _opened(self, handle: Mapping[str, Any]) -> Tensor:
        key = str(handle["key"])
        if key not in self._memory:
            # The trainer's buffer `slot` is another one now: what it had there before may be freed.
            for old in [k for k in self._memory if k.split("/")[:2] == key.split("/")[:2]]:
                del self._memory[old]
            self._memory[key] = import_handle(handle["memory"])
        return self._memory[key]

    def _broadcast(self, handle: Mapping[str, Any], num_bytes: int, deadline: float) -> Tensor:
        if self._group is None or self._group.name != handle["group"]:
            if self._group is not None:
                self._group.abort()
                self._group = None
            rendezvous = Rendezvous(
                name=str(handle["group"]),
                address=str(handle["address"]),
                port=int(handle["port"]),
                world_size=int(handle["world_size"]),
                backend=str(handle["backend"]),
            )
            rank = int(handle["first_rank"]) + self.rank
            self._group = connect_group(rendezvous, rank=rank, seconds=deadline - time.monotonic())
        if self._buffer is None or self._buffer.numel() < num_bytes:
            # Freed first: old and new are never held at the same time.
            self._buffer = None
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        data = self._buffer[:num_bytes]
        self._group.broadcast(data, deadline=deadline)
        return data

    def _from_file(self, path: str, specs: tuple[TensorSpec, ...]) -> Iterator[tuple[str, Tensor]]:
        try:
            with safe_open(path, framework="pt", device=str(self.device)) as file:
                if set(file.keys()) != {spec.name for spec in specs}:
                    raise WireError(f"{path} does not contain the {len(specs)} tensors that were announced")
                for spec in specs:
                    tensor = file.get_tensor(spec.name)
                    if tuple(tensor.shape) != spec.shape or f"torch.{spec.dtype}" != str(tensor.dtype):
                        raise WireError(
                            f"{path}: {spec.name} is {tensor.dtype} {list(tensor.shape)}, but {spec.dtype} "
                            f"{list(spec.shape)} was announced"
                        )
                    yield spec.name, tensor
        except (OSError, SafetensorError) as error:
            raise WireError(f"{path} cannot be read: {error}; both sides must see the same folder") from error


# CUDA memory of one process, seen from another one on the same GPU: a handle that is plain JSON.
#
# The GPU is named by its UUID, since two processes may number the same GPUs differently.


_FIELDS = ("handle", "size", "offset", "counter", "counter_offset", "event", "event_sync")
"""The fields of a shared CUDA storage in torch, after the device."""


def device_uuid(index: int) -> str:
    """UUID of this process's GPU `index`; the same in every process that sees the GPU."""
    return str(torch.cuda.get_device_properties(index).uuid)


def device_index(uuid: str) -> int:
    """This process's number of the GPU. Raises WireError."""
    known = [device_uuid(index) for index in range(torch.cuda.device_count())]
    if uuid not in known:
        raise WireError(
            f"the memory belongs to GPU {uuid}, but this process sees {', '.join(known) or 'no GPU'}; CUDA "
            "IPC needs trainer and engine on the same GPU; set engine.transfer to 'collective' or 'disk'"
        )
    return known.index(uuid)


def export_handle(tensor: Tensor) -> dict[str, Any]:
    """Export a handle with which another process opens `tensor`'s memory. Export once, keep the tensor while
    others read it.

    Raises:
        WireError: the tensor is not contiguous, or is not in CUDA memory.
    """
    if not tensor.is_cuda or not tensor.is_contiguous():
        raise WireError(f"only contiguous CUDA tensors can be shared, not {tensor.device} {tensor.stride()}")
    # Private, in torch 2.11 to 2.13: torch's public way (multiprocessing's reductions) pickles, and a server
    # that unpickles runs what it is sent.
    _, *fields = tensor.untyped_storage()._share_cuda_()
    return {
        "torch": torch.__version__,
        "device": device_uuid(tensor.device.index),
        "dtype": dtype_name(tensor.dtype),
        "shape": list(tensor.shape),
        "storage_offset": tensor.storage_offset(),
        **{name: _to_json(value) for name, value in zip(_FIELDS, fields, strict=True)},
    }


def import_handle(handle: Mapping[str, Any]) -> Tensor:
    """Open the exported tensor, over the very same memory. Import a handle once and keep the tensor.

    Raises:
        WireError: the GPU is not visible here, or the memory cannot be opened.
    """
    index = device_index(handle["device"])
    fields = [_from_json(handle[name]) for name in _FIELDS]
    try:
        # The private call below does not do it, and this may be the process's first use of the GPU.
        torch.cuda.init()
        with torch.cuda.device(index):
            storage = torch.UntypedStorage._new_shared_cuda(index, *fields)
    except RuntimeError as error:
        raise WireError(
            f"memory shared by torch {handle['torch']} cannot be opened by torch {torch.__version__}: "
            f"{error}; set engine.transfer to 'collective' or 'disk'"
        ) from error
    flat = torch.empty(0, dtype=named_dtype(handle["dtype"]), device=f"cuda:{index}")
    shape = tuple(handle["shape"])
    # Those of a contiguous tensor, as no other is exported.
    strides = torch.empty(shape, device="meta").stride()
    return flat.set_(storage, handle["storage_offset"], shape, strides)


def _to_json(value: Any) -> Any:
    return {"base64": base64.b64encode(value).decode("ascii")} if isinstance(value, bytes) else value


def _from_json(value: Any) -> Any:
    return base64.b64decode(value["base64"]) if isinstance(value, Mapping) else value
