"""state.json: which file holds which tensor of a saved train state, and which tensor of it a run needs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lockstep.common_errors import damaged, other_tensors
from lockstep.errors import CheckpointError
from lockstep.observe.tensor_file import DTYPES, NAMES
from lockstep.train.state.files import (
    MASTER,
    MODEL,
    STATE_DTYPES,
    FileRecord,
    TensorMeta,
    check_record,
    is_count,
    read_json,
    read_record,
)

FORMAT = "lockstep-train-state"
VERSION = 2
STATE = "state.json"
_V1_FILES = {"model.safetensors", "optimizer.safetensors", "rng.safetensors"}
_FILE = re.compile(r"(model|optimizer|rng)(-\d{5,}-of-\d{5,})?\.safetensors")
_MAX_RANKS = 1 << 20


def rank_file(stem: str, suffix: str, *, rank: int, size: int) -> str:
    """Name of a file that one of `size` ranks writes.

    Example:
        >>> rank_file("model", "safetensors", rank=1, size=4)
        'model-00001-of-00004.safetensors'
        >>> rank_file("model", "safetensors", rank=0, size=1)
        'model.safetensors'
    """
    return f"{stem}.{suffix}" if size == 1 else f"{stem}-{rank:05d}-of-{size:05d}.{suffix}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StateIndex:
    """A saved state, as its JSON files describe it."""

    directory: Path
    progress: dict[str, Any]
    backend: str
    mesh: dict[str, int]
    world_size: int
    files: dict[str, FileRecord]
    tensors: dict[str, str] | None
    """Tensor to file; None: a checkpoint of version 1, which has no such list."""

    def rng_file(self, rank: int) -> Path:
        """The file with a rank's random number generators."""
        return self.directory / rank_file("rng", "safetensors", rank=rank, size=self.world_size)


class Stored(NamedTuple):
    """A tensor in a file."""

    file: str
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def read_index(directory: Path) -> StateIndex:
    """Read state.json and, for several ranks, each rank's list of files.

    Raises:
        CheckpointError: one of them is missing, damaged, of another save or of a later version.
    """
    path = directory / STATE
    state = read_json(path)
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(
            f"wrong-kind-of-file: {path}: field 'format' is not {FORMAT!r}; this is not a train state"
        )
    version = state.get("version")
    if not is_count(version) or version not in (1, VERSION):
        raise CheckpointError(
            f"version-differs: {path}: field 'version' is {version!r}, but this Lockstep reads 1 and "
            f"{VERSION}; use the version of Lockstep that wrote it ({state.get('versions')})"
        )
    if not isinstance(state.get("progress"), dict):
        raise CheckpointError(f"missing-field: {path}: field 'progress' is missing")
    if version == 1:
        state |= {"backend": "local", "mesh": {}, "world_size": 1}
    size, mesh, backend = state.get("world_size"), state.get("mesh"), state.get("backend")
    if not is_count(size) or not 1 <= size <= _MAX_RANKS:
        raise CheckpointError(
            f"wrong-field: {path}: field 'world_size' is {size!r}, not in [1, {_MAX_RANKS}]"
        )
    if not isinstance(mesh, dict) or not all(is_count(length) for length in mesh.values()):
        raise CheckpointError(f"wrong-field: {path}: field 'mesh' is {mesh!r}, which is not a mesh")
    if not isinstance(backend, str):
        raise CheckpointError(f"wrong-field: {path}: field 'backend' is {backend!r}, not a string")
    files = _files(path, state)
    for rank in range(1, size):
        files |= _files_of_rank(directory, state, rank)
    if version == 1 and set(files) != _V1_FILES:
        raise CheckpointError(f"wrong-field: {path}: field 'files' must list exactly {sorted(_V1_FILES)}")
    for rank in range(size):
        if (name := rank_file("rng", "safetensors", rank=rank, size=size)) not in files:
            raise CheckpointError(f"wrong-field: {path}: field 'files' lacks {name!r}")
    return StateIndex(
        directory=directory,
        progress=state["progress"],
        backend=backend,
        mesh=mesh,
        world_size=size,
        files=files,
        tensors=None if version == 1 else _tensors(path, state, files),
    )


