"""Objects between ranks: JSON of a declared type in uint8 tensors, never a pickle.

    shares = gather_objects(share, dict[str, float], group=group)

The type decides what is decoded (dataclasses, tuples, paths, ...); a value of another type is refused by its
sender and by every receiver. Floats keep every bit, NaN and infinities included.
"""

from __future__ import annotations

import functools
import json
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import JsonValue, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError
from torch import Tensor

from lockstep.ranks.rendezvous import RankError, group_device

T = TypeVar("T")

MAX_BYTES = 1 << 30
"""Largest object: a few times the rollouts of a large step."""


def gather_objects(value: T, kind: Any = JsonValue, *, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return every rank's value, by rank. Collective.

    Args:
        kind: its type, as an annotation; JsonValue takes what JSON itself has, so no tuples.
        group: None: the default one.

    Raises:
        RankError: the value is not of that type, or what another rank sent is not, or is too large.
    """
    return [
        decode_object(data, kind, sender=sender)
        for sender, data in enumerate(gather_bytes(encode_object(value, kind), group=group))
    ]


def broadcast_object(value: T, kind: Any = JsonValue, *, group: dist.ProcessGroup | None = None) -> T:
    """Return rank 0's value on every rank; the others' values are ignored. Collective; raises as
    `gather_objects`."""
    own = encode_object(value, kind) if dist.get_rank(group) == 0 else b""
    device = group_device(group)
    length = torch.tensor([len(own)], device=device)
    dist.broadcast(length, group=group, group_src=0)
    data = _tensor(own, _checked(int(length), 0), device)
    dist.broadcast(data, group=group, group_src=0)
    received: T = decode_object(_bytes(data), kind, sender=0)
    return received


def gather_bytes(data: bytes, *, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Return every rank's bytes, by rank. Lengths are gathered first, then the bytes, padded to the longest.
    Collective."""
    device, size = group_device(group), dist.get_world_size(group)
    lengths = torch.zeros(size, dtype=torch.int64, device=device)
    dist.all_gather(list(lengths.split(1)), torch.tensor([len(data)], device=device), group=group)
    sizes = [_checked(length, sender) for sender, length in enumerate(lengths.tolist())]
    padded = _tensor(data, max(sizes), device)
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return [_bytes(part[:length]) for part, length in zip(parts, sizes, strict=True)]


def encode_object(value: Any, kind: Any) -> bytes:
    """Encode a value as JSON. Raises RankError: it is not of that type, or too large."""
    adapter = _adapter(kind)
    try:
        adapter.validate_python(value, strict=True)  # a tuple is no JSON value, but would be written as one
        plain = adapter.dump_python(value, mode="json", warnings="error")
        data = json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode()
    except (PydanticSerializationError, ValidationError, TypeError, ValueError) as error:
        raise RankError(
            f"wrong-type: {_name(kind)} cannot be sent to the other ranks: {_short(error)}"
        ) from error
    if len(data) > MAX_BYTES:
        raise RankError(
            f"too-large: {_name(kind)} of {len(data):,} bytes is too large for the other ranks "
            f"({MAX_BYTES:,})",
            bytes=len(data),
        )
    return data


def decode_object(data: bytes, kind: Any, *, sender: int) -> Any:
    """Decode a rank's JSON. Raises RankError: it is invalid, or not of that type."""
    try:
        # strict, as for the sender: a peer's "1" must not become the number 1.
        return _adapter(kind).validate_json(data, strict=True)
    except ValidationError as error:
        raise RankError(
            f"bad-reply: rank {sender} sent what is not {_name(kind)}: {_short(error)}", rank=sender
        ) from error


@functools.lru_cache(maxsize=128)
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _name(kind: Any) -> str:
    if kind is JsonValue:
        return "a JSON value"
    return kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)


def _short(error: Exception) -> str:
    """One line about the first error, without the value, which may be long or untrusted."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "at its top"
        return f"{where}: {first['msg']}"
    return " ".join(str(error).split())[:300]


def _checked(length: int, sender: int) -> int:
    if not 0 <= length <= MAX_BYTES:
        raise RankError(
            f"too-large: rank {sender} announced an object of {length:,} bytes; at most {MAX_BYTES:,} may "
            "come",
            rank=sender,
        )
    return length


def _tensor(data: bytes, length: int, device: torch.device) -> Tensor:
    """The bytes, padded with zeros."""
    buffer = bytearray(length)
    buffer[: len(data)] = data
    # frombuffer refuses an empty buffer
    return torch.frombuffer(buffer or bytearray(1), dtype=torch.uint8).to(device)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()
