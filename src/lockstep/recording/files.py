"""One file of a recording: checked before it is believed, read in bounded memory, written as a whole.

Two kinds: a safetensors file (shards, open inputs) and a JSON object that carries its own sha256.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.common_errors import cannot_write
from lockstep.errors import RecordingError
from lockstep.observe.files import (
    JSON_BYTES,
    JSON_VALUES,
    file_errors,
    jsonable,
    open_plain,
    parse_json,
    read_plain,
    sync_folder,
    write_atomic,
)
from lockstep.observe.tensor_file import DTYPES, NAMES, file_head, tensor_bytes

_CHUNK = 2**20
_ZEROS = "0" * 64
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpan:
    """Where a tensor lies in a safetensors file."""

    dtype: str
    """As in the file's header, such as "U16"."""
    shape: tuple[int, ...]
    start: int
    """Bytes from the file's beginning."""
    nbytes: int

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize


def read_signed_json(path: Path, root: Path) -> dict[str, Any]:
    """A JSON object whose "sha256" is that of the file's bytes with these 64 digits written as zeros.

    Raises:
        RecordingError: names the file.
    """
    raw = read_plain(path, RecordingError, root=root)
    value = parse_json(raw, str(path), RecordingError)
    if not isinstance(value, dict):
        raise RecordingError(f"wrong-type: {path} contains a JSON {type(value).__name__}, not an object")
    digest = value.pop("sha256", None)
    if not isinstance(digest, str) or not _HEX.fullmatch(digest) or raw.count(digest.encode()) != 1:
        raise RecordingError(f"missing-field: {path}: field sha256 is missing or not 64 hexadecimal digits")
    if hashlib.sha256(raw.replace(digest.encode(), _ZEROS.encode())).hexdigest() != digest:
        raise RecordingError(
            f"hash-differs: {path}: field sha256 does not match the rest of the file; the file is damaged or "
            "was edited"
        )
    return value