def _files(path: Path, state: Mapping[str, Any]) -> dict[str, FileRecord]:
    files = state.get("files")
    if not isinstance(files, dict):
        raise CheckpointError(f"missing-field: {path}: field 'files' is missing")
    for name in files:
        if _FILE.fullmatch(name) is None:
            raise CheckpointError(
                f"wrong-field: {path}: field 'files' names {name!r}, which is not a file of a train state"
            )
    return {name: read_record(path, name, record) for name, record in files.items()}


def _files_of_rank(directory: Path, state: Mapping[str, Any], rank: int) -> dict[str, FileRecord]:
    """Read a rank's own list of files: it hashes them itself, and may finish later than the others."""
    path = directory / rank_file("files", "json", rank=rank, size=state["world_size"])
    value = read_json(path)
    if not isinstance(value, dict):
        raise CheckpointError(f"damaged-file: {path} holds no list of files; it is damaged")
    if value.get("save_id") != state.get("save_id"):
        raise CheckpointError(
            f"mixed-files: {path} belongs to another save ({value.get('save_id')!r}) than {STATE} "
            f"({state.get('save_id')!r}): files of two checkpoints are mixed"
        )
    return _files(path, value)


def _tensors(path: Path, state: Mapping[str, Any], files: Mapping[str, FileRecord]) -> dict[str, str]:
    tensors = state.get("tensors")
    if not isinstance(tensors, dict):
        raise CheckpointError(f"missing-field: {path}: field 'tensors' is missing")
    for name, file in tensors.items():
        if not isinstance(file, str) or file not in files:
            raise CheckpointError(
                f"wrong-field: {path}: field 'tensors.{name}' is {file!r}, which is not in 'files'"
            )
    return tensors


