"""An engine's end: from the description of a bucket, plain JSON, to its tensors.

receiver = Receiver(device, rank=tp_rank)
model.load_weights(receiver.tensors(bucket, deadline=...))   # bucket: WeightBucket.as_json()
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lockstep.wire.buckets import TensorSpec, WireError, dtype_name, named_dtype, specs_from_json, unpack
from lockstep.wire.groups import Group, Rendezvous, connect_group


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
        raise WireError(f"a worker cannot receive by {transport!r}; it can by ipc, collective and disk")

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
                    raise WireError(f"{path} does not hold the {len(specs)} tensors that were announced")
                for spec in specs:
                    tensor = file.get_tensor(spec.name)
                    if tuple(tensor.shape) != spec.shape or f"torch.{spec.dtype}" != str(tensor.dtype):
                        raise WireError(
                            f"{path}: {spec.name} is {tensor.dtype} {list(tensor.shape)}, announced was "
                            f"{spec.dtype} {list(spec.shape)}"
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
            f"the memory is of GPU {uuid}, and this process sees {', '.join(known) or 'no GPU'}; CUDA IPC "
            "needs trainer and engine on one GPU: set engine.transfer to 'collective' or 'disk'"
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
            f"memory that torch {handle['torch']} shares cannot be opened by torch {torch.__version__}: "
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