def write_signed_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write what read_signed_json reads; atomic, safe on the disk.

    Raises:
        RecordingError: too large, or no room on the disk.
        TypeError: a value is not JSON.
    """
    text = json.dumps({**jsonable(value), "sha256": _ZEROS}, indent=1, allow_nan=False) + "\n"
    data = text.encode()
    check_json_size(data, path)
    digest = hashlib.sha256(data).hexdigest()
    before, _, after = text.rpartition(_ZEROS)
    if _ZEROS in before:
        raise RecordingError(
            f"contradiction: {path}: a value contains 64 zeros, reserved for the checksum; change it"
        )
    with file_errors(path, RecordingError, "write"):
        write_atomic(path, before + digest + after)


def check_json_size(data: bytes, path: Path) -> None:
    """Refuse to write what could not be read again."""
    if len(data) > JSON_BYTES or sum(map(data.count, (b",", b"[", b"{"))) > JSON_VALUES:
        raise RecordingError(
            f"too-large: {path}: {len(data):,} bytes of JSON are too many to be read back (at most "
            f"{JSON_BYTES:,} bytes and {JSON_VALUES:,} values); keep less of each document, or set a smaller "
            "shard_inputs"
        )


class TensorFile:
    """A safetensors file whose header was read and checked; tensors are read piece by piece.

    Raises:
        RecordingError: names the file and what is wrong with it.
    """

    def __init__(self, path: Path, root: Path) -> None:
        self.path = path
        with open_plain(path, RecordingError, root=root) as file:
            status = os.fstat(file.fileno())
            self._stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
            size = status.st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, JSON_BYTES):
                raise self._broken(
                    f"its header would be {length:,} bytes long, in a file of {size:,} bytes; it is "
                    "truncated or not a safetensors file (pickle and torch.save files are never read)"
                )
            raw = file.read(length)
        header = parse_json(raw, f"{path}: header", RecordingError)
        if not isinstance(header, dict):
            raise self._broken("its header is not a JSON object")
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise self._broken("field __metadata__ must be an object of strings")
        self.metadata: dict[str, str] = metadata
        self.tensors = {name: self._span(name, value, 8 + length) for name, value in header.items()}
        end = 8 + length
        for name, span in sorted(self.tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
            if span.start != end:
                raise self._broken(f"tensor {name!r}: data_offsets overlap or leave a gap")
            end += span.nbytes
        if end != size:
            raise self._broken(
                f"its tensors end at byte {end:,}, but the file ends at byte {size:,}; it is truncated"
            )

    def _broken(self, what: str) -> RecordingError:
        return RecordingError(f"damaged-file: {self.path}: {what}")

    def _span(self, name: str, value: Any, data: int) -> TensorSpan:
        if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
            raise self._broken(f"tensor {name!r} must have dtype, shape and data_offsets, and nothing else")
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise self._broken(
                f"tensor {name!r}: dtype {str(dtype)[:40]!r} is not one of {', '.join(DTYPES)}"
            )
        for what, numbers in (("shape", shape), ("data_offsets", offsets)):
            if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < 2**62 for n in numbers):
                raise self._broken(f"tensor {name!r}: {what} must be a list of non-negative whole numbers")
        if len(offsets) != 2 or len(shape) > 64:
            raise self._broken(f"tensor {name!r} needs 2 data_offsets and at most 64 dimensions")
        nbytes = math.prod(shape) * DTYPES[dtype].itemsize
        if math.prod(n for n in shape if n) >= 2**48:  # an empty tensor may still have absurd strides
            raise self._broken(f"tensor {name!r}: shape {shape[:8]} is too large")
        if offsets[1] - offsets[0] != nbytes:
            raise self._broken(f"tensor {name!r}: {dtype} {shape} does not fit data_offsets {offsets}")
        return TensorSpan(dtype=dtype, shape=tuple(shape), start=data + offsets[0], nbytes=nbytes)

    def stamp(self) -> tuple[int, int, int]:
        """A stamp that changes when the file does."""
        check = os.stat(self.path)
        return (check.st_ino, check.st_size, check.st_mtime_ns)

    def digest(self, name: str) -> str:
        """sha256 of a tensor's bytes, read in pieces."""
        span, digest = self.tensors[name], hashlib.sha256()
        with open_plain(self.path, RecordingError) as file:
            file.seek(span.start)
            left = span.nbytes
            while left:
                data = file.read(min(left, _CHUNK))
                if not data:
                    raise self._broken(f"tensor {name!r}: the file became shorter while it was read")
                digest.update(data)
                left -= len(data)
        return digest.hexdigest()

    def read(self, pieces: Mapping[str, tuple[int, int]]) -> dict[str, bytearray]:
        """Tensor name -> (first entry, number of entries) of its flat data, as bytes."""
        columns = {}
        with open_plain(self.path, RecordingError) as file:
            for name, (first, count) in pieces.items():
                span = self.tensors[name]
                nbytes = count * span.itemsize
                if first < 0 or count < 0 or first * span.itemsize + nbytes > span.nbytes:
                    raise self._broken(f"tensor {name!r} has no entries {first} to {first + count}")
                data = bytearray(nbytes)
                file.seek(span.start + first * span.itemsize)
                if nbytes and file.readinto(data) != nbytes:
                    raise self._broken(f"tensor {name!r}: the file became shorter while it was read")
                columns[name] = data
        return columns

    def read_tensor(self, name: str) -> Tensor:
        """The whole tensor."""
        span = self.tensors[name]
        data = self.read({name: (0, span.nbytes // span.itemsize)})[name]
        if not data:
            return torch.empty(span.shape, dtype=DTYPES[span.dtype])
        return torch.frombuffer(data, dtype=DTYPES[span.dtype]).reshape(span.shape)


def dtype_name(tensor: Tensor | np.ndarray[Any, Any]) -> str:
    """The name of its dtype in a safetensors header.

    Raises:
        RecordingError: safetensors has none.
    """
    if isinstance(tensor, np.ndarray):
        return {"u": "U", "i": "I", "f": "F"}[tensor.dtype.kind] + str(8 * tensor.dtype.itemsize)
    if tensor.dtype not in NAMES:
        raise RecordingError(
            f"wrong-type: a tensor of dtype {tensor.dtype} cannot be recorded; known: {', '.join(DTYPES)}"
        )
    return NAMES[tensor.dtype]


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor | np.ndarray[Any, Any]],
    metadata: Mapping[str, str],
    *,
    sync: bool,
) -> int:
    """Write a safetensors file, replaced as a whole; returns its size in bytes.

    Args:
        sync: safe on the disk before it gets its name. Otherwise in the page cache, which outlives the
            process but not the machine.

    Raises:
        RecordingError: a header that could not be read again, or no room on the disk.
    """
    # Wide ones first, so that every tensor is aligned for whoever maps the file.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    head = file_head(
        {name: (dtype_name(tensors[name]), tuple(tensors[name].shape)) for name in names}, metadata
    )
    check_json_size(head[8:], path)
    parts = [tensor_bytes(tensors[name]) for name in names]
    _replace(path, [head, *parts], sync=sync)
    return len(head) + sum(part.nbytes for part in parts)


