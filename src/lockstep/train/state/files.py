"""Checkpoint files: safetensors and JSON, streamed to disk, fsynced, hashed while writing; checked before
use. Those of a copy in memory, which ends with the machine, are neither fsynced nor hashed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.common_errors import damaged, hash_differs
from lockstep.config.train import TrainConfig
from lockstep.errors import CheckpointError
from lockstep.observe import files
from lockstep.observe.files import check_inside, file_errors
from lockstep.observe.tensor_file import NAMES, file_head, tensor_bytes
from lockstep.observe.text import printable
from lockstep.ranks.in_memory_checkpoint import is_in_memory
from lockstep.train.optimizer import lr_at

# A part is written while a thread hashes it: large enough that handing it over costs nothing beside that.
_CHUNK = 1 << 24
STATE_DTYPES = frozenset({"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"})
"""The dtypes that a train state may have, by their names in safetensors."""
_MAX_JSON = 1 << 26
"""Bytes; state.json names each tensor of the model and the optimizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """Expected size and hash of a file."""

    bytes: int
    sha256: str
    """Empty: of a file in memory, whose contents are not compared (`load` with verified = True)."""


class TensorFile:
    """A new safetensors file whose tensors are known, and come one at a time, in order.

    One tensor at a time passes through host memory (safetensors.torch.save_file takes a copy of all of them),
    and the hash is of the bytes that were meant, not of what a disk gives back. `close` waits until the file
    is on the disk. All methods raise OSError when the disk is full or the like; what was written stays for
    the caller to remove.

    Raises:
        CheckpointError: a tensor has a dtype that no train state may have.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    ) -> None:
        for name, (_, dtype) in tensors.items():
            if NAMES.get(dtype) not in STATE_DTYPES:  # it could not be loaded again
                raise CheckpointError(
                    f"wrong-type: {path}: tensor {name!r} is {dtype}, which a train state cannot store; keep "
                    "it out of the model's state (register_buffer(..., persistent=False))"
                )
        self._left = dict(tensors)
        head = file_head({name: (NAMES[t], shape) for name, (shape, t) in tensors.items()}, {"format": "pt"})
        self._file = _HashingFile(path).__enter__()
        self._file.write(head)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor."""
        assert name == next(iter(self._left)), f"{name} is not the next tensor of the file"
        assert (tuple(tensor.shape), tensor.dtype) == self._left.pop(name), (
            f"{name} does not match what was announced"
        )
        self._file.write(tensor_bytes(tensor))

    def close(self) -> FileRecord:
        """Finish the file after the last tensor; returns its record."""
        assert not self._left, f"{list(self._left)[:3]} were announced"
        self._file.__exit__(None)
        return self._file.record()

    def abandon(self) -> None:
        """Close a file that will not be finished."""
        with contextlib.suppress(OSError):  # what is still in its buffer does not fit either
            self._file.__exit__(OSError)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Write a safetensors file and wait until it is on the disk. Raises OSError."""
    shapes = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    file = TensorFile(path, shapes)
    try:
        for name, tensor in tensors.items():
            file.write(name, tensor)
        return file.close()
    except BaseException:
        file.abandon()
        raise


def write_json(path: Path, value: Any) -> FileRecord:
    """Write indented JSON and wait until it is on the disk. Raises OSError."""
    with _HashingFile(path) as file:
        file.write((json.dumps(value, indent=1) + "\n").encode())
    return file.record()


def read_json(path: Path) -> Any:
    """Raises CheckpointError: missing, larger than any that is written, not JSON, or a link out of its
    folder."""
    if not path.exists():
        raise CheckpointError(f"no-such-file: {path} is missing")
    return files.read_json(path, CheckpointError, root=path.parent, limit=_MAX_JSON)


def read_record(path: Path, name: str, record: Any) -> FileRecord:
    """A file's record from the JSON file `path`. Raises CheckpointError: a field is missing or of the wrong
    type."""
    where = f"{path}: field 'files.{printable(name)}'"
    if not isinstance(record, dict) or set(record) != {"bytes", "sha256"}:
        raise CheckpointError(f"damaged-file: {where} must have bytes and sha256; it is damaged")
    if not is_count(record["bytes"]) or not isinstance(record["sha256"], str):
        raise CheckpointError(f"damaged-file: {where} is {record!r:.200}; it is damaged")
    return FileRecord(**record)


def is_count(value: Any) -> TypeGuard[int]:
    """Return whether a value is an int; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def check_record(path: Path, record: FileRecord, *, contents: bool) -> None:
    """Compare a file with its record: its size, and with `contents` its hash as well.

    Raises:
        CheckpointError: it is missing or differs.
    """
    with file_errors(path, CheckpointError):
        if not path.is_file():
            raise CheckpointError(f"no-such-file: {path} is missing")
        check_inside(path, CheckpointError, root=path.parent)
        size = path.stat().st_size
        if size != record.bytes:
            raise damaged(CheckpointError, path, f"it has {size} bytes, but {record.bytes} were written")
        if contents and (now := sha256_of(path)) != record.sha256:
            raise hash_differs(CheckpointError, path, now, record.sha256)


def sha256_of(path: Path) -> str:
    """Hash of a file's contents, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_free_space(directory: Path, needed: int) -> None:
    """Raises CheckpointError, before anything is written, when `needed` bytes do not fit."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise CheckpointError(out_of_space(directory, needed=needed, free=free), code="no-space")


def out_of_space(directory: Path, *, needed: int, free: int) -> str:
    """The message for a checkpoint that does not fit."""
    return (
        f"the checkpoint needs {needed} bytes ({needed / 2**30:.2f} GiB), but {directory} has {free} bytes "
        "free; free some space, set another run_dir, or lower checkpoint.keep_last; earlier checkpoints are "
        "unchanged"
    )


