"""Checkpoint files: safetensors and JSON, written as a stream, fsynced, hashed on the way; checked before
use."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lockstep.errors import CheckpointError

_CHUNK = 1 << 24
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """What a file must be."""

    bytes: int
    sha256: str


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Write a safetensors file and wait until it is on the disk.

    One tensor at a time passes through host memory (safetensors.torch.save_file takes a copy of all of them),
    and the hash is of the bytes that were meant, not of what a disk gives back.

    Raises:
        OSError: the disk is full or the like; what was written stays for the caller to remove.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with _HashingFile(path) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors.values():
            file.write(_bytes_of(tensor))
    return file.record()


def write_json(path: Path, value: Any) -> FileRecord:
    """Write indented JSON and wait until it is on the disk. Raises OSError."""
    with _HashingFile(path) as file:
        file.write((json.dumps(value, indent=1) + "\n").encode())
    return file.record()


def tensor_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of the data, without the header."""
    return sum(t.numel() * t.element_size() for t in tensors.values())


def read_json(path: Path) -> Any:
    """Raises CheckpointError: missing or not JSON."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); it is damaged") from error


def check_record(path: Path, record: FileRecord, *, contents: bool) -> None:
    """Compare a file with its record: its size, and with `contents` its hash as well.

    Raises:
        CheckpointError: it is missing or differs.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    size = path.stat().st_size
    if size != record.bytes:
        raise CheckpointError(f"{path} has {size} bytes, {record.bytes} were written; it is damaged")
    if contents:
        found = sha256_of(path)
        if found != record.sha256:
            raise CheckpointError(
                f"{path} has sha256 {found[:16]}..., {record.sha256[:16]}... was written; it is damaged"
            )


def sha256_of(path: Path) -> str:
    """Hash of a file's contents, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_tensors(path: Path, expected: Mapping[str, Tensor]) -> None:
    """Compare names, shapes and dtypes in a safetensors file with those of `expected`, reading only its
    header.

    Raises:
        CheckpointError: names the file and the first tensor that does not fit.
    """
    try:
        with safe_open(path, "pt") as file:
            found = {}
            for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                part = file.get_slice(name)
                found[name] = (str(part.get_dtype()), tuple(part.get_shape()))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file ({error})") from error
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or extra:
        raise CheckpointError(
            f"{path} belongs to another model, optimizer or adapter: {len(missing)} tensors are missing "
            f"{missing[:3]}, {len(extra)} are not known {extra[:3]}"
        )
    for name, tensor in expected.items():
        wanted = (_DTYPES[tensor.dtype], tuple(tensor.shape))
        if found[name] != wanted:
            raise CheckpointError(
                f"{path}: tensor {name!r} is {found[name][0]} {list(found[name][1])}, the run has "
                f"{wanted[0]} {list(wanted[1])}"
            )


def read_tensors(path: Path, into: Mapping[str, Tensor]) -> None:
    """Copy every tensor of a file that `check_tensors` accepted into the tensor of that name, in place."""
    with safe_open(path, "pt") as file, torch.no_grad():
        for name, target in into.items():
            target.copy_(file.get_tensor(name))


def require_free_space(directory: Path, needed: int) -> None:
    """Raises CheckpointError, before anything is written, when `needed` bytes do not fit."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise CheckpointError(out_of_space(directory, needed=needed, free=free))


def out_of_space(directory: Path, *, needed: int, free: int) -> str:
    """What to say when a checkpoint does not fit."""
    return (
        f"the checkpoint needs {needed} bytes ({needed / 2**30:.2f} GiB), {directory} has {free} bytes "
        "free; free some space, set another run_dir, or lower checkpoint.keep_last; earlier checkpoints are "
        "as they were"
    )


def is_out_of_space(error: OSError) -> bool:
    """The disk, or the user's quota on it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _HashingFile:
    """A new file whose bytes are hashed as they are written; closing it waits for the disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hash = hashlib.sha256()
        self._bytes = 0

    def __enter__(self) -> _HashingFile:
        self._file = self._path.open("xb")
        return self

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for start in range(0, len(view), _CHUNK):
            part = view[start : start + _CHUNK]
            self._file.write(part)
            self._hash.update(part)
        self._bytes += len(view)

    def __exit__(self, *failure: object) -> None:
        with self._file:
            if failure[0] is None:
                self._file.flush()
                os.fsync(self._file.fileno())

    def record(self) -> FileRecord:
        return FileRecord(bytes=self._bytes, sha256=self._hash.hexdigest())


def _bytes_of(tensor: Tensor) -> memoryview:
    array = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return array.data