class StoredTensors:
    """The tensors of a saved state: headers are read on construction, data on request. A context manager,
    which keeps the files open.

    Raises:
        CheckpointError: a file is not readable, or its header is not what state.json says.
    """

    def __init__(self, index: StateIndex) -> None:
        self.index = index
        self._open: dict[str, Any] = {}
        self._files = contextlib.ExitStack()
        self.stored: dict[str, Stored] = {}
        for file in index.files:
            if not file.startswith("rng"):
                self._scan(file)
        if index.tensors is not None:
            self._compare(index.tensors)

    def _scan(self, file: str) -> None:
        path = self.index.directory / file
        check_record(path, self.index.files[file], contents=False)  # safe_open would wait for a fifo
        prefix = MODEL if file.startswith("model") else ""
        try:
            opened = self._open[file] = self._files.enter_context(safe_open(path, "pt"))
            for key in opened.keys():  # noqa: SIM118 (safe_open is no mapping)
                part = opened.get_slice(key)
                dtype, shape = str(part.get_dtype()), tuple(part.get_shape())
                if dtype not in STATE_DTYPES:
                    raise CheckpointError(
                        f"wrong-type: {path}: tensor {key!r} is {dtype}, which a train state cannot store"
                    )
                name = prefix + key
                if name in self.stored:
                    raise CheckpointError(
                        f"duplicate: {path}: tensor {key!r} is in {self.stored[name].file} as well"
                    )
                self.stored[name] = Stored(file, key, shape, DTYPES[dtype])
        except (SafetensorError, OSError) as error:
            self._files.close()
            raise damaged(CheckpointError, path, f"safetensors cannot read it: {error}") from error

    def _compare(self, tensors: Mapping[str, str]) -> None:
        state = self.index.directory / STATE
        for name, file in tensors.items():
            if name not in self.stored or self.stored[name].file != file:
                raise CheckpointError(
                    f"wrong-weights: {self.index.directory / file}: tensor {name.removeprefix(MODEL)!r} is "
                    f"missing, although {state} lists it"
                )
        for name, stored in self.stored.items():
            if name not in tensors:
                raise CheckpointError(
                    f"wrong-weights: {self.index.directory / stored.file}: tensor {stored.key!r} is not in "
                    f"{state}"
                )

    def __enter__(self) -> StoredTensors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def resolve(self, needed: Mapping[str, TensorMeta], *, optimizer: bool) -> dict[str, Stored]:
        """Find the stored tensor from which each needed tensor is read.

        Mostly it is the tensor of the same name. A weight of another compute dtype comes from its master; a
        float32 weight is its own master, so that either may be read as the other.

        Args:
            optimizer: False: the run has only weights, and anything else in the checkpoint is ignored.

        Raises:
            CheckpointError: a tensor is missing, of another shape or dtype, or not known to the run.
        """
        sources: dict[str, Stored] = {}
        missing = []
        for name, meta in needed.items():
            source = self._source(name, meta)
            if source is None:
                missing.append(name)
            else:
                self._check(name, meta, source)
                sources[name] = source
        extra = [
            name
            for name in self.stored
            if name not in needed
            and (optimizer or name.startswith(MODEL))
            and not self._is_weight(name, needed)
        ]
        if missing or extra:
            what = f"{self.index.directory} belongs to another model, optimizer or adapter"
            raise other_tensors(CheckpointError, what, missing, extra, code="other-model")
        return sources

    def _source(self, name: str, meta: TensorMeta) -> Stored | None:
        direct = self.stored.get(name)
        if direct is not None and direct.dtype == meta.dtype:
            return direct
        if name.startswith((MODEL, MASTER)):
            bare = name.removeprefix(MODEL).removeprefix(MASTER)
            for other in (self.stored.get(MASTER + bare), self.stored.get(MODEL + bare)):
                if other is not None and other.dtype == torch.float32:
                    return other
        return direct

    def _check(self, name: str, meta: TensorMeta, source: Stored) -> None:
        """Check the shape, and the dtype unless a conversion from or to a master explains the difference."""
        converted = name.startswith((MODEL, MASTER)) and source.dtype == torch.float32
        if source.shape == meta.shape and (source.dtype == meta.dtype or converted):
            return
        raise CheckpointError(
            f"wrong-shape: {self.index.directory / source.file}: tensor {source.key!r} is "
            f"{NAMES[source.dtype]} {list(source.shape)}, but the run has {NAMES[meta.dtype]} "
            f"{list(meta.shape)}"
        )

    def _is_weight(self, name: str, needed: Mapping[str, TensorMeta]) -> bool:
        """Return whether a master is a float32 weight in this run."""
        weight = needed.get(MODEL + name.removeprefix(MASTER)) if name.startswith(MASTER) else None
        return weight is not None and weight.dtype == torch.float32

    def weights(self) -> dict[str, StoredReader]:
        """All weights by their Hugging Face names, as they are stored."""
        return {
            stored.key: self.reader(stored, TensorMeta(stored.shape, stored.dtype))
            for name, stored in self.stored.items()
            if name.startswith(MODEL)
        }

    def reader(self, source: Stored, meta: TensorMeta) -> StoredReader:
        """A reader of slices of one tensor, in the dtype that the run has."""
        return StoredReader(self._open[source.file], source.key, meta)


class StoredReader:
    """A `lockstep.train.state.files.Reader` of a tensor in a file."""

    def __init__(self, opened: Any, key: str, meta: TensorMeta) -> None:
        self._opened, self._key = opened, key
        self.shape, self.dtype = meta

    def __call__(self, *index: slice) -> Tensor:
        ranges = [part.indices(length) for part, length in zip(index, self.shape, strict=False)]
        assert len(index) <= len(self.shape) and all(step == 1 for _, _, step in ranges), index
        lengths = [max(0, stop - start) for start, stop, _ in ranges]
        if 0 in lengths or 0 in self.shape:
            return torch.empty([*lengths, *self.shape[len(lengths) :]], dtype=self.dtype)
        if all(length == whole for length, whole in zip(lengths, self.shape, strict=False)):
            values: Tensor = self._opened.get_tensor(self._key)
        else:
            parts = tuple(slice(start, stop) for start, stop, _ in ranges)
            values = self._opened.get_slice(self._key)[parts]
        return values.to(self.dtype)