def _replace(path: Path, parts: Sequence[bytes | memoryview], *, sync: bool) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        # A file of this name is what a killed writer left, or a link that somebody laid there.
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb", buffering=0) as file:
            for part in parts:
                view = memoryview(part)
                while view.nbytes:
                    view = view[file.write(view) :]
            if sync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        fix = "free some space, or record less (--record.every)"
        raise cannot_write(RecordingError, path, error, fix) from error
    if sync:
        sync_folder(path.parent)


# A short name for the bits of a set of weights: equal names, dtypes, shapes and bits give an equal name.
#
# The bytes of a tensor are read as int64 words, 256 to a row, 256 rows to a block. Every row and every
# column of every block is summed up modulo 2**64, where the tensor is: integer sums are the same in any
# order, on any device and for any number of threads. The sums, 1/128 of the tensor, go through blake2b on
# the host.
#
# Flipping one bit changes a row's sum. Swapping two different elements changes a word, a row's sum or a
# column's sum. It is no protection against somebody who wants two sets of weights to look alike.


PREFIX = "lsw1-"
_SIDE = 256
"""Words of a row, and rows of a block."""
_BLOCK = _SIDE * _SIDE
_CPU_BLOCKS = 2
"""Blocks that are summed up together on a CPU: rows, then columns out of its cache."""


@torch.no_grad()
def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """ "lsw1-" and 32 hexadecimal digits. The order of the tensors does not matter.

    Raises:
        ValueError: two tensors have one name, or one is on the meta device, where it has no bits.
    """
    heads: list[tuple[str, bytes]] = []
    sums: list[Tensor] = []
    for name, tensor in tensors:  # one at a time: they may be read from a file
        heads.append((name, json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode()))
        sums.append(_sums(name, tensor))
    names = [name for name, _ in heads]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two tensors are called {twice!r}")
    digest = hashlib.blake2b(digest_size=16)
    for (_, head), part in sorted(zip(heads, _on_host(sums), strict=True), key=lambda item: item[0]):
        digest.update(len(head).to_bytes(8, "little"))
        digest.update(head)
        digest.update(part.numpy().data)
    return PREFIX + digest.hexdigest()


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The live Parameters and persistent buffers of a module by name, detached, each once: tied weights under
    their first name, LoRA layers unmerged. What is fingerprinted, and stored for replay."""
    tensors = {name: p.detach() for name, p in module.named_parameters()}
    seen: set[int] = set()
    for path, owner in module.named_modules():
        for key, buffer in owner._buffers.items():
            if buffer is None or key in owner._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            tensors[f"{path}.{key}" if path else key] = buffer.detach()
    return tensors


def _sums(name: str, tensor: Tensor) -> Tensor:
    """[S] int64, where the tensor is: rows' sums, then columns', of the full blocks and of the one that is
    not; then the last, unfinished row, filled up with zeros."""
    if tensor.is_meta:
        raise ValueError(f"{name!r} is on the meta device and has no values")
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    # A view as int64 must begin at a whole word; a slice of a shard need not.
    if flat.storage_offset() % 8:
        flat = flat.clone()
    row_bytes = 8 * _SIDE
    whole = flat.numel() // row_bytes * row_bytes
    rows = flat[:whole].view(torch.int64).view(-1, _SIDE)
    full = rows.shape[0] // _SIDE
    parts = [_block_sums(rows[: full * _SIDE].view(full, _SIDE, _SIDE))]
    if full * _SIDE < rows.shape[0]:
        rest = rows[full * _SIDE :]
        parts += [rest.sum(1), rest.sum(0)]
    if whole < flat.numel():
        last = flat.new_zeros(row_bytes)
        last[: flat.numel() - whole] = flat[whole:]
        parts.append(last.view(torch.int64))
    return torch.cat(parts)


def _block_sums(blocks: Tensor) -> Tensor:
    """[2 * n * 256]: of n full blocks, [n, 256, 256]."""
    count = blocks.shape[0]
    sums = blocks.new_empty(2, count, _SIDE)
    step = _CPU_BLOCKS if blocks.device.type == "cpu" else max(count, 1)
    for start in range(0, count, step):
        part = slice(start, start + step)
        torch.sum(blocks[part], 2, out=sums[0, part])
        torch.sum(blocks[part], 1, out=sums[1, part])
    return sums.view(-1)


def _on_host(sums: list[Tensor]) -> list[Tensor]:
    """The same on the CPU, with one copy per device."""
    digests: dict[int, Tensor] = {}
    for device in dict.fromkeys(part.device for part in sums):
        here = [index for index, part in enumerate(sums) if part.device == device]
        if device.type == "cpu":
            digests |= {index: sums[index] for index in here}
            continue
        flat = torch.cat([sums[index] for index in here]).cpu()
        digests |= dict(zip(here, flat.split([sums[index].numel() for index in here]), strict=True))
    return [digests[index] for index in range(len(sums))]
