"""CUDA memory of one process, seen from another one on the same GPU: a handle that is plain JSON.

The GPU is named by its UUID, since two processes may number the same GPUs differently.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.wire.buckets import WireError, dtype_name, named_dtype

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