def is_out_of_space(error: OSError) -> bool:
    """Return whether the disk, or the user's quota on it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _HashingFile:
    """A new file whose bytes are hashed as they are written; closing it waits for the disk. Neither, in
    memory."""

    def __init__(self, path: Path) -> None:
        self._path, self._in_memory = path, is_in_memory(path)
        self._hash = hashlib.sha256()
        self._bytes = 0
        self._hashing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hash")
        """Starts its thread with the first large part."""

    def __enter__(self) -> _HashingFile:
        self._file = self._path.open("xb")
        return self

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        self._bytes += len(view)
        if self._in_memory:
            self._file.write(view)
            return
        for start in range(0, len(view), _CHUNK):
            part = view[start : start + _CHUNK]
            if len(part) < _CHUNK:
                self._file.write(part)
                self._hash.update(part)
                continue
            # Both leave Python's lock: a part takes as long as the slower of the two.
            hashed = self._hashing.submit(self._hash.update, part)
            self._file.write(part)
            hashed.result()

    def __exit__(self, *failure: object) -> None:
        with self._hashing, self._file:
            if failure[0] is None and not self._in_memory:
                self._file.flush()
                os.fsync(self._file.fileno())

    def record(self) -> FileRecord:
        return FileRecord(bytes=self._bytes, sha256="" if self._in_memory else self._hash.hexdigest())


# What a train backend passes to `save_state` and `load_state`: its state as whole tensors by name, each of
# which it may store in parts.
#
#     "model/NAME"                            weights in the compute dtype, Hugging Face names
#     "master/NAME"                           float32, only where the Parameter's compute dtype is another one
#     "exp_avg/NAME", "exp_avg_sq/NAME"       AdamW's moments, float32
#     "updates/NAME"                          AdamW's count of updates, float32, []


MODEL = "model/"
MASTER = "master/"


class TensorMeta(NamedTuple):
    """Shape and dtype of a whole tensor, however many ranks share it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Size of the data."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The layout of a backend's state over ranks, kept in the checkpoint. A run resumes bitwise on the same
    layout."""

    backend: str
    """"local", "fsdp2", "deepspeed"."""
    mesh: Mapping[str, int]
    """Axis to size, such as {"dp": 2, "ring": 1, "tp": 2}; empty for one process."""
    stream: int = 0
    """The random stream of this rank if the checkpoint has none for it. Ranks that must draw the same numbers
    (those of one tp group) have the same stream; the first has 0."""


class Reader(Protocol):
    """One whole tensor of a checkpoint; only the requested slice is read.

    read() is the whole of it, read(slice(a, b)) rows, read(slice(None), slice(a, b)) columns: on the host, in
    `dtype`, no slice with a step.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __call__(self, *index: slice) -> Tensor: ...


class TensorParts(Protocol):
    """The live state of a backend."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """All ranks of the backend; its objects collectives must work. None: this process alone, whatever
        process groups there are."""
        ...

    def tensors(self) -> Mapping[str, TensorMeta]:
        """All names, the same in the same order on every rank. A backend that was made with total_steps = 0
        leaves the optimizer out; loading then ignores that of the checkpoint."""
        ...

    def whole(self, name: str, *, owner: int) -> Tensor | None:
        """Collective: the whole tensor on rank `owner` of the group, None on the others. Every rank calls it
        once for each name, in one order. It may be on any device, and may be live."""
        ...

    def fill(self, name: str, read: Reader) -> None:
        """Copy this rank's part of the tensor in. No collective: every rank fills at its own pace."""
        ...


class LiveTensors:
    """The state of one process that has all of it: live tensors by name."""

    group: dist.ProcessGroup | None = None

    def __init__(self, live: Mapping[str, Tensor]) -> None:
        self._live = live

    def tensors(self) -> Mapping[str, TensorMeta]:
        """See TensorParts."""
        return {name: TensorMeta(tuple(t.shape), t.dtype) for name, t in self._live.items()}

    def whole(self, name: str, *, owner: int) -> Tensor | None:
        """See TensorParts."""
        return self._live[name].detach()

    @torch.no_grad()
    def fill(self, name: str, read: Reader) -> None:
        """See TensorParts."""
        self._live[name].copy_(read())


def read_flat(read: Reader, start: int, stop: int) -> Tensor:
    """Read elements start:stop of the flattened whole tensor, [stop - start]; only the rows that hold
    them are read."""
    if len(read.shape) == 0:
        return read().reshape(-1)[start:stop]
    row = torch.Size(read.shape[1:]).numel()
    if row == 0 or start == stop:
        return torch.empty(0, dtype=read.dtype)
    first = start // row
    rows = read(slice(first, -(-stop // row)))
    return rows.reshape(-1)[start - first * row : stop - first * row]


def model_tensors(module: nn.Module, *, trained_only: bool) -> dict[str, Tensor]:
    """The live weights by name, each storage once: tied weights under their first name."""
    named = dict(module.named_parameters())
    if trained_only:
        return {name: p.detach() for name, p in named.items() if p.requires_grad}
    persistent = module.state_dict().keys()
    buffers = {name: b for name, b in module.named_buffers() if name in persistent}
    return {name: t.detach() for name, t in (named | buffers).items()}


def train_progress(
    config: TrainConfig, *, steps_done: int, total_steps: int, dtype: torch.dtype, lora: bool = False
) -> dict[str, Any]:
    """The `progress` of every backend's checkpoints. dtype: the compute dtype."""
    return {
        "step": steps_done,
        "total_steps": total_steps,
        "schedule": config.schedule,
        "lr_next": lr_at(steps_done, config=config, total_steps=total_steps),
        "optimizer": config.optimizer,
        "lora": lora,
        "dtype": str(dtype).removeprefix("torch."),
    }
