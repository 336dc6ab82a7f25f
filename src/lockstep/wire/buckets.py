"""Tensors packed one after the other into a flat buffer, and their offsets.

name     q.weight [2, 3] bfloat16    k.weight [1, 3] bfloat16    norm.weight [3] float32
offset   0                           16                          32
bytes    12                          6                           12                      ─► 44 in all
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16
"""Alignment of a tensor's first byte: enough for the vectorised loads of any copy kernel."""
HEAD_VALUES = 64
"""Number of first values of a weight that are read back and compared."""


class WireError(RuntimeError):
    """The received data is not what was announced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Name, dtype, shape and offset of one tensor in a bucket."""

    name: str
    """Hugging Face checkpoint name."""
    dtype: str
    """Name of the torch dtype without prefix: "bfloat16"."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the bucket; a multiple of 16."""
    num_bytes: int


def dtype_name(dtype: torch.dtype) -> str:
    """Example:
    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def named_dtype(name: str) -> torch.dtype:
    """The inverse of `dtype_name`. Raises WireError."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WireError(f"{name!r} is not a dtype in torch {torch.__version__}")
    return dtype


class Layout:
    """Places tensors in one bucket, in the order they come."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.specs: list[TensorSpec] = []
        self.num_bytes = 0
        """Bytes up to the end of the last tensor."""

    def place(self, name: str, tensor: Tensor) -> TensorSpec | None:
        """Place a tensor; None when the bucket is full. A tensor that is larger than a whole bucket gets a
        bucket of its own."""
        offset = -(-self.num_bytes // ALIGNMENT) * ALIGNMENT
        size = tensor.numel() * tensor.element_size()
        if self.specs and offset + size > self.capacity:
            return None
        spec = TensorSpec(
            name=name,
            dtype=dtype_name(tensor.dtype),
            shape=tuple(tensor.shape),
            offset=offset,
            num_bytes=size,
        )
        self.specs.append(spec)
        self.num_bytes = offset + size
        return spec


def view(data: Tensor, spec: TensorSpec) -> Tensor:
    """View the tensor of `spec` in the memory of `data`.

    Args:
        data: [N] uint8, the bucket.

    Raises:
        WireError: the bucket ends before the tensor does, or the sizes contradict each other.
    """
    dtype = named_dtype(spec.dtype)
    count = 1
    for size in spec.shape:
        count *= size
    if count * dtype.itemsize != spec.num_bytes or spec.offset % ALIGNMENT:
        raise WireError(
            f"{spec.name}: {spec.dtype} {list(spec.shape)} does not fit {spec.num_bytes} bytes at offset "
            f"{spec.offset}"
        )
    if spec.offset + spec.num_bytes > data.numel():
        raise WireError(
            f"{spec.name} ends at byte {spec.offset + spec.num_bytes} of a bucket of {data.numel()} bytes"
        )
    return data[spec.offset : spec.offset + spec.num_bytes].view(dtype).view(spec.shape)


def pack(buffer: Tensor, specs: Sequence[TensorSpec], tensors: Sequence[Tensor]) -> None:
    """Copy tensors to their places in `buffer`, [N] uint8; on a GPU without waiting."""
    with torch.no_grad():
        targets = [view(buffer, spec) for spec in specs]
        # One launch for the bucket, not one for each tensor.
        torch._foreach_copy_(targets, [tensor.detach() for tensor in tensors], non_blocking=True)


def unpack(data: Tensor, specs: Iterable[TensorSpec]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor over the memory of `data`) in order. Raises WireError."""
    for spec in specs:
        yield spec.name, view(data, spec)


def heads(data: Tensor, specs: Iterable[TensorSpec]) -> Tensor:
    """[M] uint8: the first HEAD_VALUES values of every tensor, one after the other, a copy."""
    parts = []
    for spec in specs:
        itemsize = named_dtype(spec.dtype).itemsize
        parts.append(data[spec.offset : spec.offset + min(spec.num_bytes, HEAD_VALUES * itemsize)])
    return torch.cat(parts) if parts else data[:0].clone()


def split_heads(packed: Tensor, specs: Iterable[TensorSpec]) -> dict[str, Tensor]:
    """Split the result of `heads` by name; [at most HEAD_VALUES] each."""
    values, start = {}, 0
    for spec in specs:
        dtype = named_dtype(spec.dtype)
        stop = start + min(spec.num_bytes, HEAD_VALUES * dtype.itemsize)
        values[spec.name] = packed[start:stop].clone().view(dtype)
        start = stop
    return values


def specs_to_json(specs: Iterable[TensorSpec]) -> list[dict[str, Any]]:
    return [asdict(spec) for spec in specs]


def specs_from_json(values: Iterable[Mapping[str, Any]]) -> tuple[TensorSpec, ...]:
    """The inverse of `specs_to_json`. Raises WireError."""
    try:
        return tuple(
            TensorSpec(
                name=str(value["name"]),
                dtype=str(value["dtype"]),
                shape=tuple(int(size) for size in value["shape"]),
                offset=int(value["offset"]),
                num_bytes=int(value["num_bytes"]),
            )
            for value in values
        )
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"a tensor's place in a bucket cannot be read: {error!r}") from error
